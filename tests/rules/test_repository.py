"""Rules for the whole repository: imports, names, documents, and the tool that plants small faults."""

import ast
import functools
import importlib
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import get_args

import pytest
import torch
from source import FILES, OPTIONAL, PACKAGE, REPORTING, ROOT, imports, pins

from inputs.config import load_config
from knobs import Config

# ---------------------------------------------------------------------------------------------------- imports and names
# Rules for the whole repository: imports that point down, names that no package has, and no name of a machine, home
# folder or foreign process. ruff has two more: one room names the hardware; heavy packages are imported in functions.

# From the top floor down. A name is a room or a file of the top level; each imports only from the floors below its own.
FLOORS = """
    preflight sweep report | checks benchmarks | train_grpo export | run | learner weight_sync evaluate | rollout aqn
    | engines | weights | lora_megatron lab | model plan data_gsm8k | tasks runlog parallel_setup | inputs
    | knobs hardware | facts grpo reward_gsm8k launch
"""
FLOOR = {room: -index for index, floor in enumerate(FLOORS.split("|")) for room in floor.split()}


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


def test_packages_are_pinned() -> None:
    """requirements/test.txt installs packages that users do not have; no other test would notice an import of them."""
    for name, path in FILES.items():
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


def test_no_test_imports_another() -> None:
    """Code that several test files use is in tests/support/."""
    for path in ROOT.glob("tests/**/*.py"):
        assert not {name for name in imports(path) if name.startswith("test_")}, path


@pytest.mark.ci
def test_no_name_of_the_top_level_is_one_that_a_package_has_or_imports() -> None:
    """Our folder is first on the path. transformers imported a file kernels.py of it in place of an optional package.

    Programs for the tests of a package may import more names.
    """
    ours = {name.split(".")[0] for name in FILES}
    assert not ours & packages_distributions().keys()
    line = rf"^[[:space:]]*(from|import)[[:space:]]+({'|'.join(ours)})([^[:alnum:]_]|$)"
    command = ["grep", "-rlE", "--include=*.py", "--exclude-dir=tests", "--exclude-dir=test_utils", line]
    found = subprocess.run([*command, Path(torch.__file__).parents[1]], capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    for path in found.stdout.splitlines():
        text = Path(path).read_text(errors="replace")
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


# ------------------------------------------------------------------------------------------------------------ documents

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])


def commands(path: Path) -> list[str]:
    """The command lines in the code blocks of a document, without comments."""
    blocks = re.findall(r"^```\n(.*?)^```", path.read_text().replace("\\\n", " "), re.M | re.S)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    found = [line.split(" -- ")[0] for line in lines if re.match(r"(\w+=\S+ )*(bash|python|torchrun) ", line)]
    return [line for line in found if "<" not in line and not line.startswith(("python -c", "python -m venv"))]


def test_links_lead_to_files_and_headings() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!http)([^)\s]+)\)", path.read_text()):
            file, _, heading = target.partition("#")
            where = (path.parent / file) if file else path
            assert where.exists(), f"{path} links to {target}"
            headings = re.findall(r"^#+ (.*)$", where.read_text(), re.M) if heading else [""]
            found = {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}
            assert heading in found, f"{path} links to {target}"


def test_the_files_that_a_contributor_is_sent_to_exist() -> None:
    """Those that CONTRIBUTING.md names without a link; FILE and NAME stand for a file of the reader's."""
    named = re.findall(r"(?<![\w./])[\w./]+\.(?:py|yaml)\b", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 30
    for name in named:
        assert "FILE" in name or "NAME" in name or (ROOT / name).exists(), name


def script_of(line: str) -> str:
    """The script or module that a command line runs, as a path from the repository's folder."""
    module, script = re.search(r"(?:bash|python|torchrun) (?:-m (\S+)|(?:-\S+ )*(\S+))", line).groups()
    return script or f"{module.replace('.', '/')}.py"


def test_documented_commands_name_scripts_options_and_keys_that_exist() -> None:
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    lines = [line for path in DOCUMENTS for line in commands(path)]
    assert len(lines) > 50
    for line in lines:
        script = ROOT / script_of(line)
        assert script.exists(), line
        more = {"preflight.py": [*ROOT.glob("plan/*.py"), *ROOT.glob("checks/*.py")]}.get(
            script.name, ROOT.glob("launch/launch.sh")
        )
        source = "".join(file.read_text() for file in (script, *more))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line.partition(script.name)[2]):
            assert option in source, f"{line}: {script.name} has no {option}"
        for section, key in re.findall(r"(?<![\w.])([a-z_]+)\.([a-z_]+)=", line):
            kinds = [
                each for each in (sections[section], *get_args(sections[section])) if hasattr(each, "model_fields")
            ]
            assert key in kinds[0].model_fields, f"{line}: {section}.{key}: no such key"
        config = re.search(r"configs/\w+\.yaml", line)
        if config and script.suffix == ".py":  # raises what the command would refuse
            load_config(ROOT / config[0], re.findall(r"(?<= )[a-z_]+\.[a-z_]+=\S+", line))


