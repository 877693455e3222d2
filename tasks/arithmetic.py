"""Generated arithmetic in the form of GSM8K.

The unordered pair of a question's first two operands determines whether the question is for training or held out. No
operation in the training data uses a held-out pair, not even a wrong operation in a teacher's answer.
"""

import functools
import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass

from facts.exits import InputError
from facts.seeds import derive_seed

NAMES = ["Tom", "Mia", "Ben", "Eva", "Sam", "Lily", "Max", "Anna"]
ITEMS = ["apples", "pens", "books", "coins", "eggs", "cards", "shells", "stamps"]
TEMPLATES = {
    "+": [
        "{name} has {x} {items} and finds {y} more. How many {items} does {name} have now?",
        "There are {x} {items} in a box. {name} puts in {y} more. How many {items} are in the box?",
        "{name} buys {x} {items} on Monday and {y} {items} on Tuesday. How many {items} did {name} buy?",
    ],
    "-": [
        "{name} has {x} {items} and gives away {y}. How many {items} are left?",
        "There are {x} {items} in a box. {name} takes out {y}. How many {items} stay in the box?",
        "{name} had {x} {items} and lost {y} of them. How many {items} does {name} have now?",
    ],
}
# Sentences for the later operations of a question, which continue from the result so far. The question ends with ASKED.
LATER = {
    "+": ["Then {y} more come.", "A friend brings {y}.", "Later {name} picks up {y}.", "On Friday {name} wins {y}."],
    "-": ["Then {y} get lost.", "A friend borrows {y}.", "Later {name} sells {y}.", "On Friday {name} drops {y}."],
}
ASKED = "How many {items} are there now?"
OPERATIONS = {"+": operator.add, "-": operator.sub}
LOWEST_OPERAND = 1
MOST_DRAWS = 10_000  # if that many draws give nothing usable, we assume that nothing is left to find

Line = tuple[int, str, int, int]  # one operation of an answer and its result, such as (37, "-", 25, 12)


@dataclass(frozen=True)
class Problem:
    question: str
    lines: tuple[Line, ...]  # the correct lines; each begins with the result of the line before it


def held_out(x: int, y: int) -> bool:
    """Return whether the unordered pair {x, y} belongs to the test set.

    About one pair in eight does: 151 of the 1,225 pairs of numbers from 1 to 49. A pair is held out for both addition
    and subtraction. Otherwise a teacher that adds instead of subtracting would teach the sum of a held-out pair.
    """
    return (min(x, y) * 7919 + max(x, y) * 104729) % 1009 % 8 == 0


@functools.lru_cache(maxsize=2)  # a run reads its training and its held-out questions twice
def examples(
    num: int, heldout: bool, seed: int, low: int, high: int, most_operations: int = 1
) -> tuple[tuple[str, str], ...]:
    """Return ``num`` different pairs (question, worked answer) with operands from ``low`` to ``high``.

    The questions are test questions if ``heldout`` is true, and otherwise training questions. Each has at most
    ``most_operations`` operations. Raises InputError if the range of operands has no training pair, no test pair, or
    fewer than ``num`` questions.
    """
    for part in (True, False):
        draw_lines(random.Random(0), low, high, part)  # raises InputError if there is no pair
    split = "test" if heldout else "train"
    wordings = 3 * len(NAMES) * len(ITEMS)  # three templates
    of_pairs = (
        (2 if x == y else 3) * wordings  # x + y, y + x, and larger - smaller
        for x in range(low, high + 1)
        for y in range(x, high + 1)
        if held_out(x, y) == heldout
    )
    available = sum(itertools.islice(of_pairs, 1 + num // wordings))  # this many pairs are enough
    short = f"data.num_{split}: found {num}, but operands {low} to {high} give only {{}} different questions; lower it"
    if available < num and most_operations == 1:
        raise InputError(short.format(available))
    rng = random.Random(derive_seed(seed, "arithmetic", split))
    pairs: dict[str, str] = {}
    repeats = 0
    while len(pairs) < num:
        made = problem(rng, low, high, heldout, most_operations)
        repeats = repeats + 1 if made.question in pairs else 0
        if repeats > MOST_DRAWS and most_operations > 1:  # for one operation, the number is known exactly
            raise InputError(short.format(f"about {len(pairs)}"))
        pairs[made.question] = solution(made.lines)  # a repeated question has the same answer and changes nothing
    return tuple(pairs.items())


def draw_lines(rng: random.Random, low: int, high: int, heldout: bool, most_operations: int = 1) -> tuple[Line, ...]:
    """Draw the operations of a problem. Raises InputError if 10,000 draws give no valid problem.

    A held-out problem begins with a held-out pair. A training problem has no held-out pair in any operation. No result
    is negative or larger than `largest(high)`.
    """
    num = rng.randint(1, most_operations) if most_operations > 1 else 1
    for _ in range(MOST_DRAWS):
        sign, x, y = rng.choice(["+", "-"]), rng.randint(low, high), rng.randint(low, high)
        if held_out(x, y) != heldout:
            continue
        lines = [line(sign, x, y)]
        while len(lines) < num:
            sign, x, y = rng.choice(["+", "-"]), lines[-1][3], rng.randint(low, high)
            if (y > x if sign == "-" else x + y > largest(high)) or (not heldout and held_out(x, y)):
                break
            lines.append(line(sign, x, y))
        else:
            return tuple(lines)
    raise InputError(
        f"data.operand_high: {low} to {high} has no {'test' if heldout else 'training'} pair; use a wider range"
    )


def largest(high: int) -> int:
    """Return the largest possible result of a problem with operands of at most ``high``."""
    return max(99, 2 * high)


def line(sign: str, x: int, y: int) -> Line:
    """Return the Line for x + y, or, if ``sign`` is "-", for the larger number minus the smaller one."""
    x, y = (max(x, y), min(x, y)) if sign == "-" else (x, y)
    return x, sign, y, OPERATIONS[sign](x, y)


def problem(rng: random.Random, low: int, high: int, heldout: bool, most_operations: int = 1) -> Problem:
    """Draw a word problem with one to ``most_operations`` operations from ``rng``."""
    first, *later = lines = draw_lines(rng, low, high, heldout, most_operations)
    text, name, items = rng.choice(TEMPLATES[first[1]]), rng.choice(NAMES), rng.choice(ITEMS)
    if later:
        sentences = [rng.choice(LATER[sign]).replace("{y}", str(y)) for _, sign, y, _ in later]
        text = " ".join([text[: text.index(" How many")], *sentences, ASKED])
    return Problem(text.format(name=name, items=items, x=first[0], y=first[2]), lines)


def solution(lines: Sequence[Line]) -> str:
    """Return the worked answer that consists of ``lines``, such as `37 - 25 = 12\\n12 + 4 = 16\\n#### 16`."""
    return "\n".join([*(f"{x} {sign} {y} = {result}" for x, sign, y, result in lines), f"#### {lines[-1][3]}"])


def annotated(answer: str) -> str:
    """Rewrite a worked answer as calls to GSM8K's calculator with their results, such as `<<37-25=12>>\\n#### 12`."""
    lines, result = answer.splitlines()[:-1], 0
    for index, line in enumerate(lines):
        x, sign, y, *_ = line.split()
        x = str(result) if index else x  # a later operation continues from the calculator's result
        result = OPERATIONS[sign](int(x), int(y))
        lines[index] = f"<<{x}{sign}{y}={result}>>"
    return "\n".join([*lines, f"#### {result}"])
