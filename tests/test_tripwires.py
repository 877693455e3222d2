"""Each tripwire fires in a whole run with the fault that it is for, and does not fire in sound runs.

A run is the whole trainer on a random tiny model in a forked world in which the fault is planted. The reward is lenient
(training.lenient_score) unless a test needs a constant one. Not covered: the vLLM engine, and a rank that stalls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import breaking
import pytest
import torch
import training
import world
from torch import Tensor
from training import after, raised

import aqn
import aqn_targets
import data_gsm8k
import grpo
import lora_megatron
import parallel_setup
import reward_gsm8k
import runlog
import weight_sync
import weights_hf
from aqn import AqnError
from config import load_config, to_yaml
from engines.torch_decoder import Decoder
from input_files import InputError
from knobs import Action, ChecksConfig, Config
from lab import run_page
from learner import Learner
from tripwires import Tripped, Tripwires

FEW = {  # a step takes about 50 ms
    "rollout__prompts_per_step": 4, "rollout__group_size": 2, "optim__prompts_per_update": 4,
    "rollout__max_new_tokens": 4, "eval__samples": 0, "eval__num_questions": 1,
}  # fmt: skip
CHECKS = [name for name, field in ChecksConfig.model_fields.items() if field.annotation == Action]
ALL_STOP = {f"checks__{name}": "stop" for name in CHECKS}
ALL_STOP["checks__truncated_share"] = 0.9  # answers of a random model are often longer than 4 tokens
NOISE = {"aqn__schedule": "constant"}


# ------------------------------------------------------------------------------------------------ the faults


def nothing() -> None:
    pass


def pushed_otherwise(change: Callable[[str, Tensor], Tensor]) -> None:
    """Push ``change(name, tensor)`` instead of every tensor."""
    after(weights_hf, "export", lambda stream, *_: ((name, change(name, tensor)) for name, tensor in stream))


def experts_delta_dropped() -> None:
    """The merge forgets the LoRA of the routed experts of layer 1."""

    def base(value: Tensor, slot: weights_hf.Slot) -> Tensor:
        return slot.weight if slot.expert is not None and ".layers.1." in slot.names[0] else value

    after(weights_hf, "merged", base)


def gate_transposed() -> None:
    """The router of layer 1 is pushed transposed but with the right shape, so no check of shapes notices it."""
    gate = "model.layers.1.mlp.gate.weight"
    pushed_otherwise(lambda name, tensor: tensor.t().reshape(tensor.shape) if name == gate else tensor)


def gate_permuted() -> None:
    """The router of layer 0 is pushed with its experts in another order."""
    gate = "model.layers.0.mlp.gate.weight"
    pushed_otherwise(lambda name, tensor: tensor.roll(1, 0) if name == gate else tensor)


def adapters_never_pushed() -> None:
    after(weights_hf, "merged", lambda value, slot: slot.weight)


def nan_in_one_expert() -> None:
    broken, seen = "model.layers.1.mlp.experts.5.down_proj.weight", []

    def change(name: str, tensor: Tensor) -> Tensor:
        seen.append(name)
        return tensor * float("nan") if name == broken and seen.count(name) == 3 else tensor  # in the push of step 2

    pushed_otherwise(change)


def engine_without_norms() -> None:
    """After its first load, the engine ignores the norms that are pushed."""
    real = Decoder.load_weights

    def load_weights(self: Decoder, stream) -> None:
        keep = self.ready
        slots = self.slots
        real(self, ((name, slots[name].clone() if keep and "norm" in name else value) for name, value in stream))

    Decoder.load_weights = load_weights


def engine_with_larger_norms() -> None:
    """The engine multiplies the norms that are pushed by 1.05."""
    real = Decoder.load_weights

    def load_weights(self: Decoder, stream) -> None:
        real(self, ((name, value * 1.05 if "norm" in name else value) for name, value in stream))

    Decoder.load_weights = load_weights


def noise_too_strong() -> None:
    real = aqn._noisy
    aqn._noisy = lambda clean, sigma, *rest: real(clean, 2 * sigma, *rest)


def noise_in_the_trainer() -> None:
    """The noise of a push stays in the weights of the trainer, so noise would accumulate."""

    def leak(metrics: dict, learner: Learner, *_) -> dict:
        with torch.no_grad():
            learner.model.decoder.layers[1].input_layernorm.weight.add_(0.01)
        return metrics

    after(Learner, "update", leak)


def noise_on_a_class_that_is_not_pushed() -> None:
    """The norms of another class are pushed."""
    real = aqn_targets.touched_names
    aqn_targets.touched_names = lambda plan: {name.replace("input", "post_attention") for name in real(plan)}
    after(aqn, "clean_norms", lambda clean, *_: clean | {
        f"model.layers.{layer}.input_layernorm.weight": torch.ones(32) for layer in (0, 1)
    })  # fmt: skip


def adapters_not_at_zero() -> None:
    def attach(adapters: dict, *_) -> dict:
        with torch.no_grad():
            for name, factor in lora_megatron.factors(adapters).items():
                if name.endswith(".B"):
                    factor.fill_(0.01)
        return adapters

    after(lora_megatron, "attach", attach)


def loss_metric_not_finite() -> None:
    after(grpo, "policy_loss", lambda result, *_: (result[0], result[1] | {"ppo_kl": torch.tensor(float("nan"))}))


def gradient_not_finite() -> None:
    after(grpo, "group_advantages", lambda advantages, *_: advantages / 0)


def twelfth_gradient_is_large() -> None:
    calls = []

    def grow(_: None, parallel: parallel_setup.Parallel, parameters: list) -> None:
        calls.append(1)
        if len(calls) == 12:
            for parameter in parameters:
                parameter.grad *= 1000

    after(parallel_setup.Parallel, "sync_gradients_", grow)


def policy_without_entropy(sharper: float = 1e4) -> None:
    """A head so sharp that one token has all the probability, in sampler and trainer."""

    def sharpen(_: None, model: torch.nn.Module, *__) -> None:
        with torch.no_grad():
            model.output_layer.weight.mul_(sharper)

    after(weights_hf, "load", sharpen)


def sure_policy() -> None:
    """The most likely token has a log-prob of exactly 0, but not at temperature FLAT. All answers are parsable."""
    policy_without_entropy(80)
    every_answer_parsable()


def sure_policy_watched_at_temperature_1() -> None:
    sure_policy()
    weight_sync.FLAT = 1.0


SURE = {"checks__entropy": "off", "checks__logp_gap": "off", "checks__reward_constant": "off"}
STOPS = {  # fault: (function that plants it, changes to the run, parts of the message)
    "experts' delta dropped": (
        experts_delta_dropped, {},
        ["checks.logp_gap", "step 2", "layer 1 is the first whose output differs", "weights_hf.export"],
    ),
    "experts' delta dropped under noise": (
        experts_delta_dropped, NOISE, ["checks.logp_gap", "step 2", "layer 1 is the first whose output differs"],
    ),
    "gate transposed": (gate_transposed, {}, ["checks.logp_gap", "step 1", "layer 1 is the first"]),
    "gate permuted": (gate_permuted, {}, ["checks.logp_gap", "step 1", "layer 0 is the first"]),
    "adapters never pushed": (
        adapters_never_pushed, {}, ["checks.adapters", "step 2", "the merge of the adapters"],
    ),
    "engine without norms": (engine_without_norms, NOISE, ["checks.noise", "step 1", "takes pushed norms"]),
    "engine without norms, bf16": (
        engine_without_norms, NOISE | {"model__dtype": "bf16"}, ["checks.noise", "step 1", "takes pushed norms"],
    ),
    "noise that bf16 rounds away": (
        lambda: None, NOISE | {"model__dtype": "bf16", "aqn__sigma_start": 1e-6, "aqn__sigma_end": 1e-7},
        ["checks.noise", "step 1", "rounding left none of this noise"],
    ),
    "noise watched where it cannot show": (
        sure_policy_watched_at_temperature_1, NOISE | SURE, ["checks.noise", "step 1", "takes pushed norms"],
    ),
    "update lost in rounding": (
        nothing,
        {"model__dtype": "bf16", "rollout__sync": "merged", "lora__dropout": 0.1, "optim__lr": 1e-4,
         "checks__rounding": "stop"},
        ["checks.rounding", "step 2: the sampler has ", "% of the update", "rollout.sync=adapter"],
    ),
    "adapters not at zero": (adapters_not_at_zero, {}, ["checks.reference_kl", "adapters start at 0"]),
    "metric not finite": (loss_metric_not_finite, {}, ["checks.non_finite", "step 1", "actor/ppo_kl"]),
    "gradient spike": (
        twelfth_gradient_is_large, {"train__steps": 13, "checks__gradient_spike": "stop"},
        ["checks.gradient_spike", "step 12", "x the usual", "optim.lr"],
    ),
    "entropy": (
        policy_without_entropy, {"checks__entropy": "stop", "checks__logp_gap": "off"},
        ["checks.entropy", "step 1", "loss.entropy_coef"],
    ),
    "reward constant": (
        nothing, {"checks__reward_constant_steps": 2},
        ["checks.reward_constant", "every reward of 2 steps is 0", "completions.jsonl"],
    ),
    "no answers": (nothing, {"checks__unparsable": "stop"}, ["checks.unparsable", "step 1: 100.0%", "chat template"]),
    "answers cut off": (
        nothing,
        {"checks__truncated": "stop", "rollout__max_new_tokens": 2, "rollout__prompts_per_step": 32,
         "rollout__group_size": 8, "optim__prompts_per_update": 32},
        ["checks.truncated", "step 1: ", "% of the completions are cut off at 2 tokens", "enable_thinking"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", STOPS)
def test_a_planted_fault_stops_the_run_and_is_named(fault: str, model: Path, tmp_path: Path) -> None:
    plant, changes, expected = STOPS[fault]
    cfg = training.config(model, tmp_path, **FEW | changes)
    ((kind, message),) = raised(plant, cfg, lenient=fault != "reward constant")
    assert kind is Tripped and all(part in message for part in expected), message
    assert len(message.splitlines()) <= 10 and expected[0] + "=warn" in message
    print(message)


@pytest.mark.parametrize("fault", ["experts' delta dropped", "gate permuted", "adapters never pushed"])
def test_every_rank_stops_with_the_same_report(fault: str, model: Path, tmp_path: Path) -> None:
    plant, changes, expected = STOPS[fault]
    reports = raised(plant, training.config(model, tmp_path, **FEW | changes), "TP2_EP2")
    assert reports[0] == reports[1] and all(part in reports[0][1] for part in expected), reports


ON_RANK_1 = {  # fault of one rank's engine: (function that plants it, changes to the run, parts of the message)
    "other norms": (engine_with_larger_norms, {}, ["checks.logp_gap", "step 1", "on rank 1 alone"]),
    "other norms under noise": (engine_with_larger_norms, NOISE, ["checks.logp_gap", "step 1", "on rank 1 alone"]),
    "no norms taken": (engine_without_norms, NOISE, ["checks.noise", "step 1", "takes pushed norms"]),
}


def rank_1s(plant: Callable[[], None]) -> None:
    if torch.distributed.get_rank() == 1:
        plant()


@pytest.mark.parametrize("layout", ["TP2", "EP2", "TP2_EP2_DP2"])
@pytest.mark.parametrize("fault", ON_RANK_1)
def test_a_fault_of_one_rank_stops_all_ranks_or_warns_once(fault: str, layout: str, model: Path, tmp_path: Path):
    """No rank may decide alone: the others would wait in a collective. Tensor ranks must see the same answer."""
    plant, changes, expected = ON_RANK_1[fault]
    stop, warn = (
        training.config(model, tmp_path / action, **{expected[0].replace(".", "__"): action}, **FEW | changes)
        for action in ("stop", "warn")
    )
    reports = raised(partial(rank_1s, plant), stop, layout)
    assert {kind for kind, _ in reports} == {Tripped} and len({message for _, message in reports}) == 1, reports
    assert all(part in reports[0][1] for part in expected), reports[0]
    assert raised(partial(rank_1s, plant), warn, layout) == [(InputError, "")] * len(reports)
    run = training.only_run(warn)
    text = (run / "log.txt").read_text()
    assert text.count(f"warning: {expected[0]}: step 1") == 1 and all(part in text for part in expected[2:])
    assert [row["step"] for row in training.metrics(run)] == [0, 1, 2] and (run / "finished.json").exists()


@pytest.mark.parametrize(
    ("dtype", "usual", "sound", "broken"), [("fp32", 2e-7, 6e-5, 2e-4), ("bf16", 3e-3, 0.025, 0.04)]
)
def test_a_gap_far_above_the_runs_own_first_steps_is_reported_below_the_absolute_bound(dtype, usual, sound, broken):
    """One step alone is not reported: a sound fp32 run had 3e-4, from one token with two almost equal experts."""
    cfg = training.config(Path("none"), Path("none"), model__dtype=dtype, checks__logp_gap="stop")
    said: list[str] = []
    watch = Tripwires(cfg, said.append, lambda bound: "all layers agree")
    metrics = {"reward/unparsable_frac": 0.0, "response_length/truncated_frac": 0.0}
    metrics |= {"actor/grad_norm": 1.0, "actor/entropy": 1.0, "actor/lr": 1e-3, "reward/mean": 0.5}
    metrics |= {"rollout/identical_groups": 0, "response_length/mean": 10.0}
    gaps = [usual] * 6 + [sound] * 2 + [usual] * 4 + [sound] * 5 + [broken, broken, usual]
    for step, gap in enumerate([*gaps, broken, broken]):
        watch.after_step(step, metrics | {"rollout/logp_gap_mean": gap}, (0.0, 1.0))
    assert said == []
    for step in range(len(gaps) + 2, len(gaps) + 6):
        watch.after_step(step, metrics | {"rollout/logp_gap_mean": broken}, (0.0, 1.0))
    (line,) = said  # reported once
    assert f"warning: checks.logp_gap: step {len(gaps) + 3}: sampler and trainer differ by {broken:.2g} nats" in line
    assert f"after {usual:.2g} in this run's first 10 steps" in line and "all layers agree" in line


def another_question() -> None:
    """On the node of rank 1, the last question is another one."""

    def change(found: tuple, cfg: Config, split: str) -> tuple:
        return [*found[0][:-1], (f"What is 1 + 1 in {split}?", "#### 2")], *found[1:]

    after(data_gsm8k, "read", change)


def test_ranks_that_have_read_other_questions_end_with_the_same_line(model: Path, tmp_path: Path) -> None:
    reports = raised(partial(rank_1s, another_question), training.config(model, tmp_path, **FEW), "TP2")
    assert reports[0] == reports[1] and reports[0][0] is InputError
    assert "the training questions as prompts: rank 1 did not read what rank 0 read" in reports[0][1]


def test_a_push_that_is_stuck_on_one_rank_is_named() -> None:
    cfg = training.config(Path("none"), Path("none"), checks__adapters="stop")
    watch = Tripwires(cfg, print, lambda bound: "")
    watch.after_push(0, [1.0, 2.0], None)
    watch.after_push(1, [1.5, 2.5], 0.1)
    watch.after_push(2, [1.5, 2.5], 0.0)  # the update had no gradient
    with pytest.raises(Tripped, match="pushed to the sampler on rank 1 are the ones of before"):
        watch.after_push(3, [1.6, 2.5], 0.1)


OTHER_STOPS = {  # faults that other files than tripwires.py refuse
    "NaN in one expert": (
        nan_in_one_expert, {}, Tripped, "model.layers.1.mlp.experts.5.down_proj.weight has NaN or infinity"
    ),
    "gradient not finite": (gradient_not_finite, {}, Tripped, "step 1: the gradient norm is nan; nothing"),
    "noise too strong": (noise_too_strong, NOISE, AqnError, "AQN: realised std 0.0196, needed 0.01"),
    "noise in the trainer": (
        noise_in_the_trainer, NOISE, AqnError, "model.layers.1.input_layernorm.weight is not the clean weight any more"
    ),
    "noise on a wrong class": (
        noise_on_a_class_that_is_not_pushed, NOISE | {"aqn__targets": ("attention",)}, AqnError,
        "none of the targets was in the push",
    ),
    "targets that touch nothing": (
        nothing, NOISE | {"aqn__targets": ("mlp",)}, InputError, "aqn.targets: mlp touches no norm"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", OTHER_STOPS)
def test_a_fault_that_has_its_own_error_is_named_too(fault: str, model: Path, tmp_path: Path) -> None:
    plant, changes, kind, expected = OTHER_STOPS[fault]
    cfg = training.config(model, tmp_path, train__checkpoint_every=1, **FEW | changes)
    ((found, message),) = raised(plant, cfg)
    assert found is kind and expected in message and len(message.splitlines()) <= 10, (found, message)
    saved = len(list(Path(cfg.train.out_dir).glob("*/checkpoints/step-*")))
    assert saved == {"NaN in one expert": 1, "noise in the trainer": 1}.get(
        fault, 0
    )  # the checkpoints of the sound steps


# ------------------------------------------------------------------------------------------------ warn, off, the exit


@pytest.mark.parametrize(("action", "warnings"), [("warn", 1), ("off", 0)])
def test_warn_prints_once_and_goes_on_and_off_prints_nothing(action, warnings, model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, checks__logp_gap=action, checks__unparsable="off", **FEW)
    assert raised(gate_permuted, cfg) == [(InputError, "")]
    run = training.only_run(cfg)
    assert (run / "log.txt").read_text().count("warning: checks.logp_gap: step 1: sampler and trainer") == warnings
    assert "warning" not in (run / "log.txt").read_text().replace("warning: checks.logp_gap", "")
    assert [row["step"] for row in training.metrics(run)] == [0, 1, 2] and (run / "finished.json").exists()
    assert min(row["rollout/logp_gap_mean"] for row in training.metrics(run)) > 1e-3


@pytest.mark.filterwarnings(r"ignore:::megatron\.", r"ignore:::torch\.")  # the command ignores them too
def test_the_command_ends_with_code_3_and_the_report(model: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "run.yaml").write_text(to_yaml(training.config(model, tmp_path, **FEW)))
    for module, name in ((run_page, "draw_curves"), (runlog, "write_records")):
        monkeypatch.setattr(module, name, lambda *args: None)
    monkeypatch.setattr(weights_hf, "export", weights_hf.export)  # restores it after this test
    gate_permuted()
    assert breaking.exit_code([str(tmp_path / "run.yaml")]) == 3
    message = capfd.readouterr().err
    assert message.startswith("stopped: checks.logp_gap: step 1") and "layer 0" in message
    assert "Traceback" not in message and len(message.splitlines()) <= 10
    assert message.endswith("to go on regardless: checks.logp_gap=warn\n")


def test_a_key_that_is_not_read_is_refused(tmp_path: Path) -> None:
    lines = to_yaml(training.config(tmp_path, tmp_path, checks__logp_gap="off"))
    (tmp_path / "run.yaml").write_text(lines.replace("logp_gap: 'off'", "logp_gap: 'off'\n  logp_gap_fp32: 0.01"))
    with pytest.raises(InputError, match="checks.logp_gap_fp32: not read, checks.logp_gap is off"):
        load_config(tmp_path / "run.yaml")


# ------------------------------------------------------------------------------------------------ sound runs


def every_answer_parsable() -> None:
    """Count every answer as parsable: a random model never answers in the right form, which a tripwire would notice."""
    reward_gsm8k.parsable = lambda *args: True


def test_noise_shows_on_a_policy_that_is_sure_of_every_token(model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, **FEW | NOISE | SURE)
    assert raised(sure_policy, cfg) == [(InputError, "")]
    assert all(row["aqn/probe_shift"] > 0 for row in training.metrics(training.only_run(cfg)))


MANY = {"train__steps": 200, "optim__lr": 1e-3}
SOUND = {  # all tripwires on `stop`
    "200 steps": ("TP1", MANY),
    "200 steps of noise and replay": (
        "TP1",
        MANY | {"aqn__schedule": "qerl", "replay__mode": "r3", "loss__importance": "token",
                "lora__targets": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")},
    ),
    "dropout": ("TP1", {"lora__dropout": 0.1}),
    "bf16, the reference routes natively": (
        "TP2_EP2", {"model__dtype": "bf16", "replay__mode": "r3", "replay__reference": "native"}
    ),
    "noise in bf16": ("TP2_EP2", NOISE | {"model__dtype": "bf16"}),
    "a step without anything to learn": (
        "TP1", {"rollout__top_k": 1, "loss__skip_equal_groups": True, "loss__kl": "none"}
    ),
    "several updates a step": ("TP1", {"optim__prompts_per_update": 2, "replay__mode": "r2"}),
}  # fmt: skip


@pytest.mark.parametrize("name", SOUND)
def test_no_tripwire_fires_in_a_sound_run(name: str, model: Path, tmp_path: Path) -> None:
    layout, changes = SOUND[name]
    cfg = training.config(model, tmp_path, **FEW | ALL_STOP | changes)
    assert raised(every_answer_parsable, cfg, layout) == [(InputError, "")] * world.LAYOUTS[layout][0]
    run = training.only_run(cfg)
    assert "warning" not in (run / "log.txt").read_text()
    assert len(training.metrics(run)) == cfg.train.steps
