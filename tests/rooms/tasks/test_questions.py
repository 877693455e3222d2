"""Questions of files and their prompts, and generated arithmetic."""

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

import data_gsm8k
from facts.exits import InputError
from inputs.config import load_config
from knobs import DataConfig
from tasks import arithmetic, question_files
from tasks.question_files import Question
from weights import tiny_model
from weights.tiny_model import build_tokenizer

# ------------------------------------------------------------------------------------------------ questions and prompts
# Data: malformed rows are refused by file and row, conversion loses nothing,
# and a step's questions depend on (seed, step) alone. A prompt has its system turn, its worked examples and its
# question.
#
# What the command says of files that it cannot use: test_bad_input.py.

ROWS = [
    {"question": "Mia has 3 pens \u2028and {2} more. How many?", "answer": "3 + 2 = 5\n#### 5"},
    {"question": "Ben had 1,200 coins; he lost 3 £. How many are left?\n", "answer": "1,200 - 3 = 1,197\n#### 1,197"},
    {"question": "Wie viele Äpfel sind −1 und 0.5?", "answer": "-1 + 0.5 = -0.5\n#### -0.5"},
]


def make_model_dir(folder: Path) -> Path:
    """A model's folder without weights: a tokenizer whose chat template is ChatML, and config.json."""
    pairs = arithmetic.examples(1500, heldout=False, seed=1, low=1, high=49)
    build_tokenizer((f"user\n{question}\nassistant\n{answer}" for question, answer in pairs), 400, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return folder


def data(**keys: Any) -> DataConfig:
    """The section data; the questions are generated unless ``keys`` says otherwise."""
    return DataConfig(**{"source": "arithmetic", **keys})


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(model_dir: Path) -> Any:
    return data_gsm8k.load_tokenizer(model_dir)


@pytest.fixture
def theirs(model_dir: Path) -> PreTrainedTokenizerFast:
    """The same tokenizer as transformers reads it, which can get more tokens."""
    return PreTrainedTokenizerFast.from_pretrained(model_dir)


def write_parquet(path: Path, rows: list[Any]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def read_pairs(path: Path) -> list[tuple[str, str]]:
    return [(row.question, row.answer) for row in question_files.read(path)[0]]


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


# ----------------------------------------------------------------------------------------------------- equal questions
@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("Mia has 3 pens. How many?", "  Mia has\t3 \u00a0pens.\r\nHow\u2028many?\u3000"),
        ("Wie viele \u00c4pfel?", "Wie viele  A\u0308pfel?"),  # one letter, or a letter and a mark
        ("How many \u212bngstr\u00f6m?", "How many \u00c5ngstro\u0308m?"),
    ],
)
def test_questions_are_one_if_they_differ_in_white_space_or_composition(first: str, other: str, tmp_path: Path) -> None:
    row = {"question": first, "answer": "#### 3"}
    path = write_jsonl(tmp_path / "train.jsonl", [row, {"question": other, "answer": "so\n#### 3.0"}])
    assert read_pairs(path) == [(first, "#### 3")]  # one answer: the first row stands for both
    write_jsonl(path, [ROWS[0], row, {"question": other, "answer": "#### 4"}])
    with pytest.raises(
        InputError, match="train.jsonl, row 3: answer: 4, but .*train.jsonl, row 2 has the same question with 3; keep"
    ):
        question_files.read(path)
    write_jsonl(tmp_path / "shots.jsonl", [{"question": other, "answer": "#### 3"}])
    with pytest.raises(InputError, match="which is asked as well"):
        data_gsm8k.few_shot(data(few_shot_path=str(tmp_path / "shots.jsonl")), [Question.worked(**row)])


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("What is 3\u00b2 + 1?", "What is 32 + 1?"),  # a power, and a number
        ("What is 5\u2082 in base 2?", "What is 52 in base 2?"),
        ("What is \u00bd of 12?", "What is 1\u20442 of 12?"),
        ("What is A if a = 1?", "What is a if a = 1?"),
        ("Is \u2124 a field?", "Is Z a field?"),
        ("What is 2\ufe0f\u20e3 + 1?", "What is 2\u20e3 + 1?"),
        ("Is it ma\u00dfe?", "Is it masse?"),
        ("Mia has 3 pens.", "\uff2dia \u200b has \uff13 pens\uff0e"),
    ],
)
def test_questions_that_differ_otherwise_are_two_and_a_warning_names_the_first_pair(
    first: str, other: str, tmp_path: Path
) -> None:
    rows = [{"question": first, "answer": "#### 3"}, {"question": other, "answer": "#### 4"}]
    path = write_jsonl(tmp_path / "train.jsonl", [ROWS[0], *rows, ROWS[1]])
    asked = question_files.read(path)[0]
    assert [row.question for row in asked] == [ROWS[0]["question"], first, other, ROWS[1]["question"]]
    assert data_gsm8k.few_shot(data(few_shot_path=str(path)), [Question.worked("Who?", "#### 1")]) == asked
    assert question_files.alike(asked, asked) == question_files.alike(asked[:2], asked[2:]) == [(first, other)]
    assert question_files.alike(asked[:2], asked[:2]) == []


