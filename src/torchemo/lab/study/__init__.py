"""Studies: every table and figure of the paper as a grid of runs, with controls and paired statistics."""
