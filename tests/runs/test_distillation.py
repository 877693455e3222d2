"""Training runs with a teacher: every option in every layout, exact zeros, resumes, and files that differ.

The numbers of an update are compared with transformers in float64 in tests/machines/on_device/test_update.py. Here the
whole trainer runs on a random tiny model, in forked worlds. Refused input is in tests/rooms/inputs/test_bad_input.py.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import reference
import torch
import training
from breaking import other_factors
from planted import nothing
from planting import instead
from pytest import MonkeyPatch
from source import ROOT
from tiers import asked, ci

from engines.torch_sampler import TorchSampler
from facts.exits import InputError, Tripped
from inputs import teacher as teachers
from runlog import run_record
from weights import checkpoint

OWN = ROOT / "tests" / "support" / "own.py"
BF16 = {"model__dtype": "bf16"}
ALONE = {"loss__advantage": "zero", "loss__kl": "none"}
TWO_UPDATES = {"optim__prompts_per_update": 3, "train__steps": 2}
OPTIONS = {  # every kind of loss, and whatever adds to the loss or changes the passes
    "alone": ALONE,
    "rewards, KL, gspo, weights": {"loss__kind": "gspo", "loss__importance": "token", "loss__teacher_coef": 0.5},
    "cispo, staleness, masked": {
        "loss__kind": "cispo",
        "rollout__staleness": 1,
        "loss__importance": "token",
        "loss__mask_truncated": True,
        "train__steps": 3,
    },
    "dppo_tv, noise": {"loss__kind": "dppo_tv", "aqn__schedule": "constant", "aqn__sigma_start": 0.01},
    "own loss, dynamic rounds, r3": {
        "loss__kind": f"{ROOT}/examples/loss_sapo.py:sapo",
        "rollout__dynamic_rounds": 2,
        "replay__mode": "r3",
    },
    "turns of an environment, Dr.GRPO": {
        "rollout__environment": f"{OWN}:environment",
        "rollout__stop": ("e", "t", "a", "1"),
        "rollout__max_turns": 3,
        "rollout__max_new_tokens": 24,
        "loss__aggregate": "dr-grpo",
    },
    "int4, r2": {"model__quantisation": "int4", "replay__mode": "r2", **ALONE},
}
IN_BF16 = {
    "bf16, factors apart": BF16 | {"rollout__sync": "adapter"},
    "bf16, merged": BF16 | {"rollout__sync": "merged"},
}


TYPES = {"fp32": {}, "bf16": BF16, "int4": {"model__quantisation": "int4"}}  # of a base


def kind_of(changes: dict) -> str:
    """The base model that a run with ``changes`` needs, of whose type the teacher must be."""
    return changes.get("model__quantisation") or changes.get("model__dtype", "fp32")


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory) -> dict[str, Path]:
    whole_groups = training.make_model(tmp_path_factory.mktemp("models") / "int4", expert_width=32)
    return {"fp32": model, "bf16": model, "int4": whole_groups}


@pytest.fixture(scope="module")
def taught(models: dict[str, Path], tmp_path_factory) -> dict[str, Path]:
    """The runs of the teachers, one for each type of base."""
    out = tmp_path_factory.mktemp("teachers")
    every = {"train__seed": 9, "train__checkpoint_every": 1}
    return training.run_all(
        {
            kind: ("TP1", training.config(models[kind], out / kind, **every | TYPES[kind]))
            for kind in asked(["fp32", *map(ci, list(TYPES)[1:])])
        }
    )


def without_b(run: Path, folder: Path) -> Path:
    """A copy of a teacher's run, whose newest checkpoint has a B of 0: it is the base model."""
    copy = shutil.copytree(run, folder)
    other_factors(lambda named: [named[name].zero_() for name in named if name.endswith(".B")])(
        teachers.folder(str(copy)) / "adapter.safetensors"
    )
    return copy


# ------------------------------------------------------------------------------------------------ options and layouts

EACH = [*list(OPTIONS)[:2], *map(ci, list(OPTIONS)[2:])]


