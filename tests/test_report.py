"""RESULTS.md follows from the records, and --check notices when it does not; the commands do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import recorded
from PIL import Image, PngImagePlugin

import report
from inputs.files import InputError
from lab import comparisons, pages, store

TEXT = "# Results\n\nWritten by people.\n\n{}\n\n{}\n\nAlso by people.\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants of three seeds, recorded and built."""
    folder = tmp_path_factory.mktemp("folder") / "project"
    recorded.add_variants(folder)
    (folder / "results" / "plan.yaml").write_text(
        "gains: [base]\n"
        "drawn: {base: the base, better: the better one}\n"
        "learned: ['Better: {better}.', 'Training: {gain_base}.']\n"
        "comparisons:\n"
        "- {title: Better or not, base: base, others: [better]}\n"
        "- {title: Never run, base: base, others: [absent], sweep: configs/sweeps/x.yaml}\n"
        "rows:\n"
        "- {group: big, what: A big model, command: torchrun big, plan: later}\n"
        "- {group: base, what: The base, command: torchrun base, plan: done}\n"
    )
    for page in ("RESULTS.md", "results/README.md"):
        (folder / page).write_text(TEXT.format(pages.BEGIN, pages.END))
    pages.build(folder / "results", folder / "RESULTS.md")
    return folder


@pytest.fixture
def places(project: Path, tmp_path: Path) -> list[str]:
    """--results and --page of a copy of the project."""
    shutil.copytree(project / "results", tmp_path / "results")
    shutil.copy(project / "RESULTS.md", tmp_path / "RESULTS.md")
    return ["--results", str(tmp_path / "results"), "--page", str(tmp_path / "RESULTS.md")]


def run(*arguments: str) -> int:
    return report.main(list(arguments))


def test_every_number_of_the_pages_is_a_records(places: list[str], tmp_path: Path) -> None:
    text, table = ((tmp_path / name).read_text() for name in ("RESULTS.md", "results/README.md"))
    for page in (text, table):
        assert page.startswith("# Results\n\nWritten by people.") and page.endswith("Also by people.\n")
    known = [run.record for run in store.load_runs(tmp_path / "results").values()]
    for record in known:
        (row,) = re.findall(rf"^\| {record.id} \|.*$", table, re.M)
        low, high = 100 * record.last.sampled.low, 100 * record.last.sampled.high
        assert f"{100 * record.last.sampled.accuracy:.1f} ({low:.1f}-{high:.1f})" in row
        assert f"`{record.commit[:7]}`" in row and f"{record.seconds_per_step:.2f}" in row
    before, after = (
        statistics.fmean(100 * getattr(one, when).sampled.accuracy for one in known if one.group == "base")
        for when in ("first", "last")
    )
    assert f"40 held-out questions: {before:.1f} % before and {after:.1f} % after 4 steps (3 seeds)" in table
    (row,) = re.findall(r"^\| Better or not .*different: better is better \|$", table, re.M)
    difference, interval = row.split(" | ")[5:7]
    assert f"1. Better: {difference} points ({interval})." in text
    missing = text.split("## Not run yet")[1]
    assert "| A big model | `torchrun big` | later |" in missing and "missing: absent" in missing
    assert "The base" not in missing and "No record yet of a run on a GPU or an NPU." in text
    assert "](results/figures/curves.png)" in text and "2. Training: +" in text


def test_without_scipy_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert run("plan", "--questions", "1319", "--seeds", "5", "--discordant", "0.25") == 2
    needed = "pip install --no-deps -r requirements/report.txt"
    assert capsys.readouterr().err == f"error: report.py: scipy is not installed; needed: {needed}\n"


