"""The page about a run is one file that opens without a network and shows what the run folder holds."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import xml.etree.ElementTree as ElementTree
from base64 import b64decode
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import pandas
import pytest
import recorded
from matplotlib.image import imread

import report
from inputs.files import InputError
from lab import figures, run_folders, run_page, store

pytestmark = pytest.mark.nightly
VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Elements that are opened and closed in order, what they refer to, and their ids."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag != "script"
        if tag not in VOID:
            self.open.append(tag)
        self.references += [value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")]
        self.ids += [value for key, value in attrs if key == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Three runs and their sweep, as sweep.py leaves it: two seeds and a variant; paths as seen from the checkout."""
    out = tmp_path_factory.mktemp("made") / "out"
    jobs = {"absent-seed0": {"state": "failed", "attempts": 2, "run": "", "result": "error: <no>"}}
    for name, seed in (("base", 0), ("base", 1), ("other", 0)):
        run = recorded.make_run(out, f"{name}-seed{seed}", seed, questions=20)
        jobs[f"{name}-seed{seed}"] = {"state": "finished", "attempts": 1, "run": f"out/{run.name}", "result": "done"}
    (out / "sweep-x").mkdir()
    (out / "sweep-x" / "sweep.json").write_text(json.dumps({"jobs": jobs}))
    return out


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    name = "base-seed0-20300102-030405"
    return shutil.copytree(made / name, tmp_path / "out" / name)


def test_the_page_parses_and_refers_to_nothing_outside(made: Path, run: Path) -> None:
    for folder in (run, made / "sweep-x"):
        text = run_page.page(folder)
        found = Outline(text)
        # References are the marks of points, in the page itself.
        assert found.references and set(found.references) <= {f"#{name}" for name in found.ids}
        assert not re.search(r"https?://|url\((?!#)|@import|//\w+\.\w+/", text)
        (svg,) = re.findall(r"<svg.*?</svg>", text, re.S)
        assert len(axes(svg)) == 9


def axes(svg: str) -> dict[str, ElementTree.Element]:
    """Label of the vertical axis -> panel."""
    panels = [group for group in ElementTree.fromstring(svg).iter("g") if group.get("id", "").startswith("axes_")]
    return {[text.text for text in panel.iter("text")][-1]: panel for panel in panels}


def strokes(panel: ElementTree.Element) -> list[tuple[str, float]]:
    """Color and width of each line of a panel, without its frame, ticks and grid."""
    lines = [group.find("path") for group in panel if group.get("id", "").startswith("line2d_")]
    styles = [dict(part.split(": ") for part in line.get("style").split("; ")) for line in lines if line is not None]
    return [(style["stroke"], float(style["stroke-width"])) for style in styles if "stroke-width" in style]


def test_what_the_folder_holds_is_shown_and_nothing_of_it_is_markup(run: Path) -> None:
    """The completions hold "</pre>" and the questions "<b>": a model writes what it likes."""
    text = run_page.page(run)
    steps = re.findall(r"<details><summary>(.*?)</summary>(.*?)</details>", text, re.S)
    assert [html.unescape(title) for title, _ in steps] == [f"step {n}: 1 + 1 <b>?</b>  (gold 2)" for n in (1, 2, 3, 4)]
    assert steps[2][1] == '<pre class="wrong">&lt;/pre&gt;#### 2\n[reward 0]</pre>' * 2
    assert steps[3][1].startswith('<pre class="right">')
    assert "<b>" not in text and "<low>" not in text and "&lt;low&gt;" in text.split("Checks")[1]
    slowest = text.split("Slowest steps")[1].split("</table>")[0]
    assert re.findall(r"<tr>\s*<td>(\d+)", slowest) == ["4", "3", "2", "1"]  # 0.5 s + 0.1 s a step
    longest = text.split("Longest")[1].split("</table>")[0]
    assert re.findall(r"<tr>\s*<td>(\d+)</td>\s*<td>(\d+)", longest)[:3] == [("4", "9"), ("3", "8"), ("4", "8")]
    cells = text.split("Reward by question")[1]
    outcomes = [json.loads(line) for line in (run / "eval_outcomes.jsonl").read_text().splitlines()]
    assert len(re.findall("<i ", cells)) == len(outcomes) == 40
    assert len(re.findall(r"hsl\(120 ", cells)) == sum(row["sampled"][0] for row in outcomes)
    assert "prompts_per_step: 32" in text and "torchrun --nproc_per_node=2" in text