@pytest.fixture(scope="module")
def runs(models, taught, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("runs")
    jobs = {f"{name} {layout}": (layout, OPTIONS[name]) for name in asked(EACH) for layout in ("TP1", "TP2_EP2")}
    jobs |= {f"{name} TP2_EP2": ("TP2_EP2", IN_BF16[name]) for name in asked(map(ci, IN_BF16))}
    jobs["no teacher"] = "TP1", {}
    return training.run_all(
        {
            label: (
                layout,
                training.config(
                    models[kind_of(changes)],
                    out / label,
                    **({} if label == "no teacher" else {"loss__teacher": str(taught[kind_of(changes)])}),
                    **TWO_UPDATES | changes,
                ),
            )
            for label, (layout, changes) in jobs.items()
        }
    )


@pytest.mark.parametrize("option", EACH)
def test_a_step_with_a_teacher_is_the_same_in_every_layout(option: str, runs) -> None:
    training.assert_same_metrics(runs[f"{option} TP2_EP2"], runs[f"{option} TP1"])


def test_rewards_are_measured_only_and_a_step_shows_the_distance_and_the_time_of_the_teacher(runs) -> None:
    rows, plain = training.metrics(runs["alone TP1"]), training.metrics(runs["no teacher"])
    assert abs(rows[0]["actor/teacher_kl"]) > 1e-5 and rows[0]["actor/grad_norm"] > 0
    assert rows[0]["reward/mean"] == plain[0]["reward/mean"] > 0 and "actor/teacher_kl" not in plain[0]
    lines = [(runs[name] / "log.txt").read_text() for name in ("alone TP1", "no teacher")]
    assert ["  teacher " in line for line in lines] == [True, False]
    timing = [json.loads(line) for line in (runs["alone TP1"] / "timing.jsonl").read_text().splitlines()]
    assert all(row["timing/teacher_s"] > 0 for row in timing)


@pytest.mark.ci
@pytest.mark.parametrize("name", IN_BF16)
def test_in_bf16_sampler_and_trainer_agree_after_the_teachers_passes(name: str, runs) -> None:
    for row in training.metrics(runs[f"{name} TP2_EP2"]):
        assert row["rollout/logp_gap_mean"] < 0.02 and abs(row["actor/teacher_kl"]) > 1e-4


def unshared(patch: MonkeyPatch) -> None:
    """The engine has no memory that the trainer could share."""
    patch.setattr(TorchSampler, "stacks", dict)


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["TP1", "TP2_EP2"])
def test_a_memory_of_experts_shared_with_the_engine_changes_no_bit(layout, models, taught, tmp_path) -> None:
    """The teacher's pass merges its experts into that memory; the next pass and the next push need the policy's."""
    changes = IN_BF16["bf16, merged"] | TWO_UPDATES | {"loss__teacher": str(taught["bf16"])}
    cfgs = [training.config(models["bf16"], tmp_path / name, **changes) for name in ("shared", "apart")]
    for cfg, plant in zip(cfgs, (nothing, unshared), strict=True):
        for found in training.raised(plant, cfg, layout):
            assert found == (InputError, "")
    shared, apart = map(training.only_run, cfgs)
    training.assert_same_bytes(shared, apart, ("eval.jsonl", "eval_outcomes.jsonl", "moe.jsonl"))
    own = {"sync/experts_wrong", "sync/checksum"}  # of shared memory alone, and a sum in another order
    for row, other in zip(training.metrics(shared), training.metrics(apart), strict=True):
        assert row.keys() - other.keys() <= own
        assert all(row[key] == value for key, value in other.items() if key not in own)
    for kind in ("adapter", "optimizer"):
        tensors = [training.whole(run, 2, kind) for run in (shared, apart)]
        assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())


# ------------------------------------------------------------------------------------------------ exact zeros

SAME = [
    ("TP2_EP2", {}),
    ci("TP1", {}),
    ci("EP2", {"replay__mode": "r2"}),
    ci("TP2", {"replay__mode": "r3"}),
    ci("EP2", IN_BF16["bf16, merged"]),
    ci("TP2", IN_BF16["bf16, factors apart"]),
]


