"""Run the tests that need other packages than the project's, once with each version, and write what they showed.

    python benchmarks/check_ascend.py mindspeed ../MindSpeed                        # checkouts of MindSpeed
    python benchmarks/check_ascend.py schema .cache/torch_npu-2.13.0                # folders with a torch_npu
    python benchmarks/check_ascend.py vllm ../vllm-ascend-env/bin/python            # a Python that has vllm-ascend

CHECKS says what each of them needs and shows. `report.py add out/check_mindspeed.json` keeps the file, and
`report.py build` writes the table "What was checked how" of docs/npu.md from the newest file of each check. Exit code
1: a test failed, or none ran. A row is a test function; the seconds of a function contain what it prepares for others.
"""

import datetime
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import bench_cases as cases

from inputs.environment import ON_CPU

OUTCOMES = ("passed", "failed", "skipped")


class Check(NamedTuple):
    """A selection of tests. ``variable`` names to them what is checked; ``versions`` says which versions that is."""

    shows: str
    selection: tuple[str, ...]  # arguments of pytest
    variable: str
    versions: Callable[[Path], str]


def megatron_and_mindspeed(checkout: Path) -> str:
    """The versions of a git checkout of MindSpeed and of the installed Megatron."""
    (version,) = re.findall(r"^__version__ = '(.*)'", (checkout / "setup.py").read_text(), re.M)
    command = ["git", "-C", str(checkout), "rev-parse", "--short=7", "HEAD"]
    commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return f"MindSpeed {version} ({commit}), megatron-core {importlib.metadata.version('megatron-core')}"


def installed_in(folder: Path) -> str:
    """The version of the torch_npu in a folder of packages, and of the torch of this environment."""
    (found,) = importlib.metadata.distributions(name="torch_npu", path=[str(folder)])
    return f"torch_npu {found.version}, torch {importlib.metadata.version('torch')}"


def installed_for(python: Path) -> str:
    """The versions of the packages of another Python."""
    names = ("vllm-ascend", "vllm", "torch_npu", "torch")
    script = f"from importlib.metadata import version\nprint(*(n + ' ' + version(n) for n in {names}), sep=', ')"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


CHECKS = {
    "mindspeed": Check(
        "GRPO trainings under the real MindSpeed and Megatron on a stand-in for torch_npu: TP, EP and DP, AQN, routing "
        "replay, both policies in bf16, each interrupted and resumed, compared with a CPU",
        ("tests/test_npu.py", "--all", "-k", "MindSpeed"), "MINDSPEED_DIR", megatron_and_mindspeed,
    ),
    "schema": Check(
        "calls of NPU kernels against the real torch_npu's schemas and meta kernels, on a stub of CANN",
        ("tests", "--all", "-m", "npu_schema"), "TORCH_NPU_DIR", installed_in,
    ),
    "vllm": Check(
        "the Ascend engine's arguments in the real vLLM and vllm-ascend on a stub of CANN: configuration, groups, "
        "layout of the experts",
        ("tests", "--all", "-m", "vllm_ascend"), "VLLM_ASCEND_ENV", installed_for,
    ),
}  # fmt: skip


def run(check: Check, target: Path) -> list[dict]:
    """Run the tests of ``check`` with one version.  -> one row for each test function, in the order of the tests"""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(
            [*command, *check.selection], cwd=cases.ROOT, env=os.environ | ON_CPU | {check.variable: str(target)},
            stdout=sys.stderr,
        )  # fmt: skip
        if done.returncode not in (0, 1):  # 5: no test was selected
            raise SystemExit(f"pytest {' '.join(check.selection)}: exit code {done.returncode}")
        return rows(report.read_text(), check.versions(target))


def rows(junit: str, versions: str) -> list[dict]:
    """One row for each test function of pytest's JUnit report: its cases by outcome, and their seconds."""
    found: dict[str, dict] = {}
    for case in ElementTree.fromstring(junit).iter("testcase"):
        name = case.attrib["name"].partition("[")[0]
        row = found.setdefault(
            name, {"versions": versions, "test": name.removeprefix("test_").replace("_", " ")}
            | dict.fromkeys((*OUTCOMES, "seconds"), 0),
        )  # fmt: skip
        kinds = {child.tag for child in case}
        row["failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"] += 1
        row["seconds"] = round(row["seconds"] + float(case.attrib["time"]), 1)
    return list(found.values())


def main() -> int:
    parser = cases.parser(__doc__)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("targets", nargs="+", type=Path, help="what is checked; several versions one after the other")
    args = parser.parse_args()
    args.out = args.out or cases.ROOT / "out" / f"check_{args.check}.json"
    check = CHECKS[args.check]
    # absolute: the tests run elsewhere; not resolved: the python of an environment is a link
    table = [row for target in args.targets for row in run(check, target.absolute())]
    totals = {
        versions: {
            outcome: sum(row[outcome] for row in table if row["versions"] == versions) for outcome in OUTCOMES
        }
        for versions in dict.fromkeys(row["versions"] for row in table)
    }  # fmt: skip
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    measured = {"check": args.check, "shows": check.shows, "date": date, "totals": totals}
    cases.report(args, f"{check.shows[0].upper()}{check.shows[1:]}.", table, measured)
    return int(any(total["failed"] or not total["passed"] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
