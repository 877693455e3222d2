"""Announced comparisons: outcomes, intervals for questions that share operands, families, predictions, their page."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import recorded
from scipy import stats

import data_gsm8k
from knobs import DataConfig
from lab import announced, comparisons, pages, records, run_folders, store
from reward_gsm8k import gold_answer

QUESTIONS = 200


@pytest.fixture
def group(tmp_path_factory) -> Callable[..., list[records.Run]]:
    """A function that makes runs with gold answers by seed and question, one a seed, with its chance of a right answer
    at the end."""

    def make(name: str, after: list[float], gold: Callable[[int, int], str], rank: int = 16) -> list[records.Run]:
        out = tmp_path_factory.mktemp("out")
        made = [
            recorded.make_run(out, f"{name}-seed{seed}", seed, chance, overrides=(f"lora.rank={rank}",),
                              gold=lambda question, seed=seed: gold(seed, question))
            for seed, chance in enumerate(after)
        ]  # fmt: skip
        return [run_folders.from_run(run, f"{name}-seed{seed}") for seed, run in enumerate(made)]

    return make


def own(seed: int, question: int) -> str:
    """Another question in every seed."""
    return f"{seed}{question}"


def shared(seed: int, question: int) -> str:
    return str(question)


# ---------------------------------------------------------------- outcomes


def test_the_outcome_along_the_run_is_the_mean_over_evaluations_after_the_first(tmp_path: Path) -> None:
    run = run_folders.from_run(recorded.make_run(tmp_path, "x", questions=2), "x")
    marks = {0: "++++", 1: "++-+", 2: "----", 4: "++++"}  # two answers a question
    rows = [
        {"step": step, "eval/num_questions": 2, records.MARKS["greedy"]: "--", records.MARKS["sampled"]: sampled}
        for step, sampled in marks.items()
    ]
    rows.insert(3, {"step": 3, "reward/mean": 0.5})  # a step without an evaluation
    assert records.scores(replace(run, rows=rows), "sampled", 1).tolist() == [1, 0.5]
    assert records.scores(replace(run, rows=rows), "curve").tolist() == [2 / 3, 0.5]


# ---------------------------------------------------------------- seeds with questions of their own


def test_seeds_with_their_own_questions_are_the_unit(group) -> None:
    chances = [0.5, 0.55, 0.6, 0.65]
    base, other = group("base", chances, own), group("other", [c + 0.1 for c in chances], own, 8)
    (found,) = comparisons.compare({"base": base, "other": other})
    means = [np.array([records.scores(run, "sampled").mean() for run in runs]) for runs in (base, other)]
    expected = stats.ttest_rel(means[1], means[0])
    assert found.effect.interval() == pytest.approx(tuple(expected.confidence_interval()))
    assert found.p == pytest.approx(expected.pvalue) and found.questions == QUESTIONS
    with pytest.raises(comparisons.InputError, match="other questions"):
        comparisons.compare({"base": base, "other": group("other", chances, shared, 8)})
    (same,) = comparisons.compare({"base": base, "again": base})  # equal answers in all seeds are no difference
    assert same.p == 1 and same.direction == "" and same.effect.error == pytest.approx(2**0.5 / (4 * QUESTIONS))


def test_means_along_runs_with_other_evaluations_are_not_compared(group) -> None:
    base, other = group("base", [0.5] * 3, shared), group("other", [0.5] * 3, shared, 8)
    for run in base:
        answers = {key: "-" * QUESTIONS for key in records.MARKS.values()}
        run.rows[1].update({"eval/num_questions": QUESTIONS, **answers})
    with pytest.raises(comparisons.InputError, match=r"evaluations after \[1, 4\] and \[4\] steps; needed"):
        comparisons.compare({"base": base, "other": other}, "curve")
    assert comparisons.compare({"base": base, "other": other})


# ---------------------------------------------------------------- questions that share operands


def test_generated_questions_are_grouped_by_their_first_two_operands(tmp_path: Path) -> None:
    data = DataConfig(source="arithmetic", num_train=40, num_test=QUESTIONS, operand_high=30)
    made, _, _ = data_gsm8k.read(data, "test")
    gold = [gold_answer(row.answer) for row in made]
    changes = tuple(f"data.{key}={getattr(data, key)}" for key in ("num_train", "num_test", "operand_high"))
    run = recorded.make_run(tmp_path, "x", overrides=changes, gold=lambda place: gold[place])
    strange = recorded.make_run(tmp_path, "y", overrides=changes, gold=lambda place: gold[place] + "1")
    pairs = comparisons.operand_pairs(run_folders.from_run(run, "x"))
    assert len(pairs) == QUESTIONS > len(set(pairs)) and all(data_gsm8k.held_out(*pair) for pair in pairs)
    for (question, *_), pair in zip(made, pairs, strict=True):
        assert sorted(map(int, re.findall(r"\d+", question))) == list(pair)
    assert comparisons.operand_pairs(run_folders.from_run(strange, "y")) == []  # not the questions of the record


def test_the_mean_of_clusters_is_the_mean_of_questions() -> None:
    first, second = np.array([1.0, 0.0, -1.0, 1.0]), np.array([0.0, 1.0, 1.0])
    table = comparisons.by_cluster([first, second], ["aabc", "bca"])
    assert table.mean(1) == pytest.approx([first.mean(), second.mean()])
    # The mean of both seeds is (1/4 + 2/3) / 2 = 11/24. Cluster a of the first seed deviates by 1 - 22/24, times 3/4.
    assert table[0] == pytest.approx(11 / 24 + 0.75 * np.array([1 - 22 / 24, -1 - 11 / 24, 1 - 11 / 24]))


def test_intervals_cover_the_truth_when_questions_share_operands() -> None:
    """The effect differs between clusters of 1 to 19 questions: 95 % intervals must hold its mean nearly always."""
    generator, missed = np.random.default_rng(0), {"clusters": 0, "questions": 0}
    names = np.repeat(np.arange(20), np.arange(20) % 19 + 1)
    for _ in range(300):
        shared = generator.normal(0, 0.3, 20)[names]
        tables = [0.5 + shared + 0.03 * generator.normal() + generator.normal(0, 0.5, len(names)) for _ in range(5)]
        for how, table in (("clusters", comparisons.by_cluster(tables, [names] * 5)), ("questions", np.stack(tables))):
            low, high = comparisons.effect(table, answers=len(names)).interval()
            missed[how] += not low <= 0.5 <= high
    assert missed["clusters"] < 0.09 * 300 < 0.2 * 300 < missed["questions"]


# ---------------------------------------------------------------- families


def test_a_family_is_corrected_as_a_whole_also_before_all_of_it_was_run(group) -> None:
    made = {
        name: group(name, [0.5 + 0.02 * place] * 4, own, 4 + place) for place, name in enumerate(("base", "one", "two"))
    }
    entries = tuple(
        announced.Planned(title=name, base="base", others=(name,), family="f", kind="curve", predicted="larger")
        for name in ("one", "two", "absent")
    )
    alone = [comparisons.compare({"base": made["base"], name: made[name]}, "curve")[0] for name in ("one", "two")]
    found = [one for _, one in announced.compared(announced.Plan(comparisons=entries), made)]
    p_values = [float(one.effect.p_value()) for one in alone]
    assert [one.p for one in found] == pytest.approx(comparisons.holm([*p_values, 1.0])[:2])
    for one, before in zip(found, alone, strict=True):
        assert one.num_comparisons == 3 and one.detectable > before.detectable


@pytest.mark.parametrize("spread", [0.9, 1.45, 1.8])
def test_how_often_no_difference_is_called_equal(spread: float) -> None:
    """Within 1 point, against 20,000 simulated designs of 18 seeds."""
    drawn = np.random.default_rng(0).normal(0, spread, (20000, 18))
    half = stats.t.ppf(0.975, 17) * drawn.std(1, ddof=1) / 18**0.5
    effect = comparisons.Effect(np.array(0.003), np.array(spread / 100 / 18**0.5), np.array(17.0))
    one = comparisons.Comparison("base", "other", [], [*range(18)], 9, effect, [], [], 0.01)
    assert announced.chance_of_equal(one) == pytest.approx((abs(drawn.mean(1)) + half < 1).mean(), abs=0.06)


@pytest.mark.parametrize(
    ("predicted", "mean", "error", "seeds", "said"),
    [
        ("better", 0.05, 0.005, 5, "met"),
        ("better", -0.05, 0.005, 5, "not met: worse"),
        ("better", 0.01, 0.001, 5, "met"),  # small, and no chance
        ("better", 0.001, 0.001, 5, "not met: equal"),
        ("equal", 0.001, 0.001, 5, "met"),
        ("better", 0.05, 0.005, 2, "not decided: 2 paired seeds of 3"),
        ("larger", -0.05, 0.005, 5, "not met: smaller"),
        ("larger", 0.01, 0.001, 5, "not met: equal"),  # no chance, but smaller than the margin
        ("smaller", -0.05, 0.005, 5, "met"),
        ("equal", 0.01, 0.001, 5, "met"),
        ("equal", 0.05, 0.005, 5, "not met: larger"),
    ],
)
def test_whether_a_prediction_was_met(predicted: str, mean: float, error: float, seeds: int, said: str) -> None:
    effect = comparisons.Effect(np.array(mean), np.array(error), np.array(9.0))
    one = comparisons.Comparison(
        base="base", other="other", changed=[], seeds=list(range(seeds)), questions=9, effect=effect,
        p=float(effect.p_value()), num_comparisons=1, detectable=0.0, by_seed=[], notes=[], margin=0.02,
    )  # fmt: skip
    family = "benchmark" if predicted in ("better", "worse") else "new"
    planned = announced.Planned(title="x", base="base", others=("other",), family=family, predicted=predicted)
    assert announced.outcome(planned, one, []) == said
    note = announced.by_the_rule_of_today([(planned, one)])
    assert ("`other` (+1.0 points) is equal, not better" in note) == (
        said == "met" and mean == 0.01 and family != "new"
    )
    if one.decided:
        guarded = planned.model_copy(update={"control": "fault"})
        assert announced.outcome(guarded, one, []) == "no statement: its control was not found"


def test_an_entry_of_a_family_has_one_prediction_a_control_that_exists_and_a_gain_a_group(tmp_path: Path) -> None:
    for entry, said in {
        "family: benchmark, others: [a, b], predicted: worse": "an entry of a family needs one name in others",
        "family: benchmark, others: [a], predicted: worse, control: fualt": "x: control: found fualt; needed: one of",
        "others: [a], predicted: worse, family: mine": "worse is of older families; needed: equal, larger or smaller",
        "others: [a]}]\ngains: [base, otter] #": "gains: found otter; needed: groups of comparisons",
    }.items():
        (tmp_path / "plan.yaml").write_text(f"comparisons: [{{title: x, base: base, {entry}}}]\n")
        with pytest.raises(comparisons.InputError, match=said):
            announced.read_plan(tmp_path)


# ---------------------------------------------------------------- the page


def test_the_page_says_what_was_predicted_and_what_was_found(tmp_path: Path) -> None:
    for place, (name, after) in enumerate((("base", 0.5), ("good", 0.9), ("fault", 0.1))):
        for seed in range(4):
            made = recorded.make_run(
                tmp_path / "out", f"{name}-seed{seed}", seed, after, questions=50, overrides=(f"lora.rank={4 + place}",)
            )
            store.add_run(made, tmp_path / "results")
    entry = "{title: %s, family: %s, kind: curve, base: base, others: [%s], predicted: %s, why: luck, control: fault}"
    entries = [("Good", "benchmark", "good", "better"), ("Good again", "benchmark", "good", "equal")]
    entries += [("'Control: broken'", "controls", "fault", "worse"), ("Later", "benchmark", "absent", "worse")]
    text = "".join(f"- {entry % each}\n" for each in entries)
    (tmp_path / "results" / "plan.yaml").write_text("comparisons:\n" + text)
    (tmp_path / "docs").mkdir()
    for page in ("RESULTS.md", "docs/benchmark.md"):
        (tmp_path / page).write_text(f"By people.\n{pages.BEGIN}\n{pages.END}\n")
    pages.build(tmp_path / "results", tmp_path / "RESULTS.md")
    assert pages.stale(tmp_path / "results", tmp_path / "RESULTS.md") == []
    page, results = ((tmp_path / name).read_text() for name in ("docs/benchmark.md", "RESULTS.md"))
    (good, again), (fault,) = re.findall(r"\| Good.*`good`.*", page), re.findall(r"\| broken \|.*", page)
    assert "| better | met | +" in good and "| better | not met: better | +" in again
    assert fault.endswith("| yes |") and (tmp_path / "results/figures/benchmark.png").exists()
    assert "broken" not in results and "| Later |  | missing: absent |" in results
    assert "1 of 2 predictions of the [benchmark](docs/benchmark.md) were met." in results
    assert re.search(r"\| Good again \(`good` against `base`\) \| equal \| not met: better \| \+", results)
