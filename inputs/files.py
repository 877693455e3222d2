"""Reads what a user gives, within limits: files, JSON objects, YAML, overrides, and numbers of the environment.

Every reader returns a value or raises InputError, and does so soon: it never waits for a pipe, never reads a device
without end, and never removes a folder of the user. Commands print an InputError with `refused`. Imports no torch.
"""

import contextlib
import io
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from torch import Tensor

MOST_RANKS = 2**16  # an upper bound of every number of ranks; no job has so many
SETTINGS_MIB = 64  # the largest file of settings or records; the index of a model with 30,000 tensors has 3 MiB
LINES_MIB = 1024  # the largest file of questions, or of the lines of a run
LARGEST_YAML_MIB = 0.25  # a configuration has about 3 KiB; PyYAML needs 3 s for a file of this size
LONGEST_MESSAGE = 1000  # characters
SMALL_FILES = (".json", ".jinja", ".txt", ".model")  # files of a model's folder that are read as a whole
PROBE_SECONDS, AGAIN_SECONDS, PROBE_GIB = 10, 0.1, 2  # limits of refuse_endless: first call, second, memory
# How a file begins that stands for another one, of Git LFS, of Xet or of git-annex.
POINTERS = (b"version https://git-lfs.github.com/spec/", b"# xet version ", b"/annex/objects/")
UNFINISHED = ".unfinished"  # this file marks a folder that this project is still filling
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # NUL and half characters: file names, tokens and UTF-8 cannot hold them


class InputError(ValueError):
    """Something the user gave (configuration, data, weights, checkpoint, layout) cannot be used.

    The message is one line: where, what was found, what is needed.
    """


BAD_INPUT = (InputError, OSError, UnicodeError)  # the main function of a command passes these to `refused`


def shown(value: object) -> str:
    """A value for an error message: one line of at most 60 characters, in the words of YAML."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def first_names(names: Iterable[str]) -> str:
    """At most ten names for an error message, in order, and how many more there are."""
    known = sorted(names)
    return (", ".join(known[:10]) or "none") + (f" and {len(known) - 10} more" if len(known) > 10 else "")


def printable(text: str, kept: str = "") -> str:
    """``text`` with control characters as escapes, but for those ``kept``: they may change the state of a terminal."""
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def one_line(error: BaseException) -> str:
    """The message of ``error`` as one printable line of about LONGEST_MESSAGE characters at most."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = printable(" ".join(text.split()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 105]} ... {text[-100:]}"


def first_three(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def print_every_letter() -> None:
    """Let `print` write a letter that the encoding of the output lacks as an escape. File names may have any letter."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def refused(error: BaseException) -> int:
    """Print the error on stderr as one line.  -> 2, the exit code for input that cannot be used"""
    print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
    return 2


# --------------------------------------------------------------------------------------------------------------- files


def refuse_special(path: str | Path, mode: int) -> None:
    """InputError unless ``mode`` (st_mode of ``path``) is that of a regular file."""
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: cannot be read (Is a directory)")
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise InputError(f"{path}: found {kind}; needed: a file")


def refuse_pointer(path: str | Path, file: io.BufferedReader) -> None:
    """InputError if the file only names the content that a version control system keeps elsewhere."""
    if file.peek(max(map(len, POINTERS))).startswith(POINTERS):
        raise InputError(f"{path}: found a pointer of Git LFS, not the file itself; needed: the file (git lfs pull)")


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[io.BufferedReader]:
    """The regular file at ``path``, open for reading: the one place that opens a file of the user's.

    InputError that names the file for every error of the system, also for one that comes while it is read.
    """
    try:
        # O_NONBLOCK: opening a pipe does not wait for its writer.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            refuse_special(path, os.fstat(file.fileno()).st_mode)
            yield file
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{shown(str(path))}: no name of a file ({error})") from None
    except OSError as error:  # an error while a file is read has a number, and no name of a file
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None


def read_bytes(path: str | Path, most_mib: float = SETTINGS_MIB) -> bytes:
    """The content of a regular file of at most ``most_mib``; InputError if it cannot be read."""
    most = int(most_mib * 2**20)
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        refuse_pointer(path, file)
        # Files in /proc hold more bytes than st_size says, so the length is checked after reading as well.
        data: bytes | None = b"" if size > most else file.read(most + 1)
    if data is None:
        raise InputError(f"{path}: cannot be read (it does not wait for its writer, and holds nothing yet)")
    if max(size, len(data)) > most:
        raise InputError(f"{path}: larger than {most_mib:g} MiB, the most that is read of such a file")
    return data


def read_text(path: str | Path, most_mib: float = SETTINGS_MIB) -> str:
    """read_bytes, decoded; InputError for bytes that are not UTF-8."""
    try:
        return read_bytes(path, most_mib).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}") from None


def read_object(path: str | Path, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """The object in a JSON file; InputError unless it is one that has all ``keys``."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(content).__name__}")
    if missing := [key for key in keys if key not in content]:
        raise InputError(f"{path}: expected an object with {', '.join(keys)}; {missing[0]} is missing")
    return content


