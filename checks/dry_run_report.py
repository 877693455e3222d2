"""Compares the figures of a dry run with those of the plan, and returns the result as text or JSON."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from checks.dry_run_meter import Phase
from facts.architectures import Architecture
from knobs import Config, Merging
from plan import memory, roofline
from plan.grid import RankGrid

WITHIN = 0.1  # the largest relative difference at which a figure is confirmed
UNITS = {"GiB": 2**30, "TFLOP": 1e12, "MiB sent": 2**20}
SLACK = {"GiB": 8 * 2**20, "TFLOP": 0, "MiB sent": 2**10}  # smaller differences, in bytes and operations, do not count
# ending of a phase's name -> the number of rows that this rank's experts get, divided by the mean
IMBALANCES = {"": 1.0, f" at {memory.IMBALANCE:g}": memory.IMBALANCE}
MEMORY = {  # phase of the plan -> phases of a dry run; the fullest of these is compared with it
    "load": ("load",),
    "sync": ("push",),
    "reference": ("reference", "old policy", "teacher"),
    "update": ("forward", "backward"),
    "optimizer": ("update",),
    "save": ("save",),
}
NOT_RUN = ("engine weights", "engine factors", "key-value cache", "communication buffers", "runtime")
WORK = ("activations", "merged weights", "merging in fp32")
EXACT = {
    "weights": "base",
    "adapters": "lora",
    "working factors": "working factors",
    "moments": "optimizer",
    "older": "older factors",
    "teacher": "teacher",
    "gradients": "gradients",
}
EXPERT_GROUPS = ("expert", "expert counts")
PASSES = ("reference", "old policy", "teacher", "forward", "backward")  # these exchange nothing over the data ranks
PASS_GROUPS = ("tensor", *EXPERT_GROUPS, "all ranks, on the host")
ALL_GROUPS = (*PASS_GROUPS, "data", "expert_data")


@dataclass
class DryRun:
    """The measurements of one rank's step."""

    cfg: Config
    arch: Architecture
    layout: RankGrid
    kind: str  # cpu | cuda | npu
    rows: int  # number of rows in the micro-batch on this rank
    length: int  # number of tokens per row
    phases: dict[str, Phase] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)  # bytes during an update, by the kinds of EXACT
    left: int = 0  # bytes that the last update leaves allocated


class Compared(NamedTuple):
    """A figure as planned and as found by the dry run, in bytes or operations."""

    what: str
    unit: str  # a key of UNITS
    planned: float
    found: float
    agrees: bool


# ----------------------------------------------------------------------------------------------- compared with the plan


def compare(done: DryRun) -> list[Compared]:
    """Compare every figure that both the plan and the dry run have."""
    rows = []
    for ending, imbalance in IMBALANCES.items():
        rows += _memory(done, ending, imbalance)
    return rows + _exact(done) + _operations(done) + _traffic(done)


def _memory(done: DryRun, ending: str, imbalance: float) -> list[Compared]:
    """Compare the peak bytes of each phase whose name ends in ``ending``. These phases ran with ``imbalance``."""
    plan = memory.step_memory(done.cfg, done.arch, done.layout, done.kind, 0, imbalance)
    elsewhere = sum(plan.parts[name] for name in NOT_RUN)
    rows = []
    for planned, phases in MEMORY.items():
        peaks = {name: done.phases[name + ending].peak for name in phases if name + ending in done.phases}
        if not peaks:
            continue
        what = " and ".join(peaks) + ending
        peak = max(peaks.values())
        size = plan.phases[planned] - (plan.parts["runtime"] if planned == "load" else elsewhere)
        rows.append(_compared(what, "GiB", size, peak))
        if planned == "update":
            work = sum(plan.parts[part] for part in WORK)
            rows.append(_compared(f"activations of {what}", "GiB", work, peak - sum(done.held.values())))
    return rows


def _exact(done: DryRun) -> list[Compared]:
    """Compare the bytes that must be exactly as planned, and the bytes that an update leaves allocated."""
    parts = memory.step_memory(done.cfg, done.arch, done.layout, done.kind, 0, 1).parts
    allowed = max(0.02 * parts["activations"], SLACK["GiB"])
    rows = [Compared("alive after it", "GiB", 0, done.left, done.left <= allowed)]
    for kind, part in EXACT.items():
        planned, found = parts[part], done.held[kind]
        rows.append(Compared(kind, "GiB", planned, found, planned == found))
    return rows


def _compared(what: str, unit: str, planned: float, found: float) -> Compared:
    allowed = max(WITHIN * planned, SLACK[unit])
    return Compared(what, unit, planned, found, abs(found - planned) <= allowed)


