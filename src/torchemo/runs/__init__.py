"""The folder of a run: checkpoints, events, environment, lock and signals."""
