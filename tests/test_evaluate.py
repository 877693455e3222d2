"""Accuracy and its interval have textbook values, and do not depend on ranks, waves or the run's seed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import training
import world

import evaluate
from config import to_yaml
from data_gsm8k import Question
from engines.interface import Completion
from knobs import Config


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 1 - 0.1170, 1.0),  # by hand: n / (n + z^2)
    ],
)
def test_wilson_gives_the_textbook_intervals(successes, n, low, high) -> None:
    assert evaluate.wilson(successes / n, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 9, 1024])
def test_wilson_holds_the_proportion_and_mirrors_it(n) -> None:
    for successes in range(0, n + 1, max(1, n // 9)):
        low, high = evaluate.wilson(successes / n, n)
        assert 0 <= low <= successes / n <= high <= 1 and low < high
        assert evaluate.wilson(1 - successes / n, n) == pytest.approx((1 - high, 1 - low))


# ------------------------------------------------------------------------------------------------ evaluate

QUESTIONS = [Question(f"q{i}", "", str(i), [1, i + 3]) for i in range(7)]


class SeedEngine:
    """A greedy answer is the prompt's last token. Sample j has 1 + j + (last digit of the seed) such tokens."""

    def sample(self, prompts, *, seeds, num_samples, max_new_tokens, temperature):
        assert (num_samples == 1) if temperature == 0 else (temperature == 0.5)
        return [
            [
                Completion([prompt[-1]] * (1 if temperature == 0 else seed % 10 + 1 + sample), [], "stop")
                for sample in range(num_samples)
            ]
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]


def score(question: Question, completion: Completion) -> tuple[float, bool]:
    """A greedy answer is right if its question is even, a sampled answer if its length is even."""
    n = len(completion.tokens)
    return float(completion.tokens[0] % 2 if n == 1 else n % 2 == 0), n != 2


def run(engine: SeedEngine, cfg: Config, layout: str) -> tuple[dict, list[dict]]:
    return evaluate.evaluate(engine, QUESTIONS, score, cfg.eval, cfg.rollout, world.open_layout(layout))


def evaluated(cfg: Config, layout: str) -> tuple[dict, list[dict]]:
    return run(SeedEngine(), cfg, layout)


def config(tmp_path: Path, **changes: object) -> Config:
    return training.config(tmp_path, tmp_path, **{"eval__samples": 2, "eval__temperature": 0.5, **changes})


def test_an_evaluation_depends_neither_on_ranks_nor_on_waves_nor_on_the_seed(tmp_path) -> None:
    (expected,) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    for layout in ("DP2", "TP2_EP2_DP2", "TP4_EP4_DP2"):  # eight ranks have less than one question each
        for batch_size in (1, 99):
            cfg = config(tmp_path, eval__batch_size=batch_size, train__seed=batch_size)
            assert training.in_world(layout, evaluated, cfg, layout) == [expected] * world.LAYOUTS[layout][0]


def calls(cfg: Config, layout: str) -> list[int]:
    made: list[int] = []

    class Counting(SeedEngine):
        def sample(self, prompts, **how):
            made.append(len(prompts))
            return super().sample(prompts, **how)

    run(Counting(), cfg, layout)
    return made


def test_every_rank_samples_equally_often_even_without_questions(tmp_path) -> None:
    """Engines in lockstep wait for each other in every call. Two ranks have 4 and 3 questions, in waves of 3."""
    found = training.in_world("DP2", calls, config(tmp_path, eval__batch_size=3), "DP2")
    assert found == [[3, 3, 1, 1], [3, 3, 0, 0]]  # a greedy and a sampled call for each wave


