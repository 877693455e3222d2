"""The rewards: every method against hand-made cases, the real gold answers, time on absurd input, nothing evaluated.

The expected values of the peers' methods were reasoned from their published definitions, not read off this code.
"""

from __future__ import annotations

import builtins
import json
import time
from pathlib import Path

import pytest

import reward_gsm8k as reward

BOX = "<think>steps</think> <answer>so \\boxed{%s} it is</answer>"

# (response, gold, score). Under strict, 0 is also the score of a text without a readable answer: see UNREADABLE.
STRICT = [
    ("#### 18", "18", 1),
    ("####18", "18", 1),
    ("####  \t 18", "18", 1),
    ("#### 19", "18", 0),
    ("#### -5", "-5", 1),
    ("#### 5", "-5", 0),
    ("#### $18", "18", 1),
    ("#### \\$18", "18", 1),
    ("#### $-18", "-18", 1),
    ("#### $18$", "18", 1),
    ("#### **$18.00**.", "18", 1),
    ("#### `18`", "18", 1),
    ("#### 18.01", "18", 0),
    ("#### .5", "0.5", 1),
    ("#### 0.50", "0.5", 1),
    ("#### 0.1", "0.10000000000000000001", 0),  # equal as floats, not as decimals
    ("#### 1,234,567.50", "1234567.5", 1),
    ("#### 18 dollars a day.", "18", 1),
    ("#### 18 (eggs)", "18", 1),
    ("#### 18\nSo it is not 19.", "18", 1),
    ("#### 18 #### 18.0", "18", 1),
    ("#### Step 1: add 3 and 4\n#### **Result**\n#### 18", "18", 1),
    ("#### 18<|endoftext|>Question: 2 + 2? #### 4", "18", 1),
    ("#### 4<|endoftext|>#### 18", "18", 0),
    ("<|im_end|>#### 18", "18", 0),
    ("#### 19\n#### 18", "18", 1),  # the last one counts
    ("#### 18\n#### 19", "18", 0),
    ("#### 19 #### 18", "18", 1),
    ("#### 18\n#### Check\n#### It is \u2248 19", "18", 1),  # no number follows the later markers
    ("#### 18 and a half", "18", 1),  # words are ignored, as in the pattern of OpenAI
    ("#### 18 thousand", "18", 1),
    ("#### 18 \u20ac", "18", 1),
    ("#### -$18", "-18", 1),
    ("#### 18\r\n19", "18", 1),
]
UNREADABLE = [
    "",
    "The answer is 18.",
    "####\n18",
    "##### 18",  # a heading of another level
    "#### The answer is 18",
    "#### 18 or 19",
    "#### 18kg",
    "#### 18-20",
    "#### 18/1",
    "#### 18 + 1",
    "#### 1_8",
    "#### \u224818",
    "#### 18.0.0",
    "#### 1,8",
    "#### 1800,000",
    "#### --18",
    "#### \\boxed{18}",
    "#### 18\n#### 18 or 19",
    "#### \uff11\uff18",  # full-width digits
    "#### \u221218",  # the minus sign of typesetting
    "#### 18\u00b2",
    "#### NaN",
]
PEERS = {
    "verl_strict": [  # last "#### number" of the last 300 characters, commas removed, equal as text
        ("#### 18", "18", 1),
        ("#### 19\n#### 18", "18", 1),
        ("#### 18\n#### 19", "18", 0),
        ("#### 1,800", "1800", 1),
        ("#### 18 or 19", "18", 1),
        ("#### 18.0", "18", 0),
        ("#### $18", "18", 0),
        ("#### 18" + "x" * 293, "18", 1),  # 300 characters
        ("#### 18" + "x" * 294, "18", 0),  # the first # is cut off
        ("#### 1" + "x" * 293 + "#### 18", "18", 1),
    ],
    "verl_flexible": [  # last run of digits, dots and commas of the last 300 characters, but "."; commas stay
        ("The answer is 18 . ", "18", 1),
        ("#### 18 or 19", "19", 1),
        ("It is 18.", "18", 0),
        ("18 , that is all", "18", 0),  # "," is taken for a number
        ("1,800", "1800", 0),
        ("5-18", "-18", 1),
        ("18" + "x" * 298, "18", 1),
        ("18" + "x" * 299, "8", 1),
    ],
    "openai": [  # first "#### number", commas removed, equal as text
        ("#### 18\n#### 19", "18", 1),
        ("#### 19\n#### 18", "18", 0),
        ("#### 1,800", "1800", 1),
        ("#### 18" + "x" * 1000, "18", 1),
        ("#### $18", "18", 0),
        ("[invalid]", "18", 0),
    ],
    "lm_eval_strict": [  # first "#### number"; commas, "$" and one final dot ignored on both sides
        ("#### 18.", "18", 1),
        ("#### 18.,", "18", 1),
        ("#### 1800", "1,800", 1),
        ("#### $18", "18", 0),
        ("#### 18\n#### 19", "18", 1),
        ("#### 19\n#### 18", "18", 0),
    ],
    "lm_eval_flexible": [  # last run of two or more of [$0-9.,], or of digits
        ("The answer is $1,800.", "1800", 1),
        ("It is 8 . ", "8", 1),  # a single dot is no run of two
        ("18 ...", "18", 0),  # three dots are
        ("18 or 19", "18", 0),
        ("-18", "-18", 1),
        ("18.0", "18", 0),
        ("18" + "x" * 1000, "18", 1),
    ],
    "base_acc": [  # the whole text in its frame, the last box compared after a clean-up
        (BOX % "18", "18", 1),
        ("#### 18", "18", 0),
        ("<answer>\\boxed{18}</answer>", "18", 0),
        ("<think></think><answer>\\boxed{18}</answer>", "18", 1),
        (" " + BOX % "18", "18", 0),
        ("<think>a</think><answer>18</answer>", "18", 0),
        ("<answer>\\boxed{18}</answer><think></think>", "18", 0),
        ("<think>a</think><answer>\\boxed{18} \\boxed{19}</answer>", "18", 0),
        ("<think>a</think><answer>\\boxed{18} \\boxed{18</answer>", "18", 0),
        (BOX % "{18}", "18", 1),
        (BOX % "18.00", "18", 1),
        (BOX % "18\\%", "18", 1),
        (BOX % "1,800", "1800", 1),
        (BOX % "18\\text{ dollars}", "18", 1),
        (BOX % "x=18", "18", 1),
        (BOX % "\\text{18}", "18", 1),
        (BOX % "(18)", "18", 1),
        (BOX % "\\frac{36}{2}", "18", 0),
        (BOX % "18 million", "18", 0),
        (BOX % "2.50", "2.5", 1),
        (BOX % "inf", "18", 0),
    ],
}


