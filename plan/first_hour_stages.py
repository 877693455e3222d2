"""The stages of the first hour on a new machine: what each proves, its command, and how what it left is judged.

Each command is one that can be given by hand, and is printed. first_hour.py runs them and tells. No torch.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import hf_config
from knobs import Config
from plan import memory as memory_plan
from plan.memory import GIB
from plan.search import Plan, Setting, judge
from run_record import read_lines

ROOT = Path(__file__).resolve().parents[1]
STEPS, QUESTIONS = 3, 32  # of the real run


class Job(NamedTuple):
    """What is examined, and where the results are written."""

    config: str
    overrides: tuple[str, ...]
    cfg: Config
    ranks: int
    device: str  # npu | cuda | cpu
    folder: Path

    def torchrun(self, script: str, *arguments: str) -> list[str]:
        """``script`` on all ranks. localhost: a host name that nobody resolves would hang the start."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
        launcher.append(f"--nproc_per_node={self.ranks}")
        return [sys.executable, *launcher, str(ROOT / script), *arguments]

    def steps(self) -> list[str]:
        """Overrides of the last stage: few steps and questions, a folder of its own, and nothing is resumed."""
        most = [QUESTIONS, *([self.cfg.data.num_test] if self.cfg.data.source == "arithmetic" else [])]
        few = min(most + ([self.cfg.eval.num_questions] if self.cfg.eval.num_questions else []))
        return [
            *self.overrides, f"train.steps={STEPS}", "eval.every=0", f"eval.num_questions={few}",
            f"train.out_dir={self.folder / 'run'}", "train.resume=never", f"train.checkpoint_every={STEPS}",
        ]  # fmt: skip

    def plan(self) -> Plan:
        """preflight's, of the last stage's run."""
        arch, cfg = hf_config.planned(self.cfg)[0], self.cfg
        lengths = cfg.data.max_prompt_tokens, cfg.rollout.max_new_tokens
        return judge(cfg, self.ranks, Setting(arch, self.device, self.ranks, None, *lengths))


@dataclass
class Outcome:
    """What a stage found. ``wrong``: "" if it has passed."""

    wrong: str = ""
    lines: list[str] = field(default_factory=list)  # for a reader
    figures: dict | list = field(default_factory=dict)


class Stage(NamedTuple):
    """One stage. ``needs``: earlier ones without which it could say nothing new."""

    name: str
    proves: str
    todo: str  # when it fails
    needs: tuple[str, ...]
    command: Callable[[Job], list[str]]
    outcome: Callable[[Job, Path, int], Outcome]  # of the command's log and exit code


def said(log: Path, code: int) -> str:
    """The line of a log that says why a command has failed: its own, or of the first traceback the last."""
    lines = log.read_text(errors="replace").splitlines()
    for pattern in (r"(rank \d+: )?(error|stopped): ", r"(?!.*ChildFailedError)[\w.]*(Error|Exception)\b.*: "):
        for number, line in enumerate(lines):
            if re.match(pattern, line):
                more = [line]
                for following in lines[number + 1 : number + 4]:  # "look at" of a tripwire
                    if not following.startswith("  "):
                        break
                    more.append(following.strip())
                return "; ".join(more)
    return f"exit code {code}: {([line for line in lines if line.strip()] or ['no output'])[-1]}"


