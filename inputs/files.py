"""Reads a user's input: files, JSON objects, YAML, overrides, and numbers in environment variables.

Every reader returns a value or raises InputError. No reader opens a pickle or runs code from a model's folder. Commands
print an InputError with `report`. This file does not import torch.
"""

import contextlib
import errno
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from facts.exits import InputError

if TYPE_CHECKING:
    from torch import Tensor

Content = TypeVar("Content", bound=BaseModel)
MOST_RANKS = 2**16  # the upper bound for every number of ranks; no job has that many
LONGEST_MESSAGE = 1000  # characters
# The first bytes of pointer files of Git LFS, Xet and git-annex, which stand for other files.
POINTERS = (b"version https://git-lfs.github.com/spec/", b"# xet version ", b"/annex/objects/")


def shown(value: object) -> str:
    """Format a value for an error message in at most 60 characters: a bool as in YAML, None as "nothing"."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def first_names(names: Iterable[str]) -> str:
    """Format at most ten names for an error message, in alphabetical order, with the number of the other names."""
    known = sorted(names)
    return (", ".join(known[:10]) or "none") + (f" and {len(known) - 10} more" if len(known) > 10 else "")


def printable(text: str, kept: str = "") -> str:
    """Escape the control characters in ``text``, which could change a terminal's state. Those in ``kept`` stay."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """Return the message of ``error`` as one printable line of at most about LONGEST_MESSAGE characters."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = printable(" ".join(text.split()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 105]} ... {text[-100:]}"


def first_three(names: list[str]) -> str:
    """Format the first three names for a message, with the number of the other names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def print_every_letter() -> None:
    """Let `print` escape characters that the output's encoding lacks, because file names may have any character."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def of_the_user(error: BaseException) -> bool:
    """Return whether ``error`` is about the user's input, so that one line and exit code 2 are enough.

    A system error is about the input if it names a file or reports a full disk. This also holds for a system error
    without a number, which comes from a library that has looked for a file. A lost connection is not about the input.
    """
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):
        return bool(error.filename) or error.errno in (None, errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, InputError)


def report(message: str, late: bool = False) -> None:
    """Print why this process ends. Ranks other than 0 first wait 2 seconds, so that the message of rank 0 comes first.

    With ``late``, rank 0 waits as well. This function also writes the message to the file that torchrun names in
    TORCHELASTIC_ERROR_FILE. When torchrun then prints its own traceback, the last lines show this message.
    """
    rank = os.environ.get("RANK", "0")
    if rank != "0" or late:
        time.sleep(2)
    print(message if rank == "0" else f"rank {rank}: {message}", file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message, "timestamp": int(time.time())}))


# --------------------------------------------------------------------------------------------------------------- files


def refuse_pointer(path: str | Path, file: io.BufferedReader) -> None:
    """Raise InputError if the file is a pointer to content that a version control system stores elsewhere."""
    if file.peek(max(map(len, POINTERS))).startswith(POINTERS):
        raise InputError(f"{path}: is a pointer of Git LFS, not the file itself; download the file (git lfs pull)")


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[io.BufferedReader]:
    """Open the file at ``path`` for reading in this block. Only this function opens a user's file.

    Raises InputError with the name of the file for every system error, including an error while the file is read.
    """
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:  # an error while a file is read has a number, but no file name
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_bytes(path: str | Path) -> bytes:
    """Return the content of a file. Raises InputError if the file is unreadable or only a pointer (refuse_pointer)."""
    with opened(path) as file:
        refuse_pointer(path, file)
        return file.read()


def read_text(path: str | Path) -> str:
    """Return the content of a file as text. Raises InputError if the file cannot be read or is not UTF-8."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}; save the file as UTF-8") from None


def without_twins(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dictionary. Raises ValueError if a key occurs twice, because one value would be dropped."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{shown(key)} occurs twice")
        found[key] = value
    return found


def parse_json(text: str) -> Any:
    """Parse ``text`` as JSON. Raises ValueError if it is invalid or an object has two equal keys."""
    return json.loads(text, object_pairs_hook=without_twins)


def read_object(path: str | Path, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the object in a JSON file. Raises InputError if there is no valid object or one of ``keys`` is missing."""
    text = read_text(path)
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: must be a JSON object, not {type(content).__name__}")
    if missing := [key for key in keys if key not in content]:
        raise InputError(f"{path}: {missing[0]} is missing; give an object with {', '.join(keys)}")
    return content


def validated(model: type[Content], content: Any, where: Path) -> Content:
    """Return ``content``, read from the file ``where``, as an instance of ``model``.

    Raises InputError with the first fault.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"])) or "all of it"
        raise InputError(f"{where}: {place}: {fault['msg']}, found {shown(fault['input'])}") from None


def read_tensors(path: Path) -> dict[str, "Tensor"]:
    """Return the tensors of a safetensors file by name.

    They are memory-mapped, so only the used parts are read from disk.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with opened(path) as file:
        refuse_pointer(path, file)
        try:
            return load_file(path)
        except (SafetensorError, LookupError, RuntimeError) as error:  # for a number type that torch lacks
            raise InputError(f"{path}: not a readable safetensors file ({error})") from None


