"""The table of facts/variables.py: scripts export it, and what follows it passes the doctor. Commands run in any."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from healthy import npu
from tiers import ci, nightly

from facts import variables as environment
from plan import doctor

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_scripts_export_the_variables_of_the_table_with_its_reasons(kind: str) -> None:
    text = (ROOT / "launch" / f"{kind}_env.sh").read_text()
    exports = [re.sub(r"\s+#", " #", line.strip()) for line in text.splitlines() if re.match(r"\s*export \w+=", line)]
    exports = [line for line in exports if not line.startswith("export LD_PRELOAD=")]  # a path it looks for
    # Each line sets a variable where the user has not.
    assert exports == [f'export {v.name}="${{{v.name}:-{v.value}}}" # {v.reason}' for v in environment.START[kind]]
    (unset,) = re.findall(r"^unset (.*?)\s+#", text, re.M)
    assert sorted(unset.split()) == environment.from_a_launcher(dict.fromkeys(unset.split(), "1"))


@pytest.mark.parametrize(("eager", "deterministic"), [(True, False), (False, True)])
def test_what_the_programs_set_passes_the_doctor(eager: bool, deterministic: bool, tmp_path: Path) -> None:
    variables = environment.VLLM + environment.START["npu"]
    variables += environment.DETERMINISTIC["npu"] if deterministic else ()
    where = npu(tmp_path, f"rollout.enforce_eager={eager}".lower())
    where.env |= {variable.name: variable.value for variable in variables}
    findings = doctor.examine(where, doctor.QUICK + doctor.SLOW)
    assert [str(finding) for finding in findings if finding.level != "ok"] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [  # from npu-smi's output in vllm-ascend's issues 2534, 3657 and 11160, ollama's 5315, and setup.py's table
        ("Ascend910", "A3"),
        ("910B4-1", "A2"),
        ("310P3", "_310P"),
        ("910A", None),  # of the first generation, which vllm-ascend does not know
    ],
)
def test_a_chip_is_of_the_kind_that_vllm_ascend_calls_it(name: str, kind: str | None) -> None:
    assert environment.chip_kind(name) == kind


@pytest.mark.parametrize(("version", "fits"), [("9.1", True), ("9.1.RC2", True), ("9.10", False)])
def test_a_version_stands_for_its_bug_fixes(version: str, fits: bool) -> None:
    assert environment.matches(version, ("9.1",)) == fits


def called(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )


COMMANDS = {  # with a file or folder that is not there
    "train_grpo.py": ["absent"],
    "preflight.py": ["absent"],
    "evaluate.py": ["absent"],
    "export.py": ["absent", "--merged", "absent-too"],
    "report.py": ["add", "absent"],
    "weights/smol_model.py": ["README.md"],
    "sweep.py": ["absent", "--list"],
    "launch/first_code.py": ["--standalone", "--local-addr=localhost", "--nproc_per_node=1", "train_grpo.py", "absent"],
}


@pytest.mark.parametrize(
    ("command", "safe"),
    [("launch/first_code.py", "variable"), ("preflight.py", "-P"), *(nightly(name, "variable") for name in COMMANDS)],
)
def test_a_command_finds_its_modules_without_its_folder_on_the_path(command: str, safe: str) -> None:
    option, variables = (["-P"], {}) if safe == "-P" else ([], {"PYTHONSAFEPATH": "1"})
    done = called(*option, command, *COMMANDS[command], **variables)
    assert done.returncode == 2 and re.search(r"^error: ", done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("command", "options"), [("preflight.py", ["--values"]), ci("train_grpo.py", ["--check"])])
def test_a_letter_that_the_output_cannot_show_is_printed_as_an_escape(command, options, tmp_path: Path) -> None:
    folder = tmp_path / "caf\u00e9 \u20ac"
    folder.mkdir()
    (folder / "tiny.yaml").write_text((ROOT / "configs" / "tiny_cpu.yaml").read_text())
    values = ["parallel.expert=1", "tiny_model.seed=1", f"model.path={folder}/model", f"train.out_dir={folder}/out"]
    done = called(command, folder / "tiny.yaml", *values, *options, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "caf\\xe9 \\u20ac/model" in done.stdout, done.stderr