def test_a_sweep_shows_every_job_and_lays_the_runs_over_each_other(made: Path) -> None:
    text = run_page.page(made / "sweep-x")
    assert "error: &lt;no&gt;" in text and text.count("base-seed0") == 2
    (svg,) = re.findall(r"<svg.*?</svg>", text, re.S)
    lines = strokes(axes(svg)["reward/mean"])
    thin = [color for color, width in lines if width < 1]
    thick = [color for color, width in lines if width > 1]
    assert len(thin) == 3 and len(thick) == 2 and thin[0] == thin[1] == thick[0] != thin[2] == thick[1]
    legend = [text.text for text in ElementTree.fromstring(svg).iter("text")][-2:]
    assert legend == ["base", "other"]


def drawn(values: list[float | None], key: str = "x") -> ElementTree.Element:
    """The panel of one run with these values."""
    series = pandas.Series(values, dtype=float)
    return next(iter(axes(figures.svg({key: {"a": [series]}})).values()))


@pytest.mark.parametrize(("values", "moves", "dots"), [([1, None, 3, 4], 1, 1), ([None, 2, None], 0, 1)])
def test_a_curve_has_gaps_where_nothing_was_measured(values: list, moves: int, dots: int) -> None:
    """A line is a pen that moves and draws; a value between two gaps is a dot."""
    panel = drawn(values)
    for path in panel.iter("path"):
        if "stroke-width: 0.7" in path.get("style", ""):
            assert len(re.findall("M", path.get("d") or "")) == moves + dots
    marks = [use for group in panel if group.get("id", "").startswith("line2d_") for use in group.iter("use")]
    assert len(marks) == dots and "nan" not in ElementTree.tostring(panel, "unicode").lower()


def test_a_logarithmic_curve_has_ticks_of_decades_and_a_name_is_never_a_formula() -> None:
    ticks = [text.text for text in drawn([1e-8, 1e-7, 1e-6, 0.0], "rollout/logp_gap_mean").iter("text")]
    assert {"1e-08", "1e-07", "1e-06"} <= set(ticks)
    assert "$x^{" in figures.svg({"x": {"$x^{": [pandas.Series([1.0, 2.0])], "b": [pandas.Series([1.0, 2.0])]}})


def test_a_record_and_an_unfinished_run_have_a_page_too(run: Path, tmp_path: Path, monkeypatch) -> None:
    text = run_page.page(store.add_run(run, tmp_path / "results").with_suffix(""))
    assert "arithmetic accuracy 30.0 %" in text and "prompts_per_step: 32" in text and "torchrun --nproc" in text
    assert len(re.findall("<i ", text)) == 40 and "&lt;low&gt;" in text and "Slowest steps" in text
    monkeypatch.chdir(tmp_path)
    assert report.main(["html", "results/base-seed0"]) == 0 and (tmp_path / "base-seed0.html").read_text() == text
    for name in ("finished.json", "eval.jsonl", "eval_outcomes.jsonl", "completions.jsonl"):
        (run / name).unlink()
    assert "not finished" in run_page.page(run)


