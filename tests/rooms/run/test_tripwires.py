"""The checks of every step: on metrics, and on runs with a planted fault."""

import math
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import breaking
import planted
import planted_trainer
import pytest
import training
import world
from planted import FAULTS, FEW, LARGE, NOISE, SURE, every_answer_parsable, nothing, solved_after_two_steps, sure_policy
from planting import Plant, before, both
from source import ROOT
from tiers import asked, ci, nightly
from training import raised, raised_each

import rollout
from facts.checks import CHECKS
from facts.exits import AqnError, InputError, Tripped
from inputs.config import load_config, to_yaml
from knobs import ChecksConfig, Config, Merging
from lab import curves
from run.tripwires import Tripwires
from runlog import log as runlog

# ------------------------------------------------------------------------------------------------------------ tripwires
# No tripwire fires in a sound run; what a tripwire says, once or never; the exit code of a run that it ends.
# The faults for which they exist come after.

# Answers of a random model are often longer than 4 tokens.
ALL_STOP = {"checks__warn": (), "checks__off": ("truncated",)}
ALL_WARN = {"checks__warn": tuple(CHECKS)}


def said_in(rows: list[dict], **changes: object) -> list[str]:
    """The warnings in a run whose steps have these metrics, and otherwise those of a sound step."""
    said: list[str] = []
    cfg = training.config(Path("none"), Path("none"), **{"train__steps": 1000} | changes)
    watch = Tripwires(cfg, said.append)
    sound = dict.fromkeys(["reward/unparsable_frac", "response_length/truncated_frac", "rollout/identical_groups"], 0)
    sound |= {"actor/grad_norm": 1.0, "actor/entropy": 1.0, "actor/lr": 1e-3, "rollout/logp_gap_mean": 0.0}
    sound |= {"response_length/mean": 10.0, "reward/mean": 0.5}
    for step, row in enumerate(rows):
        watch.after_step(step, sound | row, (0.0, 1.0), lambda bound: "layers agree")
    return said


def test_the_first_warning_of_each_check_is_kept_also_over_a_resume() -> None:
    cfg = training.config(Path("none"), Path("none"), **ALL_WARN)
    first = Tripwires(cfg, print)
    for step in (9, 10):
        first.trip("entropy", f"step {step}: 1e-5", "optim.lr")
    again = Tripwires(cfg, print, first.messages)
    again.trip("entropy", "step 10: 1e-5", "optim.lr")
    again.trip("unparsable", "step 12: 96.0%", "the prompt")
    assert first.messages == {"entropy": "step 9: 1e-5"}
    assert again.messages == {"entropy": "step 9: 1e-5", "unparsable": "step 12: 96.0%"}


@pytest.mark.parametrize(
    ("dtype", "usual", "sound", "broken"), [("fp32", 2e-7, 6e-5, 2e-4), ("bf16", 3e-3, 0.025, 0.04)]
)
def test_a_gap_far_above_the_runs_own_first_steps_is_reported_below_the_absolute_bound(dtype, usual, sound, broken):
    """One step alone is not reported: a sound fp32 run had 3e-4, from one token with two almost equal experts."""
    gaps = [usual] * 6 + [sound] * 2 + [usual] * 4 + [sound] * 5 + [broken, broken, usual, *[broken] * 6]
    rows = [{"rollout/logp_gap_mean": gap} for gap in gaps]
    assert said_in(rows[:-4], model__dtype=dtype) == []
    (line,) = said_in(rows, model__dtype=dtype)  # reported once
    assert (
        f"warning: checks.logp_gap: step {len(gaps) - 3}: the log-probs of sampler and trainer differ by {broken:.2g}"
        in line
    )
    assert f"after {usual:.2g} in this run's first 10 steps" in line and "layers agree" in line


MERGED = {"model__dtype": "bf16", "rollout__sync": "merged"}
QUANTISED = {"model__dtype": "bf16", "model__quantisation": "int4"}


