"""The dry run counts what a real run allocates, agrees with the plan on every layout, and finds planted faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing
from collections.abc import Callable

import pytest
import torch
import training
import world
from launched import ROOT
from live_bytes import LiveBytes

import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import preflight
from config import load_config
from device import StepTimer
from knobs import ModelConfig
from learner import Learner
from plan.dry_run_meter import Meter
from rollout import Rollout
from tripwires import Heartbeat

LAYOUTS = [  # configuration, ranks, tensor, expert, expert_tensor, other changes
    ("qwen3", 16, 4, 16, 1, []),
    ("qwen3", 16, 4, 4, 1, []),
    ("qwen3", 16, 2, 8, 1, []),
    ("qwen3", 12, 4, 4, 1, []),
    ("qwen3", 12, 1, 4, 1, ["loss.entropy_coef=0.01"]),
    ("qwen3", 8, 4, 8, 1, ["model.recompute=false"]),
    ("qwen3", 32, 4, 16, 1, ["replay.mode=r2"]),
    ("qwen3", 16, 2, 8, 2, ["lora.dropout=0.1"]),
    ("qwen3", 16, 2, 8, 1, ["model.quantisation=int4", "model.quantised=[experts,attention]"]),
    ("qwen15_moe", 8, 4, 4, 1, []),
    ("qwen15_moe", 8, 2, 4, 1, ["replay.mode=r3"]),
    ("qwen15_moe", 6, 2, 3, 1, ["model.recompute=false"]),
    ("qwen15_moe", 8, 2, 2, 2, []),
    ("qwen3", 16, 4, 16, 1, ["rollout.max_new_tokens=16384", "optim.tokens_per_micro_batch=20480"]),
    ("qwen15_moe", 6, 1, 3, 1, ["lora.targets=[linear_qkv,linear_proj,linear_fc1,linear_fc2,router]"]),
]


def case(name: str, ranks: int, tensor: int, expert: int, expert_tensor: int, changes: list[str], **more) -> dict:
    shared = name == "qwen3" and expert == ranks and expert_tensor == 1
    overrides = [
        f"parallel.tensor={tensor}", f"parallel.expert={expert}", f"parallel.expert_tensor={expert_tensor}",
        f"rollout.tensor={tensor}", f"rollout.expert_parallel={str(shared).lower()}", "aqn.schedule=off", *changes,
    ]  # fmt: skip
    return {"config": f"configs/{name}.yaml", "overrides": overrides, "ranks": ranks, "rank": 0, "layers": 2} | more


def dry_runs(cases: list[dict], torch_npu: dict[str, str] | None = None) -> list[dict]:
    """``torch_npu``: the variables with which the real package is found; else the dry run's own operators are used."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = torch_npu or os.environ | {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "dry_runs.py"), *(["torch_npu"] if torch_npu else [])]
    done = subprocess.run(
        command, env=environment | {"OMP_NUM_THREADS": "1"}, cwd=ROOT,
        input="\n".join(map(json.dumps, cases)), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def apart(found: dict) -> dict[str, tuple[float, float]]:
    return {row["what"]: (row["planned"], row["found"]) for row in found["compared"] if not row["agrees"]}


@pytest.mark.slow
def test_the_plan_agrees_with_the_dry_run_on_every_layout():
    """Parameters, gradients and moments to the byte; all phases, operations and traffic within 10 %."""
    for layout, found in zip(LAYOUTS, dry_runs([case(*layout) for layout in LAYOUTS]), strict=True):
        assert "error" not in found, (layout, found)
        assert not apart(found), (layout, apart(found))
        assert {"load", "push", "reference", "forward", "backward", "update", "save"} <= found["found"]["phases"].keys()


def test_the_dry_run_loads_every_format_as_the_plan_counts_it():
    """One layer, short rows, two experts a rank; attention is not split, because int8 has one scale for a whole row."""
    small = ["rollout.max_new_tokens=96", "data.max_prompt_tokens=32", "optim.tokens_per_micro_batch=128"]
    formats = [f for f in typing.get_args(ModelConfig.model_fields["quantisation"].annotation) if f != "none"]
    quantised = "model.quantised=[experts,attention]"
    cases = [
        case("qwen3", 64, 1, 64, 1, [f"model.quantisation={form}", quantised, *small], layers=1) for form in formats
    ]
    assert {"int8", "int4", "nvfp4"} <= set(formats)
    for asked, found in zip(cases, dry_runs(cases), strict=True):
        assert "error" not in found, (asked["overrides"], found)
        exact = {row["what"]: (row["planned"], row["found"]) for row in found["compared"]}["weights"]
        assert exact[0] == exact[1], (asked["overrides"], exact)  # so few tokens say nothing about activations
        assert {"load", "push", "forward", "backward", "update", "save"} <= found["found"]["phases"].keys()


@pytest.fixture(scope="module")
def faults() -> dict[str, dict]:
    names = ["", "kept_alive", "wrong_group", "fp32", "inner_size", "int32"]
    return dict(zip(names, dry_runs([case(*LAYOUTS[0], fault=name) for name in names]), strict=True))


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        ("kept_alive", "alive after it"),
        ("wrong_group", "forward: reduce_scatter_base over data"),
        ("fp32", "activations of forward and backward"),
    ],
)
def test_a_planted_fault_is_found(faults, fault, seen):
    assert not apart(faults[""])
    assert seen in apart(faults[fault]), apart(faults[fault])


