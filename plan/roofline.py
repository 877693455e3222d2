"""Seconds of each phase of a step by a roofline: the time that the device's arithmetic, memory and links need at least.

This is an estimate, never a measurement. It compares layouts and finds the bottleneck. Every assumption is a field of
Hardware and is printed with the plan. The figures of the 910C are published, except for its link, which is a guess.
Nothing here has been run on a 910C. tests/test_roofline.py compares the formulas with an independent calculation for
Qwen3-30B-A3B on 16 dies. Nothing here imports torch.
"""

from dataclasses import dataclass

from config_rules import ELEMENT_BYTES
from hf_config import Architecture
from knobs import Config
from plan.grid import WHOLE, RankGrid
from plan.memory import Memory, lora_parameters, merged_weights

MERGE_BYTES = 28  # read and written for an element of W + s B A: of bf16, in fp32, one operation after the other


@dataclass(frozen=True)
class Hardware:
    """The device of one rank. Shares are fractions of the peak."""

    memory_gib: float  # 0: the ranks share the main memory of the host
    flops: float  # per second, in the model's dtype
    bandwidth: float  # bytes per second of its memory
    link: float  # bytes per second to other ranks
    training_share: float  # of flops, in training and prefill
    link_share: float
    decode_step_seconds: float  # least time of a decode step with a graph: kernel launches take it, not arithmetic
    eager_pass_seconds: float  # least time of a decode step without a graph, or of a forward pass of the trainer


HARDWARE = {
    # 910C: half a package's 752 TFLOP/s, 3.2 TB/s and 392 GB/s; decode steps of 20-34 ms are published.
    "npu": Hardware(61, 376e12, 1.6e12, 196e9, 0.2, 0.5, 0.020, 0.034),
    "cuda": Hardware(80, 989e12, 3.35e12, 450e9, 0.2, 0.5, 0.010, 0.020),  # an 80 GB H100's data sheet; guesses
    "cpu": Hardware(0, 100e9, 13e9, 2e9, 0.5, 0.5, 0.0, 0.0),  # one core of a server, fp32
}


def active_parameters(arch: Architecture) -> int:
    """Parameters that one token is multiplied with. The look-up of its embedding is not counted."""
    h = arch.hidden_size
    attention = h * arch.qkv_size + h * arch.num_heads * arch.head_dim
    moe = h * (arch.num_experts + 3 * arch.experts_per_token * arch.expert_ffn_size + 3 * arch.shared_expert_ffn_size)
    dense = 3 * h * arch.dense_ffn_size
    return arch.num_layers * attention + sum(moe if m else dense for m in arch.moe_layers) + arch.vocab_size * h


def forward_flops(arch: Architecture, tokens: float, length: float) -> float:
    """Operations of one forward pass over ``tokens`` in rows of ``length``, causal attention included."""
    attention = 4 * arch.num_layers * arch.num_heads * arch.head_dim * length / 2
    return tokens * (2 * active_parameters(arch) + attention)


def decode_step(
    arch: Architecture,
    hardware: Hardware,
    *,
    ranks: int,
    tensor: int,
    expert: int,
    sequences: int,
    context: float,
    element: int,
) -> dict[str, float]:
    """Seconds of one decode step of ``sequences`` rows over all ``ranks``; each row has ``context`` cached tokens.

    ``tensor`` ranks share one copy of the attention, ``expert`` ranks share one copy of the experts.
    """
    h, layers, moe = arch.hidden_size, arch.num_layers, sum(arch.moe_layers)
    rows = sequences * tensor / ranks  # rows of one tensor group
    used = arch.num_experts * (1 - (1 - arch.experts_per_token / arch.num_experts) ** (sequences * expert / ranks))
    one_expert = 3 * h * arch.expert_ffn_size
    whole = active_parameters(arch) - moe * arch.experts_per_token * one_expert
    weights = (moe * used * one_expert / expert + whole / tensor) * element
    cache = rows * context * 2 * layers * max(1, arch.num_kv_heads / tensor) * arch.head_dim * element
    exchanged = 4 * layers * rows * h * element * (tensor - 1) / tensor  # two all-reduces for each layer
    if expert > tensor:
        exchanged += 2 * moe * sequences / ranks * arch.experts_per_token * h * element
    seconds = {
        "weights": weights / hardware.bandwidth,
        "cache": cache / hardware.bandwidth,
        "arithmetic": 2 * active_parameters(arch) * sequences / ranks / hardware.flops,
        "exchange": exchanged / hardware.link,
    }
    return seconds | {"total": max(seconds["weights"] + seconds["cache"], seconds["arithmetic"]) + seconds["exchange"]}


