"""The small faults of tests/mutants.py: which there are in a statement, which are drawn, where a fault stands today.

A unit is a simple statement of a function, or the header of a compound one (the condition of an if). At most one fault
of a unit is drawn, so a file with fewer than four units that can have a fault has fewer than four faults.
"""

import ast
import hashlib
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

IN_A_FILE = 4
# These files go soon, so nothing is drawn in them. A line whose file is gone has no effect.
GOES: dict[str, str] = {}  # file -> why
COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
LOGIC = {ast.And: ast.Or, ast.Or: ast.And}
PARALLEL = {"tensor": "expert", "expert": "tensor", "expert_data": "data", "data": "tensor"}
GROUPS = {f"{one}{end}": f"{other}{end}" for one, other in PARALLEL.items() for end in ("", "_rank", "_group")}
OF_RANKS = ("parallel", "self", "self.parallel", "cfg.parallel", "sizes", "parallel_state", "dist")
RARE = ("group", "axis")  # these kinds come first
SAYS = r"print|say|warn|write|beat"  # calls that only report something


class Unit(NamedTuple):
    """A simple statement, or the header of a compound one, in a function."""

    file: str
    function: str
    text: str
    node: ast.AST  # the part of the source that a fault replaces
    is_simple: bool


class Fault(NamedTuple):
    """The unit ``before`` of a function becomes ``after``. A fault that changes nothing has a reason."""

    id: str
    file: str
    function: str
    kind: str
    before: str
    after: str
    reason: str = ""


# ------------------------------------------------------------------------------------------- units of the product


def product(root: Path) -> dict[str, list[Unit]]:
    """The units of each tracked Python file outside tests/ but a room's rule, in the order of their lines."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=root, capture_output=True, text=True, check=True).stdout
    names = [name for name in listed.splitlines() if not name.startswith("tests/") and (root / name).is_file()]
    names = [name for name in names if not name.endswith("/__init__.py")]
    return {name: list(_units(ast.parse((root / name).read_text()), name)) for name in names}


def _units(tree: ast.AST, file: str, function: str = "") -> Iterator[Unit]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _units(node, file, f"{function}.{node.name}".strip("."))
            continue
        header = _header(node)
        if function and header:
            yield Unit(file, function, text_of(header), header, False)
        elif function and isinstance(node, ast.stmt) and not hasattr(node, "body") and not _is_docstring(node):
            yield Unit(file, function, text_of(node), node, True)
        yield from _units(node, file, function)


def _header(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.If(test=part) | ast.While(test=part) | ast.For(iter=part):
            return part
        case ast.With(items=[ast.withitem(context_expr=part), *_]):
            return part
    return None


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def text_of(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def place(units: dict[str, list[Unit]], fault: Fault) -> Unit | None:
    """Where the statement of a fault stands: in its function, else in its file, else in a function of this name."""
    name = fault.function.rpartition(".")[2]
    same_text = [unit for each in units.values() for unit in each if unit.text == fault.before]
    spots = [unit for unit in same_text if unit.file == fault.file or unit.function.rpartition(".")[2] == name]
    return min(spots, key=lambda unit: (unit.file != fault.file, unit.function != fault.function), default=None)


def replace(root: Path, unit: Unit, text: str) -> None:
    """Write ``text`` in the place of the unit."""
    path, node = root / unit.file, unit.node
    lines = path.read_bytes().splitlines(keepends=True)
    first, last = node.lineno - 1, node.end_lineno - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    lines[first : last + 1] = [head + text.encode() + tail]
    path.write_bytes(b"".join(lines))


# ------------------------------------------------------------------------------------------- faults of a unit


def _replacements(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
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


def _changes(unit: Unit) -> Iterator[tuple[str, str]]:
    """The kind of each fault of a unit, and the unit with it. Texts and messages get none."""
    may_miss = isinstance(unit.node, ast.Expr | ast.AugAssign | ast.Raise | ast.Continue | ast.Break)
    if unit.is_simple and may_miss and not re.match(r"print|.*say\(|.*warn|.*beat", unit.text):
        yield "missing line", "pass"
    if isinstance(unit.node, ast.Raise | ast.Import | ast.ImportFrom) or "__doc__" in unit.text:
        return
    todo: list[ast.AST] = [unit.node]
    for node in todo:
        is_report = isinstance(node, ast.Call) and re.search(SAYS, ast.unparse(node.func))
        if isinstance(node, ast.JoinedStr | ast.Lambda) or is_report:
            continue
        for name, value in list(ast.iter_fields(node)):
            children = value if isinstance(value, list) else [value]
            for index, child in enumerate(children):
                if not isinstance(child, ast.AST) or name in ("annotation", "returns"):
                    continue
                if not (isinstance(child, ast.keyword) and child.arg in ("dim", "axis")):
                    todo.append(child)
                for kind, changed in _replacements(child):
                    new = [*children[:index], changed, *children[index + 1 :]] if value is children else changed
                    setattr(node, name, new)
                    yield kind, text_of(unit.node)
                    setattr(node, name, value)
    if not unit.is_simple:  # a header may itself be the node of a fault
        for kind, changed in _replacements(unit.node):
            yield kind, text_of(changed)


def _candidates(units: list[Unit]) -> list[Fault]:
    """A fault of each unit that can have one, in a fixed random order, of kinds as different as possible."""
    randomly = random.Random(units[0].file if units else "")
    kinds: dict[str, list[Fault]] = {}
    for unit in units:
        for kind, after in _changes(unit):
            words = "\n".join([unit.file, unit.function, unit.text, after])
            name = hashlib.sha256(words.encode()).hexdigest()[:8]
            kinds.setdefault(kind, []).append(Fault(name, unit.file, unit.function, kind, unit.text, after))
    for faults in kinds.values():
        randomly.shuffle(faults)
    common = sorted(kinds.keys() - {*RARE})
    order = [kind for kind in RARE if kind in kinds] + randomly.sample(common, len(common))
    turns = max(map(len, kinds.values()), default=0)
    mixed = [kinds[kind][turn] for turn in range(turns) for kind in order if turn < len(kinds[kind])]
    first_of_unit: dict[tuple[str, str], Fault] = {}
    for fault in mixed:
        first_of_unit.setdefault((fault.function, fault.before), fault)
    return list(first_of_unit.values())


# ------------------------------------------------------------------------------------------- the list of faults


def missing(units: dict[str, list[Unit]], faults: list[Fault]) -> dict[str, list[Fault]]:
    """What the fixed rule draws until each file that stays has IN_A_FILE faults that change something.

    A file without units that can have a fault is in the result with no fault.
    """
    placed = [(fault, place(units, fault)) for fault in faults]
    drawn = {}
    for file, of_file in units.items():
        here = [(unit.function, unit.text) for _, unit in placed if unit and unit.file == file]
        counted = [fault for fault, unit in placed if unit and unit.file == file and not fault.reason]
        needed = IN_A_FILE - len(counted)
        if file in GOES or needed <= 0:
            continue
        fresh = [fault for fault in _candidates(of_file) if (fault.function, fault.before) not in here]
        if fresh or not here:
            drawn[file] = fresh[:needed]
    return drawn


def renewed(units: dict[str, list[Unit]], faults: list[Fault]) -> list[Fault]:
    """The faults that have a place, with their file and function of today, and what ``missing`` draws."""
    kept = []
    for fault in faults:
        if unit := place(units, fault):
            kept.append(fault._replace(file=unit.file, function=unit.function))
    drawn = missing(units, kept)
    return sorted([*kept, *sum(drawn.values(), [])], key=lambda fault: (fault.file, fault.id))
