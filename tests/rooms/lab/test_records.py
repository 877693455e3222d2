"""Records of runs, the pages about them, and the completions of a run."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib.figure
import pandas
import pytest
import recorded
from recorded import commit, git, replaced
from source import FILES, ROOT

import report
import sweep
from facts.exits import InputError
from inputs.config import load_config, to_yaml
from lab import comparisons, pages, records
from runlog.run_record import read_lines

# -------------------------------------------------------------------------------------------------------------- records


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return recorded.make_run(tmp_path_factory.mktemp("out"), "base-seed3", seed=3)


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "out" / made.name)


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return tmp_path / "results"


# ---------------------------------------------------------------- what is kept


def test_a_record_holds_every_number_of_the_run_but_those_of_its_machine(run: Path, results: Path) -> None:
    assert report.main(["--results", str(results), "add", str(run)]) == 0
    steps = records.load(results).set_index("step")
    for file, before in (("metrics", 1), ("timing", 1), ("eval", 0)):
        for line in read_lines(run / f"{file}.jsonl"):
            row = steps.loc[line.pop("step") - before]
            for key, value in line.items():
                assert (key in row) == (key != "timing/generate_s") and (key not in row or row[key] == value)
    assert [steps.loc[step, "completions"] is not None for step in range(4)] == [True, False, False, True]
    kept = json.loads(steps.loc[3, "completions"])
    assert [answer["completion"] for answer in kept] == ["</pre>#### 3", "no"]
    assert set(steps["variant"]) == {"base"} and set(steps["seed"]) == {3}
    plain = pandas.read_parquet(results / "base-seed3.parquet")  # as results/README.md says
    assert plain["record/commit"].notna().sum() == 1 and json.loads(plain["record/config"][0])["train"]["seed"] == 3
    (record,) = records.records_of(records.load(results)).values()
    assert (
        record == records.read_run(run).record
        and record.files == json.loads((run / "finished.json").read_text())["sha256"]
    )


def test_of_a_run_that_was_resumed_for_more_steps_the_last_configuration_counts(run: Path) -> None:
    started = load_config(run / "config.yaml", [f"train.out_dir={run.parent}", "train.steps=6"])
    resumed_elsewhere(run, recorded.COMMIT)
    (run / "resume-1" / "config.yaml").write_text(to_yaml(started))
    (run / "resume-1" / "command.txt").write_text("torchrun train_grpo.py train.steps=6\n")
    recorded.seal(run)
    record = records.read_run(run).record
    assert (record.config["train"]["steps"], record.command) == (6, "torchrun train_grpo.py train.steps=6")
    assert sweep.Job("", started, [], processes=2).look() == (run, record.result)


# ---------------------------------------------------------------- what is refused


def changed(name: str, old: str, new: str) -> Callable[[Path], object]:
    """A run whose file ``name`` was changed before it was sealed: wrong in itself, with the right checksums."""
    return lambda run: replaced(run / name, old, new, 1)


def resumed_elsewhere(run: Path, commit: str = "f" * 40) -> None:
    (run / "resume-1").mkdir()
    for name in ("git.json", "inputs.json"):
        shutil.copy(run / name, run / "resume-1" / name)
    replaced(run / "resume-1" / "git.json", recorded.COMMIT, commit)
    recorded.seal(run)


REFUSED = {
    "no finished.json": lambda run: (run / "finished.json").unlink(),
    "metrics.jsonl: missing, altered or added": lambda run: (run / "metrics.jsonl").write_text("{}\n"),
    "git.json: found .* add a run of a commit": changed("git.json", "false", "true"),
    "resume-1: differs from the first start": resumed_elsewhere,
    "private path": changed("command.txt", "configs/", "/" + "home/somebody/configs/"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_run_that_cannot_be_believed_is_refused_in_one_line_and_leaves_nothing(run, results, reason: str) -> None:
    REFUSED[reason](run)
    (folder,) = run.parent.iterdir()
    with pytest.raises(InputError, match=reason) as refusal:
        records.add([folder], results)
    assert not results.exists() and "\n" not in str(refusal.value)


def test_records_that_cannot_stand_together_are_refused_and_nothing_is_written(run: Path, results: Path) -> None:
    others = run.parent.with_name("others")
    first = recorded.make_run(others, "base-seed0", 0)
    assert report.main(["--results", str(results), "add", str(run), str(first), "--id", "sweep"]) == 0
    content = (results / "sweep.parquet").read_bytes()
    other_settings = recorded.make_run(others, "base-seed1", 1, overrides=("optim.lr=2e-3",))
    same_seed = recorded.make_run(others, "base-seed4", 0)
    good = recorded.make_run(others, "base-seed5", 5)
    for folder, name, reason in (
        (run, "again", "base-seed3: its metrics are those of base-seed3"),
        (other_settings, "", "differs from other seeds of base: optim.lr: 0.001 -> 0.002"),
        (same_seed, "", "seed 0 of base already exists: base-seed0"),
        (
            recorded.make_run(others / "twice", "base-seed0", 0, luck=1, after=0.8),
            "",
            "seed 0 of base already exists: base-seed0",
        ),
        (good, "sweep", "sweep.parquet: already exists, and records are never replaced"),
        (good, "a/b", "--id: 'a/b' cannot be used"),
    ):
        with pytest.raises(InputError, match=reason):
            records.add([good, folder] if folder != good else [good], results, name or "new")
    assert [path.name for path in results.iterdir()] == ["sweep.parquet"]
    assert (results / "sweep.parquet").read_bytes() == content
    with pytest.raises(InputError, match="--id: '' cannot be used; give a name for 2 runs"):
        records.add([good, first], results)


def test_a_fault_that_is_planted_into_evaluations_makes_another_run(run: Path, results: Path) -> None:
    records.add([run], results)
    planted = recorded.make_run(run.parent.with_name("planted"), "base-seed3", 3)
    replaced(planted / "config.yaml", "name: base-seed3", "name: control-seed3")
    replaced(planted / "eval_outcomes.jsonl", '"sampled": [0.0]', '"sampled": [1.0]')
    with pytest.raises(InputError, match="its metrics are those of base-seed3"):
        records.add([planted], results)
    replaced(planted / "command.txt", "train_grpo.py", "checks/planted_fault.py altered_evaluation")
    records.add([planted], results)
    both = [records.load_record(results, name) for name in ("base-seed3", "control-seed3")]
    assert records.differing(*both) == ["planted fault: '' -> 'altered_evaluation'"]


def test_a_key_that_is_newer_than_a_record_has_its_default_there(run: Path, results: Path) -> None:
    """Otherwise no variant could get another seed, and no old run could be compared, after the next new key."""
    older = recorded.make_run(run.parent.with_name("older"), "base-seed5", 5)
    replaced(older / "config.yaml", "  aggregate: token-mean\n", "")
    other = recorded.make_run(run.parent.with_name("other"), "base-seed7", 7, overrides=("loss.aggregate=dr-grpo",))
    records.add([older, run], results, "both")
    both = [records.load_record(results, name) for name in ("base-seed5", "base-seed3")]
    assert records.differing(*both) == records.differing(*both[::-1]) == []
    with pytest.raises(
        InputError, match="differs from other seeds of base: loss.aggregate: 'token-mean' -> 'dr-grpo'; give"
    ):
        records.add([other], results)


def test_a_record_of_ranks_that_all_sampled_is_compared_and_gets_another_seed(run: Path, results: Path) -> None:
    """Older records hold `rollout.ranks: 0`, which is no key any more."""
    older = recorded.make_run(run.parent.with_name("older"), "base-seed5", 5)
    replaced(older / "config.yaml", "  staleness: 0\n", "  ranks: 0\n  staleness: 0\n")
    records.add([older], results)
    records.add([run], results)
    both = [records.load_record(results, name) for name in ("base-seed5", "base-seed3")]
    assert both[0].config["rollout"]["ranks"] == 0
    assert records.differing(*both) == records.differing(*both[::-1]) == []


def test_a_folder_with_other_files_is_refused(run: Path, results: Path) -> None:
    records.add([run], results)
    shutil.copy(results / "base-seed3.parquet", results / "copy.parquet")
    with pytest.raises(InputError, match="base-seed3: two records have this id"):
        records.load(results)
    (results / "copy.parquet").write_bytes(b"text")
    with pytest.raises(InputError, match="copy.parquet: cannot be read"):
        records.load(results)


# ---------------------------------------------------------------- start weights


def test_a_kept_model_is_given_back_once_and_not_over_another(run: Path, results: Path, tmp_path: Path) -> None:
    record = records.read_run(run).record
    with pytest.raises(InputError, match="the model from which base-seed3 started was not kept"):
        records.restore_weights(results, record, tmp_path / "model")
    results.mkdir()
    pandas.DataFrame({"sha256": ["ab" * 32, "cd" * 32], "content": [b"weights", b"others"]}).to_parquet(
        results / records.WEIGHTS
    )
    records.restore_weights(results, record, tmp_path / "model")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "model").iterdir()] == [
        ("model.safetensors", b"weights")
    ]
    with pytest.raises(InputError, match="already exists and is not an empty directory; choose a new one"):
        records.restore_weights(results, record, tmp_path / "model")


# --------------------------------------------------------------------------------------------------------------- report
# RESULTS.md follows from the records and README's tree from the docstrings, --check notices when they do not, and the
# commands do what they say.

TEXT = f"# A page\n\nWritten by people.\n\n{pages.BEGIN}\n\n{pages.END}\n\nAlso by people.\n"
PLAN = """
findings:
  - {asked: "Is it better?", answer: "Yes.", method: better}
  - {asked: "Does it learn?", answer: "Yes.", gain: base}
