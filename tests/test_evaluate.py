"""Accuracy and its interval have textbook values, and do not depend on ranks, waves or the run's seed."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import training
import world
from tiers import asked, ci, nightly

import evaluate
import export
import reward_gsm8k
from data_gsm8k import Question
from engines.interface import Completion
from inputs.config import to_yaml
from knobs import Config
from tasks.scoring import Score


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


# ------------------------------------------------------------------------------------------------ evaluate

QUESTIONS = [Question(f"q{i}", "", str(i), [1, i + 3]) for i in range(7)]


class SeedEngine:
    """A greedy answer is the prompt's last token. Sample j has 1 + j + (last digit of the seed) such tokens."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def sample(self, prompts, *, seeds, num_samples, max_new_tokens, temperature, greedy_first):
        self.calls.append(len(prompts))
        assert temperature == (0.5 if greedy_first else 0.0)
        sizes = [[*[1] * greedy_first, *(seed % 10 + 1 + sample for sample in range(num_samples))] for seed in seeds]
        return [
            [Completion([prompt[-1]] * (size if greedy_first else 1), [], "stop") for size in of_prompt]
            for prompt, of_prompt in zip(prompts, sizes, strict=True)
        ]


def score(answers: Sequence[tuple[Question, Completion]]) -> list[Score]:
    """A greedy answer is right if its question is even, a sampled answer if 3 divides its length plus its token.

    Accuracy counts right answers, whatever they earn.
    """
    sizes = [(one.tokens[0], len(one.tokens)) for _, one in answers]
    return [Score(-0.5, n != 2, bool(token % 2) if n == 1 else (n + token) % 3 == 0) for token, n in sizes]


def evaluated(cfg: Config, layout: str, **sets: list[Question]) -> tuple[dict, list[dict], list[int]]:
    """Summary and outcomes, and the number of prompts in each call of this rank's engine."""
    engine, held_out = SeedEngine(), {"": QUESTIONS, **sets}
    result = evaluate.evaluate(engine, held_out, score, cfg.eval, cfg.rollout, world.open_layout(layout))
    return *result, engine.calls


def config(tmp_path: Path, **changes: object) -> Config:
    return training.config(tmp_path, tmp_path, **{"eval__samples": 2, "eval__temperature": 0.5, **changes})


def test_an_evaluation_depends_neither_on_ranks_nor_on_waves_nor_on_the_seed(tmp_path) -> None:
    """Every rank samples equally often: engines in lockstep wait for each other in every call."""
    ((*expected, _),) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    for layout in asked(["DP2", "TP2_EP2_DP2", nightly("TP4_EP4_DP2")]):  # eight have less than one question each
        cfg = config(tmp_path, eval__batch_size=3, train__seed=1)
        ranks = training.in_world(layout, evaluated, cfg, layout)
        assert all(found == expected for *found, _ in ranks)
        if layout == "DP2":  # two ranks have 4 and 3 questions: a call for each wave
            assert [calls for *_, calls in ranks] == [[3, 1], [3, 0]]


def test_summary_and_outcomes_by_hand(tmp_path) -> None:
    ((summary, outcomes, _),) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    assert [row["question"] for row in outcomes] == list(range(7))
    assert [row["gold"] for row in outcomes] == ["0", "1", "2", "3", "4", "5", "6"]
    assert [row["greedy"] for row in outcomes] == [1, 0, 1, 0, 1, 0, 1]
    assert summary["eval/greedy_accuracy"] == pytest.approx(4 / 7)
    assert (summary["eval/greedy_low"], summary["eval/greedy_high"]) == evaluate.wilson(4 / 7, 7)
    assert summary["eval/greedy_unparsable"] == 0 and summary["eval/greedy_length_mean"] == 1
    # Two lengths in succession: at most one of the samples is right.
    samples = [row["sampled"] for row in outcomes]
    assert all(len(pair) == 2 for pair in samples)
    assert summary["eval/sampled_accuracy"] == pytest.approx(sum(map(sum, samples)) / 14)
    assert summary["eval/pass@2"] == pytest.approx(sum(map(max, samples)) / 7) and 0 < summary["eval/pass@2"] < 1
    low, high = evaluate.wilson(summary["eval/sampled_accuracy"], 7)  # questions are counted, not samples
    assert (summary["eval/sampled_low"], summary["eval/sampled_high"]) == (low, high)
    assert summary["eval/num_questions"] == 7 and summary["eval/samples"] == 2


