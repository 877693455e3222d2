"""Seconds of a step by roofline: what the device's arithmetic, memory and links allow, phase by phase. No torch.

An estimate to compare layouts and to find the bottleneck, never a measurement; every assumption is a field of Machine
and is printed with the plan. The figures of the 910C are published ones, its link a guess; nothing here has been run
on it. tests/test_time_plan.py holds the formulas to an independent calculation for Qwen3-30B-A3B on 16 dies.
"""

from __future__ import annotations

from dataclasses import dataclass

from hf_config import Architecture
from knobs import Config
from plan.grid import Layout
from plan.memory import ELEMENT, GIB, Memory, lora_parameters


@dataclass(frozen=True)
class Machine:
    """What one rank has. Shares are of the peak."""

    memory_gib: float  # 0: the machine's memory, shared by its ranks
    flops: float  # per second, in the model's dtype
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second to other ranks of the node
    training_share: float  # of flops, in training and prefill
    link_share: float
    decode_step_seconds: float  # least time of a decode step that replays a graph: launches, not arithmetic
    eager_pass_seconds: float  # the same without a graph, and of a forward pass of the trainer, which has none


MACHINES = {
    # 910C: half a package's 752 TFLOP/s, 3.2 TB/s and 392 GB/s; decode steps of 20-34 ms are published.
    "npu": Machine(61, 376e12, 1.6e12, 196e9, 0.2, 0.5, 0.020, 0.034),
    "cuda": Machine(80, 989e12, 3.35e12, 450e9, 0.2, 0.5, 0.010, 0.020),  # an 80 GB H100's data sheet; guesses
    "cpu": Machine(0, 100e9, 13e9, 2e9, 0.5, 0.5, 0.0, 0.0),  # one core of a server, fp32
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


def exchange_seconds(
    arch: Architecture, machine: Machine, layout: Layout, tokens: float, element: int
) -> dict[str, float]:
    """Of the trainer's forward pass over ``tokens``: tensor ranks gather and scatter, experts' ranks trade rows."""
    h, rate = arch.hidden_size, machine.link * machine.link_share
    tensor = 4 * arch.num_layers * tokens / layout.data * h * element * (layout.tensor - 1) / layout.tensor
    experts = layout.expert * layout.expert_tensor
    traded = 2 * sum(arch.moe_layers) * tokens / layout.ranks * arch.experts_per_token * h * element
    return {"tensor exchange": tensor / rate, "expert exchange": traded * (1 - 1 / experts) / rate}


@dataclass(frozen=True)
class Times:
    """Seconds of a step's phases by cause, and what they rest on."""

    causes: dict[str, dict[str, float]]  # phase -> what takes its time
    decode: dict[str, float]  # one decode step
    waves: int  # rounds of sampling that the key-value cache allows at once
    micro_batches: int  # of a rank in one update

    @property
    def phases(self) -> dict[str, float]:
        return {phase: sum(causes.values()) for phase, causes in self.causes.items()}

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def bottleneck(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    def bound(self, phase: str) -> str:
        """What takes most of ``phase``."""
        return max(self.causes[phase], key=self.causes[phase].__getitem__)


def plan(
    cfg: Config, arch: Architecture, layout: Layout, machine: Machine, memory: Memory, prompt: float, completion: float
) -> Times:
    """Every phase of a step for prompts of ``prompt`` and completions of ``completion`` tokens on average."""
    element, rollout = ELEMENT[cfg.model.dtype], cfg.rollout
    sequences = rollout.prompts_per_step * rollout.group_size
    length = prompt + completion
    tokens = -(-sequences // layout.data) * layout.data * length  # ranks wait for the fullest
    waves = -(-memory.wanted_rows // max(1, memory.cached_rows))
    decode = decode_step(
        arch, machine, ranks=layout.ranks, tensor=layout.engine_tensor, expert=layout.engine_expert,
        sequences=-(-memory.wanted_rows // waves) * layout.replicas,
        context=prompt + completion / 2, element=element,
    )  # fmt: skip
    rate = layout.ranks * machine.flops * machine.training_share
    updates = rollout.prompts_per_step // max(1, cfg.optim.prompts_per_update)
    rows = -(-cfg.optim.prompts_per_update * rollout.group_size // layout.data)
    micro_batches = -(-rows // max(1, int(cfg.optim.tokens_per_micro_batch // length)))
    forward = _slower(
        {"arithmetic": forward_flops(arch, tokens, length) / rate},
        {"launches": updates * micro_batches * machine.eager_pass_seconds},
    ) | exchange_seconds(arch, machine, layout, tokens, element)
    backward = {cause: seconds * (2 if cfg.model.recompute else 1) for cause, seconds in forward.items()}
    again = updates > 1 or cfg.replay.mode == "r2"
    causes = {
        "sync": _sync_seconds(cfg, arch, layout, machine, element),
        "prefill": {"arithmetic": forward_flops(arch, rollout.prompts_per_step * prompt, prompt) / rate},
        "decode": {
            cause: seconds * waves * completion
            for cause, seconds in _decode_causes(decode, machine, rollout.enforce_eager).items()
        },
        "old policy": forward if again else {"": 0.0},
        "reference": forward if cfg.loss.kl != "none" else {"": 0.0},
        "update forward": forward,
        "update backward": backward,
        "optimizer": _optimizer_seconds(cfg, arch, layout, machine, updates),
    }
    return Times(causes, decode, int(waves), micro_batches)


def _slower(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """What takes longer of two that go on at the same time."""
    return max(one, other, key=lambda causes: sum(causes.values()))


def _decode_causes(decode: dict[str, float], machine: Machine, eager: bool) -> dict[str, float]:
    """Seconds of one decode step: its roofline, or its launches where those take longer."""
    reads = {name: decode[name] for name in ("weights", "cache")}
    roofline = _slower(reads, {"arithmetic": decode["arithmetic"]}) | {"exchange": decode["exchange"]}
    return _slower(roofline, {"launches": machine.eager_pass_seconds if eager else machine.decode_step_seconds})


def _sync_seconds(cfg: Config, arch: Architecture, layout: Layout, machine: Machine, element: int) -> dict[str, float]:
    """Every rank receives each adapted tensor whole and writes its share; or it reads and writes its own shards.

    With rollout.sync=adapter only the fp32 factors travel.
    """
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
        return {"memory": (split / layout.tensor + experts / layout.expert) * element * 2 / machine.bandwidth}
    size = (split + experts) * element
    if cfg.rollout.sync == "adapter":
        size = 4 * lora_parameters(arch, cfg.lora, Layout(1, 1, 1, 1, 1, 1))
    return {"exchange": size / (machine.link * machine.link_share), "memory": size * 2 / machine.bandwidth}


def _optimizer_seconds(
    cfg: Config, arch: Architecture, layout: Layout, machine: Machine, updates: int
) -> dict[str, float]:
    """Of all updates: fp32 gradients of the factors summed over the ranks that share them, and AdamW's traffic."""
    size = 4 * lora_parameters(arch, cfg.lora, layout)
    shared = 2 * (1 - 1 / max(layout.data, layout.expert_data))  # of a ring's all-reduce, at most
    # Two copies into and out of the message, clipping, and AdamW's four reads and three writes.
    seconds = {"exchange": size * shared / (machine.link * machine.link_share), "memory": 13 * size / machine.bandwidth}
    return {cause: updates * value for cause, value in seconds.items()}


def assumptions(machine: Machine, prompt: float, completion: float) -> str:
    """What the seconds rest on, in one line."""
    return (
        f"{machine.flops / 1e12:g} TFLOP/s at {machine.training_share:.0%} in training, "
        f"{machine.bandwidth / 1e12:g} TB/s, {machine.link / 1e9:g} GB/s link at {machine.link_share:.0%}, "
        "the same between nodes, "
        f"a decode step takes at least {machine.decode_step_seconds * 1e3:g} ms, a pass without a graph "
        f"{machine.eager_pass_seconds * 1e3:g} ms, "
        f"prompts of {prompt:g} and completions of {completion:g} tokens; a roofline, not a measurement"
    )


def advice(cfg: Config, times: Times, memory: Memory, phase: str) -> str:
    """What would shorten ``phase``."""
    bound = times.bound(phase)
    if phase == "decode" and times.waves > 1:
        return f"the key-value cache allows {times.waves} waves: more rollout.kv_cache_mib, up to one wave"
    if phase == "decode" and bound == "launches" and cfg.rollout.enforce_eager:
        return "rollout.enforce_eager=false: graphs launch a step at once"
    if phase == "old policy":
        return "one update a step (optim.prompts_per_update = rollout.prompts_per_step) needs no such pass"
    if phase == "update backward" and cfg.model.recompute:
        return "model.recompute=false saves a forward pass, if the activations fit"
    if bound == "launches" and phase != "decode":
        more = "optim.tokens_per_micro_batch" if times.micro_batches > 1 else "optim.prompts_per_update"
        return f"fuller micro-batches: a larger {more}"
    for known, what in (
        (("decode", "launches"), "more sequences a step cost almost nothing"),
        (("decode", "weights"), "a larger rollout.tensor reads fewer bytes a rank, more sequences share each read"),
        (("decode", "cache"), "shorter completions, or more ranks"),
        (("decode", "exchange"), "a smaller rollout.tensor"),
        (("sync", bound), "fewer lora.targets: what is not adapted does not travel"),
        (("optimizer", bound), "a smaller lora.expert_rank, fewer updates a step"),
        (("reference", "arithmetic"), "loss.kl=none needs no such pass; or more ranks"),
        ((phase, "expert exchange"), "experts trade rows: a smaller parallel.expert, if the experts fit"),
        ((phase, "tensor exchange"), "a smaller parallel.tensor, if attention and vocabulary fit"),
    ):
        if known == (phase, bound):
            return what
    return "more ranks"


def capacity_bytes(machine: Machine, ranks_here: int, host_bytes: int) -> int:
    """Memory of one rank; on a CPU its share of the host's."""
    return int(machine.memory_gib * GIB) if machine.memory_gib else host_bytes // ranks_here
