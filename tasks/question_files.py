"""Reads questions and their gold answers from files (.jsonl, .json, .parquet).

FORMS are the forms in which GSM8K and its copies are published. data.columns names the columns of any other file. If a
row is unusable, InputError names the file, the row, the value that was found and the value that is needed. No row is
skipped or repaired silently. Rows are numbered from 1. In a .jsonl file, the number of a row is the number of its line.
"""

import functools
import io
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple, Self

from facts.exits import InputError
from inputs.files import one_line, parse_json, read_bytes, shown
from knobs import Paths, listed
from reward_gsm8k import gold_answer

UNUSABLE = re.compile("[\0\ud800-\udfff]")  # NUL and lone surrogates, which tokens and UTF-8 cannot represent
NUMBER = re.compile(r"-?[0-9]{1,100}(\.[0-9]{1,100})?")  # only ASCII digits, because the rewards compare only these
# A list, an object or bytes in the notation of JSON, Python or numpy, with or without quotes around it.
WRITTEN = re.compile(r"""['"]?([\w.]+\()?[\[{][\[{(\s]*b?\\*['"].*[\])}]['"]?|b(['"]).*\2""", re.DOTALL | re.IGNORECASE)
TURN = re.compile(  # no text follows the role, so "her role: user support" does not match
    r"""\b(role|from)\\*['"]?\s*[:=]\s*\\*['"]?(system|developer|user|human|assistant|gpt|tool)(\\*['"]|\s*([\n,;})\]]|$))"""
)
TURN_WITHIN = 80  # a question is refused as a turn written as text if TURN is in its first 80 characters
# <image>, <|vision_start|>, <start_of_image>, <img src="...">, [IMG], [image 1], ![...](...), data:image/png;base64
MEDIA = re.compile(
    r"<[|/]?(\w+_)?(im(age|g|_patch)|picture|vid(eo)?|audio|sound|speech|vision|media)s?"
    r"(here|start|end|pad|token|placeholder)?([^a-z\s<>][^<>\n]*|\s[^<>\n]*[\d=./:][^<>\n]*|\s*)>"  # not "<video game>"
    r"|\[(\w+_)?(image|img|video|audio|sound)s?(_\w+|[ :-]?\d+)?\]"
    r"|!\[[^\]\n]*\]\([^)\n]+\)|\bdata:(image|video|audio)/",
    re.IGNORECASE,
)
# Names of other columns whose content belongs to the question.
BESIDE = re.compile(
    r"(.*_)?(image|img|picture|photo|video|audio|sound|pixel|multi_?modal|tool)s?\d*(_.*)?"
    r"|(attached_|input_)?(figure|file|document|doc|attachment|function)s?(_calls?|_paths?)?|speech|media|mm_data|pdf"
)
EMPTY = ("", "[]", "{}", "()", "[none]", "[null]", '[""]', "['']", "none", "null", "nan", "<na>", "n/a")
OTHER_COLUMNS = "for a question and an answer in other columns, set data.source=file and data.columns"

# Invisible characters that Unicode counts as letters, as marks or as unassigned (Default_Ignorable_Code_Point), and the
# empty Braille pattern.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\ufe00-\ufe0f\ufff0-\ufff8\U00016fe4\U000e0000-\U000e0fff]"
)

Turn = tuple[str, str]  # role (system, user or assistant) and text


class Question(NamedTuple):
    """A question, read from a file or generated."""

    question: str  # the texts of its turns, without the system turn
    answer: str  # the answer of a worked example; for GSM8K and arithmetic it ends in `#### N`
    gold: str  # the answer to compare with: N without commas, or the answer itself for data.source file
    prompt: list[int] = []  # token ids with the chat template applied, which data_gsm8k.load adds
    turns: Sequence[Turn] = ()  # the prompt as text, which ends with a user turn
    columns: dict[str, Any] = {}  # all columns of the file
    where: str = ""  # the file and the number of the row
    position: int = -1  # index among the questions of its split

    @classmethod
    def worked(cls, question: str, answer: str, turns: Sequence[Turn] = (), columns: Any = None) -> Self:
        """Create a question whose worked answer ends in `#### N`. Without ``turns``, the prompt is one user turn."""
        known = columns or dict(question=question, answer=answer)
        return cls(question, answer, gold_number(answer), [], turns or [("user", question)], known)


