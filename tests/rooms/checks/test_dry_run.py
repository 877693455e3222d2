"""The dry run counts what a real run allocates, agrees with the plan on every layout, and finds planted faults."""

import json
import os
import subprocess
import sys
from collections import Counter

import launched
import pytest
import torch
from source import ROOT
from tiers import asked, ci, nightly

import preflight
from checks import dry_run
from checks.dry_run_meter import Meter, Phase
from checks.dry_run_report import Compared, DryRun, as_text

EP16 = ("qwen3", 16, 4, 16)  # configuration, ranks, tensor, expert, other changes
R3 = ("qwen15_moe", 6, 2, 3, "model.recompute=false", "replay.mode=r3")
TAUGHT = ci(("qwen3", 16, 4, 16, "loss.teacher=out/teacher"))
LAYOUTS = [
    EP16,
    ci(R3),
    TAUGHT,
    nightly(("qwen3", 16, 4, 4, "loss.entropy_coef=0.01")),
    nightly(("qwen3", 32, 1, 16, "replay.mode=r2")),
    nightly(("qwen3", 16, 2, 8, "model.quantisation=int4")),
    nightly(("qwen3", 16, 4, 16, "rollout.max_new_tokens=16384", "optim.tokens_per_micro_batch=20480")),
    nightly(("qwen15_moe", 6, 1, 3, "lora.targets=[linear_qkv,linear_proj,linear_fc1,linear_fc2,router]")),
    nightly(("qwen3", 16, 4, 16, "rollout.staleness=2")),
]
GPU = ("qwen3", 8, 4, 8)
ALONE = "rollout.expert_parallel=false"
ON_CUDA = [  # run_8gpu.sh and run_1gpu.sh
    ci(GPU),
    nightly(("olmoe", 1, 1, 1)),
    nightly(("qwen3", 8, 4, 4)),
    nightly(("qwen3", 8, 2, 8)),
    nightly(("qwen15_moe", 1, 1, 1, "rollout.kv_cache_mib=9216")),
    nightly(("qwen3", 1, 1, 1, "model.quantisation=int4")),
]
RECOMPUTE = "model.recompute=true"
AT_TP2 = ("qwen3", 16, 2, 16)  # where the rows of experts, and not the logits as with TP4, are the fullest moment
FAULTS = [  # fault, where it is planted, what is then not as planned
    ci("kept_alive", (*EP16, RECOMPUTE), "alive after it"),
    nightly("wrong_group", (*EP16, RECOMPUTE), "forward: reduce_scatter_base over data"),
    nightly("fp32", AT_TP2, "reference and old policy"),
]
PHASES = {"load", "push", "forward", "backward", "update", "save"}


def case(name: str, ranks: int, tensor: int, expert: int, *changes: str, **more) -> dict:
    shared = name == "qwen3" and expert == ranks
    overrides = [
        f"parallel.tensor={tensor}",
        f"parallel.expert={expert}",
        f"rollout.tensor={tensor}",
        f"rollout.expert_parallel={str(shared).lower()}",
        "aqn.schedule=off",
        *changes,
    ]
    return {"config": f"configs/{name}.yaml", "overrides": overrides, "ranks": ranks, "rank": 0, "layers": 2} | more


def int4() -> dict:
    """One layer, short rows, two experts a rank."""
    small = ["rollout.max_new_tokens=96", "data.max_prompt_tokens=32", "optim.tokens_per_micro_batch=128"]
    return case("qwen3", 64, 1, 64, "model.quantisation=int4", *small, layers=1)


