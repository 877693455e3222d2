"""RESULTS.md follows from the records, and --check notices when it does not; the commands do what they say."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import recorded
from PIL import Image, PngImagePlugin

import report
from input_files import InputError
from lab import audit, pages, records, store

TEXT = "# Results\n\nWritten by people.\n\n{}\n\n{}\n\nAlso by people.\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two variants of three seeds, recorded and built."""
    folder = tmp_path_factory.mktemp("project")
    for name, after, change in (("base", 0.5, ()), ("better", 0.9, ("lora.rank=8",))):
        for seed in range(3):
            made = recorded.make_run(folder / "out", f"{name}-seed{seed}", seed, after, overrides=change)
            store.add_run(made, folder / "results")
    (folder / "results" / "plan.yaml").write_text(
        "gains: [base]\n"
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


def all_records(results: Path) -> list[records.Record]:
    return [run.record for runs in store.load_groups(results).values() for run in runs]


def test_every_number_of_the_pages_is_a_records(places: list[str], tmp_path: Path) -> None:
    text, table = ((tmp_path / name).read_text() for name in ("RESULTS.md", "results/README.md"))
    for page in (text, table):
        assert page.startswith("# Results\n\nWritten by people.") and page.endswith("Also by people.\n")
    known = all_records(tmp_path / "results")
    for record in known:
        (row,) = re.findall(rf"^\| {record.id} \|.*$", table, re.M)
        low, high = 100 * record.last.sampled.low, 100 * record.last.sampled.high
        assert f"{100 * record.last.sampled.accuracy:.1f} ({low:.1f}-{high:.1f})" in row
        assert f"`{record.commit[:7]}`" in row and f"{record.seconds_per_step:.2f}" in row
    before, after = (
        statistics.fmean(100 * getattr(one, when).sampled.accuracy for one in known if one.group == "base")
        for when in ("first", "last")
    )
    assert f"200 held-out questions: {before:.1f} % before and {after:.1f} % after 4 steps (3 seeds)" in text
    assert "different: better is better" in text
    missing = text.split("## Not run yet")[1]
    assert "| A big model | `torchrun big` | later |" in missing and "missing: absent" in missing
    assert "The base" not in missing and "No record yet of a run on a GPU or an NPU." in text
    for figure in ("learning_curve", "better-or-not"):
        assert f"results/figures/{figure}.png" in text
        assert (tmp_path / "results" / "figures" / f"{figure}.png").read_bytes()[1:4] == b"PNG"


def test_without_scipy_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert run("plan", "--questions", "1319", "--seeds", "5", "--discordant", "0.25") == 2
    needed = "pip install --no-deps -r requirements/report.txt"
    assert capsys.readouterr().err == f"error: report.py: scipy is not installed; needed: {needed}\n"


@pytest.mark.parametrize("content", [None, "file", "folder", "plan", "pages"])
@pytest.mark.parametrize("command", ["build", "--check"])
def test_nothing_is_written_from_a_folder_without_records(content: str | None, command: str, tmp_path, capsys) -> None:
    """Otherwise a mistyped --results would replace all that was found with nothing."""
    results, page = tmp_path / "results", tmp_path / "RESULTS.md"
    if content == "file":
        results.write_text("{}")
    elif content:
        results.mkdir()
    if content == "plan":
        shutil.copy(recorded.ROOT / "results" / "plan.yaml", results)
    if content == "pages":
        (results / "README.md").write_text(TEXT.format(pages.BEGIN, pages.END))
    page.write_text(written := TEXT.format(f"{pages.BEGIN}\n\nfound: 1 of 2", pages.END))
    before = sorted(tmp_path.rglob("*"))
    assert run("--results", str(results), "--page", str(page), command) == 2
    assert capsys.readouterr().err.startswith(f"error: {results}: no records; needed: the folder that report.py add ")
    assert page.read_text() == written and sorted(tmp_path.rglob("*")) == before


def test_a_benchmark_is_kept_as_it_was_printed(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stored = tmp_path / "bench_step.json"
    rows = [{"case": "small", "ratio": 0.51234, "bar": 0.7}, {"case": "large", "ratio": 12.0, "bar": 0.7}]
    content = {"about": "Ours against theirs.", "command": "python benchmarks/bench_step.py", "commit": "ab" * 20,
               "machine": {"cpu": "AMD EPYC", "cores": 2}, "table": rows, "measured": {"cases": []}}  # fmt: skip
    for spoilt, needed in (
        ({"dirty": True}, "git status clean"),
        ({}, "dirty"),
        ({"dirty": False, "table": []}, "table"),
    ):
        stored.write_text(json.dumps(content | spoilt))
        assert run(*places, "add", str(stored)) == 2 and needed in capsys.readouterr().err
    stored.write_text(json.dumps(content | {"dirty": False}))
    assert run(*places, "add", str(stored)) == 0 and run(*places, "--check") == 1
    assert run(*places, "build") == 0 and run(*places, "--check") == 0
    text = (tmp_path / "RESULTS.md").read_text()
    assert "### bench_step\n\nOurs against theirs. `python benchmarks/bench_step.py`, commit `abababa`" in text
    table = "| case | ratio | bar |\n| --- | --- | --- |\n| small | 0.5123 | 0.7 |\n| large | 12 | 0.7 |"
    assert table in text and "Earlier" not in text
    (kept,) = store.load_benchmarks(tmp_path / "results").values()
    assert kept.model_dump(exclude={"place"}) == content | {"dirty": False}


def test_a_page_shows_a_benchmarks_newest_measurement_and_links_those_before(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    stored = tmp_path / "bench_step.json"

    def add(commit: str, ratio: float, *more: str) -> int:
        stored.write_text(json.dumps({
            "about": "Ours against theirs.", "command": "python benchmarks/bench_step.py --steps 8", "dirty": False,
            "commit": commit * 40, "machine": {}, "table": [{"case": "small", "ratio": ratio}], "measured": {},
        }))  # fmt: skip
        return run(*places, "add", str(stored), *more)

    assert add("a", 0.61) == add("b", 0.52) == add("c", 0.43, "--id", "after_a_change") == 0
    assert add("c", 0.43) == 0 and len(store.load_benchmarks(tmp_path / "results")) == 3  # it is there already
    assert add("c", 0.43, "--id", "x") == 2 and "is after_a_change already" in capsys.readouterr().err
    assert add("d", 0.34, "--id", "bench_step-2") == 2 and "never replaced" in capsys.readouterr().err
    assert run(*places, "build") == 0
    text = (tmp_path / "RESULTS.md").read_text()
    assert text.count("### bench_step") == 1 and "| small | 0.43 |" in text and "0.61" not in text
    assert "Earlier: bench_step at `aaaaaaa`, bench_step-2 at `bbbbbbb`." in text
    assert run(*places, "compact", "benchmarks", "bench_step", "after") == 0 and run(*places, "--check") == 0


def check_record(check: str, totals: dict, commit: str = "a") -> str:
    """The content of a file of benchmarks/check_ascend.py."""
    measured = {"check": check, "shows": f"what {check} runs", "date": "2026-11-22", "totals": totals}
    return json.dumps({
        "about": "A check.", "command": f"python benchmarks/check_ascend.py {check} DIR", "commit": commit * 40,
        "dirty": False, "machine": {}, "table": [{"test": "one", "passed": 1}], "measured": measured,
    })  # fmt: skip


def test_the_table_of_checks_has_the_newest_record_of_each_check(places: list[str], tmp_path: Path, capsys) -> None:
    """Each check has its own newest record, although one script writes them all; another benchmark is no check."""
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "npu.md"
    page.write_text(TEXT.format(pages.BEGIN, pages.END))
    assert run(*places, "build") == 0 and f"{pages.BEGIN}\n\nNo record yet.\n\n{pages.END}" in page.read_text()

    def add(name: str, content: str) -> None:
        (tmp_path / name).write_text(content)
        assert run(*places, "add", str(tmp_path / name)) == 0 and run(*places, "--check") == 1
        assert "npu.md: stale" in capsys.readouterr().err
        assert run(*places, "build") == 0 and run(*places, "--check") == 0

    add("one.json", check_record("one", {"A 1": {"passed": 2, "failed": 1, "skipped": 0}}))
    add("two.json", check_record("two", {"C 5": {"passed": 9, "failed": 0, "skipped": 0}}))
    both = {"A 2": {"passed": 3, "failed": 0, "skipped": 4}, "B 7": {"passed": 5, "failed": 0, "skipped": 0}}
    add("one.json", check_record("one", both, "b"))
    record = "one-2, 2026-11-22, commit `bbbbbbb`"
    text = page.read_text()
    assert [line for line in text.splitlines() if line.startswith("| ")][2:] == [
        f"| one | what one runs | A 2 | 3 passed, 4 skipped | {record} |",
        f"| one | what one runs | B 7 | 5 passed | {record} |",
        "| two | what two runs | C 5 | 9 passed | two, 2026-11-22, commit `aaaaaaa` |",
    ]
    assert (tmp_path / "results" / "README.md").read_text().count("### check_ascend ") == 2
    page.write_text(text.replace("9 passed", "10 passed"))
    assert run(*places, "--check") == 1 and "npu.md: stale: 2 lines differ" in capsys.readouterr().err


def test_layouts_of_one_method_are_compared_step_by_step(tmp_path: Path) -> None:
    """Equal luck makes equal metrics; another luck other rewards from the first step on."""
    for name, luck, change in (
        ("two", 1, ()),
        ("one", 1, ("parallel.expert=1",)),
        ("four", 2, ("parallel.tensor=2",)),
        ("method", 1, ("parallel.expert=1", "lora.rank=8")),
    ):
        for seed in range(3):
            made = recorded.make_run(tmp_path, f"{name}-seed{seed}", seed, luck=luck, overrides=change)
            store.add_run(made, tmp_path / "results")
    groups = store.load_groups(tmp_path / "results")

    def first(name: str) -> float:
        return groups[name][0].rows[0]["reward/mean"]

    text = pages.step_by_step(groups["two"], {name: groups[name] for name in ("one", "four")})
    assert "| one | 0.0e+00 | 0.0e+00 | never, never, never |" in text
    loss, norm = abs(first("four") - first("two")) / 10, abs(first("four") / first("two") - 1)
    assert f"| four | {loss:.1e} | {norm:.1e} | 1, 1, 1 |" in text
    assert pages.step_by_step(groups["two"], {name: groups[name] for name in ("one", "method")}) == ""


def test_building_twice_changes_nothing(places: list[str], tmp_path: Path) -> None:
    def everything() -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    once = everything()
    assert run(*places, "build") == 0 and everything() == once
    for path in (tmp_path / "results" / "figures").iterdir():
        path.unlink()
    assert run(*places, "build") == 0 and everything() == once  # drawn anew: the same bytes


def edit(path: str, old: str, new: str):
    def change(folder: Path) -> None:
        text = (folder / path).read_text()
        assert old in text
        (folder / path).write_text(text.replace(old, new, 1))

    return change


def another_record(folder: Path) -> None:
    store.add_run(recorded.make_run(folder / "more", "new-seed0"), folder / "results")


def redrawn(folder: Path) -> None:
    """A figure is drawn on, and the data that it was drawn from stay in its metadata."""
    path, about = folder / "results/figures/better-or-not.png", PngImagePlugin.PngInfo()
    image = Image.open(path)
    about.add_text("Description", image.info["Description"])
    image.putpixel((200, 100), (image.getpixel((200, 100)) + 1) % 64)
    image.save(path, pnginfo=about)


FAULTS = {
    "RESULTS.md: stale": edit("RESULTS.md", "different: better is better", "different: better is far better"),
    "README.md: stale": edit("results/README.md", "| base |", "| baste |"),
    "stale: ": another_record,
    "environment.json: the record does not give": lambda folder: recorded.rewrite(
        folder / "results/better-seed1.parquet", lambda record: record["environment"].update(cpu="Apple M9")
    ),
    "better-or-not.png: missing": lambda folder: (folder / "results/figures/better-or-not.png").unlink(),
    "better-or-not.png: missing, edited": redrawn,
    "learning_curve.png: missing, edited, stale or not wanted": edit(
        "results/plan.yaml", "base: base, others: [better]", "base: better, others: [base]"
    ),
    "old.png: missing, edited, stale or not wanted": lambda folder: figure(folder, "old"),
}


def figure(folder: Path, name: str) -> None:
    """A figure that `build` has drawn and that no comparison needs."""
    shutil.copy(folder / "results/figures/better-or-not.png", folder / f"results/figures/{name}.png")


@pytest.mark.parametrize("fault", FAULTS)
def test_check_fails_when_something_does_not_follow(
    places: list[str], tmp_path: Path, fault: str, capsys: pytest.CaptureFixture
) -> None:
    assert run(*places, "--check") == 0
    FAULTS[fault](tmp_path)
    assert run(*places, "--check") == 1
    assert fault in capsys.readouterr().err


def test_nothing_is_built_on_records_that_were_tampered_with(places: list[str], tmp_path: Path) -> None:
    before = (tmp_path / "RESULTS.md").read_text()
    FAULTS["environment.json: the record does not give"](tmp_path)
    assert run(*places, "build") == 2 and (tmp_path / "RESULTS.md").read_text() == before


@pytest.mark.parametrize(
    "plan", ["[1]", "comparisons: x", "comparisons: [x]", "comparisons: [null]", "comparisons: [{title: a, sweep: 5}]"]
)
def test_a_plan_that_is_none_is_refused_in_one_line(plan: str, places: list[str], tmp_path: Path, capsys) -> None:
    (tmp_path / "results" / "plan.yaml").write_text(plan)
    for command in ("build", "--check"):
        assert run(*places, command) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: {tmp_path}/results/plan.yaml: ") and said.count("\n") == 1


@pytest.mark.parametrize("text", ["no markers", f"{pages.BEGIN}", f"{pages.END} {pages.BEGIN}"])
def test_a_page_without_markers_is_left_alone(project: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(project / "results", tmp_path / "results")
    (tmp_path / "RESULTS.md").write_text(text)
    with pytest.raises(InputError, match="once each"):
        pages.build(tmp_path / "results", tmp_path / "RESULTS.md")
    assert (tmp_path / "RESULTS.md").read_text() == text


def test_the_repositorys_own_records_and_page_agree() -> None:
    results = recorded.ROOT / "results"
    assert store.check(results) == [] == pages.stale(results, recorded.ROOT / "RESULTS.md")
    assert audit.faults(results)[0] == []


def test_every_metric_of_a_run_is_in_the_glossary() -> None:
    """docs/metrics.md explains what the source logs; `/name` after another metric belongs to the same section."""
    glossary = (recorded.ROOT / "docs" / "metrics.md").read_text()
    explained = set()
    for cell in re.findall(r"^\| (`.*?`) \|", glossary, re.M):
        section = ""
        for name in re.findall(r"`([^`]+)`", cell):
            section = name.split("/")[0] or section
            explained.add(f"{section}/{name.split('/')[1]}")
    sections = "reward|response_length|actor|rollout|aqn|replay|sync|timing|perf|eval"
    logged = set()
    for path in recorded.ROOT.glob("*.py"):
        logged |= set(re.findall(rf'"((?:{sections})/[a-z_]+)"(?: ?:|\] = )', path.read_text()))
    assert len(logged) > 20 and logged <= explained, logged - explained


def test_numbers_of_the_written_part_are_those_of_the_records() -> None:
    """RESULTS.md: what the runs can and cannot say, and what did not work."""
    text = " ".join((recorded.ROOT / "RESULTS.md").read_text().split(pages.END)[1].split())
    groups = store.load_groups(recorded.ROOT / "results")
    made, rollout = (groups["baseline"][0].record.config[section] for section in ("tiny_model", "rollout"))
    assert f"{made['num_experts']} experts ({made['experts_per_token']} per token)" in text and made["num_layers"] == 2
    assert f"a hidden size of {made['hidden_size']}" in text and 4 * 16 == made["hidden_size"]  # rank 4: a sixteenth
    last = groups["baseline"][0].record.last
    steps = f"{last.step} steps of {rollout['prompts_per_step']} prompts x {rollout['group_size']} completions"
    assert steps in text and f"The {last.num_questions:,} held-out questions" in text
    rank_4 = [run.record.last.sampled.accuracy for run in groups["lora_rank_4"]]
    assert f"one of its five seeds stayed at {100 * min(rank_4):.1f} %" in text and len(rank_4) == 5
    assert "answers of about 15 tokens" in text
    quiet, apart = 0, []
    families = {name for entry in pages.announced.read_plan(recorded.ROOT / "results").comparisons if entry.family
                for name in entry.names} | {"smol", "smol_control"}  # fmt: skip
    for run in [run for name, runs in groups.items() for run in runs if name not in families]:
        assert round(run.steps["response_length/mean"].mean()) == 15 or run.record.group == "control"
        noisy = run.steps.get("aqn/sigma", run.steps["reward/mean"] * 0).any()
        if not noisy and run.record.config["model"]["dtype"] == "fp32":
            quiet, gaps = quiet + 1, run.steps["rollout/logp_gap_max"]
            apart += [gaps[gaps > 6e-5].tolist()] if (gaps > 6e-5).any() else []
    assert f"In {len(apart)} of the {quiet} fp32 runs without noise, one step has a token" in text
    assert all(len(gaps) == 1 for gaps in apart) and "differ by 1e-4 to 0.1 nats" in text
    assert min(apart)[0] >= 1e-4 and round(max(apart)[0], 1) == 0.1
    assert groups["control"][0].record.config["reward"]["permute"] is True


def test_what_was_learned_is_what_the_records_say() -> None:
    """RESULTS.md begins with it: numbered sentences, best first."""
    results = recorded.ROOT / "results"
    text = (recorded.ROOT / "RESULTS.md").read_text()
    items = re.split(r"\n\d\. ", text.split("## What was learned")[1].split(pages.BEGIN)[0])[1:]
    groups, plan = store.load_groups(results), pages.announced.read_plan(results)
    ready = pages.announced.compared(plan, groups)
    effect = {one.other: f"{100 * one.effect.mean:.1f}" for found in ready.values() for one in found}
    gap = {name: statistics.fmean(run.steps["rollout/logp_gap_mean"][: run.record.steps].mean() for run in groups[name])
           for name in ("quantised_int4_aqn", "bench_int4")}  # fmt: skip
    smol = [100 * run.record.last.sampled.accuracy for run in groups["smol"]]
    before = statistics.fmean(100 * run.record.first.sampled.accuracy for run in groups["smol"])
    quantised = max(abs(float(effect[f"quantised_{name}"])) for name in ("int8", "int4", "nvfp4"))
    aqn = [name for name in effect if "aqn" in name]
    wanted = [
        [effect[f"bench_int3{name}"].lstrip("-") for name in ("", "_sequence", "_token", "_icepop")]
        + [effect["bench_int3_r3"]],
        [effect["bench_int4"].lstrip("-"), effect["rounding_int4"]],
        [effect["bench_8"], effect["bench_16"], effect["bench_8_gspo"], effect["bench_8_cispo"].lstrip("-")],
        [effect["control"].lstrip("-")],
        ["0.2"],
        [f"{gap['quantised_int4_aqn']:.4f}", f"{gap['bench_int4']:.3f}"],
        ["0.4"],
        [f"{before:.1f}", f"{statistics.fmean(smol):.1f}", effect["smol_control"]],
    ]
    assert [re.findall(r"-?\d+\.\d+", item) for item in items] == wanted
    assert max(abs(float(effect[f"layout_{ranks}"])) for ranks in (1, 4)) <= 0.2 and quantised <= 0.4
    assert f"between {min(smol):.0f} % and {max(smol):.0f} %" in items[-1]
    found = {one.other: one for each in ready.values() for one in each}
    assert len(aqn) == 11 and not any(found[name].direction and not found[name].equal for name in aqn)
    for sentence in re.split(r"(?<=[.:])\s", " ".join(" ".join(items).split())):
        assert len(sentence.split()) <= 40, sentence


def test_no_bullet_of_the_results_is_long() -> None:
    for bullet in re.findall(r"^- (?:.*\n)(?:  .*\n)*", (recorded.ROOT / "RESULTS.md").read_text(), re.M):
        assert len(bullet) <= 300, bullet


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_every_percentage_of_the_readme_is_a_records(page: str) -> None:
    """The printed lines are those of one record, the others are means of a group; there is no further one."""
    text = (recorded.ROOT / page).read_text()
    groups = store.load_groups(recorded.ROOT / "results")
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
    lines = block.splitlines(keepends=True)
    assert len(lines) == len(printed) and all(map(str.startswith, lines, printed)), (lines, printed)

    def mean(name: str, when: str) -> str:
        return f"{100 * statistics.fmean(getattr(run.record, when).sampled.accuracy for run in groups[name]):.1f}"

    quoted = re.findall(r"([\d.]+) ?%", text.replace(block, ""))
    smol = [mean("smol", "first"), mean("smol", "last"), mean("smol_control", "last")]
    assert quoted == [mean("baseline", "first"), mean("baseline", "last"), mean("control", "last"), *smol]
    assert len(groups["baseline"]) == len(groups["control"]) == 5  # "means of five seeds"


@pytest.mark.parametrize(
    "change", ["questions=0", "seeds=0", "discordant=0", "discordant=nan", "seed-spread=-1", "comparisons=0"]
)
def test_a_design_that_is_none_is_refused(change: str, capsys: pytest.CaptureFixture) -> None:
    design = ["--questions=10", "--seeds=5", "--discordant=0.1", "--seed-spread=0.1", "--comparisons=2"]
    assert report.main(["plan", *design]) == 0
    capsys.readouterr()
    assert report.main(["plan", *design, f"--{change}"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --{change.split('=')[0]}: found") and said.count("\n") == 1


def test_the_protocols_numbers_are_what_plan_prints(capsys: pytest.CaptureFixture) -> None:
    """docs/gsm8k_protocol.md: every row of its table of effects, computed again."""
    text = (recorded.ROOT / "docs" / "gsm8k_protocol.md").read_text().replace("**", "")
    rows = re.findall(r"^\| (\d) \| (\d+) %[^|]*\| ([\d.]+|not measurable) \| ([\d.]+)", text, re.M)
    assert len(rows) == 7
    for seeds, discordant, spread, finds in rows:
        points = "0" if spread == "not measurable" else spread
        design = [
            "--seeds",
            seeds,
            "--discordant",
            f"{int(discordant) / 100}",
            "--seed-spread",
            f"{float(points) / 100}",
        ]
        assert run("plan", "--questions", "1319", *design) == 0
        assert f"finds {finds} points" in capsys.readouterr().out


# ---------------------------------------------------------------- the other commands


def test_add_names_the_record_and_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = recorded.make_run(tmp_path / "out", "tiny")
    places = ["--results", str(tmp_path / "results")]
    assert run(*places, "add", str(folder), "--id", "mine") == 0 and (tmp_path / "results/mine.parquet").exists()
    assert run(*places, "add", str(folder), "--id", "mine") == 0  # the same run: nothing is left to do
    other = recorded.make_run(tmp_path / "out", "other")
    capsys.readouterr()
    assert run(*places, "add", str(other), "--id", "mine") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert run(*places, "add", str(folder), str(folder), "--id", "x") == 2


def test_rerun_prints_checkout_installation_and_command(places: list[str], capsys: pytest.CaptureFixture) -> None:
    assert run(*places, "rerun", "base-seed1") == 0
    text = capsys.readouterr().out
    record = store.load_run(Path(places[1]), "base-seed1").record
    assert f"git worktree add --detach ../rerun-base-seed1 {record.commit}" in text
    assert "set_up cpu\n" in text and text.splitlines()[-2].endswith(f"OMP_NUM_THREADS=1 {record.command}")
    assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0


def test_rerun_makes_the_model_of_a_package_again(places: list[str]) -> None:
    record = store.load_run(Path(places[1]), "base-seed1").record
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


@pytest.mark.parametrize(("luck", "said", "code"), [(None, "same: ", 0), (7, "different, and it should not be", 1)])
def test_rerun_executes_what_it_prints_and_compares(
    places: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    luck: int | None,
    said: str,
    code: int,
) -> None:
    made = recorded.make_run(tmp_path / "made", "base-seed1", 1, 0.5, luck=luck)
    monkeypatch.setattr(report, "ROOT", tmp_path / "checkout")
    report.ROOT.mkdir()
    monkeypatch.setattr(
        report,
        "rerun_commands",
        lambda record, results: f"mkdir -p ../rerun-{record.id}; cp -r {made.parent} ../rerun-{record.id}/out",
    )
    assert run(*places, "rerun", "base-seed1", "--run") == code and said in capsys.readouterr().out
    monkeypatch.setattr(report, "rerun_commands", lambda record, results: "exit 5")
    assert run(*places, "rerun", "base-seed1", "--run") == 5


def test_compare_says_same_for_a_repeat_and_intervals_for_groups(
    places: list[str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    again = recorded.make_run(tmp_path / "again", "base-seed0", 0, 0.5)
    assert run(*places, "compare", "base-seed0", str(again)) == 0
    assert capsys.readouterr().out.startswith("same: ")
    assert run(*places, "compare", "base", "better") == 0
    text = capsys.readouterr().out
    assert "different: better is better" in text and "3 paired seeds x 200 questions" in text
    assert run(*places, "compare", "base", "better", "--kind", "greedy") == 0 and "greedy" in capsys.readouterr().out
    assert run(*places, "compare", "base", "base") == 2 and run(*places, "compare", "base", "nobody") == 2


def test_plan_prints_what_a_design_can_see(capsys: pytest.CaptureFixture) -> None:
    assert run("plan", "--questions", "1319", "--seeds", "1", "--discordant", "0.2") == 0
    # By hand: sqrt(0.2 / 1319) = 1.231 points; x (1.960 + 0.842) = 3.45.
    text = capsys.readouterr().out
    assert "error 1.23 points" in text and "finds 3.5 points" in text and "these weights only" in text


def test_the_commands_need_no_torch() -> None:
    """On a laptop with requirements/report.txt alone."""
    code = "import sys; sys.modules['torch'] = None; import report, sweep; print(report.__doc__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=recorded.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_only_figures_that_it_has_drawn_are_removed(places: list[str], tmp_path: Path) -> None:
    theirs = tmp_path / "results/figures/theirs.png"
    Image.new("RGB", (9, 9)).save(theirs)
    assert run(*places, "--check") == 0 == run(*places, "build") and theirs.exists()


def test_a_figure_that_nothing_needs_any_more_is_removed(places: list[str], tmp_path: Path) -> None:
    figure(tmp_path, "old")
    assert run(*places, "build") == 0 and run(*places, "--check") == 0
    assert not (tmp_path / "results/figures/old.png").exists()


def test_check_says_what_it_compared(places: list[str], capsys) -> None:
    assert run(*places, "--check") == 0
    assert "records, pages and figures agree; no git history to compare with" in capsys.readouterr().out


def test_results_is_one_page(project: Path) -> None:
    assert len((recorded.ROOT / "RESULTS.md").read_text().splitlines()) <= 150
