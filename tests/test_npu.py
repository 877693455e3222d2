"""`device: npu` on a stand-in for the device (fake_npu.py) against cpu and gloo: the trainer's whole path but CANN.

The stand-in patches torch as MindSpeed's adaptor does. Not covered: the kernels' numerics, their speed and memory,
HCCL's timeouts, and anything asynchronous. With MINDSPEED_DIR, a checkout of MindSpeed core_r0.16.0, or of
2.2.0_core_r0.12.1 (then with Megatron 0.12.1), all trainings run under the real adaptor too:

    MINDSPEED_DIR=../MindSpeed bash run_tests.sh tests/test_npu.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fake_npu
import pytest
import training
import world
from launched import ROOT

import config

FP32 = {  # layout: changes
    "TP1": {"rollout__top_p": 0.9},
    "TP2_EP2": {"model__recompute": True},
    "TP2_EP2_DP2": {"aqn__schedule": "constant", "replay__mode": "r3", "replay__reference": "native"},
}
POLICIES = {"DP2": "merged", "EP2": "adapter"}  # layout: rollout.sync in bf16
RUNS = FP32 | {layout: {"model__dtype": "bf16", "rollout__sync": policy} for layout, policy in POLICIES.items()}
MINDSPEED = os.environ.get("MINDSPEED_DIR", "")
OLD_MINDSPEED = bool(MINDSPEED) and "__version__ = '0.12" in (Path(MINDSPEED) / "setup.py").read_text()
NO_MINDSPEED = "MINDSPEED_DIR names no checkout of MindSpeed"
FIVE = {
    "train__steps": 5, "train__checkpoint_every": 2, "parallel__timeout_seconds": 300,
    "optim__lr": 1e-3, "optim__eps": 1e-4,  # AdamW divides by small numbers: rounding must not grow in five steps
}  # fmt: skip


def settings(layout: str, model: Path, out: Path) -> config.Config:
    return training.in_layout(training.config(model, out, **FIVE, **RUNS[layout]), layout)


def train_on_npu(model: Path, folder: Path, mindspeed: str) -> dict[str, tuple[Path, list[dict]]]:
    """By layout: the run folder of an interrupted and resumed training, and each rank's answers."""
    runs = {layout: settings(layout, model, folder / layout / "out") for layout in RUNS}
    for layout, cfg in runs.items():
        (folder / layout).mkdir(parents=True)
        (folder / layout / "config.yaml").write_text(config.to_yaml(cfg.model_copy(update={"device": "npu"})))
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    if mindspeed and OLD_MINDSPEED:
        paths.insert(0, str((ROOT / os.environ.get("MEGATRON_0_12_DIR", ".cache/megatron-core-0.12.1")).resolve()))
    script = ROOT / "tests" / "support" / "npu_train.py"
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *([mindspeed] if mindspeed else [])],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}, cwd=ROOT,
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    found = {}
    for layout, cfg in runs.items():
        answers = [folder / layout / f"answer-{rank}" for rank in range(world.LAYOUTS[layout][0])]
        found[layout] = (training.only_run(cfg), [json.loads(path.read_text()) for path in answers])
    return found


def assert_equal_to_1e_6(found: Path, expected: Path) -> None:
    rows, wanted = training.metrics(found), training.metrics(expected)
    assert [row["step"] for row in rows] == [row["step"] for row in wanted] == list(range(5))
    for row, want in zip(rows, wanted, strict=True):
        assert row.keys() == want.keys()
        gaps = {key: abs(row[key] - want[key]) / max(1, abs(want[key])) for key in want}
        apart = {key: (row[key], want[key]) for key, gap in gaps.items() if not gap <= 1e-6}
        assert not apart, (row["step"], apart)
    for name in ("eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl"):
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return training.make_model(tmp_path_factory.mktemp("model") / "qwen3_moe", num_experts=4)  # the stand-in is slow