def dry_runs(asked: list[dict], kind: str = "npu", torch_npu: dict[str, str] | None = None) -> list[dict]:
    """``torch_npu``: the variables with which the real package is found; else the dry run's own operators are used."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    environment = torch_npu or os.environ | {"PYTHONPATH": paths, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, str(ROOT / "tests" / "support" / "dry_runs.py"), "torch_npu" if torch_npu else kind]
    done = subprocess.run(
        command,
        env=environment | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        input="\n".join(map(json.dumps, asked)),
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def found() -> dict[str, dict]:
    """The dry runs of all cases, from one process."""
    wanted = {layout: case(*layout) for layout in asked(LAYOUTS)}
    wanted |= {fault: case(*where, fault=fault) for fault, where, _ in asked(FAULTS)}
    wanted |= {name: int4() for name in asked([ci("int4")])}
    wanted |= {name: case(*EP16, rank=15) for name in asked([nightly("last rank")])}
    wanted |= {name: case(*GPU, ALONE) for name in asked([ci("as a GPU")])}
    return dict(zip(wanted, dry_runs(list(wanted.values())), strict=True))


@pytest.fixture(scope="module")
def on_cuda() -> dict[str, dict]:
    """The same on a GPU."""
    wanted = {layout: case(*layout, "device=cuda", ALONE) for layout in asked(ON_CUDA)}
    return dict(zip(wanted, dry_runs(list(wanted.values()), "cuda"), strict=True))


def apart(found: dict) -> dict[str, tuple[float, float]]:
    return {row["what"]: (row["planned"], row["found"]) for row in found["compared"] if not row["agrees"]}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_plan_agrees_with_the_dry_run(layout, found):
    """Parameters, gradients and moments to the byte; all phases, operations and traffic within 10 %."""
    assert not apart(found[layout]), found[layout]
    assert PHASES | {"reference"} <= found[layout]["phases"].keys() == found[layout]["launches"].keys()
    compared = {row["what"] for row in found[layout]["compared"]}
    assert {"load", "push", "forward and backward", "update at 1.5", "weights", "backward: expert exchange"} <= compared


@pytest.mark.ci
def test_the_dry_run_makes_the_pass_of_a_teacher_and_holds_its_factors(found):
    (layout,) = TAUGHT.values
    rows = {row["what"]: row["found"] for row in found[layout]["compared"]}
    assert "teacher" in found[layout]["phases"] and "teacher" not in found[EP16]["phases"]
    assert rows["teacher"] == rows["adapters"] > 0


@pytest.mark.ci
def test_the_dry_run_loads_int4_experts_as_the_plan_counts_them(found):
    planned, loaded = {row["what"]: (row["planned"], row["found"]) for row in found["int4"]["compared"]}["weights"]
    assert planned == loaded  # so few tokens say nothing about activations
    assert PHASES <= found["int4"]["phases"].keys()


@pytest.mark.parametrize(("fault", "where", "words"), FAULTS)
def test_a_planted_fault_is_found(fault, where, words, found):
    assert any(what.startswith(words) for what in apart(found[fault])), apart(found[fault])


def test_launches_of_a_merge_and_of_a_push_do_not_grow_with_the_experts(found):
    """A merge is a product, a scaling, a sum and a cast. A pass merges attention's two weights; a push has merged the
    two stacks of experts in the engine's memory, with which the trainer computes."""
    launches, layers = found[EP16]["launches"], 2
    merging = launches["old policy"] - launches["reference"]
    assert layers * 2 * 4 <= merging < layers * 2 * 4 + 10  # the mask of this micro-batch is made in that pass
    assert launches["push"] <= layers * 58 + 12  # 12 once a push: less than 60 a layer for 48 layers


@pytest.mark.slow
@pytest.mark.parametrize("layout", ON_CUDA, ids=str)
def test_the_plan_agrees_with_the_dry_run_of_a_gpu(layout, on_cuda):
    assert not apart(on_cuda[layout]), on_cuda[layout]
    assert on_cuda[layout]["device"].startswith("cuda: its branches of hardware/kernels.py on a simulated device")


@pytest.mark.ci
def test_a_gpu_computes_what_an_npu_computes_with_few_more_launches(on_cuda, found):
    """Formulas take the place of npu_rms_norm, npu_rotary_mul and npu_swiglu; nothing is launched for each expert."""
    gpu, npu = on_cuda[GPU], found["as a GPU"]
    for name in ("reference", "forward", "backward"):
        # A GPU's count takes the prompt of one token, and a token of filler, for queries that see a whole row.
        assert gpu["phases"][name]["flops"] == pytest.approx(npu["phases"][name]["flops"], rel=1e-3), name
        assert npu["launches"][name] < gpu["launches"][name] < 1.5 * npu["launches"][name], name


