"""A run that was killed and resumed ends like a run that was not killed. Another layout can resume it too."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
from pathlib import Path

import agents
import apart
import pytest
import training
import world
from breaking import flip_a_bit
from tiers import asked, ci, nightly

import train_grpo
from inputs.config import to_yaml
from parallel_setup import Parallel
from runlog import run_record
from runlog.run_record import sha256_file
from weights import checkpoint

OWN = Path(__file__).parent / "support" / "own.py"
RECORDS = ("metrics.jsonl", "moe.jsonl", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl")
EVERYTHING = {  # rollout, updates and evaluation depend on everything that a checkpoint must hold
    "train__steps": 5,
    "train__checkpoint_every": 1,
    "eval__every": 2,
    "optim__prompts_per_update": 3,
    "optim__decay": "cosine",
    "optim__weight_decay": 0.1,
    "loss__entropy_coef": 0.05,
    "optim__tokens_per_micro_batch": 300,
    "rollout__dynamic_rounds": 2,
}


def assert_same_bytes(found: Path, expected: Path) -> None:
    for name in RECORDS:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


# ------------------------------------------------------------------------------------------------ killed anywhere


def test_killed_at_exact_places_under_torchrun(model, tmp_path) -> None:
    """The run is killed in the middle of a checkpoint, then of a step. Then the same command runs to the end.

    Reward, advantage, loss and data are a user's own. By default only the checkpoint: test_two_nodes.py ends a process
    in the middle of a step.
    """
    own = {"reward__function": f"{OWN}:reward", "loss__advantage": f"{OWN}:advantages", "loss__kind": f"{OWN}:loss"}
    for split, first in (("train", 1), ("test", 60)):
        rows = [{"ask": f"What is {n} + 1?", "is": str(n + 1), "level": n} for n in range(first, first + 40)]
        (tmp_path / f"{split}.json").write_text(json.dumps(rows))
    own |= {"data__source": "file", "data__columns": {"question": "ask", "answer": "is"}, "reward__check_gold": False}
    own |= {f"data__{split}_path": str(tmp_path / f"{split}.json") for split in ("train", "test")}
    whole, cfg = (
        training.in_layout(training.config(model, tmp_path / name, **EVERYTHING | own), "EP2")
        for name in ("whole", "killed")
    )
    training.in_world("EP2", training.train_each, [("EP2", whole)], False)
    path = tmp_path / "killed.yaml"
    path.write_text(to_yaml(cfg))
    # The second checkpoint is that of two steps. The fourth update after the first is the second one of step 3.
    places = asked([(0, (checkpoint, "hash_of", 2)), ci(1, (Parallel, "sync_gradients_", 4))])
    for number, (rank, place) in enumerate(places):
        fault = apart.strike("lose", rank, place)
        code, text = agents.start(2, "train_grpo.py", path, log=tmp_path / f"killed{number}.log", plant=fault).end()
        assert code == -signal.SIGKILL, text
        left = sorted(path.name for path in training.only_run(cfg).glob("checkpoints/*"))
        assert left == [[".tmp-step-000002", "step-000001"], ["step-000001", "step-000002"]][number]
    code, text = agents.start(2, "train_grpo.py", path, log=tmp_path / "last.log", light=False).end()
    assert code == 0, text
    assert f"after {len(places)} of 5 steps" in text
    assert_same_bytes(training.only_run(cfg), training.only_run(whole))
    assert (training.only_run(cfg) / "curves.png").stat().st_size > 1000


# ------------------------------------------------------------------------------------------------ other circumstances


def rewound(run_dir: Path, folder: Path, steps: int) -> Path:
    """A copy of a finished run in the state of a run that was killed after its checkpoint of ``steps`` steps."""
    copy = shutil.copytree(run_dir, folder / run_dir.name)
    (copy / "finished.json").unlink()
    for path in (copy / "checkpoints").iterdir():
        if path.name != f"step-{steps:06d}":
            shutil.rmtree(path)
    return copy


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory) -> Path:
    changes = EVERYTHING | {"train__keep_last": 9}
    return training.run_all({"": ("EP2", training.config(model, tmp_path_factory.mktemp("plain"), **changes))})[""]


@pytest.mark.ci
def test_a_rank_that_is_lost_for_good_and_the_run_ends_on_fewer_ranks_as_it_would_have(model, plain, tmp_path) -> None:
    """The commands of docs/checks.md: one of four ranks is killed, and after a restart again; then two go on.

    The undisturbed run has two ranks from the beginning.
    """
    cfg = training.in_layout(training.config(model, tmp_path / "lost", **EVERYTHING), "EP2")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(cfg))
    # Two updates a step. The third is in step 2; after the restart, which resumes from step 1, in step 3.
    lost = apart.strike("die", 3, (Parallel, "sync_gradients_", 3))
    command = (4, "train_grpo.py", path, "parallel.expert=4")
    code, text = agents.start(*command, log=tmp_path / "log", plant=lost, restarts=1).end()
    assert code == 128 + signal.SIGKILL, text  # no restart is left
    assert "layout: 4 ranks" in text and "resumed tiny-" in text and "after 1 of 5 steps" in text
    left = sorted(path.name for path in training.only_run(cfg).glob("checkpoints/step-*"))
    assert left == ["step-000001", "step-000002"]
    code, text = agents.start(2, "train_grpo.py", path, log=tmp_path / "last.log").end()
    assert code == 0, text
    assert "layout: 2 ranks" in text and "after 2 of 5 steps" in text
    training.assert_same_metrics(training.only_run(cfg), plain)


@pytest.mark.parametrize("layout", ["EP2", *map(ci, ["TP2_EP4", "TP1", "DP2", "TP2"])])
def test_another_layout_goes_on_with_the_same_numbers(layout, model, plain, tmp_path) -> None:
    copy = rewound(plain, tmp_path, 2)
    changes = EVERYTHING | {"train__keep_last": 9, "train__resume": str(copy)}
    cfg = training.in_layout(training.config(model, tmp_path / "out", **changes), layout)
    training.in_world(layout, training.train_each, [(layout, cfg)])
    assert (copy / "finished.json").exists() and not (tmp_path / "out").exists()
    training.assert_same_metrics(copy, plain)
    if layout == "EP2":
        assert_same_bytes(copy, plain)
        for name in ("adapter.safetensors", "optimizer.safetensors"):
            files = [run / "checkpoints" / "step-000005" / name for run in (copy, plain)]
            assert files[0].read_bytes() == files[1].read_bytes()
    found, expected = (checkpoint.latest(run).tensors for run in (copy, plain))
    for kind in expected:
        for name, tensor in expected[kind].items():
            gap = (found[kind][name] - tensor).abs().max()
            assert gap <= 1e-3 * tensor.abs().max(), (kind, name, gap)


def lightened(arguments: list[str]) -> int:
    training.lighten()
    return train_grpo.main(arguments)


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and output of the command in a world of one."""
    with tempfile.TemporaryDirectory() as folder:
        (code,) = world.as_torchrun(1, lightened, [str(argument) for argument in arguments], log=Path(folder) / "log")
        return code, (Path(folder) / "log").read_text()


