"""Tries the project's own code on this machine, and its adapters in other programs; plants faults. Only preflight.py and sweep.py import it."""
