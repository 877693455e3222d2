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
import pytest
import torch
import training
from planted import FEW, LARGE, NOISE, SURE, nothing, on_rank_1
from planting import Plant
from source import ROOT
from tiers import ci
from training import raised, raised_each

from aqn import AqnError
from config import load_config
from inputs.files import InputError
from knobs import Action, ChecksConfig, Config
from tripwires import Tripped

ALL_CHECKS = [name for name, field in ChecksConfig.model_fields.items() if field.annotation == Action]
SURPRISE = LARGE | {"rollout__max_new_tokens": 12, "train__steps": 8, "checks__surprise": "stop"}


class Fault(NamedTuple):
    """A fault, parts of the message that names it, and the run that shows it."""

    plant: Plant
    expected: list[str]
    changes: dict = {}
    layout: str = "TP1"
    kind: type[Exception] = Tripped
    lenient: bool = True


def of_state(plant: Plant, layout: str, expected: str) -> Fault:
    """Ranks no longer hold the same where they must."""
    return Fault(plant, [f"checks.state: after {expected}"], layout=layout)


def of_checkpoint(plant: Plant, expected: str, layout: str = "TP1") -> Fault:
    """The second checkpoint is not what the ranks hold; the first one stays."""
    changes = {"train__steps": 3, "train__checkpoint_every": 1}
    return Fault(plant, ["checks.state: after 2 steps: ", expected], changes, layout)