def test_a_question_is_normalised_once_for_all_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start compares the questions of each split with themselves and with those of the other splits."""
    asked = [Question.worked(f"How many pens has Ada after week {n}?", "#### 1") for n in range(4)]
    counted = Mock(wraps=question_files.words)
    monkeypatch.setattr(question_files, "words", counted)
    assert question_files.alike(asked, asked) == question_files.alike(asked[:2], asked) == []
    assert counted.call_count == len(asked)


@pytest.mark.parametrize("form", ["columns", "verl"])
def test_copies_of_a_question_are_asked_and_counted_once(form: str, tokenizer: Any, tmp_path: Path) -> None:
    """AIME's 30 questions, for example, are published 32 times each. A row's other columns may differ."""
    copies = [row | {"index": place} for place in range(32) for row in FORMS[form]]
    files = [str(write_jsonl(tmp_path / f"{n}.jsonl", part)) for n, part in enumerate((copies[:50], copies[50:]))]
    section = data(source="gsm8k", train_path=files, test_path=files)
    for split in ("train", "test"):
        loaded = data_gsm8k.load(section, split, tokenizer, seed=0)
        assert [(one.question, one.answer) for one in loaded] == [(row["question"], row["answer"]) for row in ROWS]
        assert "3 questions from " in loaded.description and "; 96 rows, 3 different questions); " in loaded.description
        assert len({one.question for one in loaded.pick(7, 3)}) == 3
    few = data_gsm8k.read(section.model_copy(update={"num_train": 2}), "train")[2]
    assert few.endswith("96 rows, 3 different questions; 2 of 3, evenly spaced")
    with pytest.raises(InputError, match="data.num_train: 4 exceeds the .*96 rows, 3 different questions.; lower it"):
        data_gsm8k.read(section.model_copy(update={"num_train": 4}), "train")


@pytest.mark.parametrize(
    ("row", "columns"),
    [  # as TRL, ms-swift and slime publish them
        ({"messages": [{"role": "user", "content": "2 + 2?"}], "solution": "4"}, ("messages", "solution")),
        ({"prompt": [{"role": "user", "content": "2 + 2?"}], "label": 4}, ("prompt", "label")),
        ({"question": "2 + 2?", "answer": "4"}, ("question", "answer")),
    ],
)
def test_the_message_about_other_columns_names_what_reads_them(row: dict, columns: tuple, tmp_path: Path) -> None:
    path = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(
        InputError, match="row 1: .*; for a question and an answer in other columns, set data.source=file and data.col"
    ):
        data_gsm8k.read(data(source="gsm8k", train_path=path), "train")
    (read,) = data_gsm8k.read(own(path, *columns), "train")[0]
    assert (read.question, read.gold) == ("2 + 2?", "4")


# ------------------------------------------------------------------------------------------------------- malformed rows
def line(row: Any) -> bytes:
    return json.dumps(row).encode() + b"\n"


GOOD = line(ROWS[0])
USER = {"role": "user", "content": "1+1?"}
MALFORMED = {
    "missing column": (
        GOOD + line({"question": "1+1?"}),
        r", row 2: answer: missing or null; found the columns question; for a question and an answer in other columns",
    ),
    "unknown form": (line({"input": "1+1?", "output": "2"}), r", row 1: found the columns input, output; give "),
    "no mark": (GOOD + line({**ROWS[0], "answer": "it is 5"}), r", row 2: answer: found 'it is 5'; give .*'#### '"),
    "empty question": (
        GOOD + GOOD + line({**ROWS[0], "question": " \n"}),
        r", row 3: question: found an empty text; ",
    ),
    "broken line": (GOOD + b"\n" + GOOD[:-5] + b"\n", r", row 3: the line is not a JSON object: "),
    "not UTF-8": (GOOD + b'{"question": "\xff"}', r", row 2: the line is not a JSON .*byte 0xff in position 14"),
    "not an object": (GOOD + b"[1, 2]\n", r", row 2: found list; give an object"),
    "empty file": (b"", r"rows\.jsonl: has no rows"),
    "chat: two user turns": (
        line({"messages": [{"role": "system", "content": "Hi"}, USER, USER], "answer": "#### 2"}),
        r", row 1: messages: found the turns system, user, user; give an optional system turn, then user",
    ),
    "chat: unmarked turn": (
        line({"messages": [USER, {"role": "assistant", "content": "two"}]}),
        r"row 1: answer: found 'two'",
    ),
    "chat: two answers": (
        line(chat(ROWS[0], answer="6")),
        r", row 1: two different answers: the assistant turn says 5, answer says 6; for a question",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_row_is_refused_by_file_and_row(case: str, tmp_path: Path) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        question_files.read(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_flipped_byte_in_a_parquet_file_with_checksums_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, write_page_checksum=True)
    content = bytearray(path.read_bytes())
    content[content.index(b"1,197")] ^= 1  # in a page, where only the checksum can tell
    (tmp_path / "flipped.parquet").write_bytes(content)
    with pytest.raises(InputError, match="flipped.parquet: not a readable parquet file"):
        question_files.read(tmp_path / "flipped.parquet")


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array([b"\xff"]).view(pyarrow.string()),  # text that is not UTF-8
        pyarrow.array([2**62], pyarrow.timestamp("us")),  # a time after the last one of Python
    ],
)
def test_a_value_of_a_parquet_file_that_python_cannot_hold_is_refused(values: pyarrow.Array, tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"question": values, "answer": ["#### 3"]}), path)
    with pytest.raises(InputError, match="rows.parquet: not a readable parquet file"):
        question_files.read(path)


# ------------------------------------------------------------------------- a cell that is another thing, as a text
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "It's 1+1?"}]
WRITTEN = {
    "JSON": json.dumps(TURNS),
    "JSON on lines": json.dumps(TURNS, indent=2),
    "JSON within JSON": json.dumps(json.dumps(TURNS)),
    "Python": repr(TURNS),
    "numpy": str(np.array(TURNS)),
    "numpy's repr": repr(np.array(TURNS)),
    "an object": json.dumps(TURNS[1]),
    "parts": json.dumps([{"type": "text", "text": "1+1?"}]),
    "ShareGPT": json.dumps([{"from": "human", "value": "1+1?"}]),
    "a class": "[ChatMessage(role='user', content='1+1?')]",
    "cut off": json.dumps(TURNS)[:-9],
    "pairs": repr([("user", "1+1?")]),
    "a list of texts": '["What is 1+1?"]',
    "bytes": repr(b"What is 1+1?"),
    "YAML": "- role: user\n  content: What is 1+1?",
    "YAML on a line": "{role: user, content: What is 1+1?}",
    "an empty list": "[]",
    "numpy with its package": "numpy.array(['What is 1+1?'])",
    "no cell": "nan",
    "None": "None",
}
MEDIA = """<image> <IMG> <img> <image_1> <|image_1|> <image~1> <|image_pad|> <|vision_start|> <start_of_image>
    <im_patch> <image_soft_token> <video> <|video_pad|> <audio> <|AUDIO|> <|audio_bos|> <speech> <ImageHere>
    <|media_begin|> <sound> <image:~cat.png> [IMG] [IMAGE] [image_1]
    [AUDIO] <img~src="a.png"/> ![figure](a.png) data:image/png;base64,iVBOR""".split()
TEXTS = [  # of GSM8K, of MATH, and as a problem may be written
    "[1, 2, 3]", "{1, 2} and [a, b]", "(3, 4)", "[asy]\ndraw((0,0)--(1,1));\n[/asy] What is the area?", "$[0, 1)$",
    "What is the image of f?", "Is a<b and c>d?", "If x < 3 and image > 2?", "$\\text{image}(A)$", "The <think> token?",
    "{x | x > 2}", "Nan buys 3 pens.", "n! [a] (b)", '"Who?", asked Tom.', "<b>1+1</b>",
    "A list ['a', 'b'] has how many members?", "12", "What does {'a': 1}['a'] give?", "A video costs 3 dollars.",
    "Mary's role: assistant manager. She earns 5 an hour.", "A <video game> sells for $5.", "From: user 3 to user 5.",
]  # fmt: skip


def refused(path: Path, rows: list[Any], **section: Any) -> str:
    """The message with which reading the file is refused; it begins with file and row."""
    write_jsonl(path, rows)
    columns = section.get("columns")
    with pytest.raises(InputError) as caught:
        question_files.read(path, columns)
    number = len(rows)
    assert str(caught.value).startswith(f"{path}, row {number}: "), caught.value
    return str(caught.value).removeprefix(f"{path}, row {number}: ")


@pytest.mark.parametrize("case", WRITTEN)
def test_a_list_an_object_or_an_empty_cell_written_as_text_is_refused_with_row_and_column(
    case: str, tmp_path: Path
) -> None:
    text, path = WRITTEN[case], tmp_path / "rows.jsonl"
    gold = {"reward_model": {"ground_truth": "2"}}
    for column, row in {
        "question": {"question": text, "answer": "#### 2"},
        "messages": {"messages": text, "answer": "#### 2"},
        "prompt": {"prompt": text, **gold},
        "content": {"messages": [{"role": "user", "content": text}], "answer": "#### 2"},
        "extra_info.question": {"prompt": [USER], "extra_info": {"question": text}, **gold},
    }.items():
        assert refused(path, [ROWS[0] if column == "question" else row, row][-1:], columns=None).startswith(
            f"{column}: "
        )
    own = {"question": "q.text", "answer": "a"}
    assert refused(path, [{"q": {"text": "1?"}, "a": 2}, {"q": {"text": text}, "a": "2"}], columns=own).startswith(
        "q.text"
    )
    section = data(source="file", columns=own, few_shot_path=str(path))
    with pytest.raises(InputError, match="rows.jsonl, row 2: q.text: found "):
        data_gsm8k.few_shot(section, [])


@pytest.mark.parametrize("case", ["JSON", "Python", "numpy", "an object", "JSON within JSON", "ShareGPT"])
def test_turns_written_as_text_are_no_answer(case: str, tmp_path: Path) -> None:
    rows = [{"q": "1?", "a": "[2, 5)"}, {"q": "2?", "a": WRITTEN[case]}]
    assert "a: found " in refused(tmp_path / "rows.jsonl", rows, columns={"question": "q", "answer": "a"})


@pytest.mark.parametrize("mark", MEDIA)
def test_a_mark_of_a_medium_is_refused_with_row_and_column(mark: str, tmp_path: Path) -> None:
    mark = mark.replace("~", " ")
    for text in (mark, f"{mark}\nHow many?", f"What is in {mark}?"):
        said = refused(tmp_path / "rows.jsonl", [ROWS[0], {"question": text, "answer": "#### 2"}])
        assert said.startswith("question: found ") and "medium" in said


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_only_looks_similar_is_a_question(text: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": text, "answer": "[1, 2]"}])
    (row,) = question_files.read(path, {"question": "question", "answer": "answer"})[0]
    assert (row.question, row.gold) == (text, "[1, 2]")


FULL = {
    "images": ["a.png"], "image": {"bytes": None, "path": "a.png"}, "Image": "a.png", "image_1": "a.png",
    "imageUrl": "u", "video": "a.mp4", "videos": [[0.5]], "audio": {"array": [0.1], "sampling_rate": 3},
    "tools": [{"name": "calculator"}], "tools_json": "[{}, 1]", "files": ["a.csv"], "file": "a.csv",
    "multi_modal_data": {"image": ["a"]}, "documents": ["d"],
    "has_image": True, "pixel_values": [[1]], "functions": [{"name": "f"}], "attachments": ["a"], "image-path": "a.png",
    "image1": "a.png", "sound": "a.wav", "function_call": {"name": "f"}, "attached_files": ["a.csv"],
}  # fmt: skip
UNFILLED = [
    None,
    "",
    [],
    {},
    "[]",
    "null",
    [None],
    {"bytes": None, "path": ""},
    False,
    0,
    float("nan"),
    "None",
    [""],
    "[null]",
]


@pytest.mark.parametrize("column", FULL)
def test_a_filled_column_that_changes_the_question_is_refused_with_row_and_column(column: str, tmp_path: Path) -> None:
    path, own = tmp_path / "rows.jsonl", {"question": "question", "answer": "answer"}
    plain = {"question": "How many?", "answer": "#### 2"}
    for columns in (None, own):
        for empty in UNFILLED:
            write_jsonl(path, [plain | {column: empty}])
            assert question_files.read(path, columns)[0][0].question == "How many?"
        rows = [plain, {**plain, "question": "And now?", column: FULL[column]}]
        assert refused(path, rows, columns=columns).startswith(f"{column}: found ")
    turn = {"role": "user", "content": "How many?", column: FULL[column]}
    assert refused(path, [{"messages": [turn], "answer": "#### 2"}]).startswith(f"{column}: found ")


@pytest.mark.parametrize(
    "row",
    [
        {"level": 5, "type": "Algebra", "unique_id": "test/a.json", "subject": "Tools", "source": "images"},
        {"filename": "a.json", "significant_figures": 3, "url": "http://a", "imagery": "vivid", "solution": "<image>"},
    ],
)
def test_columns_that_change_nothing_are_kept(row: dict, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [row | {"question": "1?", "answer": "#### 2"}])
    assert question_files.read(path)[0][0].columns.items() >= row.items()


def test_the_column_that_is_asked_or_answered_is_no_column_beside_it(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"function": "x^2", "image": "4"}])
    assert question_files.read(path, {"question": "function", "answer": "image"})[0][0].gold == "4"


def test_two_columns_of_one_name_and_equal_keys_are_refused(tmp_path: Path) -> None:
    """One of the two would be lost without a word."""
    path = tmp_path / "rows.jsonl"
    assert "differ only in case" in refused(path, [{"Question": "1?", "question": "2?", "answer": "#### 2"}])
    for name, text in (
        ("rows.jsonl", '{"question": "1?", "question": "2?", "answer": "#### 2"}'),
        ("rows.json", '[{"question": "1?", "answer": "#### 2", "more": {"a": 1, "a": 1}}]'),
        ("again.json", '{"rows": [], "rows": [{"question": "1?", "answer": "#### 2"}]}'),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match=rf"{name}.*: '(question|a|rows)' occurs twice"):
            question_files.read(tmp_path / name)


# ------------------------------------------------------------------------------------------------- files of any columns
MATH = [  # rows of the form of MATH-500, made up
    {"problem": "What is $\\frac{1}{2}+\\frac14$?", "answer": " \\frac{3}{4}\n", "level": 2, "unique_id": "a.json"},
    {"problem": "Which digits? {0}", "answer": "025", "level": 5, "unique_id": "test/b.json"},
]


def own(path: str | list[str], question: str = "problem", answer: str = "answer", **keys: Any) -> DataConfig:
    return data(source="file", train_path=path, columns={"question": question, "answer": answer}, **keys)


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "json", "json with one list"])
def test_columns_of_any_name_give_the_text_as_the_gold_answer_and_all_columns_to_the_reward(
    ending: str, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / f"rows.{ending.split()[0]}"
    if path.suffix == ".json":
        path.write_text(json.dumps({"version": "1", "rows": MATH} if "with" in ending else MATH))
    else:
        (write_jsonl if ending == "jsonl" else write_parquet)(path, MATH)
    number = {"problem": "2 + 2?", "answer": 4, "level": None}
    more = write_jsonl(tmp_path / "more.jsonl", [MATH[0], number])
    loaded = data_gsm8k.load(own([str(path), str(more)], instruction="Go."), "train", tokenizer, seed=0)
    assert [one.gold for one in loaded] == ["\\frac{3}{4}", "025", "4"]
    assert [one.columns for one in loaded] == [*MATH, number]
    assert tokenizer.decode(loaded[1].prompt).endswith(f"{MATH[1]['problem']} Go.<|im_end|>\n<|im_start|>assistant\n")
    form = "columns problem and answer; 4 rows, 3 different questions"
    assert f"3 questions from {path}, {more} ({form})" in loaded.description


def test_a_list_of_turns_is_the_prompt_and_names_with_dots_lead_into_objects(tokenizer: Any, tmp_path: Path) -> None:
    turns = [("system", "Be brief."), ("user", "1+1?"), ("assistant", "2"), ("user", "and 2+2?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = [
        {"messages": messages, "reward_model": {"ground_truth": 4.5}, "reward_model.style": "rule"},
        {
            "messages": [*messages[1:], {"role": "assistant", "content": "It is 7."}],
            "reward_model": {"ground_truth": "7"},
            "reward_model.style": "rule",
        },
    ]
    rows[1]["messages"][2] = {"role": "user", "content": "and 3+4?"}
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    section = own(path, "messages", "reward_model.ground_truth", instruction="Go.")
    one, other = data_gsm8k.load(section, "train", tokenizer, seed=0)
    assert (one.gold, other.gold, one.question) == ("4.5", "7", "1+1?\n\n2\n\nand 2+2?") and one.columns == rows[0]
    template = "<|im_start|>{}\n{}<|im_end|>\n"
    talk = [*turns[:-1], ("user", "and 2+2? Go.")]
    assert tokenizer.decode(one.prompt) == "".join(template.format(*turn) for turn in talk) + "<|im_start|>assistant\n"
    assert "It is 7." not in tokenizer.decode(other.prompt)  # a last assistant turn would give the answer away
    assert (
        question_files.read(Path(path), {"question": "messages", "answer": "reward_model.style"})[0][0].gold == "rule"
    )
    with pytest.raises(InputError, match=r"data.system: the question 'and 2\+2\?' has a system turn; remove one of"):
        data_gsm8k.load(own(path, "messages", "reward_model.ground_truth", system="Hi"), "train", tokenizer, seed=0)
    # The same reader for GSM8K's forms, whose gold answer is the number after the mark.
    write_jsonl(Path(path), [{"messages": messages, "answer": "so\n#### 4"}])
    (marked,) = data_gsm8k.load(data(source="gsm8k", train_path=path), "train", tokenizer, seed=0)
    assert marked.gold == "4" and marked.prompt[:20] == one.prompt[:20] and marked.columns["answer"] == "so\n#### 4"


def test_a_number_of_training_questions_is_taken_evenly_from_all_files_and_leaves_the_held_out_ones(
    tmp_path: Path,
) -> None:
    """Files are often in an order, such as that of subjects, so the first rows would not stand for all of them."""
    paths = [
        str(write_jsonl(tmp_path / f"{name}.jsonl", [{"problem": f"{name} {n}?", "answer": n} for n in range(count)]))
        for name, count in (("a", 4), ("b", 6))
    ]
    chosen = own(paths, num_train=4, test_path=paths)
    rows, _, form = data_gsm8k.read(chosen, "train")
    assert [row.question for row in rows] == ["a 0?", "a 2?", "b 1?", "b 3?"] and form.endswith(
        "4 of 10, evenly spaced"
    )
    assert len(data_gsm8k.read(chosen, "test")[0]) == 10
    assert data_gsm8k.read(own(paths, num_train=10), "train")[0] == data_gsm8k.read(own(paths), "train")[0]
    with pytest.raises(InputError, match=r"data.num_train: 11 exceeds .*b.jsonl .10 rows"):
        data_gsm8k.read(own(paths, num_train=11), "train")


def test_worked_examples_have_the_form_of_the_file(tokenizer: Any, tmp_path: Path) -> None:
    asked, shots = (str(write_jsonl(tmp_path / f"{n}.jsonl", [row])) for n, row in enumerate(MATH))
    (one,) = data_gsm8k.load(own(asked, few_shot_path=shots), "train", tokenizer, seed=0)
    assert f"{MATH[1]['problem']}<|im_end|>\n<|im_start|>assistant\n025<|im_end|>\n" in tokenizer.decode(one.prompt)
    with pytest.raises(InputError, match="which is asked as well"):
        data_gsm8k.load(own(asked, few_shot_path=asked), "train", tokenizer, seed=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"problem": "1?"}, "row 2: answer: missing or null; found the columns problem$"),
        ({"problem": "1?", "answer": True}, "row 2: answer: found true; give a text"),
        ({"problem": "1?", "answer": " "}, "row 2: answer: found an empty text"),
        ({"problem": [], "answer": "1"}, "row 2: problem: found the turns none; give"),
        ({"problem": "Which  digits?\n{0}", "answer": "25"}, None),  # the same number
        (
            {"problem": "Which  digits?\n{0}", "answer": "x"},
            "row 2: answer: x, but {first}, row 2 has the same question with 025",
        ),
    ],
)
def test_a_bad_row_of_named_columns_is_refused(row: dict, message: str | None, tmp_path: Path) -> None:
    first = write_jsonl(tmp_path / "first.jsonl", MATH)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"problem": "Last?", "answer": 1}, row])
    columns = {"question": "problem", "answer": "answer"}
    if message is None:
        assert len(question_files.read((str(first), str(path)), columns)[0]) == 3
        return
    with pytest.raises(InputError, match=f"{path}, {message.replace('{first}', str(first))}"):
        question_files.read((str(first), str(path)), columns)


@pytest.mark.parametrize("content", ['{"a": 1}', '{"a": [], "b": []}', "3", "["])
def test_json_that_is_no_list_of_rows_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(InputError, match="rows.json: (found . lists of rows; give a list of obj|not valid JSON)"):
        question_files.read(tmp_path / "rows.json", {"question": "problem", "answer": "answer"})


# ----------------------------------------------------------------------------------------------------------------- pick
def make_questions(num: int, seed: int = 0) -> data_gsm8k.Questions:
    return data_gsm8k.Questions([Question(str(i), "", "", []) for i in range(num)], seed)


@pytest.mark.parametrize(("num", "count"), [(10, 3), (5, 8), (100, 32)])
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


def test_further_rounds_ask_what_the_step_has_not_asked_and_depend_on_seed_step_and_round() -> None:
    def more(questions: data_gsm8k.Questions, step: int, round_: int, count: int) -> str:
        return "".join(q.question for q in questions.pick_more(step, round_, count, questions.pick(step, 4)))

    questions = make_questions(10)
    assert sorted(more(questions, 3, 1, 99)) == sorted({*"0123456789"} - {q.question for q in questions.pick(3, 4)})
    assert more(questions, 3, 1, 99)[:2] == more(make_questions(10), 3, 1, 2) and more(questions, 3, 1, 0) == ""
    others = (
        more(questions, 3, 1, 6),
        more(questions, 3, 2, 6),
        more(questions, 4, 1, 6),
        more(make_questions(10, 1), 3, 1, 6),
    )
    assert len(set(others)) == 4


# ----------------------------------------------------------------------------------------------------------- arithmetic
def test_a_range_that_cannot_be_split_is_refused() -> None:
    """Of the pairs of one operand with itself, most are for training and some are held out, so one side is empty."""
    sides = {arithmetic.held_out(low, low): low for low in range(60)}
    assert sides.keys() == {True, False}
    for side, low in sides.items():
        with pytest.raises(InputError, match=f"{low} to {low} has no (test|training) pair"):
            arithmetic.examples(9, side, 0, low, low)
        with pytest.raises(InputError, match="has no (test|training) pair"):  # not an endless loop
            arithmetic.problem(random.Random(0), low, low, heldout=not side)


# ------------------------------------------------------------------------------------------------ tokenizer and prompts
def test_built_tokenizer_is_the_same_byte_for_byte_and_reads_digits_one_by_one(
    tokenizer: Any, model_dir: Path, tmp_path: Path
) -> None:
    again = make_model_dir(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (again / name).read_bytes() == (model_dir / name).read_bytes()
    tokens = [tokenizer.decode([one]) for one in tokenizer("has 1234 pens", add_special_tokens=False)["input_ids"]]
    assert [token for token in tokens if any(c.isdigit() for c in token)] == ["1", "2", "3", "4"]
    for text in ("37 - 25 = 12\n#### 12", "Äpfel − £ 🍎 \u2028\n\n  x", ROWS[1]["question"]):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2) and len(tokenizer) <= 400


def test_overlong_prompts_are_refused_or_dropped_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"question": "pens " * n + "?", "answer": "#### 1"} for n in (3, 90, 1, 50)]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))

    def load(**keys: Any) -> data_gsm8k.Questions:
        return data_gsm8k.load(data(source="gsm8k", train_path=path, **keys), "train", tokenizer, seed=0)

    lengths = [len(question.prompt) for question in load()]
    assert lengths[1] > lengths[3] > lengths[0] > lengths[2]
    assert len(load(max_prompt_tokens=lengths[1])) == 4  # the limit itself still fits
    message = rf"2 of 4 prompts .* data.max_prompt_tokens = 40; the longest \(question 2\) has {lengths[1]} tokens"
    with pytest.raises(InputError, match=message):
        load(max_prompt_tokens=40)
    kept = load(max_prompt_tokens=40, overlong_prompts="drop")
    assert [question.question for question in kept] == [
        rows[0]["question"],
        rows[2]["question"],
    ] and "dropped 2" in kept.description
    with pytest.raises(InputError, match="4 of 4 prompts are longer"):
        load(max_prompt_tokens=2, overlong_prompts="drop")


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(tokenizer: Any, tmp_path: Path) -> None:
    def stops(content: str) -> set[int]:
        (tmp_path / "generation_config.json").write_text(content)
        return data_gsm8k.stop_token_ids(tmp_path, tokenizer)

    assert data_gsm8k.stop_token_ids(tmp_path, tokenizer) == {2}
    assert stops('{"eos_token_id": 0}') == {0, 2}
    assert stops('{"eos_token_id": [2, 0, 7]}') == {0, 2, 7}
    assert stops('{"eos_token_id": null}') == stops("{}") == {2}
    for content in ("[]", "{", '{"eos_token_id": [true]}', '{"eos_token_id": -1}'):
        with pytest.raises(InputError, match="generation_config.json"):
            stops(content)
    (tmp_path / "generation_config.json").unlink()
    with pytest.raises(InputError, match="names an EOS token"):
        data_gsm8k.stop_token_ids(tmp_path, SimpleNamespace(eos_token_id=None))


def test_a_missing_or_damaged_tokenizer_is_refused(model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent: no tokenizer found; add tokenizer.json"):
        data_gsm8k.load_tokenizer(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (tmp_path / "tokenizer.json").write_bytes((model_dir / "tokenizer.json").read_bytes()[:-100])
    with pytest.raises(InputError, match="the tokenizer cannot be loaded") as caught:
        data_gsm8k.load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "is_wrong"),
    [
        ("chat_template.json", {"chat_template": "{{ messages }}"}, True),
        ("chat_template.json", {"chat_template": tiny_model.CHAT_TEMPLATE + "\n"}, False),
        ("chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("chat_template.jinja", tiny_model.CHAT_TEMPLATE, False),
    ],
)
def test_a_second_chat_template_is_refused_unless_it_is_the_same(
    name: str, content: Any, is_wrong: bool, tmp_path: Path
) -> None:
    folder = make_model_dir(tmp_path)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    if not is_wrong:
        assert data_gsm8k.load_tokenizer(folder).chat_template.strip() == tiny_model.CHAT_TEMPLATE
        return
    with pytest.raises(InputError, match="chat_template.json|tokenizer_config.json: its chat template is not the one"):
        data_gsm8k.load_tokenizer(folder)


# --------------------------------------------------------------------------------- the parts before the question
EXAMPLES = [
    Question.worked("What is 2 + 2?", "2 + 2 = 4\n#### 4"),
    Question.worked("What is 3 - 1?", "3 - 1 = 2\n#### 2"),
]
ASKED = [("user", "1+1?")]
# As hybrid models do it: without thoughts wanted, the answer begins with an empty thought.
HYBRID = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)


def test_system_turn_and_worked_examples_come_before_the_question(tokenizer: Any, tmp_path: Path) -> None:
    """As earlier turns of the chat, each question with the instruction; a file of its own, and a run's few lines."""
    rows = [row.columns for row in EXAMPLES]
    shots = str(write_jsonl(tmp_path / "shots.jsonl", rows))
    asked = str(write_jsonl(tmp_path / "rows.jsonl", [{"question": "What is 5 + 1?", "answer": "#### 6"}]))
    section = data(source="gsm8k", train_path=asked, few_shot_path=shots, system="Be brief.", instruction="Go.")
    loaded = data_gsm8k.load(section, "train", tokenizer, seed=0)
    assert tokenizer.decode(loaded[0].prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is 2 + 2? Go.<|im_end|>\n<|im_start|>assistant\n2 + 2 = 4\n#### 4<|im_end|>\n"
        "<|im_start|>user\nWhat is 3 - 1? Go.<|im_end|>\n<|im_start|>assistant\n3 - 1 = 2\n#### 2<|im_end|>\n"
        "<|im_start|>user\nWhat is 5 + 1? Go.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_without_a_chat_template_examples_follow_the_plain_one(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    text = tokenizer.decode(data_gsm8k.prompt_ids(ASKED, tokenizer, data(system="Be brief."), EXAMPLES[:1]))
    assert text == "Be brief.\n\nQuestion: What is 2 + 2?\nAnswer: 2 + 2 = 4\n#### 4\n\nQuestion: 1+1?\nAnswer:"


SWITCHES = [  # how a template asks whether it is true; a choice among texts, which is none
    ("qwen3", HYBRID),
    (
        "deepseek",
        "{% if not enable_thinking is defined %}{% set enable_thinking = true %}{% endif %}{% if enable_thinking %}",
    ),
    ("smollm3", "{{ '/think' if (enable_thinking) else '/no_think' }}{% if enable_thinking and x is defined %}"),
]
CHOICE = "{% if enable_thinking == 'off' %}<think></think>{% else %}{{ enable_thinking }}{% endif %}"


@pytest.mark.parametrize("value", ["false", 0, None])
@pytest.mark.parametrize(("name", "template"), SWITCHES)
def test_a_switch_of_a_template_takes_true_or_false_alone(name: str, template: str, value: Any, tokenizer: Any) -> None:
    """A template takes every text for true, and 0 is not false for `is false`: the model would go on thinking."""
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="data.chat_template_kwargs.enable_thinking: must be true or false, not "):
        data_gsm8k.prompt_ids(ASKED, tokenizer, data(chat_template_kwargs={"enable_thinking": value}))


