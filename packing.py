"""Packs the rows of a micro-batch into one line of tokens, without padding and with each prompt only once.

The G completions of a prompt share its hidden states, and the last token of a row is left out, because it predicts
nothing. Attention works on rows: the prompts attend to themselves, and the own tokens of each row (those after the
prompt) attend to the row's prompt and to themselves. Every other operation works on single tokens, so it sees only the
line of M tokens. A GPU takes all of them as sequences of any length; other kernels take the prompts as padded rows, and
the own tokens as padded rows with a mask. b rows, T tokens of a row, P prompts, N the largest number of own tokens of a
row, K keys; d head size.
"""

import functools
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from hardware import kernels

KEYS = 16  # Rows attend to a multiple of so many keys: in bf16, torch's kernel for a CPU rounds odd numbers otherwise


@dataclass
class Packing:
    """Where the tokens of (b, T) rows lie in the line. Padding points at place 0; no result reads it."""

    source: Tensor  # (M,) the place of each token in the flattened rows
    position: Tensor  # (M,) the place of each token in its row, for RoPE
    rows: Tensor  # (M,) the number of rows that have the token: of several for a prompt's, 0 for filler at the end
    line: Tensor  # (b, T) inverse map: place in the row -> place in the line
    prompts: Tensor  # (P, longest prompt) places of the prompts' tokens
    own: Tensor  # (b, N) places of the own tokens of each row; N is 0 if there are none
    keys: Tensor  # (b, K) places of all tokens of these rows, too
    sees: Tensor  # (b,) tokens of the prompt, which all own tokens of the row see, too
    result: Tensor  # (M,) the place of each token's result in the flattened attention results [prompts; own]
    sequences: kernels.Sequences | None = None  # on a GPU: the line as prompts, own tokens of each row, and filler
    sequence_keys: Tensor | None = None  # (Tk,) the places of their keys

    @functools.cached_property
    def mask(self) -> Tensor:
        """kernels.attention_mask of what an own token sees of its row, for all layers.  -> (b, 1, N, K)

        It is made at its first use, because a step has many micro-batches, and only one at a time needs its mask.
        """
        own, keys = (torch.arange(places.shape[1], device=self.sees.device) for places in (self.own, self.keys))
        # An own place that is padding sees what it would see as a token, so no query is without a key.
        last_seen = self.sees[:, None, None, None] + own[:, None]  # (b, 1, N, 1)
        return kernels.attention_mask(keys > last_seen)

    def release_mask(self) -> None:
        """Free the mask. The next use makes it again."""
        vars(self).pop("mask", None)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Causal attention within each row.  (M, heads, d), (M, kv heads, d) twice -> (M, heads x d)"""
        if self.sequences is not None and kernels.takes_sequences(query):
            key, value = (kernels.take(x, self.sequence_keys) for x in (key, value))
            return kernels.sequence_attention(query, key, value, self.sequences, scale=scale).flatten(1)
        whole = (rows_of(x, self.prompts) for x in (query, key, value))
        results = [kernels.causal_attention(*whole, scale=scale)]  # (P, heads, longest prompt, d)
        if self.own.numel():
            own, keys, values = rows_of(query, self.own), rows_of(key, self.keys), rows_of(value, self.keys)
            results.append(kernels.masked_attention(own, keys, values, self.mask, scale=scale))  # (b, heads, N, d)
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


def rows_of(line: Tensor, places: Tensor) -> Tensor:
    """The tokens at ``places`` (r, t) of the line, as rows.  (M, heads, d) -> (r, heads, t, d)"""
    taken = line.flatten(1).index_select(0, places.flatten())
    return taken.view(*places.shape, *line.shape[1:]).transpose(1, 2)


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
    line, lengths = torch.zeros(b, _up(width), dtype=torch.long), torch.zeros(b, dtype=torch.long)
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
    longest, most_own = _up(max(map(len, prompts))), max(end - length for _, length, end in spans)
    own = F.pad(line, (0, most_own)).gather(1, lengths[:, None] + torch.arange(most_own))
    result, first = torch.zeros_like(source), len(prompts) * longest
    result[own.flatten()] = torch.arange(first, first + own.numel())  # padding points at place 0, which is a prompt's
    prompt_places = torch.zeros(len(prompts), longest, dtype=torch.long)
    for place, (prompt, start) in enumerate(start_of.items()):
        prompt_places[place, : len(prompt)] = torch.arange(start, start + len(prompt))
        result[start : start + len(prompt)] = torch.arange(len(prompt)) + place * longest
    fields = (source, source % width, num_rows, line, prompt_places, own, line, lengths, result)
    packed = Packing(*(field.to(tokens.device) for field in fields))  # type: ignore[arg-type]
    if kernels.on_gpu(tokens.device):
        own_spans = [(row, end - length, end) for row, length, end in spans if end > length]
        keys = [torch.arange(start_of[prompt], start_of[prompt] + len(prompt)) for prompt in prompts]
        queries = [len(prompt) for prompt in prompts] + [number for _, number, _ in own_spans]
        keys += [line[row, :end] for row, _, end in own_spans]
        if filler:
            queries.append(filler)
            keys.append(torch.arange(len(source) - filler, len(source)))
        packed.sequences = kernels.sequences(queries, [len(places) for places in keys], tokens.device)
        packed.sequence_keys = torch.cat(keys).to(tokens.device)
    return packed


def _up(tokens: int) -> int:
    return -(-tokens // KEYS) * KEYS
