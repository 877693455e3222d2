"""Same or different: byte for byte where nothing may differ, else with intervals, and no winner inside the noise."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import recorded
from scipy import stats

from input_files import InputError
from lab import comparisons, records, store

MakeGroup = Callable[..., list[records.Run]]


@pytest.fixture
def make_group(tmp_path: Path) -> MakeGroup:
    """Records of a variant: one run a seed, answers right with chance ``after``."""

    def make(name: str, seeds: int, after: float, **settings: object) -> list[records.Run]:
        for seed in range(seeds):
            run = recorded.make_run(tmp_path / "out", f"{name}-seed{seed}", seed=seed, after=after, **settings)
            store.add_run(run, tmp_path / "results")
        return comparisons.find(tmp_path / "results", name)

    return make


# ---------------------------------------------------------------- byte for byte


def pair(tmp_path: Path, change: Callable[[Path], None], **settings: object) -> tuple[str, int] | None:
    """What a run and a repeat of it say, the repeat changed."""
    sides = []
    for name in ("first", "second"):
        run = recorded.make_run(tmp_path / name, "x", luck=1, **(settings if name == "second" else {}))
        if name == "second":
            change(run)
            recorded.seal(run)
        sides.append(records.from_run(run, name))
    return comparisons.repeat(*sides)


def rewritten(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / name).read_text()
        assert old in text
        (run / name).write_text(text.replace(old, new))

    return change


def test_a_repeat_with_the_same_bytes_is_the_same(tmp_path: Path) -> None:
    text, code = pair(tmp_path, lambda _: None)
    assert text.startswith("same: the metrics of all 4 steps") and code == 0


def test_a_cpu_repeat_with_other_bytes_is_a_defect_and_the_first_number_is_named(tmp_path: Path) -> None:
    text, code = pair(
        tmp_path, rewritten("metrics.jsonl", '"actor/entropy": 0.5', '"actor/entropy": 0.5000000000000001')
    )
    assert code == 1 and "should not be: first at step 2, actor/entropy: 0.5 and 0.5000000000000001" in text


def test_answers_may_not_differ_where_metrics_do_not(tmp_path: Path) -> None:
    text, code = pair(tmp_path, rewritten("eval_outcomes.jsonl", '"gold": "7"', '"gold": "8"'))
    assert code == 1 and "the answers to questions are not" in text


@pytest.mark.parametrize(
    ("file", "old", "new", "excuse"),
    [
        ("environment.json", "2.13.0+cpu", "2.14.0+cpu", "versions torch"),
        ("environment.json", "AMD EPYC", "Apple M9", "cpu AMD EPYC, Apple M9"),
        ("environment.json", '"OMP_NUM_THREADS": "1"', '"OMP_NUM_THREADS": "2"', "variables OMP_NUM_THREADS"),
        ("git.json", recorded.COMMIT, "f" * 40, "commits 0123456, fffffff"),
    ],
)
def test_what_may_change_the_last_bits_is_an_excuse(tmp_path: Path, file: str, old: str, new: str, excuse: str) -> None:
    def change(run: Path) -> None:
        rewritten(file, old, new)(run)
        rewritten("metrics.jsonl", '"actor/entropy": 0.5', '"actor/entropy": 0.6')(run)

    text, code = pair(tmp_path, change)
    assert code == 0 and "which is allowed because of" in text and excuse in text


def test_another_configuration_is_not_a_repeat(tmp_path: Path) -> None:
    assert pair(tmp_path, lambda _: None, overrides=("optim.lr=2e-3",)) is None


# ---------------------------------------------------------------- with intervals


def test_a_large_effect_over_five_seeds_is_found(make_group: MakeGroup) -> None:
    base = make_group("base", 5, 0.5)
    better = make_group("better", 5, 0.8, overrides=("optim.lr=2e-3",))
    (found,) = comparisons.compare({"base": base, "better": better})
    low, high = found.effect.interval()
    assert found.verdict == "different: better is better" and low > 0.15 and high < 0.45
    assert found.changed == ["optim.lr: 0.001 -> 0.002"] and found.seeds == [0, 1, 2, 3, 4] and found.questions == 200
    answers = [[records.scores(run, "sampled", 4) for run in side] for side in (base, better)]
    means = [np.mean(side) for side in answers]
    assert found.effect.mean == pytest.approx(means[1] - means[0])
    for seed, up, down, p in found.by_seed:
        a, b = (side[seed] for side in answers)
        assert (up, down) == (int((b > a).sum()), int((b < a).sum())) and 0 <= p < 0.01
    (back,) = comparisons.compare({"better": better, "base": base})
    assert back.verdict == "different: base is worse" and back.effect.mean == pytest.approx(-found.effect.mean)


def test_fewer_than_three_seeds_decide_nothing_however_large_the_effect(make_group: MakeGroup) -> None:
    groups = {"base": make_group("base", 2, 0.1), "better": make_group("better", 3, 0.9, overrides=("lora.rank=8",))}
    (found,) = comparisons.compare(groups)
    assert found.verdict == "not decided: 2 paired seeds of 3" and found.by_seed[0][3] < 1e-10
    assert "1 runs have no partner of the same seed and are left out" in found.notes


def test_noise_has_no_winner_and_says_what_could_have_been_seen(make_group: MakeGroup) -> None:
    groups = {"base": make_group("base", 3, 0.6), "other": make_group("other", 3, 0.6, overrides=("lora.rank=8",))}
    (found,) = comparisons.compare(groups)
    low, high = found.effect.interval()
    assert found.verdict == "not different: inside the noise" and low < 0 < high
    assert abs(found.effect.mean) < found.detectable < 0.5
    text = comparisons.sentences(found, "sampled")
    assert "not different" in text and "with 80 % power" in text and "lora.rank: 16 -> 8" in text


def test_several_comparisons_are_corrected(make_group: MakeGroup) -> None:
    groups = {"base": make_group("base", 3, 0.6)}
    for number in range(3):
        groups[f"v{number}"] = make_group(f"v{number}", 3, 0.65, overrides=(f"lora.rank={number + 1}",))
    together = comparisons.compare(groups)
    alone = [comparisons.compare({"base": groups["base"], name: groups[name]})[0] for name in ("v0", "v1", "v2")]
    assert min(one.p for one in together) == pytest.approx(3 * min(one.p for one in alone))
    assert all(t.p >= a.p and t.detectable > a.detectable for t, a in zip(together, alone, strict=True))


def test_other_questions_and_other_seeds_cannot_be_paired(make_group: MakeGroup, tmp_path: Path) -> None:
    base = make_group("base", 1, 0.5)
    with pytest.raises(InputError, match="200 and 100"):
        comparisons.compare({"base": base, "less": make_group("less", 1, 0.5, questions=100)})
    store.add_run(recorded.make_run(tmp_path / "out", "late-seed9", seed=9), tmp_path / "results")
    with pytest.raises(InputError, match="no common seed"):
        comparisons.compare({"base": base, "late": comparisons.find(tmp_path / "results", "late")})


def test_a_name_is_a_record_a_group_or_a_run_folder(make_group: MakeGroup, tmp_path: Path) -> None:
    group = make_group("base", 2, 0.5)
    results = tmp_path / "results"
    assert [one.record.id for one in comparisons.find(results, "base-seed1")] == ["base-seed1"]
    run = tmp_path / "out" / "base-seed0-20300102-030405"
    (found,) = comparisons.find(results, str(run))
    assert found.record.files == group[0].record.files and comparisons.repeat(group[0], found)[1] == 0
    with pytest.raises(InputError, match="there are: base, base-seed0, base-seed1"):
        comparisons.find(results, "nothing")


def test_several_answers_a_question_count_as_their_mean(tmp_path: Path) -> None:
    run = recorded.make_run(tmp_path, "x", questions=2)
    for name, old, new in (
        ("eval.jsonl", '"eval/samples": 1', '"eval/samples": 4'),
        ("eval.jsonl", r'"eval/sampled_accuracy": [\d.]+', '"eval/sampled_accuracy": 0.5'),
        ("eval_outcomes.jsonl", r'"sampled": \[.*\]', '"sampled": [1.0, 0.0, 0.0, 1.0]'),
    ):
        (run / name).write_text(re.sub(old, new, (run / name).read_text()))
    recorded.seal(run)
    assert records.scores(records.from_run(run, "x"), "sampled").tolist() == [0.5, 0.5]


# ---------------------------------------------------------------- the learning curve as one number


def test_training_rewards_are_compared_by_a_t_test_over_the_seeds(make_group: MakeGroup) -> None:
    groups = {"base": make_group("base", 5, 0.6), "other": make_group("other", 5, 0.7, overrides=("lora.rank=8",))}
    (found,) = comparisons.compare(groups, "reward", margin=0.2)
    means = [np.array([run.steps["reward/mean"].dropna().mean() for run in group]) for group in groups.values()]
    expected = stats.ttest_rel(means[1], means[0])
    assert found.effect.mean == pytest.approx(np.mean(means[1] - means[0]))
    assert found.effect.interval() == pytest.approx(tuple(expected.confidence_interval()))
    assert found.p == pytest.approx(expected.pvalue)
    text = comparisons.sentences(found, "reward")
    assert "mean training reward" in text and "McNemar" not in text


@pytest.mark.parametrize(("margin", "verdict"), [(0.5, "equal within 50 points"), (0.001, "not different")])
def test_equal_means_that_the_interval_lies_within_the_announced_margin(
    margin: float, verdict: str, make_group: MakeGroup
) -> None:
    groups = {"base": make_group("base", 4, 0.6), "other": make_group("other", 4, 0.6, overrides=("lora.rank=8",))}
    (found,) = comparisons.compare(groups, "reward", margin=margin)
    assert found.verdict.startswith(verdict)
