"""Comparisons with intervals, the curves of a run, and sweeps."""

import contextlib
import fcntl
import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pandas
import psutil
import pytest
import recorded
import training
from matplotlib.image import imread
from scipy import stats
from tiers import nightly

import sweep
from facts.exits import InputError
from inputs.config import MAY_CHANGE, flatten, to_dict
from inputs.files import write_atomically
from lab import comparisons, curves, pages, records
from lab.comparisons import Effect, Entry, Family, Plan
from runlog.progress import SIGNALS

# ---------------------------------------------------------------------------------------------------------- comparisons

# Student (1908): hours of sleep gained by ten patients under the second drug over the first.
SLEEP = np.array([1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4])


# ---------------------------------------------------------------- known values


def test_holm_gives_the_textbook_values_in_the_order_given() -> None:
    assert comparisons.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert comparisons.holm([0.7, 0.9]) == [1.0, 1.0] and comparisons.holm([]) == []


def test_students_sleep_gives_students_interval() -> None:
    found = comparisons.effect(SLEEP / 100)
    assert found[:4] == pytest.approx((1.58, 0.7001142, 2.4598858, 0.002833), abs=1e-6) and found.seeds == 10
    assert str(found) == "+1.6 (+0.7 to +2.5)" and found.p == pytest.approx(stats.ttest_1samp(SLEEP, 0).pvalue)


def test_the_detectable_effect_is_cohens() -> None:
    """Cohen (1988), and every table since: d = 0.5 needs 34 pairs for a power of 0.8 at 0.05, two-sided, and not 33."""
    assert comparisons.detectable(33, 0.05) / np.sqrt(34) < 0.5 < comparisons.detectable(32, 0.05) / np.sqrt(33)
    pairs = np.array([1.0, -1.0] * 17) * np.sqrt(33 / 34)  # with a standard deviation of 1
    alone, of_four = (comparisons.effect(pairs / 100, tests).detectable for tests in (1, 4))
    assert alone == pytest.approx(comparisons.detectable(33, 0.05) / np.sqrt(34)) and of_four > alone


def test_one_seed_and_seeds_that_agree() -> None:
    assert np.isnan(comparisons.effect(np.array([0.1])).p)
    assert comparisons.effect(np.array([0.1, 0.1, 0.1]))[:4] == pytest.approx((10, 10, 10, 0))
    assert comparisons.effect(np.zeros(3)).p == 1


def test_the_share_of_a_loss_by_hand() -> None:
    """Four of ten points come back; a seed that only one of the two has is left out."""
    loss = pandas.Series([-0.08, -0.12, -0.1, -0.9], index=[0, 1, 2, 3])
    back = pandas.Series([0.03, 0.05, 0.04, 0.9], index=[0, 1, 2, 4])
    share, low, high = comparisons.share_recovered(loss, back)
    assert share == pytest.approx(40) and 37 < low < share < high < 43


# ---------------------------------------------------------------- outcomes and families


def runs(**outcomes: list[float]) -> pandas.DataFrame:
    """Steps of one run a seed: sampled accuracy 0.2 at the start, then twice the outcome."""
    return pandas.DataFrame(
        {
            "variant": name,
            "seed": seed,
            "step": step,
            "id": f"{name}-seed{seed}",
            "eval/num_questions": 100,
            "eval/sampled_accuracy": 0.2 if step == 0 else outcome + (step - 15) / 1000,
        }
        for name, values in outcomes.items()
        for seed, outcome in enumerate(values)
        for step in (0, 10, 20)
    )


def test_outcomes_by_hand() -> None:
    steps = runs(base=[0.5, 0.6])
    assert comparisons.scores(steps, "sampled")[0].loc["base"].tolist() == pytest.approx([0.505, 0.605])
    assert comparisons.scores(steps, "curve")[0].loc["base"].tolist() == pytest.approx([0.5, 0.6])
    assert comparisons.gain(steps, "base")[:2] == pytest.approx((0.2, 0.555))
    with pytest.raises(InputError, match="--kind greedy: no run has eval/greedy_accuracy"):
        comparisons.scores(steps, "greedy")


def a_plan(*entries: Entry, controls: tuple[Entry, ...] = (), **settings: object) -> Plan:
    family = Family(name="f", section="s", sweep="x", entries=[*entries], controls=[*controls], **settings)
    return Plan(findings=[], sections={"s": "text"}, curves={}, families=[family])


