"""Packs the rows of a micro-batch into one sequence of tokens, without padding and with each prompt only once.

The completions of a prompt share its hidden states, and the last token of a row is left out, because it predicts
nothing. Attention works on rows. The tokens of a prompt attend to this prompt. Each row's own tokens, which are those
after its prompt, attend to the prompt and to each other. Every other operation works on single tokens, so it sees only
the packed sequence of M tokens. A GPU's attention kernel takes the prompts and the own tokens of each row as sequences
of any length. Other kernels take the prompts as padded rows, and the own tokens as padded rows with a mask.
b is the number of rows, T the number of tokens per row, P the number of prompts, and K the number of keys. N is the
largest number of own tokens in a row, and d is the head size.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hardware import kernels

KEYS = 16  # rows attend to a multiple of this many keys; with other numbers, torch's bf16 CPU kernel rounds differently


@dataclass
class Packing:
    """The indices that map (b, T) rows to the packed sequence and back.

    Padding has index 0, and no result depends on it.
    """

    source: Tensor  # (M,) index of each token in the flattened rows
    position: Tensor  # (M,) position of each token in its row, for RoPE
    num_rows: Tensor  # (M,) number of rows with the token: several for a prompt's token, 0 for filler at the end
    index: Tensor  # (b, K) inverse map: position in the row -> index in the packed sequence
    prompt_index: Tensor  # (P, longest prompt) indices of the prompts' tokens in the packed sequence
    own_index: Tensor  # (b, N) indices of the own tokens of each row; N is 0 if there are none
    prompt_length: Tensor  # (b,) tokens of the prompt, to which all own tokens of the row attend
    result_index: Tensor  # (M,) index of each token's result in the flattened attention results [prompts; own]
    sequences: kernels.Sequences | None = None  # on a GPU: the prompts, the own tokens of each row, and filler
    sequence_keys: Tensor | None = None  # (Tk,) indices of their keys

    @functools.cached_property
    def mask(self) -> Tensor:
        """The attention mask (kernels.attention_mask) of the own tokens over the keys of their rows.  -> (b, 1, N, K)

        All layers use it. It is created at its first use, because a step has many micro-batches, and only one at a time
        needs its mask.
        """
        device = self.prompt_length.device
        own = torch.arange(self.own_index.shape[1], device=device)
        keys = torch.arange(self.index.shape[1], device=device)
        # Padding attends to the same keys as an own token in its position would, so every query has a key.
        last = self.prompt_length[:, None, None, None] + own[:, None]  # (b, 1, N, 1)
        return kernels.attention_mask(keys > last)

    def release_mask(self) -> None:
        """Free the mask. It is created again at its next use."""
        vars(self).pop("mask", None)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Compute causal attention within each row.  (M, heads, d), (M, kv heads, d) twice -> (M, heads x d)"""
        if self.sequences is not None and kernels.takes_sequences(query):
            key, value = (kernels.take(x, self.sequence_keys) for x in (key, value))
            return kernels.sequence_attention(query, key, value, self.sequences, scale=scale).flatten(1)
        prompts = (rows_of(x, self.prompt_index) for x in (query, key, value))
        results = [kernels.causal_attention(*prompts, scale=scale)]  # (P, heads, longest prompt, d)
        if self.own_index.numel():
            own, keys, values = rows_of(query, self.own_index), rows_of(key, self.index), rows_of(value, self.index)
            results.append(kernels.masked_attention(own, keys, values, self.mask, scale=scale))  # (b, heads, N, d)
        results = [result.transpose(1, 2).flatten(0, 1) for result in results]
        return torch.cat(results).flatten(1).index_select(0, self.result_index)

    def pack(self, rows: Tensor) -> Tensor:
        """Return the values of ``rows``, one for each token, in the packed order.  (b, T, ...) -> (1, M, ...)

        A prompt that several rows share occurs once, with the values of the first of these rows.
        """
        return rows.flatten(0, 1).index_select(0, self.source)[None]