@pytest.fixture
def file(model, plain, tmp_path) -> Path:
    """The configuration of the plain run, for one process; its out_dir is tmp_path / "out"."""
    changes = EVERYTHING | {"train__keep_last": 9}
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(training.config(model, tmp_path / "out", **changes)))
    return path


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "out").iterdir()}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_auto_goes_on_with_the_unfinished_run_of_this_configuration_only(plain, file, tmp_path) -> None:
    copy = rewound(plain, tmp_path / "out", 4)
    before = contents(copy)
    code, text = command(file, "train.seed=3", "train.steps=7")
    assert code == 2 and text.count("error: ") == 1 and "train.seed: 0 -> 3" in text, text
    assert "train.steps: 5 -> 7 (optim.decay depends on it)" in text
    assert len(folders(tmp_path)) == 1 and contents(copy) == before
    code, text = command(file)
    assert code == 0 and f"resumed {copy.name} after 4 of 5 steps" in text and len(folders(tmp_path)) == 1, text
    training.assert_same_metrics(copy, plain)
    before = contents(copy)
    code, text = command(file, f"train.resume={copy}")  # a finished run by its name: its numbers are left alone
    assert code == 0 and "after 5 of 5 steps" in text and (copy / "finished.json").exists()
    assert all(contents(copy)[copy / name] == before[copy / name] for name in RECORDS)


def test_resume_never_starts_a_new_run(plain, file, tmp_path) -> None:
    rewound(plain, tmp_path / "out", 4)
    code, text = command(file, "train.resume=never", "train.steps=1")
    assert code == 0 and "resumed" not in text and len(folders(tmp_path)) == 2, text


def test_a_finished_run_goes_on_for_more_steps_with_the_numbers_of_a_longer_run(model, tmp_path) -> None:
    """And with evaluations in other steps. A sweep then finds the run by its last configuration."""
    changes = EVERYTHING | {"optim__decay": "constant", "train__steps": 3}
    longer = training.config(model, tmp_path / "whole", **changes | {"train__steps": 5, "eval__every": 1})
    short = training.config(model, tmp_path / "short", **changes)
    runs = training.run_all({"longer": ("TP1", longer), "short": ("TP1", short)})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(short))
    code, text = command(path, f"train.resume={runs['short']}", "train.steps=5", "eval.every=1")
    assert code == 0 and "note: changed at this resume: eval.every: 2 -> 1; train.steps: 3 -> 5" in text, text
    assert "note: changed at this resume" in (runs["short"] / "log.txt").read_text()
    assert training.metrics(runs["short"]) == training.metrics(runs["longer"])
    steps = [json.loads(line)["step"] for line in (runs["short"] / "eval.jsonl").read_text().splitlines()]
    assert steps == [0, 2, 3, 4, 5]
    assert (runs["short"] / "run.json").read_bytes() == (runs["longer"] / "run.json").read_bytes()


