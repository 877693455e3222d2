"""Rewards as strings say them, and a user's own functions and the processes that score."""

import builtins
import dataclasses
import json
import math
import os
import re
import time
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from saved import config_in
from source import ROOT
from tiers import ci

import data_gsm8k
import grpo
import reward_gsm8k as reward
from facts.exits import InputError
from inputs import functions
from inputs.config import load_config
from knobs import Config, DataConfig, EvalConfig, LossConfig, RewardConfig
from run import input_check
from runlog import run_record
from tasks import math_answers, scoring
from tasks.scoring import Call, Score, Scorer

# -------------------------------------------------------------------------------------------------------------- rewards
# The rewards: every method against hand-made cases, the real gold answers, time on absurd input, nothing evaluated.
#
# The expected values of the peers' methods were reasoned from their published definitions, not read off this code.

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
    assert reward.extract(response) is None


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
    assert reward.extract(readable, method) is not None and reward.extract(unreadable, method) is None
    assert reward.score(readable, "18", method) == reward.score(unreadable, "18", method) == 0.0


@pytest.mark.parametrize(
    ("field", "gold"),
    [("#### 1,234,567", "1234567"), ("#### -5\n", "-5"), ("#### 3\nno, #### 4", "4")],
)
def test_gold_answer(field: str, gold: str) -> None:
    assert reward.gold_answer(field) == gold


@pytest.mark.parametrize("field", ["18", "#### ,"])
def test_gold_answer_refuses_a_field_without_one(field: str) -> None:
    with pytest.raises(ValueError, match="answer: found .*; write '#### ' and the final number"):
        reward.gold_answer(field)


@pytest.mark.parametrize("gold", ["", "18 or 19", "\uff11\uff18"])
def test_strict_refuses_a_gold_answer_that_is_not_one_number(gold: str) -> None:
    """Scoring every response 0 without a word is what users of other trainers suffer from."""
    for response in ("#### 18", "nothing"):
        with pytest.raises(ValueError, match="gold: must be one number, not "):
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


# ------------------------------------------------------------------------------------------------------------ functions
# Functions that a configuration names as FILE.py:NAME: what they may do, and that a fault of theirs is one clear line.
#
# That a run with all of them repeats itself after a kill is shown in test_resume.py.

OWN = Path(__file__).parents[2] / "support" / "own.py"
EXAMPLES = Path(__file__).parents[3] / "examples"
ROW = {"question": "How many?", "answer": "#### 18"}


def scored(reward: RewardConfig, *completions: str, gold: str = "18") -> list[Score]:
    scorer = Scorer(reward)
    try:
        return scorer([Call(completion, gold, ROW) for completion in completions])
    finally:
        scorer.close()


