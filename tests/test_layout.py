"""The shape of the repository is part of its contract: imports point down, files stay short, devices stay in one place,
heavy packages are opened by the function that needs them, and nothing names a machine or ends someone else's processes.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [  # a file may import only from the rows above its own
    {"input_files", "seeds", "knobs", "heartbeat", "statistics_paired", "environment"},
    {"strict_yaml"},
    {"config_rules"},
    {"config"},
    {"hf_config", "kernels", "grpo", "reward_gsm8k", "run_record", "tiny_tokenizer", "machine", "layout_plan"},
    {"device", "memory_plan", "doctor_npu", "doctor_variables"},
    {"groups_check"},
    {"parallel_setup", "experts_megatron", "packing", "decoder_torch", "gsm8k_files", "tripwires", "doctor"},
    {"vllm_inside", "rollout_ascend", "adapter_vllm"},
    {"data_gsm8k", "lora_megatron", "runlog", "time_plan", "records", "run_page"},
    {"model_megatron", "layout_search", "comparisons", "sweep"},
    {"weights_hf", "figures", "benchmark_records"},
    {"adapter_weights", "rollout", "aqn", "weight_sync_local", "results_page"},
    {"rollout_torch", "rollout_vllm"},
    {"rollout_colocated"},
    {"evaluate", "checkpoint", "tiny_model", "routing_replay", "weight_sync"},
    {"copies"},
    {"learner", "self_test_reference"},
    {"train_grpo", "export", "preflight", "report", "kernels_check", "layers_check", "first_hour_stages"},
    {"first_hour", "self_test"},
]
# Upward, but only inside a function: opens the engine that the config asks for.
LAZY = {("rollout", name) for name in ("rollout_torch", "rollout_vllm", "rollout_colocated")}
HEAVY = {"megatron", "vllm", "ray", "transformers", "torch_npu", "mindspeed", "peft"}
HEAVY |= {"pandas", "pyarrow", "matplotlib", "scipy"}
OPTIONAL = {"torch_npu", "mindspeed", "vllm", "ray", "tensorboard"}  # used where present, asked for by no CPU run
# Reads records and starts runs; needs requirements/report.txt only.
REPORTING = {"statistics_paired", "records", "benchmark_records", "comparisons", "figures", "results_page", "run_page"}
REPORTING |= {"report", "sweep"}
PACKAGE = {"yaml": "PyYAML", "megatron": "megatron-core"}  # import name -> name on PyPI where they differ
ONLY_DEVICE = r"torch\.(?:cuda|npu)\b|\btorch_npu\b|\bmindspeed\b"  # said by device.py and kernels.py
# ... and by what looks for packages.
NAME_PACKAGES = {"device", "kernels", "machine", "doctor_npu", "doctor_variables", "environment"}
LINES, TEST_LINES = 400, 600  # a test file is a list that one reads in parts

LEVEL = {name: level for level, row in enumerate(LAYERS) for name in row}
FILES = sorted(ROOT.glob("*.py"))


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    """First names of the imported modules: of the whole file, or of what runs when the file itself is imported.

    Imports under `if TYPE_CHECKING` never run and do not count.
    """
    tree = ast.parse(path.read_text())
    skipped = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test).endswith("TYPE_CHECKING")]
    if top_level:
        skipped += [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = {id(node) for outer in skipped for node in ast.walk(outer)}
    nodes = [node for node in ast.walk(tree) if id(node) not in inside]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in names}


def listed_files() -> list[Path]:
    """What git tracks, or would if asked: everything but what .gitignore names."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_every_row_of_the_layout_exists() -> None:
    missing = LEVEL.keys() - {path.stem for path in FILES}
    assert not missing, f"LAYERS names {sorted(missing)}, which are no files"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_file_imports_only_from_below(path: Path) -> None:
    assert path.stem in LEVEL, f"{path.name} has no row in LAYERS; say where it belongs"
    upward = {name for name in imports(path) & LEVEL.keys() if LEVEL[name] >= LEVEL[path.stem]}
    upward -= {name for name in upward - imports(path, top_level=True) if (path.stem, name) in LAZY}
    assert not upward, f"{path.name} imports {sorted(upward)}, which are not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_heavy_packages_are_imported_inside_the_function_that_needs_them(path: Path) -> None:
    allowed = {"megatron"} if path.stem in {"parallel_setup", "model_megatron", "lora_megatron"} else set()
    found = imports(path, top_level=True) & (HEAVY - allowed)
    assert not found, f"{path.name} imports {sorted(found)} at the top; import inside the function that needs it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_imported_package_is_pinned(path: Path) -> None:
    """requirements/test.txt brings along packages that a user lacks; no other test would notice an import of one."""
    lists = ("cpu", "report") if path.stem in REPORTING else ("cpu",)
    pins = {name for which in lists for name in pinned(which)}
    packages = imports(path) - LEVEL.keys() - sys.stdlib_module_names - OPTIONAL
    unpinned = {name for name in packages if PACKAGE.get(name, name).lower() not in pins}
    assert not unpinned, f"{path.name} imports {sorted(unpinned)}, which no list of its own names: {', '.join(lists)}"


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
    below = {name} | imports(ROOT / f"{name}.py") & LEVEL.keys()
    while more := {m for b in below for m in imports(ROOT / f"{b}.py", top_level=True) & LEVEL.keys()} - below:
        below |= more
    needed = {package for b in below for package in imports(ROOT / f"{b}.py", top_level=b not in REPORTING)}
    needed -= LEVEL.keys() | sys.stdlib_module_names
    assert {PACKAGE.get(package, package).lower() for package in needed - OPTIONAL} <= pinned("report").keys()


NO_TORCH = ["config", "hf_config", "doctor", "preflight"]


@pytest.mark.parametrize("name", NO_TORCH)
def test_config_doctor_and_plan_and_what_they_import_need_no_torch(name: str) -> None:
    seen, todo = set(), {name}
    while todo:
        seen |= todo
        todo = {found for each in todo for found in imports(ROOT / f"{each}.py") & LEVEL.keys()} - seen
    needy = {each for each in seen if "torch" in imports(ROOT / f"{each}.py")}
    assert "config_rules" in seen and not needy, f"{sorted(needy)} import torch"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_device_names_an_accelerator(path: Path) -> None:
    found = re.findall(ONLY_DEVICE, path.read_text())
    assert path.stem in NAME_PACKAGES or not found, f"{path.name} names {found[0]}; device.py, kernels.py are for that"


@pytest.mark.parametrize("path", [*FILES, *ROOT.glob("tests/*.py"), *ROOT.glob("*.sh")], ids=lambda path: path.name)
def test_file_is_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    limit = TEST_LINES if path.parent.name == "tests" else LINES
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
