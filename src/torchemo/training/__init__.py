"""The outer loop: step, trainer, evaluation."""
