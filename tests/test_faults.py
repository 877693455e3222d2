"""Each fault of a whole run that would train something else than intended is found, by the check that is named here.

A run is the whole trainer on a random tiny model in a forked world in which the fault is planted (support/planted.py).
The reward is lenient (training.lenient_score) unless a fault needs a constant one. Not covered: the vLLM engine, and a
rank that stalls.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import planted
import pytest
import torch
import training
from planted import FEW, LARGE, NOISE, SURE, nothing, on_rank_1
from planting import Plant
from scope import cases
from training import raised

from aqn import AqnError
from inputs.files import InputError
from tripwires import Tripped

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
    "adapters not at zero": Fault(planted.adapters_not_at_zero, ["checks.reference_kl", "adapters start at 0"]),
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
    cases([("other norms", "TP2_EP2_DP2"), ("no norms taken", "TP2")], [("other norms", "EP2")]),
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


# ------------------------------------------------------------------------------------------------ faults of a resume


NOT_RESTORED = {
    "moments": (planted.moments_not_restored, "optimizer model.layers.0.self_attn.qkv_proj.A.exp_avg"),
    "adapters": (planted.adapters_not_restored, "adapter model.layers.0.self_attn.qkv_proj.A"),
    "step count": (planted.step_count_not_restored, "optimizer_steps 0 for 5"),
}


@pytest.mark.parametrize("layout", cases(["TP2_EP2"], ["TP1"]))
def test_a_resume_without_all_of_its_checkpoint_stops(layout: str, model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, train__checkpoint_every=5, **FEW)
    run = training.run_all({"": (layout, cfg)})[""]
    (run / "finished.json").unlink()
    for plant, expected in NOT_RESTORED.values():
        reports = raised(plant, cfg, layout)
        assert len({message for _, message in reports}) == 1 and reports[0][0] is Tripped, reports
        assert "checks.state: after 5 steps: " in reports[0][1] and expected in reports[0][1], reports[0][1]
    assert raised(nothing, cfg, layout)[0] == (InputError, "")  # a correct resume goes on
