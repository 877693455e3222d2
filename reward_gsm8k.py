"""Rewards for GSM8K: strings in, floats out. Model text is searched and compared, never evaluated. Imports no package.

strict is ours; the other six compute what other projects compute, faults included, so that numbers can be compared:
verl_strict, verl_flexible (verl's gsm8k score), openai (grade-school-math), lm_eval_strict, lm_eval_flexible
(lm-evaluation-harness, gsm8k version 3) and base_acc (MindSpeed-RL). Every search takes time linear in the response.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from decimal import Decimal

METHODS = ("strict", "verl_strict", "verl_flexible", "openai", "lm_eval_strict", "lm_eval_flexible", "base_acc")

# A response ends at the first of these, whether or not the tokenizer's decoding left it in the text.
EOS_TEXTS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|end_of_text|>", "<eos>")

# ASCII digits only: [0-9] and not \d. Thousands commas are all there and in place, or there are none.
NUMBER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
MARKER = re.compile(r"(?<!#)####(?!#)")
ANSWER = re.compile(rf"[ \t*_`]*(?:([-+]?)(?:\\?\$[ \t]*)?|\\?\$[ \t]*([-+]))({NUMBER})")
HEADING = re.compile(r"[ \t*_`]*(?:[^\W\d_]|$)")  # "#### Step 1": a letter first, or nothing at all
AFTER_ANSWER = re.compile(r"(?![A-Za-z])[A-Za-z \t.,;:'\"()/%*_`$-]*")  # a unit, closing marks; nothing attached (18k)
OTHER_VALUE = re.compile(
    r"\b(?:or|and|to|plus|minus|point|k|(?:dozen|hundred|thousand|million|billion|trillion)s?)\b", re.IGNORECASE
)

FIELD_MARKED = re.compile(r"#### (-?[0-9.,]+)")
VERL_NUMBER = re.compile(r"-?[0-9.,]+")
VERL_CHARACTERS = 300  # verl looks at no more than the end of a response
LM_EVAL_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")

BOXED = "\\boxed{"
BOX_FORM = "<think> .. </think> <answer> \\boxed{N} </answer>"
BOXED_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
# Everything the peer's grader drops from around a number before it compares.
BOXED_NOISE = re.compile(
    rf",?\\! *|\\(?:left|right|[\\,;: ])|\^ *(?:\{{\\circ\}}|\\circ)|\\?[$%]|\\(?:text|math)(?:bf|it|rm|sf|tt)?(?=\{{)|"
    rf"(?:{BOXED_UNITS})(?:es)?s?(?: *\^[0-9]+)?"
)


def gold_answer(answer_field: str) -> str:
    """The text after '#### ' in a data set's answer field, commas removed. Raises ValueError when there is none."""
    _, marker, final = answer_field.rpartition("#### ")
    final = final.replace(",", "").strip()
    if not marker or not final:
        raise ValueError(f"answer: found {_short(answer_field)}; needed: '#### ' and the final number")
    return final


def score(response: str, gold: str, method: str = "strict") -> float:
    """1.0 if the response's answer, as the method finds and compares it, is the gold answer, else 0.0.

    gold is what gold_answer returns. Raises ValueError for an unknown method, and under strict for a gold answer that
    is not one number: comparing with it would score every response 0.
    """
    found = extract(response, method)
    if method == "strict":
        if (number := _answer_number(gold)) is None:
            raise ValueError(f"gold: found {_short(gold)}; needed: one number")
        return float(found is not None and Decimal(found) == Decimal(number))
    if found is None:
        return 0.0
    if method in ("lm_eval_strict", "lm_eval_flexible"):
        return float(_lm_eval_text(found) == _lm_eval_text(gold))
    if method == "base_acc":
        return float(_boxed_value(found) == _boxed_value(gold))
    return float(found == gold)


def in_form(answer_field: str, method: str, boxed: bool) -> str:
    """A data set's worked answer as a response in the form that ``method`` reads, with the field's own final number.

    verl_flexible reads no thousands commas; base_acc, if the prompt asks for it (``boxed``), reads BOX_FORM alone.
    """
    gold = gold_answer(answer_field)
    worked = answer_field.rpartition("#### ")[0]
    if method == "verl_flexible":
        return f"{worked}#### {gold}"
    if method == "base_acc" and boxed:
        return f"<think>{worked}</think> <answer>{BOXED}{gold}}}</answer>"
    return answer_field


def score_all(responses: list[list[str]], golds: list[str], method: str = "strict") -> list[list[float]]:
    """Each response's score, one list a question; golds[i] belongs to responses[i]."""
    if len(responses) != len(golds):
        raise ValueError(f"responses: found {len(responses)} lists for {len(golds)} gold answers; needed: one for each")
    return [[score(text, gold, method) for text in texts] for texts, gold in zip(responses, golds, strict=True)]


def parsable(response: str, method: str = "strict") -> bool:
    """Whether the method finds an answer at all, right or wrong."""
    return extract(response, method) is not None