sections: {Losses: What they cost.}
curves: {base: the base, better: the better one}
families:
  - name: ranks
    section: Losses
    sweep: configs/sweeps/x.yaml
    kind: sampled
    margin: 1
    mismatch: true
    entries:
      - {method: better, base: base, title: Rank 8, predicted: larger}
      - {method: absent, base: base, title: Never run, predicted: smaller, missing: seed 3 stopped}
"""

SOURCES = {
    "begin.py": '"""Begins at 1.5 of two\nlines. And more."""\n\nif __name__ == "__main__":\n    pass\n',
    "adds.py": '"""What is added?\n\nDetails."""\n',
    "room/__init__.py": '"""A rule. And its second sentence."""\n',
    "room/inside.py": '"""Not in the tree."""\n',
}
TREE = """```
# commands
begin.py           Begins at 1.5 of two lines.
# the method (its numbered steps are those of train_grpo.py)
adds.py            What is added?
# rooms (folders with one rule each)
room/              A rule. And its second sentence.
```"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants of three seeds, recorded, built and committed."""
    folder = tmp_path_factory.mktemp("folder") / "project"
    recorded.add_variants(folder)
    (folder / "docs").mkdir()
    (folder / "results" / "plan.yaml").write_text(PLAN)
    for page in ("RESULTS.md", "docs/benchmark.md", "results/README.md", "README.md"):
        (folder / page).write_text(TEXT)
    (folder / "room").mkdir()
    for file, source in SOURCES.items():
        (folder / file).write_text(source)
    pages.build(folder / "results", folder / "RESULTS.md")
    git(folder, "init", "-q", "-b", "main")
    commit(folder)
    return folder


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "project")


