"""Every random draw of a run is a function of a key like (seed, "rollout", step, prompt), not of earlier draws."""

from __future__ import annotations

import hashlib


def derive(*key: int | str) -> int:
    """A 63-bit seed from ``key``: the same on every machine and Python, unlike hash()."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