@pytest.mark.parametrize(
    ("changes", "sound", "broken"),
    [
        ({}, 0.0, 1e-9),
        (MERGED, 0.0, 1e-9),
        (QUANTISED | {"rollout__sync": "adapter"}, 0.0, 1e-9),
        (QUANTISED | MERGED, 4.3e-4, 0.03),
        (MERGED | {"rollout__engine": "vllm"}, 4.3e-4, 0.03),
    ],
)
def test_the_reference_is_the_policy_without_its_update_but_for_kernels_that_round_otherwise(changes, sound, broken):
    """4.3e-4 was measured on a CPU without instructions for bf16, where merged and dequantised experts round apart."""
    said: list[str] = []
    cfg = training.config(Path("none"), Path("none"), **ALL_WARN, **changes)
    watch = Tripwires(cfg, said.append)
    for gap in (None, sound, broken, broken, math.nan):
        watch.reference(0, gap)
    (line,) = said
    assert line.startswith("warning: checks.reference_kl: step 1: ") and f"{broken:.2g} nats per token" in line
    with pytest.raises(Tripped, match="nan nats per token"):
        Tripwires(training.config(Path("none"), Path("none"), **changes), print).reference(0, math.nan)


DEAD = {"actor/grad_norm": 0.0, "actor/entropy": 5.7, "actor/kl_loss": 3.5, "reward/equal_groups": 6}  # of 6 groups
DIFFERING = DEAD | {"reward/equal_groups": 4, "actor/kl_loss": 0.0}
TAUGHT = DEAD | {"actor/kl_loss": 0.0, "actor/teacher_kl": -0.2}


@pytest.mark.parametrize(
    ("row", "changes", "found"),
    [
        (DEAD, {}, "the KL to the reference is 3.5"),
        (DEAD, {"loss__mask_truncated": True, "reward__permute": True}, "the KL to the reference is 3.5"),
        (DEAD | {"actor/grad_norm": 1e-12}, {}, ""),
        (DEAD | {"actor/entropy": 0.9}, {}, ""),  # log-probs of exactly 0 have no gradient
        (DEAD | {"actor/kl_loss": 1e-6}, {}, ""),
        (DEAD, {"loss__kl_coef": 0.0}, ""),
        (DEAD, {"loss__kl": "k1"}, ""),
        (DIFFERING, {}, "the rewards of 2 groups differ"),
        (DIFFERING, {"loss__kl": "none"}, "the rewards of 2 groups differ"),
        (DIFFERING, {"loss__mask_truncated": True}, ""),  # the differing groups may be left out
        (DIFFERING, {"reward__permute": True}, ""),  # equal completions in opposite directions
        (DIFFERING, {"loss__kind": "own.py:loss"}, ""),
        (DIFFERING, {"loss__advantage": "own.py:advantage"}, ""),
        (DIFFERING, {"reward__function": "own.py:reward"}, ""),
        (DIFFERING | {"rollout/importance_mean": 0.0}, {}, ""),
        (DIFFERING, {"loss__teacher": "run"}, ""),  # the teacher may undo what the rewards teach
        (TAUGHT, {"loss__teacher": "run"}, "the KL to the teacher is -0.2"),
        (
            TAUGHT,
            {"loss__teacher": "run", "loss__advantage": "zero", "loss__kl": "none"},
            "the KL to the teacher is -0.2",
        ),
        (TAUGHT, {"loss__teacher": "run", "loss__mask_truncated": True}, "the KL to the teacher is -0.2"),
        (TAUGHT, {"loss__teacher": "run", "loss__kind": "own.py:loss"}, ""),
        (TAUGHT, {"loss__teacher": "run", "loss__teacher_coef": 1e-30}, ""),
        (TAUGHT | {"rollout/importance_mean": 0.0}, {"loss__teacher": "run"}, ""),
        (TAUGHT | {"actor/teacher_kl": 1e-5}, {"loss__teacher": "run"}, ""),
    ],
)
def test_a_gradient_of_exactly_0_is_reported_where_the_loss_must_have_one(row: dict, changes: dict, found: str) -> None:
    said = said_in([row], **ALL_WARN, **changes)
    assert len(said) == bool(found)
    for line in said:
        assert line.startswith(f"warning: checks.impossible: step 1: the gradient is exactly 0, although {found}")