def exchange_seconds(
    arch: Architecture, hardware: Hardware, layout: RankGrid, tokens: float, element: int
) -> dict[str, float]:
    """Communication of the trainer's forward pass over ``tokens``: tensor ranks gather and scatter, expert ranks
    exchange rows.
    """
    h, rate = arch.hidden_size, hardware.link * hardware.link_share
    tensor = 4 * arch.num_layers * tokens / layout.data * h * element * (layout.tensor - 1) / layout.tensor
    experts = layout.expert * layout.expert_tensor
    traded = 2 * sum(arch.moe_layers) * tokens / layout.ranks * arch.experts_per_token * h * element
    return {"tensor exchange": tensor / rate, "expert exchange": traded * (1 - 1 / experts) / rate}


@dataclass(frozen=True)
class Times:
    """Seconds of each phase of a step by cause, and the numbers behind them."""

    causes: dict[str, dict[str, float]]  # phase -> cause -> seconds
    decode: dict[str, float]  # seconds of one decode step
    waves: int  # sampling takes so many rounds, because the key-value cache holds only a part of the rows
    micro_batches: int  # of one rank in one update

    @property
    def phases(self) -> dict[str, float]:
        return {phase: sum(causes.values()) for phase, causes in self.causes.items()}

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def bottleneck(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def long_phases(self) -> list[str]:
        """The phases that are worth shortening, because they take a tenth of the step or more."""
        return [name for name, seconds in self.phases.items() if seconds >= 0.1 * self.total]

    def bound(self, phase: str) -> str:
        """The cause that takes most of ``phase``."""
        return max(self.causes[phase], key=self.causes[phase].__getitem__)


def step_times(
    cfg: Config,
    arch: Architecture,
    layout: RankGrid,
    hardware: Hardware,
    memory: Memory,
    prompt: float,
    completion: float,
) -> Times:
    """Every phase of a step. ``prompt``, ``completion``: mean numbers of tokens."""
    element, rollout = ELEMENT_BYTES[cfg.model.dtype], cfg.rollout
    sequences = rollout.prompts_per_step * rollout.group_size
    length = prompt + completion
    tokens = -(-sequences // layout.data) * layout.data * length  # all ranks wait for the fullest
    waves = -(-memory.wanted_rows // max(1, memory.cached_rows))
    decode = decode_step(
        arch, hardware, ranks=layout.ranks, tensor=layout.engine_tensor, expert=layout.engine_expert,
        sequences=-(-memory.wanted_rows // waves) * layout.replicas,
        context=prompt + completion / 2, element=element,
    )  # fmt: skip
    rate = layout.ranks * hardware.flops * hardware.training_share
    updates = rollout.prompts_per_step // max(1, cfg.optim.prompts_per_update)
    rows = -(-cfg.optim.prompts_per_update * rollout.group_size // layout.data)
    micro_batches = -(-rows // max(1, int(cfg.optim.tokens_per_micro_batch // length)))
    forward = _slower(
        {"arithmetic": forward_flops(arch, tokens, length) / rate},
        {"launches": updates * micro_batches * hardware.eager_pass_seconds},
    ) | exchange_seconds(arch, hardware, layout, tokens, element)
    merged_bytes = MERGE_BYTES * merged_weights(arch, cfg.lora, layout, recompute=False) * cfg.trains_merged
    merging = updates * micro_batches * merged_bytes / hardware.bandwidth
    causes = {
        "sync": _sync_seconds(cfg, arch, layout, hardware, element),
        "prefill": {"arithmetic": forward_flops(arch, rollout.prompts_per_step * prompt, prompt) / rate},
        "decode": {
            cause: seconds * waves * completion
            for cause, seconds in _decode_causes(decode, hardware, rollout.enforce_eager).items()
        },
        "old policy": forward | {"merging": merging} if updates > 1 or cfg.replay.mode == "r2" else {"": 0.0},
        "reference": forward if cfg.loss.kl != "none" else {"": 0.0},
        "update forward": forward | {"merging": merging},
        "update backward": {cause: seconds * (1 + cfg.model.recompute) for cause, seconds in forward.items()}
        | {"merging": merging * cfg.model.recompute},
        "optimizer": _optimizer_seconds(cfg, arch, layout, hardware, updates),
    }
    return Times(causes, decode, int(waves), micro_batches)


def _slower(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The slower one of two things that happen at the same time."""
    return max(one, other, key=lambda causes: sum(causes.values()))


def _decode_causes(decode: dict[str, float], hardware: Hardware, eager: bool) -> dict[str, float]:
    """Seconds of one decode step: its roofline, or its kernel launches if they take longer."""
    reads = {name: decode[name] for name in ("weights", "cache")}
    roofline = _slower(reads, {"arithmetic": decode["arithmetic"]}) | {"exchange": decode["exchange"]}
    return _slower(roofline, {"launches": hardware.eager_pass_seconds if eager else hardware.decode_step_seconds})


def _sync_seconds(
    cfg: Config, arch: Architecture, layout: RankGrid, hardware: Hardware, element: int
) -> dict[str, float]:
    """One push of the policy: every rank receives whole adapted tensors, or reads and writes only its own shards.

    With rollout.sync=adapter, only the fp32 factors are sent.
    """
    h, targets = arch.hidden_size, cfg.lora.targets
    mlp = "linear_fc1" in targets or "linear_fc2" in targets
    dense = sum(arch.shared_expert_ffn_size if is_moe else arch.dense_ffn_size for is_moe in arch.moe_layers)
    heads = arch.qkv_size * ("linear_qkv" in targets) + arch.num_heads * arch.head_dim * ("linear_proj" in targets)
    split = h * (arch.num_layers * heads + 3 * dense * mlp)
    experts = 3 * h * sum(arch.moe_layers) * arch.num_experts * arch.expert_ffn_size * mlp
    if layout.engine_expert > layout.engine_tensor:
        return {"memory": (split / layout.tensor + experts / layout.expert) * element * 2 / hardware.bandwidth}
    merged = (split + experts) * element
    size = 4 * lora_parameters(arch, cfg.lora, WHOLE) if cfg.keeps_factors_apart else merged
    return {"exchange": size / (hardware.link * hardware.link_share), "memory": size * 2 / hardware.bandwidth}


def _optimizer_seconds(
    cfg: Config, arch: Architecture, layout: RankGrid, hardware: Hardware, updates: int
) -> dict[str, float]:
    """All optimizer steps: the sum of fp32 gradients over the ranks that share a factor, and AdamW's memory traffic."""
    size = 4 * lora_parameters(arch, cfg.lora, layout)
    shared = 2 * (1 - 1 / max(layout.data, layout.expert_data))  # upper bound of a ring all-reduce
    # 13 passes: two copies into and out of the message, clipping, and AdamW's four reads and three writes.
    seconds = {
        "exchange": size * shared / (hardware.link * hardware.link_share),
        "memory": 13 * size / hardware.bandwidth,
    }
    return {cause: updates * value for cause, value in seconds.items()}


def assumptions(hardware: Hardware, prompt: float, completion: float) -> str:
    """The assumptions behind the seconds, in one line."""
    return (
        f"{hardware.flops / 1e12:g} TFLOP/s at {hardware.training_share:.0%} in training, "
        f"{hardware.bandwidth / 1e12:g} TB/s, {hardware.link / 1e9:g} GB/s link at {hardware.link_share:.0%}, "
        "the same between nodes, "
        f"a decode step takes at least {hardware.decode_step_seconds * 1e3:g} ms, a pass without a graph "
        f"{hardware.eager_pass_seconds * 1e3:g} ms, "
        f"prompts of {prompt:g} and completions of {completion:g} tokens; a roofline, not a measurement"
    )


def advice(cfg: Config, times: Times, phase: str) -> str:
    """A change that would shorten ``phase``."""
    bound = times.bound(phase)
    larger = "optim.tokens_per_micro_batch" if times.micro_batches > 1 else "optim.prompts_per_update"
    in_decode = phase == "decode"
    rules = (
        (
            in_decode and times.waves > 1,
            f"the key-value cache allows {times.waves} waves: more rollout.kv_cache_mib, up to one wave",
        ),
        (
            in_decode and bound == "launches" and cfg.rollout.enforce_eager,
            "rollout.enforce_eager=false: graphs launch a step at once",
        ),
        (
            phase == "old policy",
            "one update a step (optim.prompts_per_update = rollout.prompts_per_step) needs no such pass",
        ),
        (
            phase == "update backward" and cfg.model.recompute,
            "model.recompute=false saves a forward pass, if the activations fit",
        ),
        (bound == "launches" and not in_decode, f"fuller micro-batches: a larger {larger}"),
        (in_decode and bound == "launches", "more sequences a step cost almost nothing"),
        (
            in_decode and bound == "weights",
            "a larger rollout.tensor reads fewer bytes a rank, more sequences share each read",
        ),
        (in_decode and bound == "cache", "shorter completions, or more ranks"),
        (in_decode and bound == "exchange", "a smaller rollout.tensor"),
        (phase == "sync", "fewer lora.targets: what is not adapted does not travel"),
        (phase == "optimizer", "a smaller lora.expert_rank, fewer updates a step"),
        (phase == "reference" and bound == "arithmetic", "loss.kl=none needs no such pass; or more ranks"),
        (bound == "expert exchange", "experts trade rows: a smaller parallel.expert, if the experts fit"),
        (bound == "tensor exchange", "a smaller parallel.tensor, if attention and vocabulary fit"),
    )
    return next((change for holds, change in rules if holds), "more ranks")
