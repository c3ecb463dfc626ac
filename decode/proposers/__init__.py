"""What proposes tokens: one file per system."""