def test_a_teacher_that_is_the_policy_itself_is_reported_and_one_that_is_not_passes() -> None:
    """An estimate of the KL may be negative by chance. Constant rewards are no fault if they teach nothing."""
    (line,) = said_in([{"actor/teacher_kl": 0.0}], **ALL_WARN, loss__teacher="run")
    assert line.startswith(
        "warning: checks.impossible: step 1: the KL to the teacher is exactly 0, so the teacher is the policy"
    )
    assert said_in([{"actor/teacher_kl": kl} for kl in (-0.01, 1e-9, 3.0)], loss__teacher="run") == []
    taught = training.config(Path("none"), Path("none"), loss__teacher="run", loss__advantage="zero")
    assert "reward_constant" in Tripwires(taught, print).cannot_judge()


# By hand, from the files of configs/: with a KL and without noise, unless named here.
CANNOT_JUDGE = {
    "bench": {"noise", "reference_kl"},
    "math": {"noise"},
    "olmoe": {"noise"},
    "qwen15_moe": set(),
    "qwen3": {"noise"},
    "smol": {"noise", "reference_kl"},
    "tiny_16": {"noise", "truncated", "gradient_spike", "reward_constant", "collapse"},  # three steps of 64 completions
    "tiny_cpu": {"noise"},
    "tools_cpu": {"noise"},
}


def test_a_check_is_silent_where_it_cannot_judge_and_every_other_check_of_a_shipped_configuration_speaks() -> None:
    warn = f"checks.warn=[{','.join(CHECKS)}]"
    shipped = {path.stem: load_config(path, [warn]) for path in (ROOT / "configs").glob("*.yaml")}
    for name, cfg in shipped.items():
        said: list[str] = []
        watch = Tripwires(cfg, said.append)
        for check in CHECKS:
            watch.trip(check, "found", "place")
        spoke = {line.removeprefix("warning: checks.").partition(":")[0] for line in said}
        assert spoke == set(CHECKS) - CANNOT_JUDGE[name], name
    cfg = shipped["qwen3"]
    changed = {
        ("rollout", "temperature", 2.0): "truncated",
        ("reward", "permute", True): "collapse",
        ("checks", "off", ("entropy",)): "entropy",
        ("train", "steps", 10): "gradient_spike",
    }
    for (section, key, value), check in changed.items():
        part = getattr(cfg, section).model_copy(update={key: value})
        assert check in Tripwires(cfg.model_copy(update={section: part}), print).cannot_judge()


def test_the_ordinary_questions_show_a_stuck_step_and_further_rounds_may_not_ask_held_out_ones() -> None:
    watch = Tripwires(training.config(Path("none"), Path("none"), rollout__prompts_per_step=2), print)
    for step in range(2):
        watch.asked(step, ["a", "b", f"another {step}"], 4, frozenset({"h"}))
    with pytest.raises(Tripped, match="the same 2 of 4 questions for the 3rd time"):
        watch.asked(2, ["a", "b", "c", "d"], 4, frozenset({"h"}))
    with pytest.raises(Tripped, match="step 4 asks 1 held-out questions"):
        watch.asked(3, ["c", "d", "h"], 4, frozenset({"h"}))


