"""The stages of the first hour on a new machine: what each one proves, its command, and how its results are judged.

first_hour.py runs the stages and prints the report; its --help prints the table. A user can give each command by hand.
Nothing here imports torch.
"""

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from inputs import hf_config
from knobs import Config
from plan.calibrate import medians
from plan.machine import Finding
from plan.memory import GIB
from plan.search import Setting, Verdict, judge
from plan.utilisation import memory_beside_plan
from run_record import read_lines

ROOT = Path(__file__).resolve().parents[1]
STEPS, QUESTIONS = 3, 32  # of the real run
GAP_RATIO = 2  # graphs are not taken if the log-probs of sampler and trainer differ by more times as much as without
SHOWN = 64  # completions of a step whose text is kept, to compare two ways of decoding


class Job(NamedTuple):
    """The run that is examined, and the folder of the results."""

    config: str
    overrides: tuple[str, ...]
    cfg: Config
    ranks: int
    device: str  # npu | cuda | cpu
    folder: Path

    def torchrun(self, script: str, *arguments: str) -> list[str]:
        """``script`` on all ranks. With localhost, the start does not wait for a host name that cannot be resolved."""
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost",
            f"--nproc_per_node={self.ranks}", str(ROOT / script), *arguments,
        ]  # fmt: skip

    def question(self, stage: str, *more: str) -> list[str]:
        """A question of preflight.py to all ranks, whose figures are written to the stage's JSON file."""
        figures = str(self.folder / f"{stage}.json")
        return self.torchrun("preflight.py", f"--{stage}", self.config, *self.overrides, "--json", figures, *more)

    def figures(self, stage: str) -> dict | list:
        """The figures that a question has written."""
        return json.loads((self.folder / f"{stage}.json").read_text())

    def steps(self, folder: str = "run") -> list[str]:
        """Overrides of the last stages: few steps and questions, a folder of their own, and no resuming."""
        counts = [QUESTIONS, self.cfg.eval.num_questions or QUESTIONS]
        if self.cfg.data.source == "arithmetic":
            counts.append(self.cfg.data.num_test)
        return [
            *self.overrides, f"train.steps={STEPS}", "eval.every=0", f"eval.num_questions={min(counts)}",
            f"train.out_dir={self.folder / folder}", "train.resume=never", f"train.checkpoint_every={STEPS}",
            f"train.completions_logged={SHOWN}",
        ]  # fmt: skip

    def verdict(self) -> Verdict:
        """The verdict of preflight.py on the run of the last stages."""
        setting = Setting(
            arch=hf_config.planned(self.cfg)[0],
            device=self.device,
            ranks_per_node=self.ranks,
            device_gib=None,
            prompt_tokens=self.cfg.data.max_prompt_tokens,
            completion_tokens=self.cfg.rollout.max_new_tokens,
        )
        return judge(self.cfg, self.ranks, setting)


@dataclass
class Outcome:
    """The results of a stage. ``wrong`` is "" if it has passed."""

    wrong: str = ""
    lines: list[str] = field(default_factory=list)  # for a reader
    figures: Any = field(default_factory=dict)  # an object or a list of rows


class Stage(NamedTuple):
    """One stage."""

    name: str
    minutes: int  # limit, if the user gives no other
    proves: str
    todo: str  # when it fails
    needs: tuple[str, ...]  # earlier stages; if one of them has failed, this one is skipped
    command: Callable[[Job], list[str]]
    # Takes the command's log and exit code. OSError or ValueError: the command has not written its results.
    outcome: Callable[[Job, Path, int], Outcome]
    # Why there is nothing to try; None for a stage that the run needs.
    unneeded: Callable[[Job], str] | None = None


def cause(log: Path, code: int) -> str:
    """The line of a log that says why a command has failed: its own error, or the last line of the first traceback."""
    lines = log.read_text(errors="replace").splitlines()
    for pattern in (r"(rank \d+: )?(error|stopped): ", r"(?!.*ChildFailedError)[\w.]*(Error|Exception)\b.*: "):
        for number, line in enumerate(lines):
            if re.match(pattern, line):
                more = itertools.takewhile(lambda text: text.startswith("  "), lines[number + 1 : number + 4])
                return "; ".join([line, *(text.strip() for text in more)])  # a tripwire adds indented lines
    return f"exit code {code}: {([line for line in lines if line.strip()] or ['no output'])[-1]}"


# ------------------------------------------------------------------------------------------------ the outcomes


def doctor_outcome(job: Job, log: Path, code: int) -> Outcome:
    text = log.read_text(errors="replace")
    findings = json.JSONDecoder().raw_decode(text, text.index("[\n"))[0]
    levels = [one["level"] for one in findings]
    count = {level: levels.count(level) for level in ("ok", "warn", "fail")}
    summary = ", ".join(f"{number} {level}" for level, number in count.items())
    return Outcome(
        ", ".join(dict.fromkeys(one["what"] for one in findings if one["level"] == "fail")),
        [summary, *(str(Finding(**one)) for one in findings if one["level"] != "ok")],
        {**count, "findings": findings},
    )


