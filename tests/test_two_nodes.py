"""Two nodes, imitated by two agents of one process each on this machine. They train like one agent. The loss of one
ends the other, and a lost process is started again and resumes.

Not covered: a network between the nodes, and HCCL.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import agents
import apart
import launched
import pytest
import training
import world
from planting import Plant

from inputs.config import to_yaml
from parallel_setup import Parallel

# Three steps with a checkpoint after each. A random model earns no reward; the entropy bonus moves its adapters.
RUN = dict(parallel__expert=2, train__checkpoint_every=1, eval__samples=0, loss__entropy_coef=0.05)


def configuration(model: Path, folder: Path) -> Path:
    """The configuration file of RUN; the experts are split over the two processes."""
    (folder / "config.yaml").write_text(to_yaml(training.config(model, folder / "out", **RUN)))
    return folder / "config.yaml"


@contextmanager
def meeting() -> Iterator[list[list[str]]]:
    """The options of torchrun on each of two nodes; the first one holds the store for their meeting."""
    with world.reserved_port() as port:
        options = [
            "--nnodes=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint=localhost:{port}",
            "--rdzv-id=test",
            "--local-addr=localhost",
        ]
        yield [[*options, f"--rdzv-conf=is_host={host}"] for host in (1, 0)]


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
    assert "another rank ended" in text or "connection to the C10d store has failed" in text, text


@pytest.fixture(scope="module")
def undisturbed(model, tmp_path_factory) -> list[dict]:
    """The metrics of the run of two processes on one node."""
    cfg = training.config(model, tmp_path_factory.mktemp("whole"), **RUN)
    rows = training.metrics(training.run_all({"": ("EP2", cfg)})[""])
    assert [row["step"] for row in rows] == [1, 2, 3] and all(row["actor/grad_norm"] > 1e-4 for row in rows)
    return rows


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
@pytest.mark.slow
def test_torchrun_restarts_a_lost_process_that_it_has_executed(model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(launched.NEW_STORE, "1")
    words = ("tests/support/faulty_train.py", configuration(model, tmp_path))
    with meeting() as nodes, ExitStack() as stack:
        started = []
        for number, options in enumerate(nodes):
            options.append("--max-restarts=1")
            launch = launched.launch(1, *words, log=tmp_path / f"{number}.log", meet=options)
            started.append(stack.enter_context(launch))
        codes = [launch.wait() for launch in started]
        text = "".join(launch.text for launch in started)
    assert codes == [0, 0], text
    (run,) = (tmp_path / "out").glob("tiny-*")
    assert (run / "resume-1").exists(), text
    assert [row["step"] for row in training.metrics(run)] == [1, 2, 3]


@pytest.mark.ci
def test_the_groups_of_both_nodes_are_proved_by_one_command_on_each(model, tmp_path) -> None:
    ended = on_two_nodes(tmp_path, "preflight.py", "--groups", configuration(model, tmp_path))
    text = "".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0] and "expert" in text and "2 ranks" in text, text