def test_a_reward_that_falls_far_below_its_own_start_and_a_policy_far_from_the_reference_are_reported_once() -> None:
    def steps_of(*rewards: tuple[float, int], kl: float = 0.1, chosen: float = 0.0, **changes: object) -> list[str]:
        of_all = {"reward/first_round_correct": 0.0, "reward/mean": chosen} if chosen else {"reward/mean": 0.0}
        name = next(iter(of_all))
        rows = [of_all | {name: reward, "actor/kl_loss": kl} for reward, steps in rewards for _ in range(steps)]
        rows[0]["actor/kl_loss"] = 0.0
        return said_in(rows, **changes)

    falling = (0.4, 15), (0.2, 5), (0.04, 20)
    (line,) = steps_of(*falling)
    # Steps 19 to 28 are two of 0.2 and eight of 0.04: 0.072 is the first mean under a fifth of 0.4.
    assert line.startswith(
        "warning: checks.collapse: step 28: the mean reward is 0.072, after 0.400 in this run's first 10"
    )
    assert steps_of(*falling, reward__permute=True) == []  # with shuffled rewards a collapse is no fault
    assert steps_of((0.4, 15), (0.1, 30)) == []  # 0.1 is a quarter of 0.4
    assert steps_of((0.01, 15), (0.0, 30)) == []  # the first rewards are too small to judge
    # Under dynamic sampling the trained batch hides the fall.
    assert steps_of(*falling, chosen=0.5) != [] == steps_of((0.4, 40), chosen=0.5)
    (line,) = steps_of((0.5, 30), kl=1.1)
    assert (
        line.startswith("warning: checks.collapse: step 20: ") and "KL to the reference is 1.1 nats per token" in line
    )
    assert steps_of((0.5, 30), kl=0.9) == []


def test_a_push_that_is_stuck_on_one_rank_is_named() -> None:
    watch = Tripwires(training.config(Path("none"), Path("none")), print)
    watch.after_push(0, [1.0, 2.0], {})
    watch.history.append({"actor/grad_norm": 0.1})
    watch.after_push(1, [1.5, 2.5], {})
    watch.history.append({"actor/grad_norm": 0.0})
    watch.after_push(2, [1.5, 2.5], {})  # the update had no gradient
    watch.history.append({"actor/grad_norm": 0.1})
    with pytest.raises(Tripped, match="pushed to the sampler on rank 1 are the same as before"):
        watch.after_push(3, [1.6, 2.5], {})


# ------------------------------------------------------------------------------------------------ warn, off, the exit


def test_a_check_that_is_off_prints_nothing(model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, checks__off=("logp_gap", "unparsable"), **FEW)
    assert raised(FAULTS["a router is pushed in another order"], cfg) == [(InputError, "")]
    run = training.only_run(cfg)
    assert "warning" not in (run / "log.txt").read_text()
    assert min(row["rollout/logp_gap_mean"] for row in training.metrics(run)) > 1e-3


@pytest.mark.filterwarnings(r"ignore:::megatron\.", r"ignore:::torch\.")  # the command ignores them too
def test_the_command_ends_with_code_3_and_the_report(model: Path, tmp_path: Path, monkeypatch, capfd) -> None:
    (tmp_path / "run.yaml").write_text(to_yaml(training.config(model, tmp_path, **FEW)))
    for module, name in ((curves, "draw_curves"), (runlog, "write_records")):
        monkeypatch.setattr(module, name, lambda *args: None)
    FAULTS["a router is pushed in another order"](monkeypatch)
    assert breaking.exit_code([str(tmp_path / "run.yaml"), "loss.kl=none"]) == 3
    said, message = capfd.readouterr()
    assert "note: loss.kl_coef: has no effect because loss.kl is none\n" in said
    assert message.startswith("stopped: checks.logp_gap: step 1") and "layer 0" in message
    assert "Traceback" not in message and len(message.splitlines()) <= 10
    warn = "unparsable,truncated,collapse,gradient_spike,entropy,logp_gap"
    assert message.endswith(f"to continue anyway, set checks.warn=[{warn}]\n")
    # The run's folder says why, too.
    (run,) = tmp_path.glob("*/log.txt")
    cause = run.read_text().splitlines()[-1].partition(" ")[2]
    assert "a step: 4 prompts x 2 = 8 sequences, 1 update of 4 prompts x 2\n" in run.read_text()
    assert cause.startswith("stopped: checks.logp_gap: step 1") and "layer 0" in cause


# ------------------------------------------------------------------------------------------------ sound runs


