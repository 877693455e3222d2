"""Faults in whole runs that would train something else than intended: each is found, by the check that is named here.

Also: no check fires in the stored runs, or in unusual but legitimate configurations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import training
import world
from source import ROOT
from torch import Tensor
from training import after, raised

import adapter_weights
import data_gsm8k
import grpo
import lora_megatron
import parallel_setup
import reward_gsm8k
import weights_hf
from engines import torch_sampler
from engines.interface import Rule
from engines.torch_sampler import TorchSampler
from input_files import InputError
from knobs import Action, ChecksConfig
from lab import store
from lab.records import file_of
from learner import MOMENTS, Learner
from tripwires import Tripped, Tripwires

FEW = {
    "rollout__prompts_per_step": 4, "rollout__group_size": 2, "optim__prompts_per_update": 4,
    "rollout__max_new_tokens": 4, "eval__samples": 0, "eval__num_questions": 1, "train__steps": 5,
}  # fmt: skip
LARGE = {"rollout__prompts_per_step": 32, "rollout__group_size": 8, "optim__prompts_per_update": 32}
MANY_TOKENS = {"rollout__max_new_tokens": 12, "train__steps": 8}
CHECKS = [name for name, field in ChecksConfig.model_fields.items() if field.annotation == Action]


def nothing() -> None:
    pass


# ------------------------------------------------------------------------------------------------ faults of one process


def reference_with_adapters_on() -> None:
    lora_megatron.disabled = lambda adapters: contextlib.nullcontext()


def kl_of_the_wrong_sign() -> None:
    after(grpo, "kl", lambda value, *_: -value)


def one_sample_for_the_whole_group() -> None:
    after(TorchSampler, "sample", lambda groups, *_: [[group[0]] * len(group) for group in groups])


def end_token_never_recognised() -> None:
    def without_end(self: TorchSampler, *_, **__) -> None:
        self.stop_tokens = frozenset()
        self.is_stop[:] = False

    real = TorchSampler.__init__

    def init(self: TorchSampler, *args, **kwargs) -> None:
        real(self, *args, **kwargs)
        without_end(self)

    TorchSampler.__init__ = init


def always_the_first_step() -> None:
    real = data_gsm8k.Questions.pick
    data_gsm8k.Questions.pick = lambda self, step, count: real(self, 0, count)


def trained_on_the_held_out_file() -> None:
    real = data_gsm8k.load
    data_gsm8k.load = lambda data, split, *rest: real(data, "test", *rest)


def asks_held_out_questions() -> None:
    """The data are split correctly, but a question of the held-out part is asked."""
    parts = []
    after(data_gsm8k, "load", lambda found, *_: (parts.append(found), found)[1])
    after(data_gsm8k.Questions, "pick", lambda found, *_: [*found[:-1], parts[-1][0]])


FOUND = {  # fault: (function that plants it, changes to the run, kind of error, parts of the message)
    "reference with adapters on": (
        reference_with_adapters_on, LARGE, Tripped,
        ["checks.impossible: step 4: the KL to the reference is exactly 0 in 3 steps after updates"],
    ),
    "KL of the wrong sign": (kl_of_the_wrong_sign, {}, Tripped, ["checks.impossible: step 2: actor/kl_loss is -"]),
    "one sample for the whole group": (
        one_sample_for_the_whole_group, {}, Tripped, ["checks.sampling: step 3: all completions of every group are"],
    ),
    "one sample for the whole group, many sequences": (
        one_sample_for_the_whole_group, LARGE, Tripped, ["checks.sampling: step 1: all completions of every group"],
    ),
    "end token never recognised": (
        end_token_never_recognised, LARGE | {"rollout__max_new_tokens": 20}, Tripped,
        ["checks.sampling: step 1: not one completion ended by itself within 20 tokens"],
    ),
    "the same questions in every step": (
        always_the_first_step, {}, Tripped, ["checks.sampling: step 3: the same 4 of 40 questions for the 3rd time"],
    ),
    "trained on the held-out file": (
        trained_on_the_held_out_file, {}, InputError, ["data: 9 held-out questions are training questions as well"],
    ),
    "asks held-out questions": (
        asks_held_out_questions, {}, Tripped, ["checks.held_out: step 1 asks 1 held-out questions, for example"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FOUND)
def test_a_fault_that_metrics_and_questions_show_stops_the_run(fault: str, model: Path, tmp_path: Path) -> None:
    plant, changes, kind, expected = FOUND[fault]
    ((found, message),) = raised(plant, training.config(model, tmp_path, **FEW | changes))
    assert found is kind and all(part in message for part in expected), message
    assert len(message.splitlines()) <= 10


# ------------------------------------------------------------------------------------------------ faults of sampling


def chosen_by(change: Callable[[Rule], Rule]) -> None:
    """The sampler chooses tokens by another rule, but reports the log-probs of the right one."""
    real = torch_sampler.pick

    def pick(logits: Tensor, uniform: Tensor | None, rule: Rule) -> tuple[Tensor, Tensor]:
        if uniform is None:
            return real(logits, uniform, rule)
        token, _ = real(logits, uniform, change(rule))
        return token, torch.log_softmax(logits.float() / rule.temperature, -1).gather(-1, token[:, None])[:, 0]

    torch_sampler.pick = pick


def always_token_0() -> None:
    real = torch_sampler.pick
    torch_sampler.pick = lambda logits, *rest: real(logits.index_fill(1, torch.arange(1, logits.shape[1]), -1e3), *rest)


def each_sample_twice() -> None:
    after(
        TorchSampler, "sample", lambda groups, *_: [[group[j - j % 2] for j in range(len(group))] for group in groups]
    )


HOTTER = partial(chosen_by, lambda rule: rule._replace(temperature=1.3 * rule.temperature))
SURPRISING = {  # fault: (function that plants it, changes to the run, parts of the message)
    "temperature x 1.3": (HOTTER, {}, ["-log p of the sampled tokens is +", " standard deviations from its mean"]),
    "temperature x 1.3, four updates": (
        HOTTER, {"optim__prompts_per_update": 8}, ["-log p of the sampled tokens is +"],
    ),
    "temperature x 1.3, rows left out": (
        HOTTER, {"loss__skip_equal_groups": True, "loss__mask_truncated": True}, ["-log p of the sampled tokens is +"],
    ),
    "top-k 3": (
        partial(chosen_by, lambda rule: rule._replace(top_k=3)), {}, ["-log p of the sampled tokens is -"],
    ),
    "each sample twice": (
        each_sample_twice, {}, ["57.1% of the completions repeat another one of their group, but their log-probs pre"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", SURPRISING)
def test_tokens_drawn_from_another_distribution_are_found(fault: str, model: Path, tmp_path: Path) -> None:
    plant, changes, expected = SURPRISING[fault]
    cfg = training.config(model, tmp_path, checks__surprise="stop", **FEW | LARGE | MANY_TOKENS | changes)
    ((kind, message),) = raised(plant, cfg)
    assert kind is Tripped and message.startswith("checks.surprise: steps up to "), message
    assert all(part in message for part in expected), message


def test_a_token_that_is_always_drawn_is_found(model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, checks__surprise="stop", checks__logp_gap="off", **FEW | LARGE | MANY_TOKENS)
    ((kind, message),) = raised(always_token_0, cfg)
    assert kind is Tripped and message.startswith("checks.s"), message


# ------------------------------------------------------------------------------------------------ faults between ranks


def on_rank_1(plant: Callable[[], None]) -> None:
    if torch.distributed.get_rank() == 1:
        plant()


def one_gradient_not_summed(is_expert: bool) -> None:
    """On every rank, the gradient of one factor is not summed."""
    real = parallel_setup.Parallel.sync_gradients_

    def sync(self: parallel_setup.Parallel, parameters: list) -> None:
        left = [p for p in parameters if p.is_expert == is_expert][
            1
        ]  # a B, because the gradient of every A is 0 at first
        real(self, [p for p in parameters if p is not left])

    parallel_setup.Parallel.sync_gradients_ = sync


def a_factor_that_drifts() -> None:
    def drift(metrics: dict, learner: Learner, *_) -> dict:
        with torch.no_grad():
            next(f for name, f in learner.factors.items() if name.endswith("linear_qkv.A")).view(-1)[0] += 1e-3
        return metrics

    after(Learner, "update", drift)


def a_norm_read_wrongly() -> None:
    def change(_: None, model: torch.nn.Module, *__) -> None:
        with torch.no_grad():
            model.decoder.layers[1].input_layernorm.weight[3] += 1e-3

    after(weights_hf, "load", change)


def a_norm_in_another_order() -> None:
    """One rank has the elements of a norm in reverse order; the sum is the same."""

    def change(_: None, model: torch.nn.Module, *__) -> None:
        with torch.no_grad():
            weight = model.decoder.layers[1].input_layernorm.weight
            values = torch.arange(len(weight)).float()
            weight.copy_(values.flip(0) if torch.distributed.get_rank() == 1 else values)

    after(weights_hf, "load", change)


BETWEEN = {  # fault: (function that plants it, layouts, parts of the message)
    "a gradient not summed over data ranks": (
        partial(one_gradient_not_summed, False), ["DP2", "TP2_EP2_DP2"], ["after 1 steps: model.layers.0.self_attn."],
    ),
    "an expert's gradient not summed over its copies": (
        partial(one_gradient_not_summed, True), ["DP2", "EP2_DP4"], ["after 1 steps: model.layers.0.mlp.experts."],
    ),
    "a factor that drifts on one rank": (
        partial(on_rank_1, a_factor_that_drifts), ["DP2", "TP2", "EP2"],
        ["after 1 steps: model.layers.0.self_attn.qkv_proj.A of ranks 0, 1: not the same"],
    ),
    "a norm whose elements one rank has in another order": (
        a_norm_in_another_order, ["DP2"], ["after 0 steps: model.layers.1.input_layernorm.weight of ranks 0, 1"],
    ),
    "a norm that one rank has read wrongly": (
        partial(on_rank_1, a_norm_read_wrongly), ["DP2", "TP2_EP2_DP2"],
        ["after 0 steps: model.layers.1.input_layernorm.weight of ranks 0, 1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "layout"), [(fault, layout) for fault in BETWEEN for layout in BETWEEN[fault][1]])
def test_what_ranks_hold_in_common_must_stay_the_same(fault: str, layout: str, model: Path, tmp_path: Path) -> None:
    plant, _, expected = BETWEEN[fault]
    reports = raised(plant, training.config(model, tmp_path, **FEW), layout)
    assert {kind for kind, _ in reports} == {Tripped} and len({message for _, message in reports}) == 1, reports
    assert reports[0][1].startswith("checks.state: ") and all(part in reports[0][1] for part in expected), reports[0]


def test_pieces_with_other_bytes_are_named_if_ranks_hold_the_same_piece() -> None:
    named = "b of ranks 0, 1: not the same on all ranks that hold it"
    assert training.in_world("DP2", compared_pieces) == [("", named)] * 2


def compared_pieces() -> tuple[str, str]:
    parallel, rank = world.open_layout("DP2"), torch.distributed.get_rank()
    same, other = torch.ones(5), torch.full((5,), 1.0 + rank)
    pieces = {("a", ""): same, (f"own of {rank}", str(rank)): other}
    different = pieces | {("b", ""): other}
    return adapter_weights.differing(pieces, parallel), adapter_weights.differing(different, parallel)


# ------------------------------------------------------------------------------------------------ faults of a resume


def moments_not_restored() -> None:
    def forget(_: None, learner: Learner, *__) -> None:
        for name in MOMENTS:
            for value in learner.moments[name].values():
                value.zero_()

    after(Learner, "restore", forget)


def adapters_not_restored() -> None:
    real = Learner.restore

    def restore(self: Learner, *args) -> None:
        before = [factor.detach().clone() for factor in self.parameters]
        real(self, *args)
        with torch.no_grad():
            for factor, value in zip(self.parameters, before, strict=True):
                factor.copy_(value)

    Learner.restore = restore


def step_count_not_restored() -> None:
    after(Learner, "restore", lambda _, learner, *__: setattr(learner, "optimizer_steps", 0))


NOT_RESTORED = {
    "moments": (moments_not_restored, "optimizer model.layers.0.self_attn.qkv_proj.A.exp_avg"),
    "adapters": (adapters_not_restored, "adapter model.layers.0.self_attn.qkv_proj.A"),
    "step count": (step_count_not_restored, "optimizer_steps 0 for 5"),
}


@pytest.mark.parametrize("layout", ["TP1", "TP2_EP2"])
@pytest.mark.parametrize("part", NOT_RESTORED)
def test_a_resume_without_all_of_its_checkpoint_stops(part: str, layout: str, model: Path, tmp_path: Path) -> None:
    plant, expected = NOT_RESTORED[part]
    cfg = training.config(model, tmp_path, train__checkpoint_every=5, **FEW)
    assert {message for _, message in raised(nothing, cfg, layout)} == {""}
    run = training.only_run(cfg)
    (run / "finished.json").unlink()
    reports = raised(plant, cfg, layout)
    assert len({message for _, message in reports}) == 1 and reports[0][0] is Tripped, reports
    assert "checks.state: after 5 steps: " in reports[0][1] and expected in reports[0][1], reports[0][1]
    assert raised(nothing, cfg, layout)[0] == (InputError, "")  # a correct resume goes on


# ------------------------------------------------------------------------------------------------ collapse


def steps_of(rewards: list[float], kl: float, **changes: object) -> list[str]:
    """The warnings in a run with these mean rewards, one for each step."""
    said: list[str] = []
    watch = Tripwires(training.config(Path("none"), Path("none"), **changes), said.append, lambda bound: "")
    for step, reward in enumerate(rewards):
        row = dict.fromkeys(["reward/unparsable_frac", "response_length/truncated_frac", "rollout/identical_groups"], 0)
        row |= {"actor/grad_norm": 1.0, "actor/entropy": 1.0, "actor/lr": 1e-3, "rollout/logp_gap_mean": 0.0}
        row |= {"response_length/mean": 10.0, "reward/mean": reward, "actor/kl_loss": kl if step else 0.0}
        watch.after_step(step, row, (0.0, 1.0))
    return said


def test_a_reward_that_falls_far_below_its_own_start_is_reported_once() -> None:
    falling = [0.4] * 15 + [0.2] * 5 + [0.04] * 20
    (line,) = steps_of(falling, 0.1)
    # Steps 19 to 28 are two of 0.2 and eight of 0.04: 0.072 is the first mean under a fifth of 0.4.
    assert line.startswith("warning: checks.collapse: step 28: mean reward 0.072, after 0.400 in this run's first 10")
    assert steps_of(falling, 0.1, reward__permute=True) == []  # with shuffled rewards a collapse is no fault
    assert steps_of([0.4] * 15 + [0.1] * 30, 0.1) == []  # 0.1 is a quarter of 0.4
    assert steps_of([0.01] * 15 + [0.0] * 30, 0.1) == []  # the first rewards are too small to judge


def test_a_policy_far_from_the_reference_is_reported() -> None:
    (line,) = steps_of([0.5] * 30, 1.1)
    assert line.startswith("warning: checks.collapse: step 20: ") and "KL to the reference 1.1 nats a token" in line
    assert steps_of([0.5] * 30, 0.9) == []


# ------------------------------------------------------------------------------------------------ no false alarm


def test_no_check_would_have_fired_in_a_recorded_run() -> None:
    runs = [run for group in store.load_groups(ROOT / "results").values() for run in group]
    assert len(runs) > 80
    for run in [run for run in runs if "planted_fault.py" not in run.record.command]:
        given = run.record.config
        changes = {"model__dtype": given["model"]["dtype"], "reward__permute": given["reward"]["permute"]}
        losses = ("kl", "importance", "skip_equal_groups", "mask_truncated")
        changes |= {f"loss__{key}": given["loss"][key] for key in losses if key in given["loss"]}
        sizes = ("prompts_per_step", "group_size", "max_new_tokens", "temperature")
        changes |= {f"rollout__{key}": given["rollout"][key] for key in sizes}
        changes["checks__logp_gap_fp32"] = float(given["checks"].get("logp_gap_fp32", 1e-3))
        cfg = training.config(Path("none"), Path("none"), **changes)
        said: list[str] = []
        watch = Tripwires(cfg, said.append, lambda bound: "")
        quiet = {"adapters"}
        if given["aqn"].get("schedule") == "constant" and given["aqn"]["sigma_start"] >= 1:
            quiet |= {"truncated", "unparsable"}  # noise as large as the signal spoils the sampler's answers
        watch.checks = cfg.checks.model_copy(update=dict.fromkeys(CHECKS, "stop") | dict.fromkeys(quiet, "off"))
        collapsed = "off" in given["checks"].values()  # its sweep turns tripwires off, which would stop it
        with pytest.raises(Tripped) if collapsed else contextlib.nullcontext():
            for row in run.rows[:-1]:  # the last row has only the evaluation after the last step
                logged = {key for key in row if file_of(key) == "metrics.jsonl"} - {"step", "completions"}
                metrics = {key: row[key] for key in logged}
                if row["actor/grad_norm"] == 0 and given["loss"].get("skip_equal_groups"):
                    for name in ("actor/entropy", "actor/kl_loss"):
                        metrics.pop(name, None)  # old records have 0 for a step that trained no row
                else:
                    metrics.setdefault("actor/entropy", 1.0)  # some old records do not have these two
                metrics.setdefault("rollout/identical_groups", 0)
                watch.after_step(row["step"], metrics, (0.0, 1.0))
        assert said == [], run.record.id


LEGITIMATE = {
    **{f"temperature {t}": {"rollout__temperature": t} for t in (0.001, 0.01, 0.1, 0.5, 1.5, 3.0, 10.0)},
    "large step": LARGE,
    "large step at temperature 10": LARGE | {"rollout__temperature": 10.0},
    "large step at temperature 0.001": LARGE | {"rollout__temperature": 0.001},
    "one prompt": {"rollout__prompts_per_step": 1, "optim__prompts_per_update": 1, "rollout__group_size": 8},
    "one question": {
        "rollout__prompts_per_step": 1, "optim__prompts_per_update": 1, "data__num_train": 1, "train__steps": 8,
    },
    "two questions": {
        "rollout__prompts_per_step": 1, "optim__prompts_per_update": 1, "data__num_train": 2, "train__steps": 12,
    },
    "all questions in every step": {"data__num_train": 4},
    "no KL": {"loss__kl": "none"},
    **{f"KL {kind}": {"loss__kl": kind} for kind in ("k1", "k2", "k3", "low_var_kl+", "abs")},
    **{f"lr {lr}": {"optim__lr": lr} for lr in (1e-9, 1e-6, 0.1, 3.0)},
    "lr 1e-6 in bf16": {"optim__lr": 1e-6, "model__dtype": "bf16"},
    "lr 1e-6 in bf16 after a warm-up": {"optim__lr": 1e-6, "model__dtype": "bf16", "optim__warmup_steps": 5},
    "300 tokens": {"rollout__max_new_tokens": 300, "optim__tokens_per_micro_batch": 4096},
    "one token": {"rollout__max_new_tokens": 1},
    "one token, many sequences": LARGE | {"rollout__max_new_tokens": 1, "train__steps": 2},
    "greedy": {"rollout__top_k": 1},
    "nucleus": {"rollout__top_p": 0.1},
    "recompute": {"model__recompute": True},
    "gspo": {"loss__kind": "gspo"},
    "cispo": {"loss__kind": "cispo"},
    "Dr.GRPO": {"loss__advantage": "none", "loss__aggregate": "dr-grpo"},
    "leave-one-out": {"loss__advantage": "loo"},
    "bf16": {"model__dtype": "bf16"},
    "bf16 with noise": {"model__dtype": "bf16", "aqn__schedule": "constant"},
    "noise": {"aqn__schedule": "qerl", "aqn__num_stages": 3},
    "strong noise": {"aqn__schedule": "constant", "aqn__sigma_start": 0.3},
    "one step": {"train__steps": 1},
    "attention alone": {"lora__targets": ("linear_qkv",)},
    "router alone": {"lora__targets": ("router",)},
    "rank 1": {"lora__rank": 1, "lora__expert_rank": 1},
    "dropout": {"lora__dropout": 0.5},
    "shuffled rewards": {"reward__permute": True, "train__steps": 25},
    "several updates": {"optim__prompts_per_update": 1},
    "replay": {"replay__mode": "r3"},
    "groups that are equal left out": {"loss__skip_equal_groups": True, "loss__mask_truncated": True},
}  # fmt: skip


@pytest.mark.parametrize("turn", [0])  # 0 to 3 are all pairs of a configuration with the ranks and dtypes below
def test_no_check_stops_an_unusual_but_legitimate_run_or_warns(turn: int, model: Path, tmp_path: Path) -> None:
    """Off are `unparsable`, because a random model never answers in the right form, and `gradient_spike` and `entropy`,
    which concern bad training. Four tokens are too few for most answers to end."""
    quiet = {f"checks__{name}": "off" for name in ("unparsable", "truncated", "gradient_spike", "entropy", "collapse")}
    fired = {}
    for number, (name, changes) in enumerate(LEGITIMATE.items()):
        two = ["DP2", "EP2", "TP2"][number % 3]
        layout, dtype = [("TP1", "fp32"), (two, "fp32"), ("TP1", "bf16"), (two, "bf16")][(number + turn) % 4]
        cfg = training.config(model, tmp_path / str(number), **FEW | quiet | {"model__dtype": dtype} | changes)
        (_, message), *_ = raised(parsable, cfg, layout)
        log = (training.only_run(cfg) / "log.txt").read_text()
        if message or "warning" in log:
            fired[name, layout, dtype] = message or log
    assert fired == {}
    assert len(LEGITIMATE) >= 40


ON_SEVERAL_RANKS = {
    "two updates, router": ("TP2_EP2_DP2", {"lora__targets": ("linear_qkv", "router"), "optim__prompts_per_update": 2}),
    "bf16, split experts": ("TP2_EP2_ETP2", {"model__dtype": "bf16"}),
    "bf16, dropout": ("EP2_DP4", {"model__dtype": "bf16", "lora__dropout": 0.3}),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_SEVERAL_RANKS)
def test_ranks_of_a_sound_run_stay_the_same(name: str, model: Path, tmp_path: Path) -> None:
    layout, changes = ON_SEVERAL_RANKS[name]
    cfg = training.config(model, tmp_path, checks__unparsable="off", checks__truncated="off", **FEW | changes)
    assert {message for _, message in raised(parsable, cfg, layout)} == {""}
    assert "warning" not in (training.only_run(cfg) / "log.txt").read_text()


def test_a_step_without_any_trained_group_is_no_fault(model: Path, tmp_path: Path) -> None:
    """The task is solved: all groups have equal rewards, so no row is left for a KL."""
    cfg = training.config(model, tmp_path, checks__unparsable="off", checks__truncated="off",
                          loss__skip_equal_groups=True, **FEW | LARGE | {"train__steps": 8})  # fmt: skip
    assert raised(solved_after_two_steps, cfg) == [(InputError, "")]
    rows = training.metrics(training.only_run(cfg))
    assert rows[1]["actor/grad_norm"] > 0 and "actor/kl_loss" in rows[1]
    for row in rows[3:]:
        assert (
            not {"actor/entropy", "actor/kl_loss", "rollout/logp_gap_max"} & row.keys() and row["actor/grad_norm"] == 0
        )
        assert row["rollout/surprise_variance"] > 5  # of all sampled tokens, also of those that train nothing


def solved_after_two_steps() -> None:
    parsable()
    calls, real = [], reward_gsm8k.score

    def score(*args: str) -> float:
        calls.append(1)
        return real(*args) if len(calls) < 2 * 256 else 1.0

    reward_gsm8k.score = score


def parsable() -> None:
    reward_gsm8k.parsable = lambda *args: True