def entry(method: str, base: str = "base", **more: object) -> Entry:
    return Entry(method=method, base=base, title=method, **more)


BASE = [0.50, 0.52, 0.48, 0.51, 0.49]
BETTER, SAME = (
    [value + 0.1 + i / 1000 for i, value in enumerate(BASE)],
    [v + (-1) ** i / 1000 for i, v in enumerate(BASE)],
)


def test_a_family_is_corrected_as_a_whole_also_before_all_of_it_was_run() -> None:
    steps = runs(base=BASE, better=BETTER, same=SAME)
    alone = comparisons.compare(steps, a_plan(entry("better")))[0]
    plan = a_plan(entry("better"), entry("same"), entry("not_run"), margin=1)
    better, same = comparisons.compare(steps, plan)
    assert better.p == pytest.approx(3 * alone.effect.p) and better.effect.detectable > alone.effect.detectable
    assert (better.found, same.found) == ("larger", "equal") and alone.p == alone.effect.p
    apart = comparisons.compare(steps, a_plan(entry("better"), entry("same"), apart=True))
    assert [one.p for one in apart] == [one.effect.p for one in apart]


@pytest.mark.parametrize(
    ("low", "high", "p", "seeds", "said"),
    [
        (-0.9, 0.9, 0.9, 5, "equal"),
        (0.1, 0.9, 0.01, 5, "equal"),  # a difference within the margin
        (-0.5, 1.5, 0.3, 5, "undecided"),
        (0.5, 1.5, 0.06, 5, "undecided"),
        (0.5, 1.5, 0.04, 5, "larger"),
        (-1.5, -0.5, 0.04, 5, "smaller"),
        (0.5, 1.5, 0.001, 2, "undecided"),  # fewer than three seeds
    ],
)
def test_what_was_found_by_the_announced_rule(low, high, p, seeds, said) -> None:
    assert comparisons.verdict(Effect((low + high) / 2, low, high, p, seeds, 1.0), p, 1.0) == said


def test_a_prediction_is_judged_and_without_its_control_nothing_is_said() -> None:
    steps = runs(base=BASE, better=BETTER, same=SAME, control=[v - 0.2 - i / 1000 for i, v in enumerate(BASE)])
    entries = (entry("better", predicted="larger"), entry("same", predicted="larger"))

    def outcomes(predicted: str, **more: object) -> list[str]:
        control = entry("control", predicted=predicted)
        plan = a_plan(*entries, controls=(control,), control=["control"], margin=1, **more)
        return [one.outcome for one in comparisons.compare(steps, plan)]

    assert outcomes("smaller") == ["met", "not met: equal within 1", "met"]
    assert outcomes("equal") == ["withheld: a control is not as predicted"] * 2 + ["not met: smaller"]


@pytest.mark.parametrize("predicted", ["larger", ""])
@pytest.mark.parametrize(("found", "is_good"), [("smaller", True), ("equal", False)])
def test_a_section_has_no_withheld_comparison(predicted: str, found: str, is_good: bool) -> None:
    """The control is smaller. With or without a prediction, the row goes to the table of withheld comparisons."""
    steps = runs(base=BASE, better=BETTER, control=[v - 0.2 - i / 1000 for i, v in enumerate(BASE)])
    plan = a_plan(
        entry("better", predicted=predicted), controls=(entry("control", predicted=found),), control=["control"]
    )
    page = pages.results_page(plan, comparisons.compare(steps, plan), steps)
    section, last = page.split("## Not as predicted, withheld, or stopped")
    assert ("| better |" in section, "| better (" in last) == (is_good, not is_good)


def test_only_stated_losses_of_a_mismatch_can_come_back() -> None:
    steps = runs(base=BASE, worse=[v - 0.1 - i / 1000 for i, v in enumerate(BASE)], back=SAME)
    entries = (entry("worse"), entry("back", base="worse"))
    worse, back = comparisons.compare(steps, a_plan(*entries, mismatch=True))
    assert worse.share is None and back.share == comparisons.share_recovered(worse.differences, back.differences)
    assert not [one for one in comparisons.compare(steps, a_plan(*entries)) if one.share]