def test_noise_shows_on_a_policy_that_is_sure_of_every_token(model: Path, tmp_path: Path) -> None:
    cfg = training.config(model, tmp_path, **FEW | NOISE | SURE)
    assert raised(sure_policy, cfg) == [(InputError, "")]
    assert all(row["aqn/probe_shift"] > 0 for row in training.metrics(training.only_run(cfg)))


SOUND = {  # all tripwires on `stop`
    "many steps of noise and replay": (
        "TP1",
        {
            "train__steps": asked([40, nightly(200)])[-1],
            "optim__lr": 1e-3,
            "aqn__schedule": "qerl",
            "replay__mode": "r3",
            "loss__importance": "token",
            "lora__targets": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"),
        },
    ),
    "bf16 with replay": ("TP2_EP2", {"model__dtype": "bf16", "replay__mode": "r3"}),
    "noise in bf16": ("TP2_EP2", NOISE | {"model__dtype": "bf16"}),
    "several updates a step": ("TP1", {"optim__prompts_per_update": 2, "replay__mode": "r2"}),
}


@pytest.mark.parametrize("name", [*list(SOUND)[:3], ci(list(SOUND)[3])])
def test_no_tripwire_fires_in_a_sound_run(name: str, model: Path, tmp_path: Path) -> None:
    layout, changes = SOUND[name]
    cfg = training.config(model, tmp_path, **FEW | ALL_STOP | changes)
    assert raised(every_answer_parsable, cfg, layout) == [(InputError, "")] * world.LAYOUTS[layout][0]
    run = training.only_run(cfg)
    assert "warning" not in (run / "log.txt").read_text()
    assert len(training.metrics(run)) == cfg.train.steps


def test_a_push_without_the_update_ends_the_step_before_it_samples(model: Path, tmp_path: Path) -> None:
    sampled = before(rollout, "sample_step", lambda *given: (tmp_path / f"sampled-{given[-1]}").touch())
    cfg = training.config(model, tmp_path / "out", **FEW | ALL_STOP)
    ((kind, said),) = raised(both(both(every_answer_parsable, FAULTS["adapters are never pushed"]), sampled), cfg)
    assert kind is Tripped and said.startswith("checks.adapters: step 2: ")
    assert [path.name for path in tmp_path.glob("sampled-*")] == ["sampled-0"]


LEGITIMATE = {
    "large step at temperature 0.001": LARGE | {"rollout__temperature": 0.001},
    "large step at temperature 10": LARGE | {"rollout__temperature": 10.0},
    "one prompt": {"rollout__prompts_per_step": 1, "optim__prompts_per_update": 1, "rollout__group_size": 8},
    "two questions": {
        "rollout__prompts_per_step": 1,
        "optim__prompts_per_update": 1,
        "data__num_train": 2,
        "train__steps": 12,
    },
    "all questions in every step": {"data__num_train": 4},
    "no KL": {"loss__kl": "none"},
    "KL k1, tiny steps": {"loss__kl": "k1", "optim__lr": 1e-9},
    "KL abs, huge steps": {"loss__kl": "abs", "optim__lr": 3.0},
    "lr 1e-6 in bf16 after a warm-up": {"optim__lr": 1e-6, "model__dtype": "bf16", "optim__warmup_steps": 5},
    "300 tokens": {"rollout__max_new_tokens": 300, "optim__tokens_per_micro_batch": 4096},
    "one token, many sequences": LARGE | {"rollout__max_new_tokens": 1, "train__steps": 2},
    "nearly greedy, recompute": {"rollout__temperature": 0.05, "model__recompute": True},
    "gspo, leave-one-out": {"loss__kind": "gspo", "loss__advantage": "loo"},
    "cispo, several updates": {"loss__kind": "cispo", "optim__prompts_per_update": 1},
    "Dr.GRPO": {"loss__advantage": "none", "loss__aggregate": "dr-grpo"},
    "bf16 with noise": {"model__dtype": "bf16", "aqn__schedule": "constant"},
    "noise": {"aqn__schedule": "qerl", "aqn__num_stages": 3},
    "strong noise": {"aqn__schedule": "constant", "aqn__sigma_start": 0.3},
    "one step": {"train__steps": 1},
    "attention alone of rank 1": {"lora__targets": ("linear_qkv",), "lora__rank": 1},
    "router alone": {"lora__targets": ("router",)},
    "shuffled rewards": {"reward__permute": True, "train__steps": 25},
    "replay": {"replay__mode": "r3"},
    "dynamic sampling": {"rollout__dynamic_rounds": 3},
    "groups that are equal left out": {"loss__skip_equal_groups": True, "loss__mask_truncated": True},
}
FEW_OF_THEM = ("one prompt", "two questions")
UNUSUAL = [one if one[0] in FEW_OF_THEM else nightly(*one) for one in LEGITIMATE.items()]
ON_SEVERAL_RANKS = {
    "two updates, router": ("TP2_EP2_DP2", {"lora__targets": ("linear_qkv", "router"), "optim__prompts_per_update": 2}),
    "bf16, split experts": ("TP2_EP4", {"model__dtype": "bf16"}),
    "bf16, merged": ("EP2_DP4", {"model__dtype": "bf16", "rollout__sync": "merged"}),
}
PLACES = [("TP1", "fp32"), ("DP2", "fp32"), ("TP1", "bf16"), ("EP2", "fp32"), ("TP1", "fp32"), ("TP2", "bf16")]