@pytest.mark.parametrize("value", ["off", 3])
def test_a_template_may_choose_by_a_value_that_is_no_switch(value: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}" + CHOICE
    section = data(chat_template_kwargs={"enable_thinking": value})
    shown = "<think></think>" if value == "off" else str(value)
    assert tokenizer.decode(data_gsm8k.prompt_ids(ASKED, tokenizer, section)) == f"1+1?{shown}"


UNFIT = {  # template, section, message
    "user turn": ("{{ messages[0]['content'][:20] }}", {}, "leaves out the text of a user turn, or a part of it: 'Tom"),
    # Some models have no system turn, and their templates drop it without a word.
    "system turn": (
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
        {"system": "Be brief."},
        "leaves out the text of a system turn, .*: 'Be",
    ),
    "a misspelled name": (
        HYBRID,
        {"chat_template_kwargs": {"enable_thinkin": False}},
        r"data.chat_template_kwargs.enable_thinkin: the model's chat template does not read it",
    ),
    "the clock": (
        HYBRID + "{% if date is not defined %}{% set date = strftime_now('%H:%M') %}{% endif %}{{ date }}",
        {},
        r"the chat template fails \(strftime_now\('%H:%M'\): its prompts depend on the clock",
    ),
    "chance": (HYBRID + "{{ ['a', 'b'] | random }}", {}, "the chat template draws at random"),
    "a name of transformers": (HYBRID, {"chat_template_kwargs": {"messages": []}}, "the chat template fails"),
    "no template": (
        None,
        {"chat_template_kwargs": {"enable_thinking": False}},
        "enable_thinking has no effect, because this tokenizer has no chat template",
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_template_that_ignores_what_it_is_given_is_refused(case: str, tokenizer: Any) -> None:
    tokenizer.chat_template, section, message = UNFIT[case]
    with pytest.raises(InputError, match=message):
        data_gsm8k.prompt_ids([("user", "Tom buys 24 shells on Monday.")], tokenizer, data(**section))


# ------------------------------------------------------------------- the text of a special token, the end of a prompt
def with_tokens(tokenizer: Any, special: str = "", plain: str = "", **flags: bool) -> Any:
    """The tokenizer with another special token, and with one that is not special."""
    if special:
        tokenizer.add_tokens([AddedToken(special, special=True, **flags)], special_tokens=True)
    if plain:
        tokenizer.add_tokens([AddedToken(plain, special=False)])
    return tokenizer


SPECIAL = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "</s>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "[INST]",
    "|||E|||",
]


@pytest.mark.parametrize("token", SPECIAL)
@pytest.mark.parametrize(
    "part", ["question", "system turn", "earlier answer", "gold", "system", "instruction", "example"]
)
def test_a_users_text_that_would_become_a_special_token_is_refused_with_the_row_and_the_token(
    part: str, token: str, theirs: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer = with_tokens(theirs, token)
    text = f"5 {token}\n and 6"
    good = {"messages": [{"role": "user", "content": "1?"}], "a": "2"}
    talk = [{"role": role, "content": "2?"} for role in ("system", "user", "assistant", "user")]
    place = {"system turn": 0, "question": 3, "earlier answer": 2}.get(part)
    if place is not None:
        talk[place] = {**talk[place], "content": text}
    path = str(write_jsonl(tmp_path / "rows.jsonl", [good, {"messages": talk, "a": text if part == "gold" else "2"}]))
    plain = str(write_jsonl(tmp_path / "plain.jsonl", [good]))
    shots = str(
        write_jsonl(tmp_path / "shots.jsonl", [{"messages": talk[1:], "a": text if part == "example" else "3"}])
    )
    section = own(path, "messages", "a", test_path=path)
    where = rf"{path}, row 2: "
    if part in ("system", "instruction"):
        section, where = own(plain, "messages", "a", test_path=plain, **{part: text}), f"data.{part}: "
    elif part == "example":
        section, where = own(plain, "messages", "a", test_path=plain, few_shot_path=shots), f"{shots}, row 1: "
    for split in ("train", "test"):
        with pytest.raises(InputError, match=f"^{re.escape(where)}") as caught:
            data_gsm8k.load(section, split, tokenizer, seed=0)
        assert repr(token) in str(caught.value)
    good_section = own(plain, "messages", "a", system="Be brief.", instruction="Go.")
    assert len(data_gsm8k.load(good_section, "train", tokenizer, seed=0)) == 1


def test_a_special_token_is_found_as_the_tokenizer_finds_it(theirs: PreTrainedTokenizerFast) -> None:
    """By its own text alone, within a word, and in a normalised form where the tokenizer normalises."""
    tokenizer = with_tokens(theirs, "<stop>", plain="<think>")
    with_tokens(tokenizer, "WORD", single_word=True)
    special = data_gsm8k.special_tokens(tokenizer)
    for text, token in {
        "a<stop>b": "<stop>", "<st op>": "", "< stop>": "", "<think>1</think>": "", "SWORDS": "", "a WORD.": "WORD",
        "<|im_end|": "", "<|IM_END|>": "", "\U0001f34e": "",
    }.items():  # fmt: skip
        assert data_gsm8k.control_token(text, tokenizer, special) == token, text
        ids = data_gsm8k.plain_ids(text, tokenizer)
        assert tokenizer.decode(ids) == text and not special.keys() & set(ids)
        read = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (ids == read) == (not token)  # a text without one keeps its ids, those of <think> included
    lower = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    lower.backend_tokenizer.normalizer = Lowercase()
    with_tokens(lower, "<eot>", normalized=True)
    assert data_gsm8k.control_token("1 <EOT>", lower, data_gsm8k.special_tokens(lower)) == "<eot>"


def test_a_letter_that_the_tokenizer_lacks_is_no_special_token() -> None:
    words = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "<end>": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="<end>")
    special = data_gsm8k.special_tokens(tokenizer)
    assert data_gsm8k.control_token("one \u00e4", tokenizer, special) == ""
    assert data_gsm8k.control_token("one \u00e4 <end>", tokenizer, special) == "<end>"


CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
FLAG, END = "{% if add_generation_prompt %}", "{% endif %}"
TALK = "{{% for m in messages %}}{}{{% endfor %}}"
BY_ROLE = "{{% for m in messages %}}{{% if m.role == 'assistant' %}}{}{{% else %}}{}{{% endif %}}{{% endfor %}}"
THINKING = TALK.format("{% if m.role == 'assistant' and loop.last %}<|im_start|>assistant\n<think>\n\n</think>\n\n"
                       "{{ m.content }}<|im_end|>\n{% else %}" + CHATML + "{% endif %}")  # fmt: skip
LLAMA = "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
INTERN = BY_ROLE.format("<|Bot|>:{{ m.content }}<eoa>\n", "<|User|>:{{ m.content }}<eoh>\n")
OPENING = {
    "ChatML": f"{TALK.format(CHATML)}{FLAG}<|im_start|>assistant\n{END}",
    "always": f"{TALK.format(CHATML)}<|im_start|>assistant\n",
    "always, with a thought": f"{TALK.format(CHATML)}<|im_start|>assistant\n<think>\n",
    "Mistral, which has no flag": BY_ROLE.format(" {{ m.content }}</s>", "[INST] {{ m.content }} [/INST]"),
    "Gemma, with another role": TALK.format(
        "<t>{{ 'model' if m.role == 'assistant' else 'user' }}\n{{ m.content }}</t>\n"
    )
    + f"{FLAG}<t>model\n{END}",
    "Qwen3, with an empty thought": f"{THINKING}{FLAG}<|im_start|>assistant\n{END}",
    "R1, with a thought": BY_ROLE.format("<|A|>{{ m.content }}<|e|>", "<|U|>{{ m.content }}")
    + f"{FLAG}<|A|><think>\n{END}",
    "harmony, whose model writes the channel": TALK.format(
        "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|e|>"
    )
    + f"{FLAG}<|start|>assistant{END}",
    "Llama 3": f"{TALK.format(LLAMA)}{FLAG}<|start_header_id|>assistant<|end_header_id|>\n\n{END}",
    "Vicuna": BY_ROLE.format("ASSISTANT: {{ m.content }}</s>", "USER: {{ m.content }} ") + f"{FLAG}ASSISTANT:{END}",
    "one question alone": "Question: {{ messages[-1].content }}\nAnswer:",
    "one question, or an error": "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}"
    "User: {{ messages[0].content }}\nAssistant:",
    "InternLM": f"{INTERN}{FLAG}<|Bot|>:{END}",
}
CLOSED = {
    "never": TALK.format(CHATML),
    "another flag": f"{TALK.format(CHATML)}{{% if generate %}}<|im_start|>assistant\n{END}",
    "the user's turn": f"{TALK.format(CHATML)}{FLAG}<|im_start|>user\n{END}",
    "always the user's turn": f"{TALK.format(CHATML)}<|im_start|>user\n",
    "a turn of nobody": f"{TALK.format(CHATML)}{FLAG}<|im_start|>{END}",
    "an empty line": f"{TALK.format(CHATML)}{FLAG}\n{END}",
    "opened and ended": f"{TALK.format(CHATML)}{FLAG}<|im_start|>assistant\n<|im_end|>\n{END}",
    "only without the flag": f"{TALK.format(CHATML)}{{% if not add_generation_prompt %}}<|im_start|>assistant\n{END}",
    "two kinds of ends": INTERN,
    "Llama 3": TALK.format(LLAMA),
    "the text alone": TALK.format("{{ m.content }}\n"),
    "one question alone": "Question: {{ messages[-1].content }}\n",
    "only after others": f"{TALK.format(CHATML)}{{% if messages | length > 1 %}}<|im_start|>assistant\n{END}",
}


def load_one(tokenizer: Any, template: str, folder: Path) -> data_gsm8k.Questions:
    tokenizer.chat_template = template
    path = str(write_jsonl(folder / "rows.jsonl", [{"question": "How many?", "answer": "#### 2"}]))
    return data_gsm8k.load(data(source="gsm8k", train_path=path), "train", tokenizer, seed=0)


@pytest.mark.parametrize("case", OPENING)
def test_a_template_that_begins_the_assistants_turn_is_taken(case: str, tokenizer: Any, tmp_path: Path) -> None:
    assert len(load_one(tokenizer, OPENING[case], tmp_path)) == 1


@pytest.mark.parametrize("case", CLOSED)
def test_a_template_that_does_not_begin_the_assistants_turn_is_refused_by_the_end_of_the_prompt(
    case: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="a prompt ends with '.*' after the question, which does not begin the assist"):
        load_one(tokenizer, CLOSED[case], tmp_path)


def test_a_date_that_the_configuration_gives_needs_no_clock(tokenizer: Any) -> None:
    tokenizer.chat_template = UNFIT["the clock"][0]
    text = tokenizer.decode(data_gsm8k.prompt_ids(ASKED, tokenizer, data(chat_template_kwargs={"date": "26 Jul"})))
    assert text.endswith("<|im_start|>assistant\n26 Jul")


# ------------------------------------------------------------------------------------------------- generated arithmetic
# Generated problems of one and of several operations, the teacher's answers to them, and the drills of the warm start.
#
# What one operation gives is fixed for good by digests: the figures of README.md and the records rest on those
# questions. Everything else is recomputed here from the wording of a question, not with the functions under test.

MANY = 3
LINE = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")
MORE, LESS = r"finds|puts in|buys|come|brings|picks up|wins", r"gives away|takes out|lost|borrows|sells|drops"


def digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def recomputed(question: str) -> list[tuple[int, str, int, int]]:
    """(number, sign, operand, result) of every operation, from the wording of a question."""
    sentences = [one for one in re.split(r"(?<=\.) ", question) if not one.startswith("How many")]
    if " box." in sentences[0]:  # "There are 3 pens in a box. Tom puts in 4 more."
        sentences[:2] = [" ".join(sentences[:2])]
    (x, y), lines = map(int, re.findall(r"\d+", sentences[0])), []
    for sentence in sentences:
        if lines:
            x, (y,) = lines[-1][3], map(int, re.findall(r"\d+", sentence))
        sign = "+" if re.search(MORE, sentence) else "-"
        assert (sign == "-") == bool(re.search(LESS, sentence)) or "get lost" in sentence
        lines.append((x, sign, y, x + y if sign == "+" else x - y))
    return lines


def parsed(answer: str) -> list[tuple[int, str, int, int]]:
    """The lines of an answer, after a look at its form: a line for every operation, then the last result."""
    *lines, last = answer.split("\n")
    found = [LINE.fullmatch(line).groups() for line in lines]
    assert last == f"#### {found[-1][3]}"
    return [(int(x), sign, int(y), int(result)) for x, sign, y, result in found]


def held_out_lines(lines: list[tuple[int, str, int, int]]) -> list[bool]:
    return [arithmetic.held_out(x, y) for x, _, y, _ in lines]


def test_one_operation_gives_the_questions_and_the_warm_start_that_it_always_gave() -> None:
    """Digests of commit 840b191, before there were several operations."""
    assert digest([*arithmetic.examples(4096, False, 0, 1, 49)]) == "4cae48852fe71a4b"
    assert digest([*arithmetic.examples(1024, True, 0, 1, 49)]) == "5cdf06fc446c90c9"
    rng, made = random.Random(0), []
    for _ in range(500):
        problem = arithmetic.problem(rng, 1, 49, heldout=False)
        answer = tiny_model.sloppy_solution(problem, rng, 0.35, 0.55)
        made.append((problem.question, arithmetic.solution(problem.lines), answer, tiny_model.drill(rng, 1, 49)))
    assert digest(made) == "513acb8823920ac9"
    assert rng.random() == 0.673722966036232, "as many random numbers as before"


def test_the_recipe_of_an_older_model_is_still_that_of_one_operation() -> None:
    one, many = load_config("configs/tiny_cpu.yaml"), load_config("configs/bench.yaml")
    older, newer = (tiny_model.recipe(cfg.tiny_model, cfg.data, cfg.row_tokens) for cfg in (one, many))
    assert older.keys() == {"tiny_model", "config", "operands"}
    assert newer["operations"] == [1, 3]


def test_answers_of_several_operations_are_right_and_of_every_length() -> None:
    pairs = arithmetic.examples(1500, True, 0, 1, 30, MANY)
    assert len({question for question, _ in pairs}) == 1500
    lengths = Counter()
    for question, answer in pairs:
        lines = parsed(answer)
        assert lines == recomputed(question)
        assert all(1 <= y <= 30 for _, _, y, _ in lines) and all(0 <= result <= 99 for *_, result in lines)
        lengths[len(lines)] += 1
    assert sorted(lengths) == [1, 2, 3]
    assert min(lengths.values()) > 400, "drawn evenly: 500 each, a standard deviation is 18"


@pytest.mark.parametrize(("low", "high", "most"), [(1, 30, 3), (0, 12, 2)])
def test_a_held_out_problem_begins_with_a_held_out_pair_and_a_training_problem_has_none(low, high, most) -> None:
    for _, answer in arithmetic.examples(800, True, 3, low, high, most):
        assert held_out_lines(parsed(answer))[0]
    for _, answer in arithmetic.examples(800, False, 3, low, high, most):
        assert not any(held_out_lines(parsed(answer)))


def test_the_benchmark_asks_every_held_out_pair() -> None:
    cfg = load_config("configs/bench.yaml")
    low, high = arithmetic.LOWEST_OPERAND, cfg.data.operand_high
    pairs = {(x, y) for x in range(low, high + 1) for y in range(x, high + 1) if arithmetic.held_out(x, y)}
    asked = {tuple(sorted(parsed(row.answer)[0][0:3:2])) for row in data_gsm8k.read(cfg.data, "test")[0]}
    assert len(pairs) == 57 and asked == pairs


def test_the_warm_start_never_computes_with_a_held_out_pair() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        problem = arithmetic.problem(rng, 1, 30, False, MANY)
        assert not any(held_out_lines(parsed(tiny_model.sloppy_solution(problem, rng, 0.36, 0.58))))
        assert tiny_model.sloppy_solution(problem, rng, 1.0, 0.0) == arithmetic.solution(problem.lines)
        text, completion = tiny_model.drill(rng, 1, 30, MANY)
        ((x, sign, y, result),) = lines = parsed(f"{text}{completion}\n####{completion[2:]}")
        assert not any(held_out_lines(lines)) and result == (x + y if sign == "+" else x - y) and 0 <= result <= 99


def test_the_teacher_goes_on_from_what_he_found_and_errs_in_every_operation_alike() -> None:
    rng, right, wrong, lines_seen = random.Random(0), Counter(), Counter(), Counter()
    problems = (arithmetic.problem(rng, 1, 30, False, MANY) for _ in range(12_000))
    for problem in (problem for problem in problems if len(problem.lines) == 3):
        answer = parsed(tiny_model.sloppy_solution(problem, rng, 0.36, 0.58))
        before = problem.lines[0][0]
        for place, ((x, sign, y, result), (_, asked, operand, _)) in enumerate(zip(answer, problem.lines, strict=True)):
            assert {x, y} == {before, operand}
            true = x + y if sign == "+" else x - y
            assert result == true or abs(result - true) in (1, 10)
            right[place] += result == true and sign == asked
            wrong[place] += result == true and sign != asked
            before = result
            lines_seen[place] += 1
    # In an eighth of the problems the other operation leads to a held-out pair in the next one and is drawn again.
    # There the teacher is right with 0.36 / (0.36 + 0.06): 7/8 x 0.36 + 1/8 x 0.857 = 0.42, and wrong with 7/8 x 0.58.
    for place, (by_hand, other) in enumerate([(0.42, 0.51), (0.42, 0.51), (0.36, 0.58)]):
        assert right[place] / lines_seen[place] == pytest.approx(by_hand, abs=0.03), place
        assert wrong[place] / lines_seen[place] == pytest.approx(other, abs=0.03), place


@pytest.mark.nightly
def test_more_questions_of_several_operations_than_there_are_is_refused(monkeypatch) -> None:
    """Operands 1 to 7 have one held-out pair, {1, 7}: 3 ways to begin x 3 templates x 64 names and items x the rest."""
    monkeypatch.setattr(arithmetic, "MOST_DRAWS", 1000)
    with pytest.raises(
        InputError, match="data.num_test: found 1000000, but operands 1 to 7 give only about [0-9]+ different"
    ):
        arithmetic.examples(10**6, True, 0, 1, 7, 2)
