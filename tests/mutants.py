"""Which small faults in the product do the tests find? A tool for maintainers; CI does not run it.

    python tests/mutants.py choose                          renews the list of faults
    python tests/mutants.py record [-- PYTEST ARGUMENTS]    which tests execute the statement of a fault, at what cost
    python tests/mutants.py run [ID ...] [--seconds N]      plants each fault without a result and runs these tests
    python tests/mutants.py check [--against REVISION]      which faults does no test find any more since a commit?

Each works on the committed files, in copies of them; `choose` on the files as they are. `run` and `check` need Linux.
choose: a fault whose statement is gone is dropped, and each file that stays gets four by the rule of mutants_faults.py.
    A fault that changes nothing gets a "reason" by hand in tests/mutants.jsonl; it is not planted, and `choose` draws
    another one.
record: one run of all tests, e.g. `record -- --all`, or of some files, whose part is then replaced (mutants_notes.py).
    A test that fails here, where nothing is changed, is left out. A statement that is executed at an import counts for
    every test that executes another listed statement of its file.
run: two faults at a time, and for each the tests of the default tier first, then those of ci, each tier's cheapest
    first, until three fail or 60 seconds are spent. A result is kept at once, so a run that was stopped goes on where
    it was, and another run goes on with faults that no test has found yet. `--seconds` starts nothing further after N
    seconds. Each fault has processes that are forked after the packages of WARM were imported. A test that also fails
    without a fault is left out.
check: faults are planted again if their file or a file of their finders has changed. First their finders run, then all
    tests that execute the statement, then those that a new record of the changed test files names. Exit code 1: a fault
    is lost, its statement is gone, or a file has fewer faults than the rule asks for; `choose` mends the last two.
    After exit code 0 the matrix has the new results and names the present commit; otherwise it stays as it was.

tests/kill_matrix.json.xz: {"commit", "left_out", "tests": [[id, tier, seconds]], "rows": {fault: one letter a test}}
    .  does not execute the statement      -  not run      p  passed      F  failed, or ran 10 times as long as recorded
The row "plant:NAME" is of a fault in FAULTS of tests/support/planted*.py, planted by `pytest --plant NAME`. Its tests
are those of the default tier in files that do not ask for these faults. The row "none" has no fault.
"""

import argparse
import ast
import ctypes
import gc
import importlib
import json
import lzma
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import mutants_faults
import pytest
from mutants_faults import Fault

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.jsonl"
MATRIX = ROOT / "tests" / "kill_matrix.json.xz"
FAULT_LIST = r"planted\.FAULTS|from planted import .*\bFAULTS\b"  # in test files that ask for faults by name
SECONDS, ENOUGH, FIRST = 60, 3, 20  # of tests of a fault: time, failures, and how many the first process collects
TIERS = ([], ["--ci"], ["--all"])  # options of pytest, by the number of the tier in mutants_notes.py
WARM = """
    torch megatron.core.models.gpt.gpt_layer_specs megatron.core.tensor_parallel megatron.core.transformer.moe.moe_layer
    transformers.models.qwen3_moe.modeling_qwen3_moe pandas scipy.stats hypothesis
""".split()


# ------------------------------------------------------------------------------------------- the matrix


