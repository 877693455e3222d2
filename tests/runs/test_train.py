"""Whole trainings, also with a sampler that is some steps behind."""

import contextlib
import gzip
import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training
import world
from planted import both, pushed_otherwise
from planting import after
from refused import refusal
from tiers import asked, ci, nightly

import data_gsm8k
import grpo
from engines.interface import Completion
from facts.exits import InputError, Tripped
from learner import Learner
from run import input_check
from tasks.scoring import Scorer
from weights import huggingface

# ---------------------------------------------------------------------------------------------------------------- train
# The numbers of a step do not depend on how ranks, rows or memory share the work, and repeat to the last byte.
#
# Every run is the whole trainer on a random tiny model, in forked worlds. The reward is lenient
# (training.lenient_score), because a random model would earn none. A reward that is hard to earn is not covered.

ELSEWHERE = ("TP1", "TP8", "TP2_EP2_DP2", "TP2_EP4")  # test_lora.py covers the kind of TP8
LAYOUTS = ["TP2_EP2_DP2", ci("TP2_EP4"), *(nightly(name) for name in world.LAYOUTS if name not in ELSEWHERE)]
TWO_UPDATES = {"optim__prompts_per_update": 3, "train__steps": 2}
ONE_ROW = {"optim__tokens_per_micro_batch": 108}  # = max_prompt_tokens + max_new_tokens: a micro-batch is one row
ROUTER_TOO = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
OPTIONS = {  # every loss kind, aggregate, KL estimate, advantage and importance weight at least once
    "gspo": {
        "loss__kind": "gspo",
        "loss__kl": "k1",
        "loss__aggregate": "seq-mean-token-sum",
        "loss__advantage": "none",
        "rollout__temperature": 0.7,
    },
    "cispo": {
        "loss__kind": "cispo",
        "loss__kl": "k2",
        "loss__aggregate": "seq-mean-token-mean",
        "loss__advantage": "loo",
        "loss__importance": "sequence",
    },
    "dr_grpo": {
        "loss__kl": "k3",
        "loss__aggregate": "dr-grpo",
        "loss__entropy_coef": 0.05,
        "loss__dual_clip": 1.05,
        "optim__decay": "cosine",
        "loss__importance": "icepop",
        "loss__importance_clip": 5.0,
    },
    "noisy mis": {
        "loss__kl": "low_var_kl+",
        "loss__importance": "mis",
        "aqn__schedule": "constant",
        "aqn__sigma_start": 0.01,
    },
    "int4": {"model__quantisation": "int4", "replay__mode": "r3", "loss__importance": "token"},
    "masked_and_skipped": {
        "loss__kl": "none",
        "loss__mask_truncated": True,
        "loss__skip_equal_groups": True,
        "loss__aggregate": "seq-mean-token-mean",
    },
    "r2": {"replay__mode": "r2"},
    "dynamic": {
        "rollout__dynamic_rounds": 2,
        "replay__mode": "r3",
        "reward__overlong": {"buffer": 6, "penalty": 0.5},
    },
    "router": {"lora__targets": ROUTER_TOO, "reward__permute": True, "loss__kl": "abs"},
}
SPLITS = {  # the same step, split in another way
    "TP2_EP2": ("TP2_EP2", {}),
    "EP2, one row, recompute": ("EP2", ONE_ROW | {"model__recompute": True}),
}
ONCE = list(zip(OPTIONS, itertools.cycle(SPLITS), strict=False))  # each option in one split
IN_EACH_RUN = ("dr_grpo", "noisy mis", "int4", "dynamic")
PAIRS = [pair if pair[0] in IN_EACH_RUN else ci(*pair) for pair in ONCE]
PAIRS += [nightly(*pair) for pair in itertools.product(OPTIONS, SPLITS) if pair not in ONCE]
TWO_ROWS = {"rollout__prompts_per_step": 2, "rollout__group_size": 2, "optim__prompts_per_update": 1}
FEW = {  # fewer sequences than data ranks; sometimes no sequence is trained
    "two rows an update, replayed": TWO_ROWS | {"replay__mode": "r3"},
    "nothing to learn": {"rollout__temperature": 1e-4, "rollout__group_size": 2, "loss__skip_equal_groups": True},
    "two rows an update": TWO_ROWS,
}
FEW_NAMES = ["two rows an update, replayed", ci("nothing to learn"), nightly("two rows an update")]
MIXED = {"rollout__group_size": 24, "train__steps": 2}  # a group is all right or all wrong once in eight million
KINDS = ["qwen3_moe", ci("qwen2_moe")]


