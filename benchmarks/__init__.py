"""Compares the speed and memory use of this code with those of other programs. Nothing imports this room."""
