"""A reward of one's own: the right number, and a part for the form of the answer.

python train_grpo.py configs/tiny_cpu.yaml reward.function=examples/reward_with_format.py:score
"""

import re

LAST_LINE = re.compile(r"#### (-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


def score(completion: str, gold: str, row: dict) -> dict[str, float]:
    """0.1 for an answer in the form '#### N' as the last line, and 0.9 more if N is right.

    ``row`` has all columns of the question's row in its file, for example its difficulty; here they are not used.
    found: whether there is an answer; correct: whether it is right, which accuracy counts. The other entries are parts:
    reward/part/form is logged.
    """
    found = LAST_LINE.search(completion)
    is_right = found is not None and float(found[1].replace(",", "")) == float(gold)
    form = 0.1 if found else 0.0
    return {"score": form + 0.9 * is_right, "found": found is not None, "correct": is_right, "form": form}


def form(completion: str, gold: str, row: dict) -> tuple[float, bool, bool]:
    """1 for an answer in that form, right or wrong: a control, which shows what the form alone gives."""
    found = score(completion, gold, row)
    return float(found["found"]), bool(found["found"]), bool(found["correct"])
