"""Packs the rows of a micro-batch into one line of tokens, without padding and with each prompt only once.

The G completions of a prompt share its hidden states, and the last token of a row is left out, because it predicts
nothing. Attention works on rows: first the prompts attend to themselves, then the own tokens of each row (those after
the prompt) attend to the row's prompt and to themselves. Every other operation works on single tokens, so it sees only
the line of M tokens. b rows, T tokens of a row, P prompts, N the largest
number of own tokens of a row, d head size.
"""

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

KEYS = 16  # Rows attend to a multiple of so many keys: in bf16, torch's kernel for a CPU rounds odd numbers otherwise


@dataclass
class Packing:
    """Where the tokens of (b, T) rows lie in the line. Padding points at place 0; no result reads it."""

    source: Tensor  # (M,) the place of each token in the flattened rows
    position: Tensor  # (M,) the place of each token in its row, for RoPE
    rows: Tensor  # (M,) the number of rows that have the token: of several for a prompt's, 0 for filler at the end
    line: Tensor  # (b, T) inverse map: place in the row -> place in the line
    prompts: Tensor  # (P, longest prompt) places of the prompts' tokens
    own: Tensor  # (b, N) places of the own tokens of the rows
    result: Tensor  # (M,) the place of each token's result in the flattened attention results [prompts; own]
    sees: Tensor  # (b,) tokens of the prompt, which all own tokens of the row see

    @functools.cached_property
    def mask(self) -> Tensor:
        """kernels.attention_mask of what an own token sees of its row, for all layers.  -> (b, 1, N, T)

        It is made at its first use, because a step has many micro-batches, and only one at a time needs its mask.
        """
        (_, own), (_, keys) = self.own.shape, self.line.shape
        # An own place that is padding sees what it would see as a token, so no query is without a key.
        last_seen = self.sees[:, None, None, None] + torch.arange(own, device=self.sees.device)[:, None]  # (b, 1, N, 1)
        return kernels.attention_mask(torch.arange(keys, device=self.sees.device) > last_seen)

    def release_mask(self) -> None:
        """Free the mask. The next use makes it again."""
        vars(self).pop("mask", None)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Causal attention within each row.  (M, heads, d), (M, kv heads, d) twice -> (M, heads x d)"""
        shared = kernels.causal_attention(*(rows_of(x, self.prompts) for x in (query, key, value)), scale=scale)
        results = [shared.transpose(1, 2).flatten(0, 1)]  # (P x longest prompt, heads, d)
        if self.own.numel():
            mixed = kernels.masked_attention(
                rows_of(query, self.own), rows_of(key, self.line), rows_of(value, self.line), self.mask, scale=scale
            )
            results.append(mixed.transpose(1, 2).flatten(0, 1))  # (b x N, heads, d)
        return torch.cat(results).flatten(1).index_select(0, self.result)

    def to_line(self, rows: Tensor) -> Tensor:
        """The values of ``rows``, a value for each token, in the order of the line.  (b, T, ...) -> (1, M, ...)

        Rows that share a prompt have it once in the line; its values are those of the first of these rows.
        """
        return rows.flatten(0, 1).index_select(0, self.source)[None]


class CausalAttention(torch.nn.Module):
    """Scaled dot-product attention; it replaces Megatron's core attention."""

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.packing: Packing | None = None

    def use(self, packing: Packing | None) -> None:
        """Until the next call the rows are packed like this, or not at all. Recompute needs it in a backward pass."""
        self.packing = packing

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask, **unused) -> Tensor:
        """(T, b, heads, d), (T, b, kv heads, d) twice -> (T, b, heads x d); a packed line has b = 1"""
        if self.packing is not None:
            return self.packing.attention(query[:, 0], key[:, 0], value[:, 0], self.scale)[:, None]
        out = kernels.causal_attention(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def rows_of(line: Tensor, places: Tensor) -> Tensor:
    """The tokens at ``places`` of the line, as rows.  (M, heads, d), (r, t) -> (r, heads, t, d)"""
    return line.flatten(1).index_select(0, places.flatten()).view(*places.shape, *line.shape[1:]).transpose(1, 2)


def pack(tokens: Tensor, mask: Tensor, multiple: int) -> Packing:
    """The packing with which a forward pass predicts the tokens where ``mask`` is 1.  (b, T), (b, T)

    The prompt of a row is everything before its first such token. The length of the line is a multiple of ``multiple``,
    because tensor parallelism splits it. Rows without such a token are left out. If no row has one, the line has one
    token, because every rank takes part in every layer.
    """
    b, width = tokens.shape
    trained = [row.nonzero().flatten().tolist() for row in mask.cpu()]
    # (row, length of its prompt, end of the tokens that predict another one)
    spans = [(row, places[0], places[-1]) for row, places in enumerate(trained) if places] or [(0, 1, 1)]
    rows = tokens.tolist()
    prompt_of = {row: tuple(rows[row][:length]) for row, length, _ in spans}
    first_row = {prompt: row for row, prompt in reversed(prompt_of.items())}  # its tokens stand for all equal prompts
    prompts = list(dict.fromkeys(prompt_of.values()))
    start_of = dict(zip(prompts, accumulate(map(len, prompts), initial=0), strict=False))
    source = [first_row[prompt] * width + t for prompt in prompts for t in range(len(prompt))]
    longest, longest_own = -(-max(map(len, prompts)) // KEYS) * KEYS, max(end - length for _, length, end in spans)
    result = [i * longest + t for i, prompt in enumerate(prompts) for t in range(len(prompt))]
    keys = -(-width // KEYS) * KEYS
    line, own, sees = torch.zeros(b, keys, dtype=torch.long), torch.zeros(b, longest_own, dtype=torch.long), [0] * b
    for row, length, end in spans:
        start, first_own = start_of[prompt_of[row]], len(source)
        line[row, :length] = torch.arange(start, start + length)
        line[row, length:end] = own[row, : end - length] = torch.arange(first_own, first_own + end - length)
        first_result = len(prompts) * longest + row * longest_own
        result += range(first_result, first_result + end - length)
        source += range(row * width + length, row * width + end)
        sees[row] = length
    num_rows = torch.zeros(len(source), dtype=torch.long)
    for row, _, end in spans if any(trained) else []:
        num_rows[line[row, :end]] += 1
    filler = [0] * (-len(source) % multiple)
    num_rows = F.pad(num_rows, (0, len(filler)))
    source, result = torch.tensor(source + filler), torch.tensor(result + filler)
    prompt_places = torch.zeros(len(prompts), longest, dtype=torch.long)
    for place, (prompt, start) in enumerate(start_of.items()):
        prompt_places[place, : len(prompt)] = torch.arange(start, start + len(prompt))
    fields = (source, source % width, num_rows, line, prompt_places, own, result, torch.tensor(sees))
    return Packing(*(field.to(tokens.device) for field in fields))
