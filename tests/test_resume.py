"""A run that was killed and resumed ends like a run that was not killed. Another layout can resume it too."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import launched
import pytest
import torch
import training
from training import after, raised

import checkpoint
import run_record
import train_grpo
from config import load_config, to_yaml
from knobs import Config
from learner import MOMENTS, Learner
from tripwires import Tripped

RECORDS = ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl")
EVERYTHING = {  # rollout, updates and evaluation depend on everything that a checkpoint must hold
    "train__steps": 5, "train__checkpoint_every": 1, "eval__every": 2, "optim__prompts_per_update": 3,
    "optim__decay": "cosine", "optim__weight_decay": 0.1, "lora__dropout": 0.1, "loss__entropy_coef": 0.05,
    "optim__tokens_per_micro_batch": 300,
}  # fmt: skip


def finished_runs(cfg: Config) -> list[Path]:
    return [path.parent for path in Path(cfg.train.out_dir).glob("*/finished.json")]


def assert_same_bytes(found: Path, expected: Path) -> None:
    for name in RECORDS:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


# ------------------------------------------------------------------------------------------------ killed anywhere


def run_in_a_session_of_its_own(layout: str, cfg: Config) -> None:
    os.setsid()
    tempfile.tempdir = str(
        Path(cfg.train.out_dir).parent
    )  # the files of a killed process are removed with the test's folder
    training.in_world(layout, training.train_each, [(layout, cfg)])


def killed_after(seconds: float, layout: str, cfg: Config) -> bool:
    """Train in forked processes, and SIGKILL all of them after a while. Returns whether they were still running."""
    child = multiprocessing.get_context("fork").Process(target=run_in_a_session_of_its_own, args=(layout, cfg))
    child.start()
    child.join(seconds)
    running = child.exitcode is None
    if running:
        os.killpg(child.pid, signal.SIGKILL)
        child.join(30)
    assert running or child.exitcode == 0
    return running


def test_killed_again_and_again_at_any_moment(model, tmp_path) -> None:
    start = time.monotonic()
    expected = training.run_all({"": ("EP2", training.config(model, tmp_path / "whole", **EVERYTHING))})[""]
    whole = time.monotonic() - start
    kills = 0
    for attempt in range(4):  # a machine that was busier during the whole run finishes before the first kill
        cfg = training.in_layout(training.config(model, tmp_path / f"killed{attempt}", **EVERYTHING), "EP2")
        for share in (0.4, 0.6, 0.5, 0.7, 0.8, 0.9):  # as a share of the time of a whole run
            if not finished_runs(cfg):
                kills += killed_after(share * whole / 2**attempt, "EP2", cfg)
        if kills:
            break
    if not finished_runs(cfg):
        assert not killed_after(300, "EP2", cfg)
    assert kills
    (found,) = finished_runs(cfg)
    assert_same_bytes(found, expected)
    print(f"killed {kills} times, resumed {len(list(found.glob('resume-*')))} times, a whole run being {whole:.1f} s")


def test_killed_at_exact_places_under_torchrun(model, tmp_path) -> None:
    """The run is killed in the middle of a step, then of a checkpoint. Then the real command runs to the end."""
    whole, cfg = (
        training.in_layout(training.config(model, tmp_path / name, **EVERYTHING), "EP2") for name in ("whole", "killed")
    )
    training.in_world("EP2", training.train_each, [("EP2", whole)], False)
    path = tmp_path / "killed.yaml"
    path.write_text(to_yaml(cfg))
    # The fourth update is the second one of step 2. The second checkpoint after it is the one of three steps.
    for number, (place, count, rank) in enumerate([("update", 4, 1), ("checkpoint", 2, 0)]):
        flag = tmp_path / f"flag{number}"
        fault = ("hang", place, count, rank, flag)
        with launched.launch(
            2, "tests/support/faulty_train.py", *fault, path, log=tmp_path / f"killed{number}.log"
        ) as killed:
            killed.until(flag.exists)
            killed.kill()
            assert not killed.living()
        folder = training.only_run(cfg)
        aside = list(folder.glob("checkpoints/.tmp-*"))
        assert len(aside) == (place == "checkpoint"), (place, aside)
        steps = sorted(path.name for path in folder.glob("checkpoints/step-*"))
        assert steps == [["step-000001"], ["step-000001", "step-000002"]][number]
    with launched.launch(2, "train_grpo.py", path, log=tmp_path / "last.log") as last:
        assert last.wait() == 0, last.text
    assert "after 2 of 5 steps" in last.text
    assert_same_bytes(training.only_run(cfg), training.only_run(whole))


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
    """A run without dropout: its numbers do not depend on the layout."""
    changes = EVERYTHING | {"lora__dropout": 0.0, "train__keep_last": 9}
    return training.run_all({"": ("EP2", training.config(model, tmp_path_factory.mktemp("plain"), **changes))})[""]


@pytest.mark.parametrize("layout", ["TP1", "DP2", "TP2", "EP2", "TP2_EP2_ETP2"])
def test_another_layout_goes_on_with_the_same_numbers(layout, model, plain, tmp_path) -> None:
    copy = rewound(plain, tmp_path, 2)
    changes = EVERYTHING | {"lora__dropout": 0.0, "train__keep_last": 9, "train__resume": str(copy)}
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


def command(*arguments: object) -> tuple[int, str]:
    """Exit code and output of train_grpo.main in a forked process: a world of one, without torchrun."""

    def work(sender) -> None:
        sys.stdout = sys.stderr = io.StringIO()
        warnings.simplefilter("ignore")
        training.lighten()
        code = train_grpo.main([str(argument) for argument in arguments])
        sender.send((code, sys.stdout.getvalue()))
        sender.close()
        os._exit(0)

    training.import_before_the_fork()
    receiver, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=work, args=(sender,))
    child.start()
    sender.close()
    try:
        return receiver.recv()
    finally:
        child.join(10)


@pytest.fixture
def file(model, plain, tmp_path) -> Path:
    """The configuration of the plain run, for one process; its out_dir is tmp_path / "out"."""
    changes = EVERYTHING | {"lora__dropout": 0.0, "train__keep_last": 9}
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(training.config(model, tmp_path / "out", **changes)))
    return path


def folders(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "out").iterdir()}


def test_a_changed_value_is_refused_by_name_and_nothing_is_touched(plain, file, tmp_path) -> None:
    copy = rewound(plain, tmp_path / "out", 2)
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    code, text = command(file, f"train.resume={copy}", "optim.lr=0.02", "eval.samples=2")
    assert code == 2 and text.count("error: ") == 1
    assert "optim.lr: 0.01 -> 0.02" in text and "eval.samples: 1 -> 2" in text
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


def test_auto_goes_on_with_the_unfinished_run_of_this_configuration_only(plain, file, tmp_path) -> None:
    copy = rewound(plain, tmp_path / "out", 2)
    code, text = command(file, "train.seed=3", "train.steps=7")
    assert code == 2 and "train.seed: 0 -> 3" in text and len(folders(tmp_path)) == 1, text
    assert "train.steps: 5 -> 7 (optim.decay depends on it)" in text
    code, text = command(file)
    assert code == 0 and f"resumed {copy.name} after 2 of 5 steps" in text and len(folders(tmp_path)) == 1, text
    training.assert_same_metrics(copy, plain)
    shutil.rmtree(copy / "checkpoints")
    code, text = command(file, f"train.resume={copy}")
    assert code == 2 and f"error: train.resume: {copy} holds no usable checkpoint" in text


def test_a_finished_run_and_resume_never_start_a_new_one(plain, file, tmp_path) -> None:
    shutil.copytree(plain, tmp_path / "out" / plain.name)
    code, text = command(file)
    assert code == 0 and "resumed" not in text and len(folders(tmp_path)) == 2, text
    (new,) = [path for path in (tmp_path / "out").iterdir() if path.name != plain.name]
    (new / "finished.json").unlink()
    code, text = command(file, "train.resume=never")
    assert code == 0 and "resumed" not in text and len(folders(tmp_path)) == 3, text


def test_resuming_a_finished_run_by_name_leaves_its_numbers_alone(plain, file, tmp_path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "out" / plain.name))
    code, text = command(file, f"train.resume={copy}")
    assert code == 0 and "after 5 of 5 steps" in text
    assert_same_bytes(copy, plain)
    assert (copy / "finished.json").exists()


def test_a_finished_run_goes_on_for_more_steps_with_the_numbers_of_a_longer_run(model, tmp_path) -> None:
    """And with evaluations in other steps. A sweep then finds the run by its last configuration."""
    changes = EVERYTHING | {"optim__decay": "constant", "train__steps": 3, "lora__dropout": 0.0}
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


# ----------------------------------------------------------------------------------------------- faults of a checkpoint

FEW = {
    "rollout__prompts_per_step": 4, "rollout__group_size": 2, "optim__prompts_per_update": 4,
    "rollout__max_new_tokens": 4, "eval__samples": 0, "eval__num_questions": 1,
}  # fmt: skip


def in_the_second_save(change: Callable[[dict, dict, Learner], tuple[dict, dict]]) -> None:
    """What Learner.state returns is changed, from the second update on."""
    after(Learner, "state", lambda found, learner: change(*found, learner) if learner.optimizer_steps > 1 else found)


def remade(kind: str, part: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The tensors of a kind with ``part`` in their name are changed when they are made for the second save."""

    def changed(tensors: dict, counts: dict, _: Learner) -> tuple[dict, dict]:
        named = {
            name: old._replace(make=lambda old=old: change(old.make())) if part in name else old
            for name, old in tensors[kind].items()
        }
        return tensors | {kind: named}, counts

    in_the_second_save(changed)


