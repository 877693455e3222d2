"""Which small faults in the method and the system do the tests find? A tool for maintainers; CI does not run it.

    python tests/mutants.py choose REVISION          writes tests/mutants.jsonl: 150 faults in the files of a commit
    python tests/mutants.py record                   adds which test files execute the statement of each fault (20 min)
    python tests/mutants.py run [NUMBER ...]         plants each fault, runs these test files, adds which test finds it

A line of tests/mutants.jsonl is a fault: its file, function and kind, the statement without the fault and with it. A
compound statement counts as its header (the condition of an if). A fault is planted where its statement stands today;
one whose statement is gone is not planted. `record` and `run` work in copies of the committed files, two at a time.
A test that fails in the copy of `record`, which changes nothing, is left out (it reads sources, say).
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tests" / "mutants.jsonl"
FILES = """
    train_grpo grpo learner rollout evaluate reward_gsm8k data_gsm8k gsm8k_files aqn aqn_targets lora_megatron
    model_megatron packing routing_replay kernels quantisation weights_hf adapter_weights weight_sync
    parallel_setup device startup checkpoint runlog run_record tripwires config config_rules hf_config input_files
    export tiny_model
    engines/torch_sampler engines/torch_decoder engines/torch_cache engines/vllm_engine engines/capacity
    architecture
""".split()  # of some commit; a file that a commit does not have is left out
SEED, FAULTS, IN_A_FILE, SECONDS = 0, 150, 4, 120
NO_ANSWER = (MISSED, SLOW, GONE, NOT_EXECUTED) = (
    "no test fails", f"no test fails in {SECONDS} seconds", "its statement is gone", "no test executes it",
)  # fmt: skip
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
RARE = ("group", "axis")  # these kinds come first
LOGIC = {ast.And: ast.Or, ast.Or: ast.And}
PARALLEL = {"tensor": "expert", "expert": "tensor", "expert_tensor": "tensor", "expert_data": "data", "data": "tensor"}
OF_RANKS = ("parallel", "self", "self.parallel", "cfg.parallel", "sizes", "parallel_state", "dist")
GROUPS = {f"{a}{end}": f"{b}{end}" for a, b in PARALLEL.items() for end in ("", "_rank", "_group")}
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


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def units(tree: ast.AST, function: str = "") -> Iterator[Unit]:
    """The units of a file in the order of its lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from units(node, f"{function}.{node.name}".strip("."))
            continue
        part = header(node)
        if function and part:
            yield Unit(function, part, False)
        elif function and isinstance(node, ast.stmt) and not hasattr(node, "body") and not is_text(node):
            yield Unit(function, node, True)
        yield from units(node, function)


def replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The kinds of faults in a node, each with the node that has it."""
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in COMPARISONS:
            yield "comparison", ast.Compare(left, [COMPARISONS[type(op)]()], right)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS and not {"'", '"'} & set(ast.unparse(node)):
            yield "sign", ast.BinOp(left, SIGNS[type(op)](), right)
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield "sign", operand
        case ast.BoolOp(op=op, values=values):
            yield "logic", ast.BoolOp(LOGIC[type(op)](), values)
        case ast.keyword(arg="dim" | "axis" as name, value=ast.Constant(value=int(number))):
            yield "axis", ast.keyword(name, ast.Constant(1 - number))
        case ast.keyword(arg="dim" | "axis" as name, value=ast.UnaryOp(operand=ast.Constant(value=int(number)))):
            yield "axis", ast.keyword(name, ast.UnaryOp(ast.USub(), ast.Constant(number % 2 + 1)))
        case ast.Subscript(value=value, slice=ast.Constant(value=int(index)), ctx=context):
            yield "index", ast.Subscript(value, ast.Constant(index + 1), context)
        case ast.Slice(lower=lower, upper=ast.expr() as upper, step=step):
            yield "index", ast.Slice(lower, ast.BinOp(upper, ast.Add(), ast.Constant(1)), step)
        case ast.Slice(lower=ast.expr() as lower, upper=None, step=step):
            yield "index", ast.Slice(ast.BinOp(lower, ast.Add(), ast.Constant(1)), None, step)
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]):
            one_less = ast.BinOp(args[-1], ast.Sub(), ast.Constant(1))
            yield "index", ast.Call(ast.Name("range"), [*args[:-1], one_less], [])
        case ast.Attribute(value=value, attr=name, ctx=context) if name in GROUPS and ast.unparse(value) in OF_RANKS:
            yield "group", ast.Attribute(value, GROUPS[name], context)


def faults_of(unit: Unit) -> Iterator[tuple[str, str]]:
    """The kind of each fault of a unit, and the unit with it. Texts and messages get none."""
    may_miss = isinstance(unit.node, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break)
    if unit.is_simple and may_miss and not re.match(r"print|.*say\(|.*warn|.*beat", text_of(unit.node)):
        yield "missing line", "pass"
    if isinstance(unit.node, ast.Raise | ast.Import | ast.ImportFrom):
        return
    todo: list[ast.AST] = [unit.node]
    for node in todo:
        said = re.search(r"print|say|warn|write|beat", ast.unparse(node.func)) if isinstance(node, ast.Call) else False
        if isinstance(node, ast.JoinedStr | ast.Lambda) or said:
            continue
        for name, value in list(ast.iter_fields(node)):
            children = value if isinstance(value, list) else [value]
            for place, child in enumerate(children):
                if not isinstance(child, ast.AST) or name in ("annotation", "returns"):
                    continue
                if not (isinstance(child, ast.keyword) and child.arg in ("dim", "axis")):
                    todo.append(child)
                for kind, changed in replacements(child):
                    new = [*children[:place], changed, *children[place + 1 :]] if value is children else changed
                    setattr(node, name, new)
                    yield kind, text_of(unit.node)
                    setattr(node, name, value)
    if not unit.is_simple:  # a header may itself be the node of a fault
        yield from ((kind, text_of(changed)) for kind, changed in replacements(unit.node))


def text_of(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def chosen(revision: str) -> Iterator[dict]:
    """FAULTS faults, at least IN_A_FILE in a file as far as it has so many, of kinds as different as possible."""
    randomly, remaining = random.Random(SEED), []
    for name in FILES:
        show = ["git", "show", f"{revision}:{name}.py"]
        if not (source := subprocess.run(show, cwd=ROOT, capture_output=True, text=True).stdout):
            continue
        kinds: dict[str, list[dict]] = {}
        for unit in units(ast.parse(source)):
            before = text_of(unit.node)
            for kind, after in faults_of(unit):
                about = {"file": f"{name}.py", "function": unit.function, "kind": kind}
                kinds.setdefault(kind, []).append(about | {"before": before, "after": after})
        for each in kinds.values():
            randomly.shuffle(each)
        common = sorted(kinds.keys() - {*RARE})
        order = [kind for kind in RARE if kind in kinds] + randomly.sample(common, len(common))
        turns = max(map(len, kinds.values()), default=0)
        mixed = [kinds[kind][turn] for turn in range(turns) for kind in order if turn < len(kinds[kind])]
        yield from mixed[:IN_A_FILE]
        remaining += mixed[IN_A_FILE : 2 * IN_A_FILE]
    yield from randomly.sample(remaining, len(remaining))


# ------------------------------------------------------------------------------------------------ planting


def place(root: Path, fault: dict) -> tuple[Path, Unit] | None:
    """Where the statement of a fault stands: in its function, else in its file, else in another file of the product."""
    own = root / fault["file"]
    others = [path for path in [*sorted(root.glob("*.py")), *sorted(root.glob("*/*.py"))] if "tests" not in path.parts]
    for path in [own, *(path for path in others if path != own)]:
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
    """The test that finds a fault, or one of NO_ANSWER."""
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
    todo, lock = iter(numbers), threading.Lock()

    def work(name: str) -> None:
        copy = copy_of_commit(folder / name)
        while (number := next(todo, None)) is not None:
            start, found = time.monotonic(), found_by(copy, faults[number], about["left_out"])
            with lock:
                faults[number]["found"] = found
                write(about, faults)
                print(f"{number:3} {time.monotonic() - start:4.0f} s  {faults[number]['file']:22} {found}", flush=True)

    workers = []
    for name in ("first", "second"):
        (folder / name).mkdir()
        workers.append(threading.Thread(target=work, args=(name,)))
        workers[-1].start()
    for worker in workers:
        worker.join()


def read() -> tuple[dict, list[dict]]:
    about, *faults = (json.loads(line) for line in LIST.read_text().splitlines())
    return about, faults


def write(about: dict, faults: list[dict]) -> None:
    LIST.write_text("".join(json.dumps(line) + "\n" for line in [about, *faults]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["choose", "record", "run"])
    parser.add_argument("arguments", nargs="*")
    args = parser.parse_args()
    if args.command == "choose":
        write({"commit": args.arguments[0]}, list(itertools.islice(chosen(args.arguments[0]), FAULTS)))
        return
    about, faults = read()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        if args.command == "record":
            record(about, faults, Path(folder))
        else:
            run(about, faults, [int(number) for number in args.arguments] or list(range(len(faults))), Path(folder))
    write(about, faults)
    answers = [fault["found"] for fault in faults if "found" in fault]
    results = Counter(answer if answer in NO_ANSWER else "found" for answer in answers)
    print(", ".join(f"{count} {name}" for name, count in results.items()))


if __name__ == "__main__":
    main()
