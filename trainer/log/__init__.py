"""What a run prints, writes and draws."""