def refused(call, *arguments: object) -> str:
    with pytest.raises(InputError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------ rewards


def test_a_reward_scores_in_processes_of_its_own_and_in_the_order_of_the_completions(capfd) -> None:
    texts = [f"answer {n}" for n in range(50)]
    found = scored(RewardConfig(function=f"{OWN}:reward"), "", "#### 18", *texts)
    sums = [sum(text.encode()) for text in ("", "#### 18", *texts)]
    assert [one.reward for one in found] == [total % 7 / 7 for total in sums]
    assert [one.correct for one in found] == [total % 2 == 0 or i == 1 for i, total in enumerate(sums)]
    assert [one.found for one in found] == [False] + [True] * 51
    plain = scored(RewardConfig(function=f"{OWN}:sleeps"), "a")
    assert plain == [Score(1.0, True, True)]  # a score alone: an answer was found, and 1 is correct


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("crash", "KeyError: 'level'; question 'How many?', completion 'hang'"),
        ("endless", "took more than 3 s and was ended; question 'How many?'"),  # inside C code, which holds the GIL
        ci("sleeps", "took more than 3 s and was ended"),
        ("ends", "ended its process (exit code 3)"),
        ("not_finite", "returned nan; return a finite number"),
        ("text", "returned 'good'; return a number, (number, answer found, correct)"),
        ("number_as_text", "returned '1.0'; return a number, (number, answer found, correct)"),
        ("texts_as_flags", "returned (1.0, 'yes', 'no'); return a number, (number, answer found, correct)"),
        ("two", "too many positional arguments; define it as two(completion, gold, row)"),
        ("nothing", "own.py has no function nothing; its functions are: reward, advantages, loss"),
    ],
)
def test_a_fault_of_a_reward_names_the_question(name: str, said: str, capfd) -> None:
    message = refused(scored, RewardConfig(function=f"{OWN}:{name}", seconds=3.0), "hang")
    assert message.startswith("reward.function: ") and said in message, message
    assert ("in crash" in capfd.readouterr().err) == (name == "crash")  # its traceback


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("def f(:\n", "invalid syntax"),
        ("import no_such_package\n", "line 1: No module named 'no_such_package'"),
        ("x = 1 / 0\n", "line 1: division by zero"),
        ("raise SystemExit(0)\n", "line 1"),
        ("import os\nos._exit(7)\n", "ended its process (exit code 7) while it was imported"),
        ("", "has no function f; its functions are: none"),
    ],
)
def test_a_file_that_cannot_be_imported_is_named_with_its_line(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(content)
    message = refused(scored, RewardConfig(function=f"{path}:f"), "")
    assert str(path) in message and said in message, message
    path.unlink()
    assert "does not exist; give FILE.py:NAME" in refused(scored, RewardConfig(function=f"{path}:f"), "")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("import slow", ""),
        ci("from slow import x", ""),
        ci("import importlib; importlib.import_module('slow')", ""),
        ci("time.sleep(0.7); import slow", ""),
        ("import slow; time.sleep(9)", "took more than 2 s and was ended"),
        ("import slow; import slow; import broken", "ValueError: broken"),
        ci("import slow; import ends", "ended its process (exit code 5)"),
    ],
)
def test_the_import_of_packages_takes_none_of_a_calls_seconds(body: str, said: str, tmp_path: Path, capfd) -> None:
    """A function may import torch at its first call, which takes longer than any score."""
    for name, text in (
        ("slow", "import time, slower\ntime.sleep(2)\nx = 1\n"),
        ("slower", "import time\ntime.sleep(1)\n"),
        ("broken", "raise ValueError('broken')\n"),
        ("ends", "import os\nos._exit(5)\n"),
        ("own_reward", f"import time\ndef f(completion, gold, row):\n    {body}\n    return 1.0\n"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
    reward = RewardConfig(function=f"{tmp_path}/own_reward.py:f", seconds=2.0)
    if said:
        assert said in refused(scored, reward, "a")
    else:
        assert scored(reward, "a", "b") == [Score(1.0, True, True)] * 2


def test_a_right_answer_below_1_is_refused_with_the_question_the_score_and_the_rule(tmp_path: Path) -> None:
    (tmp_path / "half.py").write_text("def f(completion, gold, row):\n    return 0.25 * len(row['question'])\n")
    reward = RewardConfig(function=f"{tmp_path}/half.py:f")
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1 + 1?", "answer": "#### 2"}\n{"question": "5?", "answer": "#### 5"}\n')
    section = DataConfig(source="gsm8k", train_path=str(path), test_path=str(path))
    scorer = Scorer(reward)
    said = refused(input_check.check_answers, reward, section, EvalConfig(), scorer)
    scorer.close()
    assert "scores 1 of 2 gold training answers as wrong, the first with 0.5" in said, said
    assert (
        "'#### 5', the answer to '5?'" in said
        and "a score of 1.0 or more counts as correct" in said
        and "base_acc" not in said
    )


def test_a_worker_that_was_killed_between_two_calls_is_replaced() -> None:
    """As the killer of processes of a system without memory does it."""
    scorer = Scorer(RewardConfig(function=f"{OWN}:reward"))
    killed = {worker.process.pid for worker in scorer.workers}
    for worker in scorer.workers:
        worker.process.kill()
        worker.process.wait()
    calls = [Call(text, "", ROW) for text in ("a", "bc", "def")]
    assert [one.reward for one in scorer(calls)] == [97 % 7 / 7, (98 + 99) % 7 / 7, (100 + 101 + 102) % 7 / 7]
    assert len(scorer(calls * 8)) == 24  # every process is asked
    assert not killed & {worker.process.pid for worker in scorer.workers}
    scorer.close()


@pytest.mark.parametrize(("cores", "local_ranks", "count"), [(3, 1, 3), (6, 2, 3), (1, 1, 1), (2, 4, 1), (40, 2, 8)])
def test_a_rank_has_as_many_workers_as_cores_that_it_may_use(cores: int, local_ranks: int, count: int, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
    scorer = Scorer(RewardConfig(function=f"{OWN}:reward"))
    assert len(scorer.workers) == count
    scorer.close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"score": 1.2, "form": 0.2, "pred": "18"}, Score(1.2, True, True, None, {"form": 0.2, "pred": "18"})),
        ({"score": 0.2, "found": False, "correct": False, "n": True}, Score(0.2, False, False, None, {"n": 1.0})),
        ({"score": 1, "correct": False}, Score(1.0, True, False)),
        ({"reward": 1.0}, "'score': number"),
        ({"score": "1"}, "'score': number"),
        ({"score": 1.0, "len": None}, "returned {'score': 1.0, 'len': None}; part 'len' is None; make it a number or"),
        ({"score": 1.0, "part": float("inf")}, "return a finite number"),
        ((1.0, True), "'score': number"),
    ],
)
def test_a_mapping_has_a_score_and_parts(value: object, expected: object) -> None:
    found = scoring.score_of(value)
    assert found == expected if isinstance(expected, Score) else expected in found.cause


