"""Seeds for random draws. A seed depends on the purpose of the draw, never on earlier draws."""

import hashlib


def derive_seed(*key: int | str) -> int:
    """Return a 63-bit seed from ``key``. Unlike hash(), it is the same on every machine and in every Python version."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "big") >> 1
