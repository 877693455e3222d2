"""What a user gives, taken within limits: files of a kind and a size, JSON objects, whole numbers of the environment.

Whatever comes, the outcome is a value or an InputError, and soon: nothing waits for a pipe, reads a device without end,
or replaces a folder of the user's. `refused` is how every command says so. No torch, no YAML.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

MOST_RANKS = 2**16  # far more than any job has
SETTINGS_MIB = 64  # the largest file of settings or records; the index of 30,000 weights has 3
LINES_MIB = 1024  # the largest file of questions, or of a run's lines
LONGEST_MESSAGE = 1000  # characters
PROBE_SECONDS, AGAIN_SECONDS, PROBE_GIB = 10, 0.1, 2  # of a program that comes with a model, for one question
UNFINISHED = ".unfinished"  # lies in a folder that this project is filling


class InputError(ValueError):
    """Something the user gave (configuration, data, weights, checkpoint, layout) cannot be used.

    The message is one line: where, what was found, what is needed.
    """


BAD_INPUT = (InputError, OSError, UnicodeError)  # what the main of a command hands to `refused`


def shown(value: object) -> str:
    """A value of the user's in an error message: one line, not too long."""
    text = "nothing" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def one_line(error: BaseException) -> str:
    """The message of ``error`` as one printable line of at most LONGEST_MESSAGE characters."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(text.split()))
    return text if len(text) <= LONGEST_MESSAGE else f"{text[: LONGEST_MESSAGE - 105]} ... {text[-100:]}"


def refused(error: BaseException) -> int:
    """Print one line on stderr about input that cannot be used.  -> the exit code, 2"""
    print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
    return 2


# --------------------------------------------------------------------------------------------------------------- files


def refuse_special(path: str | Path, mode: int) -> None:
    """IsADirectoryError for a directory's ``mode``; InputError for a pipe's, a socket's or a device's."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise InputError(f"{path}: found {kind}; needed: a file")


def read_bytes(path: str | Path, most_mib: float = SETTINGS_MIB) -> bytes:
    """The content of a file. OSError as open() raises it; InputError for no plain file, or one above ``most_mib``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without waiting for the writer of a pipe
    except ValueError as error:  # NUL, or half a character
        raise InputError(f"{shown(str(path))}: no name of a file ({error})") from None
    try:
        about, most = os.fstat(descriptor), int(most_mib * 2**20)
        refuse_special(path, about.st_mode)
        with open(descriptor, "rb", closefd=False) as file:
            data = b"" if about.st_size > most else file.read(most + 1)  # those of /proc have more than they say
    finally:
        os.close(descriptor)
    if max(about.st_size, len(data)) > most:
        raise InputError(f"{path}: larger than {most_mib:g} MiB, the most that is read of such a file")
    return data


def read_text(path: str | Path, most_mib: float = SETTINGS_MIB) -> str:
    """As read_bytes, decoded; UnicodeDecodeError, a ValueError, for what is not UTF-8."""
    return read_bytes(path, most_mib).decode("utf-8")


def read_object(path: str | Path, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    """The object in a JSON file; InputError when it is missing, no JSON, no object, or lacks one of ``keys``."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        raise InputError(f"{path}: missing") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(content).__name__}")
    if missing := [key for key in keys if key not in content]:
        raise InputError(f"{path}: expected an object with {', '.join(keys)}; {missing[0]} is missing")
    return content


def check_folder(folder: Path, small: tuple[str, ...] = (".json", ".jinja", ".txt", ".model")) -> None:
    """InputError if a file of ``folder`` is no plain file, or one with a ``small`` ending is larger than settings are.

    For what a library is going to open there, which would wait for a pipe and read a device for ever.
    """
    for path in sorted(folder.iterdir()):
        about = path.stat() if path.exists() else path.lstat()  # a link to nothing is one that nothing opens
        if stat.S_ISDIR(about.st_mode) or stat.S_ISLNK(about.st_mode):
            continue
        refuse_special(path, about.st_mode)
        if path.suffix in small and about.st_size > SETTINGS_MIB * 2**20:
            raise InputError(f"{path}: larger than {SETTINGS_MIB} MiB, the most that is read of such a file")


def fresh_folder(path: Path) -> None:
    """Make an empty folder to fill; remove what a killed process left of an earlier one, and nothing else.

    The folder holds UNFINISHED until `finish_folder`. InputError if anything that has none is in the way.
    """
    if path.is_symlink() or path.exists():
        if path.is_symlink() or not (path / UNFINISHED).is_file():
            raise InputError(f"{path}: in the way, and not made by this program; needed: another name for it")
        shutil.rmtree(path)
    path.mkdir(parents=True)
    (path / UNFINISHED).touch()


def finish_folder(path: Path, target: Path) -> None:
    """Give what fresh_folder made its name."""
    os.rename(path, target)
    (target / UNFINISHED).unlink()


# ------------------------------------------------------------------------------------------------ other people's code


