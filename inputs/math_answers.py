"""reward.method math: whether the last \\boxed{} of a completion is mathematically equal to the gold answer.

The package math-verify compares fractions, sets, intervals, units and expressions. It runs in the workers of
inputs/workers.py: an expression may take a computer algebra system for ever, and the time limit there ends it.
"""

import logging

from inputs.files import InputError
from reward_gsm8k import last_boxed

try:
    from math_verify import parse, verify
except ImportError as error:
    raise InputError(f"{error}; needed: pip install --no-deps -r requirements/cpu.txt") from None

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that its own limits of time are off
parse("\\boxed{\\frac{1}{2}}", parsing_timeout=None)  # the first call imports a parser, which may take seconds


def score(completion: str, gold: str, row: dict) -> tuple[float, bool, bool]:
    """(1.0 or 0.0, whether there is an answer, whether it is right)."""
    answer = last_boxed(completion)
    if answer is None:
        return 0.0, False, False
    if answer.strip() == gold.strip():
        return 1.0, True, True
    ours, right = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, gold))
    is_right = bool(verify(right, ours, timeout_seconds=None))
    return float(is_right), True, is_right