def one_update_old() -> None:
    """The second checkpoint has the adapters that the first one had."""
    made: dict[str, torch.Tensor] = {}

    def older(found: tuple[dict, dict], learner: Learner) -> tuple[dict, dict]:
        tensors, counts = found
        for name, pending in tensors["adapter"].items():
            if learner.optimizer_steps == 1:
                made[name] = pending.make().clone()
            else:
                tensors["adapter"][name] = pending._replace(make=partial(made.get, name))
        return tensors, counts

    after(Learner, "state", older)


def moments_exchanged() -> None:
    def exchange(tensors: dict, counts: dict, _: Learner) -> tuple[dict, dict]:
        factors = [name.removesuffix(".exp_avg_sq") for name in tensors["optimizer"] if name.endswith(".exp_avg_sq")]
        exchanged = {f"{name}.{moment}": tensors["optimizer"][f"{name}.{other}"]
                     for name in factors for moment, other in zip(MOMENTS, MOMENTS[::-1], strict=True)}  # fmt: skip
        return tensors | {"optimizer": exchanged}, counts

    in_the_second_save(exchange)


def a_tensor_more() -> None:
    more = checkpoint.Pending((3,), torch.float32, lambda: torch.zeros(3))
    in_the_second_save(lambda tensors, counts, _: (tensors | {"adapter": tensors["adapter"] | {"more": more}}, counts))


