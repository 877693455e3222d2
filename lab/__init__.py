"""What is known after a run: records, comparisons, curves. Needs no torch."""