@pytest.mark.parametrize("command", ["build", "--check"])
def test_nothing_is_written_from_a_folder_without_records_or_into_a_page_without_markers(
    command: str, tmp_path, capsys
) -> None:
    """Otherwise a mistyped --results would replace all that was found with nothing."""
    results, page = tmp_path / "results", tmp_path / "RESULTS.md"
    page.write_text(written := TEXT.format(f"{pages.BEGIN}\n\nfound: 1 of 2", pages.END))
    for _ in ("no folder", "a folder with a plan"):
        assert run("--results", str(results), "--page", str(page), command) == 2
        assert capsys.readouterr().err.startswith(f"error: {results}: no records; needed: the folder that report.py ")
        results.mkdir(exist_ok=True)
        shutil.copy(recorded.ROOT / "results" / "plan.yaml", results)
    assert page.read_text() == written and [path.name for path in results.iterdir()] == ["plan.yaml"]
    store.add_run(recorded.make_run(tmp_path, "a-seed0"), results)
    (results / "plan.yaml").unlink()
    for text in ("no markers", f"{pages.END} {pages.BEGIN}"):
        page.write_text(text)
        assert run("--results", str(results), "--page", str(page), command) == 2 and page.read_text() == text
        assert "once each" in capsys.readouterr().err


def test_a_page_shows_a_benchmark_as_it_was_printed_and_links_those_before(places, tmp_path: Path, capsys) -> None:
    stored = tmp_path / "bench_step.json"

    def add(*more: str, **changes: object) -> int:
        stored.write_text(json.dumps(recorded.BENCHMARK | changes))
        return run(*places, "add", str(stored), *more)

    for spoilt, needed in (({"dirty": True}, "git status clean"), ({"table": []}, "table: List should have")):
        assert add(**spoilt) == 2 and needed in capsys.readouterr().err
    assert add(commit="a" * 40, about="old") == add(commit="b" * 40) == add("--id", "after_a_change") == 0
    assert add() == 0 and len(store.load_benchmarks(tmp_path / "results")) == 3  # it is there already
    assert add("--id", "x") == 2 and "is after_a_change already" in capsys.readouterr().err
    assert add("--id", "bench_step-2", commit="d" * 40) == 2 and "never replaced" in capsys.readouterr().err
    assert add("--id", "../x", commit="d" * 40) == 2 and "--id: found '../x'" in capsys.readouterr().err
    assert run(*places, "--check") == 1 and run(*places, "build") == 0 and run(*places, "--check") == 0
    text = (tmp_path / "results" / "README.md").read_text()
    assert "### bench_step\n\nOurs against theirs. `python benchmarks/bench_step.py`, commit `abababa`" in text
    table = "| case | ratio | bar |\n| --- | --- | --- |\n| small | 0.5123 | 0.7 |\n| large | 12 | 0.7 |"
    assert table in text and text.count("### bench_step") == 1
    assert "Earlier: bench_step at `aaaaaaa`, bench_step-2 at `bbbbbbb`." in text
    assert run(*places, "compact", "benchmarks", "bench_step", "after") == 0 and run(*places, "--check") == 0
    *_, kept = store.load_benchmarks(tmp_path / "results").values()
    assert kept.model_dump(exclude={"place"}) == recorded.BENCHMARK


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_building_again_changes_nothing_and_removes_only_figures_of_its_own(places, tmp_path: Path) -> None:
    once = everything(tmp_path)
    figure(tmp_path, "old")
    (tmp_path / "results/figures/curves.png").unlink()
    assert run(*places, "build") == 0 and everything(tmp_path) == once  # drawn anew: the same bytes
    Image.new("RGB", (9, 9)).save(theirs := tmp_path / "results/figures/theirs.png")
    assert run(*places, "--check") == 0 == run(*places, "build") and theirs.exists()


def edit(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new, 1))

    return change


def another_record(folder: Path) -> None:
    store.add_run(recorded.make_run(folder / "more", "new-seed0", questions=9), folder / "results")


def redrawn(folder: Path) -> None:
    """A figure is drawn on, and the data that it was drawn from stay in its metadata."""
    path, about = folder / "results/figures/curves.png", PngImagePlugin.PngInfo()
    image = Image.open(path)
    about.add_text("Description", image.info["Description"])
    image.putpixel((200, 100), (image.getpixel((200, 100)) + 1) % 64)
    image.save(path, pnginfo=about)