def test_a_text_among_the_parts_is_a_plain_one_whatever_its_class() -> None:
    """A class of the user's file is unknown in the process that reads the score."""
    parts = scoring.score_of({"score": 1.0, Named("kind"): Named("short")}).parts
    assert parts == {"kind": "short"} and [type(text) for text in (*parts, *parts.values())] == [str, str]


class Named(str):
    """As a user's file may define it."""


def test_long_calls_beat_once_a_second(tmp_path: Path) -> None:
    """Otherwise the heartbeat would end a rank whose reward takes long (train.stall_seconds)."""
    (tmp_path / "slow.py").write_text(
        "import time\ndef f(completion, gold, row):\n    time.sleep(2.5)\n    return 1.0\n"
    )
    beats: list[float] = []
    scorer = Scorer(RewardConfig(function=f"{tmp_path}/slow.py:f"), lambda: beats.append(time.monotonic()))
    began = time.monotonic()
    scorer([Call("a", "", ROW)])
    scorer.close()
    moments = [began, *beats]
    assert len(beats) >= 3 and max(b - a for a, b in zip(moments, beats, strict=False)) < 2


@pytest.mark.parametrize("first", [0, 1, 2])
def test_ranks_share_the_gold_answers_of_a_slow_reward(first: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", str(first))
    monkeypatch.setenv("WORLD_SIZE", "3")
    asked: list[str] = []

    def scorer(calls: list[Call]) -> list[Score]:
        asked.extend(call.row["question"] for call in calls)
        return [Score(1.0, True, True)] * len(calls)

    scorer.in_processes, scorer.name = True, "a slow reward"
    cfg = load_config("configs/tiny_cpu.yaml", ["data.num_train=200", "data.num_test=70"])
    input_check.check_answers(cfg.reward, cfg.data, cfg.eval, scorer)
    rows = [row.question for split in ("train", "test") for row in data_gsm8k.read(cfg.data, split)[0][first::3]]
    assert asked == rows and len(asked) == [67 + 24, 67 + 23, 66 + 23][first]


SMALL = "\\frac{1}{2\\cdot3^{2023}}"
MATH = {  # gold answers in the form of MATH's, which are LaTeX -> (right, wrong)
    "\\frac{1}{2}": (["0.5", "\\frac{2}{4}", "1/2", "\\dfrac12", "\\tfrac{1}{2}.", ".5"], ["2", "\\frac{1}{3}", "5"]),
    "\\{1,2\\}": (["\\{2, 1\\}", "1,2"], ["\\{1\\}", "\\{1,3\\}", "12"]),
    "5 \\text{ cm}": (["5", "5\\text{ cm}", "x=5", "5.0"], ["50"]),
    "\\left( 3, \\frac{\\pi}{2} \\right)": (["(3, \\pi/2)", "(3, \\pi/2)."], ["(\\pi/2, 3)"]),
    "x^2+1": (["1 + x^2"], ["x^2"]),
    "10\\%": (["10\\%", "10 percent"], ["11\\%"]),
    "1,\\!000": (["1000", "1{,}000", "1\\,000", "1\\;000", "1 000", "1\u202f000"], ["1", "0", "1\\,001"]),
    "115\\,000": (["115000", "\\$115{,}000."], ["115", "0"]),
    "\\text{Evelyn}": (["\\text{Evelyn}"], ["\\text{Carla}"]),
    # What other numbers of lists, points and small factors are: one comma or one digit decides.
    "(1,2)": (["(1,2)", "(1, 2)."], ["(2,1)", "(12)", "(1,3)"]),
    "1,-2": (["-2, 1"], ["1-2", "-1,2"]),
    "1, 234": (["234, 1"], ["1234"]),
    f"\\frac12-{SMALL}": ([f"\\frac{{1}}{{2}} - {SMALL}"], [SMALL, "\\frac12"]),
    "10^{-1000}": (["\\frac{1}{10^{1000}}"], ["2\\cdot10^{-1000}"]),
    "\\sqrt{2}+\\sqrt{3}": (["\\sqrt{5+2\\sqrt{6}}"], ["\\sqrt{5+\\sqrt{6}}"]),
    "\\frac{\\sqrt{2}}{10}": (["\\sqrt{0.02}"], ["\\sqrt{0.03}"]),
    # Words around one number.
    "18": (
        [
            "The answer is 18",
            "\\text{The answer is }18.",
            "Answer: 18",
            "18 apples",
            "\\text{18 dollars}",
            "x is 18",
            "18 eggs in total",
            "The total is \\$18",
            "18 eggs a day",
        ],
        [
            "The answer is -18",
            "The answer is not 18",
            "at least 18",
            "18 or 19",
            "18 and a half",
            "18 million",
            "18x",
            "18 x",
            "18 xy",
            "18!",
            "18 squared",
            "sqrt 18",
            "\\sqrt{18}",
            "18/19",
            "",
        ],
    ),
}
BOXES = [  # completion, gold, right: several boxes, or none in braces
    ("\\boxed{1} and \\boxed{2}", "1,2", True),
    ("$x=\\boxed{2}$ or $x=\\boxed{1}$.", "1,2", True),
    ("$x_1 = \\boxed{1}, \\quad x_2 = \\boxed{2}$", "\\{1,2\\}", True),
    ("\\boxed{1}, \\boxed{2}, and \\boxed{3}", "1,2,3", True),
    ("\\boxed{1}\\boxed{2}", "1,2", True),
    ("\\boxed{1}, \\boxed{2}, and \\boxed{3}", "1,2", False),
    ("\\boxed{1} or \\boxed{2}", "2", False),  # two candidates
    ("\\boxed{1}, \\boxed{234}", "1234", False),
    ("\\boxed{5}, \\boxed{5}", "5", True),
    ("First \\boxed{1}, and after a check \\boxed{2}.", "1,2", False),
    ("First \\boxed{1}, and after a check \\boxed{2}.", "2", True),
    ("$\\boxed 18$.", "18", True),
    ("\\boxed 19", "18", False),
    ("\\boxed -5", "-5", True),
    ("\\boxed{7}; so it is \\boxed 18", "18", True),
    ("\\boxed 18, so it is \\boxed{7}", "18", False),
    ("\\boxed{\\boxed{18}}", "18", True),
]


def test_math_compares_the_last_box_by_its_value() -> None:
    expected, calls = [], []
    for gold, (right, wrong) in MATH.items():
        for answer, is_right in (*((one, True) for one in (gold, *right)), *((one, False) for one in wrong)):
            calls.append(Call(f"First \\boxed{{7}}. So \\boxed{{{answer}}}.", gold, ROW))
            expected.append(Score(is_right, True, is_right, answer))
        calls += [Call(f"the answer is {gold}", gold, ROW), Call(f"\\boxed{{{gold}", gold, ROW)]  # no box, no whole box
        expected += [Score(0.0, False, False)] * 2
    for completion, gold, is_right in BOXES:
        calls.append(Call(completion, gold, ROW))
        expected.append(Score(is_right, True, is_right, ANY))  # of several boxes
    scorer = Scorer(RewardConfig(method="math"))
    found = scorer(calls)
    scorer.close()
    assert [(call, one) for call, one in zip(calls, found, strict=True)] == list(zip(calls, expected, strict=True))


def test_the_boxes_of_a_long_text_are_found_in_linear_time() -> None:
    for filler in ("\\boxed{", "\\boxed ", "{", "}", "\\boxed{1},", "\\boxed 1 ", "\\boxed{1}" + "and " * 20):
        began = time.process_time()
        math_answers.last_boxes(filler * (10**6 // len(filler)))
        assert time.process_time() - began < 20, filler  # here 0.5; a quadratic search takes minutes


def test_an_expression_without_end_is_a_wrong_answer_and_not_the_end_of_the_run() -> None:
    reward = RewardConfig(method="math", seconds=5.0)
    assert scored(reward, "\\boxed{9^{9^{9^{9}}}}", "\\boxed{18}") == [
        Score(0, False, False),
        Score(1, True, True, "18"),
    ]


# ------------------------------------------------------------------------------------------------ advantages and losses


def inputs() -> grpo.LossInputs:
    logp = torch.tensor([[0.0, math.log(2)]], requires_grad=True)
    advantages, old = torch.tensor([[2.0, -1.0]]), torch.zeros(1, 2)
    return grpo.LossInputs(logp, old, advantages, torch.ones(1, 2), 0.2, 0.2, 0.0)


def tried(**names: str) -> None:
    loss = LossConfig(**{key: f"{OWN}:{name}" for key, name in names.items()})
    functions.try_out(loss, load_config("configs/tiny_cpu.yaml").rollout)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: functions.advantage(f"{OWN}:fewer")(torch.ones(2, 3)),
            "fewer returned (1, 3) for the advantages; return a tensor of",
        ),
        (lambda: functions.advantage(f"{OWN}:infinite")(torch.ones(2, 3)), "NaN or infinity; return finite"),
        (lambda: functions.advantage(f"{OWN}:loss")(torch.ones(2, 3)), "AttributeError: 'Tensor' object has no"),
        (lambda: functions.advantage(f"{OWN}:two"), "missing a required argument"),
        (lambda: functions.token_loss(f"{OWN}:one_value")(inputs()), "returned (1, 2); return the losses (1, 2)"),
        (lambda: functions.token_loss(f"{OWN}:flat")(inputs()), "() for the losses; return a tensor of shape (1, 2)"),
        (
            lambda: functions.advantage(f"{OWN}:as_array")(torch.ones(2, 3)),
            "ndarray for the advantages; return a tensor",
        ),
        (lambda: tried(advantage="without_epsilon"), "NaN or infinity; return finite numbers, also for a group whose"),
        (lambda: tried(kind="detached"), "losses without a gradient; compute them from logp"),
        (lambda: tried(kind="of_others"), "losses whose gradient by logp is 0; compute them from logp"),
        (lambda: tried(kind="unbounded"), "NaN or infinity; return finite numbers"),
        (lambda: tried(kind="named_as_the_trainers"), "the metric entropy, which the trainer measures itself"),
    ],
)
def test_a_fault_of_an_advantage_or_a_loss_is_one_line(call, said: str) -> None:
    message = refused(call)
    assert message.startswith("loss.") and said in message, message