def test_runs_without_a_partner_or_with_other_evaluations_are_not_compared() -> None:
    steps = runs(base=BASE, other=BETTER)
    late = steps[(steps["variant"] == "base") | (steps["step"] < 20)]
    for wrong, kind in (
        (late, "curve"),
        (late, "sampled"),
        (steps.assign(**{"eval/num_questions": steps.index}), "curve"),
    ):
        with pytest.raises(InputError, match="base, other: seed 0: was evaluated differently"):
            comparisons.compare(wrong, a_plan(entry("other"), kind=kind))
    with pytest.raises(InputError, match="there is no common seed"):
        comparisons.compare(steps[(steps["variant"] == "base") == (steps["seed"] < 2)], a_plan(entry("other")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("families: [{name: f}]", "families.0.section: Field required"),
        ("families: [{name: f, section: s, sweep: x, entries: [], control: [c]}]", "control: c is not a method"),
        ("families: [{name: f, section: t, sweep: x, entries: []}]", "section: there is no 't'"),
        ("families: []\nlearned: [x]", "learned: Extra inputs are not permitted"),
    ],
)
def test_a_plan_with_a_fault_is_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plan.yaml").write_text(f"findings: []\nsections: {{s: t}}\ncurves: {{}}\n{text}")
    with pytest.raises(InputError) as refusal:
        comparisons.read_plan(tmp_path / "plan.yaml")
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_family_that_no_run_can_fill_is_refused() -> None:
    """stale_0 is a variant of the sweep, and base has records. If the method has records, the sweep is not read."""
    there, absent = "configs/sweeps/stale.yaml", "configs/sweeps/none.yaml"
    neither = f"is no variant of {there} and no record; name one of its variants"
    for method, base, file, said in (
        ("stale_1", "stale_0", there, ""),
        ("stale_1", "base", there, ""),
        ("stale_1", "stale_00", there, f"plan.yaml: f: base: stale_00 {neither}"),
        ("stale_01", "base", there, f"plan.yaml: f: method: stale_01 {neither}"),
        ("stale_1", "stale_0", absent, f"{absent}: cannot be read"),
        ("base", "stale_00", absent, ""),
        ("stale_1", "stale_00", f"{absent} of 0123456", ""),
    ):
        entries = [Entry(method=method, base=base, title="t")]
        family = Family(name="f", section="s", sweep=file, entries=entries)
        plan = Plan(findings=[], sections={"s": "t"}, curves={}, families=[family])
        with pytest.raises(InputError, match=said) if said else contextlib.nullcontext():
            comparisons.refuse_unfillable(plan, Path("plan.yaml"), {"base"})


# --------------------------------------------------------------------------------------------------------------- curves


def panel(key: str, curve: curves.Curve) -> matplotlib.figure.Axes:
    axes = matplotlib.figure.Figure().subplots()
    curves.draw_panel(axes, key, curve)
    return axes


def test_the_curves_of_a_run_are_not_blank(tmp_path: Path) -> None:
    """Every panel has a curve."""
    run = recorded.make_run(tmp_path, "base-seed0", questions=20)
    curves.draw_curves(run)
    picture = imread(run / "curves.png")[..., :3]
    for rows in np.array_split(picture, 3):
        for window in np.array_split(rows, 3, axis=1):
            assert (window[..., 2] - window[..., 0] > 0.3).sum() > 5, "blue"


def test_curves_count_steps_as_the_console_does(tmp_path: Path) -> None:
    """The reward of the first of four steps stands at 1; the evaluation before it at 0, the last one at 4."""
    read = curves.read_curves(recorded.make_run(tmp_path, "base-seed0", questions=20))
    assert [*read][:3] == ["eval/greedy_accuracy", "eval/sampled_accuracy", "reward/mean"]
    assert [*read["reward/mean"]] == [1, 2, 3, 4] and [*read["eval/sampled_accuracy"]] == [0, 4]
    assert "actor/loss" not in read


