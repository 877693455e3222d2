"""Every operator of kernels.py and model/packing.py with the real torch_npu, at the sizes of the shipped layouts.

The tensors have no data (FakeTensorMode) and CANN is a stub (cann_stub.py), so no NPU is needed. This shows that the
names, arguments and shapes of the calls are right, forward and backward, and that the device starts. It does not show
what the kernels compute, how fast they are, or which tensors a device refuses; for that, kernels.py has rules of its
own, with tests in test_npu.py.

run_tests.sh installs the torch_npu that belongs to the torch of requirements/cpu.txt (126 MB). For the pinned versions
of requirements/npu.txt, in an environment of its own, which must not contain torch_npu itself, because `import torch`
would then import it (aarch64: torch==2.10.0 without --index-url):

    python3 -m venv .venv-npu-schema
    pip=".venv-npu-schema/bin/python -m pip install --no-deps"
    $pip --index-url https://download.pytorch.org/whl/cpu torch==2.10.0+cpu
    $pip -r <(grep -v ^torch== requirements/cpu.txt) -r requirements/test.txt
    $pip --target .cache/torch_npu-2.10.0.post4 torch-npu==2.10.0.post4
    export TORCH_NPU_DIR=.cache/torch_npu-2.10.0.post4
    .venv-npu-schema/bin/python -m pytest --all tests/test_npu_schema.py

The tests passed with both on x86_64. (PyTorch's index could not be reached: torch 2.10.0 was the CUDA build from PyPI,
with a stub of CUDA's libraries.)
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import run_scripts
from tiers import asked, nightly

from hardware import device as devices

pytestmark = [pytest.mark.npu_schema, pytest.mark.nightly]

OPERATORS = {
    "rms_norm",
    "rotary",
    "causal_attention",
    "masked_attention",
    "swiglu",
    "weighted_swiglu",
    "grouped_mm",
    "sequence_attention",
    "dispatch_rows",
    "combine_rows",
    "take",
    "Packing.attention",
}
FEW = ("run_16npu.sh tp4_ep16", "run_8npu_qwen15.sh tp4_ep4", "run_2npu.sh tp2_ep2")


@pytest.fixture(scope="module")
def found(torch_npu_environment: dict[str, str]) -> dict:
    """What npu_schema.py printed."""
    script = Path(__file__).parent / "support" / "npu_schema.py"
    shipped = run_scripts.shipped()
    layouts = {name: shipped[name] for name in asked(name if name in FEW else nightly(name) for name in shipped)}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(layouts)],
        env=torch_npu_environment,
        cwd=run_scripts.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"layouts": list(layouts)}


def test_torch_npu_is_the_one_that_belongs_to_torch(found) -> None:
    torch_version, npu_version = (version.split("+")[0].split(".post")[0] for version in found["versions"])
    assert torch_version == npu_version


def test_every_call_is_accepted_and_gives_the_shapes_and_types_of_the_cpu(found) -> None:
    for row in found["operators"]:
        where = (row["operator"], row["sizes"], row["layouts"])
        assert isinstance(row["npu"], list), (where, row["npu"])
        assert {device for _, _, device in row["npu"]} == {"npu:0"}, where
        if "cpu" in row:
            expected = [part[:2] for part in row["cpu"]]
        else:  # a grouped product without rows: (0, o), and gradients like x and, if it is trained, the weight
            sizes = row["sizes"]
            expected = [[shape, "bfloat16"] for shape in ([0, sizes["weight"][2]], sizes["x"], sizes["weight"])]
            expected = expected[: len(row["npu"])]
        assert [part[:2] for part in row["npu"]] == expected, where


def test_every_layout_has_every_operator_and_experts_without_rows_and_single_experts_are_among_the_calls(found) -> None:
    assert set(FEW) <= set(found["layouts"])
    for layout in found["layouts"]:
        names = {row["operator"].split()[0].rstrip(",") for row in found["operators"] if layout in row["layouts"]}
        quantised = {"quantised_grouped_mm"} if layout.startswith("run_2npu.sh") else set()
        assert names == OPERATORS | quantised, layout
    names = {row["operator"] for row in found["operators"]}
    for matrix in ("fc1", "fc2", "LoRA A", "LoRA B"):
        assert {f"grouped_mm ({matrix}), {use}" for use in ("no rows", "one expert", "int32 counts")} <= names
    assert {"rotary, prefill", "rotary, decode", "weighted_swiglu, no rows"} <= names


def test_sizes_are_those_of_a_rank(found) -> None:
    """Qwen3-30B-A3B on TP4 EP16: 8 of 128 experts, 8 of 32 heads and 1 of 4 key/value heads on a rank."""
    mine = [row for row in found["operators"] if "run_16npu.sh tp4_ep16" in row["layouts"]]
    sizes = {row["operator"]: row["sizes"] for row in mine}
    assert sizes["grouped_mm (fc1)"]["weight"] == [8, 2048, 1536]
    assert sizes["grouped_mm (fc2)"]["weight"] == [8, 768, 2048]
    assert sizes["causal_attention"]["query"][1::2] == [8, 128] and sizes["causal_attention"]["key"][1::2] == [1, 128]
    assert sizes["Packing.attention"]["query"][1:] == [8, 128]


def test_a_wrong_keyword_is_found(found) -> None:
    assert isinstance(found["faults"]["group_type"], list)
    assert "Unknown keyword argument 'group_typ'" in found["faults"]["group_typ"]


def test_stand_in_of_the_other_tests_has_no_name_keyword_or_default_that_torch_npu_lacks(found) -> None:
    assert found["stand-in"] == []


def test_device_starts_up_and_megatron_is_imported_on_the_real_package(found) -> None:
    started = found["start-up"]
    assert started.pop("rank 16").startswith("LOCAL_RANK: 16 needs 17 npu devices on this host, found 16")
    assert started == {"auto": "npu", "peak memory": 0.0, "cuda devices": 16, "megatron": True}
    assert found["buffers"] == {name: {"hccl_buffer_size": mib} for name, mib in devices.HCCL_BUFFER_MIB.items()}