@pytest.mark.parametrize("name", ["loss", "sapo"])
def test_a_loss_with_a_gradient_is_accepted(name: str) -> None:
    file = OWN if name == "loss" else f"{EXAMPLES}/loss_sapo.py"
    functions.try_out(LossConfig(kind=f"{file}:{name}"), load_config("configs/tiny_cpu.yaml").rollout)


def test_a_loss_may_use_no_name_of_a_metric_that_the_learner_measures() -> None:
    named = set(re.findall(r"\"actor/(\w+)\"", (ROOT / "learner.py").read_text()))
    assert {"loss", "grad_norm"} < named == functions.MEASURED


def test_an_advantage_that_works_in_place_leaves_the_rewards_alone() -> None:
    rewards = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert grpo.group_advantages(rewards, functions.advantage(f"{OWN}:in_place")).tolist() == [[-0.5, 0.5], [0, 0]]
    assert rewards.tolist() == [[0, 1], [1, 1]]


def test_a_function_takes_the_place_of_a_formula() -> None:
    """With the built-in's own formula as a function, the loss of a micro-batch has the same bits."""
    rewards = torch.tensor([[0.0, 1.0, 0.5]])
    assert grpo.group_advantages(rewards, functions.advantage(f"{OWN}:advantages")).tolist() == [[-1.0, 1.0, 0.0]]
    x = inputs()
    given = (x.logp, x.old_logp, x.advantages, x.mask)
    named, own = (grpo.policy_loss(*given, kind=kind) for kind in ("ppo", grpo.PER_TOKEN["ppo"]))
    assert torch.equal(named[0], own[0]) and named[1].keys() == own[1].keys()
    loss, stats = grpo.policy_loss(*given, kind=functions.token_loss(f"{OWN}:loss"))
    assert loss.item() == pytest.approx((-2.0 * 1 + 1.0 * 2) / 2) and stats["own"].item() == pytest.approx(1.5)