def another_count() -> None:
    in_the_second_save(lambda tensors, counts, _: (tensors, {"optimizer_steps": 7}))


def a_file_with_a_wrong_number() -> None:
    """The bytes are wrong, and the checksum of the file is that of the wrong bytes."""
    real = checkpoint._write_tensors

    def write(path: Path, tensors: dict) -> str:
        if "step-000002" in str(path) and path.stem == "adapter":
            name = next(iter(tensors))
            tensors = tensors | {name: tensors[name]._replace(make=lambda old=tensors[name]: 2 * old.make())}
        return real(path, tensors)

    checkpoint._write_tensors = write


SAVED_WRONGLY = {  # fault: (function that plants it, layouts, part of the message)
    "B as 0": (partial(remade, "adapter", ".B", torch.zeros_like), ["TP1", "TP2_EP2"], "adapter model.layers.0."),
    "experts in another order": (
        partial(remade, "adapter", ".experts.", lambda value: value.flip(0)), ["TP1", "TP2_EP2"], ".experts.",
    ),
    "moments of experts in another order": (
        partial(remade, "optimizer", ".experts.", lambda value: value.roll(1, 0)), ["TP2_EP2"], ".exp_avg",
    ),
    "one update old": (one_update_old, ["TP1"], "adapter model.layers.0."),
    "moments exchanged": (moments_exchanged, ["TP1"], "optimizer model.layers.0."),
    "a tensor more": (a_tensor_more, ["TP1"], "adapter more"),
    "another count": (another_count, ["TP1"], "optimizer_steps 7; needed: at most train.steps 3"),
    "a wrong number in the file": (a_file_with_a_wrong_number, ["TP1"], "adapter model.layers.0."),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "layout"), [(f, layout) for f, row in SAVED_WRONGLY.items() for layout in row[1]])
def test_a_checkpoint_that_is_not_what_the_ranks_hold_stops_the_run(fault, layout, model: Path, tmp_path: Path) -> None:
    """On every rank; the checkpoint of the step before stays, and the run goes on from it."""
    plant, _, expected = SAVED_WRONGLY[fault]
    cfg = training.config(model, tmp_path, **FEW | {"train__steps": 3, "train__checkpoint_every": 1})
    reports = raised(plant, cfg, layout)
    assert {kind for kind, _ in reports} == {Tripped} and len({message for _, message in reports}) == 1, reports
    assert reports[0][1].startswith("checks.state: after 2 steps: ") and expected in reports[0][1], reports[0]
    folder = training.only_run(cfg) / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000001"]


# ------------------------------------------------------------------------------------------------ other inputs


