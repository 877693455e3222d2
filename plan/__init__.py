"""Memory, seconds and layouts from the configuration alone, and what this machine lacks (doctor). Needs no torch."""
