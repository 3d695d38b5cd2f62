"""Episodic Memory Optimization for few-shot meta-learning."""
