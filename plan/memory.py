"""Bytes on one rank, phase by phase, from a config.json and a layout alone. Arithmetic, no torch.

Parameters are exact: tests/test_memory_plan.py compares them with the instantiated model's. Activations follow what
autograd keeps in model_megatron.py and lora_megatron.py, and are compared with what a tiny model really allocates.
Rows count as padded; of packed ones (CPUs and GPUs) rollout.plan lets as many into a forward as take no more, except
where one row fills it. h hidden size, t tokens of a micro-batch, s = t / tensor of them on a rank, N rows that its
experts get, e bytes of an element. All ranks of a layout hold the same; only the routing decides which experts' rank is
the fullest.
"""

from __future__ import annotations

from dataclasses import dataclass

from config_rules import cache_bytes_per_token
from hf_config import Architecture
from knobs import Config, LoraConfig
from plan import grid
from plan.grid import Layout

GIB = 2**30
ELEMENT = {"fp32": 4, "bf16": 2}
LOGITS_PER_CHUNK, ROWS_PER_CHUNK = 2**24, 2048  # model_megatron.py's
CACHED_ROWS = 512  # rows of a wave of engines/torch_sampler.py
PREFILL_TOKENS = 8192  # of engines/vllm_engine.py: prompt tokens computed at once

# Assumptions, printed with every plan.
IMBALANCE = 1.5  # rows of the fullest rank's experts / their mean; no load balancing in RL
MARGIN = 0.05  # of the device, for fragmentation
RUNTIME_BYTES = {"cpu": 0.45 * GIB, "npu": 2 * GIB, "cuda": 1 * GIB}  # the process or driver before any tensor
GRAPH_BYTES = {"cpu": 0, "npu": 1.5 * GIB, "cuda": 1.5 * GIB}  # the engine's captured graphs and workspace
BUFFER_BYTES = {"cpu": 0, "npu": 2 * 200 * 2**20, "cuda": 2**26}  # of one communicator; HCCL_BUFFSIZE 200 MB, twice


# ---------------------------------------------------------------------------------------------------------- parameters


def base_parameters(arch: Architecture, layout: Layout) -> int:
    """Frozen parameters of one rank of the trainer."""
    h, tensor = arch.hidden_size, layout.tensor
    attention = (arch.qkv_size * (h + arch.qkv_bias) + h * arch.num_heads * arch.head_dim) // tensor
    norms = 2 * h + 2 * arch.head_dim * arch.qk_norm
    experts = arch.num_experts // layout.expert * 3 * h * arch.expert_ffn_size // layout.expert_tensor
    shared = 3 * h * arch.shared_expert_ffn_size // tensor + h * bool(arch.shared_expert_ffn_size)
    moe = experts + shared + arch.num_experts * h  # the router is whole on every rank
    dense = 3 * h * arch.dense_ffn_size // tensor
    vocabulary = arch.vocab_size * h // tensor * (1 if arch.tied_head else 2)
    ffn = sum(count * (moe if is_moe else dense) for is_moe, count in _kinds(arch))
    return vocabulary + h + arch.num_layers * (attention + norms) + ffn


def lora_parameters(arch: Architecture, lora: LoraConfig, layout: Layout) -> int:
    """Trainable parameters of one rank."""
    attention = _lora_attention(arch, lora, layout)
    return sum(count * (attention + _lora_ffn(arch, lora, layout, is_moe)) for is_moe, count in _kinds(arch))


def _kinds(arch: Architecture) -> list[tuple[bool, int]]:
    """MoE and dense layers, and how many there are of each."""
    moe = sum(arch.moe_layers)
    return [(is_moe, count) for is_moe, count in ((True, moe), (False, arch.num_layers - moe)) if count]


def _pair(lora: LoraConfig, target: str, rank: int, in_size: int, out_size: int) -> int:
    return rank * (in_size + out_size) if target in lora.targets else 0


