"""Tries the code on this machine and adapters in programs; plants faults. Only preflight.py and sweep.py import it."""
