"""GSM8K files on disk, .jsonl or .parquet: their rows as questions and worked answers, and conversion between forms.

A row that cannot be used is an InputError with the file, the number of the row, what was found and what is needed; no
row is skipped or repaired silently.  Rows count from 1; the number of a jsonl row is that of its line.
"""

import io
import json
import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from inputs.files import LINES_MIB, UNUSABLE, InputError, disk_errors, one_line, read_bytes, shown, write_atomically
from reward_gsm8k import gold_answer

NUMBER = re.compile(r"-?[0-9]{1,100}(\.[0-9]{1,100})?")  # ASCII digits, because the rewards compare these
LONGEST_TEXT = 100_000  # characters; the longest text of GSM8K has about 1,000


# Characters that are drawn as nothing and are letters, marks or unassigned to Unicode (Default_Ignorable_Code_Point),
# and the empty pattern of Braille.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\ufe00-\ufe0f\ufff0-\ufff8\U00016fe4\U000e0000-\U000e0fff]"
)


class Row(NamedTuple):
    question: str
    answer: str  # worked answer, which ends in '#### ' and a number
    others: dict[str, Any]  # the other columns


class Form(NamedTuple):
    """One way to write questions and answers as columns of a table."""

    name: str
    columns: tuple[str, ...]  # a file has this form if its first row has these columns
    used: tuple[str, ...]  # columns that conversion replaces; the others are copied
    parse: Callable[[dict[str, Any]], tuple[str, str]]  # row -> (question, worked answer)


# -------------------------------------------------------------------------------------------------------------- reading
def read(path: str | Path) -> tuple[list[Row], str]:
    """Every row of a file, and the name of its form, which the first row decides (FORMS)."""
    path = Path(path)
    data = read_bytes(path, LINES_MIB)
    _check_ending(path)
    table = _parquet_rows(data, path) if path.suffix == ".parquet" else _jsonl_rows(data, path)
    form, rows = None, []
    asked: dict[str, tuple[int, str]] = {}  # question -> the first row that asks it, and its answer
    for number, row in table:
        try:
            if not isinstance(row, dict):
                raise InputError(f"found {type(row).__name__}; needed: an object with columns")
            columns = {name.lower(): value for name, value in row.items()}
            if len(columns) < len(row):
                raise InputError(f"found the columns {', '.join(row)}; needed: names that differ in more than capitals")
            form = form or next((form for form in FORMS if columns.keys() >= set(form.columns)), None)
            if form is None:
                raise InputError(
                    f"found the columns {', '.join(sorted(columns)) or 'none'}; needed: an object with columns "
                    "question and answer, or messages, or prompt with reward_model"
                )
            question, answer = form.parse(columns)
            gold = gold_number(answer)
            first, known = asked.setdefault(alike(question), (number, gold))
            if Decimal(gold) != Decimal(known):
                raise InputError(f"answer: {gold}; row {first} has the same question with {known}; needed: one answer")
            if "" in asked:
                raise InputError("question: found an empty text")
        except InputError as error:
            raise InputError(f"{path}, row {number}: {error}") from error
        rows.append(Row(question, answer, {name: row[name] for name in row if name.lower() not in form.used}))
    if form is None:
        raise InputError(f"{path}: no rows found; needed: at least one question")
    return rows, form.name


