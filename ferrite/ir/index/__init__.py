"""TODO front door."""