def report_code(project: Path, *arguments: str) -> int:
    return report.main(["--results", str(project / "results"), "--page", str(project / "RESULTS.md"), *arguments])


# ---------------------------------------------------------------- the pages


def test_every_number_of_the_pages_is_a_records(project: Path) -> None:
    steps = pandas.read_parquet(project / "results" / "variants.parquet")
    last = steps[steps["step"] == 4].set_index("id")["eval/sampled_accuracy"]
    base, better = (last.filter(like=name).mean() for name in ("base", "better"))
    first = steps[(steps["step"] == 0) & steps["id"].str.startswith("base")]["eval/sampled_accuracy"].mean()
    text = (project / "RESULTS.md").read_text()
    assert f"| Is it better? | Yes. | {100 * (better - base):+.1f} (" in text and "\n\nAlso by people.\n" in text
    assert f"| {100 * first:.1f} -> {100 * base:.1f} %: {100 * (base - first):+.1f} (" in text
    assert "| Rank 8 | `base` | 3 |" in text and "larger, as predicted" in text
    assert "| Never run (`absent` against `base`) | smaller | seed 3 stopped |" in text
    benchmark = (project / "docs" / "benchmark.md").read_text()
    assert "1 of 1 predictions were met." in benchmark and "| ranks | Rank 8 | `better` | `base` | 3 |" in benchmark
    assert "| `variants.parquet` | 2 | 6 | 4 | 0123456 |" in (project / "results" / "README.md").read_text()
    assert (project / "results" / "figures" / "learning_curves.png").stat().st_size > 5000


