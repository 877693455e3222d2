"""Reads what runs have written: records, comparisons, curves, completions. Needs no torch."""
