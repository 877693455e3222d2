"""What a user gives is read within limits, or refused in one line; and nothing of the user's is removed."""

from __future__ import annotations

import errno
from pathlib import Path

import killed
import pytest
from breaking import failing_read

from data_gsm8k import load_tokenizer
from facts.exits import InputError
from inputs import files as input_files
from inputs import hf_config
from runlog import run_record
from tasks import question_files

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
        (b"[]", "expected a JSON object, found list"),
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
    with pytest.raises(InputError, match="the environment's N: found .* needed: a whole number from 1 to 8"):
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


def test_a_folder_of_the_users_is_never_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(theirs)
    for name in ("theirs", "link", "theirs/thesis.tex"):
        with pytest.raises(InputError, match="already there and not an empty directory; needed: a new one"):
            with input_files.whole_folder(tmp_path / name):
                raise AssertionError("not refused")
    input_files.aside(tmp_path / "new").symlink_to(theirs)
    with pytest.raises(InputError, match="new: not written: .*File exists"):
        with input_files.whole_folder(tmp_path / "new"):
            raise AssertionError("not refused")
    assert [path.name for path in theirs.iterdir()] == ["thesis.tex"]


def test_a_folder_gets_its_name_when_it_is_whole_and_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="in the middle"):
        with input_files.whole_folder(tmp_path / "new") as folder:
            (folder / "half").touch()
            raise ValueError("in the middle")
    assert not any(tmp_path.iterdir())
    with pytest.raises(InputError, match="new: not written: No space"):
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
    with pytest.raises(InputError, match=f"{path}: found a pointer of Git LFS, .* needed: the file .git lfs pull"):
        (readers.get(path.suffix) or readers[name])()