def column(run_dir: Path, key: str) -> list[float]:
    return [row[key] for row in training.metrics(run_dir)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = {kind: training.make_model(folder / kind, kind) for kind in asked(KINDS)}
    return kinds | {"int4": training.make_model(folder / "int4", expert_width=32)}  # whole groups


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory) -> dict[str, Path]:
    """All runs that are compared with each other. Runs with the same number of ranks share one world."""
    out = tmp_path_factory.mktemp("runs")
    jobs = {layout: (layout, TWO_UPDATES) for layout in ("TP1", *asked(LAYOUTS))}
    jobs |= {f"{kind} {layout}": (layout, {}) for kind in asked(KINDS) for layout in ("TP1", "TP2_EP2")}
    jobs |= {option: ("TP1", TWO_UPDATES | changes) for option, changes in OPTIONS.items()}
    for option, split in asked(PAIRS):
        layout, changes = SPLITS[split]
        jobs[f"{option}: {split}"] = layout, TWO_UPDATES | OPTIONS[option] | changes
    jobs |= {
        f"{name} {where}": (where, TWO_UPDATES | FEW[name]) for name in asked(FEW_NAMES) for where in ("TP1", "EP2_DP4")
    }
    jobs["again"] = "TP2_EP2", {"train__profile_steps": (2,), "train__trackers": ("tensorboard",)}
    jobs |= {f"bf16 {kind}": ("TP2_EP2", {"model__dtype": "bf16"}) for kind in asked(KINDS)}
    jobs["r3"] = "TP1", TWO_UPDATES | {"replay__mode": "r3"}
    jobs |= {f"{n} questions": ("TP1", {"train__completions_logged": n, "train__steps": 1}) for n in (0, 2)}
    jobs["skipped at once"] = ("TP1", {"loss__skip_equal_groups": True})
    jobs |= {f"no equal groups{' dynamic' * (n > 0)}": ("TP1", MIXED | {"rollout__dynamic_rounds": n}) for n in (0, 2)}
    jobs["seed 5"] = ("DP2", {"train__seed": 5, "eval__batch_size": 4})
    kinds = {label: next((kind for kind in ("qwen2_moe", "int4") if kind in label), "qwen3_moe") for label in jobs}
    return training.run_all(
        {
            label: (layout, training.config(models[kinds[label]], out / label, **changes))
            for label, (layout, changes) in jobs.items()
        }
    )


# ------------------------------------------------------------------------------------------------ splits


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_the_same_in_every_layout(layout, runs) -> None:
    training.assert_same_metrics(runs[layout], runs["TP1"])


@pytest.mark.parametrize(("option", "split"), PAIRS)
def test_a_step_is_the_same_however_its_rows_are_split(option, split, runs) -> None:
    training.assert_same_metrics(runs[f"{option}: {split}"], runs[option])


@pytest.mark.parametrize("kind", KINDS)
def test_both_architectures_and_one_update_a_step(kind, runs) -> None:
    training.assert_same_metrics(runs[f"{kind} TP2_EP2"], runs[f"{kind} TP1"])


@pytest.mark.parametrize("name", FEW_NAMES)
def test_ranks_without_a_row_of_their_own_change_nothing(name, runs) -> None:
    training.assert_same_metrics(runs[f"{name} EP2_DP4"], runs[f"{name} TP1"])
    if name == "nothing to learn":
        rows = training.metrics(runs[f"{name} TP1"])
        assert all(row["actor/grad_norm"] == 0.0 for row in rows)
        assert not any({"actor/loss", "actor/entropy", "rollout/logp_gap_max"} & row.keys() for row in rows)


