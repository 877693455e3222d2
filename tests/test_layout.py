"""Rules for the whole repository: few and short files, imports that point down, two files that name the hardware, heavy
packages inside functions, and no name of a machine, home folder or foreign process.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from source import FILES, OPTIONAL, PACKAGE, REPORTING, ROOT, imports

TOP_LEVEL_FILES = 38
# The files that users run. The order of the layers is: commands, then plan/ and lab/, then the method, then engines/,
# then the files that engines/ import.
COMMANDS = {"train_grpo", "preflight", "report", "sweep", "export"}
FOLDERS = {  # a folder -> the other folders from which its files may import
    "engines": set(),
    "plan": {"engines"},
    "lab": set(),
}
# A folder -> the files outside of it that may import its files.
MAY_ENTER = {
    "plan": {"train_grpo", "startup", "preflight"},
    "lab": {"report", "startup", "sweep"},
}
# A file -> the command that it may import.
RUNS_A_COMMAND = {"plan.self_test": {"train_grpo"}, "plan.self_test_ranks": {"train_grpo"}}
HEAVY = {"megatron", "vllm", "ray", "transformers", "torch_npu", "mindspeed", "peft"}
HEAVY |= {"pandas", "pyarrow", "matplotlib", "scipy"}
ONLY_DEVICE = r"torch\.(?:cuda|npu)\b|\btorch_npu\b|\bmindspeed\b"
# The two files for the hardware, and the files that look for its packages.
NAME_PACKAGES = {"device", "kernels", "environment", "plan.machine", "plan.doctor_npu", "plan.doctor_variables"}
NAME_PACKAGES |= {"plan.dry_run_device"}  # stands for one of them
LINES, TEST_LINES = 400, 600  # nobody reads a whole test file at once


OURS = {name: imports(path) & FILES.keys() for name, path in FILES.items()}


def folder(name: str) -> str:
    """The folder of a module: engines, plan or lab; "" for the top level."""
    return name.rpartition(".")[0]


def below(name: str, *, top_level: bool = False) -> set[str]:
    """``name`` and all files that it imports, directly or through others."""
    seen, todo = set(), {name}
    while todo:
        seen |= todo
        todo = {found for each in todo for found in imports(FILES[each], top_level=top_level) & FILES.keys()} - seen
    return seen


def listed_files() -> list[Path]:
    """All files of the working tree that .gitignore does not exclude."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_a_reader_can_hold_the_top_level_in_mind() -> None:
    top = [name for name in FILES if not folder(name)]
    assert len(top) <= TOP_LEVEL_FILES, f"{len(top)} Python files; the limit is {TOP_LEVEL_FILES}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count too, although Python can load such circles."""
    order, left = [], dict(OURS)
    while ready := [name for name, needed in left.items() if not needed & left.keys()]:
        order += ready
        for name in ready:
            del left[name]
    assert not left, f"import circles; these files are in one or import a file of one: {sorted(left)}"


@pytest.mark.parametrize("name", FILES)
def test_file_imports_only_from_below(name: str) -> None:
    for other in OURS[name]:
        where, rule = folder(other), f"{name} imports {other}"
        if other in COMMANDS:
            assert other in RUNS_A_COMMAND.get(name, ()), f"{rule}, which is a command"
        if where and where != folder(name):
            allowed = (
                FOLDERS[folder(name)] if folder(name) else {"engines"} | {r for r in MAY_ENTER if name in MAY_ENTER[r]}
            )
            assert where in allowed, f"{rule}; the rules of the folders do not allow this"
    if folder(name) == "engines":
        assert not {other for other in below(name) if not folder(other)} & {"rollout", "learner", "weight_sync", "aqn"}


@pytest.mark.parametrize("name", FILES)
def test_heavy_packages_are_imported_inside_the_function_that_needs_them(name: str) -> None:
    allowed = {"megatron"} if name in {"parallel_setup", "model_megatron", "lora_megatron"} else set()
    found = imports(FILES[name], top_level=True) & (HEAVY - allowed)
    assert not found, f"{name} imports {sorted(found)} at the top; import inside the function that needs it"


