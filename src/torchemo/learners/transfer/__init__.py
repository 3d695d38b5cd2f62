"""Learners that meta-learn what a pretrained trunk needs, and leave its kernels as they are."""