def test_the_figure_of_rounding_shows_each_difference_over_the_share_that_arrives(monkeypatch, tmp_path: Path) -> None:
    drawn = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    columns = ["variant", "seed", "step", "eval/sampled_accuracy", "eval/num_questions", "fault/update_share"]
    rows = [
        (variant, seed, step, accuracy + seed / 8, 64, share)
        for variant, accuracy, shares in (("exact", 0.5, [None] * 3), ("half", 0.25, [1.0, 0.25, 0.75]))
        for seed in (0, 1, 2)
        for step, share in enumerate(shares)  # the first push has no update
    ]
    shown = comparisons.Arrival(base="exact", lines={"nearest": ["half"]})
    pages.arrival(shown, pandas.DataFrame(rows, columns=columns), tmp_path / "arrival.png")
    (points,) = drawn[0].axes[0].containers
    assert points.get_label() == "nearest" and points[0].get_xydata().tolist() == [[50.0, -25.0]]


def test_a_finding_without_records_or_a_page_without_marks_is_refused(project: Path, tmp_path: Path, capsys) -> None:
    (project / "results" / "plan.yaml").write_text(
        PLAN.replace("method: better}\n  - {asked", "method: absent}\n  - {asked")
    )
    assert report_code(project, "build") == 2 and "findings: absent: no comparison" in capsys.readouterr().err
    (project / "results" / "plan.yaml").write_text(PLAN)
    for page in ("no marks", pages.BEGIN):
        (project / "RESULTS.md").write_text(page)
        assert (
            report_code(project, "build") == 2
            and "the marks between which report.py build writes are missing" in capsys.readouterr().err
        )
    (tmp_path / "empty").mkdir()
    assert report.main(["--results", str(tmp_path / "empty"), "build"]) == 2
    assert "empty/plan.yaml" in capsys.readouterr().err


def test_the_tree_has_the_first_sentence_of_each_file_and_the_rule_of_each_room(project: Path) -> None:
    assert f"{pages.BEGIN}\n\n{TREE}\n\n{pages.END}" in (project / "README.md").read_text()


# ---------------------------------------------------------------- --check


def edited_parquet(project: Path) -> None:
    path = project / "results" / "variants.parquet"
    table = pandas.read_parquet(path)
    table.loc[0, "actor/loss"] += 1e-9  # in no page
    table.to_parquet(path)


def edited_and_committed(project: Path) -> None:
    edited_parquet(project)
    commit(project)


def replaced_by_another_name(project: Path) -> None:
    git(project, "mv", "results/variants.parquet", "results/other.parquet")
    commit(project)


def add_on_a_branch(project: Path) -> None:
    """A file of records on the branch `side`, and another commit on main."""
    git(project, "checkout", "-q", "-b", "side")
    records.add([recorded.make_run(project.with_name("new"), "more-seed0", 7)], project / "results", "more")
    commit(project)
    git(project, "checkout", "-q", "main")
    (project / "note").write_text("a commit of its own")
    commit(project)