def test_the_adapters_move_and_every_option_matters(runs) -> None:
    """Control: equal numbers would prove nothing if the runs did not learn, or if the options were not read."""
    for option in ("TP1", *OPTIONS):
        assert min(column(runs[option], "actor/grad_norm")) > 0
        if option != "masked_and_skipped":
            assert abs(column(runs[option], "actor/kl_loss")[1]) > 1e-5
    assert min(column(runs["TP1"], "actor/ratio_gap")) > 0  # the second update of a step starts at another policy
    assert max(column(runs["TP1"], "actor/clip_frac")) > 0 and max(column(runs["dr_grpo"], "actor/dual_clip_frac")) > 0
    assert 0 < sum(column(runs["TP1"], "reward/equal_groups")) < 12
    assert 0 < min(column(runs["TP1"], "response_length/truncated_frac"))
    losses = [tuple(column(runs[option], "actor/loss")) for option in ("TP1", *OPTIONS)]
    assert len(set(losses)) == len(losses)


def test_skipped_groups_do_not_change_the_scale_of_the_metrics(runs) -> None:
    rows, wanted = (training.metrics(runs[name]) for name in ("skipped at once", "qwen3_moe TP1"))
    assert rows[0]["reward/equal_groups"] > 0
    assert all(abs(row["actor/ratio_mean"] - 1) < 1e-6 for row in rows)
    assert abs(rows[0]["actor/entropy"] - wanted[0]["actor/entropy"]) < 0.01 * wanted[0]["actor/entropy"]


def test_groups_of_equal_correctness_are_replaced_and_without_them_nothing_changes(runs) -> None:
    plain, dynamic = (training.metrics(runs[f"no equal groups{name}"]) for name in ("", " dynamic"))
    new = {"rollout/rounds": 1, "rollout/dropped_groups_frac": 0, "rollout/sampled_per_trained": 1}
    for row, want in zip(dynamic, plain, strict=True):
        assert row == want | new | {"reward/first_round_correct": row["reward/first_round_correct"]}
        assert abs(row["reward/first_round_correct"] - row["reward/mean"]) < 1e-6
    rows = [training.completions(runs[f"no equal groups{name}"]) for name in ("", " dynamic")]
    assert rows[0] == rows[1] != []
    rows, whole = training.metrics(runs["dynamic"]), training.metrics(runs["TP1"])
    assert max(row["rollout/rounds"] for row in rows) > 1
    for row, want in zip(rows[:1], whole, strict=False):  # the first round is that of a run without the key
        assert (
            want["reward/equal_groups"] == round(6 * (row["rollout/sampled_per_trained"] - 1)) > 0
            or row["rollout/rounds"] > 2
        )
        assert row["reward/first_round_correct"] == pytest.approx(want["reward/mean"])
        assert row["response_length/truncated_frac"] == want["response_length/truncated_frac"]


def test_a_limit_keeps_the_completions_of_the_first_questions_and_0_keeps_none(runs) -> None:
    every, few = (training.completions(runs[name]) for name in ("qwen3_moe TP1", "2 questions"))
    assert few == [row for row in every if row["step"] == 1 and row["prompt"] < 2] and len(few) == 2 * 4
    answers = [training.completions(runs[name], "eval") for name in ("qwen3_moe TP1", "2 questions")]
    assert [row for row in answers[1] if row["step"] == 0] == [row for row in answers[0] if row["step"] == 0] != []
    assert not (runs["0 questions"] / "completions").exists()


# ------------------------------------------------------------------------------------------------ repetition


def test_the_same_run_twice_is_the_same_to_the_byte(runs) -> None:
    training.assert_same_bytes(runs["again"], runs["qwen3_moe TP2_EP2"])


