"""Computes the bytes on one rank in each phase of a step from a config.json and a layout. Nothing here imports torch.

The number of parameters is exact. The activations are the tensors that autograd keeps in model/megatron_model.py and
lora_megatron.py. tests/rooms/plan/test_estimates.py compares both with a tiny model. preflight.py --dry-run runs the
trainer's code at the real size, and compares every phase with its plan.
The plan assumes that the prompts of a micro-batch are short. Among packed rows with the same number of tokens, those
with short prompts have the most completion tokens, so they need the most memory. All ranks need the same amount, except
that the routing decides how many rows the experts of a rank get.

h is the hidden size, and t the number of tokens in a micro-batch. A rank has s = t / tensor of them. N is the number of
rows that the experts of a rank get, and e the number of bytes of an element.
"""

from dataclasses import dataclass

from facts.architectures import Architecture
from facts.limits import ELEMENT_BYTES, HCCL_BUFFER_MIB, ROWS_PER_CHUNK, cache_bytes_per_token, logits_per_chunk
from knobs import Config, LoraConfig, Merging, ModelConfig, OptimConfig, RolloutConfig
from plan.capacity import PREFILL_TOKENS, max_sequences, rows_of_a_step
from plan.grid import WHOLE, RankGrid
from plan.parameters import (
    base_bytes,
    checkpoint_bytes,
    engine_parameters,
    gathered_by_a_save,
    lora_parameters,
    merged_at_once,
    merged_by_target,
    merged_weights,
    shared_experts,
)
from plan.way import Way

GIB = 2**30

# These assumptions are printed with every plan.
IMBALANCE = 1.5  # rows that the busiest rank's experts get / the mean over ranks; RL has no load balancing
MARGIN = 0.05  # share of the device's memory that is kept free for fragmentation
RUNTIME_BYTES = {"cpu": 0.45 * GIB, "npu": 2 * GIB, "cuda": 1 * GIB}  # the process or driver before any tensor
GRAPH_BYTES = {"cpu": 0, "npu": 1.5 * GIB, "cuda": 1.5 * GIB}  # the engine's captured graphs and workspace
# The bytes of the buffers of a group that is not in HCCL_BUFFER_MIB. On an NPU they are 2 x HCCL_BUFFSIZE.
BUFFER_BYTES = {"cpu": 0, "npu": 2 * 200 * 2**20, "cuda": 2**26}


# --------------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Activations:
    """The bytes that one micro-batch needs in addition to parameters and gradients."""

    peak: int  # the most at one time in an update, including the tensors that are kept for the backward pass
    logits: int  # the part of ``peak`` for a chunk of logits and the copies of it that exist at the same time
    reference: int  # the most at one time in a forward pass that keeps nothing for a backward pass
    entering: int  # in such a forward pass, when the rows reach the experts, whose weights are then merged
    recomputed: int  # in an update, at the same point of a layer that is being recomputed


