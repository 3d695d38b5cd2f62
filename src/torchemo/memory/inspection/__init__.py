"""What a memory holds, and what a recall was worth."""