def _swiglu_lora(lora: LoraConfig, rank: int, hidden: int, width: int) -> int:
    return _pair(lora, "linear_fc1", rank, hidden, 2 * width) + _pair(lora, "linear_fc2", rank, width, hidden)


def _lora_attention(arch: Architecture, lora: LoraConfig, layout: Layout) -> int:
    h, tensor = arch.hidden_size, layout.tensor
    return _pair(lora, "linear_qkv", lora.rank, h, arch.qkv_size // tensor) + _pair(
        lora, "linear_proj", lora.rank, arch.num_heads * arch.head_dim // tensor, h
    )


def _lora_ffn(arch: Architecture, lora: LoraConfig, layout: Layout, is_moe: bool) -> int:
    h, tensor = arch.hidden_size, layout.tensor
    if not is_moe:
        return _swiglu_lora(lora, lora.rank, h, arch.dense_ffn_size // tensor)
    width = arch.expert_ffn_size // layout.expert_tensor
    experts = arch.num_experts // layout.expert * _swiglu_lora(lora, lora.expert_rank or lora.rank, h, width)
    shared_width = arch.shared_expert_ffn_size // tensor
    shared = _swiglu_lora(lora, lora.rank, h, shared_width) if shared_width else 0
    return experts + shared + _pair(lora, "router", lora.rank, h, arch.num_experts)


def gathered_by_a_save(arch: Architecture, lora: LoraConfig, layout: Layout, device: str) -> int:
    """Most bytes that a rank holds beside its own shards while a checkpoint is written: the largest whole fp32 tensor.

    With expert_tensor > 1 its shards have been gathered over the experts first. On a CPU shards are joined there, and
    gloo copies what it sends and receives.
    """
    h, heads = arch.hidden_size, arch.num_heads * arch.head_dim
    experts = arch.num_experts * (lora.expert_rank or lora.rank)
    widths = [(lora.rank, arch.shared_expert_ffn_size), (experts, arch.expert_ffn_size)]
    if not all(arch.moe_layers):
        widths.append((lora.rank, arch.dense_ffn_size))
    elements = {
        "linear_qkv": lora.rank * max(h, arch.qkv_size),
        "linear_proj": lora.rank * max(h, heads),
        "linear_fc1": max(rows * max(h, 2 * width) for rows, width in widths),
        "linear_fc2": max(rows * max(h, width) for rows, width in widths),
        "router": lora.rank * max(h, arch.num_experts),
    }
    largest = 4 * max(elements[target] for target in lora.targets)
    before = largest // layout.expert_tensor if layout.expert_tensor > 1 else 0
    return (largest + before) * (3 if device == "cpu" else 1)


# --------------------------------------------------------------------------------------------------------- activations


@dataclass(frozen=True)
class Activations:
    """Bytes that one micro-batch needs beyond parameters and gradients."""

    kept: int  # for the backward pass, over all layers and the head
    peak: int  # the most at one time, ``kept`` included
    logits: int  # of it, a chunk of logits and what their gradient takes
    reference: int  # the most of a forward pass that keeps nothing


def activations(
    arch: Architecture,
    lora: LoraConfig,
    layout: Layout,
    *,
    element: int,
    recompute: bool,
    tokens: int,
    scored: int,
    imbalance: float = 1.0,
    entropy_bonus: bool = False,
) -> Activations:
    """One micro-batch of ``tokens`` (rows x padded length), ``scored`` of which reach the language-model head.

    With recompute only each layer's input is kept, and the layer that is being differentiated is there once more.
    """
    h, s = arch.hidden_size, tokens // layout.tensor
    rows = s * arch.experts_per_token * layout.expert_tensor * (imbalance if layout.expert > 1 else 1)  # N
    kinds = _kinds(arch)
    layers = [_kept_by_layer(arch, lora, layout, is_moe, element, tokens, rows) for is_moe, _ in kinds]
    in_flight = [_in_flight(arch, layout, is_moe, element, tokens, rows) for is_moe, _ in kinds]
    vocabulary = arch.vocab_size // layout.tensor
    chunk = min(scored, max(1, min(ROWS_PER_CHUNK, LOGITS_PER_CHUNK // vocabulary))) * vocabulary * 4  # fp32
    # Logits and their exponentials in the forward, first in the model's dtype; five in an entropy bonus's backward.
    logits = 5 * chunk if entropy_bonus else 2 * chunk + (chunk // 2 if element < 4 else 0)
    head = scored * (h * element + 12) + logits + scored * h * element
    head_kept = scored * (h * element + 12) + s * h * _norm_element(element)
    # The dispatcher holds its last routes whether or not anything is kept.
    routes = sum(arch.moe_layers) * s * (5 * arch.num_experts + 8 * arch.experts_per_token)
    inputs = arch.num_layers * s * h * element
    if recompute:
        # What a checkpointed layer took in and its gradient live until the loss of the micro-batch is let go.
        kept = inputs + routes + head_kept
        backward = max(layer + more for layer, more in zip(layers, in_flight, strict=True)) + inputs
    else:
        # The embedding is frozen, so layer 0 need not keep its input.
        kept = sum(count * layer for (_, count), layer in zip(kinds, layers, strict=True)) + head_kept
        kept -= s * h * _norm_element(element)
        backward = max(in_flight)
    forward = max(_forward_only(arch, layout, is_moe, element, tokens, rows) for is_moe, _ in kinds)
    reference = max(forward, head - scored * h * element - 2 * chunk) + routes + s * h * element
    return Activations(int(kept), int(kept + max(backward, head)), int(logits), int(reference))


def _norm_element(element: int) -> int:
    return max(4, element)  # a norm keeps its input in fp32


def _kept_by_layer(
    arch: Architecture, lora: LoraConfig, layout: Layout, is_moe: bool, element: int, tokens: int, rows: float
) -> float:
    """What autograd keeps of one layer. The base is frozen, so a base linear keeps no input; a LoRA pair keeps two."""
    h, t, s, e = arch.hidden_size, tokens, tokens // layout.tensor, element
    norm = _norm_element(e)
    heads, kv_heads = arch.num_heads // layout.tensor, max(1, arch.num_kv_heads // layout.tensor)
    q, kv = heads * arch.head_dim, kv_heads * arch.head_dim
    on = {target: target in lora.targets for target in ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")}
    kept = s * (h * norm + h * e * on["linear_qkv"]) + s * (h * norm + h * e) + 8 * s  # two norms, in and out
    kept += t * (q + 2 * kv) * e + t * (q + kv) * e + t * q * e  # qkv; query and key with RoPE; attention's output
    kept += t * 4 * heads  # softmax's normaliser
    if arch.qk_norm:
        kept += t * 4 * (heads + kv_heads)
        if e < norm:
            kept += t * (q + kv) * norm
        else:
            kept += t * (q + kv) * e  # copied out of qkv
    kept += lora.rank * e * (t * on["linear_qkv"] + s * on["linear_proj"])
    if e < 4:  # the factors, cast
        kept += e * (_lora_attention(arch, lora, layout) + _lora_ffn(arch, lora, layout, is_moe))

    def swiglu(width: int) -> float:
        return t * 5 * width * e + lora.rank * e * (t * on["linear_fc1"] + s * on["linear_fc2"])

    if not is_moe:
        return kept + swiglu(arch.dense_ffn_size // layout.tensor)
    width, rank = arch.expert_ffn_size // layout.expert_tensor, lora.expert_rank or lora.rank
    a_row = h * on["linear_fc1"] + (2 + on["linear_fc2"]) * width  # in, gate and up, what comes of them
    a_row += rank * (on["linear_fc1"] + on["linear_fc2"])
    kept += rows * (a_row * e + 24) + s * 10 * arch.num_experts  # and the router's scores and maps
    if arch.shared_expert_ffn_size:
        kept += swiglu(arch.shared_expert_ffn_size // layout.tensor) + s * h * e
    return kept


def _in_flight(arch: Architecture, layout: Layout, is_moe: bool, element: int, tokens: int, rows: float) -> float:
    """Gradients of activations at the widest place of a layer's backward pass."""
    if is_moe:
        return 3 * rows * arch.hidden_size * element
    return 2 * tokens * arch.dense_ffn_size // layout.tensor * element


def _forward_only(arch: Architecture, layout: Layout, is_moe: bool, element: int, tokens: int, rows: float) -> float:
    """The widest place of a layer's forward pass that keeps nothing."""
    h = arch.hidden_size
    residual = 3 * tokens // layout.tensor * h * element
    if is_moe:
        return residual + rows * (3 * h + 5 * arch.expert_ffn_size // layout.expert_tensor) * element
    return residual + tokens * (h + 5 * arch.dense_ffn_size // layout.tensor) * element


# -------------------------------------------------------------------------------------------------------------- phases


@dataclass(frozen=True)
class Memory:
    """One rank's bytes: what stays, and what each phase comes to, everything that stays included."""

    parts: dict[str, int]
    phases: dict[str, int]
    capacity: int
    cached_rows: int  # sequences whose keys and values fit at once, in one replica
    wanted_rows: int  # sequences of a replica in a step

    @property
    def fullest(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak(self) -> int:
        """The fullest phase and the margin."""
        return self.phases[self.fullest] + self.parts["margin"]


def micro_batch_tokens(cfg: Config, layout: Layout) -> int:
    """Most tokens, padding included, of one forward pass on one rank."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    longest = -(-longest // layout.tensor) * layout.tensor
    sequences = -(-cfg.optim.prompts_per_update * cfg.rollout.group_size // layout.data)
    return max(longest, min(cfg.optim.tokens_per_micro_batch, sequences * longest) // layout.tensor * layout.tensor)


def plan(cfg: Config, arch: Architecture, layout: Layout, device: str, capacity: int) -> Memory:
    """Every phase of a step on the fullest rank. ``device``: cpu | npu | cuda; ``capacity`` bytes for this rank."""
    element, h = ELEMENT[cfg.model.dtype], arch.hidden_size
    tokens = micro_batch_tokens(cfg, layout)
    work = activations(
        arch, cfg.lora, layout, element=element, recompute=cfg.model.recompute, tokens=tokens, scored=tokens,
        imbalance=IMBALANCE, entropy_bonus=cfg.loss.entropy_coef > 0,
    )  # fmt: skip
    lora = 4 * lora_parameters(arch, cfg.lora, layout)
    wanted_rows = -(-cfg.rollout.prompts_per_step // layout.replicas) * cfg.rollout.group_size
    cache, cached_rows = _cache(cfg, arch, layout, element, wanted_rows)
    engine = _engine_layout(layout)
    prefill = min(PREFILL_TOKENS, -(-wanted_rows // cfg.rollout.group_size) * cfg.data.max_prompt_tokens)
    # An engine takes a fused group whole, the largest being all experts of a layer; or, with the trainer's own shards,
    # this rank's.
    shared = layout.engine_expert if layout.engine_expert > layout.engine_tensor else 1
    whole_group = max(3 * arch.num_experts * h * arch.expert_ffn_size // shared, arch.vocab_size * h) * element
    routing = sum(arch.moe_layers) * arch.experts_per_token if cfg.replay.mode != "off" else 0
    own_sequences = -(-cfg.rollout.prompts_per_step * cfg.rollout.group_size // layout.data)
    parts = {
        "base": base_parameters(arch, layout) * element,
        "lora": lora,
        "optimizer": 2 * lora,  # AdamW's two moments
        "engine weights": base_parameters(arch, engine) * element,
        "key-value cache": cache,
        "routing records": own_sequences * (cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens) * routing,
        "communication buffers": communicators(cfg, layout) * BUFFER_BYTES[device],
        "runtime": int(RUNTIME_BYTES[device] + (GRAPH_BYTES[device] if cfg.rollout.engine == "vllm" else 0)),
        "gradients": lora,
        "activations": work.peak,
        "logits chunk": work.logits,  # within the activations
        "margin": int(MARGIN * capacity),
    }
    stays = ("base", "lora", "optimizer", "engine weights", "key-value cache", "communication buffers", "runtime")
    resident = sum(parts[name] for name in stays)
    sampling = activations(
        arch, cfg.lora, engine, element=element, recompute=False, tokens=prefill, scored=min(wanted_rows, CACHED_ROWS)
    ).reference
    phases = {
        # One tensor is read and rearranged at a time; the engine is not there yet.
        "load": parts["base"] + parts["runtime"] + 2 * arch.vocab_size * h * element,
        # Merging is in fp32.
        "sync": resident + whole_group + 3 * 4 * h * max(arch.qkv_size, arch.expert_ffn_size * 2),
        "rollout": resident + sampling,
        "reference": resident + work.reference + parts["routing records"],
        "update": resident + parts["gradients"] + work.peak + parts["routing records"],
        "optimizer": resident + 3 * lora,  # gradients, their flat message, AdamW's temporaries
        "save": resident + gathered_by_a_save(arch, cfg.lora, layout, device),
    }
    return Memory(parts, phases, capacity, cached_rows, wanted_rows)


def beside_plan(cfg: Config, arch: Architecture, ranks: int, device: str, peak_gib: float, phase: str) -> str:
    """One line at the end of a run: what its fullest rank had in use at most, beside what was planned."""
    memory = plan(cfg, arch, grid.of(cfg, ranks), device, 0)
    planned = memory.phases[memory.fullest] / GIB
    return f"device memory: at most {peak_gib:.2f} GiB in {phase}; planned: {planned:.2f} GiB in {memory.fullest}"


def _engine_layout(layout: Layout) -> Layout:
    """The engine's own copy: its ranks split attention and experts alike, or all ranks share out whole experts."""
    tensor, expert = layout.engine_tensor, layout.engine_expert
    if expert > tensor:
        return Layout(expert, tensor, expert, 1, tensor, expert)
    return Layout(tensor, tensor, 1, tensor, tensor, tensor)


def _cache(cfg: Config, arch: Architecture, layout: Layout, element: int, rows: int) -> tuple[int, int]:
    """Bytes of the key-value cache, and how many whole sequences fit into it at once, of a replica's ``rows``."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    token = cache_bytes_per_token(arch, layout.engine_tensor, element)
    if cfg.rollout.engine == "vllm":
        size = cfg.rollout.kv_cache_mib * 2**20
        # The samples of a prompt share its keys and values.
        one = (cfg.data.max_prompt_tokens / cfg.rollout.group_size + cfg.rollout.max_new_tokens) * token
        return size, min(rows, int(size // one))
    held = min(rows, CACHED_ROWS)
    prompts = -(-held // cfg.rollout.group_size)
    return (prompts * cfg.data.max_prompt_tokens + held * cfg.rollout.max_new_tokens) * token, min(held, longest * held)


def communicators(cfg: Config, layout: Layout) -> int:
    """Groups of more than one rank that move tensors: the trainer's, the world's, and the engine's."""
    sizes = [layout.tensor, layout.expert, layout.expert_tensor * layout.expert, layout.data, layout.expert_data]
    # Its tensor and expert ranks, those of its fused kernel, and its data ranks if it spans all.
    engine = 3 + (layout.engine_expert > layout.engine_tensor) if layout.engine_expert > 1 else 0
    return sum(size > 1 for size in sizes) + (layout.ranks > 1) + engine
