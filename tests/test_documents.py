"""README and docs name files, options and keys that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from source import ROOT
from tiers import ci

from knobs import Config

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


@pytest.mark.parametrize("script", ["report", "sweep", *map(ci, ["train_grpo", "preflight", "export", "evaluate"])])
def test_help_of_every_command_is_printed(script: str) -> None:
    done = subprocess.run([sys.executable, f"{script}.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "usage:" in done.stdout
