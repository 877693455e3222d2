"""Published runs against the plan: each beside the range that the constants of the other runs give."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import preflight
from plan import calibrate, published
from plan.hardware import WIDEST, spread
from plan.published import holds, judgements, runs

QWEN3 = str(Path(__file__).parents[1] / "configs" / "qwen3.yaml")


@pytest.fixture(scope="module")
def judged() -> list[published.Judgement]:
    return judgements()


def test_a_range_is_never_wider_than_a_factor_of_three() -> None:
    assert spread(100, 100) == (100 / 1.5, 150)
    low, high = spread(100, 200)  # 67 to 300 would be wider; the middle stays
    assert high / low == pytest.approx(WIDEST) and low * high == pytest.approx(100 / 1.5 * 300)


def test_ranges_hold_the_published_times_but_the_named_ones(judged) -> None:
    """Misses are printed, not fitted. One of them trains on 128 devices with pipelines, as no other run of experts."""
    missed = [each.run.name for each in judged if not holds(each.step, each.run.step_seconds)]
    assert missed == ["LoRA, adapter", "NeMo-RL 0.3, 30B", "NeMo-RL 0.4, 235B"]
    for each in judged:
        if each.run.name in missed:
            assert each.step.low / 1.15 < each.run.step_seconds < each.step.high * 1.15, each.run.name
    timed = [each for each in judged if each.run.generation_seconds]
    assert len(timed) == 3 and all(holds(each.generation, each.run.generation_seconds) for each in timed)


def test_three_times_and_a_third_of_each_published_time_lie_outside(judged) -> None:
    for each in judged:
        for range_, seconds in ((each.step, each.run.step_seconds), (each.generation, each.run.generation_seconds)):
            assert range_.high <= WIDEST * range_.low
            assert not seconds or not (holds(range_, 3 * seconds) or holds(range_, seconds / 3)), each.run.name


def test_a_plan_for_half_the_ranks_is_refuted_by_at_least_half_of_the_runs(judged) -> None:
    """Negative control: a range that such a plan passes says nothing. Recompute changes too little to be refuted."""
    outside = [not holds(each.half_the_ranks, each.run.step_seconds) for each in judged]
    assert sum(outside) >= len(judged) / 2
    recomputing = [each for each in judged if each.run.recompute]
    outside = [not holds(each.no_recompute, each.run.step_seconds) for each in recomputing]
    assert (len(outside), sum(outside)) == (10, 2)


def test_a_run_does_not_enter_the_constants_that_judge_it(monkeypatch, judged) -> None:
    """A run that took ten times as long is judged by the same range, while its time changes the ranges of others."""
    everything = runs()
    slow = dataclasses.replace(everything[4], step_seconds=3013.0, generation_seconds=1552.0)
    monkeypatch.setattr(published, "runs", lambda: [slow if run.name == slow.name else run for run in everything])
    again = judgements()
    assert again[4][1:] == judged[4][1:] and not holds(again[4].step, slow.step_seconds)
    assert again[3].step != judged[3].step  # the constant of models without experts has changed


def test_a_share_of_a_run_is_left_out_with_it() -> None:
    """The share that the pass of the old policy in SAPO reached is smaller than most others with experts."""
    without = published.constants([run for run in runs() if run.name != "SAPO"])
    assert without.shares[True] > published.constants(runs()).shares[True]


def test_every_published_figure_has_a_source() -> None:
    content = json.loads(Path(published.__file__).with_name("published_runs.json").read_text())
    rows = [*content["runs"], *content["decode_steps"], *content["shares"], *content["devices"].values()]
    assert all(len(row["source"]) > 10 for row in rows)
    assert {run.model for run in runs()} <= content["models"].keys()


def test_tokens_of_the_published_runs_are_those_of_their_published_rates() -> None:
    """Tokens a second x seconds: 254.29 x 342.81 (R3), 404.37 x 379.12 (DPPO), 948,300 (LoRA), 123.94 x 16 x 450
    (SAPO), 1,327.55 x 90.09 (adapter), 32.06 x 16 x 90.4 (GSPO), 72.0 x 16 x 481.8 (SGLang)."""
    tokens = {run.name: run.sequences * (run.prompt + run.completion) for run in runs()}
    by_hand = {"GRPO with R3": 87_173, "DPPO": 153_305, "LoRA, merged": 948_300, "SAPO": 892_368, "GMPO": 231_260}
    by_hand |= {"LoRA, adapter": 119_599, "GSPO, nightly": 46_372, "GRPO, SGLang": 555_034}
    assert {name: tokens[name] for name in by_hand} == pytest.approx(by_hand, rel=2e-3)
    generated = {run.name: run.sequences * run.completion / run.generation_seconds for run in runs()[:2]}
    assert generated == pytest.approx({"GRPO with R3": 882.78, "DPPO": 988.49}, rel=2e-3)


def test_the_plan_prints_ranges_with_graphs_and_without(capsys) -> None:
    """By the published runs, a layer of a decode step takes 4.1 ms without graphs; 48 layers, 1,536 steps: 304 s."""
    assert preflight.main([QWEN3, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    ranges = [found["step_s"], *found["decode_s"].values()]
    assert list(found["decode_s"]) == ["with graphs", "without graphs"]
    assert all(1 < each["high"] / each["low"] <= WIDEST for each in ranges)
    assert holds(published.Range(**found["step_s"]), found["step_seconds"]["total"])
    without = found["decode_s"]["without graphs"]
    assert without["low"] < 1536 * 48 * 4.1e-3 < without["high"]
    preflight.main([QWEN3])
    text = capsys.readouterr().out
    assert "rollout.enforce_eager=false would save about" in text and " s without graphs" in text
    preflight.main([QWEN3, "rollout.enforce_eager=false"])
    assert "would save" not in capsys.readouterr().out


def test_the_command_prints_hits_and_misses(capsys) -> None:
    assert preflight.main(["--published"]) == 0
    text = capsys.readouterr().out
    assert text.count("  inside  ") == 15 and text.count("  MISSED  ") == 3
    assert "inside: 12 of 15 steps and 3 of 3 times of generation" in text
    assert preflight.main(["--published", QWEN3]) == 2


MEASURED = {"generate": 100.0, "old_logp": 20.0, "reference": 15.0, "update": 65.0, "step": 202.0}


def write(path: Path, content: object) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.mark.parametrize("graphs", ["true", "false"])
def test_a_calibrated_plan_takes_as_long_as_the_run_that_was_measured(tmp_path: Path, graphs, capsys) -> None:
    """300 tokens a completion: 768 x 300 / 202 s = 1,140.6 tokens a second. The first step is not counted."""
    timing = {f"timing/{name}_s": seconds for name, seconds in MEASURED.items()} | {"perf/tokens_per_s": 1140.6}
    rows = [{"step": 0} | dict.fromkeys(timing, 999.0), {"step": 1} | timing, {"step": 2} | timing]
    report = write(tmp_path / "timing.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    eager = f"rollout.enforce_eager={graphs}"
    assert preflight.main([QWEN3, eager, "--calibrate", report, "--json"]) == 0
    phases = json.loads(capsys.readouterr().out)["step_seconds"]["phases"]
    assert phases["prefill"] + phases["decode"] == pytest.approx(100, rel=0.01)
    passes = ("old policy", "reference", "update forward", "update backward", "optimizer")
    assert sum(phases[name] for name in passes) == pytest.approx(100, rel=0.01)
    preflight.main([QWEN3, eager, "--calibrate", report])
    assert "if answers have a mean of 300 of 1536 tokens" in capsys.readouterr().out


def test_a_report_without_measured_steps_and_a_cpu_are_refused_in_one_line(tmp_path: Path, capsys) -> None:
    unfinished = write(tmp_path / "report.json", {"stages": [{"name": "steps", "figures": {}}]})
    timing = {f"timing/{name}_s": 1.0 for name in MEASURED}
    sound = write(tmp_path / "timing.jsonl", json.dumps(timing) + "\n")
    tiny = str(Path(QWEN3).with_name("tiny_cpu.yaml"))
    for config, report in ((QWEN3, unfinished), (QWEN3, str(tmp_path / "none.json")), (tiny, sound)):
        assert preflight.main([config, "--calibrate", report]) == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1, said


def test_medians_leave_out_the_first_step() -> None:
    rows = [{"timing/step_s": each, "step": i} for i, each in enumerate((90.0, 10.0, 12.0))]
    assert calibrate.medians(rows) == {"timing/step_s": 11.0}
