"""What is known after a run. Needs no torch."""