@pytest.fixture(scope="module")
def gold_rows(gsm8k: Path) -> list[dict[str, str]]:
    texts = [(gsm8k / f"{name}.jsonl").read_text(encoding="utf-8") for name in ("train", "test")]
    return [json.loads(line) for text in texts for line in text.split("\n") if line]


FORMS = [  # a worked answer as each method's users write it
    ("verl_flexible", False, "30 * 36 = 1080\n#### 1080"),
    ("base_acc", True, "<think>30 * 36 = 1080\n</think> <answer>\\boxed{1080}</answer>"),
    ("base_acc", False, "30 * 36 = 1080\n#### 1,080"),
    ("strict", True, "30 * 36 = 1080\n#### 1,080"),
]
MATH_FORMS = [("#### (1,2)", "\\boxed{(1,2)}"), ("so\n#### 14{,}916 ", "so\n\\boxed{14{,}916}")]


@pytest.mark.parametrize(("method", "boxed", "expected"), FORMS)
def test_a_worked_answer_is_put_into_the_form_that_the_method_reads(method: str, boxed: bool, expected: str) -> None:
    found = reward.in_form("30 * 36 = 1080\n#### 1,080", method, boxed)
    assert found == expected
    assert reward.score(found, "1080", method) == (0.0 if (method, boxed) == ("base_acc", False) else 1.0)


@pytest.mark.parametrize(("answer", "expected"), MATH_FORMS)
def test_a_gold_answer_of_math_keeps_its_commas(answer: str, expected: str) -> None:
    assert reward.in_form(answer, "math", True) == expected


@pytest.mark.parametrize("method", reward.METHODS)
def test_every_method_gives_every_gold_answer_of_gsm8k_its_reward_and_another_number_none(
    method: str, gold_rows: list[dict[str, str]]
) -> None:
    """In the form of a worked answer that the method reads."""
    for row in gold_rows:
        text, gold = reward.in_form(row["answer"], method, True), reward.gold_answer(row["answer"])
        assert reward.score(text, gold, method) == 1.0 and reward.score(text, gold + "1", method) == 0.0, text