class Matrix:
    """The kill matrix. ``rows``: fault -> test -> letter, without the tests that do not execute the statement."""

    def __init__(self) -> None:
        self.path = MATRIX
        self.clear()
        if MATRIX.exists():
            stored = json.loads(lzma.decompress(MATRIX.read_bytes()))
            self.commit, self.left_out = stored["commit"], set(stored["left_out"])
            self.tests = {test: (tier, seconds) for test, tier, seconds in stored["tests"]}
            for fault, letters in stored["rows"].items():
                row = zip(self.tests, letters, strict=True)
                self.rows[fault] = {test: letter for test, letter in row if letter != "."}

    def clear(self) -> None:
        self.commit, self.left_out = git("rev-parse", "HEAD").strip(), set()
        self.tests: dict[str, tuple[int, float]] = {}  # id -> (tier, seconds)
        self.rows: dict[str, dict[str, str]] = {}

    def write(self) -> None:
        """Write the file; the same contents give the same bytes."""
        tests = sorted(self.tests)
        rows = {fault: "".join(row.get(test, ".") for test in tests) for fault, row in sorted(self.rows.items())}
        stored = {"commit": self.commit, "left_out": sorted(self.left_out), "rows": rows}
        stored["tests"] = [[test, *self.tests[test]] for test in tests]
        new = self.path.with_suffix(".new")
        new.write_bytes(lzma.compress(json.dumps(stored).encode(), preset=1))
        new.replace(self.path)

    def with_letters(self, fault: str, letters: str) -> list[str]:
        """The tests whose letter in the row of a fault is one of ``letters``, the cheapest first."""
        tests = [test for test, letter in self.rows.get(fault, {}).items() if letter in letters]
        return sorted(tests, key=lambda test: (self.tests[test], test))

    def leave_out(self, tests: Iterable[str]) -> None:
        for test in tests:
            self.left_out.add(test)
            self.tests.pop(test, None)
            for row in self.rows.values():
                row.pop(test, None)


def git(*arguments: str, cwd: Path | None = None) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd or ROOT, capture_output=True, text=True, check=True).stdout


def read_faults() -> list[Fault]:
    return [Fault(**json.loads(line)) for line in LIST.read_text().splitlines()]