@pytest.mark.parametrize(("layout", "changes"), SAME)
def test_a_teacher_that_is_the_policy_teaches_exactly_nothing_and_stops_the_run(
    layout, changes, models, taught, tmp_path
) -> None:
    """The policy before its first update is the base, and so is a teacher whose B is 0."""
    kind = kind_of(changes)
    base = without_b(taught[kind], tmp_path / "base")
    settings = {"loss__teacher": str(base), **ALONE, **changes}
    silent = training.config(models[kind], tmp_path / "silent", checks__off=("impossible",), **settings)
    run = training.run_all({"": (layout, silent)})[""]
    for row in training.metrics(run):
        assert row["actor/teacher_kl"] == row["actor/grad_norm"] == row["actor/loss"] == 0.0, row
    for error, message in training.raised(nothing, training.config(models[kind], tmp_path / "out", **settings), layout):
        assert error is Tripped
        assert message.startswith(
            "checks.impossible: step 1: the KL to the teacher is exactly 0, so the teacher is the policy itself"
        )


# ------------------------------------------------------------------------------------------------ resumes

EIGHT = {"train__steps": 8, "train__checkpoint_every": 4, "train__keep_last": 9, "eval__every": 3}
EIGHT |= {"optim__prompts_per_update": 3, "optim__tokens_per_micro_batch": 300}


@pytest.fixture(scope="module")
def eight(models, taught, tmp_path_factory) -> tuple[Path, dict]:
    """A run of eight steps with rewards and a teacher, and its changes."""
    changes = EIGHT | {"loss__teacher": str(taught["fp32"])}
    cfg = training.config(models["fp32"], tmp_path_factory.mktemp("eight"), **changes)
    return training.run_all({"": ("EP2", cfg)})[""], changes


@pytest.mark.parametrize("layout", ["EP2", ci("TP2")])
def test_a_run_with_a_teacher_goes_on_after_four_of_eight_steps(layout, eight, models, tmp_path) -> None:
    """In its own layout to the byte, and in another one with the same numbers; another path leads to equal files."""
    run, changes = eight
    copy = training.rewound(run, tmp_path, 4)
    moved = shutil.copytree(changes["loss__teacher"], tmp_path / "moved")
    cfg = training.config(
        models["fp32"], tmp_path / "out", **changes | {"loss__teacher": str(moved), "train__resume": str(copy)}
    )
    training.in_world(layout, training.train_each, [(layout, training.in_layout(cfg, layout))])
    training.assert_same_metrics(copy, run, 1e-3)  # sync/checksum is a sum that nearly cancels out
    if layout == "EP2":
        training.assert_same_bytes(copy, run)
        for name in ("adapter.safetensors", "optimizer.safetensors"):
            files = [training.checkpoint_of(each, 8) / name for each in (copy, run)]
            assert files[0].read_bytes() == files[1].read_bytes()


def test_a_resume_with_another_teacher_or_none_is_refused(eight, models, taught, tmp_path) -> None:
    run, changes = eight
    copy = training.rewound(run, tmp_path, 4)
    other = teachers.folder(str(taught["fp32"])).with_name("step-000002")
    assert other.is_dir()
    for named, accept, expected in (
        (str(other), "refuse", f"{other}/adapter.safetensors: has changed since {copy} was started: sha256 "),
        (None, "refuse", "loss.teacher: "),
        (None, "accept", "loss.teacher: "),
    ):
        resumed = {"loss__teacher": named, "train__resume": str(copy), "train__changed_inputs": accept}
        cfg = training.config(models["fp32"], tmp_path / "out", **changes | resumed)
        ((error, message),) = training.raised(nothing, cfg)
        assert error is InputError and expected in message and "\n" not in message, message
    assert not (copy / "finished.json").exists()