def groups_outcome(job: Job, log: Path, code: int) -> Outcome:
    rows = job.figures("groups")
    wrong = [f"{row['group']}, {row['collective']}: {row['answer']}" for row in rows if row["answer"] != "right"]
    times: dict[str, list[str]] = {}
    for row in rows:
        group = f"{row['group']} ({row['groups']} x {row['ranks']})"
        times.setdefault(group, []).append(f"{row['collective']} {row['milliseconds']:.2f}")
    return Outcome("; ".join(wrong), [f"{group}: {', '.join(each)} ms" for group, each in times.items()], rows)


def operators_outcome(job: Job, log: Path, code: int) -> Outcome:
    rows, wrong = job.figures("operators"), []
    for row in rows:
        name, ranks = f"{row['operator']} in {row['dtype']}", ", ".join(map(str, row["wrong_ranks"]))
        passes = [f", {p}: {row[p]:.2g} off, at most {row[f'{p}_tolerance']:.2g}" for p in row["wrong"]]
        wrong += [f"{name}{text} (rank {ranks})" for text in ([f": {row['error']}"] if row["error"] else passes)]
    return Outcome("; ".join(wrong), log.read_text(errors="replace").splitlines()[: len(rows) + 1], rows)


def layers_outcome(job: Job, log: Path, code: int) -> Outcome:
    report: Any = job.figures("layers")
    return Outcome(report["wrong"], report["text"], report)


def self_test_outcome(job: Job, log: Path, code: int) -> Outcome:
    lines = [line for line in log.read_text(errors="replace").splitlines() if re.match("ok|FAIL|two ranks", line)]
    return Outcome("; ".join(line for line in lines if line.startswith("FAIL")), lines)


def steps_outcome(job: Job, log: Path, code: int, folder: str = "run") -> Outcome:
    """Passed: three finished steps, finite metrics, and no more memory in use than planned."""
    runs = sorted((job.folder / folder).glob("*/timing.jsonl"))
    timing = read_lines(runs[-1]) if runs else []
    if code or len(timing) < STEPS:
        return Outcome(cause(log, code), figures={"steps": len(timing)})
    run = runs[-1].parent
    metrics = read_lines(run / "metrics.jsonl")
    if lost := sorted({key for row in metrics for key in row.get("nonfinite", ())}):
        return Outcome(f"not finite: {', '.join(lost)}", figures={"steps": len(timing)})
    seconds = statistics.median(row["timing/step_s"] for row in timing)
    # Under noise the sampled tokens do not test the push, but the probe does; tripwires.py makes the same choice.
    gap = max(row["aqn/probe_gap" if row.get("aqn/sigma") else "rollout/logp_gap_mean"] for row in metrics)
    later = list(zip(timing, metrics, strict=False))[1:]  # the first step starts everything up
    token = [
        row["timing/generate_s"] / step["response_length/max"] for row, step in later if "timing/generate_s" in row
    ]
    verdict = job.verdict()
    memory, rss = verdict.memory, max(row["perf/peak_rss_gib"] for row in timing)
    planned, limit = memory.phases[memory.fullest] / GIB, memory.peak / GIB
    figures = {
        "run": str(run), "steps": len(timing), "step_seconds": seconds, "planned_step_seconds": verdict.times.total,
        "logp_gap_mean": gap, "planned_gib": planned, "planned_phase": memory.fullest, "limit_gib": limit,
        "peak_rss_gib": rss, "timing": medians(timing), "token_ms": 1e3 * statistics.median(token) if token else None,
    }  # fmt: skip
    lines = [
        f"{len(timing)} steps, {seconds:.3g} s each (median); preflight estimates {verdict.times.step} s "
        f"with answers of full length; preflight.py {job.config} --calibrate REPORT plans with what was measured",
        f"sampler and trainer differ by {gap:.2g} nats a token at most",
        f"run folder, with a checkpoint: {run}",
    ]
    measured = [(row["perf/peak_device_gib"], row["perf/peak_device_phase"])
                for row in timing if "perf/peak_device_gib" in row]  # fmt: skip
    if not measured:
        beside = f"rank 0's process has had {rss:.2f} GiB, planned: {planned:.2f} GiB in {memory.fullest}"
        return Outcome("", [*lines, f"device memory is not counted on a CPU; {beside}"], figures)
    peak, phase = max(measured)
    beyond = f"{peak:.2f} GiB of device memory in {phase}, planned: {planned:.2f}, {limit:.2f} with its margin"
    return Outcome(
        beyond if peak > limit else "",
        [*lines, memory_beside_plan(job.cfg, hf_config.planned(job.cfg)[0], job.ranks, job.device, peak, phase)],
        figures | {"peak_device_gib": peak, "peak_device_phase": phase},
    )


