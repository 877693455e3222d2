"""GSM8K files on disk, jsonl or parquet: rows -> (question, worked answer, other columns); conversion between forms.

The form is found per file and named.  A row that cannot be used is an InputError with file, row number, what was found
and what is needed; nothing is skipped or repaired silently.  Rows count from 1; a jsonl row's number is its line.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from input_files import LINES_MIB, InputError, read_bytes
from reward_gsm8k import gold_answer

NUMBER = re.compile(r"-?[0-9]{1,100}(\.[0-9]{1,100})?")  # ASCII digits, as the rewards compare them
LONGEST_TEXT = 100_000  # characters; GSM8K's longest has some 1,000
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # JSON can write half a character, UTF-8 cannot


# -------------------------------------------------------------------------------------------------------------- reading
def read(path: str | Path) -> tuple[list[tuple[str, str, dict[str, Any]]], str]:
    """Every row of a file as (question, worked answer, its other columns), and the name of the form found in row 1.

    Forms: question/answer columns (openai/gsm8k; capital letters allowed); `messages`, chat turns, with the worked
    answer in the assistant's turn or `answer` or both; `prompt`, chat turns, with `extra_info` and `reward_model`.
    """
    rows = _read_table(Path(path))
    first_row, first = rows[0]
    names = {name.lower() for name in first} if isinstance(first, dict) else set()
    if {"question", "answer"} <= names:
        form, parse = "question/answer columns", _parse_columns
    elif "messages" in names:
        form, parse = "chat form, messages", _parse_messages
    elif "prompt" in names:
        form, parse = "chat form, prompt with reward_model; the instruction comes from data.instruction", _parse_prompt
    else:
        found = f"the columns {', '.join(sorted(names)) or 'none'}" if isinstance(first, dict) else type(first).__name__
        needed = "question and answer, or messages, or prompt with reward_model"
        raise InputError(f"{path}, row {first_row}: found {found}; needed: an object with columns {needed}")
    parsed = []
    for number, row in rows:
        try:
            if not isinstance(row, dict):
                raise InputError(f"found {type(row).__name__}; needed: an object with columns")
            columns = {name.lower(): value for name, value in row.items()}
            if len(columns) < len(row):
                raise InputError(f"found the columns {', '.join(row)}; needed: names that differ in more than capitals")
            question, answer, used = parse(columns)
            gold_number(answer)
        except InputError as error:
            raise InputError(f"{path}, row {number}: {error}") from error
        parsed.append((question, answer, {name: value for name, value in row.items() if name.lower() not in used}))
    return parsed, form


def gold_number(answer: str) -> str:
    """The final number of a worked answer; raises InputError unless it ends in exactly one `#### N`."""
    if answer.count("####") != 1:
        raise InputError(f"answer: found {_short(answer)}; needed: a worked answer that ends in '#### ' and a number")
    try:
        gold = gold_answer(answer)
    except ValueError as error:
        raise InputError(str(error)) from error
    if not NUMBER.fullmatch(gold):
        raise InputError(f"answer: found {_short(gold)} after '#### '; needed: one number")
    return gold


def _parse_columns(row: dict[str, Any]) -> tuple[str, str, set[str]]:
    return _text(row, "question"), _text(row, "answer"), {"question", "answer"}


def _parse_messages(row: dict[str, Any]) -> tuple[str, str, set[str]]:
    user, assistant = _turns(row, "messages")
    worked = {} if assistant is None else {"the assistant turn": assistant}
    if row.get("answer") is None:
        return user, _one_answer(worked, None, "messages with an assistant turn, or answer"), {"messages", "answer"}
    answer = _text(row, "answer")
    final = None if "####" in answer else ("answer", answer)
    return user, _one_answer(worked if final else {**worked, "answer": answer}, final, "answer"), {"messages", "answer"}


def _parse_prompt(row: dict[str, Any]) -> tuple[str, str, set[str]]:
    user, _ = _turns(row, "prompt")
    extra, reward = ({} if row.get(n) is None else row[n] for n in ("extra_info", "reward_model"))
    if not isinstance(extra, dict) or not isinstance(reward, dict):
        raise InputError("extra_info and reward_model: needed: objects")
    worked = {"extra_info.answer": _text(extra, "answer")} if "answer" in extra else {}
    final = ("reward_model.ground_truth", _text(reward, "ground_truth")) if "ground_truth" in reward else None
    # The prompt's text has its author's instruction glued on; extra_info keeps the question as it was.
    question = _text(extra, "question") if "question" in extra else user
    return question, _one_answer(worked, final, "extra_info.answer or reward_model.ground_truth"), {"prompt"}


def _one_answer(worked: dict[str, str], final: tuple[str, str] | None, needed: str) -> str:
    """The worked answer of a row, from its texts by name and its bare final (name, number) if any.

    Their numbers must agree; of several worked texts the first one is taken.
    """
    golds = {name: gold_number(text) for name, text in worked.items() if "####" in text}
    if final:
        number = final[1].replace(",", "").strip()
        if not NUMBER.fullmatch(number):
            raise InputError(f"{final[0]}: found {_short(final[1])}; needed: a number, or a text that ends in '#### N'")
        golds[final[0]] = number
    if not golds:
        found = _short(next(iter(worked.values()))) if worked else "no answer"
        raise InputError(f"found {found}; needed: {needed}, ending in '#### ' and a number")
    if len(set(golds.values())) > 1:
        raise InputError("two different answers: " + ", ".join(f"{name} says {gold}" for name, gold in golds.items()))
    for text in worked.values():
        if "####" in text:
            return text
    return "\n".join([*worked.values(), f"#### {next(iter(golds.values()))}"])


def _turns(row: dict[str, Any], name: str) -> tuple[str, str | None]:
    """The user's text and the assistant's (None if absent) of a chat; any other sequence of turns is refused."""
    turns = row.get(name)
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise InputError(f"{name}: found {_short(turns)}; needed: a list of objects with role and content")
    roles = [turn.get("role") for turn in turns]
    if roles not in (["user"], ["user", "assistant"]):
        found = ", ".join(map(str, roles)) or "none"
        needed = "user, or user and assistant (a system text belongs in data.instruction)"
        raise InputError(f"{name}: found the turns {found}; needed: {needed}")
    texts = [_text(turn, "content") for turn in turns]
    return texts[0], texts[1] if len(texts) == 2 else None


def _text(row: dict[str, Any], name: str) -> str:
    if name not in row:
        raise InputError(f"{name}: missing; found {', '.join(map(str, row)) or 'nothing'}")
    value = row[name]
    if not isinstance(value, str):
        raise InputError(f"{name}: found {type(value).__name__} {_short(value)}; needed: a text")
    if not value.strip():
        raise InputError(f"{name}: found an empty text")
    if len(value) > LONGEST_TEXT:
        raise InputError(f"{name}: found {len(value)} characters; needed: at most {LONGEST_TEXT}")
    if UNUSABLE.search(value):
        raise InputError(f"{name}: found a lone surrogate or NUL in {_short(value)}; needed: valid Unicode without")
    return value


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:28]} ... {text[-28:]}"


def _no_number(name: str) -> None:
    raise ValueError(f"found {name}, which is no JSON; needed: a number or null")


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _read_table(path: Path) -> list[tuple[int, Any]]:
    """Every (row number, row) of a jsonl or parquet file; blank lines of a jsonl file hold no row."""
    try:
        data = read_bytes(path, LINES_MIB)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); needed: a .jsonl or .parquet file") from error
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        try:
            file, found, size = parquet.ParquetFile(io.BytesIO(data), page_checksum_verification=True), [], 0
            for batch in file.iter_batches(batch_size=1024):  # a short file may stand for very many rows
                found += batch.to_pylist()
                size += batch.nbytes
                if size > LINES_MIB * 2**20:
                    raise InputError(f"{path}: more than {LINES_MIB} MiB of rows, the most that is read")
            rows: list[tuple[int, Any]] = list(enumerate(found, start=1))
        except InputError:
            raise
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
            raise InputError(f"{path}: not a readable parquet file: {first_line(error)}") from error
    elif path.suffix == ".jsonl":
        rows = []
        # Split at \n alone: splitlines() of a text would also split at U+2028 inside a question.
        for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            try:
                if line.strip():
                    rows.append((number, json.loads(line.decode("utf-8"), parse_constant=_no_number)))
            except UnicodeDecodeError as error:
                raise InputError(f"{path}, row {number}: byte {error.start} is not UTF-8; needed: UTF-8") from error
            except (ValueError, RecursionError) as error:
                raise InputError(f"{path}, row {number}: not one JSON object a line: {first_line(error)}") from error
    else:
        raise InputError(f"{path}: found the ending {path.suffix or 'none'!r}; needed: .jsonl or .parquet")
    if not rows:
        raise InputError(f"{path}: no rows found; needed: at least one question")
    return rows


# ----------------------------------------------------------------------------------------------------------- conversion
def convert(in_path: str | Path, out_path: str | Path) -> str:
    """Write question/answer columns as chat form (messages, answer), or any other form as question/answer columns.

    The ending of `out_path` chooses jsonl or parquet.  Other columns are carried along; an existing file is refused.
    Returns the one line to print.
    """
    out = Path(out_path)
    if out.suffix not in (".jsonl", ".parquet"):
        raise InputError(f"{out}: found the ending {out.suffix or 'none'!r}; needed: .jsonl or .parquet")
    parsed, form = read(in_path)
    if form == "question/answer columns":
        new_form, new_rows = "chat form, messages", []
        for question, answer, _ in parsed:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            new_rows.append({"messages": turns, "answer": answer})
    else:
        new_form = "question/answer columns"
        new_rows = [{"question": question, "answer": answer} for question, answer, _ in parsed]
    rows = []
    for new, (_, _, rest) in zip(new_rows, parsed, strict=True):
        for name in rest:
            if name.lower() in new:
                raise InputError(f"{in_path}: found the other column {name}; needed: a file without it")
        rows.append(new | rest)
    data = _parquet_bytes(rows, out) if out.suffix == ".parquet" else _jsonl_bytes(rows, out)
    try:
        with out.open("xb") as file:
            file.write(data)
    except FileExistsError as error:
        raise InputError(f"{out}: exists already; needed: the name of a new file") from error
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error
    return f"{len(rows)} rows: {in_path} ({form}) -> {out} ({new_form})"


def _jsonl_bytes(rows: list[dict[str, Any]], out: Path) -> bytes:
    try:
        lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        return "".join(lines).encode("utf-8")
    except (TypeError, ValueError) as error:
        raise InputError(f"{out}: a column cannot be written as JSON: {first_line(error)}") from error


def _parquet_bytes(rows: list[dict[str, Any]], out: Path) -> bytes:
    import pyarrow
    from pyarrow import parquet

    try:
        table = pyarrow.Table.from_pylist(rows)
        if table.to_pylist() != rows:  # pyarrow takes the columns of row 1 and fills or forgets the rest
            raise InputError(f"{out}: the rows differ in their columns; needed: equal columns in all rows, or .jsonl")
        buffer = io.BytesIO()
        parquet.write_table(table, buffer, write_page_checksum=True)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise InputError(f"{out}: the rows do not form a table: {first_line(error)}") from error
    return buffer.getvalue()