def test_the_curves_of_a_run_are_not_blank(run: Path) -> None:
    """Every panel has a curve, and a value that is not finite has its mark."""
    path = run / "metrics.jsonl"
    lost = '"nonfinite": ["actor/entropy"], "actor/entropy": null'
    path.write_text(path.read_text().replace('"actor/entropy": 0.5', lost))
    run_page.draw_curves(run)
    picture = imread(run / "curves.png")[..., :3]
    height, width = (size // 3 for size in picture.shape[:2])
    for place in range(9):
        top, left = place // 3 * height, place % 3 * width
        window = picture[top : top + height, left : left + width]
        assert (window[..., 2] - window[..., 0] > 0.3).sum() > 5, "blue"
        marks = (window[..., 0] - window[..., 2] > 0.5).sum()
        assert (marks > 5) == (place == 3), "a red mark in the panel of the entropy alone"


def test_a_page_replaces_a_page_and_nothing_else(run: Path, tmp_path: Path, capsys) -> None:
    for _ in range(2):
        assert report.main(["html", str(run)]) == 0 and (run / "report.html").exists()
    theirs = tmp_path / "thesis.html"
    theirs.write_text("<!doctype html>\n<html>years of work")
    os.mkfifo(tmp_path / "pipe")
    for name in ("thesis.html", "pipe", "no/folder"):
        assert report.main(["html", str(run), "--output", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert "years of work" in theirs.read_text() and report.main(["html", str(tmp_path)]) == 2
    assert "no config.yaml" in capsys.readouterr().err


def test_curves_count_steps_as_the_console_does(run: Path) -> None:
    """The reward of the first of four steps stands at 1; the evaluation before it at 0, the last one at 4."""
    curves = run_page._curves(run, run_folders.merged(run), "run")
    steps = {key: list(curves[key]["run"][0].dropna().index) for key in ("reward/mean", "eval/sampled_accuracy")}
    assert steps == {"reward/mean": [1, 2, 3, 4], "eval/sampled_accuracy": [0, 4]}


def test_the_load_of_the_experts_is_drawn_by_layer_in_the_page_itself(run: Path) -> None:
    """The pixels of a map are those of its numbers: in two steps of three layers, one value stands out."""
    before, path = run_page.page(run), run / "moe.jsonl"
    values = {"moe/load_max": [1.0, 1.0, 3.0], "moe/confidence": [0.5, 0.5, 0.5]}
    others = {"moe/load_max": [1.0, 1.0, 1.0], "moe/confidence": [0.5, 0.5, 0.4]}
    lines = [{"step": 0} | others, {"step": 1}, {"step": 2} | values]  # step 2 trained nothing
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = run_page.page(run)
    found = Outline(text)
    maps = [one.partition(",")[2] for one in found.references if one.startswith("data:image/png;base64,")]
    assert {one for one in found.references if not one.startswith("data:")} <= {f"#{name}" for name in found.ids}
    assert "moe/load_max" in text and "moe/load_max" not in before and len(text) < len(before) + 60_000
    pictures = [imread(BytesIO(b64decode(one)))[..., :3] for one in maps]
    (high,) = [picture for picture in pictures if picture.shape == (3, 2, 3) and (picture[2, 1] != picture[0, 0]).any()]
    assert (high[2, 1] != high[2, 0]).any() and all((high[place] == high[0, 0]).all() for place in ((0, 1), (2, 0)))


DAMAGED = {
    "moe.jsonl": [
        '{"step": 0, "moe/load_max": 1}',
        '{"step": 0, "moe/load_max": ["a"]}',
        '{"step": 0, "moe/load_max": [1e999]}',
        '{"step": 0, "moe/load_max": [1]}\n{"step": 1, "moe/load_max": [1, 2]}',
        '{"step": 0, "moe/load_max": [1]}\n{"step": 1, "moe/confidence": [1]}',
    ],
    "metrics.jsonl": ['{"step": 0, "reward/mean": "<b>"}', '{"step": 0, "reward/mean": 1e999}'],
    "eval.jsonl": ['{"step": 0, "eval/greedy_accuracy": {}}'],
    "completions.jsonl": ['{"step": 0, "question": 5, "gold": "1", "completion": "", "reward": 0, "tokens": 1}'],
    "eval_outcomes.jsonl": [
        '{"step": 0}',
        '{"step": 0, "question": 1, "gold": "1", "greedy": 1, "sampled": []}',
        '{"step": 0, "question": 0, "gold": "1", "greedy": 1, "sampled": 5}',
    ],
    "finished.json": ["[]", '{"checks": 5}'],
    "sweep.json": ["[]", '{"jobs": []}', '{"jobs": {"a": {"run": 5}}}'],
}


def test_a_damaged_file_is_named_and_never_drawn(run: Path) -> None:
    for name, texts in DAMAGED.items():
        before = (run / name).read_bytes() if (run / name).exists() else b""
        for text in texts:
            (run / name).write_text(text + "\n")
            with pytest.raises(InputError, match=name):
                run_page.page(run)
        (run / name).write_bytes(before)


def test_nothing_of_a_foreign_run_is_markup(run: Path) -> None:
    """Names, steps, keys, questions, configuration: a run may be another person's."""
    evil = "<img src=x onerror=alert(1)>"
    for path in run.glob("*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{k: evil if isinstance(v, str) else v for k, v in row.items()} for row in rows]
        path.write_text("".join(json.dumps(row | {f"{evil}_accuracy": 1, f"timing/{evil}": 2}) + "\n" for row in rows))
    finished = json.dumps({"result": evil, "checks": {evil: evil}})
    for name, text in {"config.yaml": evil, "command.txt": evil, "finished.json": finished}.items():
        (run / name).write_text(text)
    text = run_page.page(run.rename(run.with_name("<img src=y>")))
    assert "<img" not in text and "&lt;img src=x" in text and "&lt;img src=y" in text
