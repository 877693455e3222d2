"""Packs the rows of a micro-batch into one line of tokens, without padding and with each prompt only once.

The G completions of a prompt share its hidden states, and the last token of a row is left out, because it predicts
nothing. Attention works on rows: first the prompts attend to themselves, then the own tokens of each row (those after
the prompt) attend to the row's prompt and to themselves. Every other operation works on single tokens, so it sees only
the line of M tokens. One call of the attention kernel takes all rows; or, with architecture.Rounding, each call takes a
few rows of similar length and pads them to one of few shapes. b rows, T tokens of a row, P prompts; r rows of a call, N
the largest number of their own tokens, K keys; d head size.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from architecture import Rounding
from hardware import kernels

KEYS = 16  # Rows attend to a multiple of so many keys: in bf16, torch's kernel for a CPU rounds odd numbers otherwise


@dataclass
class Packing:
    """Where the tokens of (b, T) rows lie in the line. Padding points at place 0; no result reads it."""

    calls: list[tuple[int, int, int]]  # (r, N, K) of each call for own tokens; none if there are no own tokens
    source: Tensor  # (M,) the place of each token in the flattened rows
    position: Tensor  # (M,) the place of each token in its row, for RoPE
    rows: Tensor  # (M,) the number of rows that have the token: of several for a prompt's, 0 for filler at the end
    line: Tensor  # (b, T) inverse map: place in the row -> place in the line
    prompts: Tensor  # (P, longest prompt) places of the prompts' tokens
    result: Tensor  # (M,) the place of each token's result in the flattened attention results [prompts; own]
    own: Tensor  # (r, N) places of the own tokens of the rows of each call, flattened and joined
    keys: Tensor  # (r, K) places of all tokens of these rows, too
    sees: Tensor  # (r,) tokens of the prompt, which all own tokens of the row see, too

    @functools.cached_property
    def masks(self) -> list[Tensor]:
        """kernels.attention_mask of what an own token sees of its row, for all layers.  -> (r, 1, N, K) of each call

        They are made at their first use, because a step has many micro-batches, and only one at a time needs its masks.
        """
        device, rows = self.sees.device, self.sees.split([rows for rows, *_ in self.calls])
        # An own place that is padding sees what it would see as a token, so no query is without a key.
        last_seen = (
            sees[:, None, None, None] + torch.arange(own, device=device)[:, None]  # (r, 1, N, 1)
            for sees, (_, own, _) in zip(rows, self.calls, strict=True)
        )
        return [
            kernels.attention_mask(torch.arange(keys, device=device) > last)
            for last, (*_, keys) in zip(last_seen, self.calls, strict=True)
        ]

    def release_masks(self) -> None:
        """Free the masks. The next use makes them again."""
        vars(self).pop("masks", None)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Causal attention within each row.  (M, heads, d), (M, kv heads, d) twice -> (M, heads x d)"""
        whole = (rows_of(x, self.prompts.flatten(), [self.prompts.shape])[0] for x in (query, key, value))
        results = [kernels.causal_attention(*whole, scale=scale)]  # (P, heads, longest prompt, d)
        rows = (
            rows_of(query, self.own, [(r, n) for r, n, _ in self.calls]),
            *(rows_of(x, self.keys, [(r, k) for r, _, k in self.calls]) for x in (key, value)),
        )
        results += [  # (r, heads, N, d)
            kernels.masked_attention(own, keys, values, mask, scale=scale)
            for own, keys, values, mask in zip(*rows, self.masks, strict=True)
        ]
        results = [result.transpose(1, 2).flatten(0, 1) for result in results]
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


