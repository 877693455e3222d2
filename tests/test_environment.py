"""The table of environment.py: scripts export it, docs/npu.md repeats it, and what follows it passes the doctor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import environment
from config import load_config
from plan import doctor_variables
from plan.machine import Machine

ROOT = Path(__file__).parents[1]


def export_line(variable: environment.Variable) -> str:
    """The line of npu_env.sh or cuda_env.sh that sets ``variable`` where the user has not."""
    return f'export {variable.name}="${{{variable.name}:-{variable.value}}}" # {variable.reason}'


@pytest.mark.parametrize("kind", ["npu", "cuda"])
def test_scripts_export_the_variables_of_the_table_with_its_reasons(kind: str) -> None:
    text = (ROOT / f"{kind}_env.sh").read_text()
    exports = [re.sub(r"\s+#", " #", line.strip()) for line in text.splitlines() if re.match(r"\s*export \w+=", line)]
    exports = [line for line in exports if not line.startswith("export LD_PRELOAD=")]  # a path it looks for
    assert exports == [export_line(variable) for variable in environment.START[kind]]
    (unset,) = re.findall(r"^unset (.*?)\s+#", text, re.M)
    assert tuple(unset.split()) == environment.LAUNCHERS


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("deterministic", [True, False])
def test_what_the_programs_set_passes_the_doctor(eager: bool, deterministic: bool, tmp_path: Path) -> None:
    variables = environment.VLLM + environment.START["npu"]
    variables += environment.DETERMINISTIC["npu"] if deterministic else ()
    env = {variable.name: variable.value for variable in variables} | {"LD_PRELOAD": "libjemalloc.so.2"}
    cfg = load_config(ROOT / "configs" / "qwen3.yaml", [f"rollout.enforce_eager={eager}".lower()])
    where = Machine(run=cfg, env=env, root=tmp_path, port_is_free=lambda port: True)
    findings = [finding for check in doctor_variables.CHECKS for finding in check(where)]
    assert [str(finding) for finding in findings if finding.level != "ok"] == []


def test_every_rule_has_a_reason_and_a_source() -> None:
    by_kind = [*environment.START.values(), *environment.DETERMINISTIC.values()]
    for group in [*by_kind, environment.VLLM, environment.MUST_BE_OFF]:
        assert len({variable.name for variable in group}) == len(group)
        for variable in group:
            assert variable.reason and variable.source and variable.allows(variable.value)


def test_document_repeats_the_versions() -> None:
    text = (ROOT / "docs" / "npu.md").read_text()
    table = re.search(r"\| \| first choice \| older \|\n\|---\|---\|---\|\n((?:\|.*\|\n)+)", text)[1]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()]
    expected = []
    first, older = environment.VERSION_SETS
    for name in first:
        cells = [" or ".join(one.get(name, ())) for one in (first, older)]
        if name == "mindspeed":
            cells = [f"{version}, branch {environment.MINDSPEED_BRANCH[version]}" for version in cells]
        expected.append([name, *cells])
    assert [[row[0].removesuffix(" (the build without CUDA)"), *row[1:]] for row in rows] == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [  # from npu-smi's output in vllm-ascend's issues 2534, 3657 and 11160, ollama's 5315, and setup.py's table
        ("Ascend910", "A3"),
        ("Ascend910_9382", "A3"),
        ("910B4-1", "A2"),
        ("910B3", "A2"),
        ("310P3", "_310P"),
        ("950PR", "A5"),
        ("910A", None),  # of the first generation, which vllm-ascend does not know
    ],
)
def test_a_chip_is_of_the_kind_that_vllm_ascend_calls_it(name: str, kind: str | None) -> None:
    assert environment.chip_kind(name) == kind


def test_build_info_is_read_as_setup_writes_it() -> None:
    assert environment.built_for("# Auto-generated file\n__device_type__ = 'A2'\n") == "A2"  # PyPI's wheel of 0.23.0
    assert environment.built_for("# __device_type__ = 'A2'\n") is None


@pytest.mark.parametrize(("version", "fits"), [("9.1", True), ("9.1.0", True), ("9.1.RC2", True), ("9.10", False)])
def test_a_version_stands_for_its_bug_fixes(version: str, fits: bool) -> None:
    assert environment.matches(version, ("9.1",)) == fits
