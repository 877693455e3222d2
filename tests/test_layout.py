"""The shape of the repository is part of its contract: imports point down, files stay short, devices stay in one place,
heavy packages are opened by the function that needs them, and nothing names a machine or ends someone else's processes.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from source import FILES, OPTIONAL, PACKAGE, REPORTING, ROOT, imports

TOP_LEVEL_FILES = 36
# What runs when a user types its name. The order of the layers is: these, then plan/ and lab/, then the method, then
# engines/, then the files that engines/ import.
COMMANDS = {"train_grpo", "preflight", "report", "sweep", "export"}
ROOMS = {  # a room -> what its files may import beside the top level and the room itself
    "engines": set(),
    "plan": {"engines"},
    "lab": set(),
}
# Files outside of a room that may import its files; and files that may import a command.
MAY_ENTER = {
    "plan": {"train_grpo", "startup", "preflight"},
    "lab": {"report", "sweep"},
}
RUNS_A_COMMAND = {"plan.self_test": {"train_grpo"}}  # it trains a model as the command does
HEAVY = {"megatron", "vllm", "ray", "transformers", "torch_npu", "mindspeed", "peft"}
HEAVY |= {"pandas", "pyarrow", "matplotlib", "scipy"}
ONLY_DEVICE = r"torch\.(?:cuda|npu)\b|\btorch_npu\b|\bmindspeed\b"  # said by device.py and kernels.py
# ... and by what looks for packages.
NAME_PACKAGES = {"device", "kernels", "environment", "plan.machine", "plan.doctor_npu", "plan.doctor_variables"}
LINES, TEST_LINES = 400, 600  # a test file is a list that one reads in parts


OURS = {name: imports(path) & FILES.keys() for name, path in FILES.items()}


def room(name: str) -> str:
    """engines, plan or lab; "" for the top level."""
    return name.rpartition(".")[0]


def below(name: str, *, top_level: bool = False) -> set[str]:
    """``name`` and every file that it imports, directly or not."""
    seen, todo = set(), {name}
    while todo:
        seen |= todo
        todo = {found for each in todo for found in imports(FILES[each], top_level=top_level) & FILES.keys()} - seen
    return seen


def listed_files() -> list[Path]:
    """What git tracks, or would if asked: everything but what .gitignore names."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_a_reader_can_hold_the_top_level_in_mind() -> None:
    top = [name for name in FILES if not room(name)]
    assert len(top) <= TOP_LEVEL_FILES, f"{len(top)} Python files; the limit is {TOP_LEVEL_FILES}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count: a circle is a circle even if Python can load it."""
    order, left = [], dict(OURS)
    while ready := [name for name, needed in left.items() if not needed & left.keys()]:
        order += ready
        for name in ready:
            del left[name]
    assert not left, f"these import each other in a circle, or import such files: {sorted(left)}"


@pytest.mark.parametrize("name", FILES)
def test_file_imports_only_from_below(name: str) -> None:
    for other in OURS[name]:
        where, rule = room(other), f"{name} imports {other}"
        if other in COMMANDS:
            assert other in RUNS_A_COMMAND.get(name, ()), f"{rule}, which is a command"
        if where and where != room(name):
            allowed = ROOMS[room(name)] if room(name) else {"engines"} | {r for r in MAY_ENTER if name in MAY_ENTER[r]}
            assert where in allowed, f"{rule}, which is not below it"
    if room(name) == "engines":
        assert not {other for other in below(name) if not room(other)} & {"rollout", "learner", "weight_sync", "aqn"}


@pytest.mark.parametrize("name", FILES)
def test_heavy_packages_are_imported_inside_the_function_that_needs_them(name: str) -> None:
    allowed = {"megatron"} if name in {"parallel_setup", "model_megatron", "lora_megatron"} else set()
    found = imports(FILES[name], top_level=True) & (HEAVY - allowed)
    assert not found, f"{name} imports {sorted(found)} at the top; import inside the function that needs it"


@pytest.mark.parametrize("name", FILES)
def test_every_imported_package_is_pinned(name: str) -> None:
    """requirements/test.txt brings along packages that a user lacks; no other test would notice an import of one."""
    lists = ("cpu", "report") if name in REPORTING else ("cpu",)
    pins = {name for which in lists for name in pinned(which)}
    packages = imports(FILES[name]) - FILES.keys() - sys.stdlib_module_names - OPTIONAL
    unpinned = {package for package in packages if PACKAGE.get(package, package).lower() not in pins}
    assert not unpinned, f"{name} imports {sorted(unpinned)}, which no list of its own names: {', '.join(lists)}"