# ------------------------------------------------------------------------------------------------ the examples


def test_the_reward_of_the_example_has_a_part_for_the_form() -> None:
    reward = RewardConfig(function=f"{EXAMPLES}/reward_with_format.py:score")
    found = scored(reward, "so\n#### 18", "#### 1,018", "18", "#### 18\nand more", "#### 18.0")
    assert [one.parts for one in found] == [{"form": x} for x in (0.1, 0.1, 0.0, 0.0, 0.1)]
    assert [tuple(one)[:3] for one in found] == [
        (1.0, True, True),
        (0.1, True, False),
        (0.0, False, False),
        (0.0, False, False),
        (1.0, True, True),
    ]
    alone = scored(RewardConfig(function=f"{EXAMPLES}/reward_with_format.py:form"), "#### 1", "18", "#### 18")
    assert [tuple(one)[:3] for one in alone] == [(1.0, True, False), (0.0, False, False), (1.0, True, True)]


def test_the_advantage_of_the_example_has_one_scale_for_the_whole_step() -> None:
    advantages = functions.advantage(f"{EXAMPLES}/advantage_reinforce_pp.py:advantages")
    found = advantages(torch.tensor([[1.0, 0.0], [1.0, 1.0], [3.0, 1.0]]))
    # Centred: +-0.5, 0 and 0, +-1. Their variance over five degrees of freedom is (0.5 + 2) / 5 = 0.5.
    assert found.flatten().tolist() == pytest.approx([x / math.sqrt(0.5) for x in (0.5, -0.5, 0, 0, 1, -1)])
    assert advantages(torch.ones(2, 2)).tolist() == [[0, 0], [0, 0]]


