"""Each fault of a whole run that would train something else than intended is found, by the check that is named here.

A run is the whole trainer on a random tiny model in a forked world in which the fault is planted (support/planted.py).
The reward is lenient (training.lenient_score) unless a fault needs a constant one. Not covered: the vLLM engine, and a
rank that stalls.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NamedTuple

import planted
import planted_trainer
import pytest
import training
from planted import FAULTS, FEW, LARGE, NOISE, SURE, nothing
from planting import Plant, both
from source import ROOT
from tiers import ci
from training import raised, raised_each

from facts.checks import CHECKS
from facts.exits import AqnError, InputError, Tripped
from inputs.config import load_config
from knobs import ChecksConfig, Config


class Row(NamedTuple):
    """Parts of the message that names a fault, the run that shows it, and the fault if its name is not in FAULTS."""

    expected: list[str]
    changes: dict = {}
    layout: str = "TP1"
    kind: type[Exception] = Tripped
    lenient: bool = True
    plant: Plant | None = None


def stopping(check: str) -> dict:
    """``check`` stops the run, though it only warns by default."""
    return {"checks__warn": tuple(name for name in ChecksConfig().warn if name != check)}


def of_state(layout: str, expected: str) -> Row:
    """Ranks no longer hold the same where they must."""
    return Row([f"checks.state: after {expected}"], layout=layout)


def of_checkpoint(expected: str, layout: str = "TP1") -> Row:
    """The second checkpoint is not what the ranks hold; the first one stays."""
    changes = {"train__steps": 3, "train__checkpoint_every": 1}
    return Row(["checks.state: after 2 steps: ", expected], changes, layout)


HELD_OUT = ["checks.held_out: step 1 asks 1 held-out questions, for example"]
ROWS = {  # those with the plant `nothing` have a fault in their settings
    "experts of layer 1 are pushed without their update": Row(
        ["checks.logp_gap", "step 2", "layer 1 is the first whose output differs", "huggingface.export"],
        layout="TP2_EP2",
    ),
    "a router is pushed in another order": Row(["checks.logp_gap", "step 1", "layer 0 is the first"]),
    "adapters are never pushed": Row(["checks.adapters", "step 2", "the merge of the adapters"], layout="TP2_EP2"),
    "NaN in one expert": Row(
        ["model.layers.1.mlp.experts.down_proj has NaN or infinity"],
        {"train__checkpoint_every": 1},
        plant=planted.nan_in_one_expert,
    ),
    "the engine ignores pushed norms": Row(["checks.noise", "step 1", "takes pushed norms"], NOISE),
    "noise that bf16 rounds away": Row(
        ["checks.noise", "step 1", "rounding left none of this noise"],
        NOISE | {"model__dtype": "bf16", "aqn__sigma_start": 1e-6, "aqn__sigma_end": 1e-7},
        plant=nothing,
    ),
    "noise is watched at temperature 1": Row(
        ["checks.noise", "step 1", "takes pushed norms"],
        NOISE | SURE,
        plant=both(planted.sure_policy, FAULTS["noise is watched at temperature 1"]),
    ),
    "noise is twice as strong": Row(["AQN: realised std 0.0196, needed 0.01"], NOISE, kind=AqnError),
    "noise stays in the trainer": Row(
        ["model.layers.1.input_layernorm.weight is not the clean weight any more"],
        NOISE | {"train__checkpoint_every": 1},
        kind=AqnError,
    ),
    "norms of another class are pushed for the noise": Row(
        ["none of the targets was in the push"], NOISE | {"aqn__targets": ("attention",)}, kind=AqnError
    ),
    "adapters do not start at 0": Row(["checks.reference_kl", "new adapters start at 0"]),
    "a policy that an update has made uniform": Row(
        ["checks.impossible: step 3: the gradient is exactly 0, although the KL to the reference is "],
        {"optim__lr": 1e3},
        plant=nothing,
    ),
    "a loss metric is not finite": Row(["step 1: actor/ppo_kl", " not finite\n"]),
    "the advantages are not finite": Row(["step 1: the gradient norm is nan; nothing"]),
    "gradient spike": Row(
        ["checks.gradient_spike", "step 12", "x the usual", "optim.lr"],
        {"train__steps": 13} | stopping("gradient_spike"),
        plant=planted_trainer.twelfth_gradient_is_large,
    ),
    "one token has all the probability": Row(
        ["checks.entropy", "step 1", "loss.entropy_coef"], stopping("entropy") | {"checks__off": ("logp_gap",)}
    ),
    "reward constant": Row(
        ["checks.reward_constant", "every reward of 2 steps is 0", "completions.jsonl"],
        lenient=False,
        plant=planted.two_steps_count,
    ),
    "no answers": Row(["checks.unparsable", "step 1: 100.0%", "chat template"], stopping("unparsable"), plant=nothing),
    "answers cut off": Row(
        ["checks.truncated", "step 1: ", "% of the completions are cut off at 2 tokens", "enable_thinking"],
        LARGE | stopping("truncated") | {"rollout__max_new_tokens": 2},
        plant=nothing,
    ),
    "the reference has its adapters on": Row(
        ["checks.impossible: step 4: the KL to the reference is exactly 0 in 3 steps after updates"], LARGE
    ),
    "the KL has the wrong sign": Row(["checks.impossible: step 2: actor/kl_loss is -"]),
    "one sample for the whole group": Row(["checks.sampling: step 3: all completions of every group are"]),
    "the end token is never recognised": Row(
        ["checks.sampling: step 1: not one completion ended by itself within 20 tokens"],
        LARGE | {"rollout__max_new_tokens": 20},
    ),
    "every step asks the same questions": Row(["checks.sampling: step 3: the same 4 of 40 questions for the 3rd time"]),
    "the held-out file is trained on": Row(
        ["data: 9 held-out questions of data.test_path are training questions"], kind=InputError
    ),
    "held-out questions are asked": Row(HELD_OUT),
    "held-out questions are asked in a further round": Row(HELD_OUT, {"rollout__dynamic_rounds": 1}),
    "another question on rank 1": Row(
        ["the training questions as prompts: rank 1 did not read what rank 0 read"], layout="TP2", kind=InputError
    ),
    "a gradient is not summed over data ranks": of_state("TP2_EP2_DP2", "1 steps: model.layers.0.self_attn."),
    "an expert's gradient is not summed over its copies": of_state("EP2_DP4", "1 steps: model.layers.0.mlp.experts."),
    "a factor drifts on rank 1": of_state(
        "TP2", "1 steps: model.layers.0.self_attn.qkv_proj.A of ranks 0, 1: not the same"
    ),
    "a router has another order on rank 1": of_state("DP2", "0 steps: model.layers.1.mlp.gate.weight of ranks 0, 1"),
    "B is 0 in the checkpoint": of_checkpoint("adapter model.layers.0."),
    "experts have another order in the checkpoint": of_checkpoint(".experts.", "TP2_EP2"),
    "moments are exchanged in the checkpoint": of_checkpoint("optimizer model.layers.0."),
    "a tensor too many in the checkpoint": of_checkpoint("adapter more"),
    "another count in the checkpoint": of_checkpoint("optimizer_steps 7; needed: at most train.steps 3"),
    "a wrong number in a file of the checkpoint": of_checkpoint("adapter model.layers.0."),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_planted_fault_stops_the_run_on_every_rank_and_is_named(name: str, model: Path, tmp_path: Path) -> None:
    row = ROWS[name]
    cfg = training.config(model, tmp_path, **FEW | row.changes)
    reports = raised(row.plant or FAULTS[name], cfg, row.layout, row.lenient)
    kind, message = reports[0]
    assert kind is row.kind and all(part in message for part in row.expected), message
    assert len(message.splitlines()) <= 10 and len(set(reports)) == 1, reports
    if message.startswith("checks."):
        warn = [*cfg.checks.warn, message.removeprefix("checks.").partition(":")[0]]
        assert message.endswith(f"to go on regardless: checks.warn=[{','.join(warn)}]")
    saved = list(tmp_path.glob("*/checkpoints/step-*"))
    assert len(saved) == cfg.train.checkpoint_every  # that of the sound step, if each step has one


def test_every_named_fault_can_be_planted_in_a_session_and_an_unknown_name_is_refused() -> None:
    for name in FAULTS:
        planted.for_the_session(name).undo()
    with pytest.raises(pytest.UsageError, match="'temperature' is no fault .*; nearest: temperature x 1.3,"):
        planted.for_the_session("temperature")


ON_RANK_1 = {  # fault of one rank's engine: (function that plants it, changes to the run, parts of the message)
    "other norms": (
        FAULTS["the engine has larger norms on rank 1"],
        {},
        ["checks.logp_gap", "step 1", "on rank 1 alone"],
    ),
    "no norms taken": (
        FAULTS["the engine ignores pushed norms on rank 1"],
        NOISE,
        ["checks.noise", "step 1", "takes pushed norms"],
    ),
}


@pytest.mark.parametrize(
    ("fault", "layout"),
    [("other norms", "TP2_EP2_DP2"), ("no norms taken", "TP2"), ci("other norms", "EP2")],
)
def test_a_fault_of_one_rank_stops_all_ranks_or_warns_once(fault: str, layout: str, model: Path, tmp_path: Path):
    """No rank may decide alone: the others would wait in a collective. Tensor ranks must see the same answer."""
    plant, changes, expected = ON_RANK_1[fault]
    stop, warn = (
        training.config(model, tmp_path / action, **FEW | changes | lists)
        for action, lists in (("stop", {}), ("warn", {"checks__warn": tuple(CHECKS)}))
    )
    reports = raised(plant, stop, layout)
    assert {kind for kind, _ in reports} == {Tripped} and len({message for _, message in reports}) == 1, reports
    assert all(part in reports[0][1] for part in expected), reports[0]
    assert raised(plant, warn, layout) == [(InputError, "")] * len(reports)
    run = training.only_run(warn)
    text = (run / "log.txt").read_text()
    assert text.count(f"warning: {expected[0]}: step 1") == 1 and all(part in text for part in expected[2:])
    assert [row["step"] for row in training.metrics(run)] == [1, 2, 3, 4, 5] and (run / "finished.json").exists()


# ------------------------------------------------------------------------------- in the shape of configs/qwen3.yaml


QWEN3 = load_config(ROOT / "configs" / "qwen3.yaml")
RESUMED = {"as it is": {}, "replayed": {"replay__mode": "r3"}}  # sound runs


def real_shape(model: Path, out_dir: Path, changes: dict) -> Config:
    """configs/qwen3.yaml with the tiny model and its sampler, 8 prompts a step, and four updates a step."""
    updates = QWEN3.rollout.prompts_per_step // QWEN3.optim.prompts_per_update
    assert updates == 4 and QWEN3.trains_merged
    whole = {}
    for name in ("loss", "replay", "aqn", "reward"):
        whole |= {f"{name}__{key}": value for key, value in getattr(QWEN3, name)}
    parts = {"lora__targets": QWEN3.lora.targets, "model__dtype": QWEN3.model.dtype, "rollout__sync": "merged"}
    sizes = FEW | {"rollout__prompts_per_step": 8, "rollout__group_size": 4, "optim__prompts_per_update": 8 // updates}
    return training.config(model, out_dir, **whole | parts | sizes | changes)


# A check -> (fault, changes to the run, layout, how its message goes on).
REAL = {
    "reward_constant": (
        both(planted.two_steps_count, FAULTS["every reward is 0"]),
        {"reward__check_gold": False},
        "TP2",
        "every reward of 2 steps is 0",
    ),
    "unparsable": (nothing, {}, "EP2", "step 1: 100.0%"),
    "truncated": (nothing, {"rollout__max_new_tokens": 2, "rollout__group_size": 32}, "TP2", "step 1: "),
    "sampling": (FAULTS["every step asks the same questions"], {}, "EP2", "step 3: the same 8 of 40 questions"),
    "held_out": (FAULTS["held-out questions are asked"], {}, "TP2", "step 1 asks 1 held-out questions"),
    "state": (FAULTS["a factor drifts on rank 1"], {}, "TP2", "after 1 steps: model.layers.0.self_attn.qkv_proj.A"),
    "impossible": (FAULTS["the KL has the wrong sign"], {}, "EP2", "step 1: actor/kl_loss is -"),
    "collapse": (both(planted.two_steps_are_usual, planted_trainer.rewards_fall), {}, "TP2", "step 4: mean reward 0"),
    "logp_gap": (FAULTS["a router is pushed in another order"], {}, "EP2", "step 1: sampler and trainer differ"),
    "reference_kl": (
        FAULTS["adapters do not start at 0"],
        {},
        "TP2",
        "step 1: before the first update, reference and policy",
    ),
    "adapters": (FAULTS["adapters are never pushed"], {}, "EP2", "step 2: "),
    # The file itself has no noise.
    "noise": (FAULTS["the engine ignores pushed norms"], NOISE, "TP2", "step 1: sigma is 0.01"),
    "gradient_spike": (
        both(planted.two_steps_are_usual, planted_trainer.twelfth_gradient_is_large),
        {},
        "EP2",
        "step 3: gradient no",
    ),
    # In step 1 some of the largest logits are equal in bf16.
    "entropy": (FAULTS["one token has all the probability"], {"checks__off": ("logp_gap",)}, "TP2", "step 2: entropy "),
}


@pytest.fixture(scope="module")
def found_in_the_real_shape(model: Path, tmp_path_factory) -> dict[str, Any]:
    """The errors of all ranks, by check, and of two sound runs, which leave checkpoints; and the folder of all runs."""
    out, sound = tmp_path_factory.mktemp("real"), {"train__steps": 2, "train__checkpoint_every": 1}
    jobs = {
        check: (plant, real_shape(model, out / check, stopping(check) | changes), layout)
        for check, (plant, changes, layout, _) in REAL.items()
    }
    for name, changes in RESUMED.items():
        jobs[name] = nothing, real_shape(model, out / name, sound | changes), "TP2"
    return raised_each(jobs) | {"folder": out}


@pytest.mark.nightly
@pytest.mark.parametrize("check", CHECKS)
def test_each_check_finds_its_fault_in_the_shape_of_a_real_configuration(check: str, found_in_the_real_shape) -> None:
    reports = found_in_the_real_shape[check]
    kind, message = reports[0]
    assert kind is Tripped and message.startswith(f"checks.{check}: {REAL[check][3]}"), message
    assert len(reports) == 2 and len(set(reports)) == 1, reports


@pytest.mark.nightly
def test_after_a_resume_in_the_real_shape_the_reference_must_be_the_policy_without_its_update(
    model: Path, tmp_path: Path, found_in_the_real_shape
) -> None:
    out, jobs = found_in_the_real_shape["folder"], {}
    for name, changes in RESUMED.items():
        assert found_in_the_real_shape[name] == [(InputError, "")] * 2
        (run,) = (out / name).glob("tiny-*")
        (run / "finished.json").unlink()
        shutil.rmtree(training.checkpoint_of(run, 2))
        cfg = real_shape(model, out / name, {"train__steps": 2, "train__checkpoint_every": 1} | changes)
        jobs[f"adapters on, {name}"] = FAULTS["the reference has its adapters on"], cfg, "TP2"
        if changes:
            jobs["other routes"] = FAULTS["the reference takes other routes"], cfg, "EP2"
        jobs[f"sound, {name}"] = nothing, cfg, "EP2"
    for label, reports in raised_each(jobs).items():
        if label.startswith("sound"):
            assert reports == [(InputError, "")] * 2, label
        else:
            assert len(set(reports)) == 1 and reports[0][0] is Tripped, (label, reports)
            assert reports[0][1].startswith("checks.reference_kl: step 2: before the first update"), reports[0]


@pytest.mark.parametrize("layout", ["DP2", ci("TP1")])
def test_the_reported_difference_of_the_reference_is_the_mean_over_the_tokens_of_all_data_ranks(
    layout: str, model: Path, tmp_path: Path
) -> None:
    """Where a step is one update and one micro-batch, the KL estimate `abs` is the same mean, computed by the loss."""
    cfg = training.config(model, tmp_path, **FEW | {"train__steps": 1, "loss__kl": "abs"})
    reports = raised(FAULTS["adapters do not start at 0"], cfg, layout)
    (row,) = training.metrics(training.only_run(cfg))
    assert row["actor/kl_loss"] > 1e-3 and f"differ by {row['actor/kl_loss']:.2g} nats a token" in reports[0][1]


# ------------------------------------------------------------------------------------------------ faults of a resume


NOT_RESTORED = {
    "moments are not restored": "optimizer model.layers.0.self_attn.qkv_proj.A.exp_avg",
    "adapters are not restored": "adapter model.layers.0.self_attn.qkv_proj.A",
    "the step count is not restored": "optimizer_steps 0 for 5",
}


@pytest.mark.parametrize("layout", ["TP2_EP2", ci("TP1")])
def test_a_resume_without_all_of_its_checkpoint_stops(layout: str, model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, train__checkpoint_every=5, **FEW)
    run = training.run_all({"": (layout, cfg)})[""]
    (run / "finished.json").unlink()
    for name, expected in NOT_RESTORED.items():
        reports = raised(FAULTS[name], cfg, layout)
        assert len({message for _, message in reports}) == 1 and reports[0][0] is Tripped, reports
        assert "checks.state: after 5 steps: " in reports[0][1] and expected in reports[0][1], reports[0][1]
    assert raised(nothing, cfg, layout)[0] == (InputError, "")  # a correct resume goes on
