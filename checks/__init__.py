"""Tries the project's own code on this machine. Only preflight.py and sweep.py import it."""