class CausalAttention(torch.nn.Module):
    """Causal scaled dot-product attention, which replaces Megatron's core attention."""

    def __init__(self, config, *args, **kwargs) -> None:
        super().__init__()
        self.scale = config.kv_channels**-0.5
        self.packing: Packing | None = None

    def use(self, packing: Packing | None) -> None:
        """Expect rows packed with ``packing``, or unpacked rows if it is None, until the next call.

        ``packing`` must still be set in the backward pass, because recompute needs it.
        """
        self.packing = packing

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask, **unused) -> Tensor:
        """Compute attention.  (T, b, heads, d), (T, b, kv heads, d) twice -> (T, b, heads x d); b is 1 if packed"""
        if self.packing is not None:
            # Not x[:, 0], whose backward pass copies the gradient into zeros.
            return self.packing.attention(query.squeeze(1), key.squeeze(1), value.squeeze(1), self.scale)[:, None]
        out = kernels.causal_attention(*(x.permute(1, 2, 0, 3) for x in (query, key, value)), scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def rows_of(packed: Tensor, index: Tensor) -> Tensor:
    """Return the tokens of the packed sequence at ``index`` as r rows of t tokens.

    (M, heads, d), (r, t) -> (r, heads, t, d)
    """
    taken = packed.flatten(1).index_select(0, index.flatten())
    return taken.view(*index.shape, *packed.shape[1:]).transpose(1, 2)


Starts = dict[tuple[int, ...], int]  # prompt -> the index of its first token in the packed sequence


class _Row(NamedTuple):
    """A row that trains at least one token."""

    number: int
    prompt: tuple[int, ...]  # everything before its first trained token
    end: int  # the first position after the tokens that predict another one


def pack(tokens: Tensor, mask: Tensor, multiple: int) -> Packing:
    """Return the packing with which a forward pass predicts the tokens where ``mask`` is 1.  (b, T), (b, T)

    Filler at the end makes the length of the packed sequence a multiple of ``multiple``, because tensor parallelism
    splits it. Rows without a trained token are left out. If no row has a trained token, the sequence has one token
    before its filler, because every rank takes part in every layer.
    """
    b, width = tokens.shape
    trained = _trained_rows(tokens, mask)
    rows = trained or [_Row(0, (int(tokens[0, 0]),), 1)]
    source, prompt_start, index, prompt_length = _sequence(rows, b, width)
    filler = -len(source) % multiple
    num_rows = torch.zeros(len(source) + filler, dtype=torch.long)
    for row in trained:
        num_rows[index[row.number, : row.end]] += 1
    prompt_index, own_index, result_index = _attention_rows(rows, prompt_start, index, prompt_length, len(num_rows))
    source_index = F.pad(torch.tensor(source), (0, filler))
    packing = Packing(
        source=source_index.to(tokens.device),
        position=(source_index % width).to(tokens.device),
        num_rows=num_rows.to(tokens.device),
        index=index.to(tokens.device),
        prompt_index=prompt_index.to(tokens.device),
        own_index=own_index.to(tokens.device),
        prompt_length=prompt_length.to(tokens.device),
        result_index=result_index.to(tokens.device),
    )
    if kernels.on_gpu(tokens.device):
        _add_sequences(packing, rows, prompt_start, index, filler)
    return packing


def _sequence(rows: list[_Row], b: int, width: int) -> tuple[list[int], Starts, Tensor, Tensor]:
    """Lay out the packed sequence: every prompt once, then each row's own tokens.

    Returns Packing's source without filler, the prompts' Starts, and Packing's index and prompt_length.
    """
    source: list[int] = []
    prompt_start: Starts = {}
    for row in rows:
        if row.prompt not in prompt_start:
            prompt_start[row.prompt] = len(source)
            first = row.number * width
            source += range(first, first + len(row.prompt))
    index = torch.zeros(b, _up(width), dtype=torch.long)
    prompt_length = torch.zeros(b, dtype=torch.long)
    for row in rows:
        length, start, own_start = len(row.prompt), prompt_start[row.prompt], len(source)
        index[row.number, :length] = torch.arange(start, start + length)
        index[row.number, length : row.end] = torch.arange(own_start, own_start + row.end - length)
        prompt_length[row.number] = length
        source += range(row.number * width + length, row.number * width + row.end)
    return source, prompt_start, index, prompt_length


def _attention_rows(
    rows: list[_Row], prompt_start: Starts, index: Tensor, prompt_length: Tensor, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay out the rows on which attention works, and return Packing's prompt_index, own_index and result_index.

    ``size`` is M, the length of the packed sequence.
    """
    longest_prompt = _up(max(len(prompt) for prompt in prompt_start))
    most_own = max(row.end - len(row.prompt) for row in rows)
    own_index = F.pad(index, (0, most_own)).gather(1, prompt_length[:, None] + torch.arange(most_own))
    prompt_index = torch.zeros(len(prompt_start), longest_prompt, dtype=torch.long)
    result_index = torch.zeros(size, dtype=torch.long)
    first_own = prompt_index.numel()
    result_index[own_index.flatten()] = torch.arange(first_own, first_own + own_index.numel())
    for number, (prompt, start) in enumerate(prompt_start.items()):  # after the own tokens, whose padding has index 0
        prompt_index[number, : len(prompt)] = torch.arange(start, start + len(prompt))
        result_index[start : start + len(prompt)] = torch.arange(len(prompt)) + number * longest_prompt
    return prompt_index, own_index, result_index


def _trained_rows(tokens: Tensor, mask: Tensor) -> list[_Row]:
    trained, rows = mask.cpu(), []
    for number, row in enumerate(tokens.tolist()):
        positions = trained[number].nonzero().flatten().tolist()
        if positions:
            rows.append(_Row(number, tuple(row[: positions[0]]), positions[-1]))
    return rows


def _add_sequences(packing: Packing, rows: list[_Row], prompt_start: Starts, index: Tensor, filler: int) -> None:
    """Set the fields of ``packing`` that only a GPU's attention kernel reads: sequences and sequence_keys.

    They describe the queries and keys of the parts of the packed sequence: the prompts, each row's own tokens, and the
    filler.
    """
    queries, keys = [], []
    for prompt, start in prompt_start.items():
        queries.append(len(prompt))
        keys.append(torch.arange(start, start + len(prompt)))
    for row in rows:
        if row.end > len(row.prompt):
            queries.append(row.end - len(row.prompt))
            keys.append(index[row.number, : row.end])
    if filler:
        queries.append(filler)
        keys.append(torch.arange(len(packing.source) - filler, len(packing.source)))
    device = packing.source.device
    packing.sequences = kernels.sequences(queries, [len(part) for part in keys], device)
    packing.sequence_keys = torch.cat(keys).to(device)


def _up(tokens: int) -> int:
    return -(-tokens // KEYS) * KEYS
