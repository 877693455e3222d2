"""Files of questions (.jsonl, .json, .parquet): their rows as prompts and gold answers.

FORMS are the ways in which GSM8K and its copies are published; data.columns names the columns of any other file. A row
that cannot be used is an InputError with the file, the number of the row, what was found and what is needed; no row is
skipped or repaired silently. Rows count from 1; the number of a jsonl row is that of its line.
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

UNUSABLE = re.compile("[\0\ud800-\udfff]")  # NUL and half characters: tokens and UTF-8 cannot hold them
NUMBER = re.compile(r"-?[0-9]{1,100}(\.[0-9]{1,100})?")  # ASCII digits, because the rewards compare these
# A list, an object or bytes as JSON, Python or numpy writes them, also within quotes.
WRITTEN = re.compile(r"""['"]?([\w.]+\()?[\[{][\[{(\s]*b?\\*['"].*[\])}]['"]?|b(['"]).*\2""", re.DOTALL | re.IGNORECASE)
TURN = re.compile(  # nothing but the role, unlike "her role: user support"
    r"""\b(role|from)\\*['"]?\s*[:=]\s*\\*['"]?(system|developer|user|human|assistant|gpt|tool)(\\*['"]|\s*([\n,;})\]]|$))"""
)
TURN_WITHIN = 80  # characters, where a text begins with a turn, however it is written
# <image>, <|vision_start|>, <start_of_image>, <img src="...">, [IMG], [image 1], ![...](...), data:image/png;base64
MEDIA = re.compile(
    r"<[|/]?(\w+_)?(im(age|g|_patch)|picture|vid(eo)?|audio|sound|speech|vision|media)s?"
    r"(here|start|end|pad|token|placeholder)?([^a-z\s<>][^<>\n]*|\s[^<>\n]*[\d=./:][^<>\n]*|\s*)>"  # not "<video game>"
    r"|\[(\w+_)?(image|img|video|audio|sound)s?(_\w+|[ :-]?\d+)?\]"
    r"|!\[[^\]\n]*\]\([^)\n]+\)|\bdata:(image|video|audio)/",
    re.IGNORECASE,
)
# Columns beside the question without which it is another one.
BESIDE = re.compile(
    r"(.*_)?(image|img|picture|photo|video|audio|sound|pixel|multi_?modal|tool)s?\d*(_.*)?"
    r"|(attached_|input_)?(figure|file|document|doc|attachment|function)s?(_calls?|_paths?)?|speech|media|mm_data|pdf"
)
EMPTY = ("", "[]", "{}", "()", "[none]", "[null]", '[""]', "['']", "none", "null", "nan", "<na>", "n/a")
OTHER_COLUMNS = "data.source=file reads any other question and answer, whose columns data.columns names"

# Characters that are drawn as nothing and are letters, marks or unassigned to Unicode (Default_Ignorable_Code_Point),
# and the empty pattern of Braille.
INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\ufe00-\ufe0f\ufff0-\ufff8\U00016fe4\U000e0000-\U000e0fff]"
)

Turn = tuple[str, str]  # role (system, user or assistant) and text


class Question(NamedTuple):
    """A question of a file, or a generated one."""

    question: str  # the texts of its turns, without the system turn
    answer: str  # as a worked example shows it; of GSM8K and arithmetic it ends in `#### N`
    gold: str  # what a completion's answer is compared with: N without commas, or of data.source file the answer
    prompt: list[int] = []  # token ids, chat template applied; data_gsm8k.load adds them
    turns: Sequence[Turn] = ()  # the prompt as text: they end with a user turn
    columns: dict[str, Any] = {}  # all columns of the file
    where: str = ""  # the file and the number of the row
    position: int = -1  # among the questions of its split, from 0

    @classmethod
    def worked(cls, question: str, answer: str, turns: Sequence[Turn] = (), columns: Any = None) -> Self:
        """A question whose worked answer ends in `#### N`; without ``turns`` it is one user turn."""
        known = columns or dict(question=question, answer=answer)
        return cls(question, answer, gold_number(answer), [], turns or [("user", question)], known)


