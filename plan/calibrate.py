"""The plan with constants that a run has measured, from its timing.jsonl.

    python preflight.py CONFIG --calibrate TIMING

Two constants of the published runs are scaled until the plan takes as long as the run: the least time of a layer in a
decode step, by the seconds of sampling, and the share of the peak in training, by those of the passes after it. Nothing
here imports torch.
"""

import dataclasses
import math
import statistics
from pathlib import Path

from inputs.files import InputError
from knobs import Config
from plan.search import Setting, judge
from run_record import read_lines

SAMPLING = {"generate": ("prefill", "decode")}  # phase of timing.jsonl -> phases of the plan
TRAINING = {
    "old_logp": ("old policy",),
    "reference": ("reference",),
    "update": ("update forward", "update backward", "optimizer"),
}
REPEATS = 30  # of the scaling; a repeat comes closer by the part of the time that the constants do not change


def medians(rows: list[dict]) -> dict[str, float]:
    """The median of each phase in these rows of timing.jsonl, of which the first one starts everything up."""
    later = rows[1:] or rows
    names = [name for name in later[-1] if name.startswith(("timing/", "samplers/")) or name == "perf/tokens_per_s"]
    return {name: statistics.median(values) for name in names if (values := _numbers(later, name))}


def _numbers(rows: list[dict], name: str) -> list[float]:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return [value for value in values if 0 <= value < math.inf]


def read(path: Path) -> dict[str, float]:
    """The measured seconds in a run's timing.jsonl. InputError for another file."""
    rows = [row for row in read_lines(path) if "timing/step_s" in row]
    found = medians(rows) if rows else {}
    if lacking := [name for name in ("generate", "update", "step") if not found.get(f"timing/{name}_s")]:
        raise InputError(
            f"{path}: no seconds of {', '.join(lacking)}; needed: the timing.jsonl of a run with a finished step"
        )
    return found


def completion_tokens(cfg: Config, timing: dict[str, float]) -> float:
    """Mean tokens of a completion by the sampled tokens a second; the longest where these are missing."""
    longest, sequences = cfg.rollout.max_new_tokens, cfg.rollout.prompts_per_step * cfg.rollout.group_size
    sampled = timing.get("perf/tokens_per_s", math.inf) * timing["timing/step_s"] / sequences
    return longest if sampled >= longest else max(1, round(sampled))


def calibrated(cfg: Config, ranks: int, setting: Setting, timing: dict[str, float]) -> Setting:
    """``setting`` with the constants by which the plan of ``cfg`` takes the measured seconds."""
    if setting.device == "cpu":
        raise InputError("--calibrate: the plan of a CPU has no measured constants; needed: device npu or cuda")
    if "samplers/generate_s" in timing:  # timing/generate_s is then no sampling
        timing = timing | {"timing/generate_s": timing["samplers/generate_s"]}
    for _ in range(REPEATS):
        verdict, hardware = judge(cfg, ranks, setting), setting.hardware
        if verdict.times is None:
            return setting  # a rule refuses the layout, so there is no plan
        decoding, training = (
            sum(timing.get(f"timing/{name}_s", 0.0) for name in of_phase)
            / sum(verdict.times.phases[phase] for phases in of_phase.values() for phase in phases)
            for of_phase in (SAMPLING, TRAINING)
        )
        layer = "eager_layer_seconds" if cfg.rollout.enforce_eager else "graph_layer_seconds"
        changed = {layer: getattr(hardware, layer) * decoding}
        share = min(1.0, hardware.training_share / training)
        setting = dataclasses.replace(setting, measured=dataclasses.replace(hardware, training_share=share, **changed))
    return setting
