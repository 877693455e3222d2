"""A resumed run is the run that was not interrupted, wherever it was killed."""

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import agents
import apart
import launched
import pytest
import torch
import training
import world
from breaking import flip_a_bit
from killed import after_each_kill, contents, in_child
from launched import ROOT
from pytest import MonkeyPatch
from saved import config_in, is_whole, names, opened, resumable, save, saved, tensors_of
from tiers import ci, nightly
from training import config, make_model, rewound

import train_grpo
from facts.exits import InputError
from inputs.config import to_dict, to_yaml
from knobs import Config
from parallel_setup import Parallel
from runlog import completions, run_record
from runlog import log as runlog
from runlog.run_record import sha256_file
from weights import checkpoint

# --------------------------------------------------------------------------------------------------------------- resume

OWN = Path(__file__).parents[1] / "support" / "own.py"
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


# ------------------------------------------------------------------------------------------------ killed anywhere


@pytest.mark.ci
def test_killed_at_exact_places_under_torchrun(model, tmp_path) -> None:
    """The run is killed in the middle of a checkpoint, then of a step. Then the same command runs to the end.

    Reward, advantage, loss and data are a user's own.
    """
    own = {"reward__function": f"{OWN}:reward", "loss__advantage": f"{OWN}:advantages", "loss__kind": f"{OWN}:loss"}
    for split, first in (("train", 1), ("test", 60)):
        rows = [{"ask": f"What is {n} + 1?", "is": str(n + 1), "level": n} for n in range(first, first + 40)]
        (tmp_path / f"{split}.json").write_text(json.dumps(rows))
    own |= {"data__source": "file", "data__columns": {"question": "ask", "answer": "is"}, "reward__check_gold": False}
    own |= {f"data__{split}_path": str(tmp_path / f"{split}.json") for split in ("train", "test")}
    whole, cfg = (
        training.in_layout(training.config(model, tmp_path / name, **EVERYTHING | {"train__steps": 3} | own), "EP2")
        for name in ("whole", "killed")
    )
    training.in_world("EP2", training.train_each, [("EP2", whole)], False)
    path = tmp_path / "killed.yaml"
    path.write_text(to_yaml(cfg))
    # The second checkpoint is that of two steps. The fourth update after the first is the second one of step 3.
    places = (checkpoint, "load", 2), (Parallel, "sync_gradients_", 4)
    for rank, place in enumerate(places):
        fault = apart.strike("lose", rank, place)
        code, text = agents.start(2, "train_grpo.py", path, log=tmp_path / f"killed{rank}.log", plant=fault).end()
        assert code == -signal.SIGKILL, text
        left = sorted(path.name for path in training.only_run(cfg).glob("checkpoints/*"))
        assert left == [[".unfinished-step-000002", "step-000001"], ["step-000001", "step-000002"]][rank]
    code, text = agents.start(2, "train_grpo.py", path, log=tmp_path / "last.log", light=False).end()
    assert code == 0, text
    assert "after 2 of 3 steps" in text
    training.assert_same_bytes(training.only_run(cfg), training.only_run(whole))
    assert (training.only_run(cfg) / "curves.png").stat().st_size > 1000


# ------------------------------------------------------------------------------------------------ other circumstances


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory) -> Path:
    changes = EVERYTHING | {"train__keep_last": 9}
    return training.run_all({"": ("EP2", training.config(model, tmp_path_factory.mktemp("plain"), **changes))})[""]


@pytest.mark.parametrize("layout", ["EP2", ci("TP2"), *map(nightly, ["TP1", "DP2", "TP2_EP4"])])
def test_another_layout_goes_on_with_the_same_numbers(layout, model, plain, tmp_path) -> None:
    copy = rewound(plain, tmp_path, 2)
    changes = EVERYTHING | {"train__keep_last": 9, "train__resume": str(copy)}
    cfg = training.in_layout(training.config(model, tmp_path / "out", **changes), layout)
    training.in_world(layout, training.train_each, [(layout, cfg)])
    assert (copy / "finished.json").exists() and not (tmp_path / "out").exists()
    training.assert_same_metrics(copy, plain)
    if layout == "EP2":
        training.assert_same_bytes(copy, plain)
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
    assert all(contents(copy)[name] == before[name] for name in training.RECORDS)


