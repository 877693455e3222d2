"""Data: every gold answer of real GSM8K parses, malformed rows are refused by file and row, conversion loses nothing, a
step's questions depend on (seed, step) alone, and the generated test set shares no operand pair with training.

Expected answers of generated problems are recomputed here from the question's wording, not with the module's code.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from prompts import data, make_model_dir, write_jsonl
from pyarrow import parquet

import data_gsm8k
import gsm8k_files
from input_files import InputError
from tiny_model import build_tokenizer, drill, sloppy_solution

REPOSITORY = Path(__file__).resolve().parent.parent
ROWS = [
    {"question": "Mia has 3 pens \u2028and {2} more. How many?", "answer": "3 + 2 = 5\n#### 5"},
    {"question": "Ben had 1,200 coins; he lost 3 £. How many are left?\n", "answer": "1,200 - 3 = 1,197\n#### 1,197"},
    {"question": "Wie viele Äpfel sind −1 und 0.5?", "answer": "-1 + 0.5 = -0.5\n#### -0.5"},
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return data_gsm8k.load_tokenizer(model_dir)


def write_parquet(path: Path, rows: list[Any]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read_pairs(path: Path) -> list[tuple[str, str]]:
    return [(question, answer) for question, answer, _ in gsm8k_files.read(path)[0]]


# ----------------------------------------------------------------------------------------------------------- real GSM8K
@pytest.mark.parametrize(("split", "count", "first"), [("train", 7473, "72"), ("test", 1319, "18")])
def test_every_row_of_real_gsm8k_has_a_gold_number(
    split: str, count: int, first: str, gsm8k: Path, tokenizer: Any, tmp_path: Path
) -> None:
    path = gsm8k / f"{split}.jsonl"
    section = data(source="gsm8k", max_prompt_tokens=1000, **{f"{split}_path": str(path)})
    questions = data_gsm8k.load(section, split, tokenizer, seed=0)
    assert len(questions) == count and questions.dropped == 0
    assert questions[0].gold == first
    for question in questions:  # the number after the mark, read without the module's help
        assert int(question.gold) == int(question.answer[question.answer.rindex("####") + 4 :].replace(",", ""))
    assert re.fullmatch(
        rf"{count} questions from \S+ \(question/answer columns\); longest prompt \d+ of 1000 tokens, dropped 0",
        questions.description,
    )
    gsm8k_files.convert(path, tmp_path / "chat.parquet")
    gsm8k_files.convert(tmp_path / "chat.parquet", tmp_path / "back.jsonl")
    original = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    assert [json.loads(line) for line in (tmp_path / "back.jsonl").read_text("utf-8").split("\n") if line] == original


# ---------------------------------------------------------------------------------------------------------------- forms
def chat(row: dict[str, str], **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    return {"messages": turns, **more}


FORMS = {
    "columns": ROWS,
    "capitals": [{"Question": row["question"], "Answer": row["answer"]} for row in ROWS],
    "chat": [chat(row) for row in ROWS],
    "chat with worked answer": [chat(row, answer=row["answer"]) for row in ROWS],
    "chat with bare answer": [chat(row, answer=row["answer"].split("#### ")[1]) for row in ROWS],
    "user turn and answer": [{"messages": chat(row)["messages"][:1], "answer": row["answer"]} for row in ROWS],
    "verl": [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": row["question"] + " Let us think."}],
            "reward_model": {"style": "rule", "ground_truth": row["answer"].split("#### ")[1].replace(",", "")},
            "extra_info": {"split": "train", "index": index, **row},
        }
        for index, row in enumerate(ROWS)
    ],
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_questions(form: str, ending: str, tmp_path: Path) -> None:
    path = (write_jsonl if ending == "jsonl" else write_parquet)(tmp_path / f"rows.{ending}", FORMS[form])
    assert read_pairs(path) == [(row["question"], row["answer"]) for row in ROWS]


def test_a_bare_final_number_becomes_a_worked_answer(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "1+1?"}], "answer": "1,002"},
        {"messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "two"}], "answer": "2"},
    ]
    assert read_pairs(write_jsonl(tmp_path / "a.jsonl", rows)) == [("1+1?", "#### 1002"), ("2?", "two\n#### 2")]
    verl = [{"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}}]
    assert read_pairs(write_parquet(tmp_path / "b.parquet", verl)) == [("1+1?", "#### 2")]


@pytest.mark.parametrize("endings", ["jsonl parquet", "parquet jsonl", "jsonl jsonl", "parquet parquet"])
def test_conversion_to_chat_and_back_loses_nothing(endings: str, tmp_path: Path) -> None:
    there, back = endings.split()
    rows = [{**row, "id": index, "tags": {"level": [index]}} for index, row in enumerate(ROWS)]
    start = write_jsonl(tmp_path / "start.jsonl", rows)
    line = gsm8k_files.convert(start, tmp_path / f"chat.{there}")
    assert line.startswith("3 rows: ") and line.endswith("(chat form, messages)")
    parsed, form = gsm8k_files.read(tmp_path / f"chat.{there}")
    assert form == "chat form, messages" and parsed[1] == (*ROWS[1].values(), {"id": 1, "tags": {"level": [1]}})
    gsm8k_files.convert(tmp_path / f"chat.{there}", tmp_path / f"back.{back}")
    gsm8k_files.convert(tmp_path / f"back.{back}", tmp_path / "chat2.jsonl")
    gsm8k_files.convert(tmp_path / "chat2.jsonl", tmp_path / "end.jsonl")
    assert [json.loads(line) for line in (tmp_path / "end.jsonl").read_text("utf-8").split("\n") if line] == rows


def test_conversion_refuses_to_overwrite_a_column(tmp_path: Path) -> None:
    start = write_jsonl(tmp_path / "start.jsonl", [{**ROWS[0], "Messages": "kept aside"}])
    with pytest.raises(InputError, match="start.jsonl: found the other column Messages"):
        gsm8k_files.convert(start, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", '[1, {"a": -1e999}]'])
def test_conversion_writes_json_that_every_reader_takes(tmp_path: Path, text: str) -> None:
    """Python's json reads 1e999 as infinity and writes it as `Infinity`, which is no JSON."""
    start = tmp_path / "start.jsonl"
    start.write_text('{"question": "2?", "answer": "#### 3", "more": ' + text + "}\n")
    with pytest.raises(InputError, match="jsonl"):
        gsm8k_files.convert(start, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_a_short_parquet_file_of_very_many_rows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run-length coding makes one page of millions of equal rows."""
    path = tmp_path / "many.parquet"
    rows = 5000
    parquet.write_table(pyarrow.table({"question": ["2?" * 500] * rows, "answer": ["#### 3"] * rows}), path)
    assert path.stat().st_size < 20_000 and len(gsm8k_files.read(path)[0]) == rows
    monkeypatch.setattr(gsm8k_files, "LINES_MIB", 2)
    with pytest.raises(InputError, match="many.parquet: .*more than 2 MiB of rows"):
        gsm8k_files.read(path)


def test_conversion_refuses_what_parquet_would_lose(tmp_path: Path) -> None:
    start = write_jsonl(tmp_path / "start.jsonl", [ROWS[0], {**ROWS[1], "extra": 1}])
    with pytest.raises(InputError, match="rows differ in their columns"):
        gsm8k_files.convert(start, tmp_path / "out.parquet")
    mixed = write_jsonl(tmp_path / "mixed.jsonl", [{**ROWS[0], "extra": "a"}, {**ROWS[1], "extra": [1]}])
    with pytest.raises(InputError, match="do not form a table"):
        gsm8k_files.convert(mixed, tmp_path / "out.parquet")
    assert not (tmp_path / "out.parquet").exists()


# ----------------------------------------------------------------------------------------------------- equal questions
@pytest.mark.parametrize(
    "other",
    [
        "MIA HAS 3 PENS. How many?",
        "  Mia has\t3 \u00a0pens.\r\nHow\u2028many?\u3000",
        "Mia\u200b has\ufeff 3 p\u00aden\u2060s. How\u200d many?",
        "\uff2dia \u200b has \uff13 pens\uff0e How many?",
        "Mia\u2800 has\u2065 3\ufe0f pens\u034f\U000e0080. \u202eHow\u202c\ufff0 many?\u0008",
    ],
)
def test_questions_are_compared_as_a_reader_sees_them(other: str, tmp_path: Path) -> None:
    first = {"question": "Mia has 3 pens. How many?", "answer": "#### 3"}
    path = write_jsonl(tmp_path / "train.jsonl", [first, {"question": other, "answer": "so\n#### 3.0"}])
    assert len(read_pairs(path)) == 2  # one answer: both rows are kept
    write_jsonl(path, [ROWS[0], first, {"question": other, "answer": "#### 4"}])
    with pytest.raises(InputError, match="train.jsonl, row 3: answer: 4; row 2 has the same question with 3; needed"):
        gsm8k_files.read(path)
    write_jsonl(tmp_path / "shots.jsonl", [{"question": other, "answer": "#### 3"}])
    with pytest.raises(InputError, match="which is asked as well"):
        data_gsm8k.few_shot(str(tmp_path / "shots.jsonl"), [tuple(first.values())])


@pytest.mark.parametrize("other", ["Mia has 4 pens.", "Mia has 3 pens?", "Mia has -3 pens.", "3 pens."])
def test_questions_that_a_reader_tells_apart_are_two(other: str) -> None:
    assert gsm8k_files.alike(other) != gsm8k_files.alike("Mia has 3 pens.")


# ------------------------------------------------------------------------------------------------------- malformed rows
def line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


GOOD = line(ROWS[0])
USER = {"role": "user", "content": "1+1?"}
MALFORMED = {
    "missing column": (GOOD + line({"question": "1+1?"}), r", row 2: answer: missing; found question$"),
    "unknown form": (line({"input": "1+1?", "output": "2"}), r", row 1: found the columns input, output; needed: "),
    "no mark": (GOOD + line({**ROWS[0], "answer": "it is 5"}), r", row 2: answer: found 'it is 5'; needed: .*'#### '"),
    "mark without space": (line({**ROWS[0], "answer": "####5"}), r", row 1: answer: found '####5'"),
    "two marks": (line({**ROWS[0], "answer": "#### 5 #### 6"}), r", row 1: answer: found '#### 5 #### 6'"),
    "not a number": (
        line({**ROWS[0], "answer": "x\n#### five"}),
        r", row 1: answer: found 'x\\n#### five'; needed: .* one number$",
    ),
    "no number": (line({**ROWS[0], "answer": "x\n#### "}), r", row 1: answer: found .*; needed: .*'#### '"),
    "empty question": (GOOD + GOOD + line({**ROWS[0], "question": " \n"}), r", row 3: question: found an empty text$"),
    "question no text": (line({**ROWS[0], "question": 5}), r", row 1: question: found 5; needed: a text$"),
    "answer null": (line({**ROWS[0], "answer": None}), r", row 1: answer: found nothing; needed: a text$"),
    "half a character": (line({**ROWS[0], "question": "a\ud800"}), r", row 1: question: found a lone surrogate"),
    "broken line": (GOOD + b"\n" + GOOD[:-5] + b"\n", r", row 3: not one JSON object a line: "),
    "a column twice": (b'{"question": "2?", "question": "3?", "answer": "#### 1"}', r", row 1: .* a column twice"),
    "two objects": (GOOD[:-1] + GOOD, r", row 1: not one JSON object a line: "),
    "not UTF-8": (GOOD + b'{"question": "\xff"}', r", row 2: byte 14 is not UTF-8"),
    "not an object": (GOOD + b"[1, 2]\n", r", row 2: found list; needed: an object"),
    "first not an object": (b"5\n", r", row 1: found int; needed: an object"),
    "no columns": (b"{}\n", r", row 1: found the columns none; needed: "),
    "same name twice": (line({**ROWS[0], "Answer": "#### 6"}), r", row 1: found the columns question, answer, Answer"),
    "empty file": (b"", r"rows\.jsonl: no rows found"),
    "blank lines": (b"\n \n", r"rows\.jsonl: no rows found"),
    "chat: system turn": (
        line({"messages": [{"role": "system", "content": "Hi"}, USER], "answer": "#### 2"}),
        r", row 1: messages: found the turns system, user; needed: user, or user and assistant",
    ),
    "chat: no turns": (line({"messages": [], "answer": "#### 2"}), r", row 1: messages: found the turns none"),
    "chat: no list": (line({"messages": "1+1?", "answer": "#### 2"}), r", row 1: messages: found '1\+1\?'; needed: a"),
    "chat: no content": (line({"messages": [{"role": "user"}], "answer": "#### 2"}), r"row 1: content: missing; found"),
    "chat: nothing to score": (
        line({"messages": [USER]}),
        r", row 1: found no answer; needed: the assistant turn or ",
    ),
    "chat: unmarked turn": (line({"messages": [USER, {"role": "assistant", "content": "two"}]}), r"row 1: found 'two'"),
    "chat: unmarked answer": (line({"messages": [USER], "answer": "two"}), r"row 1: answer: found 'two'; needed: a "),
    "chat: two answers": (
        line(chat(ROWS[0], answer="6")),
        r", row 1: two different answers: the assistant turn says 5, answer says 6$",
    ),
    "verl: no answer": (line({"prompt": [USER]}), r", row 1: found no answer; needed: extra_info\.answer or "),
    "verl: two answers": (
        line({"prompt": [USER], "extra_info": {"answer": "#### 2"}, "reward_model": {"ground_truth": "3"}}),
        r", row 1: two different answers: extra_info.answer says 2, reward_model.ground_truth says 3$",
    ),
    "verl: no object": (line({"prompt": [USER], "reward_model": "2"}), r", row 1: extra_info and reward_model: needed"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_row_is_refused_by_file_and_row(case: str, tmp_path: Path) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        gsm8k_files.read(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_unreadable_files_are_refused_by_name(tmp_path: Path) -> None:
    good = write_parquet(tmp_path / "good.parquet", ROWS).read_bytes()
    (tmp_path / "rows.txt").write_bytes(GOOD)
    (tmp_path / "rows").write_bytes(GOOD)
    (tmp_path / "cut.parquet").write_bytes(good[:-20])
    (tmp_path / "empty.parquet").write_bytes(b"")
    (tmp_path / "jsonl.parquet").write_bytes(GOOD)
    (tmp_path / "folder.jsonl").mkdir()
    cases = {
        "rows.txt": "found the ending '.txt'",
        "rows": "found the ending 'none'",
        "cut.parquet": "not a readable parquet file",
        "empty.parquet": "not a readable parquet file",
        "jsonl.parquet": "not a readable parquet file",
        "folder.jsonl": "cannot be read",
        "absent.jsonl": "cannot be read",
    }
    for name, message in cases.items():
        with pytest.raises(InputError, match=message) as caught:
            gsm8k_files.read(tmp_path / name)
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_flipped_byte_in_our_own_parquet_file_is_noticed(tmp_path: Path) -> None:
    start = write_jsonl(tmp_path / "start.jsonl", ROWS)
    gsm8k_files.convert(start, tmp_path / "chat.parquet")
    content = bytearray((tmp_path / "chat.parquet").read_bytes())
    content[content.index(b"1,197")] ^= 1  # in a page, where only the checksum can tell
    (tmp_path / "flipped.parquet").write_bytes(content)
    with pytest.raises(InputError, match="flipped.parquet: not a readable parquet file"):
        gsm8k_files.read(tmp_path / "flipped.parquet")


# --------------------------------------------------------------------------------------------------------- command line
def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(REPOSITORY / "data_gsm8k.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_command_converts_and_never_overwrites(tmp_path: Path) -> None:
    start, out = write_jsonl(tmp_path / "start.jsonl", ROWS), tmp_path / "chat.parquet"
    done = run_command("convert", start, out)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("3 rows: ")
    before = out.read_bytes()
    (tmp_path / "bad.jsonl").write_bytes(GOOD + b"{\n")
    for arguments, message in (
        ((start, out), "File exists"),
        ((start, start), "File exists"),
        ((start, tmp_path / "out.csv"), "found the ending '.csv'"),
        ((start, tmp_path / "absent" / "out.jsonl"), "out.jsonl: not written"),
        ((tmp_path / "bad.jsonl", tmp_path / "new.jsonl"), "bad.jsonl, row 2"),
    ):
        failed = run_command("convert", *arguments)
        assert failed.returncode == 2 and failed.stdout == ""
        assert re.fullmatch(rf"error: .*{re.escape(message)}.*\n", failed.stderr), failed.stderr
    assert out.read_bytes() == before and not (tmp_path / "new.jsonl").exists()


def test_command_without_arguments_shows_its_usage() -> None:
    shown = run_command()
    assert shown.returncode == 0 and "usage: data_gsm8k.py" in shown.stdout and "convert" in shown.stdout
    assert run_command("convert").returncode == 2


# ----------------------------------------------------------------------------------------------------------------- pick
def make_questions(num: int, seed: int = 0) -> data_gsm8k.Questions:
    return data_gsm8k.Questions([data_gsm8k.Question(str(i), "", "", []) for i in range(num)], seed)


@pytest.mark.parametrize(("num", "count"), [(10, 3), (7, 7), (5, 8), (1, 4), (100, 32)])
def test_every_epoch_asks_every_question_once(num: int, count: int) -> None:
    questions = make_questions(num)
    steps = -(-4 * num // count)
    asked = [question.question for step in range(steps) for question in questions.pick(step, count)]
    for epoch in range(4):
        assert sorted(map(int, asked[epoch * num : (epoch + 1) * num])) == list(range(num))


def test_pick_is_a_function_of_seed_and_step() -> None:
    asked = {step: make_questions(50).pick(step, 8) for step in (9, 3, 0)}  # no order, no memory
    walked = make_questions(50)
    assert [walked.pick(step, 8) for step in range(10)][9] == asked[9]
    assert make_questions(50).pick(3, 8) == asked[3]
    assert make_questions(50, seed=1).pick(0, 50) != make_questions(50).pick(0, 50)
    assert make_questions(50).pick(0, 50) != make_questions(50).pick(1, 50)
    # Fixed for good: a run resumed by another version must go on with the same questions.
    assert "".join(question.question for question in make_questions(10).pick(0, 10)) == "2714069835"


# ----------------------------------------------------------------------------------------------------------- arithmetic
def recompute(question: str) -> tuple[int, int, str, int]:
    """(x, y, sign, result) from the wording of a question."""
    x, y = map(int, re.findall(r"\d+", question))
    more, less = re.search(r"finds|puts in|buys", question), re.search(r"gives away|takes out|lost", question)
    assert (more is None) != (less is None)
    return x, y, "+" if more else "-", x + y if more else x - y


@pytest.mark.parametrize("heldout", [False, True])
def test_generated_answers_are_right(heldout: bool) -> None:
    pairs = data_gsm8k.arithmetic(3000, heldout, seed=0, low=1, high=49)
    assert len({question for question, _ in pairs}) == 3000
    for question, answer in pairs:
        x, y, sign, result = recompute(question)
        assert answer == f"{x} {sign} {y} = {result}\n#### {result}"
        assert 1 <= x <= 49 and 1 <= y <= 49 and result >= 0


@pytest.mark.parametrize(("low", "high"), [(1, 49), (0, 12), (1, 99), (10, 20)])
def test_train_and_test_share_no_operand_pair(low: int, high: int) -> None:
    train, test = (
        {frozenset(recompute(question)[:2]) for question, _ in data_gsm8k.arithmetic(900, heldout, 5, low, high)}
        for heldout in (False, True)
    )
    assert train and test and not train & test


def test_one_pair_in_eight_is_held_out() -> None:
    pairs = [(x, y) for x in range(1, 50) for y in range(x, 50)]
    assert len(pairs) == 1225
    assert sum(data_gsm8k.held_out(x, y) for x, y in pairs) == 151
    assert all(data_gsm8k.held_out(x, y) == data_gsm8k.held_out(y, x) for x, y in pairs)


def test_arithmetic_is_a_function_of_its_arguments() -> None:
    first = data_gsm8k.arithmetic(50, False, 3, 1, 49)
    random.seed(7)  # Python's own generator plays no part
    assert data_gsm8k.arithmetic(50, False, 3, 1, 49) == first
    assert data_gsm8k.arithmetic(60, False, 3, 1, 49)[:50] == first
    assert data_gsm8k.arithmetic(50, False, 4, 1, 49) != first


def test_a_range_that_cannot_be_split_is_refused() -> None:
    refused = 0
    for low in range(0, 60):
        for high in range(low, low + 4):
            sides = {data_gsm8k.held_out(x, y) for x in range(low, high + 1) for y in range(low, high + 1)}
            if sides == {True, False}:
                for heldout in sides:
                    assert len(data_gsm8k.arithmetic(20, heldout, 0, low, high)) == 20
            else:
                refused += 1
                for heldout in (True, False):
                    with pytest.raises(InputError, match=f"{low} to {high} has no (test|training) pair"):
                        data_gsm8k.arithmetic(20, heldout, 0, low, high)
                if refused == 1:
                    with pytest.raises(InputError, match="has no (test|training) pair"):  # not an endless loop
                        data_gsm8k.problem(random.Random(0), low, high, heldout=not next(iter(sides)))
        if refused > 40:
            break
    assert refused > 10


def test_more_questions_than_there_are_is_refused() -> None:
    # Range 1 to 7, by hand: every pair gives x + y, y + x and the difference, a double only two; 3 x 64 wordings each.
    pairs = [(x, y) for x in range(1, 8) for y in range(x, 8) if data_gsm8k.held_out(x, y)]
    available = sum((2 if x == y else 3) * 3 * 64 for x, y in pairs)
    assert len(data_gsm8k.arithmetic(available, True, 0, 1, 7)) == available
    with pytest.raises(InputError, match=f"data.num_test: found {available + 1}; operands 1 to 7 give {available} "):
        data_gsm8k.arithmetic(available + 1, True, 0, 1, 7)


def test_drills_are_right_and_never_held_out() -> None:
    rng = random.Random(0)
    kinds = Counter()
    for _ in range(5000):
        text, completion = drill(rng, 1, 49)
        x, sign, y = text.split()
        assert not data_gsm8k.held_out(int(x), int(y))
        assert completion == f" = {int(x) + int(y) if sign == '+' else int(x) - int(y)}"
        assert sign == "+" or int(x) >= int(y)
        kinds[sign] += 1
    assert min(kinds.values()) > 2000


def test_sloppy_answers_have_the_shares_asked_for() -> None:
    rng = random.Random(0)
    seen: Counter[str] = Counter()
    for _ in range(10_000):
        problem = data_gsm8k.problem(rng, 1, 49, heldout=False)
        x, y, sign, result = recompute(problem.question)
        answer = sloppy_solution(problem, rng, right=0.35, wrong_operation=0.55)
        a, op, b, written, final = re.fullmatch(r"(\d+) ([+-]) (\d+) = (\d+)\n#### (\d+)", answer).groups()
        assert written == final and {int(a), int(b)} == {x, y}
        if op != sign:
            assert int(final) == (x + y if op == "+" else abs(x - y))
            seen["operation"] += 1
        elif int(final) == result:
            assert answer == data_gsm8k.solution(problem.lines)
            seen["right"] += 1
        else:
            assert abs(int(final) - result) in (1, 10)
            seen["off"] += 1
    # Four standard deviations of a share of 10,000 are 0.02.
    assert abs(seen["right"] - 3500) < 200 and abs(seen["operation"] - 5500) < 200 and abs(seen["off"] - 1000) < 120


# ------------------------------------------------------------------------------------------------ tokenizer and prompts
def test_built_tokenizer_is_the_same_byte_for_byte(tmp_path: Path) -> None:
    texts = [question + answer for question, answer in data_gsm8k.arithmetic(300, False, 0, 1, 49)]
    sizes = [build_tokenizer(texts, 400, tmp_path / name) for name in ("a", "b")]
    assert sizes[0] == sizes[1] <= 400
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_built_tokenizer_reads_digits_one_by_one_and_any_text_back(tokenizer: Any) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("has 1234 pens", add_special_tokens=False)["input_ids"])
    assert [token for token in tokens if any(c.isdigit() for c in token)] == ["1", "2", "3", "4"]
    for text in ("37 - 25 = 12\n#### 12", "Äpfel − £ 🍎 \u2028\n\n  x", ROWS[1]["question"]):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2) and len(tokenizer) <= 400


def test_chat_template_gives_the_same_ids_by_text_and_by_the_tokenizer(tokenizer: Any) -> None:
    section = data()
    for row in ROWS:
        messages = [{"role": "user", "content": row["question"]}]
        ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
        found = data_gsm8k.prompt_ids(row["question"], tokenizer, section)
        assert found == ids
        assert tokenizer.decode(found) == f"<|im_start|>user\n{row['question']}<|im_end|>\n<|im_start|>assistant\n"
        assert found[0] == 1 and found.count(2) == 1


def test_the_instruction_follows_the_question(tokenizer: Any) -> None:
    ids = data_gsm8k.prompt_ids("1+1?", tokenizer, data(instruction="Think, then write '#### N'."))
    assert "user\n1+1? Think, then write '#### N'.<|im_end|>" in tokenizer.decode(ids)


def test_plain_template_is_used_without_a_chat_template(model_dir: Path) -> None:
    plain = data_gsm8k.load_tokenizer(model_dir)
    plain.chat_template = None
    section = data(prompt_template="Q {{x}}: {question}\nA:", instruction="Go.")
    for row in ROWS:  # braces in question or template are text
        text = plain.decode(data_gsm8k.prompt_ids(row["question"], plain, section))
        assert text == "Q {{x}}: " + row["question"] + " Go.\nA:"


@pytest.mark.parametrize(
    "template",
    [
        "<|im_start|>user\nSolve it.<|im_end|>\n<|im_start|>assistant\n",
        "{{ messages[0]['content'][:20] }}",
        "{{ messages[-1]['role'] }}",
        "{% for m in messages if m['role'] == 'system' %}{{ m['content'] }}{% endfor %}Go.",
    ],
)
def test_a_template_that_leaves_the_question_out_is_refused(template: str, model_dir: Path) -> None:
    broken = data_gsm8k.load_tokenizer(model_dir)
    broken.chat_template = template
    with pytest.raises(InputError, match="leaves out the text of a user turn, or a part of it: 'Tom buys"):
        data_gsm8k.prompt_ids("Tom buys 24 shells on Monday.", broken, data())


def test_a_template_may_change_spaces(model_dir: Path) -> None:
    tidy = data_gsm8k.load_tokenizer(model_dir)
    tidy.chat_template = "{{ messages[0]['content'] | trim }}"
    assert tidy.decode(data_gsm8k.prompt_ids(" 1 + 1? \n", tidy, data())) == "1 + 1?"


def test_two_questions_that_become_one_prompt_are_refused(tokenizer: Any, tmp_path: Path, monkeypatch) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": "#### 1"} for n in (1, 2, 1)]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    section = data(source="gsm8k", train_path=path)
    prompts = [question.prompt for question in data_gsm8k.load(section, "train", tokenizer, seed=0)]
    assert prompts[0] == prompts[2] != prompts[1]  # the same question twice is no fault
    real = data_gsm8k.prompt_ids
    monkeypatch.setattr(data_gsm8k, "prompt_ids", lambda question, *rest: real("What is 7 + 1?", *rest))
    with pytest.raises(InputError, match=r"'What is 1 \+ 1\?' and 'What is 2 \+ 1\?' become the same prompt"):
        data_gsm8k.load(section, "train", tokenizer, seed=0)


def test_overlong_prompts_are_refused_or_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"question": "pens " * n + "?", "answer": "#### 1"} for n in (3, 90, 1, 50)]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    whole = data_gsm8k.load(data(source="gsm8k", train_path=path), "train", tokenizer, seed=0)
    lengths = [len(question.prompt) for question in whole]
    assert lengths[1] > lengths[3] > lengths[0] > lengths[2] and whole.dropped == 0

    def load(**keys: Any) -> data_gsm8k.Questions:
        return data_gsm8k.load(data(source="gsm8k", train_path=path, **keys), "train", tokenizer, seed=0)

    assert len(load(max_prompt_tokens=lengths[1])) == 4  # the limit itself still fits
    message = rf"2 of 4 prompts .* data.max_prompt_tokens = 40; the longest \(question 2\) has {lengths[1]} tokens"
    with pytest.raises(InputError, match=message):
        load(max_prompt_tokens=40)
    kept = load(max_prompt_tokens=40, overlong_prompts="drop")
    assert [question.question for question in kept] == [rows[0]["question"], rows[2]["question"]] and kept.dropped == 2
    assert kept.description.endswith(f"longest prompt {lengths[0]} of 40 tokens, dropped 2")
    with pytest.raises(InputError, match="4 of 4 prompts are longer"):
        load(max_prompt_tokens=2, overlong_prompts="drop")


def test_loading_arithmetic_gives_prompts_and_golds(tokenizer: Any) -> None:
    section = data(num_train=40, num_test=20)
    train, test = (data_gsm8k.load(section, split, tokenizer, seed=0) for split in ("train", "test"))
    assert (len(train), len(test)) == (40, 20)
    for question in [*train, *test]:
        assert question.gold == str(recompute(question.question)[3])
        assert question.question in tokenizer.decode(question.prompt)
    assert all(data_gsm8k.held_out(*recompute(question.question)[:2]) for question in test)
    assert train.description.startswith("40 questions from arithmetic (train) (generated, operands 1 to 49)")


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(tokenizer: Any, tmp_path: Path) -> None:
    def stops(content: str) -> set[int]:
        (tmp_path / "generation_config.json").write_text(content)
        return data_gsm8k.stop_token_ids(tmp_path, tokenizer)

    assert data_gsm8k.stop_token_ids(tmp_path, tokenizer) == {2}
    assert stops('{"eos_token_id": 0}') == {0, 2}
    assert stops('{"eos_token_id": [2, 0, 7]}') == {0, 2, 7}
    assert stops('{"eos_token_id": null}') == stops("{}") == {2}
    for content in ("[]", "{", '{"eos_token_id": "2"}', '{"eos_token_id": [true]}', '{"eos_token_id": -1}'):
        with pytest.raises(InputError, match="generation_config.json"):
            stops(content)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(InputError, match="names an EOS token"):
        data_gsm8k.stop_token_ids(tmp_path, SimpleNamespace(eos_token_id=None))


def test_a_missing_or_damaged_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: no such directory"):
        data_gsm8k.load_tokenizer(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    with pytest.raises(InputError, match="no tokenizer found; needed: tokenizer.json"):
        data_gsm8k.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes()[:-100])
    with pytest.raises(InputError, match="the tokenizer cannot be loaded") as caught:
        data_gsm8k.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
