"""Trainings on a stand-in for an NPU, and the operators with the real torch_npu."""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import fake_npu
import pytest
import run_scripts
import training
import world
from source import ROOT
from tiers import asked, nightly

from facts.limits import HCCL_BUFFER_MIB
from inputs import config

# ------------------------------------------------------------------------------------------------------------------ npu
# `device: npu` on a stand-in for the device (fake_npu.py) against cpu and gloo: the trainer's whole path but CANN.
#
# The stand-in patches torch as MindSpeed's adaptor does. Not covered: the kernels' numerics, their speed and memory,
# HCCL's timeouts, and anything asynchronous. With MINDSPEED_DIR, a checkout of MindSpeed core_r0.16.0, all trainings
# run under the real adaptor too:
#
#     MINDSPEED_DIR=../MindSpeed bash run_tests.sh tests/machines/test_npu.py

NOISY = {"aqn__schedule": "constant", "replay__mode": "r3", "model__recompute": True}
FP32 = {"TP2_EP2": NOISY, "TP1": {}, "TP2_EP2_DP2": {}}  # layout: changes
POLICIES = {"EP2": "adapter", "DP2": "merged"}  # layout: rollout.sync in bf16
RUNS = FP32 | {layout: {"model__dtype": "bf16", "rollout__sync": policy} for layout, policy in POLICIES.items()}
IN_FP32, IN_BF16 = ["TP2_EP2", nightly("TP1"), nightly("TP2_EP2_DP2")], ["EP2", nightly("DP2")]
MINDSPEED = os.environ.get("MINDSPEED_DIR", "")
NO_MINDSPEED = "MINDSPEED_DIR names no checkout of MindSpeed"
STEPS = {
    "train__steps": 3,
    "train__checkpoint_every": 2,
    "eval__num_questions": 2,
    "parallel__timeout_seconds": 300,
    "optim__lr": 1e-3,
}


def settings(layout: str, model: Path, out: Path) -> config.Config:
    return training.in_layout(training.config(model, out, **STEPS, **RUNS[layout]), layout)


def life(folder: Path) -> config.Config:
    """A run that makes its tiny model, with a supervised warm start."""
    sizes = training.SIZES | {"architecture": "qwen3_moe", "num_experts": 4, "warm_start_steps": 2}
    made = {f"tiny_model__{key}": value for key, value in sizes.items()}
    return training.in_layout(training.config(folder / "model", folder / "out", **STEPS, **made), "EP2")


class OnNpu(NamedTuple):
    folder: Path
    runs: dict[str, tuple[Path, list[dict]]]  # by layout: the folder of the run, and each rank's answers
    operations: dict  # what npu_process.py wrote about them; nothing under the real MindSpeed


def npu_process(*arguments: str) -> subprocess.CompletedProcess:
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "npu_process.py"), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )


def run_on_npu(model: Path, folder: Path, mindspeed: str) -> OnNpu:
    """Interrupted and resumed trainings, and the operations."""
    runs = {layout: settings(layout, model, folder / layout / "out") for layout in asked(IN_FP32 + IN_BF16)}
    files = {f"{layout}/config": cfg for layout, cfg in runs.items()}
    files["life/config"] = life(folder / "life")
    for name, cfg in files.items():
        (folder / f"{name}.yaml").parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(config.to_yaml(cfg.model_copy(update={"device": "npu"})))
    done = npu_process(str(folder), *([mindspeed] if mindspeed else []))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = {}
    for layout, cfg in runs.items():
        answers = [folder / layout / f"answer-{rank}" for rank in range(world.LAYOUTS[layout][0])]
        found[layout] = (training.only_run(cfg), [json.loads(path.read_text()) for path in answers])
    operations = folder / "operations.json"
    return OnNpu(folder, found, json.loads(operations.read_text()) if operations.exists() else {})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return training.make_model(tmp_path_factory.mktemp("model") / "qwen3_moe", num_experts=4)  # the stand-in is slow