def read_tensors(path: Path) -> dict[str, "Tensor"]:
    """The tensors of a safetensors file by name, mapped: only the parts that are used are read from the disk."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with opened(path) as file:  # refuses what is no file before the library opens it
        refuse_pointer(path, file)
        try:
            return load_file(path)
        except (SafetensorError, LookupError, RuntimeError) as error:  # a type of numbers that torch does not have
            raise InputError(f"{path}: not a readable safetensors file ({error})") from None


def check_folder(folder: Path) -> None:
    """InputError if a library that opens the files of ``folder`` would wait for a pipe or read without end.

    Every file must be a regular one, and one of SMALL_FILES must not be larger than SETTINGS_MIB.
    """
    for path in sorted(folder.iterdir()):
        if path.is_dir() or not path.exists():  # a link to nothing cannot be opened, so it does no harm
            continue
        about = path.stat()
        refuse_special(path, about.st_mode)
        if path.suffix in SMALL_FILES:
            if about.st_size > SETTINGS_MIB * 2**20:
                raise InputError(f"{path}: larger than {SETTINGS_MIB} MiB, the most that is read of such a file")
            with opened(path) as file:
                refuse_pointer(path, file)  # reads: a library would not name the file that cannot be read


def fsync_path(path: Path) -> None:
    """Wait until the file at ``path``, or the names in that folder, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(where: str | Path, *others: type[Exception]) -> Iterator[None]:
    """A full disk or a missing permission is an InputError, because the user can correct it; so are the ``others``."""
    try:
        yield
    except (OSError, *others) as error:  # type: ignore[misc]  # mypy does not follow the star
        raise InputError(f"{where}: not written: {one_line(error)}; needed: a folder to write, with room") from error


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file that holds its old content or all of the new one, whenever the process or the machine stops."""
    aside = path.with_name(f".{path.name}.tmp")
    # surrogateescape: names of files need not be UTF-8.
    aside.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
    fsync_path(aside)
    os.replace(aside, path)
    fsync_path(path.parent)


def is_leftover(path: Path) -> bool:
    """Whether ``path`` is a folder that a killed process of this project left (it has UNFINISHED), or an empty one."""
    return path.is_dir() and not path.is_symlink() and ((path / UNFINISHED).is_file() or not any(path.iterdir()))


def fresh_folder(path: Path) -> None:
    """Make an empty folder to fill; it contains the file UNFINISHED until `finish_folder`.

    A folder that a killed process left is removed first. InputError if anything else has the name.
    """
    if os.path.lexists(path):
        if not is_leftover(path):
            raise InputError(f"{path}: in the way, and not made by this program; needed: another name for it")
        remove_leftover(path)
    path.mkdir(parents=True)
    (path / UNFINISHED).touch()


def finish_folder(path: Path, target: Path) -> None:
    """Rename the folder ``path``, which fresh_folder made, to ``target``, where nothing or a leftover may be.

    A process that is killed before the last line leaves a leftover, so that its command can be repeated.
    """
    if is_leftover(target):
        remove_leftover(target)
    os.rename(path, target)
    fsync_path(target.parent)
    (target / UNFINISHED).unlink()


def remove_leftover(folder: Path) -> None:
    """Remove a leftover. UNFINISHED is the last of its files, so that the rest is still one after a kill half-way."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != UNFINISHED:
            path.unlink()
    shutil.rmtree(folder)


# ----------------------------------------------------------------------------------------- programs that models contain


