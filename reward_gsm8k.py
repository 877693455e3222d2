"""Scores a completion of GSM8K: strings in, a float out. A model's text is searched, never evaluated.

The method strict reads GSM8K's own form, the number after the last '####'. The other six methods give the same scores
as other projects, including their faults, so that results can be compared: verl_strict and verl_flexible (verl's gsm8k
score), openai (grade-school-math), lm_eval_strict and lm_eval_flexible (lm-evaluation-harness, gsm8k version 3),
base_acc (MindSpeed-RL). Every search takes linear time.
"""

import re
from decimal import Decimal
from typing import NamedTuple

# End-of-text marks. A response ends at the first of them, if the tokenizer's decoding left one in the text.
EOS_TEXTS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>", "<|end_of_text|>", "<eos>")

# [0-9] instead of \d allows only ASCII digits. Either all thousands commas are in the right place, or there are none.
NUMBER = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
# Between the marker and the number there may be spaces, bold or code marks, a sign, and a dollar sign.
MARKED = re.compile(rf"(?<!#)####[ \t*_`]*(?:\\?\$[ \t]*)?([-+]?)(?:\\?\$[ \t]*)?({NUMBER})")
ALONE = re.compile(r"(?![^\W_])[^\d\r\n]*(?=[\r\n]|$)")  # no letter follows directly, and no digit in the same line

FIELD_MARKED = re.compile(r"#### (-?[0-9.,]+)")
VERL_NUMBER = re.compile(r"(?!\.(?![0-9.,]))-?[0-9.,]+")  # a single dot is not a number
LM_EVAL_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
WHOLE, END = slice(None), slice(-300, None)  # verl searches only the last 300 characters
FIRST, LAST = 0, -1
SEARCHES = {  # method: pattern, part of the response to search, match to use, whether to remove its commas
    "verl_strict": (FIELD_MARKED, END, LAST, True),
    "verl_flexible": (VERL_NUMBER, END, LAST, False),  # so "1,800" is not 1800
    "openai": (FIELD_MARKED, WHOLE, FIRST, True),
    "lm_eval_strict": (FIELD_MARKED, WHOLE, FIRST, False),
    "lm_eval_flexible": (LM_EVAL_NUMBER, WHOLE, LAST, False),
}
METHODS = ("strict", *SEARCHES, "base_acc")
ANY_NUMBER = ("lm_eval_flexible", "verl_flexible")
READERS = {  # maps the marker of an answer form, as instructions name it, to the methods that read it
    "####": ("strict", "verl_strict", "openai", "lm_eval_strict", *ANY_NUMBER),
    "\\boxed": ("math", "base_acc", *ANY_NUMBER),
    "Answer:": ANY_NUMBER,
}

BOXED = "\\boxed{"
BOX_PARTS = re.compile(rf"(?P<boxed>\\boxed\s*)?\{{|\}}|\\boxed\s*(?P<number>[-+]?(?:{NUMBER}))")
BOX_FORM = "<think> .. </think> <answer> \\boxed{N} </answer>"
BOXED_UNITS = "degree|cm|centimeter|meter|mile|second|minute|hour|day|week|month|year|foot|feet|inch|yard"
# The text around a number that MindSpeed-RL's grader removes before it compares.
BOXED_NOISE = re.compile(
    rf",?\\! *|\\(?:left|right|[\\,;: ])|\^ *(?:\{{\\circ\}}|\\circ)|\\?[$%]|\\(?:text|math)(?:bf|it|rm|sf|tt)?(?=\{{)|"
    rf"(?:{BOXED_UNITS})(?:es)?s?(?: *\^[0-9]+)?"
)


def gold_answer(answer_field: str) -> str:
    """Return the text after the last '#### ' in a data set's answer field, without commas.

    Raises ValueError if there is no such text.
    """
    _, marker, final = answer_field.rpartition("#### ")
    final = final.replace(",", "").strip()
    if not marker or not final:
        raise ValueError(f"answer: found {answer_field[-60:]!r}; write '#### ' and the final number")
    return final


def score(response: str, gold: str, method: str = "strict") -> float:
    """Return 1.0 if the method finds the gold answer in the response, otherwise 0.0.

    ``gold`` is the result of gold_answer. Raises ValueError for an unknown method. The method strict also raises it if
    ``gold`` is not one number, because every response would then score 0.
    """
    found = extract(response, method)
    if method == "strict":
        number = _strict_answer(f"#### {gold}")
        if number is None:
            raise ValueError(f"gold: must be one number, not {gold[-60:]!r}")
        return float(found is not None and Decimal(found) == Decimal(number))
    compared = {"lm_eval_strict": _lm_eval_text, "lm_eval_flexible": _lm_eval_text, "base_acc": _boxed_value}
    value = compared.get(method, str)
    return float(found is not None and value(found) == value(gold))


