"""Runs whose completions have turns of an environment: the same in every layout, and after a resume."""

import signal
from pathlib import Path
from statistics import fmean

import agents
import apart
import pytest
import training
from tiers import asked, ci

from facts.exits import InputError
from inputs.config import to_yaml
from tasks.environment import Environment

OWN = Path(__file__).parents[1] / "support" / "own.py"
TURNS = {
    "rollout__environment": f"{OWN}:environment",
    "rollout__stop": ("e", "t", "a", "1"),
    "rollout__max_turns": 3,
    "rollout__max_new_tokens": 24,
    "optim__prompts_per_update": 3,
}
COUNTED = {  # metric -> the key of a row of completions/ and its value in a row without it
    "response_length/mean": ("tokens", None),
    "environment/turns_mean": ("turns", 1),
    "environment/tokens_mean": ("environment_tokens", 0),
}
CASES = {
    "plain": {},
    "r3": {"replay__mode": "r3", "loss__importance": "token", "optim__prompts_per_update": 6},
    "r2": {"replay__mode": "r2", "loss__kind": "gspo", "loss__aggregate": "seq-mean-token-mean"},
    "dynamic": {"rollout__dynamic_rounds": 2, "loss__aggregate": "dr-grpo", "loss__mask_truncated": True},
}
NAMES = ["plain", "r3", ci("r2"), ci("dynamic")]


@pytest.fixture(scope="module")
def runs(model, tmp_path_factory) -> dict[str, Path]:
    """Each case in one rank and in two, and a case with smaller micro-batches."""
    out = tmp_path_factory.mktemp("turns")
    jobs = {}
    for case in asked(NAMES):
        for layout in ("TP1", "EP2", "TP2_EP2"):
            name = f"{case} {layout}"
            jobs[name] = layout, training.config(model, out / name.replace(" ", "_"), **TURNS | CASES[case])
    few = TURNS | {"optim__tokens_per_micro_batch": 300}
    jobs["few TP1"] = "TP1", training.config(model, out / "few", **few)
    jobs["none TP1"] = (
        "TP1",
        training.config(model, out / "none", rollout__max_new_tokens=24, optim__prompts_per_update=3),
    )
    return training.run_all(jobs)


@pytest.mark.parametrize("layout", ["EP2", "TP2_EP2"])
@pytest.mark.parametrize("case", NAMES)
def test_every_layout_has_the_same_turns(case: str, layout: str, runs) -> None:
    training.assert_same_metrics(runs[f"{case} {layout}"], runs[f"{case} TP1"])


def test_the_environments_tokens_are_counted_apart(runs) -> None:
    training.assert_same_metrics(runs["few TP1"], runs["plain TP1"])
    for case in asked(NAMES):
        for row in training.metrics(runs[f"{case} TP1"]):
            assert row["environment/turns_mean"] > 1.2 and row["environment/tokens_mean"] > 0.5
            assert row["rollout/logp_gap_max"] < 1e-4 and (case != "r3" or row["replay/differing_frac"] < 1e-3)
            assert row["response_length/mean"] + row["environment/tokens_mean"] <= 24
    rows = training.completions(runs["plain TP1"])
    assert any("environment_tokens" in row and "==" in row["completion"] for row in rows)
    for metrics in training.metrics(runs["plain TP1"]):
        own = [row for row in rows if row["step"] == metrics["step"]]
        means = [fmean(row.get(key, least) for row in own) for key, least in COUNTED.values()]
        assert means == pytest.approx([metrics[name] for name in COUNTED])
    assert not any(key.startswith("environment/") for row in training.metrics(runs["none TP1"]) for key in row)


def test_an_environment_that_never_answers_changes_no_byte(model, tmp_path) -> None:
    """Also where it is asked after every token of a text, and after two steps, in metrics, evaluations and tensors."""
    changes = {"train__steps": 2, "train__checkpoint_every": 1, "eval__every": 1, "replay__mode": "r3"}
    changes |= {"rollout__max_new_tokens": 24}
    silent = {"rollout__environment": f"{OWN}:silent", "rollout__stop": ("e", "t", "a", "1")}
    runs = training.run_all(
        {
            "with": ("EP2", training.config(model, tmp_path / "with", **changes | silent)),
            "without": ("EP2", training.config(model, tmp_path / "without", **changes)),
        }
    )
    training.assert_same_bytes(runs["with"], runs["without"])
    for name in ("adapter", "optimizer"):
        found, expected = (training.checkpoint_of(run, 2) / f"{name}.safetensors" for run in runs.values())
        assert found.read_bytes() == expected.read_bytes()


@pytest.mark.ci
def test_killed_in_a_later_turn_and_started_again_a_run_has_the_bytes_of_one_that_was_not(model, tmp_path) -> None:
    """Under torchrun: rank 1 is killed in the second rollout, in which the environment has answered before."""
    changes = TURNS | {"train__checkpoint_every": 1, "train__steps": 3, "eval__every": 2}
    changes |= {"reward__function": f"{OWN}:reward", "reward__check_gold": False}
    whole, cfg = (
        training.in_layout(training.config(model, tmp_path / name, **changes), "EP2") for name in ("whole", "killed")
    )
    training.in_world("EP2", training.train_each, [("EP2", whole)], False)
    path = tmp_path / "killed.yaml"
    path.write_text(to_yaml(cfg))
    fault = apart.strike("lose", 1, (Environment, "reply", 40))
    code, text = agents.start(2, "train_grpo.py", path, log=tmp_path / "killed.log", plant=fault).end()
    assert code == -signal.SIGKILL, text
    left = [folder.name for folder in training.only_run(cfg).glob("checkpoints/*")]
    assert left == ["step-000001"]
    code, text = agents.start(2, "train_grpo.py", path, log=tmp_path / "last.log").end()
    assert code == 0 and "after 1 of 3 steps" in text, text
    training.assert_same_bytes(training.only_run(cfg), training.only_run(whole))


def test_a_changed_file_of_the_environment_is_refused_at_a_resume(model, tmp_path) -> None:
    file = tmp_path / "env.py"
    file.write_text("def say(turns, row):\n    return None\n")
    changes = {"rollout__environment": f"{file}:say", "train__steps": 1, "train__checkpoint_every": 1}
    cfg = training.config(model, tmp_path / "out", **changes)
    training.in_world("TP1", training.train_each, [("TP1", cfg)])
    file.write_text("def say(turns, row):\n    return ''\n")
    longer = cfg.changed(train={"steps": 2, "resume": str(training.only_run(cfg))})
    ((kind, message),) = training.raised(lambda patch: None, longer)
    assert kind is InputError and str(file) in message and "-> sha256" in message, message


def test_a_run_with_turns_goes_on_with_the_bytes_of_a_longer_run(model, tmp_path) -> None:
    changes = TURNS | {"train__checkpoint_every": 1, "eval__every": 1}
    whole, cut = (
        training.config(model, tmp_path / name, train__steps=steps, **changes) for name, steps in (("a", 4), ("b", 2))
    )
    training.in_world("TP1", training.train_each, [("TP1", whole), ("TP1", cut)])
    longer = cut.changed(train={"steps": 4, "resume": str(training.only_run(cut))})
    training.in_world("TP1", training.train_each, [("TP1", longer)])
    training.assert_same_bytes(training.only_run(cut), training.only_run(whole))
