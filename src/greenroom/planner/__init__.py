"""What was, and what would have been: the journal replayed, other settings tried on it, and what follows from that."""