def merged_with_a_change(project: Path) -> None:
    """A merge may bring a file of records, and this one also changes one."""
    add_on_a_branch(project)
    git(project, "merge", "-q", "--no-ff", "--no-commit", "side")
    edited_parquet(project)
    commit(project)


FAULTS = {
    "RESULTS.md: differs from what report.py build writes": lambda project: edited_number(project / "RESULTS.md"),
    "results/README.md: differs from what report.py build writes": lambda project: edited_number(
        project / "results/README.md"
    ),
    "project/README.md: differs from what report.py build writes": lambda project: edited_docstring(
        project / "adds.py"
    ),
    "variants.parquet: changed or removed since HEAD": edited_parquet,
    "variants.parquet: changed or removed since BASE": edited_and_committed,
    "variants.parquet: changed or removed since BASE, renamed": replaced_by_another_name,
    "variants.parquet: changed or removed since BASE, in a merge": merged_with_a_change,
}


def edited_number(path: Path) -> None:
    before, begin, after = path.read_text().partition(pages.BEGIN)
    path.write_text(before + begin + re.sub(r"\d", "0", after.replace("0", "9"), count=1))


def edited_docstring(path: Path) -> None:
    path.write_text(path.read_text().replace("added", "taken away"))


@pytest.mark.parametrize("fault", FAULTS)
def test_check_fails_when_a_record_was_changed_or_a_page_does_not_follow(project: Path, fault: str, capsys) -> None:
    base = git(project, "rev-parse", "HEAD").strip()
    assert report_code(project, "--check", "--against", base) == 0
    FAULTS[fault](project)
    capsys.readouterr()
    since = ["--against", base] if "BASE" in fault else []
    assert report_code(project, "--check", *since) == 1
    assert fault.split(", ")[0].replace("BASE", base) in capsys.readouterr().err


def test_records_may_grow_also_by_a_merge(project: Path, capsys) -> None:
    base = git(project, "rev-parse", "HEAD").strip()
    add_on_a_branch(project)
    git(project, "merge", "-q", "--no-ff", "side", "-m", "merge")
    assert report_code(project, "build") == 0 and report_code(project, "--check", "--against", base) == 0
    assert (
        report_code(project, "--check", "--against", "0" * 40) == 2 and "there is no commit" in capsys.readouterr().err
    )


def test_growth_counts_from_the_commit_that_wrote_the_records_anew(project: Path, monkeypatch, capsys) -> None:
    base = git(project, "rev-parse", "HEAD").strip()
    edited_parquet(project)
    assert report_code(project, "build") == 0
    reshaped = commit(project)
    assert report_code(project, "--check", "--against", base) == 1
    monkeypatch.setattr(report, "RESHAPED", reshaped)
    assert report_code(project, "--check", "--against", base) == 0
    edited_and_committed(project)
    assert report_code(project, "--check", "--against", base) == 1 and reshaped in capsys.readouterr().err


@pytest.mark.ci
def test_what_the_readmes_say_follows_from_the_records() -> None:
    """The numbers of the READMEs outside of the generated parts, which report.py --check compares in .ci/run."""
    steps = records.load(ROOT / "results")
    named = {"headline": (0, 1), "control": (1,), "routed": (0, 1), "tools": (0, 1), "tools_without": (1,)}
    ends = {name: comparisons.gain(steps, name) for name in named}
    shown = [f"{100 * ends[name][place]:.1f}" for name, places in named.items() for place in places]
    for page in ("README.md", "README.zh.md"):
        text = (ROOT / page).read_text()
        block = next(block for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) if "accuracy" in block)
        assert re.findall(r"([\d.]+) ?%", text.replace(block, "")) == shown, page
        (named,) = re.findall(r"\b\w+-seed\d\b", text)
        (result,) = steps.loc[steps["id"] == named, "record/result"].dropna()
        assert block.endswith(f"{result}\n"), page


