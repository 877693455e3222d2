"""Sixteen ranks run on few cores. With the real torchrun, a rank that fails ends the others at once."""

from __future__ import annotations

import json
import re
import time

import launched
import pytest
import training
import world

import parallel_setup
import train_grpo
from config import to_yaml
from plan import launched as launched_question


@pytest.mark.slow
def test_sixteen_ranks_run_the_shape_of_the_large_layout(tmp_path) -> None:
    """TP4 EP16 as on 16 NPUs. The random model earns no reward; the test shows that every collective completes."""
    folders = (f"train.out_dir={tmp_path}/out", f"model.path={tmp_path}/model", "tiny_model.seed=0")
    arguments = ("configs/tiny_16.yaml", "train.steps=3", *folders)
    training.import_before_the_fork()
    world._import_megatron()
    codes = world.as_torchrun(16, train_grpo.main, arguments, log=tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert codes == [0] * 16, text
    assert "layout: 16 ranks = tensor 4 x data 4 = expert_tensor 1 x expert 16 x expert_data 1" in text
    assert re.search(r"arithmetic accuracy \S+ % -> \S+ % \(.*, n = 64 held-out questions\)", text)
    (run,) = (tmp_path / "out").glob("tiny_16-*")
    rows = training.metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/logp_gap_max"] <= 1e-5 and row["actor/ratio_gap"] == 0.0 for row in rows)
    assert json.loads((run / "finished.json").read_text())["result"] and (run / "curves.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "rank"), [("raise", 1), ("die", 0)])
def test_a_rank_that_fails_brings_the_others_down_within_seconds(fault, rank, model, tmp_path) -> None:
    cfg = training.config(model, tmp_path / "out", parallel__expert=2, parallel__timeout_seconds=600)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    flag = tmp_path / "flag"
    arguments = (fault, "update", 2, rank, flag, tmp_path / "config.yaml")
    with launched.launch(2, "tests/support/faulty_train.py", *arguments, log=tmp_path / "log") as started:
        started.until(flag.exists)
        struck = time.monotonic()
        code = started.wait(60)
        seconds = time.monotonic() - struck
        assert code != 0 and seconds < 15, (code, seconds, started.text)
        assert not started.living()
    assert ("a deliberate fault in process" in started.text) == (fault == "raise")
    assert "step 1/3" in started.text and "step 2/3" not in started.text
    assert started.text.count("Traceback") <= 3, started.text  # of each rank, and that of torchrun about them
    print(f"{fault} on rank {rank}: all ended {seconds:.1f} s later with exit code {code}\n{started.text}")


def test_the_traceback_of_a_lost_connection_is_printed_after_the_hint(monkeypatch, capsys) -> None:
    """HCCL and NCCL word errors of their own in this way, too."""

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(train_grpo, "start", lost)
    monkeypatch.setattr(parallel_setup.time, "sleep", lambda seconds: None)
    assert train_grpo.main(["configs/tiny_cpu.yaml"]) == 1
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0].startswith("perhaps another rank ended") and said[1].startswith("Traceback")
    assert any(", in lost" in line for line in said) and said[-1] == "RuntimeError: Connection closed by peer"


def test_a_missing_file_in_the_middle_of_a_training_has_a_traceback(monkeypatch, capsys) -> None:
    """It may be a library's own: then the line alone would blame the user's input."""

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file", "library.so")

    monkeypatch.setattr(train_grpo, "start", missing)
    assert train_grpo.main(["configs/tiny_cpu.yaml"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert said[0].startswith("Traceback") and any(", in missing" in line for line in said)
    assert said[-1] == "error: library.so: No such file"


def test_a_question_to_all_ranks_names_a_file_in_one_line_and_shows_the_traceback_of_other_errors(capsys) -> None:
    def question(error: Exception) -> int:
        def refuse(*_: object) -> None:
            raise error

        args = launched_question.command_line("--groups", "x").parse_args(["configs/tiny_cpu.yaml"])
        return launched_question.ask(args, refuse, lambda *_: pytest.fail("not reached"))

    assert question(FileNotFoundError(2, "No such file", "a/b")) == 2
    assert capsys.readouterr().err == "error: a/b: No such file\n"
    for error in (ConnectionResetError("lost"), UnicodeDecodeError("utf-8", b"x", 0, 1, "of a library")):
        with pytest.raises(type(error)):
            question(error)
