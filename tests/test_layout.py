"""Rules for the whole repository: imports that point down, one room that names the hardware, heavy packages inside
functions, names that no package has, and no name of a machine, home folder or foreign process.
"""

import ast
import functools
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch
from source import FILES, OPTIONAL, PACKAGE, REPORTING, ROOT, imports, pins

# From the top floor down. A name is a room or a file of the top level; each imports only from the floors below its own.
FLOORS = """
    preflight sweep report | checks benchmarks | train_grpo export | run | learner weight_sync evaluate | rollout aqn
    | engines | weights | lora_megatron lab | model plan data_gsm8k | tasks runlog parallel_setup | inputs
    | knobs hardware | facts grpo reward_gsm8k launch
"""
FLOOR = {room: -index for index, floor in enumerate(FLOORS.split("|")) for room in floor.split()}
HEAVY = {"megatron", "vllm", "ray", "transformers", "torch_npu", "mindspeed", "peft"}
HEAVY |= {"pandas", "pyarrow", "matplotlib", "scipy"}
ONLY_DEVICE = r"torch\.(?:cuda|npu)\b|\btorch_npu\b|\bmindspeed\b"
# These look for the packages of the hardware, or stand for one of them.
NAME_PACKAGES = {"facts.variables", "plan.doctor", "checks.dry_run_device"}


@functools.cache
def ours() -> dict[str, set[str]]:
    """The files that each file imports."""
    return {name: imports(path) & FILES.keys() for name, path in FILES.items()}


@functools.cache
def at_top() -> dict[str, set[str]]:
    """The files and packages that an import of each file imports."""
    return {name: imports(path, top_level=True) for name, path in FILES.items()}


def room(name: str) -> str:
    """The room of a module, or the file itself at the top level."""
    return name.partition(".")[0]


def below(name: str, *, top_level: bool = False) -> set[str]:
    """``name`` and all files that it imports, directly or through others."""
    seen, todo = set(), {name}
    while todo:
        seen |= todo
        todo = {found for each in todo for found in (at_top() if top_level else ours())[each] & FILES.keys()} - seen
    return seen


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count too, although Python can load such circles."""
    TopologicalSorter(ours()).prepare()  # CycleError: import circles


def test_every_import_between_rooms_points_to_a_lower_floor() -> None:
    benchmarks = {f"benchmarks.{path.stem}": imports(path) & FILES.keys() for path in ROOT.glob("benchmarks/*.py")}
    up = [
        f"{name} -> {other}"
        for name, found in (ours() | benchmarks).items()
        for other in found
        if room(name) != room(other) and FLOOR[room(name)] <= FLOOR[room(other)]
    ]
    assert not up, f"imports that do not point down: {up}"


def test_each_room_says_its_rule_and_only_two_commands_enter_the_checks() -> None:
    for name in FLOOR.keys() - FILES.keys():
        (rule,) = ast.parse((ROOT / name / "__init__.py").read_text()).body  # its docstring, and nothing else
        assert isinstance(rule, ast.Expr)
    assert {room(name) for name, found in ours().items() if "checks" in map(room, found)} == {
        "checks",
        "preflight",
        "sweep",
    }


def test_packages_are_pinned_and_heavy_ones_are_imported_inside_the_function_that_needs_them() -> None:
    """requirements/test.txt installs packages that users do not have; no other test would notice an import of them."""
    for name, path in FILES.items():
        allowed = {"megatron"} if name in {"parallel_setup", "model.megatron_model", "lora_megatron"} else set()
        heavy = at_top()[name] & (HEAVY - allowed)
        assert not heavy, f"{name} imports {sorted(heavy)} at the top; import inside the function that needs it"
        pinned = pins("cpu", *(["report"] * (name in REPORTING)), *(["smol"] * (name == "weights.smol_model")))
        packages = imports(path) - FILES.keys() - sys.stdlib_module_names - OPTIONAL
        unpinned = {package for package in packages if PACKAGE.get(package, package).lower() not in pinned}
        assert not unpinned, f"{name} imports {sorted(unpinned)}, which requirements/ does not pin"


def test_reporting_needs_no_torch_and_the_versions_of_the_runs_and_of_the_tests() -> None:
    """The files that read records run on any laptop with only requirements/report.txt."""
    report = pins("report")
    assert report.items() <= pins("cpu", "test").items()
    for name in REPORTING:
        files = {name}.union(*(below(each, top_level=True) for each in ours()[name]))
        needed = {one for each in files for one in (imports(FILES[each]) if each in REPORTING else at_top()[each])}
        needed -= FILES.keys() | sys.stdlib_module_names | OPTIONAL
        assert {PACKAGE.get(package, package).lower() for package in needed} <= report.keys(), name


def test_only_device_names_an_accelerator() -> None:
    for name in {name for name in FILES if room(name) != "hardware"} - NAME_PACKAGES:
        found = re.findall(ONLY_DEVICE, FILES[name].read_text())
        assert not found, f"{name} names {found[0]}; only hardware/device.py and kernels.py may"


def test_no_test_imports_another() -> None:
    """Code that several test files use is in tests/support/."""
    for path in ROOT.glob("tests/**/*.py"):
        assert not {name for name in imports(path) if name.startswith("test_")}, path


def test_no_name_of_the_top_level_is_one_that_a_package_has_or_imports() -> None:
    """Our folder is first on the path. transformers imported a file kernels.py of it in place of an optional package.

    Programs for the tests of a package may import more names.
    """
    ours = {name.split(".")[0] for name in FILES}
    assert not ours & packages_distributions().keys()
    line = re.compile(rf"^[ \t]*(?:from|import)[ \t]+(?:{'|'.join(ours)})\b", re.M)
    for path in Path(torch.__file__).parents[1].rglob("*.py"):
        if {"tests", "test_utils"} & {*path.parts} or not line.search(text := path.read_text(errors="replace")):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert not ours & {name.split(".")[0] for name in names}, path


BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
NOT_IN_ANY_FILE = {  # character classes such as [k] prevent a pattern from matching itself
    "a command that ends processes by name": r"\b(?:p[k]ill|k[i]llall)\b",
    "a home folder": r"(?<![\w.~}])/(?:[h]ome|[U]sers|[r]oot)/\w",
    # Allowed: the own machine, and the network that RFC 5737 reserves for examples.
    "an address of a machine": rf"(?<![\d.=])(?!127\.0\.0\.1\b|192\.0\.2\.)(?:{BYTE}\.){{3}}{BYTE}(?!\.?\d)",
}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: the list of its files is unknown")
def test_no_file_names_a_machine_a_home_folder_or_a_foreign_process() -> None:
    for what, caught, passed in (
        ("a command that ends processes by name", "p" + "kill -9 python", "kill -9 123"),
        ("a home folder", "cd /" + "home/someone", "https://host.example/users/x"),
        ("an address of a machine", "at 10.0." + "0.7.", "127.0.0.1:29500, version 2.13.0 or 1.2.3.4.5"),
    ):
        assert re.search(NOT_IN_ANY_FILE[what], caught) and not re.search(NOT_IN_ANY_FILE[what], passed)
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]:
        content = path.read_bytes()
        text = "" if b"\0" in content else content.decode(errors="replace")  # a picture, or another binary file
        for what, pattern in NOT_IN_ANY_FILE.items():
            assert not (match := re.search(pattern, text)), f"{path}: {what}: {match.group()}"