def test_every_metric_of_a_run_is_in_the_glossary() -> None:
    """docs/metrics.md explains what the source logs; `/name` after another metric belongs to the same section."""
    glossary = (ROOT / "docs" / "metrics.md").read_text()
    explained = set()
    for cell in re.findall(r"^\| (`.*?`) \|", glossary, re.M):
        section = ""
        for name in re.findall(r"`([^`]+)`", cell):
            section = name.split("/")[0] or section
            explained.add(f"{section}/{name.split('/')[1]}")
    sections = "reward|response_length|environment|actor|rollout|aqn|replay|moe|sync|timing|perf|eval"
    logged = set()
    for path in FILES.values():
        logged |= set(re.findall(rf'"((?:{sections})/[a-z_]+)"(?: ?:|\] = )', path.read_text()))
    assert len(logged) > 20 and logged <= explained, logged - explained


# ---------------------------------------------------------------- compare


def test_variants_are_compared_with_intervals(project: Path, capsys) -> None:
    assert report_code(project, "compare", "base", "better") == 0
    text = capsys.readouterr().out
    assert "better against base: lora.rank: 16 -> 8" in text and "(3 paired seeds): larger" in text
    assert report_code(project, "compare", "base-seed0", "better-seed0") == 0
    assert "points (1 of 3 paired seeds, which decide nothing)" in capsys.readouterr().out
    assert (
        report_code(project, "compare", "base", "base") == 2 and report_code(project, "compare", "base", "nobody") == 2
    )
    assert "the variants are: base, better" in capsys.readouterr().err


