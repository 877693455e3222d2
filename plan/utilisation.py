"""Computes how well a run uses its devices: tokens per second and model FLOPs utilisation (MFU, arXiv 2204.02311).

MFU is the quotient of two numbers of operations. The first is the number that the model needs for the tokens of a step.
The second is the number that the devices could compute in the time of the step. Activation recompute does not count as
useful work. Nothing here imports torch.
"""

import re
from collections.abc import Sequence

from facts.architectures import Architecture
from facts.devices import HARDWARE
from knobs import Config, LoraConfig, Merging
from plan.roofline import Rows, forward_flops, lora_flops, update_flops

# The names that the driver gives to the devices whose peak in bf16 is in HARDWARE.
NAMES = {"npu": r"Ascend910_93\d\d", "cuda": r"NVIDIA H(?:100 80GB HBM3|200)"}
Row = tuple[int, int, int]  # number of the group, tokens of the prompt, tokens of the completion


def peak_flops(kind: str, name: str, dtype: str) -> float | None:
    """Return the peak operations per second of a device that its driver calls ``name``, or None if it is not known."""
    return HARDWARE[kind].flops if dtype == "bf16" and re.fullmatch(NAMES.get(kind, "(?!)"), name) else None


def _work(rows: Sequence[Row]) -> Rows:
    """Return the work of ``rows`` in one pass through the model. A prompt counts once per group."""
    prompts = {group: prompt for group, prompt, _ in rows}
    completions = sum(completion for _, _, completion in rows)
    pairs = sum(prompt**2 / 2 for prompt in prompts.values()) + sum(c * (p + c) for _, p, c in rows)
    return Rows(sum(prompts.values()) + completions, completions, pairs)


def step_flops(
    arch: Architecture,
    lora: LoraConfig,
    sampled: Sequence[Row],
    trained: Sequence[Row],
    rounds: float = 1.0,
    *,
    merged: bool,
    earlier_passes: float,
    reference: bool,
) -> float:
    """Return the number of operations of a step: those of sampling, and those of all passes over the ``trained`` rows.

    Sampling counts as ``rounds`` forward passes over the ``sampled`` rows. If ``merged`` is true, the passes merge LoRA
    into the weights. ``earlier_passes`` is the number of passes without gradients. The pass of the reference for
    loss.kl is not among these passes; it is added if ``reference`` is true.
    """
    work = _work(trained)
    frozen = sum(forward_flops(arch, work).values())
    old_policy = frozen + lora_flops(arch, lora, work.tokens) * (not merged)
    passes = old_policy * earlier_passes + frozen * reference
    sampling = rounds * sum(forward_flops(arch, _work(sampled)).values())
    return sampling + passes + sum(update_flops(arch, lora, work, recompute=False, merged=merged))


def speed(
    cfg: Config,
    arch: Architecture,
    sampled: Sequence[Row],
    trained: Sequence[Row],
    timing: dict[str, float],
    ranks: int,
    peak: float | None,
    new_tokens: int,
) -> dict[str, float]:
    """Return the perf/... metrics of a step with these rows and this ``timing``.

    perf/mfu is only included if ``peak``, the result of `peak_flops`, is known. ``new_tokens`` counts the tokens of all
    rounds of dynamic sampling, which are assumed to need as many operations per token as those of ``sampled``.
    """
    updated, rounds = sum(p + c for _, p, c in trained), new_tokens / max(1, sum(c for _, _, c in sampled))
    found = {
        "perf/generate_tokens_per_s_device": new_tokens / max(timing["timing/generate_s"], 1e-4) / ranks,
        "perf/train_tokens_per_s_device": updated / max(timing["timing/update_s"], 1e-4) / ranks,
    }
    if peak is not None:
        operations = step_flops(
            arch,
            cfg.lora,
            sampled,
            trained,
            rounds,
            merged=cfg.merging >= Merging.PASSES,
            earlier_passes=cfg.earlier_passes + bool(cfg.loss.teacher),
            reference=cfg.loss.kl != "none",
        )
        found["perf/mfu"] = operations / (timing["timing/step_s"] * peak * ranks)
    return {name: float(f"{value:.4g}") for name, value in found.items()}
