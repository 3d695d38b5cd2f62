"""Types, errors and pure helpers that every part shares."""
