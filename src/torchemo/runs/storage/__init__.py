"""Bytes of a run on disk: durable writes, checkpoints and their history."""