def test_the_trace_of_a_step_has_the_phases_of_every_rank(runs) -> None:
    """The run was compared with an unwatched one above. It wanted a tracker, too, which may not be installed here."""
    run = runs["again"]
    paths = sorted((run / "profile").iterdir())
    assert [path.name for path in paths] == [f"step-2-rank-{rank}.json.gz" for rank in (0, 1)]
    for path in paths:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        phases = {event["name"] for event in events if event.get("cat") == "user_annotation"}
        assert {"sync", "generate", "reference", "update"} <= phases
    assert not (runs["qwen3_moe TP2_EP2"] / "profile").exists()
    off = "warning: train.trackers: tensorboard is off: ModuleNotFoundError"
    assert (off in (run / "log.txt").read_text()) != (run / "tensorboard").is_dir()


def test_the_first_evaluation_depends_neither_on_the_seed_nor_on_the_world(runs) -> None:
    first = {label: (run / "eval.jsonl").read_text().splitlines()[0] for label, run in runs.items()}
    assert first["seed 5"] == first["TP1"] == first["TP2_EP2_DP2"]
    assert json.loads(first["TP1"])["eval/num_questions"] == 9
    assert column(runs["seed 5"], "reward/mean") != column(runs["TP1"], "reward/mean")


def test_the_load_of_the_experts_and_the_speed_are_recorded(runs) -> None:
    """test_routing_replay.py and rooms/plan/test_estimates.py compare the numbers; the peak of a CPU is not known."""
    for label, run in runs.items():
        rows = [json.loads(line) for line in (run / "moe.jsonl").read_text().splitlines()]
        for row, metrics in zip(rows, training.metrics(run), strict=True):
            names = [name for name in metrics if name.startswith("moe/")]
            assert names == list(row)[1:] and len(names) == (4 if "actor/loss" in metrics else 0), label
            for name in names:
                assert len(row[name]) == 2 and abs(sum(row[name]) / 2 - metrics[name]) < 1e-4
        for line in (run / "timing.jsonl").read_text().splitlines():
            timing = json.loads(line)
            assert timing["perf/generate_tokens_per_s_device"] > 0 and "perf/mfu" not in timing
            assert (timing["perf/train_tokens_per_s_device"] > 0) == ("nothing to learn" not in label)


# ------------------------------------------------------------------------------------------------ the first step


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", ["{} TP1", "{} TP2_EP2", "bf16 {}"])
def test_the_first_step_starts_at_the_reference_and_the_ratio_is_1_before_a_steps_first_update(run, kind, runs) -> None:
    """B is 0 in the first step, so policy and reference are the same model. Each step has one update."""
    rows = training.metrics(runs[run.format(kind)])
    assert rows[0]["actor/kl_loss"] == 0.0 and rows[1]["actor/kl_loss"] > 0
    for row in rows:
        assert row["actor/ratio_gap"] == row["actor/ppo_kl"] == row["actor/clip_frac"] == 0.0
        assert abs(row["actor/ratio_mean"] - 1) < 1e-6


def test_sampler_and_trainer_agree_in_fp32_and_nearly_in_bf16(runs) -> None:
    for label, run in runs.items():
        if not label.startswith(("bf16", "noisy", "nothing to learn")):
            assert max(column(run, "rollout/logp_gap_max")) <= 1e-5, label
    assert min(column(runs["noisy mis"], "rollout/logp_gap_max")) > 1e-3  # it samples from other weights
    for kind in asked(KINDS):
        gaps = [column(runs[f"bf16 {kind}"], f"rollout/logp_gap_{what}") for what in ("mean", "max")]
        print(f"bf16 {kind}: gap of sampler and trainer, mean {max(gaps[0]):.5f}, largest {max(gaps[1]):.5f} nats")
        assert 0 < max(gaps[0]) < 0.02 and max(gaps[1]) < 1  # a token that takes another expert differs strongly


# ------------------------------------------------------------------------------------------------ routing replay

EDGE = 0.05  # so small gates are nearly undecided: a disturbance changes the chosen experts, but hardly their weights
DISTURBANCE = 0.002


@pytest.mark.parametrize("mode", ["r3", "r2"])
def test_an_undisturbed_sampler_makes_replay_change_the_later_updates_only(mode: str, runs) -> None:
    """The first update of a step would choose the same routes; later updates would choose others."""
    replayed, free = (training.metrics(runs[name])[0] for name in (mode, "TP1"))
    assert replayed["rollout/logp_gap_max"] < 1e-5 and replayed["reward/mean"] == free["reward/mean"]
    assert replayed["replay/differing_frac"] > 0 and replayed["actor/loss"] != free["actor/loss"]