@pytest.mark.slow
def test_no_check_stops_an_unusual_but_legitimate_run_or_warns(model: Path, tmp_path: Path) -> None:
    """Off are `unparsable`, because a random model never answers in the right form, and `gradient_spike` and `entropy`,
    which concern bad training. Four tokens are too few for most answers to end."""
    quiet = {"checks__off": ("unparsable", "truncated", "gradient_spike", "entropy", "collapse")}
    jobs = dict(asked(ci(*one) for one in ON_SEVERAL_RANKS.items()))
    for number, (name, changes) in enumerate(asked(UNUSUAL)):
        layout, dtype = PLACES[number % len(PLACES)]
        jobs[name] = layout, {"model__dtype": dtype} | changes
    runs = training.run_all(
        {
            name: (layout, training.config(model, tmp_path / name, **FEW | quiet | changes))
            for name, (layout, changes) in jobs.items()
        }
    )
    logs = {name: (run / "log.txt").read_text() for name, run in runs.items()}
    assert {name: log for name, log in logs.items() if "warning" in log} == {}


def test_a_step_without_any_trained_group_is_no_fault(model: Path, tmp_path: Path) -> None:
    """The task is solved: all groups have equal rewards, so no row is left for a KL."""
    cfg = training.config(
        model,
        tmp_path,
        checks__off=("unparsable", "truncated"),
        loss__skip_equal_groups=True,
        **FEW | LARGE | {"train__steps": 8},
    )
    assert raised(solved_after_two_steps, cfg) == [(InputError, "")]
    rows = training.metrics(training.only_run(cfg))
    assert rows[1]["actor/grad_norm"] > 0 and "actor/kl_loss" in rows[1]
    for row in rows[3:]:
        assert (
            not {"actor/entropy", "actor/kl_loss", "rollout/logp_gap_max"} & row.keys() and row["actor/grad_norm"] == 0
        )


def test_the_page_of_checks_says_what_they_do() -> None:
    """docs/checks.md: each check, whether it stops, the configurations in which it cannot judge, and when it fires."""
    page = (ROOT / "docs" / "checks.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (stops|warns) \| (.*?) ?\|$", page, re.M)
    silent: dict[str, dict[str, list[str]]] = {}  # check -> reason -> configurations
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        for check, reason in Tripwires(load_config(path), print).cannot_judge().items():
            silent.setdefault(check, {}).setdefault(reason, []).append(path.stem)
    default = ChecksConfig()
    assert rows == [
        (
            check,
            "stops" if default.stops(check) else "warns",
            "; ".join(f"{reason}: {', '.join(names)}" for reason, names in silent.get(check, {}).items()) or "none",
        )
        for check in CHECKS
    ]
    fires = re.findall(r"^- `(\w+)`: (.*(?:\n  .*)*)", page, re.M)
    assert [(check, " ".join(text.split())) for check, text in fires] == [*CHECKS.items()]


