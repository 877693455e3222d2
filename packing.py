"""A micro-batch as one line of tokens: no padding, no token that predicts nothing, and each prompt once for its rows.

G completions of a prompt need its hidden states once: every operation but attention works token by token and sees a
line of M tokens. Only attention knows rows: prompts among themselves, then each row's own tokens, which see the row's
prompt and themselves. b rows, T tokens of a row, P prompts, N the longest row's own tokens, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels


@dataclass
class Packing:
    """Where the tokens of (b, T) rows lie in the line; padding points at place 0, which no result reads."""

    source: Tensor  # (M,) each token's place in the flattened rows
    position: Tensor  # (M,) its place in its row, for RoPE
    line: Tensor  # (b, T) the other way round
    prompts: Tensor  # (P, longest prompt) places of the prompts' tokens
    own: Tensor  # (b, N) places of the rows' own tokens
    bias: Tensor  # (b, 1, N, T) fp32: 0 where an own token sees its row, else -inf; made once for all layers
    result: Tensor  # (M,) where attention's results of [prompts; own], flattened, hold each token's

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Causal attention within each row.  (M, heads, d), (M, kv heads, d) twice -> (M, heads x d)"""
        shared = kernels.causal_attention(*(rows_of(x, self.prompts) for x in (query, key, value)), scale=scale)
        results = [shared.transpose(1, 2).flatten(0, 1)]  # (P x longest prompt, heads, d)
        if self.own.numel():
            mixed = F.scaled_dot_product_attention(
                rows_of(query, self.own), rows_of(key, self.line), rows_of(value, self.line),
                attn_mask=self.bias.to(query.dtype), scale=scale, enable_gqa=query.shape[1] != key.shape[1],
            )  # fmt: skip
            results.append(mixed.transpose(1, 2).flatten(0, 1))  # (b x N, heads, d)
        return torch.cat(results).flatten(1).index_select(0, self.result)


def rows_of(line: Tensor, places: Tensor) -> Tensor:
    """(M, heads, d), (r, t) -> (r, heads, t, d)"""
    rows = line.flatten(1).index_select(0, places.flatten())
    return rows.view(*places.shape, *line.shape[1:]).transpose(1, 2)


def pack(tokens: Tensor, mask: Tensor, multiple: int) -> Packing:
    """How to compute what predicts the tokens where ``mask`` is 1.  (b, T), (b, T)

    A row's prompt is all before its first such token. The line's length is a multiple of ``multiple``, which tensor
    parallelism splits. Rows without such a token do not enter it; if there are none, one token does, since every
    rank takes part in every layer.
    """
    assert not mask[:, 0].any(), "nothing predicts the first token of a row"
    b, width = tokens.shape
    rows, wanted = tokens.tolist(), mask.tolist()
    spans = []  # (row, prompt's length, end of the tokens that predict one)
    for row in range(b):
        chosen = [t for t in range(width) if wanted[row][t]]
        if chosen:
            spans.append((row, chosen[0], chosen[-1]))
    spans = spans or [(0, 1, 1)]
    first_with = {}  # prompt -> the row whose tokens stand for it
    for row, prompt, _ in spans:
        first_with.setdefault(tuple(rows[row][:prompt]), row)
    source = [row * width + t for prompt, row in first_with.items() for t in range(len(prompt))]
    start_of, place = {}, 0
    for prompt in first_with:
        start_of[prompt], place = place, place + len(prompt)
    longest = max(map(len, first_with))
    longest_own = max(end - prompt for _, prompt, end in spans)
    prompts = [[start + t if t < len(prompt) else 0 for t in range(longest)] for prompt, start in start_of.items()]
    result = [i * longest + t for i, prompt in enumerate(first_with) for t in range(len(prompt))]
    line, own, sees = torch.zeros(b, width, dtype=torch.long), torch.zeros(b, longest_own, dtype=torch.long), [0] * b
    after_prompts = len(first_with) * longest
    for row, prompt, end in spans:
        start, n = start_of[tuple(rows[row][:prompt])], end - prompt
        line[row, :prompt] = torch.arange(start, start + prompt)
        line[row, prompt:end] = own[row, :n] = torch.arange(len(source), len(source) + n)
        result += range(after_prompts + row * longest_own, after_prompts + row * longest_own + n)
        source += range(row * width + prompt, row * width + end)
        sees[row] = prompt
    filler = -len(source) % multiple
    source, result = (torch.tensor(places + [0] * filler) for places in (source, result))
    last_seen = torch.tensor(sees)[:, None, None, None] + torch.arange(longest_own)[:, None]  # (b, 1, N, 1)
    bias = torch.zeros(b, 1, longest_own, width).masked_fill_(torch.arange(width) > last_seen, float("-inf"))
    fields = (source, source % width, line, torch.tensor(prompts), own, bias, result)
    return Packing(*(field.to(tokens.device) for field in fields))