def _operations(done: DryRun) -> list[Compared]:
    """Compare the operations of one micro-batch on one rank. All its rows answer one prompt of one token."""
    number = done.rows * done.layout.data
    rows = roofline.equal_rows(number, 1, done.length - 1, group=number)
    cfg = done.cfg
    forward, backward = roofline.update_flops(
        done.arch, cfg.lora, rows, recompute=cfg.model.recompute, merged=cfg.merging >= Merging.PASSES
    )
    frozen = sum(roofline.forward_flops(done.arch, rows).values())
    planned = {"reference": frozen, "forward": forward, "backward": backward}
    return [
        _compared(phase, "TFLOP", flops / done.layout.ranks, done.phases[phase].flops)
        for phase, flops in planned.items()
        if phase in done.phases
    ]


def _traffic(done: DryRun) -> list[Compared]:
    """Compare the bytes that a rank sends over each kind of group. Over some groups it should send none."""
    cfg, layout = done.cfg, done.layout
    tokens, element = done.rows * done.length * layout.data, memory.ELEMENT_BYTES[cfg.model.dtype]
    again = int(cfg.model.recompute)
    rows = []
    for phase, passes, ends in (("reference", 1, 2), ("forward", 1, 2), ("backward", 1 + again, again)):
        if phase in done.phases:
            planned = roofline.exchange_bytes(done.arch, layout, tokens, element, passes, ends)
            for cause, groups in (("tensor exchange", ("tensor",)), ("expert exchange", EXPERT_GROUPS)):
                rows.append(_compared(f"{phase}: {cause}", "MiB sent", planned[cause], _sent(done, phase, groups)))
    for kind, size in roofline.gradient_bytes(done.arch, cfg.lora, layout).items():
        rows.append(_compared(f"update: {kind} group", "MiB sent", size, _sent(done, "update", (kind,))))
    for name, phase in done.phases.items():
        groups = PASS_GROUPS if name.startswith(PASSES) else ALL_GROUPS
        for (operator, group), sent in phase.sent.items():
            if group not in groups:
                rows.append(Compared(f"{name}: {operator} over {group}", "MiB sent", 0, sent, agrees=False))
    return rows


def _sent(done: DryRun, phase: str, groups: Iterable[str]) -> int:
    return sum(sent for (_, group), sent in done.phases[phase].sent.items() if group in groups)


# ------------------------------------------------------------------------------------------------ output


def as_json(done: DryRun, rows: list[Compared]) -> dict[str, Any]:
    """Return the figures for --json, in bytes and operations."""
    phases: dict[str, dict] = {}
    launches: dict[str, int] = {}
    for name, phase in done.phases.items():
        collectives = [
            {"operator": operator, "group": group, "count": count, "bytes": phase.sent[operator, group]}
            for (operator, group), count in phase.collectives.items()
        ]
        phases[name] = {"peak_bytes": phase.peak, "flops": phase.flops, "collectives": collectives}
        launches[name] = phase.launches
    return {
        "device": _device(done),
        "ranks": done.layout.ranks,
        "tokens": done.rows * done.length,
        "phases": phases,
        "launches": launches,
        "compared": [row._asdict() for row in rows],
    }


def as_text(done: DryRun, rows: list[Compared]) -> str:
    """Return the figures as tables of text."""
    lines = [
        f"a micro-batch of {done.rows * done.length:,} tokens; nothing was computed; device {_device(done)}",
        "",
        f"{'':50} {'peak GiB':>12} {'TFLOP':>12} {'launches':>12} {'MiB sent':>12}",
    ]
    for name, phase in done.phases.items():
        sent = phase.sent.total() / 2**20
        lines.append(
            f"  {name:48} {phase.peak / 2**30:12.3f} {phase.flops / 1e12:12.3f} {phase.launches:12,} {sent:12.3f}"
        )
    lines += ["", f"{'compared with the plan':50} {'planned':>12} {'dry run':>12}"]
    for row in rows:
        planned, found = (value / UNITS[row.unit] for value in (row.planned, row.found))
        differs = "" if row.agrees else "  DIFFERS"
        lines.append(f"  {row.what:48} {planned:12.3f} {found:12.3f} {row.unit}{differs}")
    return "\n".join(lines)


def _device(done: DryRun) -> str:
    stand_in = "" if done.kind == "cpu" else " on a simulated device; none of its kernels ran"
    return f"{done.kind}: its branches of hardware/kernels.py{stand_in}"
