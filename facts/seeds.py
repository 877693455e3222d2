"""Seeds of random draws: functions of what is drawn, never of what was drawn before."""

import hashlib


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from ``key``: the same on every machine and Python, unlike hash()."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1