def fsync_path(path: Path) -> None:
    """Wait until ``path`` would survive a power cut: the content of a file, or the list of names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(where: str | Path, *others: type[Exception]) -> Iterator[None]:
    """Turn system errors and exceptions of the types ``others`` into InputError in this block.

    Examples are a full disk and a missing permission, which the user can correct.
    """
    try:
        yield
    except (OSError, *others) as error:  # type: ignore[misc]  # mypy does not follow the star
        raise InputError(
            f"{where}: cannot be written: {one_line(error)}; choose a writable folder with enough space"
        ) from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it has its old or its whole new content, whenever the process or the machine stops."""
    aside = path.with_name(f".{path.name}.tmp")
    # surrogateescape is needed because file names need not be UTF-8.
    aside.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
    fsync_path(aside)
    os.replace(aside, path)
    fsync_path(path.parent)


def refuse_used(folder: Path) -> None:
    """Raise InputError unless ``folder`` is empty or does not exist."""
    if os.path.lexists(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"{folder}: already exists and is not an empty directory; choose a new one")


@contextlib.contextmanager
def whole_folder(folder: Path, *others: type[Exception]) -> Iterator[Path]:
    """Make a temporary folder for this block to fill, and rename it to ``folder`` at the end of the block.

    So ``folder`` is never half-written. The temporary folder (`aside`) is removed if the block raises an error or if a
    killed process has left it; nothing else is removed. Raises InputError if ``folder`` exists and is not empty, if it
    cannot be written, and for errors of the types ``others``.
    """
    target = Path(os.path.realpath(folder))
    filling = aside(folder)
    refuse_used(target)
    with disk_errors(folder, *others):
        shutil.rmtree(filling, ignore_errors=True)
        filling.mkdir(parents=True)
        try:
            yield filling
            for path in filling.iterdir():
                fsync_path(path)
            fsync_path(filling)
            os.rename(filling, target)  # a process that was killed before this has not made the folder
        except BaseException:
            shutil.rmtree(filling, ignore_errors=True)
            raise
        fsync_path(target.parent)


def aside(folder: Path) -> Path:
    """Return the path of whole_folder's temporary folder for ``folder``. Only this project uses names of this form."""
    target = Path(os.path.realpath(folder))
    return target.with_name(f".unfinished-{target.name}")


# --------------------------------------------------------------------------------------------------------- environment


def variable(name: str, default: int, low: int, high: int) -> int:
    """Return the whole number in the environment variable ``name``, or ``default`` if it is not set.

    Raises InputError if the variable is not a whole number from ``low`` to ``high``.
    """
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise InputError(
            f"the environment's {name}: must be a whole number from {low} to {high}, not {shown(text)}; correct or "
            "unset it"
        )
    return int(text)


def usable_cores() -> int:
    """Return the number of cores that this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ----------------------------------------------------------------------------------------------------------------- YAML


# The plain scalars of YAML 1.2. PyYAML's own rules (YAML 1.1) read `no` as False, `2024-01-01` as a date and `1e-6` as
# text.
SCALARS = [
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|)$")),
    ("tag:yaml.org,2002:bool", re.compile(r"(true|True|false|False)$")),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$")),
    ("tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")),
]


class StrictLoader(yaml.SafeLoader):
    """A SafeLoader that reads plain scalars by the rules of SCALARS and refuses a mapping with a repeated key."""

    yaml_implicit_resolvers = {None: SCALARS}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class StrictDumper(yaml.SafeDumper):
    """A SafeDumper that writes each list and each string on one line.

    It quotes strings that YAML 1.1 or YAML 1.2 would read as another type.
    """

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: SCALARS}

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, style='"' if "\n" in value else style)


def parse_yaml(text: str, where: str) -> Any:
    """Parse ``text`` with StrictLoader. Raises InputError, which names the line in ``where``, for invalid YAML."""
    try:
        return yaml.load(text, StrictLoader)
    except Exception as error:  # PyYAML's constructors of !!int, !!timestamp and others raise any exception
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {' '.join(problem.split())}") from None


def read_file(path: str | Path) -> dict:
    """Return the mapping in the YAML file at ``path``. Its keys and values are not checked."""
    tree = parse_yaml(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise InputError(f"{path}: must be a mapping of sections, not {shown(tree)}")
    return tree


def parse_override(item: str) -> tuple[str, Any]:
    """Split `section.key=value` into the dotted key and the value, which is read as YAML.

    Raises InputError if ``item`` has another form or its value is not valid YAML.
    """
    key, equals, text = item.partition("=")
    if not equals or not key or key.startswith("-") or not key.isprintable():
        raise InputError(f"override {shown(item)}: not an override; write section.key=value")
    if " #" in text and text.lstrip()[:1] not in ("'", '"'):
        raise InputError(f"override {key}: YAML would drop the text after ' #' as a comment; put the value in quotes")
    return key, parse_yaml(text, f"override {key}") if text.strip() else ""


def dump_yaml(tree: dict) -> str:
    """Return a YAML string from which parse_yaml restores ``tree``, with the keys in the same order."""
    return yaml.dump(
        tree, Dumper=StrictDumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