def rows_of(line: Tensor, places: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tokens at ``places`` of the line, as rows of ``shapes`` (r, t).  (M, heads, d) -> (r, heads, t, d) of each"""
    taken = line.flatten(1).index_select(0, places)
    parts = [taken] if len(shapes) == 1 else taken.split([rows * tokens for rows, tokens in shapes])
    return [part.view(*shape, *line.shape[1:]).transpose(1, 2) for part, shape in zip(parts, shapes, strict=True)]


def shapes(
    own: dict[int, int], prompts: Sequence[int], width: int, rounding: Rounding | None
) -> tuple[tuple[int, int], list[tuple[int, int, int]], list[list[int]]]:
    """The shapes of attention in a layer: (P, longest prompt), (r, N, K) of each call for own tokens, and its rows.

    ``own``: row -> number of its own tokens, of rows of ``width`` tokens. ``prompts``: their lengths. A call may have
    more places than rows. Rounded calls compute about as much as exact ones, because rows of similar length share
    a call: in the single exact call all rows are as long as the longest.
    """
    if rounding is None:
        taken = [list(own)] if any(own.values()) else []
        calls = [(len(own), max(own.values()), -(-width // KEYS) * KEYS) for _ in taken]
        return (len(prompts), -(-max(prompts) // KEYS) * KEYS), calls, taken
    order = sorted((row for row in own if own[row]), key=lambda row: -own[row])
    taken = [order[first : first + rounding.rows] for first in range(0, len(order), rounding.rows)]
    calls = [rounding.places(len(rows), own[rows[0]], max(prompts)) for rows in taken]
    number, _, longest = rounding.places(len(prompts), 0, max(prompts))
    return (number, longest), calls, taken


def pack(tokens: Tensor, mask: Tensor, multiple: int, rounding: Rounding | None = None) -> Packing:
    """The packing with which a forward pass predicts the tokens where ``mask`` is 1.  (b, T), (b, T)

    The prompt of a row is everything before its first such token. The length of the line is a multiple of ``multiple``,
    because tensor parallelism splits it. Rows without such a token are left out. If no row has one, the line has one
    token, because every rank takes part in every layer. ``rounding`` adds padding inside of attention alone.
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
    line, lengths = torch.zeros(b, -(-width // KEYS) * KEYS, dtype=torch.long), torch.zeros(b, dtype=torch.long)
    for row, length, end in spans:
        start, first_own = start_of[prompt_of[row]], len(source)
        line[row, :length] = torch.arange(start, start + length)
        line[row, length:end] = torch.arange(first_own, first_own + end - length)
        source += range(row * width + length, row * width + end)
        lengths[row] = length
    num_rows = torch.zeros(len(source), dtype=torch.long)
    for row, _, end in spans if any(trained) else []:
        num_rows[line[row, :end]] += 1
    filler = -len(source) % multiple
    num_rows, source = F.pad(num_rows, (0, filler)), F.pad(torch.tensor(source), (0, filler))
    (number, longest), calls, taken = shapes(
        dict.fromkeys(range(b), 0) | {row: end - length for row, length, end in spans},
        [len(prompt) for prompt in prompts], width, rounding,
    )  # fmt: skip
    own, keys, sees, result = [], [], [], torch.zeros_like(source)
    first = number * longest  # result of the next call
    for (r, n, k), call in zip(calls, taken, strict=True):
        keys.append(F.pad(line[call], (0, k - line.shape[1], 0, r - len(call))))
        sees.append(F.pad(lengths[call], (0, r - len(call))))
        own.append(F.pad(keys[-1], (0, n)).gather(1, sees[-1][:, None] + torch.arange(n)))
        result[own[-1].flatten()] = torch.arange(first, first + r * n)  # padding points at place 0, which is a prompt's
        first += r * n
    prompt_places = torch.zeros(number, longest, dtype=torch.long)
    for place, (prompt, start) in enumerate(start_of.items()):
        prompt_places[place, : len(prompt)] = torch.arange(start, start + len(prompt))
        result[start : start + len(prompt)] = torch.arange(len(prompt)) + place * longest
    joined = (torch.cat([*map(torch.flatten, parts), line[:0, 0]]) for parts in (own, keys, sees))
    fields = (source, source % width, num_rows, line, prompt_places, result, *joined)
    return Packing(calls, *(field.to(tokens.device) for field in fields))