# -------------------------------------------------------------------------------------------- runs with a planted fault
# Each fault of a whole run that would train something else than intended is found, by the check that is named here.
#
# A run is the whole trainer on a random tiny model in a forked world in which the fault is planted
# (support/planted.py). The reward is lenient (training.lenient_score) unless a fault needs a constant one. Not covered:
# the vLLM engine, and a rank that stalls.


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
    "adapters are never pushed": Row(["checks.adapters", "step 2", "how the adapters are merged"], layout="TP2_EP2"),
    "NaN in one expert": Row(
        ["model.layers.1.mlp.experts.down_proj has NaN or infinity"],
        {"train__checkpoint_every": 1},
        plant=planted.nan_in_one_expert,
    ),
    "activations overflow in step 2": Row(
        ["sample: a log-probability is not finite", "optim.lr"],
        {"train__checkpoint_every": 1},
        plant=planted.overflow_in_step_2,
    ),
    "the engine ignores pushed norms": Row(["checks.noise", "step 1", "uses the pushed norms"], NOISE),
    "noise that bf16 rounds away": Row(
        ["checks.noise", "step 1", "rounding has removed all of this noise"],
        NOISE | {"model__dtype": "bf16", "aqn__sigma_start": 1e-6, "aqn__sigma_end": 1e-7},
        plant=nothing,
    ),
    "noise is watched at temperature 1": Row(
        ["checks.noise", "step 1", "uses the pushed norms"],
        NOISE | SURE,
        plant=both(planted.sure_policy, FAULTS["noise is watched at temperature 1"]),
    ),
    "noise is twice as strong": Row(["AQN: the std of the noise is 0.0196 instead of 0.01"], NOISE, kind=AqnError),
    "noise stays in the trainer": Row(
        ["model.layers.1.input_layernorm.weight is no longer the clean weight"],
        NOISE | {"train__checkpoint_every": 1},
        kind=AqnError,
    ),
    "norms of another class are pushed for the noise": Row(
        ["the push had none of the targets"], NOISE | {"aqn__targets": ("attention",)}, kind=AqnError
    ),
    "adapters do not start at 0": Row(["checks.reference_kl", "new adapters start at 0"]),
    "a policy that an update has made uniform": Row(
        ["checks.impossible: step 3: the gradient is exactly 0, although the KL to the reference is "],
        {"optim__lr": 1e3},
        plant=nothing,
    ),
    "a loss metric is not finite": Row(["step 1: these metrics are not finite: ", "actor/ppo_kl"]),
    "the advantages are not finite": Row(["step 1: the gradient norm is nan; this step"]),
    "gradient spike": Row(
        ["checks.gradient_spike", "step 12", "x the usual", "optim.lr"],
        {"train__steps": 13} | stopping("gradient_spike"),
        plant=planted_trainer.twelfth_gradient_is_large,
    ),
    "one token has all the probability": Row(
        ["checks.entropy", "step 1", "loss.entropy_coef"], stopping("entropy") | {"checks__off": ("logp_gap",)}
    ),
    "reward constant": Row(
        ["checks.reward_constant", "every reward of 2 steps is 0", "report.py show"],
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
    "one sample for the whole group": Row(["checks.sampling: step 3: in every group all completions are"]),
    "the end token is never recognised": Row(
        ["checks.sampling: step 1: no completion ended by itself within 20 tokens"],
        LARGE | {"rollout__max_new_tokens": 20},
    ),
    "every step asks the same questions": Row(
        ["checks.sampling: step 3 asks the same 4 of 40 questions for the 3rd time"]
    ),
    "the held-out file is trained on": Row(
        ["data: 9 held-out questions of data.test_path are also training questions"], kind=InputError
    ),
    "held-out questions are asked": Row(HELD_OUT),
    "held-out questions are asked in a further round": Row(HELD_OUT, {"rollout__dynamic_rounds": 1}),
    "another question on rank 1": Row(
        ["the training questions as prompts: rank 1 did not read what rank 0 read"], layout="TP2", kind=InputError
    ),
    "a gradient is not summed over data ranks": of_state("TP2_EP2_DP2", "1 steps: model.layers.0.self_attn."),
    "an expert's gradient is not summed over its copies": of_state("EP2_DP4", "1 steps: model.layers.0.mlp.experts."),
    "a factor drifts on rank 1": of_state(
        "TP2", "1 steps: model.layers.0.self_attn.qkv_proj.A on ranks 0, 1: not equal"
    ),
    "a router has another order on rank 1": of_state("DP2", "0 steps: model.layers.1.mlp.gate.weight on ranks 0, 1"),
    "B is 0 in the checkpoint": of_checkpoint("adapter model.layers.0."),
    "experts have another order in the checkpoint": of_checkpoint(".experts.", "TP2_EP2"),
    "moments are exchanged in the checkpoint": of_checkpoint("optimizer model.layers.0."),
    "a tensor too many in the checkpoint": of_checkpoint("adapter more"),
    "another count in the checkpoint": of_checkpoint("optimizer_steps 7 do not fit: a run has at most train.steps 3"),
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
        assert message.endswith(f"to continue anyway, set checks.warn=[{','.join(warn)}]")
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
        ["checks.logp_gap", "step 1", "only on rank 1"],
    ),
    "no norms taken": (
        FAULTS["the engine ignores pushed norms on rank 1"],
        NOISE,
        ["checks.noise", "step 1", "uses the pushed norms"],
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
    assert updates == 4 and QWEN3.merging >= Merging.PASSES
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
    "sampling": (FAULTS["every step asks the same questions"], {}, "EP2", "step 3 asks the same 8 of 40 questions"),
    "held_out": (FAULTS["held-out questions are asked"], {}, "TP2", "step 1 asks 1 held-out questions"),
    "state": (FAULTS["a factor drifts on rank 1"], {}, "TP2", "after 1 steps: model.layers.0.self_attn.qkv_proj.A"),
    "impossible": (FAULTS["the KL has the wrong sign"], {}, "EP2", "step 1: actor/kl_loss is -"),
    "collapse": (
        both(planted.two_steps_are_usual, planted_trainer.rewards_fall),
        {},
        "TP2",
        "step 4: the mean reward is 0",
    ),
    "logp_gap": (
        FAULTS["a router is pushed in another order"],
        {},
        "EP2",
        "step 1: the log-probs of sampler and trainer differ",
    ),
    "reference_kl": (
        FAULTS["adapters do not start at 0"],
        {},
        "TP2",
        "step 1: before the first update, the log-probs of the reference and of the policy",
    ),
    "adapters": (FAULTS["adapters are never pushed"], {}, "EP2", "step 2: "),
    # The file itself has no noise.
    "noise": (FAULTS["the engine ignores pushed norms"], NOISE, "TP2", "step 1: sigma is 0.01"),
    "gradient_spike": (
        both(planted.two_steps_are_usual, planted_trainer.twelfth_gradient_is_large),
        {},
        "EP2",
        "step 3: the gradient no",
    ),
    # In step 1 some of the largest logits are equal in bf16.
    "entropy": (
        FAULTS["one token has all the probability"],
        {"checks__off": ("logp_gap",)},
        "TP2",
        "step 2: the entropy ",
    ),
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
    assert row["actor/kl_loss"] > 1e-3 and f"differ by {row['actor/kl_loss']:.2g} nats per token" in reports[0][1]


# ------------------------------------------------------------------------------------------------ faults of a resume


NOT_RESTORED = {
    "moments are not restored": "optimizer model.layers.0.self_attn.qkv_proj.A.exp_avg",
    "adapters are not restored": "adapter model.layers.0.self_attn.qkv_proj.A",
    "the step count is not restored": "optimizer_steps 0 instead of 5",
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
