"""The tables T1 to T9 and the figures F1 to F7 of the paper, each as a study."""