@torch.no_grad()
def undecided(_: None, model: torch.nn.Module, *__) -> None:
    for layer in model.decoder.layers:
        layer.mlp.router.weight.mul_(EDGE)


def disturbed(name: str, tensor: torch.Tensor) -> torch.Tensor:
    noise = DISTURBANCE * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7))
    return tensor + noise if name.endswith("mlp.gate.weight") else tensor


# The trainer's routers are nearly undecided, and the sampler gets them with a small disturbance.
DISTURBED = both(after(huggingface, "load", undecided), pushed_otherwise(disturbed))


def test_replay_takes_most_of_a_disturbed_routers_gap_away(models, tmp_path: Path) -> None:
    cfgs = [
        training.config(
            models["qwen3_moe"], tmp_path / mode, replay__mode=mode, checks__off=("logp_gap",), train__steps=1
        )
        for mode in ("off", "r3")
    ]
    assert [training.raised(DISTURBED, cfg) for cfg in cfgs] == [[(InputError, "")]] * 2
    (free,), (replayed,) = (training.metrics(training.only_run(cfg)) for cfg in cfgs)
    gaps = [row["rollout/logp_gap_mean"] for row in (free, replayed)]
    assert gaps[0] > 1e-4 and gaps[1] < gaps[0] / 5, gaps
    assert replayed["replay/differing_frac"] > 0.05


# ------------------------------------------------------------------------------------------------ small pieces


def test_the_learning_rate_by_hand(tmp_path) -> None:
    expected = {
        "constant": [0.025, 0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1],
        "linear": [0.025, 0.05, 0.075, 0.1, 0.1, 0.0775, 0.055, 0.0325, 0.01],
        "cosine": [0.025, 0.05, 0.075, 0.1, 0.1, 0.0868198, 0.055, 0.0231802, 0.01],
    }
    for decay, rates in expected.items():
        changes = {"optim__lr": 0.1, "optim__warmup_steps": 4, "train__steps": 9}
        cfg = training.config(tmp_path, tmp_path, optim__decay=decay, **changes)
        assert [cfg.optim.rate(step, 9) for step in range(9)] == pytest.approx(rates, abs=1e-7)
        only = training.config(tmp_path, tmp_path, optim__decay=decay, optim__warmup_steps=0, train__steps=1)
        assert only.optim.rate(0, 1) == only.optim.lr