@pytest.mark.parametrize(("response", "gold", "expected"), STRICT)
def test_strict(response: str, gold: str, expected: int) -> None:
    assert reward.score(response, gold) == expected


@pytest.mark.parametrize("response", UNREADABLE)
def test_strict_finds_no_answer_where_there_is_not_exactly_one_number(response: str) -> None:
    assert reward.score(response, "18") == 0.0
    assert not reward.parsable(response)


@pytest.mark.parametrize(
    ("method", "response", "gold", "expected"), [(method, *case) for method, cases in PEERS.items() for case in cases]
)
def test_peers(method: str, response: str, gold: str, expected: int) -> None:
    found = reward.score(response, gold, method)
    assert found == expected and isinstance(found, float)


@pytest.mark.parametrize(
    ("method", "readable", "unreadable"),
    [
        ("strict", "#### 19", "18"),
        ("verl_strict", "#### 19", "#### x"),
        ("verl_flexible", "19", "."),
        ("openai", "#### 19", "18"),
        ("lm_eval_strict", "#### 19", "18"),
        ("lm_eval_flexible", "19", "."),
        ("base_acc", BOX % "a cat", "#### 18"),
    ],
)
def test_parsable_tells_a_wrong_answer_from_none(method: str, readable: str, unreadable: str) -> None:
    assert reward.parsable(readable, method) and not reward.parsable(unreadable, method)
    assert reward.score(readable, "18", method) == reward.score(unreadable, "18", method) == 0.0


@pytest.mark.parametrize(
    ("field", "gold"),
    [("#### 1,234,567", "1234567"), ("#### -5\n", "-5"), ("#### 3\nno, #### 4", "4")],
)
def test_gold_answer(field: str, gold: str) -> None:
    assert reward.gold_answer(field) == gold


@pytest.mark.parametrize("field", ["18", "#### ,"])
def test_gold_answer_refuses_a_field_without_one(field: str) -> None:
    with pytest.raises(ValueError, match="answer: found .*; needed: '#### ' and the final number"):
        reward.gold_answer(field)


@pytest.mark.parametrize("gold", ["", "18 or 19", "\uff11\uff18"])
def test_strict_refuses_a_gold_answer_that_is_not_one_number(gold: str) -> None:
    """Scoring every response 0 without a word is what users of other trainers suffer from."""
    for response in ("#### 18", "nothing"):
        with pytest.raises(ValueError, match="gold: found .*; needed: one number"):
            reward.score(response, gold)


@pytest.mark.parametrize("method", reward.METHODS)
def test_a_million_characters_take_no_time(method: str) -> None:
    """Each text takes 0.3 CPU seconds at most here, and would take minutes to hours under a quadratic search."""
    starts, fillers = ["#### "], ["9", "#", "-", "*", " ", ",000", ".", "or ", "$ ", "<|im_end", "#### ", "#### 18\n"]
    if method == "base_acc":
        starts = [BOX.partition("%s")[0], "<think></think>"]
        fillers = ["9", " ", "{", "}", "\\", "^ ", "day ", "<think>", "</think>", "<answer>", "\\boxed{", "\\text{"]
    for start in starts:
        for filler in fillers:
            text = start + filler * (10**6 // len(filler)) + "}</answer>"
            began = time.process_time()
            reward.score(text, "18", method)
            assert time.process_time() - began < 20, text[:60]


def test_numbers_of_absurd_length_are_compared_exactly() -> None:
    long = "9" * 10**6
    assert reward.score("#### " + long, long) == 1.0
    assert reward.score("#### " + long, long[:-1] + "8") == 0.0


@pytest.mark.parametrize("method", reward.METHODS)
def test_model_text_is_never_evaluated(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("model text was evaluated")

    with monkeypatch.context() as patch:
        for name in ("eval", "exec", "compile"):
            patch.setattr(builtins, name, refuse)
        for code in ('__import__("os").system("true")', '__import__("math").gcd(36,54)'):
            for text in (f"\\boxed{{{code}}}", BOX % code, f"#### {code}"):
                assert reward.score(text, "18", method) == 0.0