@pytest.mark.parametrize("command", ["report", "sweep", "train_grpo", "preflight", "export", "evaluate"])
def test_help_of_every_command_is_printed(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(command).main(["--help"])
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------------------- small faults

SOURCES = {
    "a.py": "def double(x):\n    return x + x\n\n\ndef positive(x):\n    return x > 0\n",
    "b.py": "def unused(x):\n    return x - 1\n",
    "tests/test_a.py": """
import pytest

import a


@pytest.fixture(scope="module")
def flag():
    return a.positive(1)


def test_flag(flag):
    assert flag


def test_flag_again(flag):
    assert flag is True


def test_double():
    assert a.double(2) == 4
""",
    "tests/mutants.jsonl": "",
    "run_tests.sh": f'exec {sys.executable} -m pytest -p xdist.plugin "$@"\n',
    ".gitignore": "__pycache__/\n",
}
TOOL = "import sys; sys.path.insert(0, 'tests'); import mutants; mutants.warm_up = lambda: None; mutants.main()"


def commit(repository: Path, file: str, text: str) -> None:
    (repository / file).write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "add", "."], cwd=repository, check=True)
    subprocess.run(["git", *identity, "commit", "--quiet", "-m", "a"], cwd=repository, check=True)


def tool(repository: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and the output of tests/mutants.py."""
    command = [sys.executable, "-c", TOOL, *arguments]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # plugins take seconds
    done = subprocess.run(command, cwd=repository, env=variables, capture_output=True, text=True)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def letters(repository: Path) -> dict[str, dict[str, str]]:
    """{function with the fault: {test: letter}} of the matrix, without the tests that do not execute it."""
    stored = json.loads(lzma.decompress((repository / "tests" / "kill_matrix.json.xz").read_bytes()))
    tests = [test.partition("::")[2] for test, _, _ in stored["tests"]]
    faults = map(json.loads, (repository / "tests" / "mutants.jsonl").read_text().splitlines())
    rows = {fault["function"]: zip(tests, stored["rows"][fault["id"]], strict=True) for fault in faults}
    return {function: {test: letter for test, letter in row if letter != "."} for function, row in rows.items()}


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """A made repository whose faults have been chosen, recorded and run."""
    repository = tmp_path_factory.mktemp("made")
    (repository / "tests").mkdir()
    for file, text in SOURCES.items():
        (repository / file).write_text(text)
    for path in Path(__file__).parents[1].glob("mutants*.py"):
        shutil.copy(path, repository / "tests")
    subprocess.run(["git", "init", "--quiet"], cwd=repository, check=True)
    commit(repository, "pyproject.toml", '[tool.pytest.ini_options]\npythonpath = ["."]\n')
    assert "3 drawn" in tool(repository, "choose")[1]
    commit(repository, "a.py", SOURCES["a.py"])
    tool(repository, "record")
    executed = {"positive": {"test_flag": "-", "test_flag_again": "-"}, "double": {"test_double": "-"}, "unused": {}}
    assert letters(repository) == executed  # a shared fixture counts for every test that uses it
    _, output = tool(repository, "run")
    assert "b.py unused, sign: return x - 1: no test executes it" in output
    assert "a.py positive, comparison: return x > 0: no test fails" in output
    return repository


@pytest.fixture
def repository(measured: Path, tmp_path: Path) -> Path:
    return shutil.copytree(measured, tmp_path / "made")


@pytest.mark.ci
def test_a_test_finds_a_fault_if_it_fails_with_it_and_an_unchanged_commit_has_lost_nothing(repository: Path) -> None:
    passed = {"test_flag": "p", "test_flag_again": "p"}
    assert letters(repository) == {"positive": passed, "double": {"test_double": "F"}, "unused": {}}
    code, output = tool(repository, "check")
    assert code == 0 and "0 of 3 faults are planted again" in output


@pytest.mark.ci
def test_a_fault_is_lost_with_its_only_finder_until_another_test_finds_it(repository: Path) -> None:
    commit(repository, "tests/test_a.py", SOURCES["tests/test_a.py"].partition("def test_double")[0])
    for _ in range(2):  # the first check must not forget the finder
        code, output = tool(repository, "check")
        assert code == 1 and "double, sign: return x + x: lost; it was found by tests/test_a.py::test_double" in output
    commit(repository, "tests/test_a.py", SOURCES["tests/test_a.py"].replace("test_double", "test_twice"))
    assert tool(repository, "check")[0] == 0
    assert letters(repository)["double"]["test_twice"] == "F"


@pytest.mark.nightly
def test_a_statement_that_goes_asks_for_another_fault(repository: Path) -> None:
    commit(repository, "a.py", SOURCES["a.py"].replace("x + x", "2 * x"))
    code, output = tool(repository, "check")
    assert code == 1 and "its statement is gone" in output and "a.py: 1 faults fewer than the rule asks for" in output
    assert "2 of 3 kept, 1 drawn" in tool(repository, "choose")[1]
    commit(repository, "b.py", SOURCES["b.py"])
    assert tool(repository, "check")[0] == 0
