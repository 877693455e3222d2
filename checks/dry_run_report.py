"""What a dry run prints."""

import dataclasses
from collections.abc import Sequence

from architecture import Architecture
from checks import confirmed
from checks.dry_run_meter import KINDS, Meter
from knobs import Config
from plan import grid, memory

PHASES = ("load", "push", "reference", "old policy", "forward", "backward", "update", "save")


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What one rank does in a step."""

    cfg: Config
    arch: Architecture
    layout: grid.RankGrid
    kind: str  # cpu | cuda | npu
    meter: Meter
    left: int  # bytes that are alive after the update and were not before it
    pushed: int  # tensors that the engine gets one by one at a push
    tokens: int  # of the micro-batch on this rank
    length: int  # of its rows


def figures(done: DryRun, rank: int, imbalances: Sequence[float]) -> dict:
    """What --json prints, in bytes and operations."""
    phases = {}
    names = [phase + ending for phase in PHASES for ending in dict.fromkeys(["", *map(confirmed.suffix, imbalances)])]
    for name in (name for name in names if name in done.meter.phases):
        seen = done.meter.phases[name]
        peak = done.meter.peak(name)
        phases[name] = {
            "peak_bytes": peak.bytes,
            "kinds": peak.kinds,
            "largest": [{"bytes": size, "count": count, "where": where} for size, count, where in peak.largest],
            "operations": seen.operations,
            "launches_by_operator": dict(seen.launches.most_common()),
            "waits": dict(seen.waits.most_common()),
            "flops": sum(seen.flops.values()),
            "flops_by_operator": dict(seen.flops),
            "collectives": [
                {"operator": operator, "group": group, "count": count, "bytes": seen.sent[operator, group]}
                for (operator, group), count in seen.collectives.items()
            ],
        }
    return {
        "device": f"{done.kind}: its branches of kernels.py"
        + " on a stand-in device, no kernel of it ran" * (done.kind != "cpu"),
        "rank": rank,
        "ranks": done.layout.ranks,
        "imbalances": list(imbalances),
        "tokens": done.tokens,
        "length": done.length,
        "left_bytes": done.left,
        "pushed_tensors": done.pushed,
        "phases": phases,
        "launches": {name: done.meter.phases[name].launches.total() for name in phases},
        "side": done.layout.role,
    }


def as_text(counted: dict, rows: list[confirmed.Compared], title: str) -> str:
    """The figures for a reader."""
    gib, mib = memory.GIB, 2**20
    lines = [
        title,
        "",
        f"GiB at the fullest moment of {'':7}    all {''.join(f'{kind:>12}' for kind in KINDS)}   TFLOP launches waits",
    ]
    for name, phase in counted["phases"].items():
        kinds = "".join(f"{phase['kinds'][kind] / gib:12.3f}" for kind in KINDS)
        lines.append(
            f"  {name:30} {phase['peak_bytes'] / gib:7.3f} {kinds} {phase['flops'] / 1e12:7.3f}"
            f" {counted['launches'][name]:8,} {sum(phase['waits'].values()):5,}"
        )
    if counted["side"] != "samplers":
        lines.append(f"  {counted['left_bytes'] / mib:.1f} MiB of an update are alive after it")
    if counted["side"] != "trainers":
        lines.append(f"  a push hands {counted['pushed_tensors']:,} tensors to the engine")
    waits = [(name, where, n) for name, phase in counted["phases"].items() for where, n in phase["waits"].items()]
    lines += ["", "the host waits for the device", *(f"  {name:30} x {n:5} {where}" for name, where, n in waits)]
    lines += ["", "collectives"]
    lines += [
        f"  {name:30} {one['operator']:20} {one['group']:24} x {one['count']:5} {one['bytes'] / mib:10.2f} MiB sent"
        for name, phase in counted["phases"].items()
        for one in phase["collectives"]
    ]
    fullest = confirmed.suffix(max(counted["imbalances"]))
    for name, phase in counted["phases"].items():
        if name + fullest in counted["phases"] and fullest:
            continue
        lines += ["", f"largest of {name}, apart from weights, adapters and moments"]
        lines += [f"  {one['bytes'] / mib:9.1f} MiB {one['count']:5} x  {one['where']}" for one in phase["largest"]]
    units = {"GiB": gib, "TFLOP": 1e12, "MiB sent": mib}
    lines += ["", f"{'beside the plan':34} {'planned':>12} {'dry run':>12}"]
    for row in rows:
        planned, seen = (value / units[row.unit] for value in (row.planned, row.found))
        ratio = f"{row.found / row.planned:8.3f}" if row.planned else f"{'':8}"
        lines.append(
            f"  {row.what:32} {planned:12.3f} {seen:12.3f} {row.unit:8} {ratio}{'' if row.agrees else '  DIFFERS'}"
        )
    return "\n".join(lines)