def test_shuffled_rewards_are_the_same_rewards_at_other_places() -> None:
    rewards = torch.arange(24.0).view(6, 4)
    before = rewards.clone()
    orders = [grpo.shuffled(rewards, seed) for seed in (1, 1, 2)]
    assert torch.equal(rewards, before)
    for order in orders:
        assert order.shape == (6, 4) and sorted(order.flatten().tolist()) == list(range(24))
        assert (order // 4 != rewards // 4).double().mean() > 0.5  # across groups, not only within a group
    assert torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_the_shuffled_control_has_the_rewards_of_the_run_that_it_controls(runs) -> None:
    assert column(runs["router"], "reward/mean")[0] == column(runs["TP1"], "reward/mean")[0]
    assert column(runs["router"], "actor/policy_loss")[0] != column(runs["TP1"], "actor/policy_loss")[0]


def test_an_answer_is_scored_without_its_stop_token(models, tmp_path) -> None:
    tokenizer = data_gsm8k.load_tokenizer(models["qwen3_moe"])
    cfg = training.config(models["qwen3_moe"], tmp_path, reward__method="strict")
    inputs = SimpleNamespace(tokenizer=tokenizer, scorer=Scorer(cfg.reward))
    question = data_gsm8k.Question("", "", "12", [])
    tokens = tokenizer("7 + 5 = 12\n#### 12", add_special_tokens=False)["input_ids"]
    for answer, ending, expected in (
        ([*tokens, 2], "stop", (1.0, True, True)),
        (tokens, "length", (1.0, True, True)),
        ([*tokens[:-1], 2], "stop", (0.0, True, False)),  # "#### 1"
        (tokens[:5], "length", (0.0, False, False)),
    ):
        [found] = input_check.Inputs.score(inputs, [(question, Completion(answer, [], ending))])
        assert found[:3] == expected and found.text == tokenizer.decode(answer[:-1] if ending == "stop" else answer)


THOUGHTS = "7 + 5 = 12</think> <answer>\\boxed{12}</answer>"
PROMPTS = [
    ("assistant\n<think>\n", "<think>\n"),
    ("<think>", "<think>"),
    ("<think></think>\n", ""),
    ("Why <think>?", ""),
]


@pytest.mark.parametrize(("end", "opened"), PROMPTS)
def test_a_completion_continues_the_thoughts_that_its_prompt_has_opened(end, opened, models, tmp_path) -> None:
    """Templates of reasoning models end the prompt with <think>; what follows was scored 0 by base_acc."""
    tokenizer = data_gsm8k.load_tokenizer(models["qwen3_moe"])
    cfg = training.config(models["qwen3_moe"], tmp_path, reward__method="base_acc")
    inputs = SimpleNamespace(tokenizer=tokenizer, scorer=Scorer(cfg.reward))
    prompt, tokens = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (f"7 + 5? {end}", THOUGHTS))
    question = data_gsm8k.Question("", "", "12", prompt)
    [found] = input_check.Inputs.score(inputs, [(question, Completion(tokens, [], "length"))])
    assert found[:3] == ((1.0, True, True) if opened else (0.0, False, False))
    assert found.text == opened + THOUGHTS


DAPO = 'The last line should be of the form Answer: $Answer.\n\n{}\n\nPut your answer on its own line after "Answer:".'
BOX = "{} Put it within \\boxed{{}}."


@pytest.mark.parametrize(
    ("method", "wrapper", "instruction", "warned"),
    [
        ("strict", DAPO, "", [("train", "'Answer:'", "lm_eval_flexible")]),
        ("math", DAPO, "", [("train", "'Answer:'", "lm_eval_flexible")]),
        ("lm_eval_flexible", DAPO, "", []),
        ("strict", BOX, "", [("train", "'\\\\boxed'", "math")]),
        ("math", BOX, "", []),
        ("math", "{}", "The answer follows '#### '.", [("data.instruction", "'####'", "strict")]),
        ("strict", "{}", "The answer follows '#### '.", []),
    ],
)
def test_a_form_of_answers_that_prompts_ask_for_and_the_reward_does_not_read_is_warned_of(
    method, wrapper, instruction, warned, tmp_path
) -> None:
    """The data of DAPO ask for 'Answer:' in every row; a reward for '####' would be 0 for ever."""
    cfg = training.config(tmp_path, tmp_path, reward__method=method, data__instruction=instruction)
    wrapped = [data_gsm8k.Question(wrapper.format(n), "", "1") for n in range(3)]
    plain = [data_gsm8k.Question(text, "", "1") for text in ("2 + 2?", "What does Answer: mean?", "3?")]
    inputs = SimpleNamespace(parts=[("train", [*wrapped, *plain[:1]]), ("held out", plain)])
    found = input_check.unread_forms(cfg.reward, cfg.data.instruction, inputs)
    assert len(found) == len(warned)
    for line, (where, form, named) in zip(found, warned, strict=True):
        assert line.startswith(f"warning: {where}") and f"asks for {form}" in line
        assert f"reward.method={method} does not read" in line and f"reward.method={named} does" in line


# ------------------------------------------------------------------------------------------------------ an older policy

TINY = Path(__file__).resolve().parents[2] / "configs" / "tiny_cpu.yaml"
STALE = {"loss__importance": "token", "train__steps": 4, "train__keep_last": 9}


def completions(run: Path) -> list[list[dict]]:
    """The completions of each step, as they were sampled."""
    by_step: dict[int, list[dict]] = {}
    for row in training.completions(run):
        by_step.setdefault(row.pop("step"), []).append(row)
    return [*by_step.values()]