def extract(response: str, method: str = "strict") -> str | None:
    """The answer text that the method finds in a response, or None. Raises ValueError for an unknown method."""
    if method == "strict":
        return _strict_answer(response)
    if method == "verl_strict":
        last = _last(FIELD_MARKED.finditer(response[-VERL_CHARACTERS:]))
        return None if last is None else last[1].replace(",", "")
    if method == "verl_flexible":  # commas stay in, so "1,800" is not 1800
        last = _last(match for match in VERL_NUMBER.finditer(response[-VERL_CHARACTERS:]) if match[0] != ".")
        return None if last is None else last[0]
    if method == "openai":
        first = FIELD_MARKED.search(response)
        return None if first is None else first[1].replace(",", "")
    if method == "lm_eval_strict":
        first = FIELD_MARKED.search(response)
        return None if first is None else first[1]
    if method == "lm_eval_flexible":
        last = _last(LM_EVAL_NUMBER.finditer(response))
        return None if last is None else last[0]
    if method == "base_acc":
        return _boxed_answer(response)
    raise ValueError(f"method: found {method!r}; needed: one of {', '.join(METHODS)}")


# --------------------------------------------------------------------------------------------------------------- strict
def _strict_answer(response: str) -> str | None:
    """The one number that follows every '####' before the first end-of-text mark, or None.

    Accepted after the marker, on its line: spaces, bold or code marks, '$', a sign, the number, and words without a
    digit, such as a unit. A heading (a letter or nothing follows '####') is not an answer and is passed over. Anything
    else makes the whole response unreadable: two numbers on one line, two different answers, a word that changes the
    value (or, and, thousand ...), letters touching the number (18k, 18kg), misplaced thousands commas, and digits,
    signs or letters outside ASCII.
    """
    ends = [end for end in (response.find(text) for text in EOS_TEXTS) if end >= 0]
    answer = None
    for line in response[: min(ends, default=None)].splitlines():
        for segment in MARKER.split(line)[1:]:
            if HEADING.match(segment):
                continue
            number = _answer_number(segment)
            if number is None or (answer is not None and Decimal(number) != Decimal(answer)):
                return None
            answer = number
    return answer


def _answer_number(segment: str) -> str | None:
    """The number in the text after a marker, in a form that Decimal reads; None unless it is the only one."""
    match = ANSWER.match(segment)
    if match is None:
        return None
    rest = segment[match.end() :]
    if not AFTER_ANSWER.fullmatch(rest) or OTHER_VALUE.search(rest):
        return None
    return (match[1] or match[2] or "") + match[3].replace(",", "")


# ---------------------------------------------------------------------------------------------------------------- peers
def _lm_eval_text(text: str) -> str:
    """What lm-evaluation-harness compares: without commas, '$', anything up to a last '#### ', and one final dot."""
    return re.sub(r"\.$", "", text.replace(",", "").replace("$", "").rpartition("#### ")[2]).lower()


def _boxed_answer(response: str) -> str | None:
    """The content of the last \\boxed{} of a text <think> .. </think> .. <answer> .. \\boxed{ .. } .. </answer>.

    Taking each part's first place after the part before decides as the peer's regular expression, in linear time.
    """
    position = len("<think>")
    if not response.startswith("<think>") or not response.endswith("</answer>"):
        return None
    for part in ("</think>", "<answer>", BOXED, "}"):
        if (found := response.find(part, position)) < 0:
            return None
        position = found + len(part)
    start, depth = response.rfind(BOXED) + len(BOXED), 0
    for brace in re.compile("[{}]").finditer(response, start):
        depth += 1 if brace[0] == "{" else -1
        if depth < 0:
            return response[start : brace.start()].strip()
    return None


def _boxed_value(text: str) -> float | str:
    """What base_acc compares: the number if the text is one after the peer's clean-up, else the cleaned text.

    The peer then also lets a symbolic parser decide whether two texts are equal, but never between a whole number, the
    only kind of gold answer in GSM8K, and a text that is not one: nothing is lost by never parsing. Only in contrived
    LaTeX around a number may the clean-ups differ.
    """
    name, equals, value = text.partition("=")
    if equals and len(name) <= 2 and "=" not in value:  # x = 18
        text = value
    text = text.split("\\text{ ")[0].replace(" or ", ",").replace(" and ", ",").replace("\n", "")
    text = re.sub("[{} ]", "", BOXED_NOISE.sub("", text))
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]":
        text = text[1:-1]
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text).lower()
    try:
        number = float(text)
    except ValueError:
        return text
    return float(round(number)) if abs(number) < 2**53 and abs(number - round(number)) <= 1e-7 else number


# -------------------------------------------------------------------------------------------------------- small helpers
def _last(matches: Iterable[re.Match[str]]) -> re.Match[str] | None:
    return next(iter(deque(matches, maxlen=1)), None)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else "..." + text[-57:])
