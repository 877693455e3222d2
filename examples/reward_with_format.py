"""A reward of one's own: the right number, and a part for the form of the answer.

python train_grpo.py configs/tiny_cpu.yaml reward.function=examples/reward_with_format.py:score
"""

import re

LAST_LINE = re.compile(r"#### (-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


def score(completion: str, gold: str, row: dict) -> tuple[float, bool, bool]:
    """0.1 for an answer in the form '#### N' as the last line, and 0.9 more if N is right.

    ``row`` has all columns of the question's row in its file, for example its difficulty; here they are not used.
    Returns (score, whether an answer was found, whether it is right): accuracy counts the last one.
    """
    found = LAST_LINE.search(completion)
    if found is None:
        return 0.0, False, False
    is_right = float(found[1].replace(",", "")) == float(gold)
    return 0.1 + 0.9 * is_right, True, is_right


def form(completion: str, gold: str, row: dict) -> tuple[float, bool, bool]:
    """1 for an answer in that form, right or wrong: a control, which shows what the form alone gives."""
    _, has_form, is_right = score(completion, gold, row)
    return float(has_form), has_form, is_right