@pytest.mark.parametrize("name", FILES)
def test_every_imported_package_is_pinned(name: str) -> None:
    """requirements/test.txt installs packages that users do not have; no other test would notice an import of them."""
    lists = ("cpu", "report") if name in REPORTING else ("cpu", "smol") if name == "smol_model" else ("cpu",)
    pins = {name for which in lists for name in pinned(which)}
    packages = imports(FILES[name]) - FILES.keys() - sys.stdlib_module_names - OPTIONAL
    unpinned = {package for package in packages if PACKAGE.get(package, package).lower() not in pins}
    assert not unpinned, f"{name} imports {sorted(unpinned)}, which is not in requirements/: {', '.join(lists)}"


def pinned(which: str) -> dict[str, str]:
    """name -> version of every package that requirements/WHICH.txt pins."""
    lines = (ROOT / "requirements" / f"{which}.txt").read_text().splitlines()
    pins = [line.split(" ")[0].split("==") for line in lines if line and not line.startswith("#")]
    return {name.lower(): version for name, version in pins}


def test_report_needs_the_versions_of_the_runs_and_of_the_tests() -> None:
    """One environment can hold both, and the tests use the versions that readers of records install."""
    report, installed = pinned("report"), pinned("cpu") | pinned("test")
    assert report.items() <= installed.items()


@pytest.mark.parametrize("name", sorted(REPORTING))
def test_reporting_needs_no_torch(name: str) -> None:
    """The files that read records run on any laptop with only requirements/report.txt."""
    own = imports(FILES[name]) & FILES.keys()
    files = {name}.union(*(below(each, top_level=True) for each in own))
    needed = {package for each in files for package in imports(FILES[each], top_level=each not in REPORTING)}
    needed -= FILES.keys() | sys.stdlib_module_names
    assert {PACKAGE.get(package, package).lower() for package in needed - OPTIONAL} <= pinned("report").keys()


@pytest.mark.parametrize("name", ["config", "hf_config", "plan.doctor", "preflight"])
def test_config_doctor_and_plan_and_what_they_import_need_no_torch(name: str) -> None:
    """preflight.py imports modules that need torch only inside the functions of its other options."""
    files = below(name, top_level=True)
    needy = {each for each in files if "torch" in imports(FILES[each], top_level=True)}
    assert "input_files" in files and not needy, f"{sorted(needy)} import torch"


@pytest.mark.parametrize("name", FILES)
def test_only_device_names_an_accelerator(name: str) -> None:
    found = re.findall(ONLY_DEVICE, FILES[name].read_text())
    assert name in NAME_PACKAGES or not found, f"{name} names {found[0]}; only device.py and kernels.py may"


@pytest.mark.parametrize(
    "path", [*FILES.values(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("*.sh")], ids=lambda path: path.name
)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    limit = TEST_LINES if "tests" in path.parts[-3:] else LINES
    assert lines <= limit, f"{path.name} has {lines} lines; the limit is {limit}"


BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"
NOT_IN_ANY_FILE = {  # character classes such as [k] prevent a pattern from matching itself
    "a command that ends processes by name": r"\b(?:p[k]ill|k[i]llall)\b",
    "a home folder": r"(?<![\w.~}])/(?:[h]ome|[U]sers|[r]oot)/\w",
    # Allowed: the own machine, and the network that RFC 5737 reserves for examples.
    "an address of a machine": rf"(?<![\d.=])(?!127\.0\.0\.1\b|192\.0\.2\.)(?:{BYTE}\.){{3}}{BYTE}(?!\.?\d)",
}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout: the list of its files is unknown")
@pytest.mark.parametrize("what", NOT_IN_ANY_FILE)
def test_no_file_contains(what: str) -> None:
    found = []
    for path in listed_files():
        content = path.read_bytes()
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
    """Code that several test files use is in tests/support/."""
    assert not {name for name in imports(path) if name.startswith("test_")}


def test_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version