def test_sets_are_measured_beside_the_main_one_and_change_none_of_its_bits(tmp_path) -> None:
    """An answer depends on the name of its set and its place: not on the other sets or on their order."""
    few = QUESTIONS[2:6]
    ((summary, outcomes, _),) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    results = {}
    for layout, names in (("TP1", ["math", "other"]), ("DP2", ["other", "math"])):
        cfg = config(tmp_path, eval__num_questions=6, eval__batch_size=3)
        with_sets = functools.partial(evaluated, **dict.fromkeys(names, few))
        both, rows, _ = training.in_world(layout, with_sets, cfg, layout)[0]
        assert rows[:6] == outcomes[:6] and "set" not in rows[0]
        results[layout] = both, {name: [row for row in rows if row.get("set") == name] for name in names}
    assert results["TP1"] == results["DP2"]
    both, by_set = results["TP1"]
    assert {key for key in both if key.count("/") == 1} == summary.keys()
    assert {key.replace("eval/math/", "eval/") for key in both if "math" in key} == summary.keys()
    assert both["eval/math/num_questions"] == 4 and both["eval/num_questions"] == 6  # at most so many of each
    assert [row["greedy"] for row in by_set["math"]] == [1, 0, 1, 0] and both["eval/math/greedy_accuracy"] == 0.5
    assert both["eval/other/pass@2"] == sum(max(row["sampled"]) for row in by_set["other"]) / 4
    assert [row["sampled"] for row in by_set["math"]] != [row["sampled"] for row in by_set["other"]]
    assert evaluate.headline(both, "math").endswith("greedy 50.0 % (15.0-85.0), n = 4")


def test_no_samples_and_fewer_questions(tmp_path) -> None:
    cfg = config(tmp_path, eval__samples=0, eval__num_questions=3)
    ((summary, outcomes, _),) = training.in_world("TP1", evaluated, cfg, "TP1")
    assert summary["eval/greedy_accuracy"] == pytest.approx(2 / 3) and len(outcomes) == 3
    assert not [key for key in summary if "sampled" in key or "pass@" in key]
    assert all(row["sampled"] == [] for row in outcomes)


def test_the_result_is_told_in_one_line() -> None:
    before = {"eval/sampled_accuracy": 0.312, "eval/sampled_low": 0.285, "eval/sampled_high": 0.341}
    after = {"eval/sampled_accuracy": 0.84, "eval/sampled_low": 0.816, "eval/sampled_high": 0.861}
    assert evaluate.result_line(before, after | {"eval/num_questions": 1024}, "arithmetic") == (
        "arithmetic accuracy 31.2 % -> 84.0 % (95 % interval 81.6-86.1, sampled, n = 1,024 held-out questions)"
    )


def measured(arguments: list[str]) -> int:
    training.lighten()
    return evaluate.main(arguments)


def measured_in(folder: Path) -> int:
    os.chdir(folder / f"rank{os.environ['RANK']}")
    return measured(["config.yaml"])