def test_the_loss_of_the_example_is_sapo() -> None:
    """arXiv 2511.20347: the gradient by logp is -A r 4 p (1 - p) with p = sigmoid(tau (r - 1)); 1 at r = 1."""
    x = inputs()
    x = dataclasses.replace(x, logp=x.logp - 1, old_logp=x.old_logp - 1)  # only their difference counts
    loss, stats = functions.token_loss(f"{EXAMPLES}/loss_sapo.py:sapo")(x)
    p = 1 / (1 + math.exp(-1.05))  # r = 2, and A < 0
    assert loss.tolist()[0] == pytest.approx([-2 * 2.0, 4 / 1.05 * p])
    (gradient,) = torch.autograd.grad(loss.sum(), x.logp)
    assert gradient.tolist()[0] == pytest.approx([-2.0, 2 * 4 * p * (1 - p)])
    assert stats["ratio_gap"].tolist()[0] == pytest.approx([0.0, 1.0])


# ------------------------------------------------------------------------------------------------ train_grpo.py --check


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("reward.function", "reward", ""),
        ("loss.advantage", "by_place", "depends on the order of its rows"),
        ("loss.advantage", "by_column", "depends on the order of its rows"),
        ("loss.kind", "by_row", "depends on the order of its rows"),
        ("loss.kind", "divided", "depends on the other rows of its micro-batch"),
        ("loss.kind", "unbounded", "returned NaN or infinity"),
        ("reward.function", "by_chance", "scores an answer differently"),
    ],
)
def test_a_function_that_depends_on_order_or_on_chance_is_refused_by_the_check(key: str, name: str, said: str) -> None:
    names = {"loss.advantage": "advantages", "loss.kind": "loss", "reward.function": "reward", key: name}
    cfg = load_config("configs/tiny_cpu.yaml", [f"{which}={OWN}:{function}" for which, function in names.items()])
    scorer = Scorer(cfg.reward)
    checked = cfg.reward, cfg.loss, cfg.data, scorer
    try:
        if said:
            assert refused(input_check.check_functions, *checked).startswith(f"{key}: {OWN}:{name} {said}")
        else:
            input_check.check_functions(*checked)
    finally:
        scorer.close()


# ------------------------------------------------------------------------------------------------ what a run records


def test_the_file_and_what_it_imports_are_inputs_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion, gold, row):\n    import part\n    return part.value\n")
    (tmp_path / "part.py").write_text("import json, numpy\nvalue = 1.0\n")
    cfg: Config = config_in(tmp_path)
    cfg = cfg.model_copy(update={"reward": RewardConfig(function=f"{tmp_path}/mine.py:f")})
    recorded = run_record.inputs(run_record.input_files(cfg))
    assert list(recorded["functions"]) == ["reward.function mine.py", "reward.function part.py"]
    run_record.write_records(tmp_path, cfg, 1)
    assert run_record.changed_inputs(tmp_path, run_record.input_files(cfg), Path(cfg.model.path)) == []
    (tmp_path / "part.py").write_text("value = 2.0\n")
    (line,) = run_record.changed_inputs(tmp_path, run_record.input_files(cfg), Path(cfg.model.path))
    assert line.startswith(f"{tmp_path / 'part.py'}: has changed since ") and "-> sha256" in line
    (tmp_path / "mine.py").unlink()
    assert (
        "mine.py: has changed"
        in run_record.changed_inputs(tmp_path, run_record.input_files(cfg), Path(cfg.model.path))[0]
    )
