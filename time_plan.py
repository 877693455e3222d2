"""Seconds of a step by roofline: what the device's arithmetic, memory and links allow, phase by phase. No torch.

An estimate to compare layouts and to find the bottleneck, never a measurement; every assumption is a field of Machine
and is printed with the plan. The figures of the 910C are published ones, its link a guess; nothing here has been run
on it. tests/test_time_plan.py holds the formulas to an independent calculation for Qwen3-30B-A3B on 16 dies.
"""

from __future__ import annotations

from dataclasses import dataclass

from config import Config
from hf_config import Architecture
from layout_plan import Layout
from memory_plan import ELEMENT, GIB, Memory


@dataclass(frozen=True)
class Machine:
    """What one rank has. Shares are of the peak."""

    memory_gib: float  # 0: the machine's memory, shared by its ranks
    flops: float  # per second, in the model's dtype
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second to other ranks of the node
    training_share: float  # of flops, in training and prefill
    link_share: float
    decode_step_seconds: float  # least time of a decode step: launches, not arithmetic


MACHINES = {
    # 910C: half a package's 752 TFLOP/s, 3.2 TB/s and 392 GB/s; decode steps of 20-34 ms are published.
    "npu": Machine(61, 376e12, 1.6e12, 196e9, 0.2, 0.5, 0.020),
    "cuda": Machine(80, 989e12, 3.35e12, 450e9, 0.2, 0.5, 0.010),  # an 80 GB H100's data sheet
    "cpu": Machine(0, 100e9, 13e9, 2e9, 0.5, 0.5, 0.0),  # one core of a server, fp32
}


def active_parameters(arch: Architecture) -> int:
    """Parameters that one token meets; the look-up of its embedding is free."""
    h = arch.hidden_size
    attention = h * arch.qkv_size + h * arch.num_heads * arch.head_dim
    moe = h * (arch.num_experts + 3 * arch.experts_per_token * arch.expert_ffn_size + 3 * arch.shared_expert_ffn_size)
    dense = 3 * h * arch.dense_ffn_size
    return arch.num_layers * attention + sum(moe if m else dense for m in arch.moe_layers) + arch.vocab_size * h


def forward_flops(arch: Architecture, tokens: float, length: float) -> float:
    """Of one forward pass over ``tokens`` in rows of ``length``, causal attention included."""
    attention = 4 * arch.num_layers * arch.num_heads * arch.head_dim * length / 2
    return tokens * (2 * active_parameters(arch) + attention)


def decode_step(
    arch: Architecture,
    machine: Machine,
    *,
    ranks: int,
    tensor: int,
    expert: int,
    sequences: int,
    context: float,
    element: int,
) -> dict[str, float]:
    """Seconds of one decode step of ``sequences`` rows over all ``ranks``, each with ``context`` cached tokens.

    ``tensor`` ranks split attention, ``expert`` ranks split one copy of the experts, and meet its rows only.
    """  # fmt: skip
    h, layers, moe = arch.hidden_size, arch.num_layers, sum(arch.moe_layers)
    rows = sequences * tensor / ranks  # of one tensor group
    met = arch.num_experts * (1 - (1 - arch.experts_per_token / arch.num_experts) ** (sequences * expert / ranks))
    one_expert = 3 * h * arch.expert_ffn_size
    whole = active_parameters(arch) - moe * arch.experts_per_token * one_expert
    weights = (moe * met * one_expert / expert + whole / tensor) * element
    heads = max(1, arch.num_kv_heads / tensor)
    cache = rows * context * 2 * layers * heads * arch.head_dim * element
    exchanged = 4 * layers * rows * h * element * (tensor - 1) / tensor  # two all-reduces a layer
    if expert > tensor:
        exchanged += 2 * moe * sequences / ranks * arch.experts_per_token * h * element
    seconds = {
        "weights": weights / machine.bandwidth,
        "cache": cache / machine.bandwidth,
        "arithmetic": 2 * active_parameters(arch) * sequences / ranks / machine.flops,
        "exchange": exchanged / machine.link,
    }
    return seconds | {"total": max(seconds["weights"] + seconds["cache"], seconds["arithmetic"]) + seconds["exchange"]}


def exchange_seconds(arch: Architecture, machine: Machine, layout: Layout, tokens: float, element: int) -> float:
    """Of the trainer's forward pass over ``tokens``: tensor ranks gather and scatter, experts' ranks trade rows."""
    h = arch.hidden_size
    tensor = 4 * arch.num_layers * tokens / layout.data * h * element * (layout.tensor - 1) / layout.tensor
    experts = layout.expert * layout.expert_tensor
    traded = 2 * sum(arch.moe_layers) * tokens / layout.ranks * arch.experts_per_token * h * element
    return (tensor + traded * (1 - 1 / experts)) / (machine.link * machine.link_share)


@dataclass(frozen=True)
class Times:
    """Seconds of a step's phases, and what they rest on."""

    phases: dict[str, float]
    decode: dict[str, float]  # one decode step
    waves: int  # rounds of sampling that the key-value cache allows at once
    launch_bound: bool  # a decode step takes its least time, not its roofline's

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def bottleneck(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)