def test_a_pass_exchanges_three_tensors_with_the_experts_in_each_layer(found):
    """Rows and their probabilities go to the experts, and rows come back."""
    sent = found[EP16]["phases"]["forward"]["collectives"]
    ((count, size),) = [(one["count"], one["bytes"]) for one in sent if one["operator"] == "alltoall_base"]
    assert count == 2 * 3 and size > 0


def test_views_and_new_memory_launch_nothing():
    with Meter("cpu") as meter, meter.phase("here"):
        x = torch.empty(4, 4).t().reshape(16)[None]
        x.fill_(1).add(1).unbind()
    assert meter.phases["here"].launches == 3  # fill_, the copy of reshape, add


@pytest.mark.nightly
def test_a_rank_of_the_last_place_holds_as_much_as_the_first(found):
    first, last = (
        {name: phase["peak_bytes"] for name, phase in found[which]["phases"].items()} for which in (EP16, "last rank")
    )
    assert first == last


@pytest.mark.npu_schema
@pytest.mark.nightly
def test_the_real_torch_npu_keeps_the_bytes_of_the_stand_in(torch_npu_environment, found):
    """checks/dry_run_device.py against the package: what its operators return, and what autograd saves of them."""
    layouts = [EP16, R3]
    theirs = dry_runs([case(*each) for each in layouts], torch_npu=torch_npu_environment)
    for layout, real in zip(layouts, theirs, strict=True):
        for name, phase in found[layout]["phases"].items():
            assert phase["peak_bytes"] == pytest.approx(real["phases"][name]["peak_bytes"], rel=1e-3), name


def test_the_text_has_a_line_for_each_phase_and_names_what_differs():
    phase = Phase(peak=3 * 2**29, flops=2 * 10**12, launches=1234, sent=Counter({("allreduce", "data"): 2**20}))
    done = DryRun(None, None, None, "npu", rows=8, length=1000, phases={"forward": phase})
    text = " ".join(as_text(done, [Compared("weights", "GiB", 2**30, 2**31, False)]).split())
    assert "forward 1.500 2.000 1,234 1.000" in text and text.endswith("weights 1.000 2.000 GiB DIFFERS")


@pytest.mark.parametrize(
    ("argument", "piece"),
    [
        ("--rank=16", "--rank: 16 is out of range; give 0 to 15"),
        ("device=cuda model.dtype=fp32 rollout.expert_parallel=false", "model.dtype: fp32 on cuda"),
    ],
)
def test_bad_input_is_one_line(argument, piece, capfd):
    assert dry_run.main(["configs/qwen3.yaml", *argument.split()]) == 2
    printed = capfd.readouterr()
    assert piece in printed.err and "Traceback" not in printed.err and not printed.out


@pytest.mark.ci
def test_the_command_prints_the_phases_the_launches_and_what_agrees(capfd, tmp_path, monkeypatch):
    """Also with rows that torch's grouped kernel does not take: two fp32 columns are 8 bytes; the kernel needs 16.

    Packages may lie in PYTHONPATH, so the process of the dry run must have it, too.
    """
    log = launched.noting_starts(tmp_path, monkeypatch)
    arguments = ["configs/tiny_cpu.yaml", "--dry-run", "rollout.max_new_tokens=32", "lora.rank=2"]
    assert preflight.main([*arguments, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["ranks"] == 2 and found["phases"]["backward"]["flops"] > found["phases"]["forward"]["flops"] > 0
    assert found["launches"].keys() == found["phases"].keys() and found["launches"]["backward"] > 0
    assert found["compared"] and all(row["agrees"] for row in found["compared"])
    assert "checks.dry_run" in log.read_text()
