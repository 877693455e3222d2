"""A decoder in plain torch that samples from the models of facts/architectures.py. Weights have Hugging Face names.

Every row decodes one token at a time. A prompt is computed once for all rows that sample it. These rows are adjacent,
and torch_cache.py stores their keys and values. There is no process group and no autograd.
P is the number of prompts, T of prompt tokens, R of rows, E of experts, and K of experts per token. H is the number of
query heads, KV of key-value heads, D the head size, h the hidden size, and V the size of the vocabulary.
"""

import os
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from engines.interface import check_arrival, check_complete, check_finite
from engines.torch_cache import PrefixCache, RowCache
from facts.architectures import Architecture, modules
from hardware import kernels
from knobs import LoraConfig
from model import packing
from weights.adapter_weights import adapted_modules
from weights.huggingface import fused_group

PREFILL_TOKENS = 16384  # prompt tokens, including padding, that are computed at once; this limits the activations


class Decoder:
    """The model, with its weights in the layout of the kernels. `ready` says whether it has all weights."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: str | torch.device) -> None:
        self.arch, self.dtype, self.device = arch, dtype, torch.device(device)
        self.cache = PrefixCache if dtype == torch.float32 else RowCache
        self.ready = False
        self.slots: dict[str, Tensor] = {}  # Hugging Face name -> the part of a storage for this tensor
        table = (arch.vocab_size, arch.hidden_size)
        self.embedding = self._allocate(table, {"model.embed_tokens.weight": ...})
        self.head = self.embedding if arch.tied_head else self._allocate(table, {"lm_head.weight": ...})
        self.final_norm = self._allocate(table[1:], {"model.norm.weight": ...})
        self.expert_ends = kernels.sortable(torch.arange(arch.num_experts + 1, device=self.device))
        self.head_ones = torch.ones(arch.head_dim, dtype=dtype, device=self.device)
        self.layers = [self._allocate_layer(index) for index in range(arch.num_layers)]
        # By layer and part: A and (alpha / R) B.  (R, in) and (out, R); for experts (E, in, R) and (E, R, out)
        self.factors: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in self.layers]
        self.shapes = {name: tuple(slot.shape) for name, slot in self.slots.items()}
        self.groups = {name: fused_group(name) for name in self.slots}

    # -------------------------------------------------------------------------------------------------------- weights
    def _allocate(self, shape: tuple[int, ...], pieces: dict) -> Tensor:
        """Return storage of ``shape``. ``pieces`` maps each Hugging Face name to the tensor's index in the storage.

        Experts' matrices are stored as (E, in, out), because a product of few rows then takes a sixth less time. The
        Hugging Face tensors are (out, in), and are copied transposed.
        """
        storage = torch.zeros(shape, dtype=self.dtype, device=self.device)
        as_filled = storage.mT if storage.dim() == 3 else storage
        self.slots |= {name: as_filled[index] for name, index in pieces.items()}
        return storage

    def _allocate_layer(self, layer: int) -> dict[str, Tensor]:
        """Return the weights of one layer by `module.part`. Matrices are fused if one product can replace several."""
        weights = {}
        for module in modules(self.arch, self.arch.moe_layers[layer]):
            part, rows, pieces = module.part, 0, {}
            for block, (size, *_) in module.blocks.items():
                columns = slice(rows, rows + size)
                rows += size
                for expert in range(module.copies):
                    name = f"model.layers.{layer}.{block.format(expert)}"
                    pieces[name] = (expert, columns) if module.kind == "experts" else columns
            for kind in ("weight", "bias")[: 1 + module.bias]:
                shape = (rows, *next(iter(module.blocks.values()))[1:])[: 1 if kind == "bias" else None]
                shape = (module.copies, *shape[::-1]) if module.kind == "experts" else shape
                named = {f"{name}.{kind}": index for name, index in pieces.items()}
                part = module.part if kind == "weight" else f"{module.part}.bias"
                weights[part] = self._allocate(shape, named)
        return weights

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Implement Engine.load_weights. Tensors are copied as they arrive; after a failure `ready` is false."""
        whole, self.ready = not self.ready, False
        loaded: dict[str, Tensor] = {}
        for name, tensor in named_tensors:
            check_arrival(name, tensor, self.shapes, loaded)
            loaded[name] = self.slots[name].copy_(tensor)
        check_complete(loaded, self.groups, whole)
        check_finite(loaded, "load_weights")  # check the copies, because a cast can overflow
        if self.arch.qk_norm == "head":
            for weights in self.layers:
                heads = (("q_norm", self.arch.num_heads), ("k_norm", self.arch.num_kv_heads))
                weights["qk_norm"] = torch.cat([weights[name].expand(count, -1) for name, count in heads])
        self.ready = True

    @torch.no_grad()
    def load_adapter(self, factors: Mapping[str, Tensor], lora: LoraConfig) -> None:
        """Implement Engine.load_adapter. The factors are stored in the decoder's dtype, or for routers in fp32."""
        check_finite(factors, "load_adapter")
        layers: list[dict[str, tuple[Tensor, Tensor]]] = [{} for _ in self.layers]
        for adapted in adapted_modules(self.arch, lora):
            part, layer = adapted.module.part, int(adapted.layer.split(".")[2])
            dtype = torch.float32 if part == "gate" else self.dtype  # as in the trainer
            a = factors[f"{adapted.name}.A"].to(self.device, dtype, copy=True)
            b = (lora.alpha / adapted.rank * factors[f"{adapted.name}.B"]).to(self.device, dtype)
            layers[layer][part] = a, b
        self.factors = layers

    # ------------------------------------------------------------------------------------------------------ the model
    def _linear(self, layer: int, part: str, x: Tensor) -> Tensor:
        """Apply ``part`` of a layer, with its adapter if it has one.  (.., in) -> (.., out)"""
        weights, bias = self.layers[layer], self.layers[layer].get(f"{part}.bias")
        if self.cache is PrefixCache or bias is None:
            y = F.linear(x, weights[part], bias)
        else:
            y = F.linear(x, weights[part]) + bias  # rounded before the bias is added, as in the trainer
        if part in self.factors[layer]:
            a, b = self.factors[layer][part]
            y += F.linear(F.linear(x, a), b)
        return y

    def _grouped(self, layer: int, part: str, x: Tensor, blocks: tuple[Tensor, Tensor]) -> Tensor:
        """Apply ``part`` of a layer's experts, with their adapters if they have any.

        ``blocks`` has the number of rows of each expert, (E,), and the index at which they end, (E,). N is the sum of
        these numbers.

        (N, in) -> (N, out)
        """
        y = kernels.grouped_mm(x, self.layers[layer][part], *blocks)
        if part in self.factors[layer]:
            a, b = self.factors[layer][part]
            y += kernels.grouped_mm(kernels.grouped_mm(x, a, *blocks), b, *blocks)
        return y

    def _qkv(self, layer: int, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys, and values.  (..., h) -> (..., H, D), (..., KV, D), (..., KV, D)"""
        arch, query_heads, key_heads = self.arch, self.arch.num_heads, self.arch.num_kv_heads
        weights = self.layers[layer]
        x = kernels.rms_norm(x, weights["input_layernorm"], arch.rms_norm_eps)
        heads = self._linear(layer, "qkv_proj", x).view(*x.shape[:-1], -1, arch.head_dim)
        both = heads.narrow(-2, 0, query_heads + key_heads)
        if arch.qk_norm == "head":  # one normalisation for queries and keys, then the weights of each head
            both = kernels.rms_norm(both, self.head_ones, arch.rms_norm_eps)
            both = (both * weights["qk_norm"]).to(x.dtype)
        elif arch.qk_norm == "projection":
            parts = zip(both.split([query_heads, key_heads], -2), (weights["q_norm"], weights["k_norm"]), strict=True)
            normed = [kernels.rms_norm(part.flatten(-2), weight, arch.rms_norm_eps) for part, weight in parts]
            both = torch.cat(normed, -1).unflatten(-1, (-1, arch.head_dim))
        both = kernels.rotary(both, cos, sin)
        query, key = both.narrow(-2, 0, query_heads), both.narrow(-2, query_heads, key_heads)
        return query, key, heads.narrow(-2, query_heads + key_heads, key_heads)

    def _mlp(self, layer: int, x: Tensor, routes: list[Tensor]) -> Tensor:
        """Return the residual stream after the MLP block. An MoE layer appends the chosen experts to ``routes``.

        (R, h) -> (R, h); the experts are (R, K)
        """
        arch, weights = self.arch, self.layers[layer]
        h = kernels.rms_norm(x, weights["post_attention_layernorm"], arch.rms_norm_eps)
        if "gate_up_proj" in weights:
            dense = self._linear(layer, "down_proj", kernels.swiglu(self._linear(layer, "gate_up_proj", h)))
            if "shared_expert_gate" in weights:
                dense *= torch.sigmoid(F.linear(h, weights["shared_expert_gate"]))
        if "gate" not in weights:
            return x + dense
        # The router works in fp32 for every dtype of the model, as in the trainer.
        logits = F.linear(h.float(), weights["gate"].float())
        if "gate" in self.factors[layer]:
            a, b = self.factors[layer]["gate"]
            logits += F.linear(F.linear(h.float(), a), b)
        score, experts = self._route(logits)
        routes.append(experts)
        # Each (row, choice) pair becomes a row. Sorted by expert, two grouped products compute all experts.
        in_order, pair = kernels.sortable(experts.view(-1)).sort(stable=True)
        # bincount would wait for the device, twice.
        ends = torch.searchsorted(in_order, self.expert_ends)
        blocks = ends.diff(), ends[1:].int()
        pairs = h.index_select(0, pair.div(arch.experts_per_token, rounding_mode="floor"))
        pairs = self._grouped(layer, "experts.gate_up_proj", pairs, blocks)
        pairs = kernels.swiglu(pairs).mul_(score.to(x.dtype).view(-1, 1).index_select(0, pair))
        pairs = self._grouped(layer, "experts.down_proj", pairs, blocks)
        # Restore the order of rows and choices before the sum: index_add_ adds in no fixed order on an accelerator.
        back = kernels.sortable(pair).argsort()  # a sort is faster on a CPU than index_copy_
        pairs = pairs.index_select(0, back).view(*experts.shape, -1)
        mixed = pairs.sum(1)
        return x + (mixed + dense if "gate_up_proj" in weights else mixed)

    def _route(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each token's experts by the router's logits. Returns their weights and numbers.

        (R, E) -> (R, K) twice
        """
        score, experts = logits.topk(self.arch.experts_per_token, dim=-1)
        if self.arch.norm_topk_prob:
            return score.softmax(-1), experts
        return (score - logits.logsumexp(-1, keepdim=True)).exp(), experts

    def prefill(
        self,
        prompts: list[list[int]],
        num_samples: int,
        new_tokens: int,
        pad_token: int,
        after_layer: Callable[[Tensor], None],
    ) -> tuple[Tensor, PrefixCache | RowCache, Tensor | None]:
        """Run the prompts. Return their last hidden states, a cache, and the experts of all their tokens.

        The cache is for ``num_samples`` rows per prompt. The shapes are (P, h) for the states and (P, T, MoE layers, K)
        uint8 for the experts, which are None without MoE layers. Padding is on the right and attention is causal, so no
        real token sees padding.

        The prompts run in parts of at most PREFILL_TOKENS tokens, but at least one prompt. In fp32, a part computes the
        common prefix of all prompts only once. Everything but attention works on a line of M tokens: the whole first
        prompt, then the other prompts without this prefix. Attention works on whole prompts.

        The line does not change the rounding of attention, nor of products of four rows or more. It changes the order
        of additions for an expert with fewer rows, and for the single output of a shared expert's gate. In bf16 the gap
        to the trainer must be exactly 0, and a product of one row can break this (docs/policy.md). So in bf16 the line
        has all tokens of all prompts. ``after_layer`` is called with the (M, h) states after each layer.
        """
        device, longest, in_bf16 = self.device, max(map(len, prompts)), self.cache is RowCache
        longest += -longest % packing.KEYS * in_bf16
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        cache = self.cache(self.arch, lengths, longest, num_samples, new_tokens, self.dtype)
        ids = torch.tensor([[*p, *[pad_token] * (longest - len(p))] for p in prompts], device=device)
        shared = 0 if in_bf16 else len(os.path.commonprefix(prompts))
        hidden, experts = [], []
        step = max(1, PREFILL_TOKENS // longest)
        for part in (slice(start, start + step) for start in range(0, len(prompts), step)):
            source, index = _line(lengths[part], longest, shared, whole=in_bf16)
            x, routes = self._run_line(ids[part].flatten()[source], part, source, index, cache, after_layer)
            hidden.append(x[index[torch.arange(len(index), device=device), lengths[part] - 1]])
            experts += [torch.stack(routes, 1).to(torch.uint8)[index]] if routes else []
        return torch.cat(hidden), cache, torch.cat(experts) if experts else None

    def _run_line(
        self,
        tokens: Tensor,
        part: slice,
        source: Tensor,
        index: Tensor,
        cache: PrefixCache | RowCache,
        after_layer: Callable[[Tensor], None],
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the ``tokens`` of a line, (M,), through all layers, and write the prompts of ``part`` into the cache.

        ``source`` and ``index`` come from _line. Returns the states after the last layer, (M, h), and the experts that
        each MoE layer chose, (M, K).
        """
        x, routes = F.embedding(tokens, self.embedding), []  # (M, h)
        cos, sin = (table[source % cache.longest, None] for table in (cache.cos, cache.sin))  # (M, 1, D)
        for layer in range(self.arch.num_layers):
            qkv = self._qkv(layer, x, cos, sin)
            query, key, value = (packing.rows_of(heads, index) for heads in qkv)  # (p, heads, T, D)
            cache.write_prompts(layer, part, key, value)
            mixed = kernels.causal_attention(query, key, value, scale=self.arch.head_dim**-0.5)
            mixed = mixed.transpose(1, 2).flatten(2).flatten(0, 1).index_select(0, source)  # (M, H * D)
            x = self._mlp(layer, x + self._linear(layer, "o_proj", mixed), routes)
            after_layer(x)
        return x, routes

    def decode(self, token: Tensor, n: int, cache: PrefixCache | RowCache) -> tuple[Tensor, list[Tensor]]:
        """Run the ``n``-th sampled token of every row. Return the hidden states and each MoE layer's experts.

        (R,) -> (R, h), a list of (R, K)
        """
        (cos, sin), x, routes = cache.begin(n), F.embedding(token, self.embedding), []
        for layer in range(self.arch.num_layers):
            mixed = cache.attend(layer, n, *self._qkv(layer, x, cos, sin))
            if self.cache is PrefixCache and not self.factors[layer]:
                x = torch.addmm(x, mixed, self.layers[layer]["o_proj"].t())
            else:
                x = x + self._linear(layer, "o_proj", mixed)
            x = self._mlp(layer, x, routes)
        return x, routes

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of hidden states.  (R, h) -> (R, V)"""
        return F.linear(kernels.rms_norm(hidden, self.final_norm, self.arch.rms_norm_eps), self.head)


def _line(lengths: Tensor, longest: int, shared: int, *, whole: bool) -> tuple[Tensor, Tensor]:
    """Arrange the tokens of some prompts on a line. Return the maps from the line to the prompts and back.

    The first result has, for each token of the line, its index in the flattened prompts, (M,). The second has, for each
    token of the prompts, its index on the line, (p, T). M is the number of tokens on the line, and p the number of
    prompts. All prompts begin with the same ``shared`` tokens, which are on the line once. A ``whole`` line has all
    tokens and the padding. ``lengths`` (p,) are those of the prompts, and ``longest`` is T.
    """
    position = torch.arange(longest, device=lengths.device)
    is_packed = (position >= shared) & (position < lengths[:, None]) | whole  # (p, T)
    is_packed[0, :shared] = True
    source = is_packed.flatten().nonzero()[:, 0]
    index = torch.where(position < shared, position, is_packed.flatten().cumsum(0).view_as(is_packed) - 1)
    return source, index