def refuse_endless(work: Callable[[], object], what: str, cpu_seconds: int = PROBE_SECONDS) -> None:
    """InputError unless ``work`` ends in PROBE_SECONDS and PROBE_GIB, and when called again in AGAIN_SECONDS.

    A model's folder contains programs (chat templates, patterns) that may run for ever, so ``work`` is tried in a
    process of its own, which may also use at most ``cpu_seconds``. An exception of ``work`` is not reported here: the
    caller meets it when it calls ``work`` itself.
    """
    probe = multiprocessing.get_context("fork").Process(target=_probe, args=(work, cpu_seconds), daemon=True)
    with warnings.catch_warnings():  # Python 3.12 warns of every fork of a process that has threads
        warnings.simplefilter("ignore", DeprecationWarning)
        probe.start()
    probe.join(PROBE_SECONDS)
    faults = {
        None: f"does not end in {PROBE_SECONDS} s; needed: one that takes milliseconds",
        -signal.SIGXCPU: f"does not end in {cpu_seconds} s; needed: one that takes milliseconds",
        1: f"takes more than {AGAIN_SECONDS} s for each question; needed: one that takes milliseconds",
    }
    code = probe.exitcode  # None if it still runs
    probe.kill()
    probe.join()
    if code != 0:
        raise InputError(f"{what} {faults.get(code, f'takes more than {PROBE_GIB} GiB; needed: less')}")


def _probe(work: Callable[[], object], cpu_seconds: int) -> None:
    """Run ``work`` twice in a forked process, and end it with exit code 0 (good), 1 (slow) or 2 (too much memory).

    The first call may compile something, so only the second one is timed.
    """
    try:
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        in_use = Path("/proc/self/statm")
        if in_use.exists():
            most = int(in_use.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + PROBE_GIB * 2**30
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds + 1))
        work()
        start = time.process_time()
        work()
        code = int(time.process_time() - start > AGAIN_SECONDS)
    except BaseException as error:
        code = 2 if isinstance(error, MemoryError) or isinstance(error.__cause__, MemoryError) else 0
    finally:
        os._exit(code)


# --------------------------------------------------------------------------------------------------------- environment


def variable(name: str, default: int, low: int, high: int) -> int:
    """The whole number in the environment variable ``name``, or ``default`` if it is not set; InputError otherwise."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        raise InputError(
            f"the environment's {name}: found {shown(text)}; needed: a whole number from {low} to {high}, or none"
        )
    return int(text)


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
    """SafeLoader with the rules of SCALARS; a key that is given twice, an alias and UNUSABLE characters are errors.

    Aliases are refused because a few lines of aliases of aliases can stand for more values than any memory holds.
    """

    yaml_implicit_resolvers = {None: SCALARS}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent) and (event := self.peek_event()).anchor in self.anchors:
            raise yaml.MarkedYAMLError(
                problem=f"the alias *{event.anchor}: write its value out instead", problem_mark=event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode) and UNUSABLE.search(node.value):
            raise yaml.MarkedYAMLError(
                problem=f"found NUL or half a character in {shown(node.value)}", problem_mark=node.start_mark
            )
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"key {key.value!r} given twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class StrictDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as another type, and writes each list and each text on one line."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: SCALARS}

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, style='"' if "\n" in value else style)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text under StrictLoader; InputError with its line when it is not valid."""
    try:
        return yaml.load(text, StrictLoader)
    except Exception as error:  # PyYAML's constructors of !!int, !!timestamp and others raise any exception
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or str(error)
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {' '.join(problem.split())}") from None


def read_file(path: str | Path) -> dict:
    """The mapping in the YAML file at ``path``; its keys and values are not checked."""
    tree = parse_yaml(read_text(path, LARGEST_YAML_MIB), str(path))
    if not isinstance(tree, dict):
        raise InputError(f"{path}: expected a mapping of sections, found {shown(tree)}")
    return tree


def parse_override(item: str) -> tuple[str, Any]:
    """`section.key=value` -> (dotted key, value read as YAML)."""
    key, equals, text = item.partition("=")
    if not equals or not key or key.startswith("-") or UNUSABLE.search(key):
        raise InputError(f"override {shown(item)}: expected section.key=value")
    if " #" in text and text.lstrip()[:1] not in ("'", '"'):
        raise InputError(f"override {key}: YAML would drop what follows ' #' as a comment; put the value in quotes")
    return key, parse_yaml(text, f"override {key}") if text.strip() else ""


def dump_yaml(tree: dict) -> str:
    """A YAML text, keys in the order of ``tree``, that parse_yaml reads back to ``tree``."""
    return yaml.dump(
        tree, Dumper=StrictDumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000
    )