def activations(
    arch: Architecture,
    lora: LoraConfig,
    layout: RankGrid,
    *,
    element: int,
    recompute: bool,
    tokens: int,
    scored: int,
    imbalance: float = 1.0,
    device: str = "cpu",
    entropy_bonus: bool = False,
    mask: tuple[int, int] = (0, 0),
) -> Activations:
    """Return the bytes that a micro-batch of ``tokens`` tokens needs. The head gets ``scored`` of these tokens.

    ``tokens`` is rows x padded length. ``element`` is the number of bytes per element, and ``imbalance`` is as in
    IMBALANCE. With ``recompute``, only the input of each layer is kept. The backward pass computes a layer's other
    tensors again. ``mask`` has the bytes of the attention mask of packed rows. The first number is for a pass that
    keeps the mask for the backward pass, the second for a pass that does not.
    """
    h, s = arch.hidden_size, tokens // layout.tensor
    rows = s * arch.experts_per_token * (imbalance if layout.expert > 1 else 1)  # N
    kinds = {*arch.moe_layers}
    layers = {is_moe: _kept_by_layer(arch, lora, layout, is_moe, element, tokens, rows) for is_moe in kinds}
    widest = {is_moe: _widest(arch, layout, is_moe, element, tokens, rows, recompute) for is_moe in kinds}
    norm = max(4, element)  # a norm keeps its input in fp32
    vocabulary = arch.vocab_size // layout.tensor
    chunk = min(scored, max(1, min(ROWS_PER_CHUNK, logits_per_chunk(device) // vocabulary))) * vocabulary * 4  # fp32
    # The forward pass stores logits and their exponentials; the backward pass of an entropy bonus stores five copies.
    logits = (5 if entropy_bonus else 2) * chunk
    head = scored * (h * element + 12) + logits + scored * h * element
    head_kept = scored * (h * element + 12) + s * h * norm
    if recompute:
        kept = arch.num_layers * s * h * element + head_kept
        # The last term is two tensors of the residual stream: the sum after attention, and a gradient.
        backward = max(layers[is_moe] + widest[is_moe][0] for is_moe in kinds) + 2 * s * h * element
    else:
        # The embedding is frozen, so layer 0 does not keep its input.
        kept = sum(arch.moe_layers.count(is_moe) * layer for is_moe, layer in layers.items()) + head_kept
        kept -= s * h * norm
        backward = max(in_flight for in_flight, _ in widest.values())
    forward = 3 * tokens // layout.tensor * h * element + max(forward_only for _, forward_only in widest.values())
    reference = max(forward, scored * (h * element + 12) + 2 * chunk) + s * h * element + mask[1]
    kept += mask[0]
    entering = 4 * s * h * element + rows * 3 * h * element + mask[1]
    layer = max(_kept_by_layer(arch, lora, layout, is_moe, element, tokens, 0) for is_moe in kinds) * recompute
    peak, recomputed = kept + max(backward, head), kept + layer + entering - mask[1]  # the mask is kept already
    return Activations(int(peak), int(logits), int(reference), int(entering), int(recomputed))


def _widest(
    arch: Architecture, layout: RankGrid, is_moe: bool, element: int, tokens: int, rows: float, recompute: bool
) -> tuple[float, float]:
    """Return two numbers of bytes: the most that the temporary tensors of a layer need at one time.

    The first number is for a backward pass, the second for a forward pass that keeps nothing for a backward pass.
    """
    h, width, dense = arch.hidden_size, arch.expert_ffn_size, arch.dense_ffn_size
    if not is_moe:
        return 4 * tokens * dense // layout.tensor * element, tokens * (h + 4 * dense // layout.tensor) * element
    if layout.expert == 1:  # rows that stay on their rank are only sorted
        # Gate and up are freed once three gradients exist; without recompute, the peak is before that.
        gradients = 3 * h - 2 * width if recompute else h
        return rows * gradients * element, rows * max(2 * h + width, h + 3 * width) * element
    # A rank sorts the rows that return to it in the order of its tokens, to sum them (kernels.combine_rows).
    returned = tokens // layout.tensor * arch.experts_per_token * h * element
    # A MoE layer stores its rows as they are sent, received and sorted, then the experts' output, sorted and unsorted.
    copies = 5 if layout.expert < arch.num_experts else 3
    return rows * (3 * h) * element + returned, rows * max(copies * h, 3 * h + 4 * width) * element


def _kept_by_layer(
    arch: Architecture, lora: LoraConfig, layout: RankGrid, is_moe: bool, element: int, tokens: int, rows: float
) -> float:
    """Return the bytes of the tensors of one layer that autograd keeps for the backward pass.

    A frozen linear layer keeps no input. A pair of LoRA factors keeps two tensors.
    """
    h, t, s, e = arch.hidden_size, tokens, tokens // layout.tensor, element
    norm = max(4, e)
    heads, kv_heads = arch.num_heads // layout.tensor, max(1, arch.num_kv_heads // layout.tensor)
    q, kv = heads * arch.head_dim, kv_heads * arch.head_dim
    on = {target: target in lora.targets for target in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
    kept = s * (h * norm + h * e * on["linear_qkv"]) + s * (h * norm + h * e) + 8 * s  # two norms, in and out
    kept += t * (q + 2 * kv) * e + t * (q + kv) * e + t * q * e  # qkv; query and key with RoPE; the output of attention
    kept += t * 4 * heads  # softmax's normaliser
    if arch.qk_norm:
        kept += t * 4 * (heads + kv_heads) + t * (q + kv) * norm  # in fp32, or copied out of qkv
    kept += lora.rank * e * (t * on["linear_qkv"] + s * on["linear_proj"])

    def swiglu(width: int) -> float:
        return t * 5 * width * e + lora.rank * e * (t * on["linear_fc1"] + s * on["linear_fc2"])

    if not is_moe:
        return kept + swiglu(arch.dense_ffn_size // layout.tensor)
    width, rank = arch.expert_ffn_size, lora.rank_of(True)
    a_row = h * on["linear_fc1"] + (2 + on["linear_fc2"]) * width  # the input; gate and up; the product of these two
    a_row += rank * (on["linear_fc1"] + on["linear_fc2"])
    kept += rows * (a_row * e + 24) + s * 10 * arch.num_experts  # the second term: the router's scores and maps
    if arch.shared_expert_ffn_size:
        kept += swiglu(arch.shared_expert_ffn_size // layout.tensor) + s * h * e
    return kept


# -------------------------------------------------------------------------------------------------------------- phases


@dataclass(frozen=True)
class Memory:
    """The bytes that one rank needs: by part, and the total in each phase of a step.

    The total of a phase includes all parts that stay in memory.
    """

    parts: dict[str, int]
    phases: dict[str, int]
    capacity: int
    cached_rows: int  # number of sequences of one replica whose keys and values are in memory at the same time
    wanted_rows: int  # number of sequences that a replica samples in a step
    merged_once: int  # parameters of the experts that are merged once per update, in the engine's memory

    @property
    def fullest(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        """The bytes of the phase that needs the most memory, plus the margin."""
        return self.phases[self.fullest] + self.parts["margin"]


# The parts that stay in memory after loading.
RESIDENT = ("base", "lora", "working factors", "optimizer", "older factors", "teacher")
RESIDENT += ("engine weights", "engine factors", "key-value cache", "communication buffers", "runtime")


def micro_batch_tokens(optim: OptimConfig, layout: RankGrid, group_size: int, row_tokens: int) -> int:
    """Return the largest number of tokens, padding included, in one forward pass of a rank.

    ``row_tokens`` is the length of the longest row.
    """
    longest = -(-row_tokens // layout.tensor) * layout.tensor
    sequences = -(-optim.prompts_per_update * group_size // layout.data)
    return max(longest, min(optim.tokens_per_micro_batch, sequences * longest) // layout.tensor * layout.tensor)


def packed_tokens(optim: OptimConfig, layout: RankGrid, group_size: int, row_tokens: int) -> int:
    """Return the largest number of tokens in one forward pass of a rank with packed rows.

    This number is usually smaller than without packing, because model/batches.py counts a packed row as a quarter
    longer than it is.
    """
    longest = -(-row_tokens // layout.tensor) * layout.tensor
    padded = micro_batch_tokens(optim, layout, group_size, row_tokens)
    return max(longest, int(padded / 1.25) // layout.tensor * layout.tensor)


def _mask(model: ModelConfig, arch: Architecture, tokens: int, row_tokens: int, device: str) -> tuple[int, int]:
    """Return the bytes of the attention mask of packed rows.

    The mask has an element for each pair of a token and a position. There are ``tokens`` tokens, and ``row_tokens``
    positions in a row. The first number is for a pass that keeps the mask for the backward pass, the second for a pass
    that does not. A GPU needs no mask in bf16.
    """
    places = tokens * row_tokens
    if device == "npu":  # one mask of bool
        return places, places
    if device == "cuda" and model.dtype == "bf16":
        return 0, 0
    # The mask is fp32. torch's attention needs it in the dtype of its inputs. Autograd keeps that copy in each layer.
    if model.dtype == "bf16":
        copies = 1 if model.recompute else arch.num_layers
        return places * (4 + 2 * copies), places * 6
    return places * 4, places * 5  # the second number includes the bool mask from which the fp32 mask is made


def step_memory(
    cfg: Config, arch: Architecture, layout: RankGrid, device: str, capacity: int, imbalance: float = IMBALANCE
) -> Memory:
    """Return the bytes of each part and each phase of a step, on the rank that needs the most memory.

    ``device`` is cpu, npu or cuda, and ``capacity`` is the number of bytes that this rank has.
    """
    element, rollout = ELEMENT_BYTES[cfg.model.dtype], cfg.rollout
    tokens = packed_tokens(cfg.optim, layout, rollout.group_size, cfg.row_tokens)
    work = activations(
        arch,
        cfg.lora,
        layout,
        element=element,
        recompute=cfg.model.recompute,
        tokens=tokens,
        scored=tokens,
        imbalance=imbalance,
        device=device,
        entropy_bonus=cfg.loss.entropy_coef > 0,
        mask=_mask(cfg.model, arch, tokens, cfg.row_tokens, device),
    )
    lora = 4 * lora_parameters(arch, cfg.lora, layout)
    wanted_rows = rows_of_a_step(rollout, layout.ranks)
    at_once = max_sequences(
        rollout, cfg.eval, arch, layout.ranks, prompt_tokens=cfg.data.max_prompt_tokens, dtype=cfg.model.dtype
    )
    cached_rows = min(wanted_rows, at_once)
    prefill = min(PREFILL_TOKENS, -(-wanted_rows // rollout.group_size) * cfg.data.max_prompt_tokens)
    adapter, in_passes = cfg.merging is Merging.NOWHERE, cfg.merging >= Merging.PASSES
    way = Way(cfg, layout, device)
    frozen, merged = (size * element for size in shared_experts(way, arch))
    first_group, pushed = _push(cfg, arch, layout, way.fills_stacks, merged > 0)
    routing = sum(arch.moe_layers) * arch.experts_per_token if cfg.replay.mode != "off" else 0
    own_sequences = -(-rollout.prompts_per_step * rollout.group_size // layout.data)
    kinds, apart = {*arch.moe_layers}, not merged  # whether a pass merges experts in addition to the engine's copy
    one_merged = max(max(merged_by_target(arch, cfg.lora, layout, is_moe, apart)) for is_moe in kinds) * element
    in_fp32 = 4 * merged_at_once(arch, cfg.lora, layout, apart)
    teaches = bool(cfg.loss.teacher)
    merges = in_passes and (cfg.earlier_passes > 0 or teaches)
    no_gradient = max(work.reference + one_merged * merges, (work.entering + one_merged + in_fp32) * merges)
    base, dequantised = base_bytes(arch, layout, element, cfg.model.quantisation)
    parts = {
        "base": base - frozen,
        "lora": lora,
        "working factors": lora * element // 4,  # in the dtype of the passes
        "optimizer": 2 * lora,  # AdamW's two moments
        "older factors": lora * cfg.rollout.staleness,
        "teacher": lora * teaches,
        "engine weights": engine_parameters(arch, layout) * element,
        "engine factors": lora_parameters(arch, cfg.lora, WHOLE) * element * adapter,
        "key-value cache": _cache(rollout, arch, cached_rows, cfg.data.max_prompt_tokens, cfg.model.dtype),
        "routing records": own_sequences * cfg.row_tokens * routing,
        "communication buffers": communication_buffers(layout, device),
        "runtime": int(RUNTIME_BYTES[device] + GRAPH_BYTES[device] * rollout.kind.reserves),
        "gradients": lora,
        "dequantised weights": dequantised,
        "merged weights": merged_weights(arch, cfg.lora, layout, cfg.model.recompute, apart) * element * in_passes,
        "activations": work.peak,
        "logits chunk": work.logits,  # included in the activations
        "margin": int(MARGIN * capacity),
    }
    merging = work.recomputed + one_merged + in_fp32 - work.peak - parts["merged weights"]
    # These bytes are added to the peak of the other work. Experts in the engine's memory are merged before that peak.
    parts["merging in fp32"] = max(0, merging) * (in_passes and not merged)
    resident = sum(parts[name] for name in RESIDENT)
    updating = work.peak + parts["merging in fp32"] + max(parts["merged weights"], dequantised)
    sampling = activations(
        arch,
        cfg.lora,
        _sampling_layout(layout),
        element=element,
        recompute=False,
        tokens=prefill,
        scored=cached_rows,
        device=device,
    ).reference
    swapped = lora * (rollout.staleness > 0)  # the trainer's factors, while the adapters contain older ones
    # Rank 0 has the whole checkpoint in the host's memory while it saves.
    checkpoint = checkpoint_bytes(arch, cfg.lora, rollout.staleness) * (device == "cpu")
    phases = {
        # Loading reads and rearranges one tensor at a time on the host; the engine does not exist yet.
        "load": base + sum(parts[name] for name in ("lora", "optimizer", "older factors", "teacher", "runtime")),
        # The first push. If the factors stay separate, the frozen experts are on the host until they are shared.
        "start": resident + first_group + frozen * (device == "cpu" or not adapter),
        "sync": resident + swapped + pushed,
        "rollout": resident + sampling,
        # A later micro-batch of an update also needs the memory for the gradients of the earlier ones. The pass of the
        # old policy merges one weight, or one stack of experts, at a time.
        "reference": resident
        + lora
        + max(swapped, parts["teacher"])  # the trainer's factors, while the adapters contain the teacher's
        + parts["routing records"]
        + max(no_gradient, work.reference + dequantised),
        "update": resident + lora + parts["routing records"] + updating,
        "optimizer": resident + 2 * lora,  # gradients, then their flat message or AdamW's temporaries
        "save": resident + gathered_by_a_save(arch, cfg.lora, device) + checkpoint,
    }
    return Memory(parts, phases, capacity, cached_rows, wanted_rows, merged // element)


def _push(cfg: Config, arch: Architecture, layout: RankGrid, stacks_filled: bool, shared: bool) -> tuple[int, int]:
    """Return the bytes that a rank needs for a push, as two numbers.

    The first number is for the largest group of tensors in the first push, the second for the whole of a later push. An
    engine takes all tensors of a fused group at the same time. The largest group is the embedding or all experts of a
    layer. If the engine uses the trainer's shards, it is this rank's experts of a layer. ``stacks_filled`` is
    Way.fills_stacks. If ``shared`` is true, the merged experts are in the engine's memory.
    """
    element, h = ELEMENT_BYTES[cfg.model.dtype], arch.hidden_size
    experts = arch.num_experts * h * arch.expert_ffn_size * element  # one matrix of all experts of a layer
    if layout.engine_expert > layout.engine_tensor:
        group, attention = 4 * experts // layout.engine_expert, arch.qkv_size // layout.tensor  # merged, stacked
    else:
        group, attention = max(3 * experts, arch.vocab_size * h * element), arch.qkv_size
    if cfg.merging is Merging.NOWHERE:
        # The push gathers the factors whole in fp32, and the engine keeps the old ones until it has the new ones.
        return group, lora_parameters(arch, cfg.lora, WHOLE) * (4 + element)
    later = group
    if stacks_filled:
        # Three matrices, because a stack (gate and up) still exists when the next one (down) is made. They count for
        # this rank's experts, unless these are in the engine's memory, and for those of all ranks if they are gathered.
        stacks = 3 * experts * ((not shared) / layout.expert + (layout.engine_expert == 1 < layout.expert))
        later = int(max(stacks, 2 * attention * h * element))
    # Quantised weights that are merged in the engine's memory are dequantised in fp32, cast and joined.
    merged_element = 4 + 2 * element * (cfg.model.quantisation != "none" and shared)
    return group, later + max(merged_element * merged_at_once(arch, cfg.lora, layout), 3 * 4 * h * attention)


def _sampling_layout(layout: RankGrid) -> RankGrid:
    """Return the layout with which ``activations`` estimates the memory of the engine's forward pass.

    The ranks of a replica split the matrices, but every rank has all tokens. As an upper bound, no matrix is split
    here, unless more ranks share the experts than the attention.
    """
    tensor, expert = layout.engine_tensor, layout.engine_expert
    return RankGrid(expert, tensor, expert, tensor, expert) if expert > tensor else WHOLE


def _cache(rollout: RolloutConfig, arch: Architecture, rows: int, prompt_tokens: int, dtype: str) -> int:
    """Return the bytes of one rank's key-value cache.

    vLLM reserves rollout.kv_cache_mib. The embedded sampler makes a cache for ``rows`` rows.
    """
    if rollout.kind.reserves:
        return rollout.kv_cache_mib * 2**20
    # In fp32 the rows of a group share the keys and values of their prompt; in bf16 each row has a copy.
    prompts = -(-rows // rollout.group_size) if dtype == "fp32" else rows
    tokens = prompts * prompt_tokens + rows * rollout.max_new_tokens
    return tokens * cache_bytes_per_token(arch, 1, ELEMENT_BYTES[dtype])


def communication_buffers(layout: RankGrid, device: str) -> int:
    """Return the bytes of a rank's communication buffers, for all groups of the trainer and the engine.

    Only groups of several ranks have buffers on the device. Messages between all ranks go through the host.
    """
    sizes = {"tp": layout.tensor, "ep": layout.expert, "dp": layout.data, "ep_dp": layout.expert_data}
    own = {name: 2 * 2**20 * mib for name, mib in HCCL_BUFFER_MIB.items()} if device == "npu" else {}
    trainers = [own.get(name, BUFFER_BYTES[device]) for name, size in sizes.items() if size > 1]
    # The engine has one group each for its tensor ranks, its expert ranks and its fused kernel. It has another one for
    # its data ranks if it spans all ranks.
    engine = 3 + (layout.engine_expert > layout.engine_tensor) if layout.engine_expert > 1 else 0
    return sum(trainers) + engine * BUFFER_BYTES[device]
