"""README and docs name files, options and keys that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from source import ROOT

from knobs import Config

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("results/*.md")])
OPTION = r"(?<![\w-])--[a-z][a-z-]+"


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(path: Path) -> list[str]:
    """The command lines in the code blocks of a document, without comments."""
    blocks = re.findall(r"^```\n(.*?)^```", path.read_text().replace("\\\n", " "), re.M | re.S)
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\w+=\S+ )*(bash|python|torchrun) ", line)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        file, _, heading = target.partition("#")
        where = (path.parent / file) if file else path
        assert where.exists(), f"{named(path)} links to {target}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", where.read_text(), re.M)
            assert heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}, target


def script_of(words: list[str]) -> str:
    """The script or module that a command runs, as a path from the repository's folder."""
    words = [word for word in words if not re.fullmatch(r"[A-Z_0-9]+=\S*", word)][1:]
    while words[0].startswith("-") and words[0] != "-m":
        words.pop(0)
    return f"{words[1].replace('.', '/')}.py" if words[0] == "-m" else words[0]


CASES = [(path, line) for path in DOCUMENTS for line in commands(path)]


@pytest.mark.parametrize(("path", "line"), CASES, ids=[f"{named(path)}: {line[:60]}" for path, line in CASES])
def test_documented_command_names_a_script_options_and_keys_that_exist(path: Path, line: str) -> None:
    line = line.split(" -- ")[0]
    if "<" in line or line.startswith(("python -c", "python -m venv")):
        return
    script = ROOT / script_of(shlex.split(line))
    assert script.exists(), line
    more = {"preflight.py": ROOT.glob("plan/*.py")}.get(script.name, ROOT.glob("launch.sh"))
    source = "".join(file.read_text() for file in (script, *more))
    for option in re.findall(OPTION, line.partition(script.name)[2]):
        assert option in source, f"{script.name} has no {option}"
    sections = {name: field.annotation for name, field in Config.model_fields.items()}
    for section, key in re.findall(r"(?<![\w.])([a-z_]+)\.([a-z_]+)=", line):
        kinds = [kind for kind in (sections[section], *get_args(sections[section])) if hasattr(kind, "model_fields")]
        assert key in kinds[0].model_fields, f"{section}.{key}: no such key"


def test_help_of_every_command_is_printed() -> None:
    for script in ("train_grpo", "preflight", "report", "sweep", "export", "config", "data_gsm8k"):
        done = subprocess.run([sys.executable, f"{script}.py", "--help"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0 and "usage:" in done.stdout, script