def test_the_policy_of_k_steps_ago_samples(model, tmp_path) -> None:
    """Against runs that never move, and against the checkpoints: draws depend on the step, not on the policy."""

    def run(name: str, **changes) -> tuple[str, training.Config]:
        return "TP1", training.config(model, tmp_path / name, **STALE | changes)

    runs = training.run_all(
        {
            "frozen": run("frozen", optim__lr=1e-30, checks__off=("adapters", "impossible")),
            "0": run("0"),
            "1": run("1", rollout__staleness=1, train__checkpoint_every=1),
            "2": run("2", rollout__staleness=2, train__checkpoint_every=1),
        }
    )
    asked = {name: completions(path) for name, path in runs.items()}
    for name, first in (("0", 1), ("1", 2), ("2", 3)):
        same = [one == other for one, other in zip(asked[name], asked["frozen"], strict=True)]
        assert same == [True] * first + [False] * (4 - first), (name, same)
    # The first update is the same one, so step 2 of staleness 0 samples with the policy that step 3 of staleness 1 has.
    adapters = {step: training.whole(runs["1"], step, "adapter") for step in range(1, 5)}
    for step in (2, 3, 4):
        behind = training.whole(runs["1"], step, "adapter-behind-1")
        assert all(torch.equal(behind[name], adapters[step - 1][name]) for name in behind)
    kinds = [
        sorted(p.stem for p in training.checkpoint_of(runs["2"], step).glob("adapter*.safetensors")) for step in (1, 4)
    ]
    assert kinds == [["adapter", "adapter-behind-1"], ["adapter", "adapter-behind-1", "adapter-behind-2"]]
    for name in ("0", "1", "2"):
        for row in training.metrics(runs[name]):
            assert row["rollout/logp_gap_max"] < 1e-4, row  # judged with the policy that sampled
            moved = abs(row["rollout/importance_mean"] - 1) > 1e-5
            assert moved == (name != "0" and row["step"] > 1), (name, row)


def test_a_sampler_that_has_another_policy_than_said_stops_the_run(model, tmp_path) -> None:
    """Current instead of old factors in the push alone: the gap, judged with the old ones, shows it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real, calls = Learner.sampling_policy, []

        def policy(learner: Learner) -> contextlib.AbstractContextManager:
            calls.append(None)
            return contextlib.nullcontext() if len(calls) % 2 else real(learner)  # the push comes first

        patch.setattr(Learner, "sampling_policy", policy)

    cfg = training.config(model, tmp_path, **STALE | {"rollout__staleness": 1})
    for kind, message in training.raised(plant, cfg, "TP1"):
        assert (
            kind is Tripped and "checks.logp_gap: step 2: the log-probs of sampler and trainer differ by" in message
        ), message


def test_a_checkpoint_without_the_older_factors_is_refused(model, tmp_path) -> None:
    changes = STALE | {"train__checkpoint_every": 1, "train__steps": 2, "rollout__staleness": 1}
    run = training.run_all({"": ("TP1", training.config(model, tmp_path / "a", **changes))})[""]
    folder = training.checkpoint_of(run, 2)
    (folder / "adapter-behind-1.safetensors").unlink()
    sums = json.loads((folder / "checksums.json").read_text())
    del sums["adapter-behind-1.safetensors"]
    (folder / "checksums.json").write_text(json.dumps(sums))
    cfg = training.config(model, tmp_path / "b", **changes | {"train__resume": str(run), "train__steps": 3})
    assert training.raised(lambda patch: None, cfg) == [
        (
            InputError,
            "checkpoint: has adapter, optimizer instead of adapter, optimizer, adapter-behind-1",
        )
    ]


def test_old_samples_need_weights_or_the_word_that_there_are_none() -> None:
    assert refusal(TINY, "rollout.staleness=1") == (
        "rollout.staleness: 1 trains on samples of an older policy; to correct for this, set loss.importance to "
        "token, sequence, icepop or mis (or to uncorrected, for no correction)"
    )
    assert refusal(TINY, "loss.importance=uncorrected") == (
        "loss.importance: uncorrected is only for rollout.staleness above 0; set none"
    )
