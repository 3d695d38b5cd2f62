"""What a memory of 10^5 slots and more needs; loaded only when asked for."""
