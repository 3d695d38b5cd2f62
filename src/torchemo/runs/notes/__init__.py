"""What is kept beside a run for people to look at; nothing depends on it."""
