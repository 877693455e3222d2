"""What a user gives is read within limits, or refused in one line; and nothing of the user's is removed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import killed
import pytest
from breaking import failing_read

import run_record
from data_gsm8k import load_tokenizer
from inputs import files as input_files
from inputs import hf_config, question_files
from inputs.files import InputError


@pytest.fixture
def special(tmp_path: Path) -> dict[str, Path]:
    """Names that open() waits for, or reads without end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    return {name: tmp_path / name for name in ("pipe", "link")} | {"device": Path("/dev/zero")}


@pytest.fixture
def ends() -> Iterator[None]:
    """What waits for ever is interrupted after a minute."""

    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_what_is_no_plain_file_is_refused_and_not_waited_for(special: dict[str, Path], ends) -> None:
    for path in special.values():
        for read in (input_files.read_bytes, input_files.read_object):
            with pytest.raises(InputError, match="found a (pipe|device); needed: a file"):
                read(path)


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 2**20)
    assert input_files.read_bytes(path, 1) == b"x" * 2**20
    path.write_bytes(b"x" * (2**20 + 1))
    with pytest.raises(InputError, match="file: larger than 1 MiB"):
        input_files.read_bytes(path, 1)
    os.truncate(path, 2**36)  # 64 GiB that the disk does not hold
    with pytest.raises(InputError, match="larger than"):
        input_files.read_text(path)
    with pytest.raises(InputError, match="no name of a file"):
        input_files.read_bytes(tmp_path / "a\0b")


READERS = (
    input_files.read_bytes, input_files.read_text, input_files.read_object, input_files.read_file,
    input_files.read_tensors, run_record.sha256_file, run_record.read_lines, question_files.read,
)  # fmt: skip


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
    theirs, ours, target = tmp_path / "theirs", tmp_path / "ours", tmp_path / "target"
    theirs.mkdir()
    (theirs / "thesis.tex").write_text("years of work")
    (tmp_path / "link").symlink_to(theirs)
    for name in ("theirs", "link", "theirs/thesis.tex"):
        with pytest.raises(InputError, match="in the way, and not made by this program"):
            input_files.fresh_folder(tmp_path / name)
    assert (theirs / "thesis.tex").read_text() == "years of work"
    input_files.fresh_folder(ours)
    (ours / "half").write_text("of a process that was killed")
    input_files.fresh_folder(ours)
    assert not (ours / "half").exists()
    (ours / "whole").touch()
    input_files.finish_folder(ours, target)
    assert [path.name for path in target.iterdir()] == ["whole"] and not ours.exists()


def test_a_leftover_keeps_its_mark_until_the_last_of_its_files_is_gone(tmp_path: Path) -> None:
    """Otherwise a kill while it is removed would leave a folder that seems to be the user's."""
    left = tmp_path / "left"
    input_files.fresh_folder(left)
    (left / "folder").mkdir()
    (left / "link").symlink_to(tmp_path)
    for name in ("a", "z", "folder/inside"):
        (left / name).touch()
    moments, wrong = killed.after_each_kill(lambda: input_files.fresh_folder(left) or 0, tmp_path / "left")
    assert wrong == [] and moments > 8 and tmp_path.is_dir()


def test_a_folder_of_a_model_holds_plain_files_of_a_size(special: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(InputError, match="needed: a file"):
        input_files.check_folder(tmp_path)
    for name in ("pipe", "link"):
        special[name].unlink()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "folder").mkdir()
    for name in ("model.safetensors", "config.json"):
        (tmp_path / name).touch()
    os.truncate(tmp_path / "model.safetensors", 2**36)
    input_files.check_folder(tmp_path)
    os.truncate(tmp_path / "config.json", 2**36)
    with pytest.raises(InputError, match=r"config.json: larger than 64 MiB"):
        input_files.check_folder(tmp_path)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: 9**9**9, "does not end in 0.3 s"),  # in C: no signal of Python's would be heard
        (lambda: sum(range(40_000_000)), "takes more than 0.1 s for each"),
        (lambda: bytearray(2**33), "takes more than 2 GiB"),
    ],
    ids=["endless", "slow", "large"],
)
def test_a_program_that_comes_with_a_model_must_end(work, said: str, monkeypatch) -> None:
    monkeypatch.setattr(input_files, "PROBE_SECONDS", 0.3 if "end" in said else 20)
    with pytest.raises(InputError, match=said):
        input_files.refuse_endless(work, "it")


def test_a_pattern_may_use_one_second_and_what_ends_is_left_to_its_caller(capfd) -> None:
    """Of the processor: on a busy machine a sound pattern may have to wait longer for its turn."""
    with pytest.raises(InputError, match="does not end in 1 s"):
        input_files.refuse_endless(lambda: re.match(r"(([a-z_.0-9]+)+)+\$", "model.layers.0.self_attn.q_proj"), "it", 1)
    for work in (list, lambda: 1 / 0, lambda: os.write(1, b"not heard")):
        input_files.refuse_endless(work, "it", 1)
    assert capfd.readouterr() == ("", "")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 16060556376\n" % ("4d7a" * 16)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named_with_its_cure(name: str, tmp_path: Path) -> None:
    """What a clone without `git lfs` has in place of large files."""
    path = tmp_path / name
    path.write_text(POINTER)
    readers = {
        ".jsonl": lambda: question_files.read(path), ".parquet": lambda: question_files.read(path),
        ".safetensors": lambda: input_files.read_tensors(path), "tokenizer.json": lambda: load_tokenizer(tmp_path),
        "config.json": lambda: hf_config.read(tmp_path),
    }  # fmt: skip
    with pytest.raises(InputError, match=f"{path}: found a pointer of Git LFS, .* needed: the file .git lfs pull"):
        (readers.get(path.suffix) or readers[name])()
