"""reward.method=math: checks whether the last \\boxed{} of a completion is mathematically equal to the gold answer.

The package math-verify compares fractions, sets, intervals, units and expressions. It runs in the worker processes of
tasks/scoring.py, which have a time limit, because a computer algebra system may run forever on an expression.
This file also accepts forms that math-verify does not read. It removes a full stop at the end of a box and the spaces
between groups of three digits (115\\,000). If the gold answer is a number, it removes the words around the only number
of an answer. It reads several boxes as a list if only `and`, `or`, commas or `x =` stand between them. docs/usage.md
lists the answers that math-verify itself reads wrongly.
"""

import logging
import re

from facts.exits import InputError
from reward_gsm8k import NUMBER, Box, boxes

try:
    from math_verify import parse, verify
except ImportError as error:
    raise InputError(f"{error}; install it: pip install --no-deps -r requirements/cpu.txt") from None

DIGITS = 2000  # digits of numerical comparisons; with math-verify's default of 15, factors below 1e-15 count as 0
SPACE = r"(?:\\[,;: ]|\{\\,\}|[ ~\u00a0\u2009\u202f])"
THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{SPACE}\d{{3}})+(?![\d/])")
DECIMAL = re.compile(r"(\d*)\.(\d+)")

LONGEST_GAP = 60  # largest number of characters between two boxes of a list
GAP = re.compile(
    r"(?:[\s$,;&]|\\[()\[\],;: ]|\\q?quad|and\b|or\b|\\(?:text|mathrm)\{\s*(?:and|or|,)\s*\}|"
    r"[A-Za-z](?:_\{?\w{1,3}\}?)?\s*=)*"
)

PLAIN_NUMBER = re.compile(rf"\$?[-+]?\\?\$?(?:{NUMBER})(?:\\?%)?\$?")
TEXT = re.compile(r"\\(?:text|textbf|mathrm)\s*\{([^{}]*)\}")
SENTENCE = re.compile(r"[A-Za-z][A-Za-z ,']*(?:\b(?:is|are|was|were|equals|costs|has|have)\b|:)")  # before a number
# A number and the words after it. The first word must have at least three letters, so xy and cm are not words.
NAMED = re.compile(rf"({PLAIN_NUMBER.pattern})(?:[ ~]+(\(?[A-Za-z]{{3,}}[A-Za-z ,.'()-]*))?")
OTHER_VALUE = re.compile(
    r"\b(?:or|and|to|plus|minus|times|point|factorial|squared|cubed|[b-z]|"
    r"hal(?:f|ves)|dozen|hundred|thousand|million|billion|trillion)s?\b",
    re.IGNORECASE,
)

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it would warn that its own time limits are off
parse("\\boxed{\\frac{1}{2}}", parsing_timeout=None)  # the first call imports a parser, which may take seconds


def score(completion: str, gold: str, row: dict) -> tuple[float, bool, bool]:
    """Return the score (1.0 or 0.0), whether the completion has an answer, and whether the answer is right."""
    answers = last_boxes(completion)
    if not answers:
        return 0.0, False, False
    right = cleaned(gold)
    answer = ", ".join(cleaned(text) for text in answers)
    if PLAIN_NUMBER.fullmatch(right):
        answer = number_in_words(answer)
    is_right = answer == right or equal(answer, right)
    if not is_right and DECIMAL.search(answer + right):  # 0.02 is not exact to 2,000 digits, but 2/100 is
        is_right = equal(exact(answer), exact(right))
    return float(is_right), True, is_right


def last_boxes(completion: str) -> list[str]:
    """Return the contents of the last \\boxed{} and of the earlier boxes in the same list, without duplicates."""
    listed: list[Box] = []  # the last box first
    for box in reversed(boxes(completion)):
        if listed:
            gap = completion[box.end : listed[-1].start]
            if box.end > listed[-1].start or len(gap) > LONGEST_GAP or not GAP.fullmatch(gap):
                break
        listed.append(box)
    return list(dict.fromkeys(box.content.strip() for box in reversed(listed)))


def cleaned(text: str) -> str:
    """Remove a full stop at the end of ``text``, and spaces between groups of three digits."""
    text = text.strip().removesuffix(".").strip()
    return THOUSANDS.sub(lambda number: re.sub(SPACE, "", number[0]), text)


def number_in_words(text: str) -> str:
    """Return the only number in a string such as `The answer is 18 apples`. Return any other string unchanged."""
    words = TEXT.sub(r" \1 ", text).strip()
    if sentence := SENTENCE.match(words):
        words = words[sentence.end() :].strip()
    named = NAMED.fullmatch(words.removesuffix("."))
    return text if named is None or OTHER_VALUE.search(named[2] or "") else named[1]


def exact(text: str) -> str:
    """Replace the decimal numbers in ``text`` with fractions."""
    return DECIMAL.sub(lambda number: rf"\frac{{{number[1]}{number[2]}}}{{1{'0' * len(number[2])}}}", text)


def equal(answer: str, right: str) -> bool:
    """Return whether math-verify considers the two LaTeX strings equal."""
    ours, theirs = (parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (answer, right))
    return bool(verify(theirs, ours, numeric_precision=DIGITS, timeout_seconds=None))
