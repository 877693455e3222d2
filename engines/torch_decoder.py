"""A Qwen3-MoE or Qwen2-MoE decoder in plain torch, for sampling. Its weights have their Hugging Face names.

Every row decodes one token at a time. The rows that sample one prompt are adjacent; together they are a line. They
share the keys and values of their prompt, which are computed once, and each row has its own keys and values for the
tokens that it sampled. There is no process group and no autograd.

In fp32 the attention of a line is one product, for speed. In bf16, where every rounding shows in the log-probs, the
decoder rounds where the trainer rounds, so that both compute the same numbers: it uses the trainer's attention kernel
on whole rows, so every row then has a copy of its prompt's keys and values.
P prompts, T prompt tokens, N new tokens, R rows, L lines, H / KV query / key-value heads, D head size, h hidden size,
E experts, K experts a token.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
import packing
from engines.interface import check_arrival, check_complete, check_factors, check_finite
from hf_config import Architecture
from knobs import LoraConfig
from weights_hf import fused_group

PREFILL_TOKENS = 16384  # prompt tokens, padding included, that are computed at once; this limits the activations
# Number of slots by which the cache of a row grows. A cache with few unused slots is read in half of the time of a
# cache with a slot for every future token, where it does not fit into the processor's cache. Growing it moves an eighth
# of what reading it moves.
SLOTS = 16


@dataclass
class Cache:
    """Keys and values of all tokens so far, by layer. Heads come first, so that the rows of a line are adjacent."""

    cos: Tensor  # (T + N, D) by position
    sin: Tensor  # (T + N, D)
    prompt_length: Tensor  # (R,)
    padding: Tensor  # (KV * L, 1, T) -inf at the padding of a prompt, else 0
    prompt_keys: list[Tensor]  # (KV * L, D, T)
    prompt_values: list[Tensor]  # (KV * L, T, D)
    keys: list[Tensor]  # (KV * R, C, D): C slots; those after the sampled tokens hold 0. bf16: (KV * R, T + N, D)
    values: list[Tensor]  # as the keys


class Factors(NamedTuple):
    """The adapter of a part: x -> scale B A x.  A (R, in), B (out, R); of experts A (E, in, R), B (E, R, out)"""

    a: Tensor
    b: Tensor
    scale: float


Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, query, key, value of new tokens -> (R, H * D)


def _write(cache: Tensor, new: Tensor, place: int | Tensor) -> None:
    """Write one token of every row.  (KV * R, C, D), (R, KV, D); ``place``: its slot, for all rows or of each"""
    # unflatten, not view: MindSpeed's view copies a tensor that is not contiguous, which loses the write.
    by_head = cache.unflatten(0, (new.shape[1], len(new)))
    if isinstance(place, int):
        by_head.select(2, place).copy_(new.transpose(0, 1))
    else:
        by_head[:, torch.arange(len(new), device=new.device), place] = new.transpose(0, 1)


def keep_rows_(cache: Cache, rows: Tensor) -> None:
    """Keep only the given rows. Each of them becomes a line of its own.

    The caches of the prompts are copied to the rows that remain. Measured, this is as fast as lines of several rows;
    once half of the rows are gone, the copies take less memory than caches that were never shared.
    """
    kv_heads = len(cache.keys[0]) // len(cache.prompt_length)
    lines = rows.div(len(cache.keys[0]) // len(cache.padding), rounding_mode="floor")

    def keep(x: Tensor, kept: Tensor) -> Tensor:
        return x.unflatten(0, (kv_heads, -1)).index_select(1, kept).flatten(0, 1)

    cache.prompt_length, cache.padding = cache.prompt_length[rows], keep(cache.padding, lines)
    for layers, kept in (
        (cache.prompt_keys, lines),
        (cache.prompt_values, lines),
        (cache.keys, rows),
        (cache.values, rows),
    ):
        layers[:] = [keep(layer, kept) for layer in layers]


class Decoder:
    """The model's weights in the layout of the kernels. It is `ready` once `load_weights` has brought a whole model."""

    def __init__(
        self,
        arch: Architecture,
        dtype: torch.dtype,
        device: str | torch.device,
        *,
        norm_dtype: torch.dtype | None = None,
    ) -> None:
        """``norm_dtype``: the dtype of the RMSNorm weights, if it is not ``dtype``."""
        self.arch, self.dtype, self.device = arch, dtype, torch.device(device)
        self.norm_dtype = norm_dtype or dtype
        self.exact = dtype != torch.float32
        self.ready = False
        self.slots: dict[str, Tensor] = {}  # Hugging Face name -> the part of a storage that holds this tensor
        self.places: dict[str, tuple[int, str, Any]] = {}  # Hugging Face name -> its layer, part, and index in the part
        table = (arch.vocab_size, arch.hidden_size)
        self.embedding = self._allocate(table, {"model.embed_tokens.weight": ...})
        self.head = self.embedding if arch.tied_head else self._allocate(table, {"lm_head.weight": ...})
        self.final_norm = self._allocate(table[1:], {"model.norm.weight": ...})
        self.head_ones = torch.ones(arch.head_dim, dtype=self.norm_dtype, device=self.device)
        self.layers = [self._allocate_layer(index) for index in range(arch.num_layers)]
        self.factors: list[dict[str, Factors]] = [{} for _ in self.layers]  # by layer and part
        self.shapes = {name: tuple(slot.shape) for name, slot in self.slots.items()}
        self.groups = {name: fused_group(name) for name in self.slots}

    # -------------------------------------------------------------------------------------------------------- weights
    def _allocate(self, shape: tuple[int, ...], pieces: dict) -> Tensor:
        """Storage of ``shape``. ``pieces``: Hugging Face name -> the index of the part that this tensor fills.

        Experts' matrices are stored (E, in, out), because a product of few rows then takes a sixth less time. The
        Hugging Face tensors are (out, in) and fill them transposed.
        """
        is_norm = all(name.endswith("norm.weight") for name in pieces)
        storage = torch.zeros(shape, dtype=self.norm_dtype if is_norm else self.dtype, device=self.device)
        as_filled = storage.mT if storage.dim() == 3 else storage
        self.slots |= {name: as_filled[index] for name, index in pieces.items()}
        return storage

    def _allocate_layer(self, layer: int) -> dict[str, Tensor]:
        """The weights of one layer. Matrices are fused where one product can do the work of several."""
        arch, hidden, is_moe = self.arch, self.arch.hidden_size, self.arch.moe_layers[layer]
        query, key = arch.num_heads * arch.head_dim, (arch.num_heads + arch.num_kv_heads) * arch.head_dim
        rows = {"q": slice(query), "k": slice(query, key), "v": slice(key, None)}
        parts: dict[
            str, tuple[tuple[int, ...], dict[str, Any]]
        ] = {  # part -> its shape, and which index of it each tensor fills
            "input_norm": ((hidden,), {"input_layernorm.weight": ...}),
            "qkv": ((arch.qkv_size, hidden), {f"self_attn.{x}_proj.weight": rows[x] for x in "qkv"}),
            "out": ((hidden, query), {"self_attn.o_proj.weight": ...}),
            "mlp_norm": ((hidden,), {"post_attention_layernorm.weight": ...}),
        }
        if arch.qkv_bias:
            parts["qkv_bias"] = ((arch.qkv_size,), {f"self_attn.{x}_proj.bias": rows[x] for x in "qkv"})
        if arch.qk_norm:
            parts |= {f"{x}_norm": ((arch.head_dim,), {f"self_attn.{x}_norm.weight": ...}) for x in "qk"}
        if is_moe:
            width, experts = arch.expert_ffn_size, range(arch.num_experts)
            gates = {f"mlp.experts.{e}.gate_proj.weight": (e, slice(width)) for e in experts}
            ups = {f"mlp.experts.{e}.up_proj.weight": (e, slice(width, None)) for e in experts}
            downs = {f"mlp.experts.{e}.down_proj.weight": e for e in experts}
            parts |= {
                "router": ((arch.num_experts, hidden), {"mlp.gate.weight": ...}),
                "expert_gate_up": ((arch.num_experts, hidden, 2 * width), gates | ups),
                "expert_down": ((arch.num_experts, width, hidden), downs),
            }
        if is_moe and arch.shared_expert_ffn_size:
            parts["shared_gate"] = ((1, hidden), {"mlp.shared_expert_gate.weight": ...})
        width = arch.shared_expert_ffn_size if is_moe else arch.dense_ffn_size
        if width:  # the layer has a shared expert or is dense
            mlp = "mlp.shared_expert" if is_moe else "mlp"
            halves = {f"{mlp}.gate_proj.weight": slice(width), f"{mlp}.up_proj.weight": slice(width, None)}
            parts |= {
                "gate_up": ((2 * width, hidden), halves),
                "down": ((hidden, width), {f"{mlp}.down_proj.weight": ...}),
            }
        weights = {}
        for part, (shape, pieces) in parts.items():
            named = {f"model.layers.{layer}.{name}": index for name, index in pieces.items()}
            weights[part] = self._allocate(shape, named)
            self.places |= {name: (layer, part, index) for name, index in named.items()}
        return weights

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """See engines.interface.Engine. Tensors are copied as they come; a failure leaves the decoder not `ready`."""
        whole, self.ready = not self.ready, False
        loaded: dict[str, Tensor] = {}
        for name, tensor in named_tensors:
            check_arrival(name, tensor, self.shapes, loaded)
            loaded[name] = self.slots[name].copy_(tensor)
        check_complete(loaded, self.groups, whole)
        check_finite(loaded)  # of the copies, because a cast can overflow
        if self.arch.qk_norm:
            for weights in self.layers:
                heads = (("q_norm", self.arch.num_heads), ("k_norm", self.arch.num_kv_heads))
                weights["qk_norm"] = torch.cat([weights[name].expand(count, -1) for name, count in heads])
        self.ready = True

    @torch.no_grad()
    def load_adapter(self, factors: dict[str, tuple[Tensor, Tensor]], lora: LoraConfig) -> None:
        """See engines.interface.Engine. The factors are held fused as the weights are, in the dtype of the decoder."""
        check_factors(factors, self.shapes, lora)
        layers: list[dict[str, Factors]] = [{} for _ in self.layers]
        for name, (a, b) in factors.items():
            layer, part, index = self.places[name]
            weight = self.layers[layer][part]
            if part not in layers[layer]:
                dtype = torch.float32 if part == "router" else self.dtype  # as in the trainer
                rank, (*experts, first, second) = len(a), weight.shape
                shapes = ((first, rank), (rank, second)) if experts else ((rank, second), (first, rank))
                a_held, b_held = (torch.zeros(*experts, *shape, dtype=dtype, device=self.device) for shape in shapes)
                layers[layer][part] = Factors(a_held, b_held, lora.alpha / rank)
            held = layers[layer][part]
            if weight.dim() == 3:
                expert, columns = index if isinstance(index, tuple) else (index, slice(None))
                held.a[expert].copy_(a.t())
                held.b[expert, :, columns].copy_(b.t())
            else:
                held.a.copy_(a)
                held.b[index].copy_(b)
        self.factors = layers

    # ------------------------------------------------------------------------------------------------------ the model
    def _linear(self, layer: int, part: str, x: Tensor) -> Tensor:
        """``part`` of a layer, with its adapter if it has one.  (.., in) -> (.., out)"""
        weights = self.layers[layer]
        y = F.linear(x, weights[part], weights.get(f"{part}_bias"))
        if part in self.factors[layer]:
            a, b, scale = self.factors[layer][part]
            y += F.linear(scale * F.linear(x, a), b)
        return y

    def _grouped(self, layer: int, part: str, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """``part`` of the experts of a layer, with their adapters if they have any.  (N, in), (E,) -> (N, out)"""
        y = kernels.grouped_mm(x, self.layers[layer][part], tokens_per_expert)
        if part in self.factors[layer]:
            a, b, scale = self.factors[layer][part]
            y += kernels.grouped_mm(scale * kernels.grouped_mm(x, a, tokens_per_expert), b, tokens_per_expert)
        return y

    def _qkv(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries, rotated keys, and values.  (..., h) -> (..., H, D), (..., KV, D), (..., KV, D)"""
        arch, query_heads, key_heads = self.arch, self.arch.num_heads, self.arch.num_kv_heads
        weights = self.layers[layer]
        x = kernels.rms_norm(x, weights["input_norm"], arch.rms_norm_eps)
        heads = self._linear(layer, "qkv", x).view(*x.shape[:-1], -1, arch.head_dim)
        both = heads.narrow(-2, 0, query_heads + key_heads)
        if arch.qk_norm:  # one normalisation for queries and keys, then the weights of each head
            both = kernels.rms_norm(both, self.head_ones, arch.rms_norm_eps)
            both = (both * weights["qk_norm"]).to(x.dtype)
        both = kernels.rotary(both, cos, sin)
        query, key = both.narrow(-2, 0, query_heads), both.narrow(-2, query_heads, key_heads)
        return query, key, heads.narrow(-2, query_heads + key_heads, key_heads)

    def _mlp(self, layer: int, x: Tensor, routes: list[Tensor]) -> Tensor:
        """The residual stream after the MLP block. A MoE layer appends its (R, K) experts to ``routes``.  (R, h)"""
        arch, weights = self.arch, self.layers[layer]
        h = kernels.rms_norm(x, weights["mlp_norm"], arch.rms_norm_eps)
        if "gate_up" in weights:
            dense = self._linear(layer, "down", kernels.swiglu(self._linear(layer, "gate_up", h)))
            if "shared_gate" in weights:
                dense *= torch.sigmoid(F.linear(h, weights["shared_gate"]))
            x = x + dense
        if "router" not in weights:
            return x
        # The router works in fp32 for every dtype of the model, as in the trainer.
        logits = F.linear(h.float(), weights["router"].float())
        if "router" in self.factors[layer]:
            a, b, scale = self.factors[layer]["router"]
            logits += scale * F.linear(F.linear(h.float(), a), b)
        score, experts = logits.topk(arch.experts_per_token, dim=-1)  # (R, K)
        score = score.softmax(-1) if arch.norm_topk_prob else (score - logits.logsumexp(-1, keepdim=True)).exp()
        routes.append(experts)
        experts, order = experts.sort(-1)
        score = score.gather(-1, order)
        # Each (row, choice) pair becomes a row. Sorted by expert, two grouped products compute all experts.
        in_order, pair = experts.view(-1).sort(stable=True)
        tokens_per_expert = torch.bincount(in_order, minlength=arch.num_experts)
        pairs = h.index_select(0, pair.div(arch.experts_per_token, rounding_mode="floor"))
        pairs = self._grouped(layer, "expert_gate_up", pairs, tokens_per_expert)
        pairs = kernels.weighted_swiglu(pairs, score.view(-1).index_select(0, pair))
        pairs = self._grouped(layer, "expert_down", pairs, tokens_per_expert)
        # Restore the order of rows and choices before the sum: index_add_ adds in no fixed order on an accelerator. The
        # sum is rounded after each expert, in the order of the experts, as in the trainer's dispatcher.
        pairs = torch.empty_like(pairs).index_copy_(0, pair, pairs).view(*experts.shape, -1)
        total = pairs[:, 0]
        for choice in range(1, arch.experts_per_token):
            total = total + pairs[:, choice]
        return x + total

    def prefill(
        self,
        prompts: list[list[int]],
        num_samples: int,
        new_tokens: int,
        pad_token: int,
        layer_outputs: list[Tensor] | None = None,
    ) -> tuple[Tensor, Cache, Tensor | None]:
        """Run the prompts: last hidden states, a cache for ``num_samples`` rows of each, and their tokens' experts.

        The shapes are (P, h) for the states and (P, T, MoE layers, K) uint8 for the experts, which are None without MoE
        layers. Padding is on the right and attention is causal, so no real token sees padding. ``layer_outputs``
        collects the (P, T, h) after each layer.
        """
        arch, device, longest = self.arch, self.device, max(map(len, prompts))
        longest += -longest % packing.KEYS if self.exact else 0

        def zeros(sequences: int, *shape: int) -> list[Tensor]:
            shape = (arch.num_kv_heads * sequences, *shape)
            return [torch.zeros(shape, dtype=self.dtype, device=device) for _ in self.layers]

        lengths = torch.tensor([len(p) for p in prompts], device=device)
        padding = torch.zeros(len(prompts), 1, longest, dtype=self.dtype, device=device)
        padding.masked_fill_(torch.arange(longest, device=device) >= lengths[:, None, None], float("-inf"))
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
        angle = torch.outer(torch.arange(longest + new_tokens, dtype=torch.float32), 1.0 / arch.rope_theta**exponents)
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos().to(device, self.dtype), angle.sin().to(device, self.dtype)
        slots = longest + new_tokens + -new_tokens % packing.KEYS if self.exact else 0
        cache = Cache(
            cos,
            sin,
            lengths.repeat_interleave(num_samples),
            padding.repeat(arch.num_kv_heads, 1, 1),
            prompt_keys=[] if self.exact else zeros(len(prompts), arch.head_dim, longest),
            prompt_values=[] if self.exact else zeros(len(prompts), longest, arch.head_dim),
            keys=zeros(len(prompts) * num_samples, slots, arch.head_dim),
            values=zeros(len(prompts) * num_samples, slots, arch.head_dim),
        )

        ids = torch.tensor([[*p, *[pad_token] * (longest - len(p))] for p in prompts], device=device)
        hidden, experts = [], []
        step, by_head = max(1, PREFILL_TOKENS // longest), (arch.num_kv_heads, -1)
        for part in (slice(start, start + step) for start in range(0, len(prompts), step)):
            x, routes = F.embedding(ids[part], self.embedding), []  # (p, T, h)
            for layer in range(arch.num_layers):
                qkv = self._qkv(layer, x, cos[None, :longest, None], sin[None, :longest, None])
                query, key, value = (heads.transpose(1, 2) for heads in qkv)  # (p, heads, T, D)
                if self.exact:
                    own = slice(part.start * num_samples, part.stop * num_samples)
                    for held, new in ((cache.keys, key), (cache.values, value)):
                        copies = new.repeat_interleave(num_samples, 0).transpose(0, 1)
                        held[layer].unflatten(0, by_head)[:, own, :longest] = copies
                else:
                    cache.prompt_keys[layer].unflatten(0, by_head)[:, part] = key.permute(1, 0, 3, 2)
                    cache.prompt_values[layer].unflatten(0, by_head)[:, part] = value.transpose(0, 1)
                mixed = kernels.causal_attention(query, key, value, scale=arch.head_dim**-0.5)
                x = x + self._linear(layer, "out", mixed.transpose(1, 2).flatten(2))
                x = self._mlp(layer, x.flatten(0, 1), routes).view_as(x)
                if layer_outputs is not None:
                    layer_outputs.append(x)
            hidden.append(x[torch.arange(len(x), device=device), lengths[part] - 1])
            experts += [torch.stack(routes, 1).to(torch.uint8).unflatten(0, (-1, longest))] if routes else []
        return torch.cat(hidden), cache, torch.cat(experts) if experts else None

    def decode(self, token: Tensor, n: int, cache: Cache) -> tuple[Tensor, list[Tensor]]:
        """Run the ``n``-th sampled token of every row: hidden states, experts by MoE layer.  (R,) -> (R, h), (R, K)"""
        position = cache.prompt_length + n
        cos, sin = cache.cos.index_select(0, position)[:, None], cache.sin.index_select(0, position)[:, None]
        x, routes = F.embedding(token, self.embedding), []
        attend = self._attend_row_by_row(n, cache) if self.exact else self._attend_line_by_line(n, cache)
        for layer in range(self.arch.num_layers):
            mixed = attend(layer, *self._qkv(layer, x, cos, sin))  # (R, H * D)
            if self.exact or self.factors[layer]:
                x = x + self._linear(layer, "out", mixed)
            else:
                x = torch.addmm(x, mixed, self.layers[layer]["out"].t())
            x = self._mlp(layer, x, routes)
        return x, routes

    def _attend_line_by_line(self, n: int, cache: Cache) -> Attend:
        """Attention of the ``n``-th sampled tokens: one product for all rows of a line and their common prompt."""
        kv_heads, head_dim, rows = self.arch.num_kv_heads, self.arch.head_dim, len(cache.prompt_length)
        lines, _, longest = cache.padding.shape
        slots = (n // SLOTS + 1) * SLOTS
        unused = torch.zeros(slots, dtype=self.dtype, device=self.device)
        unused[n + 1 :] = float("-inf")

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if n % SLOTS == 0:  # add slots layer by layer, so that only one layer exists twice
                cache.keys[layer] = F.pad(cache.keys[layer], (0, 0, 0, SLOTS))
                cache.values[layer] = F.pad(cache.values[layer], (0, 0, 0, SLOTS))
            keys, values = cache.keys[layer], cache.values[layer]
            _write(keys, key, n)
            _write(values, value, n)
            # All rows of a line, with all query heads of a key head, attend to the same prompt in one product.
            query = query.view(rows, kv_heads, -1, head_dim).transpose(0, 1).contiguous()
            by_row, by_line = query.view(kv_heads * rows, -1, head_dim), query.view(lines, -1, head_dim)
            on_prompt = torch.baddbmm(cache.padding, by_line, cache.prompt_keys[layer], alpha=head_dim**-0.5)
            on_own = torch.baddbmm(unused, by_row, keys.mT, alpha=head_dim**-0.5)
            scores = torch.cat([on_prompt.view(*by_row.shape[:2], longest), on_own], -1)  # (KV * R, H/KV, T + C)
            attention = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
            on_prompt, on_own = attention.narrow(-1, 0, longest), attention.narrow(-1, longest, slots)
            mixed = torch.bmm(on_prompt.view(*by_line.shape[:2], longest), cache.prompt_values[layer])
            mixed = mixed.view_as(by_row).baddbmm_(on_own, values).view(kv_heads, rows, -1)  # (KV, R, H/KV * D)
            return mixed.transpose(0, 1).flatten(1)

        return attend

    def _attend_row_by_row(self, n: int, cache: Cache) -> Attend:
        """Attention of the ``n``-th sampled tokens by the trainer's kernel: each row has its whole keys and values."""
        kv_heads, scale = self.arch.num_kv_heads, self.arch.head_dim**-0.5
        longest = cache.padding.shape[-1] + (n // packing.KEYS + 1) * packing.KEYS
        place = cache.prompt_length + n
        seen = torch.arange(longest, device=self.device) <= place[:, None]
        bias = torch.zeros(seen.shape, dtype=self.dtype, device=self.device).masked_fill_(~seen, float("-inf"))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            _write(keys, key, place)
            _write(values, value, place)
            keys, values = (x.unflatten(0, (kv_heads, -1)).transpose(0, 1)[:, :, :longest] for x in (keys, values))
            query = query.unflatten(1, (kv_heads, -1))  # the query heads of a key head, as if they were its tokens
            mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=bias[:, None, None], scale=scale)
            return mixed.flatten(1)

        return attend

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, h) -> (R, V)"""
        return F.linear(kernels.rms_norm(hidden, self.final_norm, self.arch.rms_norm_eps), self.head)
