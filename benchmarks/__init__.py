"""Compares speed and memory with other programs. Nothing imports this room."""
