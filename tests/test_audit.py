"""Attacks on the records that also correct the checksums and rewrite the history, and the line that refuses each."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import recorded

import report
from config import hash_of
from input_files import dump_yaml
from lab import pages, store

SWEEP = "seeds: [0, 1, 2]\nvariants: {base: {}, better: {}}\n"
KNOBS = """class Config:
    def model_validate(config):
        if config["lora"]["rank"] < 1:
            raise ValueError("lora.rank")
"""
COMPARISON = "- {title: Better or not, base: base, others: [better], sweep: configs/sweeps/two.yaml}\n"


def git(folder: Path, *arguments: str) -> str:
    """Output of a git command, run as a person who does not exist."""
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def commit(folder: Path, *how: str) -> str:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "A commit", *how)
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("project"), f"comparisons:\n{COMPARISON}")


def build(folder: Path, plan: str) -> Path:
    """A repository: a plan, then the records of its two variants and three seeds, under the tag `published`."""
    for name, text in {"configs/sweeps/two.yaml": SWEEP, "results/plan.yaml": plan, "knobs.py": KNOBS}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q", "-b", "main")
    announced = commit(folder)
    out = folder.with_name("out")
    for name, after, change in (("base", 0.5, ()), ("better", 0.9, ("lora.rank=8",))):
        for seed in range(3):
            made = recorded.make_run(out, f"{name}-seed{seed}", seed, after, overrides=change, commit=announced)
            assert report.main(["--results", str(folder / "results"), "add", str(made)]) == 0
    for page in ("RESULTS.md", "results/README.md"):
        (folder / page).write_text(f"{pages.BEGIN}\n{pages.END}\n")
    pages.build(folder / "results", folder / "RESULTS.md")
    commit(folder)
    git(folder, "tag", "published")
    return folder


@pytest.fixture
def project(built: Path, tmp_path: Path) -> Path:
    return shutil.copytree(built, tmp_path / "project")


def check(project: Path, *more: str) -> int:
    places = ["--results", str(project / "results"), "--page", str(project / "RESULTS.md")]
    return report.main([*places, "--check", *more])


# ---------------------------------------------------------------- the attacks; each ends with checksums that agree


def edit(results: Path, name: str, change: Callable[[dict], object]) -> None:
    recorded.rewrite(results / f"{name}.parquet", change)


def reseal(record: dict) -> None:
    """Correct the checksums that a record holds of its own parts, too."""
    record["config_hash"] = hash_of(record["config"])
    for name, text in {
        "config.yaml": dump_yaml(record["config"]),
        "command.txt": record["command"] + "\n",
        "git.json": json.dumps({"commit": record["commit"], "dirty": False}) + "\n",
        "run.json": json.dumps({"name": record["config"]["name"], "config_hash": record["config_hash"]}) + "\n",
    }.items():
        record["files"][name] = hashlib.sha256(text.encode()).hexdigest()


def rate(record: dict) -> None:
    record["config"]["optim"]["lr"] = 5e-4


def rate_and_hash(record: dict) -> None:
    rate(record)
    record["config_hash"] = hash_of(record["config"])


def rate_everywhere(project: Path) -> None:
    for seed in range(3):
        edit(project / "results", f"better-seed{seed}", lambda record: (rate(record), reseal(record)))


def patched(record: dict) -> None:
    record["files"]["git.patch"] = "ab" * 32


def elsewhere(record: dict) -> None:
    record["commit"] = "f" * 40
    reseal(record)


def renamed(record: dict, name: str, seed: int) -> None:
    record.update(id=name, seed=seed)
    record["config"]["name"] = name
    record["config"]["train"]["seed"] = seed
    reseal(record)


def under_another_name(project: Path) -> None:
    path = project / "results" / "base-seed1.parquet"
    recorded.rewrite(path, lambda record: renamed(record, "other-seed1", 1), path.with_name("other-seed1.parquet"))


def under_another_seed(project: Path) -> None:
    path = project / "results" / "base-seed1.parquet"
    recorded.rewrite(path, lambda record: renamed(record, "base-seed7", 7), path.with_name("base-seed7.parquet"))
    path.unlink()


def swapped(project: Path, also: tuple[str, ...] = ()) -> None:
    """The steps and the main results of a bad and a good run change places."""
    results, names = project / "results", ("base-seed0", "better-seed0")
    follows = ("rows", "first", "last", "seconds_per_step", "tokens_per_second", "peak_memory_gib", "result", *also)
    runs = [store.load_run(results, name) for name in names]
    contents = [run.record.model_dump(mode="json") | {"rows": run.rows} for run in runs]
    for name, other in zip(names, contents[::-1], strict=True):
        edit(results, name, lambda record, other=other: record.update({key: other[key] for key in follows}))


def swapped_with_sums(project: Path) -> None:
    swapped(project, ("files",))
    for name in ("base-seed0", "better-seed0"):
        edit(project / "results", name, reseal)


def no_bad_seed(project: Path) -> None:
    (project / "results" / "better-seed2.parquet").unlink()


def no_bad_seed_in_the_sweep(project: Path) -> None:
    no_bad_seed(project)
    (project / "configs/sweeps/two.yaml").write_text(SWEEP.replace(", 2]", "]"))


def no_bad_variant(project: Path) -> None:
    for path in (project / "results").glob("better-*"):
        path.unlink()
    (project / "results" / "plan.yaml").write_text("comparisons: []\n")


def impossible(project: Path) -> None:
    """A configuration that the program of this commit refuses, in records that agree with themselves."""
    for seed in range(3):
        edit(
            project / "results",
            f"base-seed{seed}",
            lambda record: (record["config"]["lora"].update(rank=-3), reseal(record)),
        )


def trained_on_the_test(record: dict) -> None:
    record["inputs"]["data"] = {"train": "cd" * 32, "test": "cd" * 32}
    text = json.dumps(record["inputs"], indent=1) + "\n"
    record["files"]["inputs.json"] = hashlib.sha256(text.encode()).hexdigest()


def another_margin(project: Path) -> None:
    plan = project / "results" / "plan.yaml"
    plan.write_text(plan.read_text().replace("others: [better]", "others: [better], margin: 9"))


def record_of(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    return lambda project: edit(project / "results", name, change)


EVERYWHERE: dict[str, Callable[[Path], None]] = {  # what `--check` says -> the attack, in a history that was rewritten
    "base-seed1: config_hash: found": record_of("base-seed1", rate),
    "base-seed1: config.yaml: the record does not give the file": record_of("base-seed1", rate_and_hash),
    "base-seed1: no seed of base: optim.lr: 0.001 -> 0.0005": record_of(
        "base-seed1", lambda record: (rate(record), reseal(record))
    ),
    "base-seed1: git.patch: not the empty patch": record_of("base-seed1", patched),
    f"base-seed1: commit: {'f' * 40} is not in the history of HEAD": record_of("base-seed1", elsewhere),
    "base-seed1: environment.json: the record does not give": record_of(
        "base-seed1", lambda record: record["environment"].update(cpu="Apple M9")
    ),
    "base-seed1: command.txt: the record does not give": record_of(
        "base-seed1", lambda record: record.update(command="python other.py")
    ),
    "other-seed1: its metrics are those of base-seed1": under_another_name,
    "base-seed1: no record of an announced seed": under_another_seed,
    "base-seed7: seed: found 7; announced at commit": under_another_seed,
    "better-seed0: metrics.jsonl: the record does not give the file": swapped,
    "better-seed2: no record of an announced seed": no_bad_seed,
    "results/better-seed2: no record of an announced": no_bad_seed_in_the_sweep,
    "base-seed1: the program of commit": impossible,
    "base-seed1: inputs: the training data are the test data": record_of("base-seed1", trained_on_the_test),
    "Better or not: not as announced at commit": another_margin,
}
AGAINST: dict[str, Callable[[Path], None]] = {  # only a comparison with an earlier commit finds these
    "run base-seed0: changed; it is in": swapped_with_sums,
    "run better-seed1: changed; it is in": rate_everywhere,
    "run better-seed1: not here; it is in": no_bad_variant,
    "plan.yaml: Better or not: not as announced in": no_bad_variant,
}


def test_records_as_they_were_added_pass(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert check(project) == check(project, "--against", "published") == check(project, "--against", "HEAD~1") == 0
    assert "agree; commits compared: 1; commits of runs found" in capsys.readouterr().out


@pytest.mark.parametrize("line", EVERYWHERE)
def test_an_attack_with_corrected_checksums_and_a_rewritten_history_is_refused(
    project: Path, line: str, capsys: pytest.CaptureFixture
) -> None:
    EVERYWHERE[line](project)
    commit(project, "--amend")
    assert check(project) == 1 and line in capsys.readouterr().err


@pytest.mark.parametrize("line", AGAINST)
def test_a_consistent_other_record_is_refused_against_an_earlier_commit(
    project: Path, line: str, capsys: pytest.CaptureFixture
) -> None:
    AGAINST[line](project)
    commit(project, "--amend")
    places = ["--results", str(project / "results"), "--page", str(project / "RESULTS.md")]
    assert report.main([*places, "build"]) == 0
    commit(project, "--amend")
    assert check(project) == 0  # nothing in the files themselves is wrong
    assert check(project, "--against", "published") == 1 and line in capsys.readouterr().err


def test_what_was_added_to_an_earlier_commit_is_no_fault(project: Path, capsys: pytest.CaptureFixture) -> None:
    """One more record and one more comparison that has no run yet."""
    ran = git(project, "rev-list", "--max-parents=0", "HEAD").strip()
    made = recorded.make_run(project.parent, "more-seed0", commit=ran)
    places = ["--results", str(project / "results"), "--page", str(project / "RESULTS.md")]
    assert report.main([*places, "add", str(made)]) == 0
    with open(project / "results" / "plan.yaml", "a") as file:
        file.write("- {title: Later, base: better, others: [later], sweep: configs/sweeps/two.yaml}\n")
    assert report.main([*places, "build"]) == 0
    commit(project)
    assert check(project, "--against", "published") == 0


def test_a_comparison_is_announced_before_its_runs(project: Path, capsys: pytest.CaptureFixture) -> None:
    ran = git(project, "rev-list", "--max-parents=0", "HEAD").strip()
    made = recorded.make_run(project.parent, "late-seed0", commit=ran)
    assert report.main(["--results", str(project / "results"), "add", str(made)]) == 0
    with open(project / "results" / "plan.yaml", "a") as file:
        file.write("- {title: Late, base: base, others: [late], seeds: [0]}\n")
    commit(project)
    assert check(project) == 1
    assert f"late-seed0: plan.yaml and its sweeps did not announce late at commit {ran[:7]}" in capsys.readouterr().err


FAMILY = """comparisons:
- {title: One, family: f, base: base, others: [better], predicted: larger, seeds: [0, 1, 2]}
- {title: Two, family: f, base: base, others: [absent], predicted: smaller, seeds: [0, 1, 2]}
"""


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.replace("predicted: larger", "predicted: smaller"),
        lambda plan: plan.replace("title: One,", "title: One, margin: 9,"),
        lambda plan: "".join(line for line in plan.splitlines(keepends=True) if "Two" not in line),
        lambda plan: plan + "- {title: Three, family: f, base: base, others: [c], predicted: smaller, seeds: [0]}\n",
    ],
    ids=["prediction", "margin", "entry taken away", "entry added"],
)  # fmt: skip
def test_a_family_is_the_one_that_was_announced(change: Callable[[str], str], tmp_path: Path, capsys) -> None:
    project = build(tmp_path / "project", FAMILY)
    assert check(project) == 0
    plan = project / "results" / "plan.yaml"
    plan.write_text(changed := change(plan.read_text()))
    assert changed != FAMILY
    pages.build(project / "results", project / "RESULTS.md")
    assert check(project) == 1
    assert "family f: not as announced at commit " in capsys.readouterr().err
    plan.write_text(FAMILY.replace("seeds: [0, 1, 2]", "seeds: [0, 1, 2], missing: ['better-seed7: lost']"))
    pages.build(project / "results", project / "RESULTS.md")
    assert check(project) == 0


def test_a_gain_that_was_to_be_stated_stays_among_the_findings(tmp_path: Path, capsys) -> None:
    project = build(tmp_path / "project", f"gains: [better]\ncomparisons:\n{COMPARISON}")
    assert check(project) == 0
    plan = project / "results" / "plan.yaml"
    plan.write_text(plan.read_text().replace("gains: [better]", "gains: []"))
    pages.build(project / "results", project / "RESULTS.md")
    assert check(project) == 1 and "plan.yaml: gains: better is not here; it is in" in capsys.readouterr().err


def test_an_announced_run_without_a_record_needs_a_reason_which_the_page_shows(project: Path) -> None:
    no_bad_seed(project)
    plan = project / "results" / "plan.yaml"
    plan.write_text(plan.read_text().replace("}\n", ", missing: ['better-seed2: stopped by checks.non_finite']}\n"))
    places = ["--results", str(project / "results"), "--page", str(project / "RESULTS.md")]
    assert report.main([*places, "build"]) == 0
    commit(project, "--amend")
    assert check(project) == 0
    page = (project / "RESULTS.md").read_text().split("## Not run yet")[1]
    assert "no record of better-seed2: stopped by checks.non_finite" in page


def test_without_the_whole_history_check_says_what_it_left_out(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", project.as_uri(), "shallow")
    assert check(tmp_path / "shallow") == 0
    assert "a shallow clone: commits of runs not looked up" in capsys.readouterr().out
    assert check(tmp_path / "shallow", "--against", "HEAD~1") == 2
    assert re.fullmatch(r"error: --against: found 'HEAD~1'; needed: .*\n", capsys.readouterr().err)
    shutil.rmtree(project / ".git")
    assert check(project) == 0
    assert "no git history to compare with; no git: commits of runs not looked up" in capsys.readouterr().out


def test_a_run_with_a_patch_that_calls_itself_clean_is_no_record(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    made = recorded.make_run(tmp_path, "base-seed0")
    (made / "git.patch").write_text("diff --git a/grpo.py b/grpo.py\n")
    recorded.seal(made)
    assert report.main(["--results", str(tmp_path / "results"), "add", str(made)]) == 2
    assert "git.patch: a patch of a run that calls its source clean" in capsys.readouterr().err


def test_against_alone_is_no_command() -> None:
    with pytest.raises(SystemExit):
        report.main(["--against", "HEAD", "build"])