@pytest.mark.parametrize(
    ("tensor", "golds", "named"),
    [((1, 2), "22", "the section parallel of the configuration"), ((1, 1), "23", "the held-out questions")],
)
def test_ranks_that_have_read_other_files_are_told_before_they_measure(model, tmp_path, tensor, golds, named) -> None:
    """Each rank has files of its own, as on another node. The sizes decide which groups a rank waits for."""
    for rank, gold in enumerate(golds):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        files = {"data__source": "file", "data__train_path": "questions.jsonl", "data__test_path": "questions.jsonl"}
        cfg = training.config(model, tmp_path, parallel__tensor=tensor[rank], **files)
        (folder / "config.yaml").write_text(to_yaml(cfg))
        question = {"question": "1 + 1?", "answer": f"#### {gold}"}
        (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    log = tmp_path / "log"
    assert world.as_torchrun(2, measured_in, tmp_path, log=log) == [2, 2]
    assert f"error: {named}: rank 1 did not read what rank 0 read; needed: the same files" in log.read_text()


def asked_answers_are_those_of_transformers(run_dir: Path, capfd, monkeypatch) -> None:
    """`export.py --ask` of the run and of its merged model."""
    import transformers

    merged = run_dir.parent / "merged"
    assert export.main([str(run_dir), "--merged", str(merged)]) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(merged)
    capfd.readouterr()
    answers = set()
    for question in ("Tom has 3 pens and finds 4 more. How many pens does Tom have now?", "Is 7 > 5?"):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        out = theirs.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=training.STOP_TOKENS)[
            0, len(ids[0]) :
        ]
        stopped = int(out[-1]) in training.STOP_TOKENS
        wanted = tokenizer.decode(out[:-1] if stopped else out)
        for folder in (run_dir, merged):
            assert export.main([str(folder), "--ask", question]) == 0
            said, _, found = capfd.readouterr().out.rstrip("\n").rpartition("\n")
            assert said == wanted
            assert found.startswith("answer that reward.method=strict finds: none")
            assert found.endswith("; cut off at rollout.max_new_tokens = 12") == (not stopped)
            with monkeypatch.context() as patch:
                patch.setattr(reward_gsm8k, "extract", lambda text, method: f"{method} of {text}")
                assert export.main([str(folder), "--ask", question]) == 0
            assert f"finds: strict of {wanted}" in capfd.readouterr().out
        answers.add(wanted)
    assert len(answers) == 2
    for folder, question, more, words in (
        (run_dir, " ", [], "needed: a question"),
        (merged / "absent", "x", [], "no config.yaml"),
        (merged, "x", ["--step", "1"], "is a merged model"),
    ):
        assert export.main([str(folder), "--ask", question, *more]) == 2
        error = capfd.readouterr().err
        assert error.count("\n") == 1 and words in error


@pytest.mark.parametrize("quantisation", ["int4", ci("none")])
def test_the_command_measures_what_the_first_evaluation_of_a_run_measures(
    tmp_path: Path, quantisation: str, capfd, monkeypatch
) -> None:
    """On another number of ranks, and with the overrides of the command line."""
    width = 32 if quantisation == "int4" else 16  # 32 values of int4 have one scale
    model = training.make_model(tmp_path / "model", expert_width=width)
    sets = tmp_path / "own.jsonl"
    sets.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(5)))
    changes = {"eval__samples": 2, "eval__sets": {"own": str(sets)}, "model__quantisation": quantisation}
    cfg = training.config(model, tmp_path, train__steps=1, **changes)
    run_dir = training.run_all({"run": ("DP2", cfg)})["run"]
    first = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[0])
    assert 0 < first["eval/greedy_accuracy"] < 1 and first["eval/num_questions"] == 9
    path, log = tmp_path / "config.yaml", tmp_path / "log"
    path.write_text(to_yaml(cfg))
    assert first["eval/own/num_questions"] == 5
    lines = [
        f"{model}: arithmetic accuracy: {evaluate.headline(first)}",
        f"{model}: own accuracy: {evaluate.headline(first, 'own')}",
    ]
    for ranks in asked([1, ci(2)]):
        arguments = [str(path), "train.seed=5", f"name=ranks{ranks}"]
        assert world.as_torchrun(ranks, measured, arguments, log=log) == [0] * ranks
        assert log.read_text().splitlines()[-2:] == lines
    (run_dir / "config.yaml").write_text(to_yaml(cfg))
    asked_answers_are_those_of_transformers(run_dir, capfd, monkeypatch)
    if quantisation != "none":  # it makes a difference
        assert world.as_torchrun(1, measured, [str(path), "model.quantisation=none"], log=log) == [0]
        assert log.read_text().splitlines()[-2] != lines[0]
    sets.write_text('{"question": "1 + 1?", "answer": "Two"}\n')  # a gold answer that strict cannot compare
    own = [str(path), "data.source=file", f"data.train_path={sets}", f"data.test_path={sets}", "eval.sets={}"]
    assert world.as_torchrun(1, measured, own, log=log) == [2] and "found 'Two'; needed: one number" in log.read_text()