def test_an_export_does_not_need_the_teacher(eight, models, tmp_path) -> None:
    run, changes = eight
    moved = training.config(models["fp32"], tmp_path, **changes | {"loss__teacher": str(tmp_path / "gone")})
    there = training.config(models["fp32"], tmp_path, **changes)
    for cfg in (moved, there):
        assert run_record.changed_inputs(run, run_record.input_files(cfg), models["fp32"]) == []


# ------------------------------------------------------------------------------------------------ files on nodes


def read_files(cfg, layout: str, nodes: int, other: str) -> tuple[list[str], str]:
    """Start a run as on ``nodes`` nodes: the teacher's files that this rank reads for checksums, and its error.

    The last rank finds ``other`` where it is told the teacher, if it is not empty.
    """
    rank, read = torch.distributed.get_rank(), []
    patch = MonkeyPatch()
    patch.setenv("LOCAL_RANK", str(rank if nodes == 1 else 0))
    patch.setattr(training.curves, "draw_curves", lambda *args: None)

    def counted(real: Callable, path: Path) -> str:
        if "teacher" in str(path):
            read.append(path.name)
        return real(path)

    for module in (run_record, checkpoint):
        instead(module, "sha256_file", counted)(patch)
    if other and rank == 1:
        instead(teachers, "folder", lambda real, _: real(other))(patch)
    message = ""
    try:
        training.start(cfg, layout)
    except InputError as error:
        message = str(error)
    finally:
        patch.undo()
    return read, message


@pytest.mark.parametrize("nodes", [ci(1), 2])
def test_the_first_rank_of_each_node_reads_the_files_once(nodes, models, taught, tmp_path) -> None:
    cfg = training.in_layout(
        training.config(models["fp32"], tmp_path, loss__teacher=str(taught["fp32"]), train__steps=1), "DP2"
    )
    by_rank = training.in_world("DP2", read_files, cfg, "DP2", nodes, "")
    once = ["adapter.safetensors", "state.json"]
    assert [sorted(read) for read, _ in by_rank] == [once, once if nodes == 2 else []]
    assert [message for _, message in by_rank] == ["", ""]


def test_other_files_on_another_node_are_refused_on_all_ranks(models, taught, tmp_path) -> None:
    named = str(taught["fp32"])
    other = str(teachers.folder(named).with_name("step-000002"))
    cfg = training.in_layout(training.config(models["fp32"], tmp_path / "out", loss__teacher=named), "DP2")
    for _, message in training.in_world("DP2", read_files, cfg, "DP2", 2, other):
        assert message.startswith(f"loss.teacher, {named}: rank 1 did not read what rank 0 read; use the same files")
    assert not list((tmp_path / "out").glob("*/run.json")), "no run has begun"


# ------------------------------------------------------------------------------------------------ vLLM


@pytest.fixture(scope="module")
def dense(model: Path, tmp_path_factory) -> Path:
    """A model without experts, with the tokenizer of the others: vLLM on a CPU applies factors to such a model only."""
    from sampled import DENSE

    sizes = DENSE | {"vocab_size": 304}
    folder = reference.save("qwen2_moe", tmp_path_factory.mktemp("dense"), **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(model / name, folder / name)
    return folder


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize("sync", ["merged", "adapter"])
def test_vllm_samples_the_policy_and_not_its_teacher(sync, dense, vllm_imported, tmp_path) -> None:
    """The teacher was sampled by the embedded engine. The log-probs of vLLM are those of the policy in each step."""
    engine = {"rollout__engine": "vllm", "rollout__sync": sync, "rollout__kv_cache_mib": 8}
    teacher = training.run_all({"": ("TP1", training.config(dense, tmp_path / "teacher", train__seed=9))})[""]
    changes = {"loss__teacher": str(teacher), **TWO_UPDATES, **engine}
    run = training.run_all({"": ("TP1", training.config(dense, tmp_path / "out", **changes))})[""]
    for row in training.metrics(run):
        assert row["rollout/logp_gap_max"] < 1e-4 and abs(row["actor/teacher_kl"]) > 1e-4