def test_summary_and_outcomes_by_hand(tmp_path) -> None:
    ((summary, outcomes),) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    assert [row["question"] for row in outcomes] == list(range(7))
    assert [row["gold"] for row in outcomes] == ["0", "1", "2", "3", "4", "5", "6"]
    assert [row["greedy"] for row in outcomes] == [1, 0, 1, 0, 1, 0, 1]
    assert summary["eval/greedy_accuracy"] == pytest.approx(4 / 7)
    assert (summary["eval/greedy_low"], summary["eval/greedy_high"]) == evaluate.wilson(4 / 7, 7)
    assert summary["eval/greedy_unparsable"] == 0 and summary["eval/greedy_length_mean"] == 1
    # The two lengths are consecutive, so exactly one of the two samples is right.
    samples = [row["sampled"] for row in outcomes]
    assert all(len(pair) == 2 for pair in samples)
    assert summary["eval/sampled_accuracy"] == pytest.approx(sum(map(sum, samples)) / 14)
    assert summary["eval/pass@2"] == pytest.approx(sum(map(max, samples)) / 7)
    low, high = evaluate.wilson(summary["eval/sampled_accuracy"], 7)  # questions are counted, not samples
    assert (summary["eval/sampled_low"], summary["eval/sampled_high"]) == (low, high)
    assert summary["eval/num_questions"] == 7 and summary["eval/samples"] == 2


def test_no_samples_and_fewer_questions(tmp_path) -> None:
    cfg = config(tmp_path, eval__samples=0, eval__num_questions=3)
    ((summary, outcomes),) = training.in_world("TP1", evaluated, cfg, "TP1")
    assert summary["eval/greedy_accuracy"] == pytest.approx(2 / 3) and len(outcomes) == 3
    assert not [key for key in summary if "sampled" in key or "pass@" in key]
    assert all(row["sampled"] == [] for row in outcomes)


def test_the_result_is_told_in_one_line() -> None:
    before = {"eval/sampled_accuracy": 0.312, "eval/sampled_low": 0.285, "eval/sampled_high": 0.341}
    after = {"eval/sampled_accuracy": 0.84, "eval/sampled_low": 0.816, "eval/sampled_high": 0.861}
    greedy = {"eval/greedy_accuracy": 0.24, "eval/greedy_low": 0.215, "eval/greedy_high": 0.267}
    counts = {"eval/num_questions": 1024}
    assert evaluate.result_line(before, after | counts, "arithmetic") == (
        "arithmetic accuracy 31.2 % -> 84.0 % (95 % interval 81.6-86.1, sampled, n = 1,024 held-out questions)"
    )
    assert evaluate.headline(before | greedy | counts) == (
        "sampled 31.2 % (28.5-34.1), greedy 24.0 % (21.5-26.7), n = 1,024"
    )
    assert "greedy" in evaluate.result_line(greedy, greedy | counts, "gsm8k")


def measured(arguments: list[str]) -> int:
    training.lighten()
    return evaluate.main(arguments)


@pytest.mark.parametrize("quantisation", ["none", "nvfp4"])
def test_the_command_measures_what_the_first_evaluation_of_a_run_measures(
    model: Path, tmp_path: Path, quantisation: str
) -> None:
    """On one rank and on two, and with the overrides of the command line."""
    cfg = training.config(model, tmp_path, train__steps=1, eval__samples=2, model__quantisation=quantisation)
    run_dir = training.run_all({"run": ("DP2", cfg)})["run"]
    first = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[0])
    assert 0 < first["eval/greedy_accuracy"] < 1 and first["eval/num_questions"] == 9
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(cfg))
    for ranks in (1, 2):
        log = tmp_path / f"{ranks}.log"
        arguments = [str(path), "train.seed=5", f"name=ranks{ranks}"]
        assert world.as_torchrun(ranks, measured, arguments, log=log) == [0] * ranks
        assert log.read_text().splitlines()[-1] == f"{model}: arithmetic accuracy: {evaluate.headline(first)}"
    if quantisation != "none":  # it makes a difference
        assert world.as_torchrun(1, measured, [str(path), "model.quantisation=none"], log=log) == [0]
        assert not log.read_text().endswith(f" accuracy: {evaluate.headline(first)}\n")
    assert world.as_torchrun(1, measured, [str(path), f"model.path={tmp_path}"], log=log) == [2]
    assert "error: model.path: no config.json in" in log.read_text()
