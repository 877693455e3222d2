"""The sequences of a step, and how they become the micro-batches of the data ranks.

P is the number of prompts, G the number of completions per prompt, and S = P x G the number of sequences. N is
max_new_tokens, b the number of rows in a micro-batch, and T the number of tokens per row.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model import packing
from model.packing import Packing


@dataclass
class Rollout:
    """The sequences of a step, equal on every rank. Sequence s answers prompt s // G."""

    prompts: list[list[int]]  # P
    tokens: Tensor  # (S, N) int64, 0 after the end
    logp: Tensor  # (S, N) the sampler's log-prob of each sampled token
    lengths: list[int]  # S completion lengths, including the environment's tokens
    truncated: Tensor  # (S,) bool: stopped by max_new_tokens or max_turns
    rewards: Tensor  # (P, G)
    parsable: Tensor  # (P, G) 1 if an answer was found
    correct: Tensor  # (P, G) 1 if it is right
    ranks_alike: int = 1  # number of ranks that sampled together and so have the same completions
    mask: Tensor | None = None  # (S, N) bool: whether the policy sampled the token; None if it sampled all
    out_of_turns: Tensor | None = None  # (S,) bool: stopped by max_turns; None if no sequence was

    def __post_init__(self) -> None:
        if self.mask is None:
            self.mask = torch.arange(self.tokens.shape[1]) < torch.tensor(self.lengths)[:, None]
        if self.out_of_turns is None:
            self.out_of_turns = torch.zeros_like(self.truncated)

    def row_length(self, sequence: int) -> int:
        """Return the number of tokens in the prompt and the completion of ``sequence``."""
        return len(self.prompts[sequence // self.rewards.shape[1]]) + self.lengths[sequence]

    @functools.cached_property
    def sampled_lengths(self) -> list[int]:
        """The number of tokens that the policy sampled in each completion. Losses and averages count only these."""
        return self.mask.sum(dim=1).tolist()


@dataclass
class MicroBatch:
    """The rows of one forward pass, padded on the right, and the packing that avoids computing their padding."""

    tokens: Tensor  # (b, T)
    mask: Tensor  # (b, T) 1 on completion tokens that are trained
    rollout_logp: Tensor  # (b, T) the sampler's log-probs, 0 outside the mask
    advantages: Tensor  # (b,)
    packing: Packing  # how the rows become one packed sequence of M tokens
    sequences: list[int]  # the number of each row's sequence in the rollout; [] for a row of padding
    routes: Tensor | None = None  # (1, M, L, K) the experts to replay: K experts per token in L MoE layers
    replayed: Tensor | None = None  # (1, M) the number of rows with this token, or 0 if it has no route
    stale_logp: Tensor | None = None  # (b, T) the trainer's log-probs under the older policy that sampled
    old_logp: Tensor | None = None  # (b, T) those before the first update; None in that update: its own
    ref_logp: Tensor | None = None  # (b, T) those under the base model; None without a KL penalty
    teacher_logp: Tensor | None = None  # (b, T) those under loss.teacher; None without one


def plan(
    lengths: dict[int, int],
    data_ranks: int,
    tokens_per_micro_batch: int,
    multiple: int,
    group_size: int = 1,
    prompts: dict[int, int] | None = None,
) -> list[list[list[int]]]:
    """Return the sequences of each data rank in each micro-batch: [micro-batch][data rank] -> sequences.

    ``lengths`` has the number of tokens in the row of each sequence. Rows are padded to a multiple of ``multiple``
    tokens. If rows are packed, ``prompts`` has the number of tokens in the prompt of each sequence.

    A group consists of the sequences of one prompt, at most ``group_size``. Groups are sorted by their longest row and
    distributed in that order. So the rows of a micro-batch have similar lengths, and ranks finish together. A group
    stays on one rank if possible, because its rows share the work on their prompt.

    No rank gets more tokens than ``tokens_per_micro_batch`` in a micro-batch, unless a single row is longer.
    There are as few micro-batches as this order and limit allow, and their sizes are as even as their number allows.
    Every rank gets the same number of micro-batches, because expert-parallel ranks exchange tokens in every layer. If
    necessary, some are empty. The result depends only on the arguments, so it is the same on all ranks.
    """
    cost = functools.partial(_cost, lengths=lengths, multiple=multiple, group_size=group_size, prompts=prompts)
    longest_row: dict[int, int] = {}  # by group
    for sequence, length in lengths.items():
        longest_row[sequence // group_size] = max(length, longest_row.get(sequence // group_size, 0))
    todo = sorted(lengths, key=lambda sequence: (-longest_row[sequence // group_size], sequence))

    rounds: list[list[list[int]]] = []  # [round][data rank] -> sequences, which stay in one micro-batch
    while todo:
        for block in range(min(group_size, -(-len(todo) // data_ranks)), 0, -1):
            round_ = [todo[rank * block : (rank + 1) * block] for rank in range(data_ranks)]
            if _fits(round_, tokens_per_micro_batch, cost):
                break
        rounds.append(round_)
        todo = todo[data_ranks * block :]

    # Find the smallest limit that gives as few micro-batches as the largest limit. With it, their sizes are most even.
    fewest = len(_next_fit(rounds, tokens_per_micro_batch, cost))
    low, high = 0, tokens_per_micro_batch
    while low < high:
        middle = (low + high) // 2
        if len(_next_fit(rounds, middle, cost)) <= fewest:
            high = middle
        else:
            low = middle + 1
    return _next_fit(rounds, low, cost)


def _cost(
    rows: list[int], lengths: dict[int, int], multiple: int, group_size: int, prompts: dict[int, int] | None
) -> float:
    """Return the number of tokens that ``rows`` cost in one forward pass.

    A padded row counts as its padded length, rounded up to a multiple of ``multiple``. Packed rows count as the tokens
    of their packed sequence, which has each prompt once, plus a quarter of their padded size. The quarter is for
    attention, which copies the tokens to padded rows. These copies are at most a quarter of the memory that autograd
    keeps.
    """
    padded = len(rows) * -(-max(lengths[sequence] for sequence in rows) // multiple) * multiple
    if prompts is None:
        return padded
    own = sum(lengths[sequence] - prompts[sequence] for sequence in rows)
    prompt_of_group = {sequence // group_size: prompts[sequence] for sequence in rows}
    return own + sum(prompt_of_group.values()) + padded / 4


def _fits(by_rank: list[list[int]], limit: int, cost: Callable[[list[int]], float]) -> bool:
    return all(cost(rows) <= limit for rows in by_rank if rows)


def _next_fit(rounds: list[list[list[int]]], limit: int, cost: Callable[[list[int]], float]) -> list[list[list[int]]]:
    """Put each round, in order, into the last micro-batch if it fits there on all ranks, and otherwise into a new one.

    ``rounds`` is [round][data rank] -> sequences. Return [micro-batch][data rank] -> sequences.
    """
    micro_batches: list[list[list[int]]] = []
    for round_ in rounds:
        if micro_batches:
            joined = [[*rows, *more] for rows, more in zip(micro_batches[-1], round_, strict=True)]
            if _fits(joined, limit, cost):
                micro_batches[-1] = joined
                continue
        micro_batches.append(round_)
    return micro_batches


def pack(
    rollout: Rollout,
    sequences: list[int],
    advantages: Tensor,
    device: torch.device,
    pad_token: int,
    multiple: int,
    records: dict[int, Tensor] | None = None,
) -> MicroBatch:
    """Return a micro-batch with the rows of ``sequences``, padded on the right.

    All rows get the length of the longest row, rounded up to a multiple of ``multiple``. ``records`` has, for each
    sequence, the routes of all tokens except the last. A route has the K experts of a token in each of the L MoE
    layers. Without sequences the result is one row of padding, which trains nothing.

    advantages: (S,); a record: (row length - 1, L, K)
    """
    longest = max(map(rollout.row_length, sequences), default=1)
    shape = (max(1, len(sequences)), -(-longest // multiple) * multiple)
    tokens, mask, logp = torch.full(shape, pad_token), torch.zeros(shape), torch.zeros(shape)
    for row, sequence in enumerate(sequences):
        prompt = rollout.prompts[sequence // rollout.rewards.shape[1]]
        start, n = len(prompt), rollout.lengths[sequence]
        tokens[row, :start] = torch.tensor(prompt)
        tokens[row, start : start + n] = rollout.tokens[sequence, :n]
        mask[row, start : start + n] = rollout.mask[sequence, :n].float()
        logp[row, start : start + n] = rollout.logp[sequence, :n]
    chosen = advantages[sequences] if sequences else torch.zeros(1)
    tokens, mask = tokens.to(device), mask.to(device)
    packed = packing.pack(tokens, mask, multiple)
    micro = MicroBatch(tokens, mask, logp.to(device), chosen.to(device), packed, sequences)
    if records is not None and sequences:
        routes = torch.zeros(*shape, *records[sequences[0]].shape[1:], dtype=torch.uint8)
        has_route = torch.zeros(shape, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            length = len(records[sequence])
            routes[row, :length], has_route[row, :length] = records[sequence], 1
        micro.routes = packed.pack(routes.to(device))
        micro.replayed = packed.pack(has_route.to(device)) * packed.num_rows
    return micro