@pytest.mark.parametrize(("fault", "message"), [("inner_size", "the same inner size"), ("int32", "groups in int64")])
def test_a_call_that_the_device_refuses_is_refused(faults, fault, message):
    assert message in faults[fault]["error"]


def test_a_rank_of_the_last_place_holds_as_much_as_the_first():
    first, last = dry_runs([case(*LAYOUTS[0]), case(*LAYOUTS[0], **{"rank": 15})])
    sizes = [{name: phase["peak_bytes"] for name, phase in one["found"]["phases"].items()} for one in (first, last)]
    assert sizes[0] == sizes[1]


@pytest.mark.npu_schema
def test_the_real_torch_npu_keeps_the_bytes_of_the_stand_in(torch_npu_environment):
    """plan/dry_run_device.py against the package: what its operators return, and what autograd saves of them."""
    cases = [case(*LAYOUTS[0]), case(*LAYOUTS[5]), case(*LAYOUTS[11])]
    for ours, theirs in zip(dry_runs(cases), dry_runs(cases, torch_npu_environment), strict=True):
        assert "error" not in theirs, theirs
        for name, phase in ours["found"]["phases"].items():
            assert phase["peak_bytes"] == pytest.approx(theirs["found"]["phases"][name]["peak_bytes"], rel=1e-3), name


def metered(parallel: parallel_setup.Parallel, cfg) -> tuple[int, int]:
    """The peak of a real update beyond what was there before: by the meter, and by the allocator."""
    meter = Meter("cpu", answers=False)
    with meter, meter.phase("update"):
        update = prepared(parallel, cfg)
        before = meter.held()
        meter.enter("measured")
        update()
    found = meter.peak("measured").bytes - before
    update = prepared(parallel, cfg)
    with LiveBytes() as live:
        update()
    return found, live.peak


def prepared(parallel: parallel_setup.Parallel, cfg) -> Callable[[], object]:
    """An update of a tiny model, ready to run."""
    arch = hf_config.planned(load_config("configs/tiny_cpu.yaml"))[0]
    model = model_megatron.build(arch, parallel, dtype=torch.float32, recompute=cfg.model.recompute)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.05)
    learner = Learner(cfg, arch, parallel, model, lora_megatron.attach(model, cfg.lora, parallel, 0), pad_token=0)
    prompts, group = cfg.rollout.prompts_per_step, cfg.rollout.group_size
    sequences, new = prompts * group, cfg.rollout.max_new_tokens
    batch = Rollout(
        prompts=[[5, 6, 7, 8]] * prompts, tokens=torch.full((sequences, new), 3),
        logp=torch.full((sequences, new), -6.0), lengths=[new] * sequences,
        truncated=torch.zeros(sequences, dtype=torch.bool), rewards=torch.rand(prompts, group),
        parsable=torch.ones(prompts, group),
    )  # fmt: skip
    return lambda: learner.update(batch, [], torch.ones(sequences), 0, StepTimer(Heartbeat(0, 0), 0, parallel.device))


def test_a_phase_without_operations_holds_what_is_there() -> None:
    meter = Meter("cpu", answers=False)
    with meter:
        with meter.phase("before"):
            kept, freed = torch.ones(1000), torch.ones(500)
            del freed
            kept += 1  # what is freed counts as alive until the next operation
        with meter.phase("empty"):
            pass
        with meter.phase("after"):
            kept += 1
    assert meter.peak("before").bytes == 6000 and meter.peak("empty").bytes == meter.peak("after").bytes == 4000


@pytest.mark.parametrize("recompute", [False, True])
def test_the_meter_counts_what_the_allocator_gives(recompute, tmp_path):
    cfg = training.config(
        tmp_path, tmp_path, model__recompute=recompute, data__max_prompt_tokens=4, rollout__max_new_tokens=60,
        rollout__group_size=4, optim__tokens_per_micro_batch=512,
    )  # fmt: skip
    ((meter, allocator),) = world.in_layouts(["TP1"], metered, cfg)["TP1"]
    assert meter == pytest.approx(allocator, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "code", "piece"),
    [
        (["configs/qwen3.yaml", "--dry-run", "--rank", "16"], 2, "--rank: found 16; needed: 0 to 15"),
        (["configs/qwen3.yaml", "--dry-run", "--ranks", "0"], 2, "--ranks: found 0; needed: 1 to"),
        (["configs/qwen3.yaml", "--dry-run", "parallel.expert=5"], 2, "parallel.expert"),
        (["configs/qwen3.yaml", "--dry-run", "device=cuda"], 2, "needed: a build with it, or device=npu or cpu"),
        (["configs/none.yaml", "--dry-run"], 2, "configs/none.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments, code, piece, capfd):
    assert preflight.main(arguments) == code
    printed = capfd.readouterr()
    assert piece in printed.err and "Traceback" not in printed.err and not printed.out


def test_rows_that_torchs_grouped_kernel_does_not_take_are_split_by_the_planned_counts(capfd) -> None:
    """Two fp32 columns are 8 bytes; the kernel needs 16."""
    assert preflight.main(["configs/tiny_cpu.yaml", "--dry-run", "lora.rank=2"]) == 0, capfd.readouterr().err


def test_the_json_of_the_command_says_which_figures_agree(capfd):
    assert preflight.main(["configs/tiny_cpu.yaml", "--dry-run", "--json", "rollout.max_new_tokens=32"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ranks"] == 2 and found["phases"]["backward"]["flops"] > found["phases"]["forward"]["flops"] > 0
    assert all(row["agrees"] for row in found["compared"])