def planted_names() -> dict[str, str]:
    """The faults that tests plant by hand, each with the file that lists it."""
    names = {}
    for path in (ROOT / "tests" / "support").glob("planted*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAULTS":
                keys = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
                names |= dict.fromkeys((f"plant:{key}" for key in keys), str(path.relative_to(ROOT)))
    return names


def copy_of_commit(folder: Path) -> Path:
    """A clone of this checkout with its environment, in which files may be changed."""
    copy = folder / "copy"
    git("clone", "--quiet", str(ROOT), str(copy))
    for name in (".venv", ".cache"):
        (copy / name).symlink_to((ROOT / name).resolve())
    if (ROOT.parent / "shared").exists():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return copy


# ------------------------------------------------------------------------------------------- record


def record(matrix: Matrix, arguments: list[str], folder: Path) -> None:
    """Run tests in a copy that notes executed statements, and replace their part of the matrix; all without a path."""
    copy, faults = copy_of_commit(folder), read_faults()
    units, where = mutants_faults.product(copy), {}
    for fault in faults:
        if unit := mutants_faults.place(units, fault):
            where.setdefault((unit.file, unit.node.lineno, unit.node.col_offset), (unit, []))[1].append(fault.id)
    for _, (unit, ids) in sorted(where.items(), reverse=True):  # from the end, so that the other places stay true
        call = f"__import__('mutants_notes').hit{(*ids,)}"
        text = f"{call}; {unit.text}" if unit.is_simple else f"{call} or ({unit.text})"
        mutants_faults.replace(copy, unit, text)
    (copy / "mutants_notes.py").write_bytes((ROOT / "tests" / "mutants_notes.py").read_bytes())
    # With run_tests.sh's own loadgroup, the id of a test ends in its group.
    options = ["--dist", "loadfile", "-p", "no:cacheprovider", "-p", "mutants_notes"]
    command = ["bash", "run_tests.sh", "-q", *options, *arguments]
    subprocess.run(command, cwd=copy, check=False)  # some tests fail, because they read sources
    if all(argument.startswith("-") for argument in arguments):
        matrix.clear()
    lines = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
    take_notes(matrix, faults, lines)


def take_notes(matrix: Matrix, faults: list[Fault], lines: list[list]) -> None:
    """Put what mutants_notes.py has noted into the matrix."""
    notes: dict[str, dict[str, set]] = {what: {} for what in ("executes", "uses", "seconds", "tier", "fails")}
    for what, owner, value in lines:
        notes[what].setdefault(owner, set()).add(value)
    at_import = notes["executes"].pop("", set())
    neighbours = {fault.id: {other.id for other in faults if other.file == fault.file} for fault in faults}
    names = planted_names().keys()
    for name in names | {fault.id for fault in faults}:
        matrix.rows.setdefault(name, {})
    test_files = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    fault_lists = {file for file, text in test_files.items() if re.search(FAULT_LIST, text)}
    for test, tiers in notes["tier"].items():
        owners = [test]
        for owner in owners:
            owners += notes["uses"].get(owner, set()) - {*owners}
        executed = set().union(*(notes["executes"].get(owner, set()) for owner in owners))
        executed |= {fault for fault in at_import if neighbours[fault] & executed}
        if max(tiers) == 0 and test.partition("::")[0] not in fault_lists:
            executed |= names
        seconds = sum(max(notes["seconds"].get(owner, {0})) for owner in owners)
        matrix.tests[test] = (max(tiers), round(seconds, 2))
        for fault, row in matrix.rows.items():
            if fault in executed:
                row.setdefault(test, "-")
            elif row.get(test) == "-":  # a result stays: a cached call is noted for the first test of a process alone
                del row[test]
    matrix.left_out -= notes["tier"].keys()
    matrix.leave_out(notes["fails"])


def importers(files: Iterable[str]) -> set[str]:
    """These files of tests/, and those that import one of them, directly or not."""
    paths = list((ROOT / "tests").rglob("*.py"))
    imports = {path: set(re.findall(r"^ *(?:from|import) (\w+)", path.read_text(), re.M)) for path in paths}
    found = {ROOT / file for file in files}
    while more := {path for path in paths if imports[path] & {known.stem for known in found}} - found:
        found |= more
    return {str(path.relative_to(ROOT)) for path in found}


# ------------------------------------------------------------------------------------------- planting


class Asked:
    """A pytest plugin: these tests run in this order, and their letters are written as they come."""

    def __init__(self, tests: list[str], path: Path) -> None:
        self.tests, self.path = tests, path
        self.failed: set[str] = set()

    def write(self, test: str, letter: str) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([test, letter, time.time()]) + "\n")
        if letter == "F":
            self.failed.add(test)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        found = {item.nodeid: item for item in items}
        items[:] = [found[test] for test in self.tests if test in found]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            for test in self.tests:
                if test.startswith(f"{report.nodeid}::"):
                    self.write(test, "F")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(nodeid, "")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.write(report.nodeid, "F")
        elif report.when == "teardown" and report.nodeid not in self.failed:
            self.write(report.nodeid, "p")


