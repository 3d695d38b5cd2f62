"""Studies of the paper, benchmarks, demo and machine check; nothing else imports it."""