FAULTS = {
    "RESULTS.md: stale": edit("RESULTS.md", "1. Better: ", "1. Far better: "),
    "README.md: stale": edit("results/README.md", "| base |", "| baste |"),
    "stale: ": another_record,
    "environment.json: the record does not give": lambda folder: recorded.rewrite(
        folder / "results/better-seed1.parquet", lambda record: record["environment"].update(cpu="Apple M9")
    ),
    "curves.png: missing": lambda folder: (folder / "results/figures/curves.png").unlink(),
    "curves.png: missing, edited": redrawn,
    "learning_curve.png: missing, edited, stale or not wanted": lambda folder: [
        edit("results/plan.yaml", old, new)(folder)
        for old, new in (("base: base, others: [better]", "base: better, others: [base]"), ("{better}", "{base}"))
    ],
    "learned: worse: no such number; needed: one of better, gain_base": edit(
        "results/plan.yaml", "{better}", "{worse}"
    ),
    "old.png: missing, edited, stale or not wanted": lambda folder: figure(folder, "old"),
}


def figure(folder: Path, name: str) -> None:
    """A figure that `build` has drawn and that no comparison needs."""
    shutil.copy(folder / "results/figures/curves.png", folder / f"results/figures/{name}.png")


def test_check_fails_when_something_does_not_follow(places, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(*places, "--check") == 0
    sound = everything(tmp_path)
    for fault, plant in FAULTS.items():
        plant(tmp_path)
        assert run(*places, "--check") == 1 + ("needed" in fault) and fault in capsys.readouterr().err
        if "environment" in fault:  # nothing is built on records that were tampered with
            page = (tmp_path / "RESULTS.md").read_text()
            assert run(*places, "build") == 2 and (tmp_path / "RESULTS.md").read_text() == page
        for path in everything(tmp_path).keys() - sound.keys():
            Path(path).unlink()
        for path, content in sound.items():
            Path(path).write_bytes(content)


@pytest.fixture(scope="module")
def published() -> tuple[dict[str, list[store.Run]], pages.announced.Plan]:
    """The records of the repository by group, and its plan."""
    return store.load_groups(recorded.ROOT / "results"), pages.announced.read_plan(recorded.ROOT / "results")


def test_every_metric_of_a_run_is_in_the_glossary() -> None:
    """docs/metrics.md explains what the source logs; `/name` after another metric belongs to the same section."""
    glossary = (recorded.ROOT / "docs" / "metrics.md").read_text()
    explained = set()
    for cell in re.findall(r"^\| (`.*?`) \|", glossary, re.M):
        section = ""
        for name in re.findall(r"`([^`]+)`", cell):
            section = name.split("/")[0] or section
            explained.add(f"{section}/{name.split('/')[1]}")
    sections = "reward|response_length|actor|rollout|aqn|replay|moe|sync|timing|perf|eval"
    logged = set()
    for path in (*recorded.ROOT.glob("*.py"), *recorded.ROOT.glob("plan/*.py")):
        logged |= set(re.findall(rf'"((?:{sections})/[a-z_]+)"(?: ?:|\] = )', path.read_text()))
    assert len(logged) > 20 and logged <= explained, logged - explained


@pytest.mark.ci
def test_numbers_of_the_written_part_are_those_of_the_records(published) -> None:
    """RESULTS.md: what the runs can and cannot say, and what did not work."""
    text = " ".join((recorded.ROOT / "RESULTS.md").read_text().split(pages.END)[1].split())
    groups, plan = published
    record = groups["baseline"][0].record
    made, rollout = (record.config[section] for section in ("tiny_model", "rollout"))
    rank_4 = [run.record.last.sampled.accuracy for run in groups["lora_rank_4"]]
    families = {name for entry in plan.comparisons if entry.family for name in entry.names} | {"smol", "smol_control"}
    others = [run for name, runs in groups.items() for run in runs if name not in families]
    quiet = [
        run.steps["rollout/logp_gap_max"]
        for run in others
        if run.record.config["model"]["dtype"] == "fp32"
        and not run.steps.get("aqn/sigma", run.steps["reward/mean"] * 0).any()
    ]
    apart = [gaps[gaps > 6e-5].tolist() for gaps in quiet if (gaps > 6e-5).any()]
    for sentence in (
        f"{made['num_experts']} experts ({made['experts_per_token']} per token)",
        f"a hidden size of {made['hidden_size']}",
        f"{record.steps} steps of {rollout['prompts_per_step']} prompts x {rollout['group_size']} completions",
        f"The {record.last.num_questions:,} held-out questions",
        f"one of its five seeds stayed at {100 * min(rank_4):.1f} %",
        f"In {len(apart)} of the {len(quiet)} fp32 runs without noise, one step has a token",
        "differ by 1e-4 to 0.1 nats",
    ):
        assert sentence in text, sentence
    assert {len(gaps) for gaps in apart} == {1} and min(apart)[0] >= 1e-4 and round(max(apart)[0], 1) == 0.1


def along_the_run(group: list) -> float:
    """The mean over seeds of the mean sampled accuracy after the start of a run."""
    accuracies = [
        [row["eval/sampled_accuracy"] for row in run.rows[1:] if "eval/sampled_accuracy" in row] for run in group
    ]
    return statistics.fmean(map(statistics.fmean, accuracies))


@pytest.mark.ci
def test_what_was_learned_is_what_the_records_say(published) -> None:
    """RESULTS.md begins with it. Numbers with intervals are generated; here are a share by hand and what words say."""
    groups, plan = published
    ready = pages.announced.compared(plan, groups)
    lost = {loss.other for loss, _ in pages.announced.losses(ready)}
    assert lost >= {"mismatch_int3", "bench_router"} and "bench_int3" not in lost  # its control was not found
    assert not [name for name in lost if name.startswith(("rank", "place"))]
    assert "qerl_aqn" not in pages.announced.numbers(plan, ready, groups)  # withheld, its repeats are not
    found = {one.other: one for _, one in ready}
    effect = {name: float(one.effect.mean) for name, one in found.items()}
    text = (recorded.ROOT / "RESULTS.md").read_text()

    def gap(name: str, step: int) -> float:
        return statistics.fmean(run.steps["rollout/logp_gap_mean"].loc[step] for run in groups[name])

    (line,) = [x for x in text.splitlines() if "**The gap" in x]
    share = -100 * effect["mismatch_int3_sequence"] / effect["mismatch_int3"]
    assert f"sequence weights give back {share:.0f} % (" in line
    assert f"int3: {100 * effect['mismatch_int3']:.1f} points (" in line
    assert round(gap("mismatch_int3", 0), 2) == round(gap("mismatch_noise", 0), 2) == 0.12
    assert round(gap("mismatch_noise", 39), 2) == 0.03 and round(gap("mismatch_int3", 39), 1) == 0.1
    assert gap("mismatch_flips_r3", 0) < 1e-6  # "replay closes the gap"
    each = {name: groups[name] for name in ("stale_0", "reuse_base")}
    (one,) = comparisons.compare(each, "curve")
    assert f"finds {one.effect.points} points ({one.effect.range})" in (recorded.ROOT / "docs/benchmark.md").read_text()
    old, lost, now = (along_the_run(groups[name]) for name in ("stale_2", "stale_2_uncorrected", "stale_0"))
    (line,) = [x for x in text.splitlines() if "**Old" in x]
    assert f" two steps {100 * (old - now):.1f} points (" in line  # against none, not against uncorrected
    assert f"give back {100 * (old - lost) / (now - lost):.0f} % (" in line
    aqn, int4 = (pages.figures.gap(groups[name]) for name in ("quantised_int4_aqn", "bench_int4"))
    assert 25 < int4 / aqn < 35  # "a thirtieth"
    noisy = [name for name in effect if "aqn" in name]
    assert len(noisy) == 12 and not any(found[name].direction and not found[name].equal for name in noisy)
    rewards = [run.steps["reward/mean"] for run in groups["smollm2"]]
    rises = [100 * (reward.iloc[20:30].mean() - reward.iloc[10:20].mean()) for reward in rewards]
    rise, error = statistics.fmean(rises), statistics.stdev(rises) / len(rises) ** 0.5
    low, high = rise - 2.365 * error, rise + 2.365 * error  # Student's t with 7 degrees of freedom
    assert len(rises) == 8 and f"21 to 30 is {rise:+.1f} points ({low:+.1f} to {high:+.1f})" in text


def test_the_share_of_a_loss_by_hand() -> None:
    """Losses of 4 and 6 points, of which 3 and 2 come back; without spread the interval is the share."""

    def one(base: str, other: str, differences: tuple[float, ...]) -> SimpleNamespace:
        return SimpleNamespace(base=base, other=other, seeds=[3, 5], differences=differences)

    loss = one("base", "lost", (-0.04, -0.06))
    share, low, high = comparisons.recovered(loss, one("lost", "back", (0.03, 0.02)))
    assert (share, low, high) == pytest.approx((0.5, 1 / 3, 0.75))
    assert comparisons.recovered(loss, one("lost", "back", (0.02, 0.03))) == pytest.approx((0.5, 0.5, 0.5))


@pytest.mark.ci
@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_every_percentage_of_the_readme_is_a_records(page: str, published) -> None:
    """The printed lines are those of one record, the others are means of a group; there is no further one."""
    text = (recorded.ROOT / page).read_text()
    groups, _ = published
    everything = (run for group in groups.values() for run in group)
    run = next(run for run in everything if re.search(rf"(record|记录) {run.record.id}\b", text))
    last = run.record.last
    shares = [
        f"{100 * share.accuracy:.1f} % ({100 * share.low:.1f}-{100 * share.high:.1f})"
        for share in (last.sampled, last.greedy)
    ]
    printed = [
        *(f"step {row['step'] + 1}/{run.record.steps}  reward {row['reward/mean']:.3f}  " for row in run.rows[-3:-1]),
        f"held-out accuracy after {last.step} steps: sampled {shares[0]}, greedy {shares[1]}, "
        f"n = {last.num_questions:,}\n",
        run.record.result + "\n",
    ]
    block = next(block for block in re.findall(r"^```\n(.*?)^```", text, re.M | re.S) if "held-out accuracy" in block)
    assert all(line in block for line in printed), (block, printed)

    def mean(name: str, when: str) -> str:
        return f"{100 * statistics.fmean(getattr(run.record, when).sampled.accuracy for run in groups[name]):.1f}"

    quoted = re.findall(r"([\d.]+) ?%", text.replace(block, ""))
    smol = [mean("smollm2", "first"), mean("smollm2", "last")]
    assert quoted == [mean("baseline", "first"), mean("baseline", "last"), mean("control", "last"), *smol]
    assert len(groups["baseline"]) == len(groups["control"]) == 5 and len(groups["smollm2"]) == 8  # as the text says


def test_a_design_is_planned_or_refused(capsys: pytest.CaptureFixture) -> None:
    assert run("plan", "--questions", "1319", "--seeds", "1", "--discordant", "0.2") == 0
    # By hand: sqrt(0.2 / 1319) = 1.231 points; x (1.960 + 0.842) = 3.45.
    text = capsys.readouterr().out
    assert "error 1.23 points" in text and "finds 3.5 points" in text and "these weights only" in text
    design = ["--questions=10", "--seeds=5", "--discordant=0.1", "--seed-spread=0.1", "--comparisons=2"]
    assert run("plan", *design) == 0
    capsys.readouterr()
    for change in ("questions=0", "discordant=nan", "seed-spread=-1"):
        assert run("plan", *design, f"--{change}") == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: --{change.split('=')[0]}: found") and said.count("\n") == 1


@pytest.mark.ci
def test_the_protocols_numbers_are_what_plan_prints(capsys: pytest.CaptureFixture) -> None:
    """docs/gsm8k_protocol.md: every row of its table of effects, computed again."""
    text = (recorded.ROOT / "docs" / "gsm8k_protocol.md").read_text().replace("**", "")
    rows = re.findall(r"^\| (\d) \| (\d+) %[^|]*\| ([\d.]+) \| ([\d.]+)", text, re.M)
    assert len(rows) == 4
    for seeds, discordant, spread, finds in rows:
        shares = (f"{float(points) / 100}" for points in (discordant, spread))
        design = zip(("--seeds", "--discordant", "--seed-spread"), (seeds, *shares), strict=True)
        assert run("plan", "--questions", "1319", *(word for pair in design for word in pair)) == 0
        assert f"finds {finds} points" in capsys.readouterr().out


# ---------------------------------------------------------------- the other commands


def test_add_names_the_record(tmp_path: Path) -> None:
    folder, places = recorded.make_run(tmp_path / "out", "tiny", questions=9), ["--results", str(tmp_path / "results")]
    assert run(*places, "add", str(folder), "--id", "mine") == 0 and (tmp_path / "results/mine.parquet").exists()
    assert run(*places, "add", str(folder), str(folder), "--id", "x") == 2


def test_rerun_prints_checkout_installation_and_command(places: list[str], capsys: pytest.CaptureFixture) -> None:
    assert run(*places, "rerun", "base-seed1") == 0
    text, record = capsys.readouterr().out, store.load_run(Path(places[1]), "base-seed1").record
    assert f"git worktree add --detach ../rerun-base-seed1 {record.commit}" in text
    assert "set_up cpu\n" in text and text.splitlines()[-2].endswith(f"OMP_NUM_THREADS=1 {record.command}")
    assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0
    config = {key: value for key, value in record.config.items() if key != "tiny_model"}
    inputs = record.inputs.model_copy(update={"model": {"smol_model.json": "0" * 64}})
    text = report.rerun_commands(record.model_copy(update={"config": config, "inputs": inputs}), Path(places[1]))
    assert f"set_up cpu smol\n.venv/bin/python smol_model.py {record.config['model']['path']}\n" in text
    assert "# put the model" not in text and " weights " not in text


def test_what_a_record_says_is_never_run_as_shell_text(places: list[str], tmp_path: Path) -> None:
    """Each planted text would make the file `ran`, were it not one quoted word."""
    record = store.load_run(Path(places[1]), "base-seed1").record
    planted = f"$(touch {tmp_path}/ran)`touch {tmp_path}/ran`;touch {tmp_path}/ran\ntouch {tmp_path}/ran #"
    variables = {"OMP_NUM_THREADS": planted, f"OMP_X;touch {tmp_path}/ran;Y": "1"}
    environment = record.environment.model_copy(update={"variables": variables, "python": f"3.{planted}"})
    command = f"echo ran: $HOME/model '$HOME/a b' \\$PATH; touch {tmp_path}/ran"
    config = {key: value for key, value in record.config.items() if key != "tiny_model"}
    config["model"] = record.config["model"] | {"path": planted}
    text = report.rerun_commands(
        record.model_copy(update={"environment": environment, "command": command, "config": config}), Path(places[1])
    )
    last_lines = text[text.index("PYTHON=") :].replace("source ./setup_cpu.sh\nset_up cpu", "")
    done = subprocess.run(
        ["bash", "-c", "set -euo pipefail\n" + text[text.index("# put") : text.index("PYTHON=")] + last_lines],
        capture_output=True, text=True, cwd=tmp_path, env={"HOME": "/at home", "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert not (tmp_path / "ran").exists()
    assert done.stdout == f"ran: /at home/model /at home/a b $PATH; touch {tmp_path}/ran\n", (text, done)
    with pytest.raises(InputError, match="base-seed1: command: .* is no command line"):
        report.rerun_commands(record.model_copy(update={"command": "torchrun 'train_grpo.py"}), Path(places[1]))


def test_rerun_executes_what_it_prints_and_compares(places, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(report, "ROOT", tmp_path / "checkout")
    report.ROOT.mkdir()
    for luck, said, code in ((None, "same: ", 0), (7, "different, and it should not be", 1)):
        made = recorded.make_run(tmp_path / said, "base-seed1", 1, 0.4, luck=luck, questions=40)
        commands = f"rm -rf ../rerun-*; mkdir ../rerun-base-seed1; cp -r '{made.parent}' ../rerun-base-seed1/out"
        monkeypatch.setattr(report, "rerun_commands", lambda record, results, commands=commands: commands)
        assert run(*places, "rerun", "base-seed1", "--run") == code and said in capsys.readouterr().out
    monkeypatch.setattr(report, "rerun_commands", lambda record, results: "exit 5")
    assert run(*places, "rerun", "base-seed1", "--run") == 5


def test_compare_gives_intervals_for_groups(places: list[str], capsys: pytest.CaptureFixture) -> None:
    assert run(*places, "compare", "base", "better") == 0
    text = capsys.readouterr().out
    assert "different: better is better" in text and "3 paired seeds x 40 questions" in text
    assert run(*places, "compare", "base", "better", "--kind", "greedy") == 0 and "greedy" in capsys.readouterr().out
    assert run(*places, "compare", "base", "base") == 2 and run(*places, "compare", "base", "nobody") == 2
