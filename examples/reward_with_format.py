"""An example of your own reward: most of the score is for the right number, and a part is for the answer's form.

bash run_cpu.sh reward.function=examples/reward_with_format.py:score
"""

import re

LAST_LINE = re.compile(r"#### (-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")


def score(completion: str, gold: str, row: dict) -> dict[str, float]:
    """Return a score of 0.1 for an answer whose last line has the form '#### N', and 0.9 more if N is right.

    ``row`` has all columns of the question's row in its file, for example its difficulty. This example does not use it.
    In the result, "found" says whether there is an answer, and "correct" whether it is right. Accuracy counts correct
    answers. Other entries are parts of the score, whose means are logged, here as reward/part/form.
    """
    found = LAST_LINE.search(completion)
    is_right = found is not None and float(found[1].replace(",", "")) == float(gold)
    form = 0.1 if found else 0.0
    return {"score": form + 0.9 * is_right, "found": found is not None, "correct": is_right, "form": form}


def form(completion: str, gold: str, row: dict) -> tuple[float, bool, bool]:
    """Return a score of 1 for an answer in the form '#### N', whether N is right or wrong.

    A control run with this reward shows the effect of the form alone.
    """
    found = score(completion, gold, row)
    return float(found["found"]), bool(found["found"]), bool(found["correct"])
