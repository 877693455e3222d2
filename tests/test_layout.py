"""Rules for the whole repository: few and short files, imports that point down, two files that name the hardware, heavy
packages inside functions, and no name of a machine, home folder or foreign process.
"""

import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter

import pytest
import yaml
from source import FILES, OPTIONAL, PACKAGE, REPORTING, ROOT, imports, pins

TOP_LEVEL_FILES, LAB_FILES = 34, 10
# The files that users run. The order of the layers is: commands and checks/, then plan/ and lab/, then the method, then
# engines/, then the files that engines/ import.
COMMANDS = {"train_grpo", "preflight", "report", "sweep", "export"}
FOLDERS = {  # a folder -> the other folders from which its files may import
    "inputs": {"engines"},  # engines/kinds.py alone, which imports nothing
    "engines": {"inputs"},
    "plan": {"engines", "inputs"},
    "lab": {"inputs"},
    "checks": {"engines", "inputs", "plan"},
}
# A folder -> the files outside of it that may import its files.
MAY_ENTER = {
    "plan": {"train_grpo", "startup", "preflight", "sweep"},  # sweep.py --list prints hours and disk by the plan
    "checks": {"preflight"},
    "lab": {"report", "startup", "sweep", "train_grpo"},
}
# A file -> the command that it may import.
RUNS_A_COMMAND = {"checks.self_test": {"train_grpo"}, "checks.self_test_ranks": {"train_grpo"}}
HEAVY = {"megatron", "vllm", "ray", "transformers", "torch_npu", "mindspeed", "peft"}
HEAVY |= {"pandas", "pyarrow", "matplotlib", "scipy"}
ONLY_DEVICE = r"torch\.(?:cuda|npu)\b|\btorch_npu\b|\bmindspeed\b"
# The two files for the hardware, and the files that look for its packages.
NAME_PACKAGES = {"device", "kernels", "inputs.environment", "plan.machine", "plan.doctor_npu", "plan.doctor_variables"}
NAME_PACKAGES |= {"checks.dry_run_device"}  # stands for one of them
LINES, TEST_LINES = 400, 600  # nobody reads a whole test file at once
TABLE_LINES = {"knobs.py": 460}  # a table, of which a reader looks up a line


OURS = {name: imports(path) & FILES.keys() for name, path in FILES.items()}
AT_TOP = {name: imports(path, top_level=True) for name, path in FILES.items()}


def folder(name: str) -> str:
    """The folder of a module: engines, plan or lab; "" for the top level."""
    return name.rpartition(".")[0]


def below(name: str, *, top_level: bool = False) -> set[str]:
    """``name`` and all files that it imports, directly or through others."""
    seen, todo = set(), {name}
    while todo:
        seen |= todo
        todo = {found for each in todo for found in (AT_TOP if top_level else OURS)[each] & FILES.keys()} - seen
    return seen


def test_a_reader_can_hold_the_top_level_and_the_lab_in_mind() -> None:
    for where, limit in (("", TOP_LEVEL_FILES), ("lab", LAB_FILES)):
        files = [name for name in FILES if folder(name) == where]
        assert len(files) <= limit, f"{where}: {len(files)} Python files; the limit is {limit}"


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports inside functions count too, although Python can load such circles."""
    TopologicalSorter(OURS).prepare()  # CycleError: import circles


def test_files_import_only_from_below() -> None:
    for name, other in [(name, other) for name, ours in OURS.items() for other in ours]:
        here, where, rule = folder(name), folder(other), f"{name} imports {other}"
        if other in COMMANDS:
            assert other in RUNS_A_COMMAND.get(name, ()), f"{rule}, which is a command"
        if where and where != here:
            allowed = (
                FOLDERS[here]
                if here
                else {"engines", "inputs"} | {each for each in MAY_ENTER if name in MAY_ENTER[each]}
            )
            assert where in allowed, f"{rule}; the rules of the folders do not allow this"
    for name in [name for name in FILES if folder(name) == "engines"]:
        assert not below(name) & {"rollout", "learner", "weight_sync", "aqn"}, name


def test_packages_are_pinned_and_heavy_ones_are_imported_inside_the_function_that_needs_them() -> None:
    """requirements/test.txt installs packages that users do not have; no other test would notice an import of them."""
    for name, path in FILES.items():
        allowed = {"megatron"} if name in {"parallel_setup", "model_megatron", "lora_megatron"} else set()
        heavy = AT_TOP[name] & (HEAVY - allowed)
        assert not heavy, f"{name} imports {sorted(heavy)} at the top; import inside the function that needs it"
        pinned = pins("cpu", *(["report"] * (name in REPORTING)), *(["smol"] * (name == "smol_model")))
        packages = imports(path) - FILES.keys() - sys.stdlib_module_names - OPTIONAL
        unpinned = {package for package in packages if PACKAGE.get(package, package).lower() not in pinned}
        assert not unpinned, f"{name} imports {sorted(unpinned)}, which requirements/ does not pin"


def test_reporting_needs_no_torch_and_the_versions_of_the_runs_and_of_the_tests() -> None:
    """The files that read records run on any laptop with only requirements/report.txt."""
    report = pins("report")
    assert report.items() <= pins("cpu", "test").items()
    for name in REPORTING:
        files = {name}.union(*(below(each, top_level=True) for each in OURS[name]))
        needed = {one for each in files for one in (imports(FILES[each]) if each in REPORTING else AT_TOP[each])}
        needed -= FILES.keys() | sys.stdlib_module_names | OPTIONAL
        assert {PACKAGE.get(package, package).lower() for package in needed} <= report.keys(), name


def test_only_device_names_an_accelerator() -> None:
    for name in FILES.keys() - NAME_PACKAGES:
        found = re.findall(ONLY_DEVICE, FILES[name].read_text())
        assert not found, f"{name} names {found[0]}; only device.py and kernels.py may"


def test_files_are_short_and_no_test_imports_another() -> None:
    """Code that several test files use is in tests/support/."""
    tests = sorted(ROOT.glob("tests/**/*.py"))
    for path in (*FILES.values(), *tests, *ROOT.glob("*.sh")):
        lines, limit = (
            len(path.read_text().splitlines()),
            TEST_LINES if path in tests else TABLE_LINES.get(path.name, LINES),
        )
        assert lines <= limit, f"{path.name} has {lines} lines; the limit is {limit}"
    for path in tests:
        assert not {name for name in imports(path) if name.startswith("test_")}, path


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


def test_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == version