def plan(
    cfg: Config, arch: Architecture, layout: Layout, machine: Machine, memory: Memory, prompt: float, completion: float
) -> Times:
    """Every phase of a step for prompts of ``prompt`` and completions of ``completion`` tokens on average."""
    element, rollout = ELEMENT[cfg.model.dtype], cfg.rollout
    sequences = rollout.prompts_per_step * rollout.group_size
    tokens = -(-sequences // layout.data) * layout.data * (prompt + completion)  # ranks wait for the fullest
    waves = -(-memory.wanted_rows // max(1, memory.cached_rows))
    decode = decode_step(
        arch, machine, ranks=layout.ranks, tensor=layout.engine_tensor, expert=layout.engine_expert,
        sequences=-(-memory.wanted_rows // waves) * layout.replicas,
        context=prompt + completion / 2, element=element,
    )  # fmt: skip
    one_step = max(decode["total"], machine.decode_step_seconds)
    rate = layout.ranks * machine.flops * machine.training_share
    forward = forward_flops(arch, tokens, prompt + completion) / rate
    exchange = exchange_seconds(arch, machine, layout, tokens, element)
    updates = rollout.prompts_per_step // max(1, cfg.optim.prompts_per_update)
    again = 1 if cfg.model.recompute else 0
    phases = {
        "sync": _sync_seconds(cfg, arch, layout, machine, element),
        "prefill": forward_flops(arch, rollout.prompts_per_step * prompt, prompt) / rate,
        "decode": waves * completion * one_step,
        "old policy": forward + exchange if updates > 1 or cfg.replay.mode == "r2" else 0.0,
        "reference": forward + exchange if cfg.loss.kl != "none" else 0.0,
        "update forward": forward + exchange,
        "update backward": (1 + again) * (forward + exchange),
    }
    return Times(phases, decode, int(waves), one_step > decode["total"])


def _sync_seconds(cfg: Config, arch: Architecture, layout: Layout, machine: Machine, element: int) -> float:
    """Every rank receives each adapted tensor whole and writes its share; or it reads and writes its own shards."""
    h = arch.hidden_size
    split = experts = 0
    if "linear_qkv" in cfg.lora.targets:
        split += arch.num_layers * h * arch.qkv_size
    if "linear_proj" in cfg.lora.targets:
        split += arch.num_layers * h * arch.num_heads * arch.head_dim
    if {"linear_fc1", "linear_fc2"} & set(cfg.lora.targets):
        dense = sum(arch.shared_expert_ffn_size if is_moe else arch.dense_ffn_size for is_moe in arch.moe_layers)
        split += 3 * h * dense
        experts += 3 * h * sum(arch.moe_layers) * arch.num_experts * arch.expert_ffn_size
    if layout.engine_expert > layout.engine_tensor:
        return (split / layout.tensor + experts / layout.expert) * element * 2 / machine.bandwidth
    return (split + experts) * element * (1 / (machine.link * machine.link_share) + 2 / machine.bandwidth)


def assumptions(machine: Machine, prompt: float, completion: float) -> str:
    """What the seconds rest on, in one line."""
    return (
        f"{machine.flops / 1e12:g} TFLOP/s at {machine.training_share:.0%} in training, "
        f"{machine.bandwidth / 1e12:g} TB/s, {machine.link / 1e9:g} GB/s link at {machine.link_share:.0%}, "
        "the same between nodes, "
        f"a decode step takes at least {machine.decode_step_seconds * 1e3:g} ms, "
        f"prompts of {prompt:g} and completions of {completion:g} tokens; a roofline, not a measurement"
    )


def advice(cfg: Config, times: Times, memory: Memory) -> str:
    """What would shorten the longest phase."""
    if times.bottleneck == "decode":
        if times.waves > 1:
            return f"the key-value cache allows {times.waves} waves: more rollout.kv_cache_mib, up to one wave"
        if times.launch_bound:
            eager = "rollout.enforce_eager=false; then " if cfg.rollout.enforce_eager else ""
            return f"decoding is bound by launches: {eager}more sequences a step cost almost nothing"
        kind = max(("weights", "cache", "arithmetic", "exchange"), key=times.decode.__getitem__)
        return (
            f"decoding is bound by {kind}: "
            + {
                "weights": "a larger rollout.tensor reads fewer bytes a rank, more sequences share each read",
                "cache": "shorter completions, or more ranks",
                "arithmetic": "more ranks",
                "exchange": "a smaller rollout.tensor",
            }[kind]
        )
    if times.bottleneck == "update backward" and cfg.model.recompute:
        return "model.recompute=false saves a forward pass, if the activations fit; then more ranks"
    return {
        "sync": "fewer lora.targets: what is not adapted does not travel",
        "prefill": "shorter prompts, or more ranks",
        "old policy": "one update a step (optim.prompts_per_update = rollout.prompts_per_step) needs no such pass",
        "reference": "loss.kl=none needs no such pass; or more ranks",
    }.get(times.bottleneck, "fuller micro-batches (optim.tokens_per_micro_batch), or more ranks")


def capacity_bytes(machine: Machine, ranks_here: int, host_bytes: int) -> int:
    """Memory of one rank; on a CPU its share of the host's."""
    return int(machine.memory_gib * GIB) if machine.memory_gib else host_bytes // ranks_here