def _read(path: Path) -> dict | list | None:
    """The JSON that a stage has written; None if it came to none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


# ------------------------------------------------------------------------------------------------ what they left


def doctor_outcome(job: Job, log: Path, code: int) -> Outcome:
    text = log.read_text(errors="replace")
    try:
        findings = json.JSONDecoder().raw_decode(text, text.index("[\n"))[0]
    except ValueError:
        return Outcome(said(log, code))
    count = {level: sum(one["level"] == level for one in findings) for level in ("ok", "warn", "fail")}
    told = [f"{f['level']:4}  {f['what']}: {f['found']}; {f['todo']}" for f in findings if f["level"] != "ok"]
    failed = ", ".join(dict.fromkeys(one["what"] for one in findings if one["level"] == "fail"))
    summary = ", ".join(f"{number} {level}" for level, number in count.items())
    return Outcome(failed, [summary, *told], {**count, "findings": findings})


GROUP = re.compile(r"(\S.*?) +(\d+) +(\d+)  (\S+) +([\d.]+)  (right|WRONG.*)$")  # a row of groups_check.report


def groups_outcome(job: Job, log: Path, code: int) -> Outcome:
    rows = []
    for found in filter(None, map(GROUP.match, log.read_text(errors="replace").splitlines())):
        name, groups, ranks, collective, milliseconds, answer = found.groups()
        rows.append({"group": name, "groups": int(groups), "ranks": int(ranks), "collective": collective,
                     "milliseconds": float(milliseconds), "answer": answer})  # fmt: skip
    wrong = [f"{row['group']}, {row['collective']}: {row['answer']}" for row in rows if row["answer"] != "right"]
    if not rows:
        return Outcome(said(log, code))
    slowest = {}  # ms of each collective, by group
    for row in rows:
        slowest.setdefault(f"{row['group']} ({row['groups']} x {row['ranks']})", []).append(
            f"{row['collective']} {row['milliseconds']:.2f}"
        )
    return Outcome("; ".join(wrong), [f"{group}: {', '.join(times)} ms" for group, times in slowest.items()], rows)


def operators_outcome(job: Job, log: Path, code: int) -> Outcome:
    rows = _read(job.folder / "operators.json")
    if rows is None:
        return Outcome(said(log, code))
    wrong = []
    for row in rows:
        ranks = ", ".join(map(str, row["wrong_ranks"]))
        if row["error"]:
            wrong.append(f"{row['operator']} in {row['dtype']}: {row['error']} (rank {ranks})")
            continue
        for part in row["wrong"]:
            off = f"{row[part]:.2g} off, at most {row[f'{part}_tolerance']:.2g}"
            wrong.append(f"{row['operator']} in {row['dtype']}, {part}: {off} (rank {ranks})")
    return Outcome("; ".join(wrong), log.read_text(errors="replace").splitlines()[: len(rows) + 1], rows)


def layers_outcome(job: Job, log: Path, code: int) -> Outcome:
    found = _read(job.folder / "layers.json")
    if found is None:
        return Outcome(said(log, code))
    return Outcome(found["wrong"], found["text"], found)


def steps_outcome(job: Job, log: Path, code: int) -> Outcome:
    """Three finished steps, and no more memory in use than planned."""
    runs = sorted((job.folder / "run").glob("*/timing.jsonl"))
    timing = read_lines(runs[-1]) if runs else []
    metrics = read_lines(runs[-1].with_name("metrics.jsonl")) if runs else []
    if code or len(timing) < STEPS:
        return Outcome(said(log, code), figures={"steps": len(timing)})
    if lost := sorted({key for row in metrics for key in row.get("nonfinite", ())}):
        return Outcome(f"not finite: {', '.join(lost)}", figures={"steps": len(timing)})
    seconds = statistics.median(row["timing/step_s"] for row in timing)
    # Under noise the sampled tokens say nothing about the push: as in tripwires.py.
    gap = max(row["aqn/probe_gap" if row.get("aqn/sigma") else "rollout/logp_gap_mean"] for row in metrics)
    plan = job.plan()
    planned, limit = plan.memory.phases[plan.memory.fullest] / GIB, plan.memory.peak / GIB
    figures = {
        "run": str(runs[-1].parent), "steps": len(timing), "step_seconds": seconds, "planned_step_seconds":
        plan.times.total, "logp_gap_mean": gap, "planned_gib": planned, "planned_phase": plan.memory.fullest,
        "limit_gib": limit, "peak_rss_gib": max(row["perf/peak_rss_gib"] for row in timing),
    }  # fmt: skip
    lines = [
        f"{len(timing)} steps, {seconds:.3g} s each (median); preflight estimates {plan.times.total:.2g} s with "
        "answers of full length",
        f"sampler and trainer differ by {gap:.2g} nats a token at most",
        f"run folder, with a checkpoint: {runs[-1].parent}",
    ]
    measured = [(row["perf/peak_device_gib"], row["perf/peak_device_phase"]) for row in timing
                if "perf/peak_device_gib" in row]  # fmt: skip
    if not measured:
        lines.append(
            f"device memory is not counted on a CPU; rank 0's process has had {figures['peak_rss_gib']:.2f} GiB, "
            f"planned: {planned:.2f} GiB in {plan.memory.fullest}"
        )
        return Outcome("", lines, figures)
    peak, phase = max(measured)
    figures |= {"peak_device_gib": peak, "peak_device_phase": phase}
    arch = hf_config.planned(job.cfg)[0]
    lines.append(memory_plan.beside_plan(job.cfg, arch, job.ranks, job.device, peak, phase))
    beyond = f"{peak:.2f} GiB of device memory in {phase}, planned: {planned:.2f}, {limit:.2f} with its margin"
    return Outcome(beyond if peak > limit else "", lines, figures)


# ------------------------------------------------------------------------------------------------ the stages

STAGES = (
    Stage(
        "doctor",
        "Versions, devices, ports, limits, variables, disk, model and data files are what the run needs.",
        "Each line that begins with fail ends with what to do (docs/npu.md has a table of errors).",
        (),
        lambda job: [
            sys.executable,
            str(ROOT / "preflight.py"),
            "--doctor",
            job.config,
            *job.overrides,
            "--ranks",
            str(job.ranks),
            "--json",
        ],
        doctor_outcome,
    ),
    Stage(
        "groups",
        "All ranks meet, and every collective over every process group of the layout gives the right answer.",
        "The line names group and ranks. A time-out: HCCL's ports and HCCL_CONNECT_TIMEOUT (npu_env.sh), or a rank "
        "that died, whose error is in the log. A wrong answer: versions of driver and CANN.",
        (),
        lambda job: job.torchrun("preflight.py", "--groups", job.config, *job.overrides),
        groups_outcome,
    ),
    Stage(
        "operators",
        "Every operator of kernels.py has, forward and backward, in bf16 and fp32, at the model's sizes on a rank, the "
        "answer of its formula in fp64, but for rounding.",
        "One rank: that device. One operator on all ranks: the versions (the doctor, requirements/npu.txt); kernels.py "
        "has the call. Please report the table.",
        (),
        lambda job: job.torchrun(
            "preflight.py", "--operators", job.config, *job.overrides, "--json", str(job.folder / "operators.json")
        ),
        operators_outcome,
    ),
    Stage(
        "layers",
        "Two layers of the model, with random weights of its real sizes, give the trainer and the configured engine "
        "the same log-probs after every adapter has moved: loading, merging, pushing and sampling work on this layout.",
        "The line names the layer or the experts. Try rollout.expert_parallel=false (whole tensors are pushed), "
        "rollout.enforce_eager=true, or rollout.engine=torch: the one that helps names the part at fault.",
        ("groups",),
        lambda job: job.torchrun(
            "preflight.py",
            "--layers",
            job.config,
            *job.overrides,
            "--folder",
            str(job.folder / "two_layers"),
            "--json",
            str(job.folder / "layers.json"),
        ),
        layers_outcome,
    ),
    Stage(
        "steps",
        f"{STEPS} steps of the real run work, with its model and data and an evaluation of few questions before and "
        "after; on an NPU or GPU the fullest rank had no more memory in use than preflight.py planned.",
        "The line is the run's own error or tripwire. Out of memory, or beyond the plan: a smaller "
        "rollout.kv_cache_mib or optim.tokens_per_micro_batch; please report both figures.",
        ("groups", "layers"),
        lambda job: job.torchrun("train_grpo.py", job.config, *job.steps()),
        steps_outcome,
    ),
)
