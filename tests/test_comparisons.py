"""Same or different: byte for byte where nothing may differ, else with intervals, and no winner inside the noise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas
import pytest
import recorded
from recorded import replaced
from scipy import stats

import report
from inputs.files import InputError
from lab import comparisons, records, run_folders, store

Group = list[records.Run]


@pytest.fixture(scope="module")
def make_group(tmp_path_factory) -> Callable[..., Group]:
    """Runs of a variant, one a seed, whose answers are right with chance ``after``."""

    def make(name: str, seeds: int, after: float, rank: int = 16, **settings: object) -> Group:
        out, change = tmp_path_factory.mktemp("out"), (f"lora.rank={rank}",)
        made = [
            recorded.make_run(out, f"{name}-seed{seed}", seed, after, overrides=change, **settings)
            for seed in range(seeds)
        ]
        return [run_folders.from_run(run, f"{name}-seed{seed}") for seed, run in enumerate(made)]

    return make


@pytest.fixture(scope="module")
def base(make_group) -> Group:
    return make_group("base", 5, 0.6)


# ---------------------------------------------------------------- byte for byte


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A run, and another with the same files."""
    first = recorded.make_run(tmp_path / "first", "x")
    return first, shutil.copytree(first, tmp_path / "second" / first.name)


def said(pair: tuple[Path, Path]) -> tuple[str, int] | None:
    return report.repeat(*(run_folders.from_run(run, "x") for run in pair))


def test_a_repeat_has_the_same_bytes_or_is_a_defect_of_which_the_first_number_is_named(pair, tmp_path: Path) -> None:
    text, code = said(pair)
    assert text.startswith("same: the metrics of all 4 steps") and code == 0
    replaced(pair[1] / "eval_outcomes.jsonl", '"gold": "7"', '"gold": "8"')
    text, code = said(pair)
    assert code == 1 and "the answers to questions are not" in text
    replaced(pair[1] / "metrics.jsonl", '"actor/entropy": 0.5', '"actor/entropy": 0.5000000000000001')
    text, code = said(pair)
    assert code == 1 and "should not be: first at step 2, actor/entropy: 0.5 and 0.5000000000000001" in text
    assert said((pair[0], recorded.make_run(tmp_path, "x", overrides=("optim.lr=2e-3",)))) is None


@pytest.mark.parametrize(
    ("file", "old", "new", "excuse"),
    [
        ("environment.json", "2.13.0+cpu", "2.14.0+cpu", "versions torch"),
        ("environment.json", "AMD EPYC", "Apple M9", "cpu AMD EPYC, Apple M9"),
        ("environment.json", '"OMP_NUM_THREADS": "1"', '"OMP_NUM_THREADS": "2"', "variables OMP_NUM_THREADS"),
        ("git.json", recorded.COMMIT, "f" * 40, "commits 0123456, fffffff"),
    ],
)
def test_what_may_change_the_last_bits_is_an_excuse(pair, file: str, old: str, new: str, excuse: str) -> None:
    replaced(pair[1] / file, old, new)
    replaced(pair[1] / "metrics.jsonl", '"actor/entropy": 0.5', '"actor/entropy": 0.6')
    text, code = said(pair)
    assert code == 0 and "which is allowed because of" in text and excuse in text


# ---------------------------------------------------------------- with intervals


def test_a_large_effect_over_five_seeds_is_found(base: Group, make_group) -> None:
    better = make_group("better", 5, 0.9, 8)
    (found,) = comparisons.compare({"base": base, "better": better})
    low, high = found.effect.interval()
    assert found.verdict == "different: better is better" and low > 0.15 and high < 0.45
    assert found.changed == ["lora.rank: 16 -> 8"] and found.seeds == [0, 1, 2, 3, 4] and found.questions == 200
    answers = [[records.scores(run, "sampled", 4) for run in side] for side in (base, better)]
    assert found.effect.mean == pytest.approx(np.mean(answers[1]) - np.mean(answers[0]))
    for seed, up, down, p in found.by_seed:
        a, b = (side[seed] for side in answers)
        assert (up, down) == (int((b > a).sum()), int((b < a).sum())) and 0 <= p < 0.01
    (back,) = comparisons.compare({"better": better, "base": base})
    assert back.verdict == "different: base is worse" and back.effect.mean == pytest.approx(-found.effect.mean)
    (few,) = comparisons.compare({"base": base[:2], "better": better[:3]})
    assert few.verdict == "not decided: 2 paired seeds of 3" and few.by_seed[0][3] < 1e-6
    assert "1 runs have no partner of the same seed and are left out" in few.notes


def test_noise_has_no_winner_and_says_what_could_have_been_seen(base: Group, make_group) -> None:
    (found,) = comparisons.compare({"base": base, "other": make_group("other", 5, 0.6, 8)})
    low, high = found.effect.interval()
    assert found.verdict == "not different: inside the noise" and low < 0 < high
    assert abs(found.effect.mean) < found.detectable < 0.5
    text = comparisons.sentences(found, "sampled")
    assert "not different" in text and "with 80 % power" in text and "exact McNemar" in text


def test_several_comparisons_are_corrected(base: Group, make_group) -> None:
    others = {f"v{rank}": make_group(f"v{rank}", 3, 0.65, rank) for rank in (1, 2, 3)}
    together = comparisons.compare({"base": base[:3]} | others)
    alone = [comparisons.compare({"base": base[:3], name: group})[0] for name, group in others.items()]
    assert min(one.p for one in together) == pytest.approx(3 * min(one.p for one in alone))
    assert all(t.p >= a.p and t.detectable > a.detectable for t, a in zip(together, alone, strict=True))


