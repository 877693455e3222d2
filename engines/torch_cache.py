"""The key-value caches of the embedded sampler, and the attention of the tokens that it decodes.

PrefixCache, for fp32, is fast. The rows that sample the same prompt form a line. They share the keys and values of the
prompt, and attend to them in one product. RowCache, for bf16, rounds as the trainer does: each row has all its keys and
values, and the trainer's kernel computes the attention. In bf16, rounding changes the log-probs visibly; with this
cache, sampler and trainer compute the same numbers.
P is the number of prompts, T of prompt tokens with padding, N of new tokens, R of rows, and L of lines. H is the number
of query heads, KV of key-value heads, and D the head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from facts.architectures import Architecture
from model import packing

# The number of slots by which the cache of a row grows. A cache that does not fit into the processor's cache is read in
# half the time if it has few unused slots instead of a slot for every future token. Growing it moves an eighth of the
# data that reading it moves.
SLOTS = 16

QUERIES = 4  # with fewer queries per key head, torch's CPU attention rounds differently; the trainer never has fewer


class Cache:
    """The common parts of both caches.

    The first axis of all keys and values is that of the heads, so that the rows of a line are adjacent.
    """

    def __init__(self, arch: Architecture, lengths: Tensor, longest: int, samples: int, new_tokens: int, dtype) -> None:
        """Create a cache.

        ``lengths`` (P,) are those of the prompts, ``longest`` is T, and ``samples`` is the number of rows per prompt.
        """
        self.kv_heads, self.scale, self.longest = arch.num_kv_heads, arch.head_dim**-0.5, longest
        self.samples, self.dtype, self.device = samples, dtype, lengths.device
        self.prompt_length = lengths.repeat_interleave(samples)  # (R,)
        exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
        angle = torch.outer(torch.arange(longest + new_tokens, dtype=torch.float32), 1.0 / arch.rope_theta**exponents)
        angle = torch.cat([angle, angle], -1)
        self.cos, self.sin = (x.to(self.device, dtype) for x in (angle.cos(), angle.sin()))  # (T + N, D) by position

    def begin(self, n: int) -> tuple[Tensor, Tensor]:
        """Prepare the step that decodes the ``n``-th sampled tokens. The subclasses create the mask for all layers.

        Returns cos and sin of the rotary embedding.  (R, 1, D) twice
        """
        position = self.prompt_length + n
        return self.cos.index_select(0, position)[:, None], self.sin.index_select(0, position)[:, None]

    def _zeros(self, arch: Architecture, sequences: int, *shape: int) -> list[Tensor]:
        """Return a tensor of zeros for each layer. Attention also reads slots without a token, with weight 0."""
        shape = (self.kv_heads * sequences, *shape)
        return [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(arch.num_layers)]

    def _by_head(self, x: Tensor) -> Tensor:
        # unflatten, not view: MindSpeed's view copies a tensor that is not contiguous, so a write would be lost.
        return x.unflatten(0, (self.kv_heads, -1))

    def _keep(self, layers: list[Tensor], kept: Tensor) -> None:
        layers[:] = [self._by_head(layer).index_select(1, kept).flatten(0, 1) for layer in layers]


class PrefixCache(Cache):
    """The keys and values of the prompts, and of the sampled tokens of each row."""

    def __init__(self, arch: Architecture, lengths: Tensor, longest: int, samples: int, new_tokens: int, dtype) -> None:
        super().__init__(arch, lengths, longest, samples, new_tokens, dtype)
        padding = torch.zeros(len(lengths), 1, longest, dtype=dtype, device=self.device)
        padding.masked_fill_(torch.arange(longest, device=self.device) >= lengths[:, None, None], float("-inf"))
        self.padding = padding.repeat(self.kv_heads, 1, 1)  # (KV * L, 1, T) -inf at padding, otherwise 0
        self.prompt_keys = self._zeros(arch, len(lengths), arch.head_dim, longest)  # (KV * L, D, T)
        self.prompt_values = self._zeros(arch, len(lengths), longest, arch.head_dim)  # (KV * L, T, D)
        self.keys = self._zeros(arch, len(self.prompt_length), 0, arch.head_dim)  # (KV * R, C, D): C slots
        self.values = self._zeros(arch, len(self.prompt_length), 0, arch.head_dim)

    def write_prompts(self, layer: int, part: slice, key: Tensor, value: Tensor) -> None:
        """Write the keys and values of the p prompts in ``part``.  (p, KV, T, D) twice"""
        self._by_head(self.prompt_keys[layer])[:, part] = key.permute(1, 0, 3, 2)
        self._by_head(self.prompt_values[layer])[:, part] = value.transpose(0, 1)

    def attend(self, layer: int, n: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Write the key and value of the ``n``-th sampled token of every row, and attend to all tokens up to it.

        (R, H, D), (R, KV, D) twice -> (R, H * D)
        """
        rows, _, head_dim = query.shape
        slots = (n // SLOTS + 1) * SLOTS
        if n % SLOTS == 0:  # add slots layer by layer, so that only one layer exists twice
            self.keys[layer] = F.pad(self.keys[layer], (0, 0, 0, SLOTS))
            self.values[layer] = F.pad(self.values[layer], (0, 0, 0, SLOTS))
        keys, values = self.keys[layer], self.values[layer]
        self._by_head(keys).select(2, n).copy_(key.transpose(0, 1))
        self._by_head(values).select(2, n).copy_(value.transpose(0, 1))
        # All rows of a line, with all query heads of a key head, attend to the same prompt in one product.
        query = query.view(rows, self.kv_heads, -1, head_dim).transpose(0, 1).contiguous()
        by_row, by_line = query.view(self.kv_heads * rows, -1, head_dim), query.view(len(self.padding), -1, head_dim)
        on_prompt = torch.baddbmm(self.padding, by_line, self.prompt_keys[layer], alpha=self.scale)
        on_own = torch.baddbmm(self.mask, by_row, keys.mT, alpha=self.scale)
        scores = torch.cat([on_prompt.view(*by_row.shape[:2], self.longest), on_own], -1)  # (KV * R, H/KV, T + C)
        attention = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
        on_prompt, on_own = attention.narrow(-1, 0, self.longest), attention.narrow(-1, self.longest, slots)
        mixed = torch.bmm(on_prompt.view(*by_line.shape[:2], self.longest), self.prompt_values[layer])
        mixed = mixed.view_as(by_row).baddbmm_(on_own, values).view(self.kv_heads, rows, -1)  # (KV, R, H/KV * D)
        return mixed.transpose(0, 1).flatten(1)

    def begin(self, n: int) -> tuple[Tensor, Tensor]:
        self.mask = torch.zeros((n // SLOTS + 1) * SLOTS, dtype=self.dtype, device=self.device)  # (C,)
        self.mask[n + 1 :] = float("-inf")  # the unused slots
        return super().begin(n)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only the given rows. Each of them becomes a separate line, with a copy of its prompt's cache.

        In measurements this is as fast as lines of several rows. Once half of the rows have finished, the copies take
        less memory than separate caches for all rows would have taken.
        """
        lines = rows.div(self.samples, rounding_mode="floor")
        self.prompt_length, self.samples = self.prompt_length[rows], 1
        self.padding = self._by_head(self.padding).index_select(1, lines).flatten(0, 1)
        for layers, kept in (
            (self.prompt_keys, lines),
            (self.prompt_values, lines),
            (self.keys, rows),
            (self.values, rows),
        ):
            self._keep(layers, kept)


class RowCache(Cache):
    """The keys and values of each row: those of its prompt and of its sampled tokens, and unused slots."""

    def __init__(self, arch: Architecture, lengths: Tensor, longest: int, samples: int, new_tokens: int, dtype) -> None:
        super().__init__(arch, lengths, longest, samples, new_tokens, dtype)
        slots = longest + -(-new_tokens // packing.KEYS) * packing.KEYS
        self.keys = self._zeros(arch, len(self.prompt_length), slots, arch.head_dim)  # (KV * R, slots, D)
        self.values = self._zeros(arch, len(self.prompt_length), slots, arch.head_dim)

    def write_prompts(self, layer: int, part: slice, key: Tensor, value: Tensor) -> None:
        """Do the same as PrefixCache.write_prompts."""
        rows = slice(part.start * self.samples, part.stop * self.samples)
        for cache, new in ((self.keys[layer], key), (self.values[layer], value)):
            copies = new.repeat_interleave(self.samples, 0).transpose(0, 1)
            self._by_head(cache)[:, rows, : self.longest] = copies

    def attend(self, layer: int, n: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Do the same as PrefixCache.attend."""
        rows, slots = torch.arange(len(query), device=self.device), self.mask.shape[-1]
        keys, values = self._by_head(self.keys[layer]), self._by_head(self.values[layer])
        keys[:, rows, self.prompt_length + n] = key.transpose(0, 1)
        values[:, rows, self.prompt_length + n] = value.transpose(0, 1)
        query = query.unflatten(1, (self.kv_heads, -1))  # the query heads of a key head, as if they were tokens
        heads = query.shape[2]
        query = query.repeat(1, 1, -(-QUERIES // heads), 1)
        keys, values = (x.transpose(0, 1)[:, :, :slots] for x in (keys, values))  # (R, KV, slots, D)
        mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, scale=self.scale)
        return mixed[:, :, :heads].flatten(1)

    def begin(self, n: int) -> tuple[Tensor, Tensor]:
        slots = self.longest + (n // packing.KEYS + 1) * packing.KEYS
        hidden = torch.arange(slots, device=self.device) > (self.prompt_length + n)[:, None, None, None]
        self.mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)  # (R, 1, 1, slots)
        self.mask.masked_fill_(hidden, float("-inf"))  # after the newest token of each row
        return super().begin(n)

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only the given rows."""
        self.prompt_length = self.prompt_length[rows]
        for layers in (self.keys, self.values):
            self._keep(layers, rows)