HOTTER = planted.chosen_by(lambda rule: rule._replace(temperature=1.3 * rule.temperature))
TOP_3 = planted.chosen_by(lambda rule: rule._replace(top_k=3))
FAULTS = {
    "experts' delta dropped": Fault(
        planted.experts_delta_dropped,
        ["checks.logp_gap", "step 2", "layer 1 is the first whose output differs", "weights_hf.export"],
        layout="TP2_EP2",
    ),
    "gate permuted": Fault(planted.gate_permuted, ["checks.logp_gap", "step 1", "layer 0 is the first"]),
    "adapters never pushed": Fault(
        planted.adapters_never_pushed, ["checks.adapters", "step 2", "the merge of the adapters"], layout="TP2_EP2"
    ),
    "NaN in one expert": Fault(
        planted.nan_in_one_expert, ["model.layers.1.mlp.experts.down_proj has NaN or infinity"],
        {"train__checkpoint_every": 1},
    ),
    "engine without norms": Fault(
        planted.engine_without_norms, ["checks.noise", "step 1", "takes pushed norms"], NOISE
    ),
    "noise that bf16 rounds away": Fault(
        nothing, ["checks.noise", "step 1", "rounding left none of this noise"],
        NOISE | {"model__dtype": "bf16", "aqn__sigma_start": 1e-6, "aqn__sigma_end": 1e-7},
    ),
    "noise watched where it cannot show": Fault(
        planted.sure_policy_watched_at_temperature_1, ["checks.noise", "step 1", "takes pushed norms"], NOISE | SURE
    ),
    "noise too strong": Fault(
        planted.noise_too_strong, ["AQN: realised std 0.0196, needed 0.01"], NOISE, kind=AqnError
    ),
    "noise in the trainer": Fault(
        planted.noise_in_the_trainer, ["model.layers.1.input_layernorm.weight is not the clean weight any more"],
        NOISE | {"train__checkpoint_every": 1}, kind=AqnError,
    ),
    "noise on a wrong class": Fault(
        planted.noise_on_a_class_that_is_not_pushed, ["none of the targets was in the push"],
        NOISE | {"aqn__targets": ("attention",)}, kind=AqnError,
    ),
    "adapters not at zero": Fault(planted.adapters_not_at_zero, ["checks.reference_kl", "new adapters start at 0"]),
    "a policy that an update has made uniform": Fault(
        nothing, ["checks.impossible: step 3: the gradient is exactly 0, although the KL to the reference is "],
        {"optim__lr": 1e3},
    ),
    "metric not finite": Fault(planted.loss_metric_not_finite, ["step 1: actor/ppo_kl", " not finite\n"]),
    "gradient not finite": Fault(planted.gradient_not_finite, ["step 1: the gradient norm is nan; nothing"]),
    "gradient spike": Fault(
        planted.twelfth_gradient_is_large, ["checks.gradient_spike", "step 12", "x the usual", "optim.lr"],
        {"train__steps": 13, "checks__gradient_spike": "stop"},
    ),
    "entropy": Fault(
        planted.policy_without_entropy, ["checks.entropy", "step 1", "loss.entropy_coef"],
        {"checks__entropy": "stop", "checks__logp_gap": "off"},
    ),
    "reward constant": Fault(
        planted.two_steps_count, ["checks.reward_constant", "every reward of 2 steps is 0", "completions.jsonl"],
        lenient=False,
    ),
    "no answers": Fault(
        nothing, ["checks.unparsable", "step 1: 100.0%", "chat template"], {"checks__unparsable": "stop"}
    ),
    "answers cut off": Fault(
        nothing, ["checks.truncated", "step 1: ", "% of the completions are cut off at 2 tokens", "enable_thinking"],
        LARGE | {"checks__truncated": "stop", "rollout__max_new_tokens": 2},
    ),
    "reference with adapters on": Fault(
        planted.reference_with_adapters_on,
        ["checks.impossible: step 4: the KL to the reference is exactly 0 in 3 steps after updates"], LARGE,
    ),
    "KL of the wrong sign": Fault(
        planted.kl_of_the_wrong_sign, ["checks.impossible: step 2: actor/kl_loss is -"]
    ),
    "one sample for the whole group": Fault(
        planted.one_sample_for_the_whole_group, ["checks.sampling: step 3: all completions of every group are"]
    ),
    "end token never recognised": Fault(
        planted.end_token_never_recognised,
        ["checks.sampling: step 1: not one completion ended by itself within 20 tokens"],
        LARGE | {"rollout__max_new_tokens": 20},
    ),
    "the same questions in every step": Fault(
        planted.always_the_first_step, ["checks.sampling: step 3: the same 4 of 40 questions for the 3rd time"]
    ),
    "trained on the held-out file": Fault(
        planted.trained_on_the_held_out_file, ["data: 9 held-out questions of data.test_path are training questions"],
        kind=InputError,
    ),
    "asks held-out questions": Fault(
        planted.asks_held_out_questions, ["checks.held_out: step 1 asks 1 held-out questions, for example"]
    ),
    "other questions on one rank": Fault(
        on_rank_1(planted.another_question),
        ["the training questions as prompts: rank 1 did not read what rank 0 read"], layout="TP2", kind=InputError,
    ),
    "temperature x 1.3": Fault(
        HOTTER, ["checks.surprise: steps up to ", "-log p of the sampled tokens is +", " standard deviations from its"],
        SURPRISE,
    ),
    "top-k 3": Fault(TOP_3, ["checks.surprise: steps up to ", "-log p of the sampled tokens is -"], SURPRISE),
    "each sample twice": Fault(
        planted.each_sample_twice,
        ["checks.surprise: ", "57.1% of the completions repeat another one of their group, but their log-probs pre"],
        SURPRISE,
    ),
    "each sample twice, dynamic sampling": Fault(
        planted.each_sample_twice,
        ["checks.surprise: ", "57.1% of the completions repeat another one of their group, but their log-probs pre"],
        SURPRISE | {"rollout__dynamic_rounds": 1},
    ),
    "asks held-out questions in a further round": Fault(
        planted.asks_held_out_questions_later, ["checks.held_out: step 1 asks 1 held-out questions, for example"],
        {"rollout__dynamic_rounds": 1},
    ),
    "a gradient not summed over data ranks": of_state(
        planted.one_gradient_not_summed(False), "TP2_EP2_DP2", "1 steps: model.layers.0.self_attn."
    ),
    "an expert's gradient not summed over its copies": of_state(
        planted.one_gradient_not_summed(True), "EP2_DP4", "1 steps: model.layers.0.mlp.experts."
    ),
    "a factor that drifts on one rank": of_state(
        on_rank_1(planted.a_factor_that_drifts), "TP2",
        "1 steps: model.layers.0.self_attn.qkv_proj.A of ranks 0, 1: not the same",
    ),
    "a norm whose elements one rank has in another order": of_state(
        planted.a_norm_in_another_order, "DP2", "0 steps: model.layers.1.input_layernorm.weight of ranks 0, 1"
    ),
    "B as 0 in the checkpoint": of_checkpoint(
        planted.adapter_remade(".B", torch.zeros_like), "adapter model.layers.0."
    ),
    "experts in another order in the checkpoint": of_checkpoint(
        planted.adapter_remade(".experts.", lambda value: value.flip(0)), ".experts.", "TP2_EP2"
    ),
    "moments exchanged in the checkpoint": of_checkpoint(planted.moments_exchanged, "optimizer model.layers.0."),
    "a tensor more in the checkpoint": of_checkpoint(planted.a_tensor_more, "adapter more"),
    "another count in the checkpoint": of_checkpoint(
        planted.another_count, "optimizer_steps 7; needed: at most train.steps 3"
    ),
    "a wrong number in a file of the checkpoint": of_checkpoint(
        planted.a_file_with_a_wrong_number, "adapter model.layers.0."
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_stops_the_run_on_every_rank_and_is_named(name: str, model: Path, tmp_path: Path) -> None:
    fault = FAULTS[name]
    cfg = training.config(model, tmp_path, **FEW | fault.changes)
    reports = raised(fault.plant, cfg, fault.layout, fault.lenient)
    kind, message = reports[0]
    assert kind is fault.kind and all(part in message for part in fault.expected), message
    assert len(message.splitlines()) <= 10 and len(set(reports)) == 1, reports
    if message.startswith("checks."):
        assert f"{message.partition(':')[0]}=warn" in message
    saved = list(tmp_path.glob("*/checkpoints/step-*"))
    assert len(saved) == cfg.train.checkpoint_every  # that of the sound step, if each step has one


ON_RANK_1 = {  # fault of one rank's engine: (function that plants it, changes to the run, parts of the message)
    "other norms": (planted.engine_with_larger_norms, {}, ["checks.logp_gap", "step 1", "on rank 1 alone"]),
    "no norms taken": (planted.engine_without_norms, NOISE, ["checks.noise", "step 1", "takes pushed norms"]),
}


@pytest.mark.parametrize(
    ("fault", "layout"),
    [("other norms", "TP2_EP2_DP2"), ("no norms taken", "TP2"), ci("other norms", "EP2")],
)
def test_a_fault_of_one_rank_stops_all_ranks_or_warns_once(fault: str, layout: str, model: Path, tmp_path: Path):
    """No rank may decide alone: the others would wait in a collective. Tensor ranks must see the same answer."""
    plant, changes, expected = ON_RANK_1[fault]
    stop, warn = (
        training.config(model, tmp_path / action, **{expected[0].replace(".", "__"): action}, **FEW | changes)
        for action in ("stop", "warn")
    )
    reports = raised(on_rank_1(plant), stop, layout)
    assert {kind for kind, _ in reports} == {Tripped} and len({message for _, message in reports}) == 1, reports
    assert all(part in reports[0][1] for part in expected), reports[0]
    assert raised(on_rank_1(plant), warn, layout) == [(InputError, "")] * len(reports)
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
        planted.both(planted.two_steps_count, planted.no_reward), {"reward__check_gold": False}, "TP2",
        "every reward of 2 steps is 0",
    ),
    "unparsable": (nothing, {}, "EP2", "step 1: 100.0%"),
    "truncated": (nothing, {"rollout__max_new_tokens": 2, "rollout__group_size": 32}, "TP2", "step 1: "),
    "sampling": (planted.always_the_first_step, {}, "EP2", "step 3: the same 8 of 40 questions"),
    "held_out": (planted.asks_held_out_questions, {}, "TP2", "step 1 asks 1 held-out questions"),
    "state": (on_rank_1(planted.a_factor_that_drifts), {}, "TP2", "after 1 steps: model.layers.0.self_attn.qkv_proj.A"),
    "impossible": (planted.kl_of_the_wrong_sign, {}, "EP2", "step 1: actor/kl_loss is -"),
    "collapse": (planted.both(planted.two_steps_are_usual, planted.rewards_fall), {}, "TP2", "step 4: mean reward 0"),
    "logp_gap": (planted.gate_permuted, {}, "EP2", "step 1: sampler and trainer differ"),
    "reference_kl": (planted.adapters_not_at_zero, {}, "TP2", "step 1: before the first update, reference and policy"),
    "adapters": (planted.adapters_never_pushed, {}, "EP2", "step 2: "),
    "noise": (planted.engine_without_norms, NOISE, "TP2", "step 1: sigma is 0.01"),  # the file itself has no noise
    "gradient_spike": (
        planted.both(planted.two_steps_are_usual, planted.twelfth_gradient_is_large), {}, "EP2", "step 3: gradient no"
    ),
    # In step 1 some of the largest logits are equal in bf16.
    "entropy": (planted.policy_without_entropy, {"checks__logp_gap": "off"}, "TP2", "step 2: entropy "),
}  # fmt: skip
NOT_PLANTED = {"surprise"}  # 2,048 completions: FAULTS plants three in another shape


