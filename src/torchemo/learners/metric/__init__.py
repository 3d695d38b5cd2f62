"""Learners without an inner loop: features, and a classifier made of the support set."""
