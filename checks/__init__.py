"""Tests the code on this machine, tests adapters in other programs, and plants faults. Only preflight.py and sweep.py
import it."""