@pytest.fixture(scope="module")
def on_cpu(model, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("cpu")
    layouts = asked(IN_FP32 + IN_BF16)
    return training.run_all({layout: (layout, settings(layout, model, out / layout)) for layout in layouts})


ADAPTORS = [
    pytest.param("", id="stand-in"),
    pytest.param(MINDSPEED, id="MindSpeed", marks=pytest.mark.skipif(not MINDSPEED, reason=NO_MINDSPEED)),
]


@pytest.fixture(scope="module", params=ADAPTORS)
def on_npu(request, model, tmp_path_factory) -> OnNpu:
    return run_on_npu(model, tmp_path_factory.mktemp("npu"), request.param)


@pytest.fixture
def found(on_npu) -> dict:
    return on_npu.operations or pytest.skip("MindSpeed changes nothing there")


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("layout", IN_FP32)
def test_a_resumed_training_on_the_npu_has_the_cpus_metrics(layout, on_npu, on_cpu):
    run, _ = on_npu.runs[layout]
    training.assert_same_metrics(run, on_cpu[layout], relative=1e-6)
    log = (run / "log.txt").read_text()
    assert "resumed" in log and "device memory: at most 1.00 GiB in update\n" in log
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    assert {row["perf/peak_device_gib"] for row in timing} == {1.0}  # what lies outside of torch's pool there


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("layout", IN_BF16)
def test_in_bf16_a_resumed_training_samples_with_the_trainers_policy(layout, on_npu, on_cpu):
    """Other kernels round differently, so other tokens are drawn: the update and the gap are compared, not the metrics.

    Merged weights round the update to bf16, a tenth of it or more; the factors of an adapter lose 0.2 % of it.
    """
    run, _ = on_npu.runs[layout]
    rows, wanted = training.metrics(run), training.metrics(on_cpu[layout])
    assert [row["step"] for row in rows] == [1, 2, 3] and "resumed" in (run / "log.txt").read_text()
    assert rows[0]["sync/checksum"] == pytest.approx(wanted[0]["sync/checksum"], rel=1e-12)  # the same start
    # The trainer's float32 weights in the sampler give 1e-2 or more. A single step has few tokens.
    assert fmean(row["rollout/logp_gap_mean"] for row in rows) < 5e-3
    low, high = {"merged": (0.1, 0.5), "adapter": (1e-3, 5e-3)}[POLICIES[layout]]
    for row, want in zip(rows, wanted, strict=True):
        assert row["actor/entropy"] == pytest.approx(want["actor/entropy"], abs=5e-3)
        assert row["sync/update_share"] == pytest.approx(1, abs=0.03)
        assert row["step"] == 1 or low < row["sync/update_error"] < high


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("layout", IN_FP32 + IN_BF16)
def test_communicators_are_built_for_the_groups_that_carry_traffic_only_and_the_npus_kernels_run(layout, on_npu):
    """None over all ranks, none for a group of one, and the buffers of limits.HCCL_BUFFER_MIB."""
    ranks, tensor, expert = world.LAYOUTS[layout]
    sizes = {
        "TENSOR_MODEL_PARALLEL_GROUP": [tensor, 64],
        "EXPERT_MODEL_PARALLEL_GROUP": [expert, 128],
        "DATA_PARALLEL_GROUP": [ranks // tensor, 50],
        "EXPERT_DATA_PARALLEL_GROUP": [ranks // expert, 50],
    }
    kernels = {"npu_rms_norm", "npu_fusion_attention", "npu_swiglu", "npu_rotary_mul", "npu_grouped_matmul"}
    # Prompts attend causally (2), and the own tokens of packed rows by a mask (0).
    kernels |= {"npu_fusion_attention, sparse_mode 0", "npu_fusion_attention, sparse_mode 2"}
    for rank in on_npu.runs[layout][1]:
        assert rank["groups"] == {name: value for name, value in sizes.items() if value[0] > 1}
        assert rank["kernels"].keys() == kernels


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("layout", IN_FP32 + IN_BF16)
def test_no_rank_sorts_whole_numbers_which_an_npu_gives_to_its_host(layout, on_npu):
    """Trainer, sampler and the comparison of routes; MindSpeed's own permute casts to float for this reason."""
    for rank in on_npu.runs[layout][1]:
        assert fake_npu.ON_HOST not in rank["kernels"]


@pytest.mark.ci
@pytest.mark.slow
def test_torch_is_patched_as_mindspeed_patches_it(on_npu, request):
    """What the stand-in replaces is what the real adaptor does, but for the calls of CUDA."""
    for rank in (rank for _, answers in on_npu.runs.values() for rank in answers):
        assert rank["megatron"] == "0.16.1"
        names = {name for name in rank["patched"] if name.startswith(("torch.", "importlib."))}
        ours = {name for name in names if not name.startswith("torch.cuda.")}
        assert ours == (set(fake_npu.mindspeed_patches()) if "MindSpeed" in request.node.name else set())


@pytest.mark.ci
@pytest.mark.slow
def test_a_whole_life_on_the_npu_mixes_no_devices(on_npu):
    """A warm start of 2 steps, 3 steps interrupted and resumed, evaluations, exports, and two layers compared.

    npu_process.py ends with 0 only if each of these does; a tensor of the CPU beside one of the NPU is an error.
    """
    folder = on_npu.folder / "life"
    (run,) = (folder / "out").glob("tiny-*")
    assert len(training.metrics(run)) == 3 and "resumed" in (run / "log.txt").read_text()
    assert {"tiny_model.json", "model.safetensors"} <= {path.name for path in (folder / "model").iterdir()}
    assert (folder / "merged" / "config.json").exists() and (folder / "adapter" / "adapter_config.json").exists()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(not MINDSPEED, reason=NO_MINDSPEED)
def test_in_a_process_with_mindspeed_vllm_samples_a_step_is_trained_and_transformers_finds_no_flash_attn(tmp_path):
    """MindSpeed's patches stay; the modules that it made up for packages that are not installed are gone.

    The engine and the trainer compute on the CPU. A gap of log-probs would show that MindSpeed has changed one of them.
    """
    model = training.make_model(tmp_path / "model", head_dim=32)  # vLLM's attention on a CPU takes no 8
    cfg = training.config(
        model, tmp_path / "out", rollout__engine="vllm", rollout__kv_cache_mib=64, train__steps=1, eval__num_questions=2
    )
    (tmp_path / "config.yaml").write_text(config.to_yaml(cfg))
    done = npu_process(str(tmp_path), MINDSPEED, "vllm")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = json.loads((tmp_path / "answer.json").read_text())
    assert found == {"patched": True, "dummies": [], "flash_attn": False}
    (row,) = training.metrics(training.only_run(cfg))
    assert row["rollout/logp_gap_mean"] < 1e-5 and row["actor/grad_norm"] > 0


# ------------------------------------------------------------------------------------------------ without Megatron


@pytest.mark.ci
def test_frozen_experts_cost_no_weight_gradient_and_a_norm_of_two_types_takes_the_formula(found):
    """One grouped product forward, one for the rows' gradient; a third only for a weight that wants one."""
    assert found["products"] == [2, 3] and found["norms"] == 0


@pytest.mark.ci
def test_what_hardware_or_start_up_refuses(found):
    assert len(found["refused"]) == 12
    for words, said in found["refused"].items():
        assert words in said, (words, said)


@pytest.mark.ci
def test_device_py_chooses_the_npu_its_buffers_and_its_deterministic_variables(found):
    """Groups without traffic get no options. MindSpeed's patches are in force, so that their faults would show."""
    assert found["auto"] == "npu" and found["buffers"] == [{"hccl_buffer_size": 64}, None]
    expected = {
        "HCCL_DETERMINISTIC": "true",
        "LCCL_DETERMINISTIC": "1",
        "CLOSE_MATMUL_K_SHIFT": "1",
        "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
        "ATB_LLM_LCOC_ENABLE": "0",
    }
    assert found["variables"] == expected and found["deterministic"]
    assert found["patches"] == {"write lost": True, "no error": True, "named": True}


# --------------------------------------------------------------------------------------------------- the real torch_npu
# Every operator of kernels.py and model/packing.py with the real torch_npu, at the sizes of the shipped layouts.
#
# The tensors have no data (FakeTensorMode) and CANN is a stub (cann_stub.py), so no NPU is needed. This shows that the
# names, arguments and shapes of the calls are right, forward and backward, and that the device starts. It does not show
# what the kernels compute, how fast they are, or which tensors a device refuses; for that, the stand-in has the
# documented rules.
#
# run_tests.sh --all installs the torch_npu that belongs to the torch of requirements/cpu.txt (126 MB). For the pinned
# versions of requirements/npu.txt, in an environment of its own, which must not contain torch_npu itself, because
# `import torch` would then import it (aarch64: torch==2.10.0 without --index-url):
#
#     python3 -m venv .venv-npu-schema
#     pip=".venv-npu-schema/bin/python -m pip install --no-deps"
#     $pip --index-url https://download.pytorch.org/whl/cpu torch==2.10.0+cpu
#     $pip -r <(grep -v ^torch== requirements/cpu.txt) -r requirements/test.txt
#     $pip --target .cache/torch_npu-2.10.0.post4 torch-npu==2.10.0.post4
#     export TORCH_NPU_DIR=.cache/torch_npu-2.10.0.post4
#     .venv-npu-schema/bin/python -m pytest --all tests/machines/test_npu.py
#
# The tests passed with both on x86_64. (PyTorch's index could not be reached: torch 2.10.0 was the CUDA build from
# PyPI, with a stub of CUDA's libraries.)

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
def schema(torch_npu_environment: dict[str, str]) -> dict:
    """What npu_schema.py printed."""
    script = Path(__file__).parents[1] / "support" / "npu_schema.py"
    shipped = run_scripts.shipped()
    layouts = {name: shipped[name] for name in asked(name if name in FEW else nightly(name) for name in shipped)}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(layouts)],
        env=torch_npu_environment,
        cwd=run_scripts.ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"layouts": list(layouts)}


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_torch_npu_is_the_one_that_belongs_to_torch(schema) -> None:
    torch_version, npu_version = (version.split("+")[0].split(".post")[0] for version in schema["versions"])
    assert torch_version == npu_version


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_every_call_is_accepted_and_gives_the_shapes_and_types_of_the_cpu(schema) -> None:
    for row in schema["operators"]:
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


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_every_layout_has_every_operator_and_experts_without_rows_and_single_experts_are_among_the_calls(
    schema,
) -> None:
    assert set(FEW) <= set(schema["layouts"])
    for layout in schema["layouts"]:
        names = {row["operator"].split()[0].rstrip(",") for row in schema["operators"] if layout in row["layouts"]}
        quantised = {"quantised_grouped_mm"} if layout.startswith("run_2npu.sh") else set()
        assert names == OPERATORS | quantised, layout
    names = {row["operator"] for row in schema["operators"]}
    for matrix in ("fc1", "fc2", "LoRA A", "LoRA B"):
        assert {f"grouped_mm ({matrix}), {use}" for use in ("no rows", "one expert", "int32 counts")} <= names
    assert {"rotary, prefill", "rotary, decode", "weighted_swiglu, no rows"} <= names


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_sizes_are_those_of_a_rank(schema) -> None:
    """Qwen3-30B-A3B on TP4 EP16: 8 of 128 experts, 8 of 32 heads and 1 of 4 key/value heads on a rank."""
    mine = [row for row in schema["operators"] if "run_16npu.sh tp4_ep16" in row["layouts"]]
    sizes = {row["operator"]: row["sizes"] for row in mine}
    assert sizes["grouped_mm (fc1)"]["weight"] == [8, 2048, 1536]
    assert sizes["grouped_mm (fc2)"]["weight"] == [8, 768, 2048]
    assert sizes["causal_attention"]["query"][1::2] == [8, 128] and sizes["causal_attention"]["key"][1::2] == [1, 128]
    assert sizes["Packing.attention"]["query"][1:] == [8, 128]


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_a_wrong_keyword_is_found(schema) -> None:
    assert isinstance(schema["faults"]["group_type"], list)
    assert "Unknown keyword argument 'group_typ'" in schema["faults"]["group_typ"]


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_stand_in_of_the_other_tests_has_no_name_keyword_or_default_that_torch_npu_lacks(schema) -> None:
    assert schema["stand-in"] == []


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_device_starts_up_and_megatron_is_imported_on_the_real_package(schema) -> None:
    started = schema["start-up"]
    assert started.pop("rank 16").startswith("LOCAL_RANK: 16 needs 17 npu devices on this host, which has 16")
    assert started == {"auto": "npu", "peak memory": 0.0, "cuda devices": 16, "megatron": True}
    assert schema["buffers"] == {name: {"hccl_buffer_size": mib} for name, mib in HCCL_BUFFER_MIB.items()}
