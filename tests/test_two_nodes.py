"""Two nodes, imitated by two torchruns of one process each on this machine. They train like one torchrun. The loss of
one ends the other, and a lost process is started again and resumes.

Not covered: a network between the nodes, and HCCL.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import launched
import pytest
import training
from tiers import ci

from config import to_yaml

# Three steps with a checkpoint after each. A random model earns no reward; the entropy bonus moves its adapters.
RUN = dict(parallel__expert=2, train__checkpoint_every=1, eval__samples=0, loss__entropy_coef=0.05)


def configuration(model: Path, folder: Path) -> Path:
    """The configuration file of RUN; the experts are split over the two processes."""
    (folder / "config.yaml").write_text(to_yaml(training.config(model, folder / "out", **RUN)))
    return folder / "config.yaml"


@contextmanager
def two_nodes(folder: Path, script: str, *arguments: object, restarts: int = 0) -> Iterator[list[launched.Launch]]:
    """Two torchruns that meet on a free port; the first holds the store for their meeting."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    meet = (
        "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", "--rdzv-id=test",
        "--local-addr=localhost", f"--max-restarts={restarts}",
    )  # fmt: skip
    with ExitStack() as stack:
        first = stack.enter_context(launched.launch(1, script, *arguments, log=folder / "first.log", meet=meet))
        first.until(lambda: listens(port))
        second = stack.enter_context(launched.launch(1, script, *arguments, log=folder / "second.log", meet=meet))
        yield [first, second]


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, ci(0)])
def test_a_node_that_is_lost_ends_the_other_with_a_message(rank, model, tmp_path) -> None:
    """One process hangs at its second update, so the moment is known; then its whole node gets SIGKILL.

    One of the two nodes holds the store.
    """
    flag = tmp_path / "flag"
    fault = ("hang", "update", 2, rank, flag)
    with two_nodes(tmp_path, "tests/support/faulty_train.py", *fault, configuration(model, tmp_path)) as nodes:
        nodes[0].until(lambda: flag.exists() and flag.read_text())
        (lost,) = [node for node in nodes if int(flag.read_text()) in {pid for pid, _ in node.family()}]
        (left,) = [node for node in nodes if node is not lost]
        struck = time.monotonic()
        lost.kill()
        code = left.wait(90)
        seconds = time.monotonic() - struck
        assert code not in (0, None) and seconds < 60, (code, seconds, left.text)
        assert not left.living()
    assert "another rank ended" in left.text or "connection to the C10d store has failed" in left.text


@pytest.mark.slow
def test_a_lost_process_is_restarted_and_the_run_ends_the_same(model, tmp_path) -> None:
    """The process dies in the third step, which has no checkpoint; --max-restarts=1 resumes from the second step.

    The undisturbed run has two processes on one node.
    """
    cfg = training.config(model, tmp_path / "whole", **RUN)
    training.in_world("EP2", training.train_each, [("EP2", cfg)], False)
    whole = training.metrics(training.only_run(cfg))
    assert [row["step"] for row in whole] == [1, 2, 3] and all(row["actor/grad_norm"] > 1e-4 for row in whole)
    fault = ("die", "update", 3, 1, tmp_path / "flag")
    with two_nodes(
        tmp_path, "tests/support/faulty_train.py", *fault, configuration(model, tmp_path), restarts=1
    ) as nodes:
        codes = [node.wait() for node in nodes]
        text = "".join(node.text for node in nodes)
        assert codes == [0, 0], text
    assert (tmp_path / "flag").exists()
    assert "layout: 2 ranks = tensor 1 x data 2 = expert_tensor 1 x expert 2 x expert_data 1" in text
    (run,) = (tmp_path / "out").glob("tiny-*")
    assert (run / "resume-1").exists(), text
    assert training.metrics(run) == whole


@pytest.mark.slow
def test_the_groups_of_both_nodes_are_proved_by_one_command_on_each(model, tmp_path) -> None:
    with two_nodes(tmp_path, "preflight.py", "--groups", configuration(model, tmp_path)) as nodes:
        codes = [node.wait() for node in nodes]
        text = "".join(node.text for node in nodes)
    assert codes == [0, 0] and "expert" in text and "2 ranks" in text, text