@pytest.fixture(scope="module")
def on_files(model, tmp_path_factory) -> Config:
    """The configuration of a finished run of two steps with its own model and data files."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copytree(model, folder / "model")
    for split, first in (("train", 1), ("test", 50)):
        rows = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(first, first + 12)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = {f"data__{split}_path": f"{folder}/{split}.jsonl" for split in ("train", "test")}
    changes = {"data__source": "gsm8k", "train__steps": 2, "train__checkpoint_every": 1}
    cfg = training.config(folder / "model", folder / "out", **paths, **changes)
    training.run_all({"": ("TP1", cfg)})
    return cfg


def weight_changed(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # a bit of the mantissa of a weight
    path.write_bytes(content)


CHANGES = {
    "model/model.safetensors": weight_changed,
    "model/tokenizer.json": lambda path: path.write_text(path.read_text() + " "),
    "model/chat_template.jinja": lambda path: path.write_text("{{ messages[0]['content'] }} is"),
    "train.jsonl": lambda path: path.write_text(path.read_text().replace("What is 3 +", "What is 30 +")),
}


@pytest.fixture
def interrupted(on_files, tmp_path) -> Path:
    """The folder of the run after its first step. It is restored at the end of the test."""
    folder = Path(on_files.model.path).parent
    shutil.copytree(folder, tmp_path / "kept")
    (run,) = (folder / "out").iterdir()
    (run / "finished.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-000002")
    yield folder
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "kept", folder)


@pytest.mark.parametrize("name", CHANGES)
def test_other_inputs_under_the_same_path_are_refused_with_both_checksums_or_accepted(
    name, interrupted, on_files, tmp_path
) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(on_files))
    (run,) = (interrupted / "out").iterdir()
    path = interrupted / name
    was = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "not there"
    CHANGES[name](path)
    now = hashlib.sha256(path.read_bytes()).hexdigest()
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}

    code, text = command(tmp_path / "config.yaml")
    assert code == 2 and text.count("\n") == 1 and str(path) in text and was in text and now in text, text
    assert command(tmp_path / "config.yaml", f"train.resume={run}", "--check") == (code, text)
    assert command(tmp_path / "config.yaml", "--check") == (code, text)
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before

    code, text = command(tmp_path / "config.yaml", "train.changed_inputs=accept")
    assert code == 0 and "after 1 of 2 steps" in text and f"accepted: {path}: when {run}" in text, text
    recorded = json.loads((run / "resume-1" / "inputs.json").read_text())
    assert now in [*recorded["model"].values(), *recorded["data"].values()]
    cfg = load_config(tmp_path / "config.yaml")
    assert run_record.changed_inputs(run, cfg.model.path, cfg.data) == []  # the run has accepted these inputs


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="mapped files are listed in /proc")
def test_a_resumed_run_holds_no_checkpoint_open(model, plain, tmp_path, monkeypatch) -> None:
    """The disk space of a removed checkpoint must be free again while the run goes on."""
    copy = rewound(plain, tmp_path, 2)
    changes = EVERYTHING | {"lora__dropout": 0.0, "train__keep_last": 1, "train__resume": str(copy)}
    cfg = training.config(model, tmp_path / "out", **changes)
    (maps,) = training.in_world("TP1", train_and_list_maps, cfg)
    assert len(maps) == 3 and not any("safetensors" in line and "step-" in line for text in maps for line in text)


def train_and_list_maps(cfg: Config) -> list[list[str]]:
    maps, real = [], checkpoint.save

    def save(*args, **kwargs):
        done = real(*args, **kwargs)
        maps.append(Path("/proc/self/maps").read_text().splitlines())
        return done

    checkpoint.save = save
    training.train_each([("TP1", cfg)])
    return maps


def test_noise_and_dropout_are_the_same_after_a_resume(model, tmp_path) -> None:
    """The check of the noise on the probe draws nothing from the generator of dropout, and uses no dropout."""
    changes = EVERYTHING | {"aqn__schedule": "constant", "aqn__router": "clean"}
    run = training.run_all({"": ("TP1", training.config(model, tmp_path / "whole", **changes))})[""]
    rows = training.metrics(run)
    assert all(row["aqn/probe_gap"] < 1e-5 for row in rows), rows  # dropout would make it 5e-3 to 2e-2
    copy = rewound(run, tmp_path / "again", 4)
    cfg = training.config(model, tmp_path / "out", **changes | {"train__resume": str(copy)})
    training.in_world("TP1", training.train_each, [("TP1", cfg)])
    assert_same_bytes(copy, run)


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_a_policy_in_bf16_is_the_same_after_a_resume(sync, model, tmp_path) -> None:
    """With routing replay, and with three updates of the policy after each push."""
    bf16 = {"model__dtype": "bf16", "rollout__sync": sync, "lora__dropout": 0.0, "replay__mode": "r3"}
    changes = EVERYTHING | bf16 | {"optim__prompts_per_update": 2}
    run = training.run_all({"": ("EP2", training.config(model, tmp_path / "whole", **changes))})[""]
    copy = rewound(run, tmp_path / "again", 4)
    cfg = training.config(model, tmp_path / "out", **changes | {"train__resume": str(copy)})
    training.in_world("EP2", training.train_each, [("EP2", training.in_layout(cfg, "EP2"))])
    assert_same_bytes(copy, run)