@pytest.fixture(scope="module")
def on_cpu(model, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("cpu")
    return training.run_all({layout: (layout, settings(layout, model, out / layout)) for layout in RUNS})


ADAPTORS = [
    pytest.param("", id="stand-in"),
    pytest.param(MINDSPEED, id="MindSpeed", marks=pytest.mark.skipif(not MINDSPEED, reason=NO_MINDSPEED)),
]


@pytest.fixture(scope="module", params=ADAPTORS)
def on_npu(request, model, tmp_path_factory) -> dict[str, tuple[Path, list[dict]]]:
    return train_on_npu(model, tmp_path_factory.mktemp("npu"), request.param)


@pytest.fixture(params=list(RUNS))
def layout(request) -> str:
    return request.param


@pytest.mark.slow
@pytest.mark.parametrize("layout", FP32)
def test_a_resumed_training_on_the_npu_has_the_cpus_metrics(layout, on_npu, on_cpu):
    run, _ = on_npu[layout]
    assert_equal_to_1e_6(run, on_cpu[layout])
    log = (run / "log.txt").read_text()
    assert "resumed" in log and "device memory: at most 1.00 GiB in update; planned: " in log
    timing = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
    assert {row["perf/peak_device_gib"] for row in timing} == {1.0}  # what lies outside of torch's pool there


@pytest.mark.slow
@pytest.mark.parametrize("layout", POLICIES)
def test_in_bf16_a_resumed_training_samples_with_the_trainers_policy(layout, on_npu, on_cpu):
    """Other kernels round differently, so other tokens are drawn: the update and the gap are compared, not the metrics.

    Merged weights round the update to bf16, a tenth of it or more; the factors of an adapter lose 0.2 % of it.
    """
    run, _ = on_npu[layout]
    rows, wanted = training.metrics(run), training.metrics(on_cpu[layout])
    assert [row["step"] for row in rows] == list(range(5)) and "resumed" in (run / "log.txt").read_text()
    assert rows[0]["sync/checksum"] == pytest.approx(wanted[0]["sync/checksum"], rel=1e-12)  # the same start
    low, high = {"merged": (0.1, 0.5), "adapter": (1e-3, 5e-3)}[POLICIES[layout]]
    for row, want in zip(rows, wanted, strict=True):
        assert row["rollout/logp_gap_mean"] < 5e-3  # the trainer's float32 weights in the sampler give 1e-2 or more
        assert row["actor/entropy"] == pytest.approx(want["actor/entropy"], abs=5e-3)
        assert row["sync/update_share"] == pytest.approx(1, abs=0.03)
        assert row["step"] == 0 or low < row["sync/update_error"] < high


@pytest.mark.slow
def test_communicators_are_built_for_the_groups_that_carry_traffic_only(layout, on_npu):
    """None over all ranks, none for a group of one, and the buffers of device.HCCL_BUFFER_MIB."""
    ranks, tensor, expert, _ = world.LAYOUTS[layout]
    sizes = {
        "TENSOR_MODEL_PARALLEL_GROUP": (tensor, 64),
        "EXPERT_MODEL_PARALLEL_GROUP": (expert, 128),
        "DATA_PARALLEL_GROUP": (ranks // tensor, 50),
        "EXPERT_DATA_PARALLEL_GROUP": (ranks // expert, 50),
    }
    for rank in on_npu[layout][1]:
        found = {group["desc"]: (len(group["ranks"]), group["buffer"]) for group in rank["groups"]}
        assert found == {name: value for name, value in sizes.items() if value[0] > 1}


@pytest.mark.slow
def test_the_npus_kernels_are_what_ran(layout, on_npu):
    kernels = {"npu_rms_norm", "npu_fusion_attention", "npu_swiglu", "npu_rotary_mul", "npu_grouped_matmul"}
    # Prompts attend causally (2), and the own tokens of packed rows by a mask (0).
    kernels |= {"npu_fusion_attention, sparse_mode 0", "npu_fusion_attention, sparse_mode 2"}
    assert all(rank["kernels"].keys() == kernels for rank in on_npu[layout][1])


@pytest.mark.slow
def test_torch_is_patched_as_mindspeed_patches_it(on_npu, request):
    """What the stand-in replaces is what the real adaptor does, but for the calls of CUDA."""
    for rank in (rank for _, answers in on_npu.values() for rank in answers):
        assert rank["megatron"] == ("0.12.1" if OLD_MINDSPEED and "MindSpeed" in request.node.name else "0.16.1")
        names = {name for name in rank["patched"] if name.startswith(("torch.", "importlib."))}
        ours = {name for name in names if not name.startswith("torch.cuda.")}
        assert ours == (set(fake_npu.mindspeed_patches()) if "MindSpeed" in request.node.name else set())


# ------------------------------------------------------------------------------------------------ without Megatron


@pytest.fixture(scope="module")
def found() -> dict:
    """What npu_operations.py printed."""
    command = [sys.executable, str(Path(__file__).parent / "support" / "npu_operations.py")]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_stand_in_patches_torch_as_mindspeed_does(found):
    assert found["patches"] == {"write lost": True, "no error": True, "named": True}


def test_auto_is_the_npu_where_there_is_one(found):
    assert found["auto"] == "npu"


def test_operations_and_their_gradients_are_the_cpus(found):
    assert len(found["apart"]) == 14
    for name, gaps in found["apart"].items():
        assert max(gaps) < 2e-6, name


def test_frozen_experts_cost_no_weight_gradient(found):
    """One grouped product forward, one for the rows' gradient; a third only for a weight that wants one."""
    assert found["calls"]["frozen"] == 2 and found["calls"]["trained"] == 3


def test_a_norm_of_two_types_does_not_reach_the_kernel(found):
    assert found["calls"]["norms"] == 0


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        ("two devices", "at least two devices, npu:0 and cpu"),
        ("float64 reduction", "unsupported data type torch.float64"),
        ("CPU tensor over hccl", "No backend type associated with device type cpu"),
        ("npu tensor over the world", "No backend type associated with device type npu"),
        ("numpy", "can't convert npu:0"),
        ("own mask", "not the causal mask"),
        ("Megatron first", "RuntimeError: device.adapt: megatron.core is imported already"),
        ("transformers first", "RuntimeError: device.adapt: transformers is imported already"),
        (
            "third of two devices",
            "InputError: LOCAL_RANK: 2 needs 3 npu devices on this host, found 2 (ASCEND_RT_VISIBLE_DEVICES is 4,5)",
        ),
        ("contradiction", "InputError: train.deterministic: true, but HCCL_DETERMINISTIC is false"),
        ("grouped: inner sizes", "npu_grouped_matmul: found (4, 8) float32, (2, 6, 8) float32; needed: 2-D x, 3-D"),
        ("grouped: two types", "found (4, 8) bfloat16, (2, 8, 8) float32; needed: x and weight of one type"),
        ("grouped: int32 list", "found (2,) int32; needed: the sizes of 2 to 1024 groups in int64"),
        ("grouped: sizes of other groups", "found (3, 8, 8) float32, (2,) int64; needed: a matrix for each group"),
        ("grouped: 1025 groups", "found (1025,) int64; needed: the sizes of 2 to 1024 groups"),
        ("grouped: width of 65536", "needed: widths below 65536"),
        ("grouped: sum of the sizes", "npu_grouped_matmul: [2, 2] of torch.Size([5, 8])"),  # the device alone sees it
        (
            "norm: another weight",
            "npu_rms_norm: found (4, 8) float32, (4,) float32; needed: x of 2 axes or more, a weig",
        ),
        ("norm: one axis", "npu_rms_norm: found (8,) float32, (8,) float32; needed: x of 2 axes"),
        ("swiglu: odd width", "npu_swiglu: found (4, 7) float32; needed: two halves of one width"),
        ("attention: two types", "npu_fusion_attention: found (1, 4, 4, 8) bfloat16, (1, 4, 4, 8) float32, (1"),
        (
            "attention: head size of 769",
            "(1, 4, 4, 769) float32; needed: a head size up to 768",
        ),
        ("attention: 257 heads", "(1, 257, 4, 8) float32; needed: a head size up to 768; up to 256 heads"),
        ("attention: 4 heads on 3", "found (1, 4, 4, 8) float32, (1, 3, 4, 8) float32; needed: a head size"),
        ("attention: other batch", "needed: one type, batch and head size; key and value of one shape"),
        ("attention: no rows", "needed: a row or more, of 1 to 2^20 tokens"),
        ("mask: fp32", "(1, 1, 4, 4) float32; needed: a bool mask of (b, 1, queries, keys)"),
        ("mask: of other keys", "(1, 1, 4, 3) bool; needed: a bool mask of (b, 1, queries, keys)"),
        ("mask: a query without keys", "npu_fusion_attention: a query sees no key"),  # the device alone sees it
        (
            "rotary: odd head size",
            "npu_rotary_mul: found (4, 1, 2, 7) float32; needed: heads of an even size",
        ),
        ("rotary: head size of 896", "found (4, 1, 2, 896) float32; needed: heads of an even size below 896"),
        ("rotary: angles of each head", "needed: x of four axes; angles of its type, with size 1 for batch and heads"),
        ("rotary: two types", "found (4, 1, 2, 8) bfloat16, (4, 1, 1, 8) float32, (4, 1, 1, 8) float32; needed: x of"),
        ("rotary: batch of 1000", "found (4, 1000, 2, 8) float32; needed: a batch and a number of heads below 1000"),
        ("rotary: 1000 heads", "found (4, 1, 1000, 8) float32; needed: a batch and a number of heads below 1000"),
    ],
)
def test_what_hardware_or_start_up_refuses(attempt, words, found):
    assert words in found["refused"][attempt]


def test_deterministic_sets_the_npus_variables_and_torchs_switch(found):
    expected = {
        "HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1",
        "ATB_MATMUL_SHUFFLE_K_ENABLE": "0", "ATB_LLM_LCOC_ENABLE": "0",
    }  # fmt: skip
    assert found["variables"] == expected and found["deterministic"]


def test_groups_without_traffic_get_no_options(found):
    assert found["buffers"] == {"tp": {"hccl_buffer_size": 64}, "pp": None}
