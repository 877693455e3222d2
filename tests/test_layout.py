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
    {"strict_yaml", "seeds", "knobs", "heartbeat"},
    {"config_rules"},
    {"config"},
    {"hf_config", "device", "grpo", "reward_gsm8k", "run_record", "tiny_tokenizer"},
    {"parallel_setup", "experts_megatron", "packing", "decoder_torch", "gsm8k_files", "tripwires", "vllm_inside"},
    {"data_gsm8k", "lora_megatron", "runlog"},
    {"model_megatron"},
    {"weights_hf"},
    {"adapter_weights", "rollout", "aqn"},
    {"rollout_torch", "rollout_vllm"},
    {"evaluate", "checkpoint", "tiny_model", "routing_replay", "weight_sync"},
    {"learner"},
    {"train_grpo", "export"},
]
# Upward, but only inside a function: opens the engine that the config asks for.
LAZY = {("rollout", "rollout_torch"), ("rollout", "rollout_vllm")}
HEAVY = {"megatron", "vllm", "ray", "transformers", "torch_npu", "mindspeed", "pandas", "pyarrow", "matplotlib", "peft"}
OPTIONAL = {"torch_npu", "mindspeed", "vllm", "ray", "tensorboard"}  # used where present, asked for by no CPU run
PACKAGE = {"yaml": "PyYAML", "megatron": "megatron-core"}  # import name -> name on PyPI where they differ
ONLY_DEVICE = r"torch\.(?:cuda|npu)\b|\btorch_npu\b|\bmindspeed\b"  # the one file that may say this is device.py
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
    pins = {line.split("==")[0].lower() for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines()}
    packages = imports(path) - LEVEL.keys() - sys.stdlib_module_names - OPTIONAL
    unpinned = {name for name in packages if PACKAGE.get(name, name).lower() not in pins}
    assert not unpinned, f"{path.name} imports {sorted(unpinned)}, which requirements/cpu.txt does not name"


@pytest.mark.parametrize("name", ["strict_yaml", "config_rules", "config"])
def test_config_and_what_it_imports_need_no_torch(name: str) -> None:
    assert "torch" not in imports(ROOT / f"{name}.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_device_names_an_accelerator(path: Path) -> None:
    found = re.findall(ONLY_DEVICE, path.read_text())
    assert path.stem == "device" or not found, f"{path.name} names {found[0]}; device.py is the place for that"


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
