"""The page about a run is one file that opens without a network and shows what the run folder holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pandas
import pytest
import recorded
from matplotlib.image import imread

import report
from input_files import InputError
from lab import figures, run_page, store

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
VOID = {"meta", "input", "br"}


class Outline(HTMLParser):
    """Elements that are opened and closed in order, what they refer to, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.references: list[str] = []
        self.scripts: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]
        self.ids += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded.make_run(tmp_path / "out", "base-seed0", checks={"entropy": "step 2: <low>"}, questions=20)


@pytest.fixture
def sweep_folder(tmp_path: Path, run: Path) -> Path:
    """As sweep.py leaves it: two seeds and a variant, the runs beside it, their paths seen from the checkout."""
    folder = run.parent / "sweep-x"
    folder.mkdir()
    jobs = {"absent-seed0": {"state": "failed", "attempts": 2, "run": "", "result": "error: <no>"}}
    for name, seed in (("base", 0), ("base", 1), ("other", 0)):
        made = run if (name, seed) == ("base", 0) else recorded.make_run(run.parent, f"{name}-seed{seed}", seed)
        found = {"state": "finished", "attempts": 1, "run": f"out/{made.name}", "result": "done"}
        jobs[f"{name}-seed{seed}"] = found
    (folder / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    return folder


def test_the_page_parses_and_refers_to_nothing_outside(run: Path, sweep_folder: Path) -> None:
    for folder in (run, sweep_folder):
        text = run_page.page(folder)
        found = Outline(text)
        assert all(
            reference.startswith("#") for reference in found.references
        )  # the marks of points, in the page itself
        assert not re.search(r"https?://|url\((?!#)|@import|fetch\(|XMLHttp|//\w+\.\w+/", text)
        (svg,) = re.findall(r"<svg.*?</svg>", text, re.S)
        assert len(axes(svg)) == 9 and set(found.references) <= {f"#{name}" for name in found.ids}


def axes(svg: str) -> dict[str, ElementTree.Element]:
    """Label of the vertical axis -> panel."""
    panels = [group for group in ElementTree.fromstring(svg).iter("g") if group.get("id", "").startswith("axes_")]
    return {[text.text for text in panel.iter("text")][-1]: panel for panel in panels}


def strokes(panel: ElementTree.Element) -> list[tuple[str, float, list[tuple[float, float]]]]:
    """Color, width and points of each line of a panel, without its frame, ticks and grid."""
    found = []
    for group in panel:
        path = group.find("path")
        if path is not None and group.get("id", "").startswith("line2d_") and "stroke:" in path.get("style", ""):
            color, width = (re.search(rf"{key}: ([^;]+)", path.get("style")) for key in ("stroke", "stroke-width"))
            numbers = re.findall(r"[ML] ([-\d.]+) ([-\d.]+)", path.get("d") or "")
            found.append((color[1], float(width[1]) if width else 1.0, [(float(x), float(y)) for x, y in numbers]))
    return found


def test_what_the_policy_wrote_is_text_and_never_markup(run: Path) -> None:
    """The completions hold "</script>" and "<b>": a model writes what it likes."""
    text = run_page.page(run)
    (data, script) = Outline(text).scripts
    shown = json.loads(data)
    assert [step["step"] for step in shown] == [0, 1, 2, 3]
    assert (
        shown[2]["answers"][0] == {"text": "</script>#### 2", "reward": 0} and shown[0]["question"] == "1 + 1 <b>?</b>"
    )
    assert "<b>" not in text and "<low>" not in text and "&lt;low&gt;" in text and "textContent" in script


def test_slowest_longest_checks_questions_and_configuration_are_there(run: Path) -> None:
    text = run_page.page(run)
    slowest = text.split("Slowest steps")[1].split("</table>")[0]
    assert re.findall(r"<tr>\s*<td>(\d+)", slowest) == ["4", "3", "2", "1"]  # 0.5 s + 0.1 s a step
    longest = text.split("Longest")[1].split("</table>")[0]
    assert re.findall(r"<tr>\s*<td>(\d+)</td>\s*<td>(\d+)", longest)[:3] == [("4", "9"), ("3", "8"), ("4", "8")]
    cells = text.split("Reward by question")[1]
    outcomes = [json.loads(line) for line in (run / "eval_outcomes.jsonl").read_text().splitlines()]
    assert len(re.findall("<i ", cells)) == len(outcomes) == 40
    right = sum(row["sampled"][0] for row in outcomes)
    assert len(re.findall(r"hsl\(120 ", cells)) == right
    assert "prompts_per_step: 32" in text and "entropy" in text.split("Checks")[1] and "torchrun --nnodes=1" in text


def test_a_sweep_shows_every_job_and_lays_the_runs_over_each_other(sweep_folder: Path) -> None:
    text = run_page.page(sweep_folder)
    assert "error: &lt;no&gt;" in text and text.count("base-seed0") == 2
    (svg,) = re.findall(r"<svg.*?</svg>", text, re.S)
    lines = strokes(axes(svg)["reward/mean"])
    thin = [color for color, width, _ in lines if width < 1]
    thick = [color for color, width, _ in lines if width > 1]
    assert len(thin) == 3 and len(thick) == 2 and thin[0] == thin[1] == thick[0] != thin[2] == thick[1]
    legend = [text.text for text in ElementTree.fromstring(svg).iter("text")][-2:]
    assert legend == ["base", "other"]


def drawn(values: list[float | None], key: str = "x") -> ElementTree.Element:
    """The panel of one run with these values."""
    series = pandas.Series(values, dtype=float)
    return next(iter(axes(figures.svg({key: {"a": [series]}})).values()))


@pytest.mark.parametrize(
    ("values", "moves", "dots"),
    [([1, None, 3, 4], 1, 1), ([5, 5], 1, 0), ([None, 2, None], 0, 1), ([None], 0, 0)],
)
def test_a_curve_has_gaps_where_nothing_was_measured(values: list, moves: int, dots: int) -> None:
    """A line is a pen that moves and draws; a value between two gaps is a dot."""
    panel = drawn(values)
    for path in panel.iter("path"):
        if "stroke-width: 0.7" in path.get("style", ""):
            assert len(re.findall("M", path.get("d") or "")) == moves + dots
    marks = [use for group in panel if group.get("id", "").startswith("line2d_") for use in group.iter("use")]
    assert len(marks) == dots and "nan" not in ElementTree.tostring(panel, "unicode").lower()


def test_a_logarithmic_curve_spaces_decades_evenly_and_has_ticks() -> None:
    panel = drawn([1e-8, 1e-7, 1e-6, 0.0], "rollout/logp_gap_mean")
    heights = [y for _, y in strokes(panel)[0][2]]
    assert len(heights) == 3 and heights[0] - heights[1] == pytest.approx(heights[1] - heights[2], abs=0.11)
    ticks = [text.text for text in panel.iter("text")]
    assert {"1e-08", "1e-07", "1e-06"} <= set(ticks)


def test_a_thick_line_is_the_running_mean_and_evaluations_have_no_line() -> None:
    noisy = strokes(drawn([0.0, 1.0] * 40))
    spread = [max(y for _, y in points) - min(y for _, y in points) for _, _, points in noisy]
    assert len(noisy) == 2 and spread[1] < spread[0] / 2 and noisy[1][1] > noisy[0][1]
    assert not any(len(points) > 1 for _, _, points in strokes(drawn([0.3, 0.9], "eval/sampled_accuracy")))


def test_a_name_is_never_a_formula() -> None:
    assert "$x^{" in figures.svg({"x": {"$x^{": [pandas.Series([1.0, 2.0])], "b": [pandas.Series([1.0, 2.0])]}})


def test_a_record_has_the_page_of_its_run(run: Path, tmp_path: Path, monkeypatch) -> None:
    text = run_page.page(store.add_run(run, tmp_path / "results").with_suffix(""))
    assert "arithmetic accuracy 30.0 %" in text and "prompts_per_step: 32" in text and "torchrun --nnodes=1" in text
    assert len(re.findall("<i ", text)) == 40 and "&lt;low&gt;" in text and "Slowest steps" in text
    monkeypatch.chdir(tmp_path)
    assert report.main(["html", "results/base-seed0"]) == 0 and (tmp_path / "base-seed0.html").read_text() == text


def test_the_curves_of_a_run_are_not_blank(run: Path) -> None:
    """Every panel has a curve, and a value that is not finite has its mark."""
    path = run / "metrics.jsonl"
    lost = '"nonfinite": ["actor/entropy"], "actor/entropy": null'
    path.write_text(path.read_text().replace('"actor/entropy": 0.5', lost))
    run_page.draw_curves(run)
    picture = imread(run / "curves.png")[..., :3]
    rows, columns = picture.shape[0] // 3, picture.shape[1] // 3
    for row in range(3):
        for column in range(3):
            window = picture[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            assert (window[..., 2] - window[..., 0] > 0.3).sum() > 5, "blue"
            red = (window[..., 0] - window[..., 2] > 0.5).sum()
            assert (red > 5) == ((row, column) == (1, 0)), "a mark in the panel of the entropy alone"


def test_the_command_writes_the_page_beside_the_run(run: Path, tmp_path: Path) -> None:
    assert report.main(["html", str(run)]) == 0 and (run / "report.html").exists()
    with pytest.raises(InputError, match="no config.yaml"):
        run_page.page(tmp_path)
    assert report.main(["html", str(tmp_path)]) == 2


def test_a_page_replaces_a_page_and_nothing_else(run: Path, tmp_path: Path, capsys) -> None:
    theirs, output = tmp_path / "thesis.html", tmp_path / "page.html"
    theirs.write_text("<!doctype html>\n<html>years of work")
    assert report.main(["html", str(run), "--output", str(theirs)]) == 2
    assert "is no page of report.py html" in capsys.readouterr().err and "years of work" in theirs.read_text()
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "no/folder", "", "n" * 300):
        assert report.main(["html", str(run), "--output", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for _ in range(2):
        assert report.main(["html", str(run), "--output", str(output)]) == 0


DAMAGED = {
    "metrics.jsonl": ['{"step": 0, "reward/mean": "<b>"}', '{"step": 0, "reward/mean": 1e999}'],
    "timing.jsonl": ['{"step": 0, "timing/step_s": "1"}'],
    "eval.jsonl": ['{"step": 0, "eval/greedy_accuracy": {}}'],
    "completions.jsonl": ['{"step": 0}', '{"step": 0, "question": 5, "gold": "1", "completion": "", "reward": 0}'],
    "eval_outcomes.jsonl": [
        '{"step": 0}',
        '{"step": 0, "question": "<b>", "greedy": 1, "sampled": []}',
        '{"step": 0, "question": 0, "gold": "1", "greedy": 1, "sampled": 5}',
    ],
    "finished.json": ["[]", '{"checks": 5}', '{"result": 5}'],
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in DAMAGED.items() for text in texts])
def test_a_damaged_file_is_named_and_never_drawn(run: Path, name: str, text: str) -> None:
    (run / name).write_text(text + "\n")
    with pytest.raises(InputError, match=name):
        run_page.page(run)


@pytest.mark.parametrize("text", ["[]", "{}", '{"jobs": []}', '{"jobs": {"a": 5}}', '{"jobs": {"a": {"run": 5}}}'])
def test_a_damaged_sweep_is_named(sweep_folder: Path, text: str) -> None:
    (sweep_folder / "sweep.json").write_text(text)
    with pytest.raises(InputError, match=r"sweep\.json"):
        run_page.page(sweep_folder)


def test_nothing_of_a_foreign_run_is_markup(run: Path) -> None:
    """Names, steps, keys, questions, configuration: a run may be another person's."""
    evil = "<img src=x onerror=alert(1)>"
    for path in sorted(run.glob("*.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{k: evil if isinstance(v, str) else v for k, v in row.items()} for row in rows]
        path.write_text("".join(json.dumps(row | {f"{evil}_accuracy": 1, f"timing/{evil}": 2}) + "\n" for row in rows))
    (run / "config.yaml").write_text(evil)
    (run / "command.txt").write_text(evil)
    (run / "finished.json").write_text(json.dumps({"result": evil, "checks": {evil: evil}}))
    folder = run.rename(run.with_name("<img src=y>"))
    text = run_page.page(folder)
    assert "<img" not in text and "&lt;img src=x" in text and "&lt;img src=y" in text


def test_an_unfinished_run_has_a_page_too(run: Path) -> None:
    for name in ("finished.json", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl"):
        (run / name).unlink()
    assert "not finished" in run_page.page(run)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome is installed to open the page in")
def test_a_browser_shows_the_last_completion(run: Path, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(run_page.page(run))
    options = ["--headless", "--disable-gpu", "--no-sandbox", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    options += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = [BROWSER, *options, (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert 'data-ready="yes"' in shown.stdout, shown.stderr
    assert "step 4: 1 + 1 &lt;b&gt;?&lt;/b&gt;" in shown.stdout


STAND_IN = """
const boxes = {completions: {textContent: %s}};
class Element {
  constructor() { this.children = []; this.textContent = ""; this.value = "3"; this.heard = {}; }
  append(child) { this.children.push(child); }
  replaceChildren() { this.children = []; }
  addEventListener(name, act) { this.heard[name] = act; }
}
globalThis.document = {
  body: {dataset: {}},
  createElement: () => new Element(),
  getElementById: (id) => boxes[id] ??= new Element(),
};
%s
const before = boxes.early.children.map((one) => one.className + " " + one.textContent);
boxes["early-slider"].value = "0";
boxes["early-slider"].heard.input();
const after = boxes.early.children.map((one) => one.className + " " + one.textContent);
console.log(JSON.stringify([document.body.dataset.ready, before, after]));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js is installed to run the page's script in")
def test_the_slider_changes_the_completions(run: Path, tmp_path: Path) -> None:
    """The page's own script in a stand-in for a browser's document."""
    data, script = Outline(run_page.page(run)).scripts
    (tmp_path / "page.js").write_text(STAND_IN % (json.dumps(data), script))
    done = subprocess.run(["node", str(tmp_path / "page.js")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    ready, before, after = json.loads(done.stdout)
    assert ready == "yes" and "step 4: 1 + 1 <b>?</b>" in before[0] and "step 1: " in after[0]
    assert before[1] == "right </script>#### 3\n[reward 1]" and after[1] == "wrong </script>#### 0\n[reward 0]"
