"""Adjusts the plan with two constants that are computed from the timing.jsonl of a run.

    python preflight.py CONFIG --calibrate TIMING

The first constant is the least time that a layer needs in a decode step. It follows from the seconds of sampling. The
second constant is the share of the device's peak arithmetic that training reaches. It follows from the seconds of the
trainer's passes. Nothing here imports torch.
"""

import dataclasses
import math
import statistics
from pathlib import Path

from facts.exits import InputError
from knobs import Config, RolloutConfig
from plan.search import Setting, judge
from runlog.run_record import read_lines

TRAINING = ("timing/old_logp_s", "timing/reference_s", "timing/teacher_s", "timing/update_s")  # seconds of timing.jsonl
PLANNED = (
    "old policy",
    "reference",
    "teacher",
    "update forward",
    "update backward",
    "optimizer",
)  # the names of these phases in the plan
NEEDED = ("timing/generate_s", "timing/update_s", "timing/step_s")
READ = {*NEEDED, *TRAINING, "perf/tokens_per_s"}


def read(path: Path) -> dict[str, float]:
    """Return the median of each metric in READ over the steps in a run's timing.jsonl.

    The first step is left out if there are more steps, because it includes the start-up. Raises InputError if the file
    does not exist or lacks a metric in NEEDED.
    """
    if not path.is_file():
        raise InputError(f"--calibrate: there is no file {path}; give the timing.jsonl of a run")
    rows = [row for row in read_lines(path) if "timing/step_s" in row]
    timing = {}
    for name in READ:
        values = [row[name] for row in rows[1:] or rows if row.get(name) is not None]  # null: the value was not finite
        if values:
            timing[name] = statistics.median(values)
    lacking = [name for name in NEEDED if not timing.get(name)]
    if lacking:
        raise InputError(f"{path}: no {', '.join(lacking)} in it; give the timing.jsonl of a run with a finished step")
    return timing


def completion_tokens(rollout: RolloutConfig, timing: dict[str, float]) -> float:
    """Return the mean number of tokens per completion, computed from the sampled tokens per second.

    The result is at most rollout.max_new_tokens. If ``timing`` lacks perf/tokens_per_s, the result is this limit.
    """
    longest, sequences = rollout.max_new_tokens, rollout.prompts_per_step * rollout.group_size
    sampled = timing.get("perf/tokens_per_s", math.inf) * timing["timing/step_s"] / sequences
    return longest if sampled >= longest else max(1, round(sampled))


def calibrated(cfg: Config, ranks: int, setting: Setting, timing: dict[str, float]) -> Setting:
    """Return ``setting`` with the two constants chosen so that the plan of ``cfg`` predicts the measured seconds.

    ``timing`` is the result of `read`. The constants follow from a plan without overhead, in which arithmetic runs at
    the peak and traffic takes additional time. Their values stay physically possible: the share of the peak is at most
    1, and the seconds are not negative. Raises InputError for a CPU. If a rule refuses the layout, ``setting`` is
    returned unchanged.
    """
    if setting.device == "cpu":
        raise InputError("--calibrate: the plan of a CPU has no measured constants; set device to npu or cuda")
    no_overhead = dataclasses.replace(
        setting.hardware, training_share=1.0, graph_layer_seconds=0.0, eager_layer_seconds=0.0
    )
    times = judge(cfg, ranks, dataclasses.replace(setting, hardware=no_overhead)).times
    if times is None:
        return setting  # a rule refuses the layout, so there is no plan
    arithmetic = sum(times.causes[phase].get("arithmetic", 0.0) for phase in PLANNED)
    traffic = sum(times.phases[phase] for phase in PLANNED) - arithmetic
    training = sum(timing.get(name, 0.0) for name in TRAINING)
    share = arithmetic / max(training - traffic, arithmetic)
    decoding = max(0.0, timing["timing/generate_s"] - times.phases["prefill"] / share)
    layer = "eager_layer_seconds" if cfg.rollout.enforce_eager else "graph_layer_seconds"
    constants = {"training_share": share, layer: decoding / (times.decode_steps * setting.arch.num_layers)}
    return dataclasses.replace(setting, hardware=dataclasses.replace(setting.hardware, **constants))
