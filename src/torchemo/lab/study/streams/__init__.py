"""Studies of tasks that come back: many users at a time, each with a memory of their own."""