def words(text: str) -> str:
    """`text` with single spaces and in Unicode's form NFKC: a template or a tokenizer may change spaces and forms."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def alike(question: str) -> str:
    """The text by which questions are compared: two that a reader cannot tell apart, or that differ in case, are one.

    It is in form NFKC, without case, without characters of no width and control characters, and with single spaces.
    """
    text = unicodedata.normalize("NFKC", question).casefold()
    if not text.isprintable():
        text = "".join(c for c in text if c.isspace() or unicodedata.category(c) not in ("Cc", "Cf"))
    return words(INVISIBLE.sub("", text))


def gold_number(answer: str) -> str:
    """The final number of a worked answer; raises InputError unless it ends in exactly one `#### N`."""
    try:
        gold = gold_answer(answer) if answer.count("####") == 1 else ""
    except ValueError:
        gold = ""
    if not NUMBER.fullmatch(gold):
        found = ascii(answer[-50:])  # ascii: digits of another script look like ours
        raise InputError(f"answer: found {found}; needed: a worked answer that ends in '#### ' and one number")
    return gold


def _parse_messages(row: dict[str, Any]) -> tuple[str, str]:
    user, *assistant = _turns(row, "messages")
    short = _text(row, "answer") if row.get("answer") is not None else None
    return user, _one_answer("the assistant turn", next(iter(assistant), None), "answer", short)


def _parse_prompt(row: dict[str, Any]) -> tuple[str, str]:
    user = _turns(row, "prompt")[0]
    extra, reward = ({} if row.get(name) is None else row[name] for name in ("extra_info", "reward_model"))
    if not isinstance(extra, dict) or not isinstance(reward, dict):
        raise InputError("extra_info and reward_model: needed: objects")
    # The text of `prompt` ends with an instruction of its author; extra_info has the question without it.
    question = _text(extra, "question") if "question" in extra else user
    worked = _text(extra, "answer") if "answer" in extra else None
    short = _text(reward, "ground_truth") if "ground_truth" in reward else None
    return question, _one_answer("extra_info.answer", worked, "reward_model.ground_truth", short)


FORMS = (
    Form(
        "question/answer columns",
        ("question", "answer"),
        ("question", "answer"),
        lambda row: (_text(row, "question"), _text(row, "answer")),
    ),
    Form("chat form, messages", ("messages",), ("messages", "answer"), _parse_messages),
    Form(
        "chat form, prompt with reward_model; the instruction comes from data.instruction",
        ("prompt",),
        ("prompt",),
        _parse_prompt,
    ),
)


def _one_answer(name: str, text: str | None, short_name: str, short: str | None) -> str:
    """The worked answer of a row, from a text and from a short form that may be a number alone; None for absent ones.

    Both numbers must agree. The first of the two that ends in '#### N' is the answer, or else the text and the number.
    """
    if short is not None and "####" not in short:
        number = short.replace(",", "").strip()
        if not NUMBER.fullmatch(number):
            raise InputError(f"{short_name}: found {shown(short)}; needed: a number, or a text that ends in '#### N'")
        short = f"#### {number}" if text is None or "####" in text else f"{text}\n#### {number}"
    worked = {name: found for name, found in ((name, text), (short_name, short)) if found and "####" in found}
    if not worked:
        found = "no answer" if text is None else shown(text)
        raise InputError(f"found {found}; needed: {name} or {short_name}, ending in '#### ' and a number")
    golds = {name: gold_number(found) for name, found in worked.items()}
    if len(set(golds.values())) > 1:
        raise InputError("two different answers: " + ", ".join(f"{name} says {gold}" for name, gold in golds.items()))
    return next(iter(worked.values()))


def _turns(row: dict[str, Any], name: str) -> list[str]:
    """The texts of a chat: that of the user, and that of the assistant if there is one; InputError for other turns."""
    turns = row.get(name)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{name}: found {shown(turns)}; needed: a list of objects with role and content")
    roles = [turn.get("role") for turn in turns]
    if roles not in (["user"], ["user", "assistant"]):
        raise InputError(
            f"{name}: found the turns {', '.join(map(str, roles)) or 'none'}; needed: user, or user and assistant (a "
            "system text belongs in data.instruction)"
        )
    return [_text(turn, "content") for turn in turns]


def _text(row: dict[str, Any], name: str) -> str:
    """The text in column ``name``, which must be there, not empty, not too long, and valid Unicode."""
    if name not in row:
        raise InputError(f"{name}: missing; found {', '.join(map(str, row)) or 'nothing'}")
    value = row[name]
    if not isinstance(value, str):
        raise InputError(f"{name}: found {shown(value)}; needed: a text")
    if not value.strip():
        raise InputError(f"{name}: found an empty text")
    if len(value) > LONGEST_TEXT:
        raise InputError(f"{name}: found {len(value)} characters; needed: at most {LONGEST_TEXT}")
    if UNUSABLE.search(value):
        raise InputError(f"{name}: found a lone surrogate or NUL in {shown(value)}; needed: valid Unicode without")
    return value


def _check_ending(path: Path) -> None:
    if path.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"{path}: found the ending {path.suffix or 'none'!r}; needed: .jsonl or .parquet")


def _parquet_rows(data: bytes, path: Path) -> Iterable[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    rows: list[Any] = []
    size = 0
    try:
        file = parquet.ParquetFile(io.BytesIO(data), page_checksum_verification=True)
        for batch in file.iter_batches(batch_size=1024, use_threads=False):
            rows += batch.to_pylist()
            size += batch.nbytes
            if size > LINES_MIB * 2**20:  # run-length coding lets a short file hold very many rows
                raise InputError(f"more than {LINES_MIB} MiB of rows, the most that is read")
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not a readable parquet file: {one_line(error)}") from error
    return enumerate(rows, start=1)


def _jsonl_rows(data: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    # Split at \n alone: splitlines() of a text would also split at U+2028 inside a question.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            if line.strip():
                yield number, json.loads(line.decode("utf-8"), parse_constant=_no_number, object_pairs_hook=_object)
        except UnicodeDecodeError as error:
            raise InputError(f"{path}, row {number}: byte {error.start} is not UTF-8; needed: UTF-8") from error
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, row {number}: not one JSON object a line: {one_line(error)}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError(f"found a column twice among {', '.join(name for name, _ in pairs)}; needed: each once")
    return dict(pairs)


def _no_number(name: str) -> None:
    raise ValueError(f"found {name}, which is no JSON; needed: a number or null")


# ----------------------------------------------------------------------------------------------------------- conversion
def convert(in_path: str | Path, out_path: str | Path) -> str:
    """Write question/answer columns as chat form (messages, answer), or any other form as question/answer columns.

    The ending of ``out_path`` chooses .jsonl or .parquet.  Other columns are copied; an existing file is refused.
    Returns the one line to print.
    """
    out = Path(out_path)
    _check_ending(out)
    parsed, form = read(in_path)
    to_chat = form == FORMS[0].name
    rows = []
    for question, answer, others in parsed:
        new: dict[str, Any] = {"question": question, "answer": answer}
        if to_chat:
            new = {
                "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
                "answer": answer,
            }
        if taken := [name for name in others if name.lower() in new]:
            raise InputError(f"{in_path}: found the other column {taken[0]}; needed: a file without it")
        rows.append(new | others)
    data = _parquet_bytes(rows, out) if out.suffix == ".parquet" else _jsonl_bytes(rows, out)
    if os.path.lexists(out):
        raise InputError(f"{out}: cannot be written (File exists); needed: the name of a new file")
    with disk_errors(out):
        write_atomically(out, data)
    return f"{len(rows)} rows: {in_path} ({form}) -> {out} ({FORMS[to_chat].name})"


def _jsonl_bytes(rows: list[dict[str, Any]], out: Path) -> bytes:
    try:
        return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise InputError(f"{out}: a column cannot be written as JSON: {one_line(error)}") from error


def _parquet_bytes(rows: list[dict[str, Any]], out: Path) -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    try:
        table = pyarrow.Table.from_pylist(rows)
        parquet.write_table(table, buffer, write_page_checksum=True)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise InputError(f"{out}: the rows do not form a table: {one_line(error)}") from error
    if table.to_pylist() != rows:  # pyarrow takes the columns of row 1 and fills in or drops those of the others
        raise InputError(f"{out}: the rows differ in their columns; needed: equal columns in all rows, or .jsonl")
    return buffer.getvalue()
