"""Reading and writing files, and any bytes or values that they may hold."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import breaking
import killed
import pytest
import yaml
from breaking import failing_read
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from source import ROOT
from tiers import asked, nightly

from data_gsm8k import load_tokenizer
from facts.exits import InputError, Tripped
from inputs import files as input_files
from inputs import hf_config
from inputs.config import command, load_config, to_yaml
from inputs.files import one_line
from knobs import Config
from runlog import run_record
from tasks import question_files

# ---------------------------------------------------------------------------------------------------------------- files

READERS = (
    input_files.read_bytes,
    input_files.read_text,
    input_files.read_object,
    input_files.read_file,
    input_files.read_tensors,
    run_record.sha256_file,
    run_record.read_lines,
    question_files.read,
)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_file_that_fails_while_it_is_read_is_named(ending: str, tmp_path: Path) -> None:
    """The system reports such an error without the name of a file, as for a damaged disk or a lost network drive."""
    path = tmp_path / f"x.{ending}"
    failing_read(path)
    for read in READERS:
        with pytest.raises(InputError) as refusal:
            read(path)
        assert str(refusal.value).startswith(f"{path}: cannot be read ("), refusal.value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read (No such file"),
        (b'{"a": "\xff"}', "not UTF-8 text at byte 7"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b'{"b": 1}', "a is missing"),
    ],
    ids=["absent", "not-utf8", "digits", "list", "key"],
)
def test_an_object_is_read_or_refused_by_name(content: bytes | None, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError) as refusal:
        input_files.read_object(path, ("a",))
    assert str(refusal.value).startswith(str(path)) and said in str(refusal.value)


@pytest.mark.parametrize("text", ["", "0", "9", "1e0", "\u0661", "1" * 5000])
def test_a_number_of_the_environment_is_a_plain_one_within_its_bounds(text: str, monkeypatch) -> None:
    monkeypatch.setenv("N", text)
    with pytest.raises(
        InputError, match="the environment's N: must be a whole number from 1 to 8, not .*; correct or unset it"
    ):
        input_files.variable("N", 3, 1, 8)
    monkeypatch.setenv("N", "8")
    assert input_files.variable("N", 3, 1, 8) == 8
    monkeypatch.delenv("N")
    assert input_files.variable("N", 3, 1, 8) == 3


def test_a_message_is_one_printable_line_that_keeps_its_ends() -> None:
    text = input_files.one_line(InputError("first\nsecond\x1b[31m\u2028" + "x" * 9999 + " last"))
    assert text.startswith("first second\\x1b[31m x") and text.endswith("x last") and len(text) < 1010
    assert text.isprintable()
    assert input_files.one_line(FileNotFoundError(2, "No such file", "a/b")) == "a/b: No such file"


@pytest.mark.parametrize(
    ("error", "of_the_user"),
    [
        (InputError("no model"), True),
        (Tripped("not finite\n  look at: optim.lr"), False),
        (FileNotFoundError(errno.ENOENT, "No such file", "a/b"), True),
        (OSError(errno.ENOSPC, "No space left on device"), True),  # a full disk names no file
        (OSError("Error no file named model.safetensors found in directory a"), True),  # transformers says it so
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (RuntimeError("a fault of our own"), False),
    ],
)
def test_a_command_ends_in_one_line_for_what_the_user_can_mend(error: Exception, of_the_user: bool, capsys) -> None:
    @command
    def main() -> int:
        raise error

    if isinstance(error, Tripped):
        assert main() == 3 and capsys.readouterr().err == f"stopped: {error}\n"
    elif of_the_user:
        assert main() == 2 and capsys.readouterr().err == f"error: {one_line(error)}\n"
    else:
        with pytest.raises(type(error)):
            main()


def test_a_command_whose_reader_has_ended_says_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    plan = [sys.executable, "preflight.py", "configs/tiny_cpu.yaml", "--values"]
    done = subprocess.run(plan, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_folder_of_the_users_is_never_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(theirs)
    for name in ("theirs", "link", "theirs/thesis.tex"):
        with pytest.raises(InputError, match="already exists and is not an empty directory; choose a new one"):
            with input_files.whole_folder(tmp_path / name):
                raise AssertionError("not refused")
    input_files.aside(tmp_path / "new").symlink_to(theirs)
    with pytest.raises(InputError, match="new: cannot be written: .*File exists"):
        with input_files.whole_folder(tmp_path / "new"):
            raise AssertionError("not refused")
    assert [path.name for path in theirs.iterdir()] == ["thesis.tex"]


def test_a_folder_gets_its_name_when_it_is_whole_and_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the middle"):
        with input_files.whole_folder(tmp_path / "new") as folder:
            (folder / "half").touch()
            raise ValueError("in the middle")
    assert not any(tmp_path.iterdir())
    with pytest.raises(InputError, match="new: cannot be written: No space"):
        with input_files.whole_folder(tmp_path / "new"):
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_folder_is_whole_or_not_there_after_a_kill_at_any_moment(tmp_path: Path) -> None:
    names = ["a", "folder/inside", "z"]

    def fill() -> int:
        new = tmp_path / "all" / "new"
        if not new.exists():
            with input_files.whole_folder(new) as folder:
                (folder / "folder").mkdir()
                for name in names:
                    (folder / name).write_text(name)
        return 0 if sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file()) == names else 1

    (tmp_path / "all").mkdir()
    moments, wrong = killed.after_each_kill(fill, tmp_path / "all")
    assert wrong == [] and moments > 8


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 16060556376\n" % ("4d7a" * 16)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named_with_its_cure(name: str, tmp_path: Path) -> None:
    """What a clone without `git lfs` has in place of large files."""
    path = tmp_path / name
    path.write_text(POINTER)
    readers = {
        ".jsonl": lambda: question_files.read(path),
        ".parquet": lambda: question_files.read(path),
        ".safetensors": lambda: input_files.read_tensors(path),
        "tokenizer.json": lambda: load_tokenizer(tmp_path),
        "config.json": lambda: hf_config.read(tmp_path),
    }
    with pytest.raises(InputError, match=f"{path}: is a pointer of Git LFS, .* download the file .git lfs pull"):
        (readers.get(path.suffix) or readers[name])()


# ------------------------------------------------------------------------------------------------------------ any input
# Whatever comes, the readers of configuration and data give a value or one line that names the place (hypothesis).
#
# The inputs are drawn from valid ones by changes, since random text hardly gets beyond the first check. The draws are
# the same on every machine and in every run: what fails here fails for everybody.

steady = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=asked([100, nightly(600)])[-1],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TREE = yaml.safe_load(breaking.CONFIG.replace("MODEL", "m").replace("OUT", "out"))
SIZES = draw.sampled_from([-1, 0, 1, 2, 3, 10**4, 10**6, 10**12, 10**30, 0.5, 1e300, True, None, "7", [], {}])
NUMBERS = draw.integers() | draw.floats()
ANSWERS = draw.sampled_from(["#### 3", "#### \u0663", "#### 1e5", "#### -0.5", "#### 3\0", "#### 1 #### 2"])


def nested(leaves):
    """Lists and dictionaries of ``leaves``, and the leaves themselves."""
    leaves |= SIZES | NUMBERS | draw.booleans() | draw.none() | draw.text(max_size=9)

    def more(inner):
        return draw.lists(inner, max_size=3) | draw.dictionaries(draw.text(max_size=5), inner, max_size=3)

    return draw.recursive(leaves, more, max_leaves=6)


ANYTHING, JSON = nested(draw.binary(max_size=4)), nested(ANSWERS)
BYTES = draw.lists(draw.tuples(draw.integers(0, 2**16), draw.binary(max_size=3), draw.integers(0, 3)), max_size=6)


def damaged(content: bytes, changes: list[tuple[int, bytes, int]]) -> bytes:
    """``content`` with some bytes put in place of some others."""
    for place, new, gone in changes:
        place %= len(content) + 1
        content = content[:place] + new + content[place + gone :]
    return content


def read(function, *arguments):
    """What ``function`` returns, or None after a proper refusal."""
    try:
        return function(*arguments)
    except InputError as error:
        assert str(error).strip() and one_line(error).isprintable() and len(one_line(error)) <= 1010
        return error


def refused_by_name(found: object, path: Path) -> bool:
    return isinstance(found, InputError) and str(found).startswith(str(path))


@steady
@given(
    where=draw.sampled_from([(s, k) for s, keys in TREE.items() if isinstance(keys, dict) for k in keys]),
    value=ANYTHING,
)
def test_any_value_of_a_key_is_taken_up_or_refused_with_the_key(where, value, tmp_path: Path) -> None:
    section, key = where
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(TREE | {section: TREE[section] | {key: value}}, allow_unicode=True), "utf-8")
    found = read(load_config, path)
    if isinstance(found, Config):
        again = tmp_path / "again.yaml"
        again.write_text(to_yaml(found), "utf-8")
        assert load_config(again) == found  # what was read is kept whole
    else:
        assert key in str(found) or section in str(found) or path.name in str(found)


ROW = draw.one_of(
    draw.fixed_dictionaries({"question": JSON, "answer": JSON}),
    draw.fixed_dictionaries({"question": draw.just("2?"), "answer": ANSWERS}),
    draw.fixed_dictionaries({"question": draw.just("2?"), "answer": draw.just("#### 3")}, optional={"more": JSON}),
    draw.builds(
        lambda role, content, answer: {"messages": [{"role": role, "content": content}], "answer": answer},
        draw.just("user") | JSON,
        JSON,
        JSON,
    ),
    draw.builds(
        lambda extra, reward: {
            "prompt": [{"role": "user", "content": "2?"}],
            "extra_info": extra,
            "reward_model": reward,
        },
        JSON,
        JSON | draw.fixed_dictionaries({"ground_truth": JSON}),
    ),
    JSON,
)


def questions_or_refusal(path: Path) -> None:
    found = read(question_files.read, path)
    if isinstance(found, InputError):
        assert refused_by_name(found, path)
    else:
        for row in found[0]:
            assert row.question.strip() and row.question.encode() and question_files.gold_number(row.answer).isascii()
    for columns in ({"question": "question", "answer": "more"}, {"question": "messages", "answer": "answer"}):
        own = read(lambda path, columns=columns: question_files.read(path, columns), path)
        if isinstance(own, InputError):
            assert refused_by_name(own, path)
        else:
            assert all(row.question.encode() and row.gold.encode() and row.gold == row.gold.strip() for row in own[0])


@steady
@given(rows=draw.lists(ROW, min_size=1, max_size=2), changes=BYTES, start=draw.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_any_jsonl_is_questions_or_refused_with_the_file(rows, changes, start, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(start + lines)
    questions_or_refusal(path)
    path.write_bytes(damaged(lines, changes))
    questions_or_refusal(path)
