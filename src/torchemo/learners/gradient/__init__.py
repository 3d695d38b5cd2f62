"""Learners with an inner loop, one paper in one file."""
