"""The plan beside a dry run: which figures agree. No torch here."""

from typing import Any, NamedTuple

from architecture import Architecture
from knobs import Config
from plan import memory, roofline
from plan.grid import RankGrid

WITHIN = 0.1  # largest relative difference of a figure that counts as confirmed
SLACK = {"GiB": 8 * 2**20, "TFLOP": 0, "MiB sent": 2**10}  # differences that do not count, in bytes and operations
NOT_RUN = ("engine weights", "engine factors", "key-value cache", "communication buffers", "runtime")
MEMORY = {  # phase of the plan -> phases of a dry run, the fullest of which it is compared with
    "load": ("load",), "sync": ("push",), "reference": ("reference", "old policy"), "update": ("forward", "backward"),
    "optimizer": ("update",), "save": ("save",),
}  # fmt: skip
EXACT = {
    "weights": "base", "adapters": "lora", "moments": "optimizer", "older": "older factors", "gradients": "gradients",
}  # fmt: skip
EXPERT_GROUPS = ("expert", "expert_tensor", "expert_tensor x expert")


def suffix(imbalance: float) -> str:
    """What the name of a phase of a micro-batch ends with, if the experts' rows are not even."""
    return "" if imbalance == 1 else f" at {imbalance:g}"


class Compared(NamedTuple):
    """A figure of the plan and of the dry run."""

    what: str
    unit: str  # GiB | TFLOP | MiB sent
    planned: float
    found: float
    agrees: bool


def compare(cfg: Config, arch: Architecture, layout: RankGrid, device: str, counted: dict[str, Any]) -> list[Compared]:
    """Every figure that both have. ``counted``: what `preflight.py --dry-run --json` prints."""
    rows = []
    for imbalance in counted["imbalances"]:
        plan = memory.step_memory(cfg, arch, layout, device, 0, imbalance)
        elsewhere = sum(plan.parts[name] for name in NOT_RUN)
        for planned, phases in MEMORY.items():
            ending = suffix(imbalance)
            there = [phase for phase in phases if phase + ending in counted["phases"]]
            if not there:
                continue
            seen = max((counted["phases"][phase + ending] for phase in there), key=lambda phase: phase["peak_bytes"])
            size = plan.phases[planned] - (plan.parts["runtime"] if planned == "load" else elsewhere)
            name = " and ".join(there) + (f", imbalance {imbalance:g}" if ending else "")
            rows.append(_compared(name, "GiB", size, seen["peak_bytes"]))
            if planned == "update":
                resident = sum(seen["kinds"].get(kind, 0) for kind in EXACT)
                work = sum(plan.parts[part] for part in ("activations", "merged weights", "merging in fp32"))
                rows.append(_compared(f"activations of {name}", "GiB", work, seen["peak_bytes"] - resident))
            if planned == "optimizer" and imbalance == 1:
                left = counted["left_bytes"]
                rows.append(
                    Compared(
                        "alive after it", "GiB", 0, left, left <= max(0.02 * plan.parts["activations"], SLACK["GiB"])
                    )
                )
                for kind, part in EXACT.items():
                    found = seen["kinds"].get(kind, 0)
                    rows.append(Compared(kind, "GiB", plan.parts[part], found, plan.parts[part] == found))
    if layout.role == "samplers":  # their sampling is not in a dry run
        return rows
    return rows + _operations(cfg, arch, layout, counted) + _traffic(cfg, arch, layout, counted)


def _compared(what: str, unit: str, planned: float, found: float) -> Compared:
    return Compared(what, unit, planned, found, abs(found - planned) <= max(WITHIN * planned, SLACK[unit]))


def _operations(cfg: Config, arch: Architecture, layout: RankGrid, counted: dict[str, Any]) -> list[Compared]:
    """Floating-point operations of one micro-batch on one rank. All its rows answer one prompt of one token."""
    number, length = counted["tokens"] / counted["length"] * layout.data, counted["length"]
    rows = roofline.Rows(number, 1, length - 1, group=max(1, int(number)))
    forward, backward = roofline.update_flops(cfg, arch, rows)
    frozen = sum(roofline.forward_flops(arch, rows).values())
    planned = {"reference": frozen, "forward": forward, "backward": backward}
    return [
        _compared(phase, "TFLOP", flops / layout.ranks, counted["phases"][phase]["flops"])
        for phase, flops in planned.items()
        if phase in counted["phases"]
    ]


def _traffic(cfg: Config, arch: Architecture, layout: RankGrid, counted: dict[str, Any]) -> list[Compared]:
    """Bytes that a rank sends over each kind of group."""
    tokens, element = counted["tokens"] * layout.data, memory.ELEMENT_BYTES[cfg.model.dtype]
    passes = {phase: (1, 2) for phase in ("reference", "forward")}
    passes["backward"] = (1 + cfg.model.recompute, int(cfg.model.recompute))
    rows = []
    for phase, (times, ends) in passes.items():
        planned = roofline.exchange_bytes(arch, layout, tokens, element, times, ends)
        for cause, groups in (("tensor exchange", ("tensor",)), ("expert exchange", EXPERT_GROUPS)):
            if phase in counted["phases"]:
                rows.append(_compared(f"{phase}: {cause}", "MiB sent", planned[cause], _sent(counted, phase, groups)))
    for kind, size in roofline.gradient_bytes(arch, cfg.lora, layout).items():
        rows.append(_compared(f"update: {kind} group", "MiB sent", size, _sent(counted, "update", (kind,))))
    passing = {"tensor", *EXPERT_GROUPS}
    for phase, seen in counted["phases"].items():
        allowed = passing if phase.startswith((*passes, "old policy")) else {*passing, "data", "expert_data"}
        for one in seen["collectives"]:
            if one["group"] not in allowed and "host" not in one["group"]:
                what = f"{phase}: {one['operator']} over {one['group']}"
                rows.append(Compared(what, "MiB sent", 0, one["bytes"], agrees=False))
    return rows


def _sent(counted: dict[str, Any], phase: str, groups: tuple[str, ...]) -> int:
    return sum(one["bytes"] for one in counted["phases"][phase]["collectives"] if one["group"] in groups)
