"""What leaves a run: adapted classifiers for other programs, whole runs for other people."""
