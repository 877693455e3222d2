"""Attacks on the records that also correct the checksums and rewrite the history, and the line that refuses each."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import recorded
from recorded import commit, git

import report
from config import hash_of
from inputs.files import dump_yaml
from lab import pages, store

pytestmark = pytest.mark.nightly
SWEEP = "seeds: [0, 1, 2]\nvariants: {base: {}, better: {}}\n"
KNOBS = """import engines.kinds
class Config:
    def model_validate(config):
        if config["lora"]["rank"] < 1:
            raise ValueError("lora.rank")
"""
FAMILY = """gains: [better]
comparisons:
- {title: One, family: f, base: base, others: [better], predicted: larger, seeds: [0, 1, 2]}
- {title: Two, family: f, base: base, others: [absent], predicted: smaller, seeds: [0, 1, 2]}
"""
COMPARISON = "- {title: Better or not, base: base, others: [better], sweep: configs/sweeps/two.yaml}\n"


def make(folder: Path, plan: str) -> Path:
    """A repository: a plan, then the records of its two variants and three seeds, under the tag `published`."""
    program = {"knobs.py": KNOBS, "engines/kinds.py": ""}
    for name, text in {"configs/sweeps/two.yaml": SWEEP, "results/plan.yaml": plan, **program}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q", "-b", "main")
    recorded.add_variants(folder, commit=commit(folder))
    for page in ("RESULTS.md", "results/README.md"):
        (folder / page).write_text(f"{pages.BEGIN}\n{pages.END}\n")
    build(folder)
    commit(folder)
    git(folder, "tag", "published")
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("compared") / "project", f"comparisons:\n{COMPARISON}")


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> Path:
    return make(tmp_path_factory.mktemp("family") / "project", FAMILY)


@pytest.fixture
def project(compared: Path, tmp_path: Path) -> Path:
    return shutil.copytree(compared, tmp_path / "project")


def build(project: Path) -> None:
    pages.build(project / "results", project / "RESULTS.md")


def check(project: Path, *more: str) -> int:
    places = ["--results", str(project / "results"), "--page", str(project / "RESULTS.md")]
    return report.main([*places, "--check", *more])


def in_plan(project: Path, old: str, new: str) -> None:
    plan = project / "results" / "plan.yaml"
    assert old in plan.read_text()
    plan.write_text(plan.read_text().replace(old, new))


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


def resealed(change: Callable[[dict], object]) -> Callable[[dict], object]:
    """The change, with checksums that agree."""
    return lambda record: (change(record), reseal(record))


def in_all_seeds(name: str, change: Callable[[dict], object]) -> Callable[[Path], object]:
    return lambda project: [edit(project / "results", f"{name}-seed{seed}", resealed(change)) for seed in range(3)]


def renamed(record: dict, name: str, seed: int) -> None:
    record.update(id=name, seed=seed)
    record["config"]["name"] = name
    record["config"]["train"]["seed"] = seed
    reseal(record)


def under_another_seed(project: Path) -> None:
    path = project / "results" / "base-seed1.parquet"
    recorded.rewrite(path, lambda record: renamed(record, "base-seed7", 7), path.with_name("base-seed7.parquet"))
    path.unlink()


def no_bad_seed(project: Path) -> None:
    (project / "results" / "better-seed2.parquet").unlink()


def no_bad_seed_in_the_sweep(project: Path) -> None:
    no_bad_seed(project)
    (project / "configs/sweeps/two.yaml").write_text(SWEEP.replace(", 2]", "]"))


def no_bad_variant(project: Path) -> None:
    for path in (project / "results").glob("better-*"):
        path.unlink()
    (project / "results" / "plan.yaml").write_text("comparisons: []\n")


def trained_on_the_test(record: dict) -> None:
    record["inputs"]["data"] = {"train": "cd" * 32, "test": "cd" * 32}
    text = json.dumps(record["inputs"], indent=1) + "\n"
    record["files"]["inputs.json"] = hashlib.sha256(text.encode()).hexdigest()


def record_of(name: str, change: Callable[[dict], None]) -> Callable[[Path], None]:
    return lambda project: edit(project / "results", name, change)


EVERYWHERE: dict[str, Callable[[Path], None]] = {  # what `--check` says -> the attack, in a history that was rewritten
    "base-seed1: config_hash: found": record_of("base-seed1", rate),
    "base-seed1: config.yaml: the record does not give the file": record_of(
        "base-seed1", lambda record: (rate(record), record.update(config_hash=hash_of(record["config"])))
    ),
    "base-seed1: no seed of base: optim.lr: 0.001 -> 0.0005": record_of("base-seed1", resealed(rate)),
    f"base-seed1: commit: {'f' * 40} is not in the history of HEAD": record_of(
        "base-seed1", resealed(lambda record: record.update(commit="f" * 40))
    ),
    "base-seed1: command.txt: the record does not give": record_of(
        "base-seed1", lambda record: record.update(command="python other.py")
    ),
    "base-seed1: no record of an announced seed": under_another_seed,
    "base-seed7: seed: found 7; announced at commit": under_another_seed,
    "better-seed2: no record of an announced seed": no_bad_seed,
    "results/better-seed2: no record of an announced": no_bad_seed_in_the_sweep,
    "base-seed1: the program of commit": in_all_seeds(  # it refuses this configuration
        "base", lambda record: record["config"]["lora"].update(rank=-3)
    ),
    "base-seed1: inputs: the training data are the test data": record_of("base-seed1", trained_on_the_test),
    "Better or not: not as announced at commit": lambda project: in_plan(
        project, "others: [better]", "others: [better], margin: 9"
    ),
}
AGAINST: dict[str, Callable[[Path], None]] = {  # only a comparison with an earlier commit finds these
    "run better-seed1: changed; it is in": in_all_seeds("better", rate),
    "run better-seed1: not here; it is in": no_bad_variant,
    "plan.yaml: Better or not: not as announced in": no_bad_variant,
}


def test_records_as_they_were_added_pass(project: Path, capsys: pytest.CaptureFixture) -> None:
    assert check(project) == check(project, "--against", "published") == check(project, "--against", "HEAD~1") == 0
    assert "agree; commits compared: 1; commits of runs found" in capsys.readouterr().out


@pytest.mark.parametrize("line", EVERYWHERE)
def test_an_attack_with_corrected_checksums_and_a_rewritten_history_is_refused(
    project: Path, line: str, capsys
) -> None:
    EVERYWHERE[line](project)
    commit(project, "--amend")
    assert check(project) == 1 and line in capsys.readouterr().err


@pytest.mark.parametrize("line", AGAINST)
def test_a_consistent_other_record_is_refused_against_an_earlier_commit(project: Path, line: str, capsys) -> None:
    AGAINST[line](project)
    build(project)
    commit(project, "--amend")
    assert check(project) == 0  # nothing in the files themselves is wrong
    assert check(project, "--against", "published") == 1 and line in capsys.readouterr().err


def test_what_is_added_is_no_fault_if_it_was_announced_before_its_runs(project: Path, capsys) -> None:
    """One more record and one more comparison that has no run yet; then a comparison that comes after its run."""
    ran = git(project, "rev-list", "--max-parents=0", "HEAD").strip()
    for name in ("more-seed0", "late-seed0"):
        store.add_run(recorded.make_run(project.parent, name, commit=ran, questions=40), project / "results")
    in_plan(project, COMPARISON, f"{COMPARISON}- {{title: Later, base: better, others: [later]}}\n")
    build(project)
    commit(project)
    assert check(project, "--against", "published") == 0
    in_plan(project, COMPARISON, f"{COMPARISON}- {{title: Late, base: base, others: [late], seeds: [0]}}\n")
    assert check(project) == 1
    assert f"late-seed0: plan.yaml and its sweeps did not announce late at commit {ran[:7]}" in capsys.readouterr().err


def test_a_family_and_the_stated_gains_are_those_that_were_announced(family: Path, capsys) -> None:
    assert check(family) == 0
    changes = {
        "predicted: larger": "predicted: smaller",
        "title: One,": "title: One, margin: 9,",
        FAMILY.splitlines(keepends=True)[-1]: "",
        FAMILY: f"{FAMILY}- {{title: Three, family: f, base: base, others: [c], predicted: smaller}}\n",
        "gains: [better]": "gains: []",
    }
    for old, new in changes.items():
        in_plan(family, old, new)
        build(family)
        assert check(family) == 1
        said = "gains: better is not here; it is in" if "gains: []" in new else "family f: not as announced at commit "
        assert said in capsys.readouterr().err
        (family / "results" / "plan.yaml").write_text(FAMILY)
    in_plan(family, "seeds: [0, 1, 2]", "seeds: [0, 1, 2], missing: ['better-seed7: lost']")
    build(family)
    assert check(family) == 0


def test_an_announced_run_without_a_record_needs_a_reason_which_the_page_shows(project: Path) -> None:
    no_bad_seed(project)
    in_plan(project, "}\n", ", missing: ['better-seed2: stopped by checks.non_finite']}\n")
    build(project)
    commit(project, "--amend")
    assert check(project) == 0
    page = (project / "RESULTS.md").read_text().split("## Not run yet")[1]
    assert "no record of better-seed2: stopped by checks.non_finite" in page


def test_without_the_whole_history_check_says_what_it_left_out(project: Path, tmp_path: Path, capsys) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", project.as_uri(), "shallow")
    assert check(tmp_path / "shallow") == 0
    assert "a shallow clone: commits of runs not looked up" in capsys.readouterr().out
    assert check(tmp_path / "shallow", "--against", "HEAD~1") == 2
    assert re.fullmatch(r"error: --against: found 'HEAD~1'; needed: .*\n", capsys.readouterr().err)
    shutil.rmtree(project / ".git")
    assert check(project) == 0
    assert "no git history to compare with; no git: commits of runs not looked up" in capsys.readouterr().out
