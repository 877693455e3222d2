"""Files of questions (.jsonl, .json, .parquet): their rows as prompts and gold answers, and GSM8K's forms.

A row that cannot be used is an InputError with the file, the number of the row, what was found and what is needed; no
row is skipped or repaired silently.  Rows count from 1; the number of a jsonl row is that of its line.
"""

import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Self

from inputs.files import LINES_MIB, UNUSABLE, InputError, one_line, read_bytes, shown
from inputs.paths import Paths, listed
from reward_gsm8k import gold_answer

NUMBER = re.compile(r"-?[0-9]{1,100}(\.[0-9]{1,100})?")  # ASCII digits, because the rewards compare these
OTHER_COLUMNS = "data.source=file reads any other question and answer, whose columns data.columns names"
LONGEST_TEXT = 100_000  # characters; the longest text of GSM8K has about 1,000


# Characters that are drawn as nothing and are letters, marks or unassigned to Unicode (Default_Ignorable_Code_Point),
# and the empty pattern of Braille.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\ufe00-\ufe0f\ufff0-\ufff8\U00016fe4\U000e0000-\U000e0fff]"
)


Turn = tuple[str, str]  # role (system, user or assistant) and text


class Row(NamedTuple):
    question: str  # the texts of its turns, without the system turn
    answer: str  # as a worked example shows it
    gold: str  # what a completion's answer is compared with
    turns: list[Turn]  # the prompt: it ends with a user turn
    columns: dict[str, Any]  # all columns of the file

    @classmethod
    def worked(cls, question: str, answer: str) -> Self:
        """The row of a question and a worked answer that ends in `#### N`."""
        return cls(question, answer, gold_number(answer), [("user", question)], dict(question=question, answer=answer))


class Form(NamedTuple):
    """One way to write questions and answers as columns of a table."""

    name: str
    columns: tuple[str, ...]  # a file has this form if its first row has these columns
    parse: Callable[[dict[str, Any]], tuple[list[Turn], str]]  # row -> (turns, worked answer)


