"""A large memory filled offline, from the tasks or the slots of many runs."""