def pinned(which: str) -> dict[str, str]:
    """name -> version of every package that requirements/WHICH.txt pins."""
    lines = (ROOT / "requirements" / f"{which}.txt").read_text().splitlines()
    pins = [line.split(" ")[0].split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower(): version for name, version in pins}


def test_report_needs_the_versions_of_the_runs_and_of_the_tests() -> None:
    """One environment can hold both; the tests run on the very versions that a reader of records installs."""
    report, installed = pinned("report"), pinned("cpu") | pinned("test")
    assert report.items() <= installed.items()


@pytest.mark.parametrize("name", sorted(REPORTING))
def test_reporting_needs_no_torch(name: str) -> None:
    """What reads records runs on any laptop with requirements/report.txt alone."""
    own = imports(FILES[name]) & FILES.keys()
    files = {name}.union(*(below(each, top_level=True) for each in own))
    needed = {package for each in files for package in imports(FILES[each], top_level=each not in REPORTING)}
    needed -= FILES.keys() | sys.stdlib_module_names
    assert {PACKAGE.get(package, package).lower() for package in needed - OPTIONAL} <= pinned("report").keys()


@pytest.mark.parametrize("name", ["config", "hf_config", "plan.doctor", "preflight"])
def test_config_doctor_and_plan_and_what_they_import_need_no_torch(name: str) -> None:
    """preflight.py imports what needs torch only inside the functions of its other questions."""
    files = below(name, top_level=True)
    needy = {each for each in files if "torch" in imports(FILES[each], top_level=True)}
    assert "input_files" in files and not needy, f"{sorted(needy)} import torch"


@pytest.mark.parametrize("name", FILES)
def test_only_device_names_an_accelerator(name: str) -> None:
    found = re.findall(ONLY_DEVICE, FILES[name].read_text())
    assert name in NAME_PACKAGES or not found, f"{name} names {found[0]}; device.py, kernels.py are for that"


@pytest.mark.parametrize(
    "path", [*FILES.values(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("*.sh")], ids=lambda path: path.name
)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    limit = TEST_LINES if "tests" in path.parts[-3:] else LINES
    assert lines <= limit, f"{path.name} has {lines} lines; the limit is {limit}"


BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
NOT_IN_ANY_FILE = {  # the classes [k], [h] ... keep the patterns from matching themselves
    "a command that ends processes by name": r"\b(?:p[k]ill|k[i]llall)\b",
    "a home folder": r"(?<![\w.~}])/(?:[h]ome|[U]sers|[r]oot)/\w",
    # But for this machine itself, and the network that RFC 5737 keeps for examples.
    "an address of a machine": rf"(?<![\d.=])(?!127\.0\.0\.1\b|192\.0\.2\.)(?:{BYTE}\.){{3}}{BYTE}(?!\.?\d)",
}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout, so nothing says which files belong to it")
@pytest.mark.parametrize("what", NOT_IN_ANY_FILE)
def test_no_file_contains(what: str) -> None:
    found = []
    for path in listed_files():
        content = path.read_bytes()
        if what == "an address of a machine" and path.match("results/*/environment.json"):
            continue  # lists versions of four numbers; run_record.environment has taken the addresses out
        if b"\0" in content:  # a picture, or another binary file
            continue
        for number, line in enumerate(content.decode(errors="replace").splitlines(), start=1):
            if match := re.search(NOT_IN_ANY_FILE[what], line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match.group()}")
    assert not found, f"{what}: {found}"


@pytest.mark.parametrize(
    ("what", "caught", "passed"),
    [
        ("a command that ends processes by name", "p" + "kill -9 python", "kill -9 123"),
        ("a home folder", "cd /" + "home/someone", "https://host.example/users/x"),
        ("an address of a machine", "ssh 10.0." + "0.7", "127.0.0.1:29500"),
        ("an address of a machine", "at 0.0." + "0.0.", "version 2.13.0 or 1.2.3.4.5"),
    ],
)
def test_pattern_catches_what_it_is_for(what: str, caught: str, passed: str) -> None:
    assert re.search(NOT_IN_ANY_FILE[what], caught) and not re.search(NOT_IN_ANY_FILE[what], passed)


@pytest.mark.parametrize("path", sorted(ROOT.glob("tests/**/*.py")), ids=lambda path: path.name)
def test_no_test_imports_another(path: Path) -> None:
    """What several test files use is in tests/support/."""
    assert not {name for name in imports(path) if name.startswith("test_")}


def test_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version