# -------------------------------------------------------------------------------------------------------------- reading
def read(paths: Paths | Path, columns: Mapping[str, str] | None = None, count: int = 0) -> tuple[list[Row], str]:
    """The rows of one file or several, and the name of its form, which the first row of all decides.

    A question that several rows ask (`alike`) counts once, as its first row has it: copies of it are no further
    questions, neither in a step nor in an interval. The name of the form says how many rows there are. InputError if
    the copies have different answers.

    ``count``: so many questions, evenly spaced, because files are often in an order; 0: all.

    ``columns``: the names of the columns question and answer, whose text is the gold answer. Without them the file has
    one of FORMS, and the gold answer is the number after `####`.
    """
    form: Form | None = None
    rows: list[Row] = []
    num_rows = 0
    hint = "" if columns else f"; {OTHER_COLUMNS}"
    asked: dict[str, tuple[Path, int, str]] = {}  # question -> file and row that asks it first, and its answer
    for path in map(Path, listed(paths)):
        before = num_rows
        for number, row in _table(path):
            num_rows += 1
            try:
                if not isinstance(row, dict):
                    raise InputError(f"found {type(row).__name__}; needed: an object with columns")
                lower = {name.lower(): value for name, value in row.items()}
                form = form or next((form for form in FORMS if lower.keys() >= set(form.columns)), None)
                if columns:
                    turns, answer = _by_name(row, columns)
                elif form is None:
                    raise InputError(
                        f"found the columns {', '.join(sorted(lower)) or 'none'}; needed: an object with columns "
                        "question and answer, or messages, or prompt with reward_model"
                    )
                elif len(lower) < len(row):
                    raise InputError(
                        f"found the columns {', '.join(row)}; needed: names that differ in more than capitals"
                    )
                else:
                    turns, answer = form.parse(lower)
                gold = answer if columns else gold_number(answer)
                question = "\n\n".join(text for role, text in turns if role != "system")
                compared = alike(question)
                if not compared:
                    raise InputError("question: found an empty text")
            except InputError as error:
                raise InputError(f"{path}, row {number}: {error}{hint}") from error
            if compared not in asked:
                asked[compared] = path, number, gold
                rows.append(Row(question, answer, gold, turns, row))
            file, first, known = asked[compared]
            if _value(gold) != _value(known):
                raise InputError(
                    f"{path}, row {number}: answer: {gold[:60]}; {'' if file == path else f'{file}, '}row {first} has "
                    f"the same question with {known[:60]}; needed: one answer"
                )
        if num_rows == before:
            raise InputError(f"{path}: no rows found; needed: at least one question")
    name = form.name if form and not columns else f"columns {' and '.join((columns or {}).values())}"
    there = f"{num_rows} rows"
    if len(rows) < num_rows:
        there += f", {len(rows)} different question{'s' * (len(rows) > 1)}"
        name += f"; {there}"
    if count > len(rows):
        raise InputError(f"data.num_train: found {count}; {', '.join(listed(paths))}: {there}; needed: no more")
    if not count:
        return rows, name
    chosen = [rows[place * len(rows) // count] for place in range(count)]
    return chosen, f"{name}; {count} of {len(rows)}, evenly spaced"


def _value(gold: str) -> Decimal | str:
    """By which gold answers are compared: the number, or else the text."""
    return Decimal(gold) if NUMBER.fullmatch(gold) else gold


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


def _by_name(row: dict[str, Any], columns: Mapping[str, str]) -> tuple[list[Turn], str]:
    """A question (a text or a list of turns) and an answer (a text or a number) in the columns of these names."""
    question, answer = columns["question"], _column(row, columns["answer"])
    turns = _turns(row, question)[0] if isinstance(_column(row, question), list) else _user(row, question)
    if isinstance(answer, int | float | Decimal) and not isinstance(answer, bool) and math.isfinite(answer):
        return turns, str(answer)
    return turns, _text(row, columns["answer"]).strip()


def _user(row: dict[str, Any], name: str) -> list[Turn]:
    return [("user", _text(row, name))]


def _parse_messages(row: dict[str, Any]) -> tuple[list[Turn], str]:
    turns, assistant = _turns(row, "messages")
    short = _text(row, "answer") if row.get("answer") is not None else None
    return turns, _one_answer("the assistant turn", assistant, "answer", short)


def _parse_prompt(row: dict[str, Any]) -> tuple[list[Turn], str]:
    turns = _turns(row, "prompt")[0]
    extra, reward = ({} if row.get(name) is None else row[name] for name in ("extra_info", "reward_model"))
    if not isinstance(extra, dict) or not isinstance(reward, dict):
        raise InputError("extra_info and reward_model: needed: objects")
    # The text of `prompt` ends with an instruction of its author; extra_info has the question without it.
    if "question" in extra:
        turns = [*turns[:-1], *_user(extra, "question")]
    worked = _text(extra, "answer") if "answer" in extra else None
    short = _text(reward, "ground_truth") if "ground_truth" in reward else None
    return turns, _one_answer("extra_info.answer", worked, "reward_model.ground_truth", short)


FORMS = (
    Form(
        "question/answer columns",
        ("question", "answer"),
        lambda row: (_user(row, "question"), _text(row, "answer")),
    ),
    Form("chat form, messages", ("messages",), _parse_messages),
    Form(
        "chat form, prompt with reward_model; the instruction comes from data.instruction",
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


def _turns(row: dict[str, Any], name: str) -> tuple[list[Turn], str | None]:
    """The turns of a chat up to its last user turn, and the text of an assistant turn after it; InputError for others.

    A system turn may come first; then user and assistant take turns.
    """
    found = _column(row, name)
    if not isinstance(found, list) or not all(isinstance(turn, dict) for turn in found):
        raise InputError(f"{name}: found {shown(found)}; needed: a list of objects with role and content")
    roles = [turn.get("role") for turn in found]
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if not talk or any(role != ("user", "assistant")[place % 2] for place, role in enumerate(talk)):
        raise InputError(
            f"{name}: found the turns {', '.join(map(str, roles)) or 'none'}; needed: system or not, then user and "
            "assistant by turns"
        )
    turns = [(turn["role"], _text(turn, "content")) for turn in found]
    return (turns, None) if turns[-1][0] == "user" else (turns[:-1], turns[-1][1])


def _column(row: dict[str, Any], name: str) -> Any:
    """The value of a column; a name with dots leads into objects."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, dict) or part not in value:
            raise InputError(f"{name}: missing; found {', '.join(map(str, row)) or 'nothing'}")
        value = value[part]
    return value


def _text(row: dict[str, Any], name: str) -> str:
    """The text in column ``name``, which must be there, not empty, not too long, and valid Unicode."""
    value = _column(row, name)
    if not isinstance(value, str):
        raise InputError(f"{name}: found {shown(value)}; needed: a text")
    if not value.replace(",", "").strip():  # rewards ignore commas
        raise InputError(f"{name}: found an empty text")
    if len(value) > LONGEST_TEXT:
        raise InputError(f"{name}: found {len(value)} characters; needed: at most {LONGEST_TEXT}")
    if UNUSABLE.search(value):
        raise InputError(f"{name}: found a lone surrogate or NUL in {shown(value)}; needed: valid Unicode without")
    return value


def _table(path: Path) -> Iterable[tuple[int, Any]]:
    """(number, row) of each row of a file, whose ending says how it is written."""
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    data = read_bytes(path, LINES_MIB)
    _check_ending(path, *readers)
    return readers[path.suffix](data, path)


def _check_ending(path: Path, *endings: str) -> None:
    if path.suffix not in endings:
        raise InputError(f"{path}: found the ending {path.suffix or 'none'!r}; needed: one of {', '.join(endings)}")


def _json_rows(data: bytes, path: Path) -> Iterable[tuple[int, Any]]:
    """The rows of a list of objects, or of an object that holds one list."""
    try:
        found = json.loads(data.decode("utf-8-sig"), parse_constant=_no_number, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {one_line(error)}") from error
    lists = [value for value in found.values() if isinstance(value, list)] if isinstance(found, dict) else [found]
    if len(lists) != 1 or not isinstance(lists[0], list):
        raise InputError(f"{path}: found {len(lists)} lists of rows; needed: a list of objects, or an object with one")
    return enumerate(lists[0], start=1)


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
