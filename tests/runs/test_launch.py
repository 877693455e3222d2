"""Processes that torchrun starts: how they end, on one machine and on two."""

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import agents
import apart
import launched
import pytest
import torch
import torch.distributed as dist
import training
import world
from planting import Plant
from saved import config_in
from tiers import ci, nightly

import train_grpo
from checks import launched as launched_question
from facts.exits import STALLED
from inputs import files
from inputs.config import to_yaml
from parallel_setup import Parallel
from runlog import progress
from runlog.log import RunLog
from runlog.progress import Heartbeat

# --------------------------------------------------------------------------------------------------------------- launch


@pytest.mark.parametrize(("fault", "stall", "code"), [("raise", 0, 1), ci("hang", 6, STALLED)])
def test_a_rank_that_fails_or_hangs_ends_all_ranks(fault, stall, code, model, tmp_path) -> None:
    """The launcher notices that a rank has ended. A rank that stands still ends itself, and so does one that waits for
    it; parallel.timeout_seconds would be too late for this test."""
    cfg = training.config(model, tmp_path / "out", parallel__expert=2, train__stall_seconds=stall)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    plant = apart.strike(fault, 1, (Parallel, "sync_gradients_", 2))
    agent = agents.start(2, "train_grpo.py", tmp_path / "config.yaml", log=tmp_path / "log", plant=plant)
    found, said = agent.end()
    assert found == code, said
    assert "step 1/3" in said and "step 2/3" not in said
    assert ("a deliberate fault of rank 1" in said) == (fault == "raise")
    if fault == "raise":
        assert said.count("Traceback") <= 3, said  # of each rank, and that of the agent about them
    else:  # rank 1 hangs, and rank 0 waits for it in a collective
        assert "rank 0: made no progress for" in said and "rank 1: made no progress for" in said, said
        assert said.count("of step 2 (train.stall_seconds = 6)") == 2, said
        assert "in strike_here" in said and "in all_reduce" in said, said


def reduce_with_a_killed_rank(store: Path) -> None:
    """Two ranks meet; one is killed, and the other one needs it."""
    child = os.fork()
    limit = datetime.timedelta(seconds=60)
    place = {"store": dist.FileStore(str(store), 2), "rank": int(child == 0), "world_size": 2}
    try:
        dist.init_process_group("gloo", timeout=limit, **place)
        dist.all_reduce(torch.ones(1))
        if child == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        dist.all_reduce(torch.ones(1))
    finally:
        dist.destroy_process_group()


def of_a_user(store: Path) -> None:
    raise RuntimeError("no Connection in the table of peers")


