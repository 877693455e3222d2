"""Estimates the seconds of each phase of a step with a roofline model.

A roofline is the least time that the device's arithmetic, memory and links need. The result is an estimate, not a
measurement. Use it to compare layouts and to find the bottleneck. All assumptions about the device are fields of
Hardware (facts/devices.py), and the plan prints them. Times.phases has the expected seconds of each phase, and
Times.step the range of a whole step. Nothing here has been run on a 910C. tests/rooms/plan/test_estimates.py compares
the formulas with an independent calculation for Qwen3-30B-A3B on 16 dies. Nothing here imports torch.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from facts.architectures import Architecture, Module, over_layers
from facts.devices import FORWARD_LAUNCHES, MERGE_LAUNCHES, UPDATE_LAUNCHES, Hardware, Range, spread, three_digits
from facts.limits import ELEMENT_BYTES
from knobs import Config, LoraConfig, Merging, OptimConfig, RolloutConfig
from plan.grid import WHOLE, RankGrid
from plan.memory import Memory
from plan.parameters import adapter_size, lora_parameters, merged_weights, on_rank

DECODE_PARTS = 16  # parts into which decoding is divided; in each, the number of running rows counts as constant
EQUAL_GROUPS = 0.5  # share of the groups of a round that dynamic sampling drops; a guess
TURN_SECONDS = 1.0  # seconds that decoding waits for rollout.environment at each turn; a guess, see --turn-seconds
DECODING = ("with graphs", "without graphs")
MERGE_BYTES = 28  # bytes read and written per element of W + s B A, by separate operations in bf16 and fp32


@functools.cache
def active_parameters(arch: Architecture) -> int:
    """Count the parameters of all matrices with which a token is multiplied, including the head.

    The embedding is not counted, because it is only looked up.
    """

    def used(module: Module) -> int:
        copies = arch.experts_per_token if module.kind == "experts" else 1
        return copies * module.out_size * module.in_size * (module.kind != "norm")

    return over_layers(arch, used) + arch.vocab_size * arch.hidden_size


class Rows(NamedTuple):
    """The work of one pass through the model. Rows are packed by group, so a prompt counts once per group."""

    tokens: float
    scored: float  # tokens that reach the head
    pairs: float  # pairs of a query and a key: causal within a prompt; a completion's token with its whole row


def equal_rows(number: float, prompt: float, completion: float, group: float = 1) -> Rows:
    """Return the work of one pass over ``number`` equal rows.

    ``prompt`` and ``completion`` are lengths in tokens. ``group`` rows share the work on a prompt.
    """
    tokens = number * (completion + prompt / group)
    pairs = number * (completion * (prompt + completion) + prompt**2 / 2 / group)
    return Rows(tokens, number * max(1, completion), pairs)


def forward_flops(arch: Architecture, rows: Rows) -> dict[str, float]:
    """Return the number of operations of a forward pass, separately for linear layers, attention and head.

    Only completions reach the head.
    """
    head = 2 * arch.vocab_size * arch.hidden_size
    return {
        "layers": rows.tokens * (2 * active_parameters(arch) - head),
        "attention": rows.pairs * 4 * arch.num_layers * arch.num_heads * arch.head_dim,
        "head": rows.scored * head,
    }


def lora_flops(arch: Architecture, lora: LoraConfig, tokens: float) -> float:
    """Return the number of operations that all LoRA factors need in a forward pass.

    A token needs only the factors of its experts.
    """
    own = dataclasses.replace(arch, num_experts=arch.experts_per_token)
    return 2 * tokens * lora_parameters(own, lora, WHOLE)


def update_flops(
    arch: Architecture, lora: LoraConfig, rows: Rows, *, recompute: bool, merged: bool
) -> tuple[float, float]:
    """Return the number of operations of an update's forward pass, and that of its backward pass.

    Frozen weights get no gradient, so the backward pass of a linear layer costs as much as its forward pass. For
    attention it costs 2.5 times as much. The head computes its logits again, and the factors get gradients. If
    ``merged`` is true, the passes merge the factors into the weights. Then products with the factors are needed only
    for the gradients of the factors, not for the gradient of the input.
    """
    parts, low_rank = forward_flops(arch, rows), lora_flops(arch, lora, rows.tokens)
    layers = parts["layers"] + parts["attention"]
    backward = parts["layers"] + 2.5 * parts["attention"] + 2 * parts["head"]
    backward += low_rank * (1.5 if merged else 2)
    if not recompute:
        return layers + parts["head"] + low_rank, backward
    return layers + parts["head"] + low_rank * (not merged), backward + layers + low_rank


def decode_step(
    arch: Architecture,
    hardware: Hardware,
    *,
    ranks: int,
    tensor: int,
    expert: int,
    sequences: float,
    context: float,
    element: int,
    away: tuple[float, float] = (0.0, 0.0),
) -> dict[str, float]:
    """Return the seconds, by cause, of a decode step of ``sequences`` rows with ``context`` cached tokens each.

    The rows are spread over all ``ranks``. The device reads its memory while it computes, so only the slower of the two
    activities counts. ``tensor`` ranks share one copy of the attention, and ``expert`` ranks share one copy of the
    experts. ``away`` has the share of the traffic that leaves a node, for each of these two kinds of group.
    """
    h, layers, moe = arch.hidden_size, arch.num_layers, sum(arch.moe_layers)
    rows = sequences * tensor / ranks  # rows of one tensor group
    used = arch.num_experts * (1 - (1 - arch.experts_per_token / arch.num_experts) ** (sequences * expert / ranks))
    one_expert = 3 * h * arch.expert_ffn_size
    whole = active_parameters(arch) - moe * arch.experts_per_token * one_expert
    weights = (moe * used * one_expert / expert + whole / tensor) * element
    cache = rows * context * 2 * layers * max(1, arch.num_kv_heads / tensor) * arch.head_dim * element
    reduced = 4 * layers * rows * h * element * (tensor - 1) / tensor  # two all-reduces for each layer
    traded = 2 * moe * sequences / ranks * arch.experts_per_token * h * element * (expert > tensor)
    reads = {"weights": weights / hardware.bandwidth, "cache": cache / hardware.bandwidth}
    arithmetic = 2 * active_parameters(arch) * sequences / ranks / hardware.flops
    exchange = hardware.sends(reduced, away[0]) + hardware.sends(traded, away[1])
    return slower(reads, {"arithmetic": arithmetic}) | {"exchange": exchange}


# ------------------------------------------------------------------------------------------ messages between the ranks


def slower(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """Return the seconds, by cause, of the slower of two activities that run at the same time."""
    return max(one, other, key=lambda causes: sum(causes.values()))


def exchange_bytes(
    arch: Architecture, layout: RankGrid, tokens: float, element: int, passes: int = 1, ends: int = 2
) -> dict[str, float]:
    """Return the bytes that a rank sends when ``tokens`` pass through all layers ``passes`` times, forward or backward.

    Tensor ranks gather and scatter the sequence around attention, a dense layer and a shared expert. They also exchange
    it after the embedding and before the head; ``ends`` counts these exchanges. Expert ranks send each row to its
    experts and back.
    """
    h, tensor = arch.hidden_size, layout.tensor
    split = arch.num_layers + sum(bool(not is_moe or arch.shared_expert_ffn_size) for is_moe in arch.moe_layers)
    sequence = (2 * split * passes + ends) * tokens / layout.data * h * element * (1 - 1 / tensor)
    rows = passes * sum(arch.moe_layers) * tokens / layout.ranks * arch.experts_per_token * h
    return {"tensor exchange": sequence, "expert exchange": 2 * rows * element * (1 - 1 / layout.expert)}


def sync_seconds(
    arch: Architecture, lora: LoraConfig, layout: RankGrid, hardware: Hardware, element: int, *, apart: bool
) -> dict[str, float]:
    """Return how many seconds a push takes, by cause.

    Each rank merges its shards, and then receives whole adapted tensors. If the engine uses the same shards, each rank
    only reads and writes these. If the factors are kept ``apart`` from the weights, only the factors are sent, in fp32.
    """
    away, speed = layout.away_of(layout.ranks), hardware.link_share
    if apart:
        size = 4 * lora_parameters(arch, lora, WHOLE)
        return {"exchange": hardware.sends(size, away) / speed, "memory": 2 * size / hardware.bandwidth}

    def elements(module: Module, grid: RankGrid) -> int:
        return math.prod(on_rank(module, grid)) * (module.target in lora.targets)

    is_whole = layout.engine_expert <= layout.engine_tensor
    size = element * over_layers(arch, lambda module: elements(module, WHOLE if is_whole else layout))
    products = over_layers(arch, lambda module: 2 * lora.rank_of(module.kind == "experts") * elements(module, layout))
    longer = slower({"memory": 2 * size / hardware.bandwidth}, {"arithmetic": products / hardware.flops})
    return longer | ({"exchange": hardware.sends(size, away) / speed} if is_whole else {})


def gradient_bytes(arch: Architecture, lora: LoraConfig, layout: RankGrid) -> dict[str, float]:
    """Return the bytes that a rank sends in each kind of group to sum the fp32 gradients of an update.

    Gradients of routed experts' factors are summed over expert_data, all others over data. If every tensor rank stores
    a whole factor, its gradient is first summed over the tensor ranks. This concerns A of a column-parallel matrix, B
    of a row-parallel matrix, and both factors of the router.
    """

    def held_whole(module: Module) -> int:
        copies, rows, columns = on_rank(module, layout)
        factors = columns * (module.split != 1) + rows * (module.split != 0)
        return copies * lora.rank_of(module.kind == "experts") * factors * (module.target in lora.targets)

    def parameters(size: Callable[[Module], int], *, of_experts: bool) -> int:
        return over_layers(arch, lambda module: size(module) * ((module.kind == "experts") == of_experts))

    own = functools.partial(adapter_size, lora, layout)
    sizes = {
        "tensor": (layout.tensor, parameters(held_whole, of_experts=False)),
        "data": (layout.data, parameters(own, of_experts=False)),
        "expert_data": (layout.expert_data, parameters(own, of_experts=True)),
    }
    return {kind: 4 * size * 2 * (1 - 1 / ranks) for kind, (ranks, size) in sizes.items()}


def optimizer_seconds(
    arch: Architecture, lora: LoraConfig, layout: RankGrid, hardware: Hardware, updates: int
) -> dict[str, float]:
    """Return the seconds of ``updates`` optimizer steps by cause.

    The causes are the exchange, which sums fp32 gradients over the ranks, and the memory traffic of AdamW.
    """
    size = 4 * lora_parameters(arch, lora, layout)
    # 13 reads or writes: two copies into and out of the message, clipping, and AdamW's four reads and three writes.
    seconds = {
        "exchange": sum(
            hardware.sends(sent, layout.away(kind)) / hardware.link_share
            for kind, sent in gradient_bytes(arch, lora, layout).items()
        ),
        "memory": 13 * size / hardware.bandwidth,
    }
    return {cause: updates * value for cause, value in seconds.items()}


# ------------------------------------------------------------------------------------------------ the phases of a step


@dataclass(frozen=True)
class Times:
    """The seconds of each phase of a step by cause, and the numbers from which they are computed."""

    causes: dict[str, dict[str, float]]  # phase -> cause -> seconds; of launches and arithmetic, only the slower one
    decode_steps: float  # number in a step, over all rounds and waves
    decoding: dict[str, Range]  # seconds of all decode steps "with graphs" and "without graphs"
    waves: int  # number of waves in which a replica decodes its rows; 1 if it decodes all of them together
    micro_batches: int  # number on one rank in one update

    @property
    def phases(self) -> dict[str, float]:
        return {phase: sum(causes.values()) for phase, causes in self.causes.items()}

    @property
    def total(self) -> float:
        return sum(self.phases.values())

    @property
    def step(self) -> Range:
        """The range of the seconds of a step: the expected seconds, divided and multiplied by a factor.

        The factor fits the published runs.
        """
        return spread(self.total)

    @property
    def long_phases(self) -> list[str]:
        """The phases that take a tenth of the step or more, so that it is worth shortening them."""
        return [name for name, seconds in self.phases.items() if seconds >= 0.1 * self.total]

    def bound(self, phase: str) -> str:
        """Return the cause that takes the most seconds of ``phase``."""
        return max(self.causes[phase], key=self.causes[phase].__getitem__)


def step_times(
    cfg: Config,
    arch: Architecture,
    layout: RankGrid,
    hardware: Hardware,
    memory: Memory,
    prompt: float,
    completion: float,
    longest: float,
    turn_seconds: float = TURN_SECONDS,
) -> Times:
    """Return the seconds of every phase of a step.

    ``prompt`` and ``completion`` are mean lengths in tokens. ``longest`` is the length of the longest completion.
    ``turn_seconds`` is the time that decoding waits for rollout.environment at each turn.
    """
    rollout, recompute = cfg.rollout, int(cfg.model.recompute)
    element = ELEMENT_BYTES[cfg.model.dtype]
    sequences = -(-rollout.prompts_per_step * rollout.group_size // layout.data) * layout.data  # of the fullest rank
    trained = equal_rows(sequences, prompt, completion, rollout.group_size)
    step = functools.partial(
        decode_step,
        arch,
        hardware,
        ranks=layout.ranks,
        tensor=layout.engine_tensor,
        expert=layout.engine_expert,
        element=element,
        away=(layout.away("rollout"), layout.away_of(layout.engine_expert)),
    )
    rounds = [EQUAL_GROUPS**round_ for round_ in range(1 + rollout.dynamic_rounds)]  # shares of the groups
    parts: list[tuple[float, dict[str, float]]] = []  # number of decode steps, and the seconds of each one by cause
    for of_groups in rounds:
        waves, running = _waves(math.ceil(memory.wanted_rows * of_groups), memory, layout)
        for steps, share, tokens in decode_parts(completion, longest, waves, refills=rollout.kind.refills):
            parts.append((steps, step(sequences=max(1, running * share), context=prompt + tokens)))
    waves, _ = _waves(memory.wanted_rows, memory, layout)
    decoding = {name: _decoding(arch, hardware, parts, bool(i)) for i, name in enumerate(DECODING)}
    rate = layout.ranks * hardware.flops * hardware.training_share
    updates = rollout.prompts_per_step // max(1, cfg.optim.prompts_per_update)
    micro_batches = _micro_batches(cfg.optim, layout, rollout.group_size, prompt, completion)

    def passing(operations: float, launches: int, passes: int = 1, ends: int = 2) -> dict[str, float]:
        """Return the seconds, by cause, of ``passes`` through all layers.

        Together these passes need ``operations``, and ``launches`` kernel launches per layer and micro-batch.
        """
        launching = launches * arch.num_layers * updates * micro_batches * hardware.launch_seconds
        sent = exchange_bytes(arch, layout, trained.tokens, element, passes, ends)
        longer = slower({"arithmetic": operations / rate}, {"launches": launching})
        away = {"tensor exchange": layout.away("tensor"), "expert exchange": layout.away("expert")}
        return longer | {cause: hardware.sends(size, away[cause]) / hardware.link_share for cause, size in sent.items()}

    frozen = sum(forward_flops(arch, trained).values())
    policy = frozen + lora_flops(arch, cfg.lora, trained.tokens) * (cfg.merging < Merging.PASSES)
    first, second = update_flops(
        arch, cfg.lora, trained, recompute=cfg.model.recompute, merged=cfg.merging >= Merging.PASSES
    )
    prompts = forward_flops(arch, equal_rows(rollout.prompts_per_step * sum(rounds), prompt, 0))
    once = MERGE_BYTES * memory.merged_once / hardware.bandwidth  # per update; the first one is part of the push
    in_a_pass = merged_weights(arch, cfg.lora, layout, recompute=False, experts=not once) * (
        cfg.merging >= Merging.PASSES
    )
    merging = updates * micro_batches * MERGE_BYTES * in_a_pass / hardware.bandwidth
    forward, backward = UPDATE_LAUNCHES[cfg.model.recompute]
    share = cfg.earlier_passes
    shared = cfg.lora.expert_targets if memory.merged_once else set()
    merges = MERGE_LAUNCHES * len(set(cfg.lora.targets) - shared)
    old_policy = passing(policy, FORWARD_LAUNCHES + merges) | {"merging": merging}
    causes = {
        "sync": sync_seconds(arch, cfg.lora, layout, hardware, element, apart=cfg.merging is Merging.NOWHERE)
        | {"merging": once},
        "prefill": {"arithmetic": sum(prompts.values()) / rate},
        "decode": decoding[DECODING[rollout.enforce_eager]],
        "old policy": {cause: share * seconds for cause, seconds in old_policy.items()} if share else {"": 0.0},
        "reference": passing(frozen, FORWARD_LAUNCHES) if cfg.loss.kl != "none" else {"": 0.0},
        "teacher": old_policy if cfg.loss.teacher else {"": 0.0},
        "update forward": passing(first, forward + merges) | {"merging": merging + (updates - 1) * once},
        "update backward": passing(second, backward + merges * recompute, 1 + recompute, recompute)
        | {"merging": merging * recompute},
        "optimizer": optimizer_seconds(arch, cfg.lora, layout, hardware, updates),
    }
    ranges = {name: spread(sum(seconds.values())) for name, seconds in decoding.items()}
    steps = sum(steps for steps, _ in parts)
    if rollout.environment:
        so_far = forward_flops(arch, equal_rows(sequences * sum(rounds), prompt + completion / 2, 0))
        again = (rollout.max_turns - 1) * _leaves_cache(rollout, waves)
        causes["prefill"]["arithmetic"] += again * sum(so_far.values()) / rate
        causes["environment"] = {"answers": rollout.max_turns * len(rounds) * turn_seconds}
    return Times(causes, steps, ranges, waves, micro_batches)


def _leaves_cache(rollout: RolloutConfig, waves: int) -> bool:
    """Return whether the tokens of a row are no longer in vLLM's prefix cache when the row's next turn begins."""
    return rollout.kind.refills and waves > 1


def _waves(rows: int, memory: Memory, layout: RankGrid) -> tuple[int, int]:
    """Return the number of waves in which a replica decodes its ``rows``, and the rows of one wave in all replicas."""
    waves = -(-rows // max(1, memory.cached_rows))
    return waves, -(-rows // waves) * layout.replicas


def _micro_batches(optim: OptimConfig, layout: RankGrid, group_size: int, prompt: float, completion: float) -> int:
    """Return the number of micro-batches of a rank per update.

    Like model/batches.py, this function counts the packed tokens of each row and a quarter of the row's padded length.
    """
    rows = -(-optim.prompts_per_update * group_size // layout.data)
    a_row = completion + prompt / group_size + (prompt + completion) / 4
    return -(-rows // max(1, int(optim.tokens_per_micro_batch // a_row)))


def decode_parts(completion: float, longest: float, waves: int, *, refills: bool) -> list[tuple[float, float, float]]:
    """Divide decoding into parts, and return three numbers for each part.

    These are the number of decode steps, the share of the rows that still run, and the tokens of a row so far.


    Decoding ends with the longest row, which has N tokens. The plan assumes that after t tokens a share
    (1 - t / N)^(N / mean - 1) of the rows still runs. This gives the mean length ``completion``. With a mean of N, all
    rows run to the end. An engine that ``refills``, as vLLM does, starts a waiting row as soon as another row ends. So
    all its waves except the last count as full, and take as long as a row of mean length.
    """
    ends = 1 if refills else waves  # waves in which fewer and fewer rows run
    places = [(part + 0.5) / DECODE_PARTS for part in range(DECODE_PARTS)]
    falling = [(ends * longest / DECODE_PARTS, (1 - at) ** (longest / completion - 1), at * longest) for at in places]
    return [*falling, ((waves - ends) * completion, 1.0, completion / 2)]


def _decoding(
    arch: Architecture, hardware: Hardware, parts: list[tuple[float, dict[str, float]]], eager: bool
) -> dict[str, float]:
    """Return the seconds of all decode steps by cause.

    A step takes as long as its roofline, or as its kernel launches if these take longer.
    """
    layer = hardware.eager_layer_seconds if eager else hardware.graph_layer_seconds
    causes: dict[str, float] = defaultdict(float)
    for steps, part in parts:
        for cause, seconds in slower(part, {"launches": arch.num_layers * layer}).items():
            causes[cause] += steps * seconds
    return dict(causes)


def assumptions(
    hardware: Hardware,
    prompt: float,
    completion: float,
    longest: float,
    dynamic_rounds: int = 0,
    turn_seconds: float = 0.0,
) -> str:
    """Return one line with the assumptions behind the seconds. ``turn_seconds`` is 0 without an environment."""
    graphs, eager, launch = (
        three_digits(1e6 * seconds)
        for seconds in (hardware.graph_layer_seconds, hardware.eager_layer_seconds, hardware.launch_seconds)
    )
    dropped = f"each of {dynamic_rounds} more rounds samples {EQUAL_GROUPS:.0%} of the groups of the one before, "
    answers = f"all turns of rollout.max_turns, {turn_seconds:g} s for the answers to each (--turn-seconds), "
    return (
        f"{hardware.flops / 1e12:g} TFLOP/s at {hardware.training_share:.1%} in training, "
        f"{hardware.bandwidth / 1e12:g} TB/s, {hardware.link / 1e9:g} GB/s link at {hardware.link_share:.0%}, "
        f"{hardware.between_nodes / 1e9:g} GB/s between nodes, "
        f"a layer of a decode step takes at least {graphs} us with graphs and {eager} us without, "
        f"a launch {launch} us, "
        f"prompts of {prompt:g} and completions of {completion:g} tokens on average, at most {longest:g}; "
        f"{dropped * (dynamic_rounds > 0)}{answers * (turn_seconds > 0)}an estimate, not a measurement"
    )