def test_curves_show_the_parts_of_a_reward_and_truncation(tmp_path: Path) -> None:
    rows = [{"step": step, "reward/part/form": step / 8, "response_length/truncated_frac": 0.5} for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert curves.read_curves(tmp_path) == {
        "reward/part/form": {1: 0.125, 2: 0.25},
        "response_length/truncated_frac": {1: 0.5, 2: 0.5},
    }


@pytest.mark.parametrize("values", [[1, math.nan, 3, 4], [math.nan, 2, math.nan]])
def test_a_curve_has_gaps_where_nothing_was_measured(values: list[float]) -> None:
    *marks, line, smooth = panel("reward/mean", dict(enumerate(values, 1))).lines
    assert len(marks) == sum(map(math.isnan, values)) and line.get_marker() == "o"
    assert [*map(math.isnan, line.get_ydata())] == [*map(math.isnan, smooth.get_ydata())] == [*map(math.isnan, values)]
    skipped = panel("actor/kl_loss", {1: 1.0, 3: 2.0})  # a step that trained nothing has no such value
    assert math.isnan(skipped.lines[0].get_ydata()[1])


def test_evaluations_are_points_and_a_logarithmic_panel_has_whole_decades() -> None:
    (dots,) = panel("eval/greedy_accuracy", {0: 0.25, 40: 0.5}).lines
    assert dots.get_linestyle() == "None" and [*dots.get_ydata()] == [0.25, 0.5]
    axes = panel("rollout/logp_gap_mean", {1: 2e-8, 2: 3e-8, 3: 0.0})
    assert axes.get_yscale() == "log" and axes.get_ylim() == pytest.approx((1e-8, 1e-7))
    assert panel("rollout/logp_gap_mean", {1: 0.0, 2: 0.0}).get_yscale() == "linear"


# -------------------------------------------------------------------------------------------------------------- sweeps


CONFIG = f"""
name: unnamed
device: cpu
model: {{path: none, dtype: fp32}}
tiny_model: {json.dumps({"architecture": "qwen3_moe", **training.SIZES})}
data: {{source: arithmetic, max_prompt_tokens: 96, num_train: 40, num_test: 9, operand_high: 20}}
rollout: {{prompts_per_step: 4, group_size: 2, max_new_tokens: 8}}
lora: {{rank: 4, alpha: 8.0}}
optim: {{lr: 1e-2, warmup_steps: 1, prompts_per_update: 4, tokens_per_micro_batch: 1024}}
eval: {{samples: 1, batch_size: 9}}
train: {{steps: 3, checkpoint_every: 1}}
"""
CONTROL = {"fault": "reversed_clip", "overrides": ["optim.prompts_per_update=2"]}


@pytest.fixture
def write_sweep(tmp_path: Path):
    """A sweep of random tiny models in tmp_path; its jobs take seconds."""

    def write(seeds: list[int], resources: str = "{CPU: 1}", **variants: dict) -> Path:
        (tmp_path / "tiny.yaml").write_text(CONFIG)
        folder = f"[train.out_dir={tmp_path / 'out'}, 'model.path={tmp_path / 'model'}{{seed}}', tiny_model.seed=0]"
        text = f"config: {tmp_path / 'tiny.yaml'}\nprocesses: 1\nseeds: {seeds}\nresources: {resources}\n"
        text += f"each_seed: ['train.seed={{seed}}', *]\nvariants: {json.dumps(variants)}\n".replace("*", folder[1:-1])
        path = tmp_path / "trial.yaml"
        path.write_text(text)
        return path

    return write


# ---------------------------------------------------------------- what a sweep is


def test_every_variant_meets_every_seed_and_seeds_come_first(write_sweep) -> None:
    variants = {name: {"overrides": [f"lora.rank={4 + place}"]} for place, name in enumerate("ab")}
    _, jobs = sweep.read_sweep(write_sweep([2, 1], **variants), ["train.steps=2"])
    assert [job.name for job in jobs] == ["a-seed2", "b-seed2", "a-seed1", "b-seed1"]
    cfg = jobs[-1].cfg
    assert (cfg.train.seed, cfg.lora.rank, cfg.train.steps, cfg.model.path[-6:]) == (1, 5, 2, "model1")


def test_only_jobs_that_need_nothing_but_cpus_run_side_by_side() -> None:
    for resources, cores, jobs in (({"CPU": 2}, 5, 2), ({"CPU": 4}, 2, 1), ({"CPU": 1, "NPU": 16}, 64, 1)):
        assert sweep.jobs_at_once(resources, cores) == jobs


def test_a_control_runs_the_script_that_plants_its_fault(write_sweep) -> None:
    _, (base, broken) = sweep.read_sweep(write_sweep([3], base={}, broken=CONTROL), [])
    assert base.arguments[0] == "train_grpo.py" and base.arguments[2] == "name=base-seed3"
    assert broken.arguments[:2] == ["checks/planted_fault.py", "reversed_clip"]


def test_a_sweep_that_cannot_run_is_refused_before_anything_starts(write_sweep, tmp_path: Path, capsys) -> None:
    for old, new, said in (
        ("lora.rank=8", "lora.rnak=8", "b-seed0: override lora.rnak: unknown key"),
        ("lora.rank=8", "name=a-seed0", "b-seed0: override name: found a-seed0; remove it"),
        ("reversed_clip", "reversed_clap", "c-seed0: fault: found 'reversed_clap'; needed: one of inverted"),
        ("per_update=2", "per_update=4", "c-seed0: fault: reversed_clip changes nothing, because "),
        ("train.seed={seed}", "data.seed={seed}", "a-seed1: train.seed: must be 1, not 0; add train.seed="),
        ("seeds: [0, 1]", "seeds: [0, 1, 0]", "seeds: found [0, 1, 0]; give each seed only once"),
        ("{seed}", "7", "a-seed0: train.seed: must be 0, not 7"),
        ("processes: 1", "processes: 100000000000", "processes: Input should be less than or equal to 65536"),
        ("{CPU: 1}", "{CPU: -1}", "resources.CPU: Input should be greater than or equal to 0"),
    ):
        path = write_sweep([0, 1], a={}, b={"overrides": ["lora.rank=8"]}, c=CONTROL)
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
        assert sweep.main([str(path), "--local"]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_folder_that_cannot_be_read_is_no_run_of_the_sweep(write_sweep, tmp_path: Path) -> None:
    path, folder = write_sweep([0], base={}), tmp_path / "out" / "base-seed0-20300101-000000"
    folder.mkdir(parents=True)
    for content in (b"", b"[]", b"[" * 99999, b'"\xff"'):
        (folder / "config.yaml").write_bytes(content)
        assert sweep.main([str(path), "--list"]) == 0


def what_it_computes(job: sweep.Job) -> str:
    return repr({key: value for key, value in flatten(to_dict(job.cfg)).items() if key not in MAY_CHANGE})


@pytest.mark.nightly
def test_the_sweeps_of_the_repository_load_and_their_jobs_have_names_of_their_own() -> None:
    """A baseline that several sweeps share is run once; so its name must mean the same everywhere."""
    seen: dict[str, str] = {}
    for path in recorded.ROOT.glob("configs/sweeps/*.yaml"):
        read, jobs = sweep.read_sweep(path, [])
        computes = {job.name: what_it_computes(job) for job in jobs}
        assert all(seen.setdefault(name, found) == found for name, found in computes.items()), path
        kinds = {(computes[job.name], sweep.planted_fault(" ".join(job.arguments))) for job in jobs}
        assert len(kinds) == len(jobs) == len(read.seeds) * len(read.variants), f"{path}: two jobs are the same"
        assert len(read.seeds) >= 3, f"{path}: fewer seeds decide nothing"


# ---------------------------------------------------------------- which trainings are started


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Trainings that end at once with the next of the exit codes that are given for the job, 0 by default."""

    def run(path: Path, codes: dict[str, list[int]], output: str = "") -> tuple[list[str], int]:
        """The jobs that a sweep started, in order, and its exit code."""
        started = []

        def start_training(job: sweep.Job, log: Path, lock: int) -> SimpleNamespace:
            started.append(job.name)
            with open(log, "a") as file:
                file.write(output)
            code = codes.get(job.name, [0]).pop(0)
            if code == 0:
                folder = tmp_path / "out" / f"{job.name}-20300102-{len(started):06d}"
                folder.mkdir(parents=True)
                (folder / "config.yaml").write_text(recorded.by_an_older_version(job.cfg))
                (folder / "command.txt").write_text("torchrun train_grpo.py")
                write_atomically(folder / "finished.json", '{"result": "done"}')
            return SimpleNamespace(poll=lambda: code, wait=lambda: code, terminate=lambda: None)

        monkeypatch.setattr(sweep, "start_training", start_training)
        code = sweep.main([str(path), "--local"])
        return started, code

    return run


def jobs_of(tmp_path: Path) -> dict[str, dict]:
    return json.loads((tmp_path / "out" / "sweep-trial" / "sweep.json").read_text())["jobs"]


def test_a_failed_job_is_tried_again_reported_and_does_not_stop_the_others(write_sweep, scripted, tmp_path) -> None:
    """What is finished is not repeated, a tripwire is not tried again, and an earlier one in the same log is past."""
    path = write_sweep([0, 1], "{CPU: 10000}", a={}, b={"overrides": ["lora.rank=8"]})
    started, code = scripted(path, {"a-seed0": [1, 0], "b-seed0": [1, 1]}, "RuntimeError: lost\n")
    assert code == 1 and started == ["a-seed0", "a-seed0", "b-seed0", "b-seed0", "a-seed1", "b-seed1"]
    jobs = jobs_of(tmp_path)
    assert [name for name, job in jobs.items() if job["state"] == "finished"] == ["a-seed0", "a-seed1", "b-seed1"]
    assert jobs["a-seed0"]["result"] == "done" and Path(jobs["a-seed0"]["run"]).name == "a-seed0-20300102-000002"
    assert scripted(path, {"b-seed0": [3, 0]}, "stopped: checks.entropy: gone\nW1120 torch\n")[0] == ["b-seed0"]
    assert scripted(path, {"b-seed0": [1, 0]}, "RuntimeError: lost\n") == (["b-seed0", "b-seed0"], 0)
    assert scripted(path, {}) == ([], 0)
    other = write_sweep([0], a={"overrides": ["lora.rank=8"]})
    assert scripted(other, {})[0] == ["a-seed0"]  # a run of another configuration does not count


def test_the_error_of_a_failed_job_is_reported() -> None:
    for output, said in (
        (b"error: x: no such file\nrank 0 ended first, with exit code 2", "error: x: no such file"),
        (b"ValueError: bad\nrank 1 ended first, with exit code 1", "ValueError: bad"),
        (b"stopped: checks.entropy: gone\nW1120 torch", "stopped: checks.entropy: gone"),
        (b"a\nkilled", "killed"),
        (b"", "no output"),
    ):
        assert sweep.last_error(output) == said


def test_a_job_that_another_process_runs_is_left_alone(write_sweep, scripted, tmp_path: Path, capsys) -> None:
    (tmp_path / "out" / "sweep-trial").mkdir(parents=True)
    with open(tmp_path / "out" / "sweep-trial" / "a-seed0.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert scripted(write_sweep([0], a={}, b={"overrides": ["lora.rank=8"]}), {}) == (["b-seed0"], 1)
    assert "a-seed0: failed: another process is training it" in capsys.readouterr().err


def test_without_ray_or_its_resources_one_line_says_what_is_needed(write_sweep, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    path = str(write_sweep([0], resources="{CPU: 1, NPU: 16}", a={}))
    assert sweep.main([path]) == 2
    error = capsys.readouterr().err
    assert f"pip install {sweep.RAY}" in error and "--local" in error
    assert sweep.RAY in (sweep.ROOT / "requirements" / "test.txt").read_text(), "the version that the tests run"
    there = SimpleNamespace(init=lambda **options: None, cluster_resources=lambda: {"CPU": 2.0})
    monkeypatch.setitem(sys.modules, "ray", there)
    assert sweep.main([path]) == 2
    assert "resources.NPU: a job needs 16, but Ray reports only 0 in all" in capsys.readouterr().err


@pytest.mark.parametrize("first", [signal.SIGTERM, nightly(signal.SIGINT), signal.SIGHUP, nightly(signal.SIGUSR1)])
def test_an_interrupted_sweep_ends_its_jobs_and_no_other_process(
    first, write_sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Ctrl-C, or another signal, while a job runs; and once more while the sweep waits for its end."""
    foreign, started = subprocess.Popen(["sleep", "600"]), []

    def start_training(*_: object) -> subprocess.Popen:
        slow = "trap 'sleep 0.5; exit 1' TERM; sleep 600 & wait"  # as torchrun, which ends its ranks first
        started.append(subprocess.Popen(["bash", "-c", slow], start_new_session=True))
        for seconds, number in ((0.5, first), (0.7, signal.SIGINT)):
            threading.Timer(seconds, os.kill, (os.getpid(), number)).start()
        return started[-1]

    monkeypatch.setattr(sweep, "start_training", start_training)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)  # what was ignored at the start of pytest would stay ignored
    try:
        path = write_sweep([0, 1], "{CPU: 10000}", a={})
        assert sweep.main([str(path), "--local"]) == 128 + first
        assert len(started) == 1 and started[0].returncode == 1 and foreign.poll() is None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for process in (foreign, *started):
            process.kill()
            process.wait()
    assert "the same command continues the sweep" in capsys.readouterr().err
    assert jobs_of(tmp_path)["a-seed0"]["state"] == "not finished"


def test_a_job_gets_the_environment_of_the_run_script_of_its_device(tmp_path: Path, monkeypatch) -> None:
    """On a CPU, that of run_cpu.sh; on an NPU, CANN's packages stay and launch/npu_env.sh is read."""
    stub = tmp_path / "python"
    stub.write_text("#!/bin/sh\nenv\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    for name, value in {"PYTHONPATH": "/cann/python", "ASCEND_HOME_PATH": "/cann", "HCCL_BUFFSIZE": "77"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for device, needed, absent in (
        ("cpu", {"OMP_NUM_THREADS=1"}, "PYTHONPATH"),
        (
            "npu",
            {"PYTHONPATH=/cann/python", "OMP_NUM_THREADS=4", "HCCL_CONNECT_TIMEOUT=1800", "HCCL_BUFFSIZE=77"},
            "NCCL_",
        ),
        ("cuda", {"TORCH_NCCL_ASYNC_ERROR_HANDLING=1"}, "HCCL_CONNECT_TIMEOUT"),
    ):
        job, log = sweep.Job(device, SimpleNamespace(device=device), ["train_grpo.py"], 1), tmp_path / f"{device}.log"
        with open(tmp_path / "lock", "ab") as lock:
            assert sweep.start_training(job, log, lock.fileno()).wait(300) == 0
        lines = log.read_text().splitlines()
        assert needed | {"HF_HUB_OFFLINE=1"} <= {*lines}, device
        assert not [line for line in lines if line.startswith(absent)], device


# ---------------------------------------------------------------- real trainings


RAY_IS_THERE = importlib.util.find_spec("ray") is not None
ON_RAY = pytest.param([], id="ray", marks=pytest.mark.skipif(not RAY_IS_THERE, reason=f"pip install {sweep.RAY}"))


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(["--local"], id="local", marks=pytest.mark.nightly), ON_RAY])
def test_a_killed_sweep_goes_on(how: list[str], write_sweep, tmp_path: Path) -> None:
    """The sweep, Ray, torchrun and the training are killed after a checkpoint; then the same command is given again."""
    command = [sys.executable, "sweep.py", write_sweep([0], a={"overrides": ["train.steps=15"]}), *how]
    with open(tmp_path / "log", "w") as log:
        sweeping = psutil.Popen(command, cwd=recorded.ROOT, stdout=log, stderr=log)
        while not [*tmp_path.glob("out/a-seed0-*/checkpoints/step-*")]:
            assert sweeping.poll() is None, log.name
            time.sleep(0.1)
        for process in [*sweeping.children(recursive=True), sweeping]:
            process.kill()
        sweeping.wait()
        (run,) = tmp_path.glob("out/a-seed0-*")
        assert not (run / "finished.json").exists()
        subprocess.run(command, cwd=recorded.ROOT, check=True, timeout=1200, stdout=log, stderr=log)
    assert [*tmp_path.glob("out/a-seed0-*")] == [run] and (run / "resume-1").is_dir()
    assert jobs_of(tmp_path)["a-seed0"]["state"] == "finished"
    assert sorted(path.name for path in (tmp_path / "out" / "sweep-trial").iterdir()) == [
        "a-seed0.lock",
        "a-seed0.log",
        "sweep.json",
    ]
    for start in (run, run / "resume-1"):  # a record needs what the run left, whether or not this checkout is clean
        (start / "git.json").write_text(json.dumps({"commit": recorded.COMMIT, "dirty": False}))
        (start / "git.patch").write_text("")
    recorded.seal(run)
    record = records.read_run(run).record
    assert (record.config["train"]["steps"], record.resumed) == (15, 1)
