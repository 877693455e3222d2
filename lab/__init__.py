"""Reads and compares the results of runs: records, comparisons, curves, completions. Needs no torch."""
