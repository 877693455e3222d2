"""Which small faults in the method and the system do the tests find? A tool for maintainers; CI does not run it.

    python tests/mutants.py record                   adds which test files execute the statement of each fault (20 min)
    python tests/mutants.py run [NUMBER ...]         plants each fault, runs these test files, adds which test finds it

A line of tests/mutants.jsonl is a fault: its file, function and kind, the statement without the fault and with it. The
command `choose` of this program at commit 72b9914 chose them, in the files of the commit that the first line names. A
compound statement counts as its header (the condition of an if). A fault is planted where its statement stands today;
one whose statement is gone is not planted; one that changes nothing has a reason. `record` and `run` work in copies of
the committed files, two at a time.
A test that fails in the copy of `record`, which changes nothing, is left out (it reads sources, say).
"""

import argparse
import ast
import contextlib
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.jsonl"
SECONDS = 120
MISSED, SLOW = "no test fails", f"no test fails in {SECONDS} seconds"
GONE, NOT_EXECUTED = "its statement is gone", "no test executes it"
PLUGIN = """# Of tests/mutants.py: notes which test files execute a statement; runs files in the order of the command.
import os
import pytest
folder, seen = os.path.dirname(os.path.abspath(__file__)), set()
def hit(*numbers):
    name = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0].rpartition("/")[2]
    for number in numbers:
        if name and (number, name) not in seen:
            seen.add((number, name))
            open(f"{folder}/hits/{number} {name}", "w").close()
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if "hits" not in os.listdir(folder):
        items.sort(key=lambda item: config.args.index(f"tests/{item.path.name}"))
"""


class Unit(NamedTuple):
    """A simple statement, or the header of a compound one, in a function."""

    function: str
    node: ast.AST  # the part of the source that is replaced
    is_simple: bool