def pytest_process(copy: Path, tests: list[str], options: list[str], path: Path) -> None:
    """In a forked process: be as a fresh one in the copy, and run these tests."""
    os.setsid()
    os.chdir(copy)
    work = copy.with_name("tmp")
    work.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(work)
    sys.path[:] = [str(copy), *(folder for folder in sys.path if not Path(folder).is_relative_to(ROOT / "tests"))]
    sys.argv = ["pytest"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.dont_write_bytecode = False  # pytest keeps the test files as it has rewritten them
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    output = os.open(path.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    asked = Asked(tests, path)
    files = dict.fromkeys(test.partition("::")[0] for test in tests)
    files = [file for file in files if Path(file).exists()]
    common = (
        f"-q -p no:cacheprovider --tb=no --continue-on-collection-errors --basetemp={work}/pytest --maxfail={ENOUGH}"
    )
    warm = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # a package with a plugin of pytest is imported already
    code = pytest.main([*common.split(), *warm, *options, *files], [asked])
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR) and not asked.failed:
        for test in tests[:ENOUGH]:  # conftest.py cannot be imported, for example
            asked.write(test, "F")


def forked(function: Callable, arguments: tuple) -> int:
    """The number of a new process that calls the function."""
    process = os.fork()
    if process == 0:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return process


def run_process(function: Callable, arguments: tuple, until: float) -> bool:
    """Call the function in a process, and end this and all that it started at a time.  -> whether it ended itself"""
    process = forked(function, arguments)
    ended = False
    try:
        while not ended and time.monotonic() < until:
            time.sleep(0.02)
            ended = os.waitpid(process, os.WNOHANG)[0] == process
    finally:
        children = Path(f"/proc/self/task/{os.getpid()}/children")
        while left := children.read_text().split():  # the children of an ended child become children of this process
            for child in map(int, left):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    return ended


def letters_of(copy: Path, tests: list[str], options: list[str], costs: dict[str, tuple[int, float]]) -> dict[str, str]:
    """Run tests in a copy, the default tier first, until ENOUGH fail or SECONDS are spent.

    Each tier has processes of its own, because fixtures make all that the asked tier needs.
    """
    letters: dict[str, str] = {}
    until = time.monotonic() + SECONDS
    parts = []
    for tier, option in enumerate(TIERS):
        of_tier = [test for test in tests if costs[test][0] == tier]
        parts += [(option, of_tier[:FIRST]), (option, of_tier[FIRST:])]
    for option, part in parts:
        path = copy.with_name("letters.jsonl")
        path.write_text("")
        if list(letters.values()).count("F") >= ENOUGH or time.monotonic() >= until:
            break
        if not part:
            continue
        limit = max(until, time.monotonic() + 2 * costs[part[0]][1])  # for a test that takes longer than SECONDS
        ended = run_process(pytest_process, (copy, part, [*option, *options], path), limit)
        started = {}
        for line in path.read_text().splitlines():
            test, letter, at = json.loads(line)
            started[test] = at
            letters[test] = letter
        for test, letter in list(letters.items()):
            if letter == "":  # it was running when the process ended
                hangs = time.time() - started[test] > 10 * costs[test][1] + 10
                letters[test] = "F" if ended or hangs else "-"
    return letters


def plant_and_run(slot: Path, name: str, unit, after: str, tests: list[str], costs: dict) -> None:
    """In a forked process: plant a fault in the copy of this slot, run its tests, write their letters."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process, which ends them
    copy = slot / "copy"
    git("checkout", "--quiet", "--", ".", cwd=copy)
    git("clean", "--quiet", "-fd", "-e", ".venv", "-e", ".cache", cwd=copy)
    options = ["--plant", name.removeprefix("plant:")] if name.startswith("plant:") else []
    if unit:
        mutants_faults.replace(copy, unit, after)
        # The time of each fault's file is unique. Otherwise Python may take the code that it stored of another one.
        os.utime(copy / unit.file, (0, int(name, 16) % 10**9))
    start = time.monotonic()
    letters = letters_of(copy, tests, options, costs)
    (slot / "letters.json").write_text(json.dumps(letters))
    found = list(letters.values())
    counts = f"{found.count('F')} failed, {found.count('p')} passed of {len(tests)}"
    print(f"{name:10} {time.monotonic() - start:4.0f} s  {counts}", flush=True)
    if not letters:
        print((slot / "letters.log").read_text()[-1000:])


def run_all(matrix: Matrix, jobs: list[tuple[str, list[str]]], folder: Path, seconds: float = math.inf) -> None:
    """Run tests with each fault planted, two faults at a time. ``seconds``: no further fault is started after them."""
    slots = [folder / name for name in ("first", "second")]
    for slot in slots:
        if not slot.exists():
            slot.mkdir()
            copy_of_commit(slot)
    git("checkout", "--quiet", "--", ".", cwd=slots[0] / "copy")  # the last fault of an earlier call is still in it
    warm_up()
    faults = {fault.id: fault for fault in read_faults()}
    units = mutants_faults.product(slots[0] / "copy")
    start, todo, running = time.monotonic(), [job for job in jobs if job[1]], {}
    while todo or running:
        if todo and slots:
            name, tests = todo.pop(0)
            fault = faults.get(name)
            unit = mutants_faults.place(units, fault) if fault else None
            arguments = (slots[-1], name, unit, fault and fault.after, tests, matrix.tests)
            running[forked(plant_and_run, arguments)] = (name, slots.pop())
        else:
            name, slot = running.pop(os.waitpid(-1, 0)[0])
            matrix.rows[name].update(json.loads((slot / "letters.json").read_text()))
            matrix.write()
            slots.append(slot)
        if time.monotonic() - start > seconds:
            todo = []


def warm_up() -> None:
    """Import packages whose import takes seconds, as device.import_megatron does, and nothing of the project."""
    import torch

    compiler = torch.compile
    torch.compile = lambda model=None, **options: model if model is not None else lambda function: function
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in WARM:
            importlib.import_module(name)
    torch.compile = compiler
    gc.freeze()  # pytest collects garbage five times at its end, which takes a second without this


def control(matrix: Matrix, folder: Path, seconds: float = math.inf) -> None:
    """Run the tests that have failed with every fault without any fault, too. Those that fail again are left out."""
    finders = {test for name in matrix.rows for test in matrix.with_letters(name, "F")}
    sound = {test for name in matrix.rows for test in matrix.with_letters(name, "p")}
    doubtful = sorted(finders - sound, key=lambda test: (matrix.tests[test], test))
    matrix.rows.setdefault("none", {})
    jobs = [("none", doubtful[first : first + 5]) for first in range(0, len(doubtful), 5)]
    run_all(matrix, jobs, folder, seconds)
    matrix.leave_out(matrix.with_letters("none", "F"))
    matrix.write()


# ------------------------------------------------------------------------------------------- commands


def choose() -> None:
    units = mutants_faults.product(ROOT)
    faults = read_faults()
    for file, drawn in mutants_faults.missing(units, faults).items():
        if not drawn:
            print(f"{file}: no statement can have a fault")
    new = mutants_faults.renewed(units, faults)
    lines = [json.dumps({key: value for key, value in fault._asdict().items() if value}) + "\n" for fault in new]
    LIST.write_text("".join(lines))
    kept = len({fault.id for fault in new} & {fault.id for fault in faults})
    print(f"{len(new)} faults: {kept} of {len(faults)} kept, {len(new) - kept} drawn")


def run(matrix: Matrix, asked: list[str], seconds: float, folder: Path) -> None:
    start, names = time.monotonic(), asked
    if unknown := set(asked) - matrix.rows.keys():
        sys.exit(f"{min(unknown)}: not in the matrix; needed: the id of a fault that was recorded")
    if not names:
        faults = [fault.id for fault in read_faults() if not fault.reason]
        names = [name for name in [*faults, *planted_names()] if not matrix.with_letters(name, "F")]
        names.sort(key=lambda name: bool(matrix.with_letters(name, "p")))  # those without any result first
    letters = "-pF" if asked else "-"
    run_all(matrix, [(name, matrix.with_letters(name, letters)) for name in names], folder, seconds)
    control(matrix, folder, seconds - (time.monotonic() - start))
    for fault in read_faults():
        if not fault.reason and not matrix.with_letters(fault.id, "F"):
            has_run = matrix.with_letters(fault.id, "pF")
            executed = matrix.with_letters(fault.id, "-")
            said = "no test fails" if has_run else "not run" if executed else "no test executes it"
            print(f"{described(fault)}: {said}")


def described(fault: Fault) -> str:
    return f"{fault.id} {fault.file} {fault.function}, {fault.kind}: {fault.before[:80]}"


def check(matrix: Matrix, against: str | None, folder: Path) -> bool:
    """Print what a change has lost, and bring the matrix up to date if that is nothing.  -> whether it is nothing"""
    units, faults = mutants_faults.product(ROOT), {fault.id: fault for fault in read_faults()}
    places = {name: mutants_faults.place(units, fault) for name, fault in faults.items() if not fault.reason}
    files = {name: unit.file for name, unit in places.items() if unit} | planted_names()
    problems = [f"{described(faults[name])}: its statement is gone" for name, unit in places.items() if unit is None]
    for file, drawn in mutants_faults.missing(units, list(faults.values())).items():
        if drawn:
            problems.append(f"{file}: {len(drawn)} faults fewer than the rule asks for")
    changed = set(git("diff", "--name-only", against or matrix.commit, "HEAD").splitlines())
    tests = importers(file for file in changed if file.startswith("tests/") and file.endswith(".py"))
    matrix.path = folder / MATRIX.name  # the matrix of the repository names the finders until all faults are found
    for name, finders in plant_again(matrix, files, changed, tests, folder).items():
        said = described(faults[name]) if name in faults else name
        if finders:
            problems.append(f"{said}: lost; it was found by {', '.join(finders)}")
        else:
            print(f"{said}: no test fails")
    print("\n".join(problems) or "nothing is lost")
    if not problems:
        matrix.path, matrix.commit = MATRIX, git("rev-parse", "HEAD").strip()
        matrix.rows = {name: row for name, row in matrix.rows.items() if name in [*files, "none"]}
        matrix.write()
    return not problems


def plant_again(
    matrix: Matrix, files: dict[str, str], changed: set[str], tests: set[str], folder: Path
) -> dict[str, list[str]]:
    """The faults of changed files or tests, and new ones, that no test finds, each with the tests that found it before.

    ``files``: the file of each fault; ``changed``: files of the product; ``tests``: files of tests/.
    """

    def is_touched(test: str) -> bool:
        file = Path(test.partition("::")[0])
        return str(file) in tests or not tests.isdisjoint({"tests/conftest.py", str(file.parent / "conftest.py")})

    touched: dict[str, list[str]] = {}
    for name, file in files.items():
        finders = matrix.with_letters(name, "F")
        if name not in matrix.rows or (finders and (file in changed or any(map(is_touched, finders)))):
            touched[name] = finders
            for test in matrix.rows.get(name, {}):
                if test in finders or is_touched(test):
                    matrix.rows[name][test] = "-"

    def not_found() -> list[str]:
        return [name for name in touched if not matrix.with_letters(name, "F")]

    print(f"{len(touched)} of {len(files)} faults are planted again")
    run_all(matrix, list(touched.items()), folder)
    run_all(matrix, [(name, matrix.with_letters(name, "-")) for name in not_found()], folder)
    left = not_found()
    new_files = {files[name] for name in left if name not in matrix.rows}
    executing = {test for name in matrix.rows if files.get(name) in new_files for test in matrix.rows[name]}
    again = {test.partition("::")[0] for test in executing} | {file for file in tests if "/test_" in file}
    again = [file for file in sorted(again) if (ROOT / file).exists()]
    if left and again:
        (folder / "record").mkdir()
        last = max(tier for tier, _ in matrix.tests.values())
        record(matrix, [*TIERS[last], *again], folder / "record")
        run_all(matrix, [(name, matrix.with_letters(name, "-")) for name in left], folder)
    control(matrix, folder)
    return {name: touched[name] for name in not_found()}


def main() -> None:
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["choose", "record", "run", "check"])
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--against", metavar="REVISION")
    args = parser.parse_args(own)
    if args.command in ("run", "check") and os.environ.get("OMP_NUM_THREADS") != "1":
        variables = 'source launch/setup_cpu.sh; set_variables; exec "$@"'
        os.execvp("bash", ["bash", "-c", variables, "bash", *sys.orig_argv])
    if args.command == "choose":
        return choose()
    if git("status", "--porcelain", "--untracked-files=no").strip():
        print("note: changes that are not committed are not looked at")
    matrix, good = Matrix(), True
    with tempfile.TemporaryDirectory(prefix="mutants-") as name:
        if args.command == "record":
            record(matrix, words[len(own) + 1 :], Path(name))
            matrix.write()
        elif args.command == "run":
            run(matrix, args.ids, args.seconds, Path(name))
        else:
            good = check(matrix, args.against, Path(name))
    sys.exit(not good)


if __name__ == "__main__":
    main()