# ------------------------------------------------------------------------------------------------ other inputs


def test_other_inputs_under_the_same_path_are_refused_with_both_checksums_or_accepted(model, tmp_path) -> None:
    """A bit of a weight, a chat template that was not there, and a question are changed after the first step."""
    shutil.copytree(model, tmp_path / "model")
    for split, first in (("train", 1), ("test", 50)):
        rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(first, first + 12)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {f"data__{split}_path": f"{tmp_path}/{split}.jsonl" for split in ("train", "test")}
    changes = {"data__source": "gsm8k", "data__num_train": 0, "train__steps": 2, "train__checkpoint_every": 1}
    cfg = training.config(tmp_path / "model", tmp_path / "out", **paths, **changes)
    run = training.run_all({"": ("TP1", cfg)})[""]
    (run / "finished.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-000002")
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))

    changed = [tmp_path / name for name in ("model/chat_template.jinja", "model/model.safetensors", "train.jsonl")]
    template, weights, questions = changed
    was = ["not there", sha256_file(weights), sha256_file(questions)]
    template.write_text("{{ messages[0]['content'] }} is")
    flip_a_bit(weights)
    questions.write_text(questions.read_text().replace("What is 3 +", "What is 30 +"))
    lines = run_record.changed_inputs(run, run_record.input_files(cfg), Path(cfg.model.path))
    for path, before, line in zip(changed, was, lines, strict=True):
        assert line.startswith(f"{path}: when {run}") and before in line and sha256_file(path) in line
    before = contents(run)
    code, text = command(tmp_path / "config.yaml")
    assert code == 2 and text.count("\n") == 1 and f"{lines[0]} (and 2 more)" in text, text
    assert command(tmp_path / "config.yaml", f"train.resume={run}", "--check") == (code, text)
    assert contents(run) == before

    code, text = command(tmp_path / "config.yaml", "train.changed_inputs=accept")
    assert code == 0 and "after 1 of 2 steps" in text and all(f"accepted: {line}" in text for line in lines), text
    lines = run_record.changed_inputs(run, run_record.input_files(cfg), Path(cfg.model.path))
    assert lines == []  # the run has accepted these inputs


def assert_a_resume_repeats(layout: str, model: Path, folder: Path, changes: dict) -> Path:
    """A run of three steps that is killed after the second and resumed ends the same; returns the whole run."""
    changes = EVERYTHING | {"train__steps": 3} | changes
    run = training.run_all({"": (layout, training.config(model, folder / "whole", **changes))})[""]
    copy = rewound(run, folder / "again", 2)
    cfg = training.config(model, folder / "out", **changes | {"train__resume": str(copy)})
    training.in_world(layout, training.train_each, [(layout, training.in_layout(cfg, layout))])
    assert_same_bytes(copy, run)
    return run


def test_noise_is_the_same_after_a_resume(model, tmp_path) -> None:
    rows = training.metrics(assert_a_resume_repeats("TP1", model, tmp_path, {"aqn__schedule": "constant"}))
    assert all(row["aqn/probe_gap"] < 1e-5 for row in rows), rows


@pytest.mark.parametrize("sync", ["merged", nightly("adapter")])
def test_a_policy_in_bf16_is_the_same_after_a_resume(sync, model, tmp_path) -> None:
    """With routing replay, and with three updates of the policy after each push."""
    bf16 = {"model__dtype": "bf16", "rollout__sync": sync, "replay__mode": "r3"}
    assert_a_resume_repeats("EP2", model, tmp_path, bf16 | {"optim__prompts_per_update": 2})


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("TP2_EP2", {"rollout__staleness": 2, "optim__prompts_per_update": 2}),
        ci("TP1", {"rollout__staleness": 1, "aqn__schedule": "constant", "replay__mode": "r2"}),
        nightly(
            "EP2", {"rollout__staleness": 1, "model__dtype": "bf16", "rollout__sync": "merged", "replay__mode": "r3"}
        ),
        nightly("EP2", {"rollout__staleness": 3, "model__dtype": "bf16", "rollout__sync": "adapter"}),
    ],
)
def test_a_resume_samples_with_the_policy_that_would_have_sampled(layout, changes, model, tmp_path) -> None:
    run = assert_a_resume_repeats(layout, model, tmp_path, {"loss__importance": "token"} | changes)
    assert all(row["rollout/logp_gap_mean"] < 0.05 for row in training.metrics(run))