def test_other_questions_and_other_seeds_cannot_be_paired(base: Group, make_group) -> None:
    with pytest.raises(InputError, match="200 and 100"):
        comparisons.compare({"base": base, "less": make_group("less", 1, 0.5, questions=100)})
    with pytest.raises(InputError, match="no common seed"):
        comparisons.compare({"base": base[:2], "late": base[2:]})


def test_a_name_is_a_record_a_group_or_a_run_folder(tmp_path: Path) -> None:
    results = tmp_path / "results"
    for seed in range(2):
        store.add_run(run := recorded.make_run(tmp_path / "out", f"base-seed{seed}", seed), results)
    assert [one.record.seed for one in comparisons.find(results, "base")["base"]] == [0, 1]
    (found,), (stored,) = (comparisons.find(results, name)[name] for name in (str(run), "base-seed1"))
    assert found.record.files == stored.record.files and report.repeat(stored, found)[1] == 0
    with pytest.raises(InputError, match="records and groups: base, base-seed0, base-seed1$"):
        comparisons.find(results, "nothing")


def test_the_variants_of_a_sweep_are_compared_from_their_folders_also_of_changed_source(tmp_path: Path, capsys) -> None:
    """Three seeds each; the second variant is better; one job has not finished. The numbers are those of records."""
    out, results, jobs = tmp_path / "out", tmp_path / "results", {}
    for name, after, rank in (("plain", 0.4, 8), ("better", 0.8, 16)):
        for seed in (2, 0, 1):
            run = recorded.make_run(out, f"{name}-seed{seed}", seed, after, overrides=(f"lora.rank={rank}",))
            store.add_run(run, results)
            replaced(run / "git.json", '"dirty": false', '"dirty": true')
            recorded.seal(run)
            jobs[f"{name}-seed{seed}"] = {"state": "finished", "attempts": 1, "run": f"out/{run.name}", "result": ""}
    jobs["better-seed3"] = {"state": "failed", "attempts": 2, "run": "", "result": "error"}
    sweep = out / "sweep-x"
    sweep.mkdir()
    (sweep / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    with pytest.raises(InputError, match="git status clean"):
        store.add_run(out / "plain-seed0-20300102-030405", results.with_name("other"))
    for table in ("table.csv", "table.tex"):
        assert (
            report.main(["--results", str(tmp_path / "none"), "compare", str(sweep), "--output", str(tmp_path / table)])
            == 0
        )
    said = capsys.readouterr().out
    (wanted,) = comparisons.compare({name: comparisons.find(results, name)[name] for name in ("plain", "better")})
    assert f"better against plain: lora.rank: 8 -> 16\n  sampled accuracy {wanted.effect.points} points" in said
    (row,) = pandas.read_csv(tmp_path / "table.csv").to_dict("records")
    assert (row["variant"], row["base"], row["seeds"], row["questions"]) == ("better", "plain", 3, 200)
    low, high = wanted.effect.interval()
    numbers = [row[key] / 100 for key in ("difference", "low", "high", "minimum detectable effect")]
    assert numbers == pytest.approx([wanted.effect.mean, low, high, wanted.detectable], abs=1e-4)
    latex = (tmp_path / "table.tex").read_text()
    assert "\\toprule" in latex and "better & plain" in latex and f"{row['difference']:.2f}" in latex
    assert report.main(["compare", str(sweep), "--output", "table.txt"]) == 2
    assert "ends in .csv or .tex" in capsys.readouterr().err


def test_what_was_not_measured_cannot_be_compared(base: Group, make_group) -> None:
    other = make_group("other", 5, 0.6, 8)
    with pytest.raises(InputError, match="-seed0: no rollout/repeated_frac"):
        comparisons.compare({"base": base, "other": other}, "repeated")
    for group, power in ((base, 1), (other, 2)):
        for seed, run in enumerate(group):
            run.steps["rollout/repeated_frac"] = (seed / 10) ** power
    (found,) = comparisons.compare({"base": base, "other": other}, "repeated")
    assert found.effect.mean == pytest.approx((0 + 1 + 4 + 9 + 16) / 500 - (0 + 1 + 2 + 3 + 4) / 50)
    assert "mean repeated completions" in comparisons.sentences(found, "repeated")
    for run in base:
        del run.steps["rollout/repeated_frac"]  # other tests share this group


def test_training_rewards_are_compared_by_a_t_test_over_the_seeds(base: Group, make_group) -> None:
    other = make_group("other", 5, 0.6, 8)
    (found,) = comparisons.compare({"base": base, "other": other}, "reward", margin=0.5)
    means = [np.array([run.steps["reward/mean"].dropna().mean() for run in group]) for group in (base, other)]
    expected = stats.ttest_rel(means[1], means[0])
    assert found.effect.mean == pytest.approx(np.mean(means[1] - means[0]))
    assert found.effect.interval() == pytest.approx(tuple(expected.confidence_interval()))
    assert found.p == pytest.approx(expected.pvalue)
    text = comparisons.sentences(found, "reward")
    assert "mean training reward" in text and "McNemar" not in text
    # Equal: the interval lies within the announced margin.
    assert found.verdict == "equal within 50 points"
    (narrow,) = comparisons.compare({"base": base, "other": other}, "reward", margin=0.001)
    assert narrow.verdict.startswith("not different")