class Form(NamedTuple):
    """A form of a file: the names of its columns.

    The name a.b means column b of the object in column a. The name "" means that the form has no such column.
    """

    name: str
    needs: tuple[str, ...]  # a file has this form if its first row has these columns
    question: str  # column with a text or a list of turns
    answer: str  # column of the worked answer, which ends in `#### N`; with LAST_TURN, the turn after the question
    number: str = ""  # column that contains only N; a row needs only one of the columns ``answer`` and ``number``
    bare_question: str = ""  # column of the last user turn without the instruction of the file's author
    marked: bool = True  # `#### ` precedes the gold answer; otherwise the whole answer is the gold answer


LAST_TURN = "the assistant turn"  # no file has a column of this name
FORMS = (
    Form("question/answer columns", ("question", "answer"), "question", "answer"),
    Form("chat form, messages", ("messages",), "messages", LAST_TURN, "answer"),
    Form(
        "chat form, prompt with reward_model; the instruction comes from data.instruction",
        ("prompt",),
        "prompt",
        "extra_info.answer",
        "reward_model.ground_truth",
        "extra_info.question",
    ),
)


def read(paths: Paths | Path, columns: Mapping[str, str] | None = None, count: int = 0) -> tuple[list[Question], str]:
    """Return the questions of one or several files, and a description of their form, which the first row determines.

    If several rows ask the same question (`composed`), only the first one is returned. So steps and confidence
    intervals count the question once. The description then also gives the number of rows. Raises InputError if the
    copies have different answers.

    ``count`` is the number of questions to take, evenly spaced, because files are often sorted; 0 means all.

    ``columns`` names the columns of question and answer. The text of the answer column is then the gold answer.
    Without ``columns``, the file has one of FORMS, and the gold answer is the number after `####`.
    """
    form: Form | None = None
    if columns:
        form = Form(
            f"columns {' and '.join(columns.values())}", (), columns["question"], columns["answer"], marked=False
        )
    rows: dict[str, Question] = {}  # maps a question in its compared form to the first row that asks it
    num_rows = 0
    for path in map(Path, listed(paths)):
        for where, raw in _table(path):
            num_rows += 1
            try:
                form = form or _form_of(raw)
                row = _by_form(raw, form) if form.marked else _by_name(raw, form)
            except InputError as error:
                hint = "" if columns else f"; {OTHER_COLUMNS}"
                raise InputError(f"{where}: {error}{hint}") from error
            known = rows.setdefault(composed(row.question), row._replace(where=where))
            if _value(row.gold) != _value(known.gold):
                raise InputError(
                    f"{where}: answer: {row.gold[:60]}, but {known.where} has the same question with "
                    f"{known.gold[:60]}; keep one answer"
                )
    questions = list(rows.values())
    name = form.name if form else ""
    size = f"{num_rows} rows"
    if len(questions) < num_rows:
        size += f", {len(questions)} different question{'s' * (len(questions) > 1)}"
        name += f"; {size}"
    if count > len(questions):
        raise InputError(
            f"data.num_train: {count} exceeds the questions of {', '.join(listed(paths))} ({size}); lower it"
        )
    if not count:
        return questions, name
    chosen = [questions[index * len(questions) // count] for index in range(count)]
    return chosen, f"{name}; {count} of {len(questions)}, evenly spaced"


# ----------------------------------------------------------------------------------------------------------------- rows


def _form_of(raw: dict[str, Any]) -> Form:
    """Return the first of FORMS whose columns the row has, ignoring case. Raises InputError if there is none."""
    names = {name.lower() for name in raw}
    for form in FORMS:
        if names.issuperset(form.needs):
            return form
    raise InputError(
        f"found the columns {', '.join(sorted(names)) or 'none'}; give question and answer, messages, or prompt with "
        "reward_model"
    )


def _by_form(raw: dict[str, Any], form: Form) -> Question:
    """Return the question in a row of a file that has one of FORMS. The gold answer is the number after `####`."""
    row = {name.lower(): value for name, value in raw.items()}
    if len(row) < len(raw):
        raise InputError(f"found the columns {', '.join(raw)}, some of which differ only in case; keep one of each")
    _refuse_beside(raw, form.question, form.answer)
    turns, last_turn = _turns(row, form.question)
    if _column(row, form.bare_question) is not None:
        turns[-1] = ("user", _asked(row, form.bare_question))
    answer = last_turn
    if _column(row, form.answer) is not None:
        answer = _text(row, form.answer)
    if _column(row, form.number) is not None:
        number = _text(row, form.number)
        answer = _with_number(answer, number if "####" in number else f"#### {number}", form)
    if answer is None:
        raise InputError(f"{form.answer}: missing or null; found the columns {', '.join(row)}")
    return Question.worked(_text_of(turns), answer, turns, raw)


def _with_number(answer: str | None, number: str, form: Form) -> str:
    """Return the worked answer of a row that has `#### N` (``number``) in another column.

    If ``answer`` is None, the result is ``number`` alone. If ``answer`` has no `####`, ``number`` is appended. Raises
    InputError if ``answer`` ends in a different number.
    """
    if answer is None:
        return number
    if "####" not in answer:
        return f"{answer}\n{number}"
    golds = gold_number(answer), gold_number(number)
    if golds[0] != golds[1]:
        raise InputError(f"two different answers: {form.answer} says {golds[0]}, {form.number} says {golds[1]}")
    return answer


def _by_name(raw: dict[str, Any], form: Form) -> Question:
    """Return the question in a row of a file whose columns data.columns names.

    The answer column may contain a string or a number.
    """
    _refuse_beside(raw, form.question, form.answer)
    turns, _ = _turns(raw, form.question)
    found = _column(raw, form.answer)
    is_number = isinstance(found, int | float | Decimal) and not isinstance(found, bool)
    gold = str(found) if is_number and math.isfinite(found) else _text(raw, form.answer).strip()
    return Question(_text_of(turns), gold, gold, [], turns, raw)


def _text_of(turns: list[Turn]) -> str:
    return "\n\n".join(text for role, text in turns if role != "system")


def _turns(row: dict[str, Any], name: str) -> tuple[list[Turn], str | None]:
    """Return the turns in a column up to the last user turn, and the text of the assistant turn after it, if any.

    A string in the column is one user turn. A list may begin with a system turn. After it, user and assistant turns
    alternate.
    """
    found = _column(row, name)
    if not isinstance(found, list):
        return [("user", _asked(row, name))], None
    if not all(isinstance(turn, dict) for turn in found):
        raise InputError(f"{name}: found {shown(found)}; give a list of objects with role and content")
    roles = [str(turn.get("role")) for turn in found]
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if not talk or any(role != ("user", "assistant")[index % 2] for index, role in enumerate(talk)):
        raise InputError(
            f"{name}: found the turns {', '.join(roles) or 'none'}; give an optional system turn, then user and "
            "assistant alternately"
        )
    turns = []
    for role, turn in zip(roles, found, strict=True):
        _refuse_beside(turn)
        turns.append((role, (_text if role == "assistant" else _asked)(turn, "content")))
    if roles[-1] == "user":
        return turns, None
    return turns[:-1], turns[-1][1]


def _column(row: dict[str, Any], name: str) -> Any:
    """Return the value of a column, or None if ``name`` is empty or the row has no such value.

    If no column is called a.b, this name means column b of the object in column a.
    """
    if not name:
        return None
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(row: dict[str, Any], name: str) -> str:
    """Return the text in column ``name``.

    Raises InputError if the text is missing, empty or not valid Unicode, or if it is a list of turns written as text.
    """
    value = _column(row, name)
    if value is None:
        raise InputError(f"{name}: missing or null; found the columns {', '.join(map(str, row)) or 'none'}")
    if not isinstance(value, str):
        raise InputError(f"{name}: found {shown(value)}; give a text")
    if not value.strip():
        raise InputError(f"{name}: found an empty text; fill it in or remove the row")
    if UNUSABLE.search(value):
        raise InputError(f"{name}: found a lone surrogate or NUL in {shown(value)}; remove it")
    if WRITTEN.fullmatch(value.strip()) and TURN.search(value):
        raise InputError(f"{name}: found {shown(value)}, turns written as text; give a text, or turns as a list")
    return value


def _asked(row: dict[str, Any], name: str) -> str:
    """Return the text of a question, with the checks of `_text`.

    Also raises InputError if the text is really a list, an object or an empty cell, written as text. The same holds if
    the text contains an image or another medium, or a placeholder for it.
    """
    text = _text(row, name)
    stripped = text.strip()
    if stripped.lower() in EMPTY or WRITTEN.fullmatch(stripped) or TURN.search(text[:TURN_WITHIN]):
        raise InputError(
            f"{name}: found {shown(text)}, a list, an object or an empty cell written as text; give a text, or "
            "turns as a real list"
        )
    if mark := MEDIA.search(text):
        raise InputError(f"{name}: found {shown(mark[0])}, which stands for a medium; use questions that are only text")
    return text


def _refuse_beside(row: dict[str, Any], *read: str) -> None:
    """Raise InputError if a column such as images or tools (BESIDE) has content, because no prompt would show it.

    The columns ``read`` are the question and the answer themselves, so they are not checked.
    """
    for name, value in row.items():
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|\W", "_", name).lower()
        if BESIDE.fullmatch(words) and name not in read and _filled(value):
            raise InputError(
                f"{name}: found {shown(value)}, which no prompt shows; remove such questions, or the column"
            )


def _filled(value: Any) -> bool:
    """Return whether a cell has content. A list or an object has content if one of its values has content."""
    if isinstance(value, list | dict):
        return any(map(_filled, value.values() if isinstance(value, dict) else value))
    return bool(value) and str(value).strip().lower() not in EMPTY


def gold_number(answer: str) -> str:
    """Return the final number of a worked answer. Raises InputError unless it ends in exactly one `#### N`."""
    try:
        gold = gold_answer(answer) if answer.count("####") == 1 else ""
    except ValueError:
        gold = ""
    if not NUMBER.fullmatch(gold):
        found = ascii(answer[-50:])  # ascii, because digits of another script can look like ours
        raise InputError(f"answer: found {found}; give a worked answer that ends in '#### ' and one number")
    return gold


def _value(gold: str) -> Decimal | str:
    """Return the value by which gold answers are compared: a Decimal for a number, and otherwise ``gold`` itself."""
    return Decimal(gold) if NUMBER.fullmatch(gold) else gold


def words(text: str) -> str:
    """Return ``text`` in the Unicode normalisation form NFKC, with single spaces.

    Texts are compared in this form, because a chat template or a tokenizer may change the form and the spaces.
    """
    return " ".join(unicodedata.normalize("NFKC", text).split())


def composed(question: str) -> str:
    """Return the question in the Unicode normalisation form NFC, with single spaces.

    Questions with equal results count as the same question.
    """
    return " ".join(unicodedata.normalize("NFC", question).split())


def asked_in(rows: Iterable[Question], others: Iterable[Question]) -> list[str]:
    """Return the texts of the questions in ``rows`` that are also in ``others``."""
    known = {composed(row.question) for row in others}
    return [row.question for row in rows if composed(row.question) in known]


def alike(first: Sequence[Question], second: Sequence[Question]) -> list[tuple[str, str]]:
    """Return the pairs of questions, one from each sequence, that differ but look almost the same to a reader.

    The two may be copies of one question, or differ in meaning, as 3² and 32 do. So the input check only warns.
    """
    known = {normalised(row.question): row.question for row in reversed(first)}
    pairs = [(known.get(normalised(row.question), row.question), row.question) for row in second]
    return [pair for pair in pairs if composed(pair[0]) != composed(pair[1])]


@functools.cache  # each question is compared with several sets
def normalised(question: str) -> str:
    """Return a string that is the same for all questions that look almost alike or differ only in case.

    The string is the question in the Unicode normalisation form NFKC, in lower case and with single spaces, without
    control characters and invisible characters.
    """
    text = unicodedata.normalize("NFKC", question).casefold()
    if not text.isprintable():
        text = "".join(c for c in text if c.isspace() or unicodedata.category(c) not in ("Cc", "Cf"))
    return words(INVISIBLE.sub("", text))


# --------------------------------------------------------------------------------------------------------------- tables


def _table(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return each row of a file as a pair (where, row), where the string ``where`` names the file and the row.

    The ending of the file's name determines its format.

    pandas is not used, because it would change the values that a reward function gets. It converts null to nan, and in
    a column with a null, it also converts whole numbers to floats.
    """
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise InputError(f"{path}: found the ending {path.suffix or 'none'!r}; use one of {', '.join(readers)}")
    rows = []
    for number, row in readers[path.suffix](read_bytes(path), path):
        where = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise InputError(f"{where}: found {type(row).__name__}; give an object with columns")
        rows.append((where, row))
    if not rows:
        raise InputError(f"{path}: has no rows; add at least one question")
    return rows


def _jsonl_rows(data: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    # Split only at \n, because splitlines() of a text would also split at U+2028 inside a question.
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            if line.strip():
                yield number, parse_json(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, row {number}: the line is not a JSON object: {one_line(error)}") from error


def _json_rows(data: bytes, path: Path) -> Iterable[tuple[int, Any]]:
    """Return the rows of a JSON file, numbered from 1. The file has a list of objects, or an object with one list."""
    try:
        found = parse_json(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {one_line(error)}") from error
    values = found.values() if isinstance(found, dict) else [found]
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) != 1:
        raise InputError(
            f"{path}: found {len(lists)} lists of rows; give a list of objects, or an object with one list"
        )
    return enumerate(lists[0], start=1)


def _parquet_rows(data: bytes, path: Path) -> Iterable[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(data), page_checksum_verification=True, use_threads=False)
        return enumerate(table.to_pylist(), start=1)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not a readable parquet file: {one_line(error)}") from error