@pytest.mark.parametrize("ranks", [0, 1])
def test_a_run_that_recorded_rollout_ranks_goes_on(ranks: int, plain, file, tmp_path) -> None:
    """All of its ranks trained and sampled, or one of them only sampled."""
    copy = rewound(plain, tmp_path / "out", 4)
    step = copy / "checkpoints" / "step-000004"
    state, checksums = (json.loads((step / name).read_text()) for name in ("state.json", "checksums.json"))
    state["config"]["rollout"]["ranks"] = ranks
    (step / "state.json").write_text(json.dumps(state))
    checksums["state.json"] = sha256_file(step / "state.json")
    (step / "checksums.json").write_text(json.dumps(checksums))
    code, text = command(file)
    assert code == 0 and f"resumed {copy.name} after 4 of 5 steps" in text and len(folders(tmp_path)) == 1, text
    training.assert_same_metrics(copy, plain)


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


# ------------------------------------------------------------------------------------------------ other inputs


def test_other_inputs_under_the_same_path_are_refused_with_both_checksums_or_accepted(model, tmp_path) -> None:
    """A bit of a weight is changed after the first step, and the chat template gets a file that was not there."""
    shutil.copytree(model, tmp_path / "model")
    cfg = training.config(tmp_path / "model", tmp_path / "out", train__steps=2, train__checkpoint_every=1)
    run = training.run_all({"": ("TP1", cfg)})[""]
    (run / "finished.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-000002")
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))

    changed = [tmp_path / name for name in ("model/chat_template.jinja", "model/model.safetensors")]
    template, weights = changed
    was = ["absent", sha256_file(weights)]
    template.write_text(json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())["chat_template"])
    flip_a_bit(weights)
    lines = run_record.changed_inputs(run, run_record.input_files(cfg), Path(cfg.model.path))
    for path, before, line in zip(changed, was, lines, strict=True):
        assert line.startswith(f"{path}: has changed since {run}") and before in line and sha256_file(path) in line
    before = contents(run)
    code, text = command(tmp_path / "config.yaml")
    assert code == 2 and text.count("\n") == 1 and f"{lines[0]} (and 1 more)" in text, text
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
    training.assert_same_bytes(copy, run)
    return run


def test_noise_is_the_same_after_a_resume(model, tmp_path) -> None:
    rows = training.metrics(assert_a_resume_repeats("TP1", model, tmp_path, {"aqn__schedule": "constant"}))
    assert all(row["aqn/probe_gap"] < 1e-5 for row in rows), rows


@pytest.mark.parametrize("sync", ["merged", nightly("adapter")])
def test_a_policy_in_bf16_is_the_same_after_a_resume(sync, model, tmp_path) -> None:
    """With routing replay, and with three updates of the policy after each push."""
    bf16 = {"model__dtype": "bf16", "rollout__sync": sync, "replay__mode": "r3"}
    assert_a_resume_repeats("EP2", model, tmp_path, bf16 | {"optim__prompts_per_update": 2})


@pytest.mark.slow
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


# ----------------------------------------------------------------------------------------------------- killed processes
# SIGKILL at any moment, or a write that the system refuses: a whole checkpoint is left, and the run ends the same.
#
# Ctrl-C and other signals end a process at once, with one line.

COMPARED = ("metrics.jsonl", "eval.jsonl", "eval_outcomes.jsonl")


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    return config_in(tmp_path)


def test_a_write_that_the_system_cuts_short_is_a_clear_error(tmp_path: Path, cfg: Config) -> None:
    saved(tmp_path, cfg, 1)

    def save_under_a_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # the kernel refuses larger files
        with pytest.raises(InputError, match="step-000002: cannot be written: .*File too large"):
            save(tmp_path, 2, tensors_of(2, size=100_000), {}, cfg)

    assert in_child(save_under_a_limit) == 0
    assert names(tmp_path) == ["step-000001"] and is_whole(checkpoint.latest(tmp_path))


@pytest.mark.parametrize("step", [3, ci(1), ci(2)])
def test_a_kill_at_any_file_operation_of_a_save_leaves_a_whole_one(tmp_path: Path, cfg: Config, step: int) -> None:
    """Step 1 and 2 exist: 3 is new and prunes 1, 2 replaces the newest, 1 is saved by a run that was rewound to 0."""
    run_dir = tmp_path / "run"
    saved(run_dir, cfg, 1, 2)

    def save_again() -> int:
        said: list[str] = []
        assert is_whole(checkpoint.latest(run_dir, said.append)) and said == []
        saved(run_dir, cfg, step)  # a repeated save removes the leftovers
        return 0

    moments, wrong = after_each_kill(save_again, run_dir)
    assert wrong == [] and moments > 15
    assert names(run_dir) == [f"step-{n:06d}" for n in range(max(1, step - 1), step + 1)]