@pytest.fixture(scope="module")
def found_in_the_real_shape(model: Path, tmp_path_factory) -> dict[str, Any]:
    """The errors of all ranks, by check, and of two sound runs, which leave checkpoints; and the folder of all runs."""
    out, sound = tmp_path_factory.mktemp("real"), {"train__steps": 2, "train__checkpoint_every": 1}
    jobs = {
        check: (plant, real_shape(model, out / check, changes | {f"checks__{check}": "stop"}), layout)
        for check, (plant, changes, layout, _) in REAL.items()
    }
    for name, changes in RESUMED.items():
        jobs[name] = nothing, real_shape(model, out / name, sound | changes), "TP2"
    return raised_each(jobs) | {"folder": out}


@pytest.mark.parametrize("check", [check for check in ALL_CHECKS if check not in NOT_PLANTED])
def test_each_check_finds_its_fault_in_the_shape_of_a_real_configuration(check: str, found_in_the_real_shape) -> None:
    reports = found_in_the_real_shape[check]
    kind, message = reports[0]
    assert kind is Tripped and message.startswith(f"checks.{check}: {REAL[check][3]}"), message
    assert len(reports) == 2 and len(set(reports)) == 1, reports


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
        jobs[f"adapters on, {name}"] = planted.reference_with_adapters_on, cfg, "TP2"
        if changes:
            jobs["other routes"] = planted.reference_on_other_routes, cfg, "EP2"
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
    reports = raised(planted.adapters_not_at_zero, cfg, layout)
    (row,) = training.metrics(training.only_run(cfg))
    assert row["actor/kl_loss"] > 1e-3 and f"differ by {row['actor/kl_loss']:.2g} nats a token" in reports[0][1]


# ------------------------------------------------------------------------------------------------ faults of a resume


NOT_RESTORED = {
    "moments": (planted.moments_not_restored, "optimizer model.layers.0.self_attn.qkv_proj.A.exp_avg"),
    "adapters": (planted.adapters_not_restored, "adapter model.layers.0.self_attn.qkv_proj.A"),
    "step count": (planted.step_count_not_restored, "optimizer_steps 0 for 5"),
}


@pytest.mark.parametrize("layout", ["TP2_EP2", ci("TP1")])
def test_a_resume_without_all_of_its_checkpoint_stops(layout: str, model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, train__checkpoint_every=5, **FEW)
    run = training.run_all({"": (layout, cfg)})[""]
    (run / "finished.json").unlink()
    for plant, expected in NOT_RESTORED.values():
        reports = raised(plant, cfg, layout)
        assert len({message for _, message in reports}) == 1 and reports[0][0] is Tripped, reports
        assert "checks.state: after 5 steps: " in reports[0][1] and expected in reports[0][1], reports[0][1]
    assert raised(nothing, cfg, layout)[0] == (InputError, "")  # a correct resume goes on