def in_form(answer_field: str, method: str, boxed: bool) -> str:
    """Return a data set's worked answer as a response in the form that ``method`` reads.

    verl_flexible cannot read thousands separators, math reads only a box (\\boxed{...}), and base_acc only BOX_FORM.
    ``boxed`` says whether the prompt asks for a box. ``method`` must score the response as 1.
    """
    gold = gold_answer(answer_field)
    worked, _, final = answer_field.rpartition("#### ")
    if method == "verl_flexible":
        return f"{worked}#### {gold}"
    if method == "math":  # its commas stay, because (1,2) is not (12)
        return f"{worked}{BOXED}{final.strip()}}}"
    if method == "base_acc" and boxed:
        return f"<think>{worked}</think> <answer>{BOXED}{gold}}}</answer>"
    return answer_field


def extract(response: str, method: str = "strict") -> str | None:
    """Return the answer that the method finds in a response, or None. Raises ValueError for an unknown method."""
    if method == "strict":
        return _strict_answer(response)
    if method == "base_acc":
        return _boxed_answer(response)
    if method == "math":  # tasks/math_answers.py compares it
        complete = boxes(response)
        return complete[-1].content if complete else None
    if method not in METHODS:
        raise ValueError(f"method: there is no {method!r}; choose one of {', '.join(METHODS)}")
    pattern, part, which, without_commas = SEARCHES[method]
    found = pattern.findall(response[part])
    if not found:
        return None
    return found[which].replace(",", "") if without_commas else found[which]


class Box(NamedTuple):
    """A box in a text: \\boxed{...}, whose content may have other braces, or \\boxed and a number without braces."""

    content: str
    start: int  # the position of \\boxed in the text
    end: int  # the position after the box


def boxes(text: str) -> list[Box]:
    """Return the complete boxes of a text in the order of their ends, so a box precedes the box around it."""
    found: list[Box] = []
    begun: list[re.Match | None] = []  # for each open brace the \\boxed before it, or None
    for part in BOX_PARTS.finditer(text):
        if part["number"]:
            found.append(Box(part["number"], part.start(), part.end()))
        elif part[0] != "}":
            begun.append(part if part["boxed"] else None)
        elif begun and (opening := begun.pop()):
            found.append(Box(text[opening.end() : part.start()], opening.start(), part.end()))
    return found


# --------------------------------------------------------------------------------------------------------------- strict
def _strict_answer(response: str) -> str | None:
    """Return the number after the last '####' that a number follows, in a form that Decimal reads, or None.

    This is GSM8K's own form. A response ends at its first end-of-text mark. Spaces, bold or code marks, a sign and '$'
    may precede the number. Words after it are ignored, as in OpenAI's pattern, even if they change its value (18
    thousand). A marker without a number, such as a heading, is ignored. If two markers have different numbers, the last
    number counts. There is no answer if a letter follows this number directly (18k), or if its line has another digit
    after it (18 or 19, 18/19, 1,5).
    """
    ends = [end for end in (response.find(text) for text in EOS_TEXTS) if end >= 0]
    text = response[: min(ends, default=None)]
    marked = list(MARKED.finditer(text))
    if not marked or not ALONE.match(text, marked[-1].end()):
        return None
    sign, number = marked[-1].groups()
    return sign + number.replace(",", "")


# ------------------------------------------------------------------------------------------------------- other projects
def _lm_eval_text(text: str) -> str:
    """Return the text after the last '#### ' in lower case, without commas, '$' and a final dot.

    lm-evaluation-harness compares these texts.
    """
    return re.sub(r"\.$", "", text.replace(",", "").replace("$", "").rpartition("#### ")[2]).lower()


def _boxed_answer(response: str) -> str | None:
    """Return the last \\boxed{} content of a text <think> .. </think> .. <answer> .. \\boxed{ .. } .. </answer>.

    Each part is searched from the end of the previous part. This gives the result of MindSpeed-RL's regular expression
    in linear time.
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
    """Return the value that base_acc compares: the cleaned text, or a float if this text is a number.

    MindSpeed-RL also lets a symbolic parser compare two texts, but not if one of them is a whole number and the other
    is not a number. All gold answers of GSM8K are whole numbers, so we need no parser. Our results can differ from
    MindSpeed-RL's only for unusual LaTeX around a number.
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