def train(cfg: Config) -> None:
    """A small run: each weight depends on the one before, so a lost or repeated step changes every later line."""
    found = resumable(cfg)
    log = opened(cfg, resume=found and found.path.parent.parent)
    weight, first = torch.ones(3), 0
    if found:
        checkpoint.check_resume(found, to_dict(cfg))
        weight, first = found.tensors["adapter"]["weight"], found.step
        log.rewind(first)
    else:
        log.log_eval(0, {"eval/greedy_accuracy": 0.0}, [{"question": q} for q in range(3)])
    for step in range(first, cfg.train.steps):
        weight = weight * 1.1 + step
        log.log_completions("step", step + 1, [{"text": f"a {step}"}, {"text": f"b {step}"}])
        log.log_step(step + 1, {"weight": weight.sum()}, {"timing/update_s": 0.1})
        if (step + 1) % 3 == 0:
            log.log_completions("eval", step + 1, [{"text": f"answer {step}"}])
            log.log_eval(step + 1, {"eval/greedy_accuracy": weight.max()}, [{"question": q} for q in range(3)])
        if (step + 1) % cfg.train.checkpoint_every == 0:
            save(log.run_dir, step + 1, {"adapter": {"weight": weight}}, {}, cfg)
    log.finish("done", {})


def test_a_run_killed_anywhere_ends_byte_identical_when_started_again(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(runlog, "write_records", lambda *_: None)  # slow, and not read again
    cfg = config_in(tmp_path / "run", steps=6)
    (tmp_path / "run").mkdir()
    resumed = []

    def train_unless_done() -> int:
        if not list(Path(cfg.train.out_dir).glob("*/finished.json")):
            train(cfg)
        return 0

    def records(folder: Path) -> dict[str, bytes]:
        (done,) = folder.glob("out/*/finished.json")
        resumed.append((done.parent / "resume-1").exists())
        kept = {path.name: path.read_bytes() for path in done.parent.glob("completions/*.gz")}
        return kept | {name: (done.parent / name).read_bytes() for name in COMPARED}

    _, wrong = after_each_kill(train_unless_done, tmp_path / "run", same=records, every=3)
    assert wrong == [] and sum(resumed) >= 15


def to_a_full_disk(part: Path) -> None:
    part.symlink_to("/dev/full")


def to_a_read_only_folder(part: Path) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(part))


@pytest.mark.parametrize("write", [to_a_full_disk, to_a_read_only_folder])
@pytest.mark.parametrize("refused", ["step-000005", "eval-000003"])
def test_completions_that_cannot_be_written_end_the_run_in_one_line_and_nothing_is_lost(
    write: Callable[[Path], None], refused: str, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(runlog, "write_records", lambda *_: None)
    cfg, whole = (config_in(tmp_path / name, steps=6) for name in ("refused", "whole"))
    run_dir = trained(whole)
    real = completions.write

    def obstructed(run: Path, kind: str, step: int, rows: list) -> None:
        if f"{kind}-{step:06d}" == refused:
            write(run / "completions" / f".{refused}.jsonl.gz.tmp")
        real(run, kind, step, rows)

    def stopped_run() -> None:
        monkeypatch.setattr(completions, "write", obstructed)
        with pytest.raises(InputError, match="/completions: cannot be written: .*; choose a writable folder") as one:
            train(cfg)
        assert "\n" not in str(one.value)

    assert in_child(stopped_run) == 0
    (stopped,) = Path(cfg.train.out_dir).glob("*-*")
    (stopped / "completions" / f".{refused}.jsonl.gz.tmp").unlink(missing_ok=True)
    found = trained(cfg)
    assert found == stopped
    files = sorted(path.relative_to(run_dir) for path in run_dir.glob("completions/*"))
    assert len(files) == 8 and files == sorted(path.relative_to(found) for path in found.glob("completions/*"))
    for name in (*COMPARED, *files):
        assert (found / name).read_bytes() == (run_dir / name).read_bytes()


def trained(cfg: Config) -> Path:
    """The folder of a small run that went to its end."""
    train(cfg)
    (done,) = Path(cfg.train.out_dir).glob("*/finished.json")
    return done.parent


# ------------------------------------------------------------------------------------------------ Ctrl-C and others


BUSY = """
import hashlib, os
from runlog import progress
progress.end_on_signals(lambda: 'after step 3')
child = os.fork()
if child == 0:
    os.kill(os.getpid(), 15)  # as a pool of processes ends its workers
print('the child ended with', os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
hashlib.pbkdf2_hmac('sha256', b'x', b'y', 10**9)  # like a collective: Python calls no handler before it returns
"""


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGTERM, "0"),
        (signal.SIGINT, "1"),
        (signal.SIGHUP, "0"),
        nightly(signal.SIGUSR1, "0"),
        nightly(signal.SIGUSR2, "0"),
    ],
)
def test_a_signal_ends_a_process_that_waits_in_foreign_code_with_one_line_of_rank_0(number, rank) -> None:
    busy = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        cwd=ROOT,
        env=os.environ | {"RANK": rank},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # pytest itself may ignore it
    )
    line = f"\nended by {number.name} after step 3\n" if rank == "0" else ""
    assert busy.stdout.readline() == f"the child ended with {-signal.SIGTERM}\n"
    time.sleep(0.2)
    busy.send_signal(number)
    try:
        _, error = busy.communicate(timeout=20)
    finally:
        busy.kill()
    assert busy.returncode == 128 + number and error == line