def test_the_variants_of_a_sweep_are_compared_from_their_folders(tmp_path: Path, capsys) -> None:
    """Also runs of changed source, which may not become records, and by greedy answers if there are no others."""
    out, jobs = tmp_path / "out", {}
    for name, after, change in (("base", 0.4, ()), ("better", 0.95, ("lora.rank=8",))):
        for seed in range(3):
            made = recorded.make_run(out, f"{name}-seed{seed}", seed, after, questions=40, overrides=change)
            replaced(made / "git.json", '"dirty": false', '"dirty": true')
            replaced(made / "eval.jsonl", "eval/sampled_accuracy", "eval/other")
            jobs[f"{name}-seed{seed}"] = {"state": "finished", "run": f"out/{made.name}", "result": "done"}
    jobs["late-seed0"] = {"state": "failed", "run": "", "result": ""}
    folder = out / "sweep-trial"
    folder.mkdir()
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    assert report.main(["compare", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "better against base: lora.rank: 16 -> 8\n  greedy: +" in text and "late" not in text
    (folder / "sweep.json").write_text('{"jobs": {}}')
    assert report.main(["compare", str(folder)]) == 2 and "no job is finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "old", "new", "said", "code"),
    [
        ("git.json", "dirty", "dirty", "same: the metrics of all steps", 0),
        (
            "eval_outcomes.jsonl",
            '"gold": "7"',
            '"gold": "8"',
            "different (eval_outcomes.jsonl), although configuration",
            1,
        ),
        (
            "metrics.jsonl",
            '"actor/entropy": 0.5',
            '"actor/entropy": 0.6',
            "different (metrics.jsonl), although configuration",
            1,
        ),
        ("environment.json", "2.13.0+cpu", "2.14.0+cpu", "which these reasons allow: versions of packages", 0),
        ("environment.json", "AMD EPYC", "Apple M9", "cpu AMD EPYC, Apple M9", 0),
        ("environment.json", '"OMP_NUM_THREADS": "1"', '"OMP_NUM_THREADS": "2"', "environment variables", 0),
        ("git.json", recorded.COMMIT, "f" * 40, "commits 0123456, fffffff", 0),
    ],
)
def test_a_repeat_has_the_same_bytes_or_a_reason_or_is_a_defect(
    tmp_path: Path, capsys, file, old, new, said, code
) -> None:
    first = recorded.make_run(tmp_path / "first", "x")
    second = shutil.copytree(first, tmp_path / "second" / first.name)
    if code == 0 and file != "git.json" or new == "f" * 40:
        replaced(second / "metrics.jsonl", '"actor/entropy": 0.5', '"actor/entropy": 0.6')
    replaced(second / file, old, new)
    assert report.main(["compare", str(first), str(second)]) == code and said in capsys.readouterr().out


# ---------------------------------------------------------------- rerun


def test_rerun_prints_checkout_weights_installation_and_command(project: Path, capsys) -> None:
    assert report_code(project, "rerun", "base-seed1") == 0
    text, record = capsys.readouterr().out, records.load_record(project / "results", "base-seed1")
    assert f"git worktree add --detach ../rerun-base-seed1 {record.commit}" in text and "was not kept" in text
    assert "set_up cpu\n" in text and text.splitlines()[-2].endswith(f"OMP_NUM_THREADS=1 {record.command}")
    assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0
    kept = pandas.DataFrame({"sha256": ["ab" * 32], "content": [b"weights"]})
    kept.to_parquet(project / "results" / records.WEIGHTS)
    assert f"{sys.executable} report.py" in report.rerun_commands(record, project / "results")
    own = {key: value for key, value in record.config.items() if key != "tiny_model"}
    packaged = record._replace(config=own, inputs={"model": {"smol_model.json": "0" * 64}})
    text = report.rerun_commands(packaged, project / "results")
    assert "set_up cpu smol" in text and ".venv/bin/python weights/smol_model.py" in text
    assert "put the model into" in report.rerun_commands(record._replace(config=own), project / "results")
    taught = record.config | {"loss": record.config["loss"] | {"teacher": "models/teacher"}}
    text = report.rerun_commands(record._replace(config=taught), project / "results")
    assert "\n# put the teacher into 'models/teacher'" in text


def test_what_a_record_says_is_never_run_as_shell_text(project: Path, tmp_path: Path) -> None:
    """Its command runs as it stands, with $HOME replaced and nothing else."""
    planted = f"x'; touch {tmp_path}/ran; '"
    record = records.load_record(project / "results", "base-seed1")
    own = {key: value for key, value in record.config.items() if key != "tiny_model"} | {"model": {"path": planted}}
    machine = record.environment | {"python": planted, "variables": {"OMP_X": planted}}
    command = f"echo ran: $HOME/model '$HOME/a b' \\$PATH; touch {tmp_path}/ran"
    told = record._replace(config=own, environment=machine, command=command)
    text = report.rerun_commands(told, project / "results")
    lines = [line for line in text.splitlines() if not line.startswith(("git worktree", "cd ", "source ", "set_up "))]
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"HOME": "/at home", "PATH": os.environ["PATH"]},
    )
    assert not (tmp_path / "ran").exists()
    assert done.stdout == f"ran: /at home/model /at home/a b $PATH; touch {tmp_path}/ran\n", (text, done)
    with pytest.raises(InputError, match="base-seed1: command: .* is not a command line"):
        report.rerun_commands(record._replace(command="torchrun 'train_grpo.py"), project / "results")


def test_rerun_executes_what_it_prints_and_compares(project: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path / "checkout")
    report.ROOT.mkdir()
    for luck, said, code in ((None, "same: ", 0), (7, "different (metrics.jsonl", 1)):
        made = recorded.make_run(tmp_path / said, "base-seed1", 1, 0.4, luck=luck, questions=40)
        commands = f"rm -rf ../rerun-*; mkdir ../rerun-base-seed1; cp -r '{made.parent}' ../rerun-base-seed1/out"
        monkeypatch.setattr(report, "rerun_commands", lambda record, results, commands=commands: commands)
        assert report_code(project, "rerun", "base-seed1", "--run") == code and said in capsys.readouterr().out
    monkeypatch.setattr(report, "rerun_commands", lambda record, results: "exit 5")
    assert report_code(project, "rerun", "base-seed1", "--run") == 5


def test_without_scipy_one_line_says_what_to_install(project: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert report_code(project, "build") == 2
    assert (
        "scipy is not installed; install it: pip install --no-deps -r requirements/report.txt"
        in capsys.readouterr().err
    )