class Form(NamedTuple):
    """One way to write questions and answers as columns; a.b is the column b of the object in column a, "" is none."""

    name: str
    needs: tuple[str, ...]  # a file has this form if its first row has these columns
    question: str  # column of a text, or of a list of turns
    answer: str  # column of the worked answer, which ends in `#### N`; LAST_TURN: an assistant turn after the question
    number: str = ""  # column of N alone; one of the two is enough
    bare_question: str = ""  # column of the last user turn without the instruction of the file's author
    marked: bool = True  # `#### ` is before the gold answer; otherwise the text of the answer is the gold answer


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
    """The rows of one file or several, and the name of its form, which the first row of all decides.

    A question that several rows ask (`composed`) counts once, as its first row has it: copies of it are no further
    questions, neither in a step nor in an interval. The name of the form says how many rows there are. InputError if
    the copies have different answers.

    ``count``: so many questions, evenly spaced, because files are often in an order; 0: all.

    ``columns``: the names of the columns question and answer, whose text is the gold answer. Without them the file has
    one of FORMS, and the gold answer is the number after `####`.
    """
    form: Form | None = None
    if columns:
        form = Form(
            f"columns {' and '.join(columns.values())}", (), columns["question"], columns["answer"], marked=False
        )
    rows: dict[str, Question] = {}  # the question as it is compared -> the first row that asks it
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
                    f"{where}: answer: {row.gold[:60]}; {known.where} has the same question with {known.gold[:60]}; "
                    "needed: one answer"
                )
    questions = list(rows.values())
    name = form.name if form else ""
    size = f"{num_rows} rows"
    if len(questions) < num_rows:
        size += f", {len(questions)} different question{'s' * (len(questions) > 1)}"
        name += f"; {size}"
    if count > len(questions):
        raise InputError(f"data.num_train: found {count}; {', '.join(listed(paths))}: {size}; needed: no more")
    if not count:
        return questions, name
    chosen = [questions[index * len(questions) // count] for index in range(count)]
    return chosen, f"{name}; {count} of {len(questions)}, evenly spaced"


# ----------------------------------------------------------------------------------------------------------------- rows


def _form_of(raw: dict[str, Any]) -> Form:
    """The first of FORMS whose columns the row has, in any case of letters."""
    names = {name.lower() for name in raw}
    for form in FORMS:
        if names.issuperset(form.needs):
            return form
    raise InputError(
        f"found the columns {', '.join(sorted(names)) or 'none'}; needed: an object with columns question and answer, "
        "or messages, or prompt with reward_model"
    )


def _by_form(raw: dict[str, Any], form: Form) -> Question:
    """The row of a file that has one of FORMS; the gold answer is the number after `####`."""
    row = {name.lower(): value for name, value in raw.items()}
    if len(row) < len(raw):
        raise InputError(f"found the columns {', '.join(raw)}, some of which differ only in case; needed: one of each")
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
    """The worked answer of a row that has `#### N` in another column as well, or alone there."""
    if answer is None:
        return number
    if "####" not in answer:
        return f"{answer}\n{number}"
    golds = gold_number(answer), gold_number(number)
    if golds[0] != golds[1]:
        raise InputError(f"two different answers: {form.answer} says {golds[0]}, {form.number} says {golds[1]}")
    return answer


def _by_name(raw: dict[str, Any], form: Form) -> Question:
    """The row of a file whose columns data.columns names; the gold answer is a text or a number."""
    _refuse_beside(raw, form.question, form.answer)
    turns, _ = _turns(raw, form.question)
    found = _column(raw, form.answer)
    is_number = isinstance(found, int | float | Decimal) and not isinstance(found, bool)
    gold = str(found) if is_number and math.isfinite(found) else _text(raw, form.answer).strip()
    return Question(_text_of(turns), gold, gold, [], turns, raw)


def _text_of(turns: list[Turn]) -> str:
    return "\n\n".join(text for role, text in turns if role != "system")


def _turns(row: dict[str, Any], name: str) -> tuple[list[Turn], str | None]:
    """The turns in a column up to the last user turn, and the text of an assistant turn after it.

    A text is one user turn. In a list a system turn may come first; then user and assistant take turns.
    """
    found = _column(row, name)
    if not isinstance(found, list):
        return [("user", _asked(row, name))], None
    if not all(isinstance(turn, dict) for turn in found):
        raise InputError(f"{name}: found {shown(found)}; needed: a list of objects with role and content")
    roles = [str(turn.get("role")) for turn in found]
    talk = roles[1:] if roles[:1] == ["system"] else roles
    if not talk or any(role != ("user", "assistant")[index % 2] for index, role in enumerate(talk)):
        raise InputError(
            f"{name}: found the turns {', '.join(roles) or 'none'}; needed: system or not, then user and assistant by "
            "turns"
        )
    turns = []
    for role, turn in zip(roles, found, strict=True):
        _refuse_beside(turn)
        turns.append((role, (_text if role == "assistant" else _asked)(turn, "content")))
    if roles[-1] == "user":
        return turns, None
    return turns[:-1], turns[-1][1]


def _column(row: dict[str, Any], name: str) -> Any:
    """The value of a column, None if there is none, or for no name; a name with dots leads into objects."""
    if not name:
        return None
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _text(row: dict[str, Any], name: str) -> str:
    """The text in column ``name``, which must be there, not empty, and valid Unicode."""
    value = _column(row, name)
    if value is None:
        raise InputError(f"{name}: missing or null; found the columns {', '.join(map(str, row)) or 'none'}")
    if not isinstance(value, str):
        raise InputError(f"{name}: found {shown(value)}; needed: a text")
    if not value.strip():
        raise InputError(f"{name}: found an empty text")
    if UNUSABLE.search(value):
        raise InputError(f"{name}: found a lone surrogate or NUL in {shown(value)}; needed: valid Unicode without")
    if WRITTEN.fullmatch(value.strip()) and TURN.search(value):
        raise InputError(f"{name}: found {shown(value)}, turns written as text; needed: a text, or turns as a list")
    return value


def _asked(row: dict[str, Any], name: str) -> str:
    """Return a _text that the model is asked; InputError if it is another value in writing, or stands for a medium."""
    text = _text(row, name)
    stripped = text.strip()
    if stripped.lower() in EMPTY or WRITTEN.fullmatch(stripped) or TURN.search(text[:TURN_WITHIN]):
        raise InputError(
            f"{name}: found {shown(text)}, a list, an object or an empty cell written as text; needed: a text, or a "
            "list of turns that is one in the file, too"
        )
    if mark := MEDIA.search(text):
        raise InputError(f"{name}: found {shown(mark[0])}, which stands for a medium; needed: questions of text alone")
    return text


def _refuse_beside(row: dict[str, Any], *read: str) -> None:
    """Raise InputError for a filled column of BESIDE, such as images or tools, which no prompt would show.

    The columns ``read`` are the question and the answer themselves.
    """
    for name, value in row.items():
        words = re.sub(r"(?<=[a-z])(?=[A-Z])|\W", "_", name).lower()
        if BESIDE.fullmatch(words) and name not in read and _filled(value):
            raise InputError(
                f"{name}: found {shown(value)}, which no prompt shows; needed: questions without it, or no such column"
            )


def _filled(value: Any) -> bool:
    """Return whether a cell has content, in a list or an object anywhere."""
    if isinstance(value, list | dict):
        return any(map(_filled, value.values() if isinstance(value, dict) else value))
    return bool(value) and str(value).strip().lower() not in EMPTY


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


def _value(gold: str) -> Decimal | str:
    """By which gold answers are compared: the number, or else the text."""
    return Decimal(gold) if NUMBER.fullmatch(gold) else gold


def words(text: str) -> str:
    """`text` with single spaces and in Unicode's form NFKC: a template or a tokenizer may change spaces and forms."""
    return " ".join(unicodedata.normalize("NFKC", text).split())


def composed(question: str) -> str:
    """Return the text by which questions are one: in Unicode's composed form NFC, and with single spaces."""
    return " ".join(unicodedata.normalize("NFC", question).split())


def asked_in(rows: Iterable[Question], others: Iterable[Question]) -> list[str]:
    """Return the questions of ``rows`` that ``others`` ask as well."""
    known = {composed(row.question) for row in others}
    return [row.question for row in rows if composed(row.question) in known]


def alike(first: Sequence[Question], second: Sequence[Question]) -> list[tuple[str, str]]:
    """Return the pairs of different questions, one from each sequence, that a reader can hardly tell apart.

    They may be one question twice, or two such as 3² and 32. For that reason nobody refuses them.
    """
    known = {normalised(row.question): row.question for row in reversed(first)}
    pairs = [(known.get(normalised(row.question), row.question), row.question) for row in second]
    return [pair for pair in pairs if composed(pair[0]) != composed(pair[1])]


@functools.cache  # each question is compared with several sets
def normalised(question: str) -> str:
    """Return the text that two questions share which a reader can hardly tell apart, or which differ in case.

    It is in form NFKC, without case, without characters of no width and control characters, and with single spaces.
    """
    text = unicodedata.normalize("NFKC", question).casefold()
    if not text.isprintable():
        text = "".join(c for c in text if c.isspace() or unicodedata.category(c) not in ("Cc", "Cf"))
    return words(INVISIBLE.sub("", text))


# --------------------------------------------------------------------------------------------------------------- tables


def _table(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(file and number, row) of each row of a file, whose ending says how it is written.

    Not by pandas: it would change what a reward gets (null to nan, whole numbers beside null to fractions).
    """
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise InputError(f"{path}: found the ending {path.suffix or 'none'!r}; needed: one of {', '.join(readers)}")
    rows = []
    for number, row in readers[path.suffix](read_bytes(path), path):
        where = f"{path}, row {number}"
        if not isinstance(row, dict):
            raise InputError(f"{where}: found {type(row).__name__}; needed: an object with columns")
        rows.append((where, row))
    if not rows:
        raise InputError(f"{path}: no rows found; needed: at least one question")
    return rows


def _jsonl_rows(data: bytes, path: Path) -> Iterator[tuple[int, Any]]:
    # Split at \n alone: splitlines() of a text would also split at U+2028 inside a question.
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            if line.strip():
                yield number, parse_json(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}, row {number}: not one JSON object a line: {one_line(error)}") from error


def _json_rows(data: bytes, path: Path) -> Iterable[tuple[int, Any]]:
    """The rows of a list of objects, or of an object that holds one list."""
    try:
        found = parse_json(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON: {one_line(error)}") from error
    values = found.values() if isinstance(found, dict) else [found]
    lists = [value for value in values if isinstance(value, list)]
    if len(lists) != 1:
        raise InputError(f"{path}: found {len(lists)} lists of rows; needed: a list of objects, or an object with one")
    return enumerate(lists[0], start=1)


def _parquet_rows(data: bytes, path: Path) -> Iterable[tuple[int, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(data), page_checksum_verification=True, use_threads=False)
        return enumerate(table.to_pylist(), start=1)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: not a readable parquet file: {one_line(error)}") from error