IGNORING = """
import os, sys
from runlog import progress
progress.end_on_signals()
os.kill(os.getpid(), int(sys.argv[1]))
print('goes on')
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_is_ignored_at_the_start_stays_ignored(number: int) -> None:
    """A shell ignores SIGINT in a job in the background, and nohup ignores SIGHUP."""
    done = subprocess.run(
        [sys.executable, "-c", IGNORING, str(int(number))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(number, signal.SIG_IGN),
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


def pressed(launch: launched.Launch, ready: Callable[[], bool], number: int = signal.SIGINT) -> list[str]:
    """Ctrl-C, or this signal, when ``ready``.

    The lines of the log, if the process then ends soon, with 128 + the number and without a traceback.
    """
    launch.until(ready)
    os.killpg(launch.process.pid, number)
    assert launch.wait(60) == 128 + number, launch.text
    assert "Traceback" not in launch.text and "signal" not in launch.text, launch.text
    return [line for line in launch.text.splitlines() if line]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("command", "number", "when"),
    [
        ("train_grpo.py", signal.SIGINT, "the first step of this start"),
        ("evaluate.py", signal.SIGHUP, "the end of the evaluation"),
    ],
)
def test_a_signal_during_the_imports_ends_with_one_line(command: str, number: int, when: str, tmp_path: Path) -> None:
    with launched.started(sys.executable, command, tmp_path / "absent.yaml", log=tmp_path / "log") as launch:
        status = Path(f"/proc/{launch.process.pid}/status")

        def catches() -> bool:
            caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt"))
            return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

        lines = pressed(launch, catches, number)
    assert lines == [f"ended by {number.name} before {when}; the same command starts it again"]


@pytest.mark.ci
@pytest.mark.slow
def test_ctrl_c_in_a_run_of_two_ranks_ends_with_one_line_that_names_the_checkpoint(tmp_path: Path) -> None:
    """Through the launcher of the run_*.sh scripts. The line is right: the same command goes on from there."""
    model = make_model(tmp_path / "model")
    cfg = config(model, tmp_path / "out", parallel__expert=2, train__steps=1000, train__checkpoint_every=2)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    launcher = ("launch/first_code.py", "--standalone", "--local-addr=localhost", "--nproc_per_node=2")
    command = (sys.executable, *launcher, "train_grpo.py", tmp_path / "config.yaml")
    with launched.started(*command, log=tmp_path / "log") as launch:
        lines = pressed(launch, lambda: "step 4/1000" in launch.text)
    (run,) = (tmp_path / "out").iterdir()
    done = len((run / "metrics.jsonl").read_text().splitlines())
    last = names(run)[-1]
    assert lines[-2].startswith(f"step {done}/1000")
    assert lines[-1] == (
        f"ended by SIGINT after step {done} of 1000; the same command continues from {run}/checkpoints/{last}"
    )
    assert resumable(cfg).path == run / "checkpoints" / last