def header(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.If(test=part) | ast.While(test=part) | ast.For(iter=part):
            return part
        case ast.With(items=[ast.withitem(context_expr=part), *_]):
            return part
    return None


def units(tree: ast.AST, function: str = "") -> Iterator[Unit]:
    """The units of a file in the order of its lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from units(node, f"{function}.{node.name}".strip("."))
            continue
        part = header(node)
        if function and part:
            yield Unit(function, part, False)
        elif function and isinstance(node, ast.stmt) and not hasattr(node, "body"):
            yield Unit(function, node, True)
        yield from units(node, function)


def text_of(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


# ------------------------------------------------------------------------------------------------ planting


def place(root: Path, fault: dict) -> tuple[Path, Unit] | None:
    """Where the statement of a fault stands: in its function, else in its file (moved or not), else in another file."""
    own = root / fault["file"]
    others = [path for path in [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))] if "tests" not in path.parts]
    for path in sorted(others, key=lambda path: (path != own, path.name != own.name)):
        if path.is_file():
            found = [unit for unit in units(ast.parse(path.read_text())) if text_of(unit.node) == fault["before"]]
            if found:
                return path, min(found, key=lambda unit: unit.function != fault["function"])
    return None


def replace(path: Path, unit: Unit, text: str) -> None:
    """Write ``text`` in the place of the unit."""
    lines, node = path.read_bytes().splitlines(keepends=True), unit.node
    first, last = node.lineno - 1, node.end_lineno - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    lines[first : last + 1] = [head + text.encode() + tail]
    path.write_bytes(b"".join(lines))


def copy_of_commit(folder: Path) -> Path:
    """A clone of this checkout with its environment and the plugin, in which files may be changed."""
    copy = folder / "copy"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    for name in (".venv", ".cache"):
        (copy / name).symlink_to((ROOT / name).resolve())
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    (copy / "mutants_plugin.py").write_text(PLUGIN)
    return copy


def run_tests(copy: Path, *arguments: str, seconds: float | None = None) -> list[str]:
    """Run pytest in a copy.  -> the tests that fail; TimeoutExpired after ``seconds``"""
    command = ["bash", "run_tests.sh", "-q", "-rfE", "-p", "no:cacheprovider", "-p", "mutants_plugin", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=copy, stdout=output, stderr=output, start_new_session=True)
        try:
            process.wait(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a group of its own, which was started here
        output.seek(0)
        lines = [line.split() for line in output.read().splitlines()]
    failed = [line[1] for line in lines if line[:1] in (["FAILED"], ["ERROR"]) and len(line) > 1]
    return failed or [f"pytest ended with {process.returncode}"] * (process.returncode != 0)


def record(about: dict, faults: list[dict], folder: Path) -> None:
    """Run all tests once in a copy that notes executed statements; add their test files, the fastest first."""
    copy, where = copy_of_commit(folder), {}
    (copy / "hits").mkdir()
    for number, fault in enumerate(faults):
        if spot := place(copy, fault):
            path, unit = spot
            where.setdefault((path, unit.node.lineno, unit.node.col_offset), (path, unit, []))[2].append(number)
    for _, (path, unit, numbers) in sorted(where.items(), reverse=True):
        call, statement = f"__import__('mutants_plugin').hit{(*numbers,)}", text_of(unit.node)
        replace(path, unit, f"{call}; {statement}" if unit.is_simple else f"{call} or ({statement})")
    about["left_out"] = run_tests(copy, f"--junitxml={folder / 'times.xml'}")
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(folder / "times.xml").iter("testcase"):
        name = f"{case.get('classname').split('.')[1]}.py"
        seconds[name] = seconds.get(name, 0) + float(case.get("time"))
    hits = [path.name.split(" ") for path in (copy / "hits").iterdir()]
    for number, fault in enumerate(faults):
        files = [name for hit, name in hits if hit == str(number)]
        fault["tests"] = sorted(files, key=lambda name: seconds.get(name, 0))
        fault.pop("found", None)


def found_by(copy: Path, fault: dict, left_out: list[str]) -> str:
    """The test that finds a fault, or MISSED, SLOW, GONE or NOT_EXECUTED."""
    spot = place(copy, fault)
    if spot is None or not fault["tests"]:
        return GONE if spot is None else NOT_EXECUTED
    path, unit = spot
    kept = path.read_bytes()
    replace(path, unit, fault["after"])
    own = f"test_{Path(fault['file']).stem}"  # the tests of the file itself come first
    names = sorted(fault["tests"], key=lambda name: not name.startswith(own))
    files = [f"tests/{name}" for name in names if (copy / "tests" / name).exists()]
    without = [f"--deselect={name}" for name in left_out if name.split("::")[0] in files]
    try:
        return next(iter(run_tests(copy, "-n", "0", "-x", *without, *files, seconds=SECONDS)), MISSED)
    except subprocess.TimeoutExpired:
        return SLOW
    finally:
        path.write_bytes(kept)


def run(about: dict, faults: list[dict], numbers: list[int], folder: Path) -> None:
    """Plant the faults of these numbers, two at a time, and write after each which test finds it."""
    lock = threading.Lock()

    def work(name: str, share: list[int]) -> None:
        (folder / name).mkdir()
        copy = copy_of_commit(folder / name)
        for number in share:
            start, found = time.monotonic(), found_by(copy, faults[number], about["left_out"])
            with lock:
                faults[number]["found"] = found
                write(about, faults)
                print(f"{number:3} {time.monotonic() - start:4.0f} s  {faults[number]['file']:22} {found}", flush=True)

    with ThreadPoolExecutor() as workers:
        list(workers.map(work, ("first", "second"), (numbers[::2], numbers[1::2])))


def read() -> tuple[dict, list[dict]]:
    about, *faults = (json.loads(line) for line in LIST.read_text().splitlines())
    return about, faults


def write(about: dict, faults: list[dict]) -> None:
    LIST.write_text("".join(json.dumps(line) + "\n" for line in [about, *faults]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "run"])
    parser.add_argument("numbers", nargs="*", type=int)
    args = parser.parse_args()
    about, faults = read()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if args.command == "record":
            record(about, faults, Path(folder))
        else:
            run(about, faults, args.numbers or list(range(len(faults))), Path(folder))
    write(about, faults)


if __name__ == "__main__":
    main()