def graphs_outcome(job: Job, log: Path, code: int) -> Outcome:
    """Passed as the steps are. Then it says what decoding with graphs changes, and which setting to take."""
    found, without = steps_outcome(job, log, code, "graphs"), steps_outcome(job, log, 0)
    if found.wrong:
        return found
    new, old = found.figures, without.figures
    first, second = (
        [row["completion"] for row in read_lines(Path(each["run"]) / "completions.jsonl") if row["step"] == 1]
        for each in (new, old)
    )
    new["completions"], new["differing"] = len(first), sum(a != b for a, b in zip(first, second, strict=True))
    new["take_graphs"] = new["token_ms"] < old["token_ms"] and new["logp_gap_mean"] <= GAP_RATIO * old["logp_gap_mean"]
    found.lines = [
        f"a token takes {new['token_ms']:.3g} ms with graphs, {old['token_ms']:.3g} ms without (seconds of sampling / "
        "tokens of the longest answer)",
        f"{new['differing']} of {new['completions']} completions of the first step differ",
        f"sampler and trainer differ by {new['logp_gap_mean']:.2g} nats a token at most, without graphs by "
        f"{old['logp_gap_mean']:.2g}",
        f"without graphs, {without.lines[-1]}",
        f"with graphs, {found.lines[-1]}",
        f"in the configuration, under rollout, take:  enforce_eager: {str(not new['take_graphs']).lower()}",
    ]
    return found


def without_graphs(job: Job) -> str:
    """Why decoding with graphs is not tried."""
    if job.device == "cpu" or not job.cfg.rollout.kind.reserves:
        return f"has nothing to try: {job.cfg.rollout.engine} on {job.device} has no graphs"
    return "" if job.cfg.rollout.enforce_eager else "has nothing to try: the steps were decoded with graphs"


# ------------------------------------------------------------------------------------------------ the stages


STAGES = (
    Stage(
        "doctor",
        5,
        "Versions, devices, ports, limits, variables, disk, model and data files are what the run needs.",
        "Each line that begins with fail ends with what to do (docs/npu.md has a table of errors).",
        (),
        lambda job: [
            sys.executable, str(ROOT / "preflight.py"), "--doctor", job.config, *job.overrides,
            "--ranks", str(job.ranks), "--json",
        ],
        doctor_outcome,
    ),
    Stage(
        "groups",
        15,
        "All ranks meet, and every collective over every process group of the layout gives the right answer.",
        "The line names group and ranks. After a time-out, look at HCCL's ports and HCCL_CONNECT_TIMEOUT (npu_env.sh), "
        "or for a rank that died; its error is in the log. After a wrong answer, look at the versions of driver and "
        "CANN.",
        (),
        lambda job: job.question("groups"),
        groups_outcome,
    ),
    Stage(
        "operators",
        30,
        "Every operator of kernels.py, forward and backward, in bf16 and fp32, at the model's sizes on a rank, equals "
        "its formula in fp64 up to rounding.",
        "If one rank is wrong, its device is at fault. If one operator is wrong on all ranks, look at the versions "
        "(the doctor, requirements/npu.txt) and at the call in kernels.py. Please report the table.",
        (),
        lambda job: job.question("operators"),
        operators_outcome,
    ),
    Stage(
        "layers",
        30,
        "Two layers of the model, with random weights of its real sizes, give the trainer and the configured engine "
        "the same log-probs after every adapter has changed, and tokens are drawn by them: loading, merging, pushing "
        "and sampling work on this layout.",
        "The line names the layer or the experts. Try rollout.expert_parallel=false (whole tensors are pushed), "
        "rollout.enforce_eager=true, or rollout.engine=torch: the one that helps names the part at fault.",
        ("groups",),
        lambda job: job.question("layers", "--folder", str(job.folder / "two_layers")),
        layers_outcome,
    ),
    Stage(
        "self-test",
        15,
        "Two ranks, as DP2, EP2 and TP2, make the same first update of a tiny model by this configuration's method as "
        "a second implementation in float64: samples, rewards, rows, gradients, metrics. (One rank: the model learns.)",
        "Each line that begins with FAIL names a layout and a check; the log says what to look at. The bounds are wide "
        "in bf16; model.dtype=fp32 compares to 5 %, if the device's kernels take it.",
        ("groups",),
        lambda job: job._replace(ranks=min(job.ranks, 2)).torchrun(
            "preflight.py", "--self-test", job.config, *job.overrides, *["--ranks", "2"] * (job.ranks > 1)
        ),
        self_test_outcome,
    ),
    Stage(
        "steps",
        90,
        f"{STEPS} steps of the real run work, with its model and data and an evaluation of few questions before and "
        "after; on an NPU or GPU the fullest rank had no more memory in use than preflight.py planned.",
        "The line is the run's own error or tripwire. If memory ran out or exceeded the plan, try a smaller "
        "rollout.kv_cache_mib or optim.tokens_per_micro_batch; please report both figures.",
        ("groups", "layers"),
        lambda job: job.torchrun("train_grpo.py", job.config, *job.steps()),
        steps_outcome,
    ),
    Stage(
        "graphs",
        90,
        "The same steps with graphs (rollout.enforce_eager=false): whether they work, what a token costs, and which "
        "setting to take. The run does not need this stage.",
        "Keep rollout.enforce_eager: true; nothing else is wrong. Please report the log.",
        ("steps",),
        lambda job: job.torchrun("train_grpo.py", job.config, *job.steps("graphs"), "rollout.enforce_eager=false"),
        graphs_outcome,
        without_graphs,
    ),
)  # fmt: skip
