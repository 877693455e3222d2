"""What published runs measured, the constants that follow from it, and how well the runs predict each other.

    python preflight.py --published

published_runs.json has the runs, each with its source and with what was assumed about it. A constant is the median of
all that was published about it. A run is judged with the constants of the others alone. Nothing here imports torch.
"""

import dataclasses
import functools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from architecture import Architecture
from inputs.files import InputError, refused
from plan.grid import WHOLE
from plan.hardware import HARDWARE, Hardware, Range, spread
from plan.parameters import base_parameters
from plan.roofline import Rows, decode_parts, decode_step, forward_flops


@functools.cache
def _published() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("published_runs.json").read_text())


@dataclass(frozen=True)
class Run:
    """One published run. Lengths are in tokens, per sequence; sequences, updates and seconds per step."""

    name: str
    source: str
    model: str
    device: str
    ranks: int
    layout: str  # of the trainer; no formula reads it
    tensor: int  # ranks of a replica that samples
    most_rows: int  # that a replica decodes at once
    sequences: int
    prompt: float
    completion: float
    longest: int
    updates: int
    score_passes: int  # forward passes of the old policy and of the reference
    recompute: bool
    lora: bool
    offloaded: float  # share of the parameters that the host updates; with LoRA none
    graphs: bool
    step_seconds: float
    generation_seconds: float | None
    note: str  # what was assumed

    @property
    def arch(self) -> Architecture:
        sizes = _published()["models"][self.model]
        is_moe = (sizes["num_experts"] > 1,) * sizes["num_layers"]
        return Architecture(
            "qwen3_moe", **sizes, head_dim=128, shared_expert_ffn_size=0, norm_topk_prob=True, moe_layers=is_moe,
            qkv_bias=False, tied_head=False, rope_theta=1e6, rms_norm_eps=1e-6, max_positions=2**15,
        )  # fmt: skip

    @property
    def hardware(self) -> dict[str, Any]:
        return _published()["devices"][self.device]

    @property
    def decode_parts(self) -> list[tuple[float, float, float]]:
        """As roofline.decode_parts, with the rows of all replicas in place of the share."""
        replicas = self.ranks // self.tensor
        waves = -(-self.sequences // (replicas * self.most_rows))
        parts = decode_parts(self.completion, self.longest, waves, refills=True)
        return [(steps, max(1, share * self.sequences / waves), tokens) for steps, share, tokens in parts]

    @property
    def peak_seconds(self) -> float:
        """Seconds of scoring and update at the device's peak: full training has gradients of weights, too."""
        passes = self.score_passes + 1 + self.recompute + (1 if self.lora else 2)
        forward = forward_flops(self.arch, Rows(self.sequences, self.prompt, self.completion))
        return passes * sum(forward.values()) / (self.ranks * self.hardware["flops"])

    @property
    def updated_by_host(self) -> float:
        """Parameters of a rank in all updates of a step, each of which the host reads, updates and sends back."""
        return self.offloaded * self.updates * base_parameters(self.arch, WHOLE) / self.ranks


class Constants(NamedTuple):
    """What software reaches of a device, by the published runs."""

    layer_seconds: dict[tuple[str, bool], float]  # (npu | cuda, with graphs) -> least time of a layer in a decode step
    shares: dict[bool, float]  # model with experts -> share of the peak in training, exchange and launches included
    host_seconds: float  # of an update of one parameter by the host, its transfers and the push included


def runs() -> list[Run]:
    return [Run(**row) for row in _published()["runs"]]


def _median(values: Iterable[float]) -> float:
    """Of numbers that differ by factors."""
    return math.exp(statistics.median(map(math.log, values)))


def constants(others: list[Run]) -> Constants:
    """The constants by ``others`` and by what was published apart from runs."""
    layers, shares = defaultdict(list), defaultdict(list)
    for step in _published()["decode_steps"]:
        layers[step["kind"], step["graphs"]].append(step["seconds"] / step["layers"])
    for run in others:
        if run.generation_seconds:
            steps = sum(steps for steps, _, _ in run.decode_parts) * run.arch.num_layers
            layers[run.hardware["kind"], run.graphs].append(run.generation_seconds / steps)
    layer_seconds = {key: _median(values) for key, values in layers.items()}
    trained = {
        run.name: run.step_seconds - (run.generation_seconds or generation(run, layer_seconds)) for run in others
    }
    for row in _published()["shares"]:
        if row["run"] in (None, *trained):  # a share of a run that is left out is left out, too
            shares[row["experts"]].append(row["share"])
    for run in others:
        if not run.offloaded:
            shares[any(run.arch.moe_layers)].append(run.peak_seconds / trained[run.name])
    share = {experts: _median(values) for experts, values in shares.items()}
    by_host = [
        (trained[run.name] - run.peak_seconds / share[any(run.arch.moe_layers)]) / run.updated_by_host
        for run in others
        if run.offloaded
    ]
    return Constants(layer_seconds, share, _median(by_host))


def generation(run: Run, layer_seconds: dict[tuple[str, bool], float]) -> float:
    """Seconds of decoding: each step takes its roofline, or its launches if they take longer. Prefill is neglected."""
    hardware = dataclasses.replace(
        HARDWARE[run.hardware["kind"]],
        **{name: run.hardware[name] for name in ("flops", "bandwidth", "link", "between_nodes")},
    )
    launches = run.arch.num_layers * layer_seconds[run.hardware["kind"], run.graphs]
    seconds = 0.0
    for steps, rows, tokens in run.decode_parts:
        step = decode_step(
            run.arch, hardware, ranks=run.ranks, tensor=run.tensor, expert=run.tensor, sequences=rows,
            context=run.prompt + tokens, element=2,
        )  # fmt: skip
        seconds += steps * max(launches, step["total"])
    return seconds


def estimate(run: Run, found: Constants) -> tuple[Range, Range]:
    """The ranges of a step and of its generation by the constants ``found``."""
    decoding = generation(run, found.layer_seconds)
    training = run.peak_seconds / found.shares[any(run.arch.moe_layers)]
    total = decoding + training + run.updated_by_host * found.host_seconds
    return spread(total, total), spread(decoding, decoding)


@functools.cache
def calibrated(device: str) -> Hardware:
    """The device with the constants of all published runs. Nothing was published about a CPU."""
    if device == "cpu":
        return HARDWARE[device]
    found = constants(runs())
    return dataclasses.replace(
        HARDWARE[device],
        training_share=found.shares[True],
        graph_layer_seconds=found.layer_seconds[device, True],
        eager_layer_seconds=found.layer_seconds[device, False],
    )


class Judgement(NamedTuple):
    """A published run beside the ranges that the constants of the other runs give."""

    run: Run
    step: Range
    generation: Range
    half_the_ranks: Range  # of a step; a range that holds the published time here, too, would say nothing
    no_recompute: Range


def judgements(*, apart: bool = False) -> list[Judgement]:
    """Every published run, left out of the constants that judge it; ``apart``: with all of its model and ranks."""
    found = []
    for run in (everything := runs()):
        alike = [other for other in everything if apart and (other.model, other.ranks) == (run.model, run.ranks)]
        others = constants([other for other in everything if other is not run and other not in alike])
        half = dataclasses.replace(run, ranks=run.ranks // 2, tensor=min(run.tensor, run.ranks // 2))
        kept = dataclasses.replace(run, recompute=False)
        found.append(Judgement(run, *estimate(run, others), estimate(half, others)[0], estimate(kept, others)[0]))
    return found


def holds(range_: Range, seconds: float) -> bool:
    return range_.low <= seconds <= range_.high


def _count(judged: list[Judgement], kind: str) -> str:
    """Of how many of the published steps, or times of generation, the range holds them."""
    published = "generation_seconds" if kind == "generation" else "step_seconds"
    pairs = [(getattr(each, kind), seconds) for each in judged if (seconds := getattr(each.run, published))]
    return f"{sum(holds(*pair) for pair in pairs)} of {len(pairs)}"


def main(arguments: list[str]) -> int:
    """Print every published run beside its ranges. Exit code 0; 2 with arguments, because it takes none."""
    if arguments:
        return refused(InputError(f"--published: found {' '.join(arguments)}; needed: no other argument"))
    judged = judgements()
    print("seconds published, and the range by the constants of the other runs:")
    for run, *ranges, _, _ in judged:
        for kind, seconds, (low, high) in zip(
            ("step", "generation"), (run.step_seconds, run.generation_seconds), ranges, strict=True
        ):
            if seconds:
                verdict = "inside" if low <= seconds <= high else "MISSED"
                what = f"{run.name:18} {run.model:16}{run.ranks:4} x {run.device:6} {kind:11}"
                print(f"  {verdict}  {what}{seconds:6.1f} {low:6.1f} to {high:.1f}")
    apart = judgements(apart=True)
    print(f"inside: {_count(judged, 'step')} steps and {_count(judged, 'generation')} times of generation;")
    print(
        "  with the constants of other models and numbers of devices alone: "
        f"{_count(apart, 'step')} and {_count(apart, 'generation')}"
    )
    recomputing = [each for each in judged if each.run.recompute]
    print(
        f"  a plan for half the ranks would hold {_count(judged, 'half_the_ranks')} steps, "
        f"one without recompute {_count(recomputing, 'no_recompute')} with it"
    )
    found = constants(runs())
    print("constants by all of them:")
    for (kind, graphs), seconds in sorted(found.layer_seconds.items()):
        print(f"  {seconds * 1e3:.3g} ms a layer of a decode step on {kind}, {'with' if graphs else 'without'} graphs")
    print(f"  {found.shares[True]:.1%} of the peak in training with experts, {found.shares[False]:.1%} without")
    print(f"  {found.host_seconds * 1e9:.3g} ns for each parameter of a rank in an update by the host")
    return 0