@pytest.mark.parametrize(("fault", "lost"), [(reduce_with_a_killed_rank, True), (of_a_user, False)])
def test_an_error_in_a_collective_is_printed_after_a_hint_and_no_other_one(
    fault, lost, tmp_path, monkeypatch, capsys
) -> None:
    """Whatever the words of an error are: a function of the user's may raise one about peers and connections."""
    monkeypatch.setattr(train_grpo, "launch", lambda *_, **__: fault(tmp_path / "store"))
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert train_grpo.main(["configs/tiny_cpu.yaml"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("another rank may have ended" if lost else "Traceback"), said
    assert f", in {fault.__name__}" in said and "RuntimeError" in said.strip().splitlines()[-1]
    assert json.loads((tmp_path / "error.json").read_text())["message"] in said


@pytest.mark.ci
@pytest.mark.parametrize("program", ["train_grpo.py", nightly("evaluate.py")])
def test_torchrun_ends_with_the_line_of_the_rank_that_refused(program, tmp_path) -> None:
    """Its own traceback comes before it. Any of the ranks may be the first to refuse."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    done = subprocess.run(
        [*command, "--nproc_per_node=2", program, "absent.yaml"],
        cwd=launched.ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    line = "error: absent.yaml: cannot be read (No such file or directory)"
    assert done.returncode == 1 and {line, f"rank 1: {line}"} & {*done.stderr.splitlines()}, done.stderr
    assert line in done.stderr[done.stderr.rindex("Traceback") :], done.stderr


def test_a_missing_file_in_the_middle_of_a_training_has_a_traceback(monkeypatch, capsys) -> None:
    """It may be a library's own: then the line alone would blame the user's input."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file", "library.so")

    monkeypatch.setattr(train_grpo, "launch", missing)
    assert train_grpo.main(["configs/tiny_cpu.yaml"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0].startswith("Traceback") and any(", in missing" in line for line in said)
    assert said[-1] == "error: library.so: No such file"


def test_a_question_to_all_ranks_names_a_file_in_one_line_and_shows_the_traceback_of_other_errors(capsys) -> None:
    def question(error: Exception) -> int:
        def refuse(*_: object) -> None:
            raise error

        given = ["configs/tiny_cpu.yaml", "parallel.expert=1"]  # one rank, without torchrun
        args = launched_question.command_line("--groups", "x").parse_args(given)
        return launched_question.ask(args, refuse, lambda *_: pytest.fail("not reached"))

    assert question(FileNotFoundError(2, "No such file", "a/b")) == 2
    assert capsys.readouterr().err == "error: a/b: No such file\n"
    for error in (ConnectionResetError("lost"), UnicodeDecodeError("utf-8", b"x", 0, 1, "of a library")):
        with pytest.raises(type(error)):
            question(error)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(3 * int(os.environ['RANK']))", 3), ("os.kill(os.getpid(), 9)", 137)]
)
def test_the_launcher_ends_with_the_code_of_the_rank_that_ended_first_and_no_traceback(ending, code, tmp_path) -> None:
    (tmp_path / "script.py").write_text(f"import os, sys\n{ending}\n")
    command = [sys.executable, "launch/first_code.py", "--standalone", "--local-addr=localhost", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, tmp_path / "script.py"], cwd=launched.ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == code and "Traceback" not in done.stderr and "ChildFailed" not in done.stderr, done.stderr
    assert "ended first, with exit code" in done.stderr.splitlines()[-1]


SENDING = """
import os, signal, sys, time
os.kill(os.getppid(), signal.{sent})
time.sleep(20 if {ends} else 3)
"""


@pytest.mark.ci
@pytest.mark.parametrize(
    ("before", "sent", "code"), [(["nohup"], "SIGHUP", 0), ([], "SIGHUP", 129), ([], "SIGUSR1", 138)]
)
def test_the_launcher_goes_on_under_nohup_and_ends_by_a_signal_that_is_not_ignored(
    before, sent, code, tmp_path
) -> None:
    (tmp_path / "script.py").write_text(SENDING.format(sent=sent, ends=bool(code)))
    command = [*before, sys.executable, "launch/first_code.py", "--standalone", "--local-addr=localhost"]
    done = subprocess.run(
        [*command, tmp_path / "script.py"],
        cwd=launched.ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: signal.signal(getattr(signal, sent), signal.SIG_DFL),  # pytest itself may ignore it
    )
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


WAIT = """
import ctypes, time
from inputs.config import load_config
from runlog.log import RunLog
from runlog.progress import Heartbeat

def long_wait():
    {wait}

beat = Heartbeat({seconds}, RunLog(load_config("configs/tiny_cpu.yaml"), 3))
beat.beat("update of step 7")
long_wait()
"""


def end_of_a_wait(wait: str, seconds: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", WAIT.format(wait=wait, seconds=seconds)]
    return subprocess.run(command, cwd=launched.ROOT, capture_output=True, text=True, timeout=100)


@pytest.mark.ci
def test_a_process_that_stalls_in_code_that_holds_the_lock_of_python_ends_with_its_stack() -> None:
    """No thread of Python runs meanwhile, so neither place nor exit code are those of the heartbeat."""
    ended = end_of_a_wait("time.sleep(1.5); ctypes.PyDLL(None).sleep(600)", 2)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.startswith("Timeout (0:00:03)!\n") and "in long_wait" in ended.stderr


def test_a_process_that_stalls_reports_place_and_stack_and_ends() -> None:
    ended = end_of_a_wait("time.sleep(600)", 1)
    assert ended.returncode == STALLED
    assert "rank 3: made no progress for" in ended.stderr and "last finished: update of step 7" in ended.stderr
    assert "train.stall_seconds = 1" in ended.stderr and "in long_wait" in ended.stderr


def goes_on(beat: Heartbeat, act: Callable = lambda: None) -> bool:
    """Whether the watch lets the process go on for 50 s of a clock of its own; ``act`` comes before each look."""
    with (
        mock.patch.object(progress, "time") as clock,
        mock.patch.object(progress, "faulthandler"),
        mock.patch.object(progress.os, "_exit", side_effect=SystemExit) as end,
        mock.patch.object(beat.stopped, "wait") as wait,
    ):
        clock.monotonic.side_effect = lambda: wait.call_count / 2  # half a second passes between two looks
        wait.side_effect = lambda seconds: act() or wait.call_count > 100
        beat.beat()
        with contextlib.suppress(SystemExit):
            beat._watch()
        assert end.mock_calls in ([], [mock.call(STALLED)])
        return not end.called


def test_a_process_that_beats_or_waits_for_others_goes_on(tmp_path: Path) -> None:
    """Others may have more to do, and have heartbeats of their own."""
    beat = Heartbeat(0, RunLog(config_in(tmp_path), 3))
    beat.stall_seconds = 2
    assert goes_on(beat, beat.beat)
    with beat.waiting():
        assert goes_on(beat)
    assert not goes_on(beat), "it stalls after the wait"


def test_without_a_limit_and_after_the_end_of_a_run_nothing_watches(tmp_path: Path) -> None:
    def watching() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "heartbeat"]

    log = RunLog(config_in(tmp_path), 3)
    Heartbeat(0, log)
    assert not watching()
    beat = Heartbeat(1000, log)
    (thread,) = watching()
    beat.stop()
    thread.join(20)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------------------ two nodes
# Two nodes, imitated by two agents of one process each on this machine. They train like one agent. The loss of one
# ends the other, and a lost process is started again and resumes.
#
# Not covered: a network between the nodes, and HCCL.

# Three steps with a checkpoint after each. A random model earns no reward; the entropy bonus moves its adapters.
RUN = dict(parallel__expert=2, train__checkpoint_every=1, eval__samples=0, loss__entropy_coef=0.05)


def configuration(model: Path, folder: Path) -> Path:
    """The configuration file of RUN; the experts are split over the two processes."""
    (folder / "config.yaml").write_text(to_yaml(training.config(model, folder / "out", **RUN)))
    return folder / "config.yaml"


@contextmanager
def meeting() -> Iterator[list[list[str]]]:
    """The options of torchrun on each of two nodes; the first one holds the store for their meeting.

    torch calls a node lost that says nothing for three times five seconds, which a crowded machine may take.
    """
    with world.reserved_port() as port:
        options = [
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{port}",
            "--rdzv-id=test",
            "--local-addr=localhost",
        ]
        yield [[*options, f"--rdzv-conf=is_host={host},keep_alive_max_attempt=20"] for host in (1, 0)]


def on_two_nodes(
    folder: Path, script: str, *arguments: object, restarts: int = 0, plant: Plant = lambda patch: None
) -> list[tuple[int | None, str]]:
    """The exit code and the output of a command on each of two nodes."""
    with meeting() as nodes:
        started = [
            agents.start(
                1, script, *arguments, log=folder / f"{number}.log", plant=plant, nodes=options, restarts=restarts
            )
            for number, options in enumerate(nodes)
        ]
        return [agent.end() for agent in started]


@pytest.mark.ci
@pytest.mark.parametrize("rank", [0, 1])
def test_a_node_that_is_lost_ends_the_other_with_a_message(rank, model, tmp_path) -> None:
    """The node with this rank gets SIGKILL in its second update. One of the two nodes holds the store."""
    lost = apart.strike("lose", rank, (Parallel, "sync_gradients_", 2))
    ended = on_two_nodes(tmp_path, "train_grpo.py", configuration(model, tmp_path), plant=lost)
    ((code, text),) = [node for node in ended if node[0] != -signal.SIGKILL]
    assert code not in (0, None), text
    assert "another rank may have ended" in text or "connection to the C10d store has failed" in text, text


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory) -> list[dict]:
    """The metrics of the run of two processes on one node."""
    cfg = training.config(model, tmp_path_factory.mktemp("whole"), **RUN)
    rows = training.metrics(training.run_all({"": ("EP2", cfg)})[""])
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["actor/grad_norm"] > 1e-4 for row in rows)
    return rows


@pytest.mark.ci
def test_a_lost_process_is_restarted_and_the_run_ends_the_same(model, undisturbed, tmp_path) -> None:
    """The process dies in the third step, which has no checkpoint; --max-restarts=1 resumes from the second step."""
    lost = apart.strike("die", 1, (Parallel, "sync_gradients_", 3))
    ended = on_two_nodes(tmp_path, "train_grpo.py", configuration(model, tmp_path), restarts=1, plant=lost)
    text = "".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0], text
    assert "layout: 2 ranks = tensor 1 x data 2 = expert 2 x expert_data 1" in text
    (run,) = (tmp_path / "out").glob("tiny-*")
    assert (run / "resume-1").exists(), text
    assert training.metrics(run) == undisturbed


@pytest.mark.ci
def test_the_groups_of_both_nodes_are_proved_by_one_command_on_each(model, tmp_path) -> None:
    ended = on_two_nodes(tmp_path, "preflight.py", "--groups", configuration(model, tmp_path))
    text = "".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0] and "expert" in text and "2 ranks" in text, text