def refuse_endless(work: Callable[[], object], what: str) -> None:
    """InputError unless ``work`` ends: in a process of its own, in PROBE_SECONDS and PROBE_GIB, then in AGAIN_SECONDS.

    For programs that come with a model. What ``work`` raises is left for the caller to meet.
    """
    with warnings.catch_warnings():  # Python 3.12 warns of every fork of a process that has threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _probe(work)
    end = time.monotonic() + PROBE_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise InputError(f"{what} does not end in {PROBE_SECONDS} s; needed: one that takes milliseconds")
        time.sleep(0.002)
    if code := os.waitstatus_to_exitcode(ended[1]):
        slow = f"takes more than {AGAIN_SECONDS} s for each question; needed: one that takes milliseconds"
        raise InputError(f"{what} {slow if code == 1 else f'takes more than {PROBE_GIB} GiB; needed: less'}")


def _probe(work: Callable[[], object]) -> None:
    """In a forked process: run ``work`` twice, the first time is of compiling too; end with 0, or 1 if it is slow."""
    code = 2
    try:
        for output in (1, 2):
            os.dup2(os.open(os.devnull, os.O_WRONLY), output)
        in_use = Path("/proc/self/statm")
        if in_use.exists():
            most = int(in_use.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + PROBE_GIB * 2**30
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        work()
        start = time.process_time()
        work()
        code = int(time.process_time() - start > AGAIN_SECONDS)
    except MemoryError:
        pass
    except BaseException as error:
        code = 2 if isinstance(error.__cause__, MemoryError) else 0
    finally:
        os._exit(code)


# --------------------------------------------------------------------------------------------------------- environment


def variable(name: str, default: int, low: int, high: int) -> int:
    """A whole number of the environment; ``default`` where it is not set, InputError where it is anything else."""
    text = os.environ.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,9}", text) or not low <= int(text) <= high:
        found = f"the environment's {name}: found {shown(text)}"
        raise InputError(f"{found}; needed: a whole number from {low} to {high}, or none")
    return int(text)


# -------------------------------------------------------------------------------------------------- YAML, read strictly


LARGEST_MIB = 0.25  # a configuration has some 3 KiB; PyYAML takes 3 s for this
UNUSABLE = re.compile("[\0\ud800-\udfff]")  # no file's name, no token, no UTF-8 can hold these

# YAML 1.2's plain scalars; PyYAML's own (1.1) make False of `no`, a date of `2024-01-01` and text of `1e-6`.
SCALARS = [
    ("tag:yaml.org,2002:null", re.compile(r"(~|null|)$")),
    ("tag:yaml.org,2002:bool", re.compile(r"(true|True|false|False)$")),
    ("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][0-9]*)$")),
    ("tag:yaml.org,2002:float", re.compile(r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?$")),
]


class StrictLoader(yaml.SafeLoader):
    """SafeLoader with SCALARS' rules, to which a key given twice is an error, and an alias: few lines of aliases of
    aliases stand for more values than any memory holds."""

    yaml_implicit_resolvers = {None: SCALARS}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent) and (event := self.peek_event()).anchor in self.anchors:
            message = f"the alias *{event.anchor}: write its value out instead"
            raise yaml.composer.ComposerError(None, None, message, event.start_mark)
        return super().compose_node(parent, index)

    def construct_scalar(self, node: yaml.Node) -> str:
        if isinstance(node, yaml.ScalarNode) and UNUSABLE.search(node.value):
            message = f"found NUL or half a character in {shown(node.value)}"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.value in seen:
                message = f"key {key_node.value!r} given twice"
                raise yaml.constructor.ConstructorError(None, None, message, key_node.start_mark)
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


class StrictDumper(yaml.SafeDumper):
    """Quotes text that YAML 1.1 or 1.2 would read as something else; lists and texts of several lines take one line."""

    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers, None: SCALARS}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_sequence(self, tag: str, sequence: Any, flow_style: bool | None = None) -> yaml.SequenceNode:
        return super().represent_sequence(tag, sequence, flow_style=True)

    def represent_scalar(self, tag: str, value: str, style: str | None = None) -> yaml.ScalarNode:
        return super().represent_scalar(tag, value, style='"' if "\n" in value else style)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text under StrictLoader; InputError with its line when it is not YAML."""
    try:
        return yaml.load(text, StrictLoader)
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {' '.join((error.problem or str(error)).split())}") from None
    except Exception as error:  # PyYAML's constructors of !!int, !!timestamp and others fail in any way
        raise InputError(f"{where}: not valid YAML: {' '.join(str(error).split())}") from None


def read_file(path: str | Path) -> dict:
    """The mapping in the YAML file at ``path``, unchecked."""
    try:
        text = read_text(path, LARGEST_MIB)
    except OSError as error:
        raise InputError(f"{path}: cannot read it: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}") from None
    tree = parse_yaml(text, str(path))
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
    """The text of a YAML file that parse_yaml reads back to ``tree``, keys in their order."""
    layout = {"sort_keys": False, "allow_unicode": True, "default_flow_style": False, "width": 1000}
    return yaml.dump(tree, Dumper=StrictDumper, **layout)
