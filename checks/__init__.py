"""Tries the project's own code on this machine, and plants faults in it. Only preflight.py and sweep.py import it."""
