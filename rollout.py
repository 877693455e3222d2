"""Step 2: opens the engine, samples and scores G completions of each prompt, and packs them into micro-batches.

P prompts, G completions a prompt, S = P x G sequences, N = max_new_tokens, b rows of a micro-batch, T tokens of a row.
A replica is a group of rollout.tensor ranks, which hold one copy of the model together. Replica r of n samples the
prompts r, r + n, r + 2 n, ...; then all ranks exchange their results, so that every rank has the whole rollout.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

import grpo
from data_gsm8k import Question, Questions
from engines.interface import Completion, Engine
from facts.architectures import Architecture
from facts.seeds import derive_seed
from knobs import Config, RolloutConfig
from model.packing import Packing
from parallel_setup import Parallel
from tasks.scoring import Score


@dataclass
class Rollout:
    """The sequences of a step, the same on every rank. Sequence s answers prompt s // G."""

    prompts: list[list[int]]  # P
    tokens: Tensor  # (S, N) int64, 0 after the end
    logp: Tensor  # (S, N) the sampler's log-prob of each sampled token
    lengths: list[int]  # S completion lengths
    truncated: Tensor  # (S,) bool: stopped by max_new_tokens
    rewards: Tensor  # (P, G)
    parsable: Tensor  # (P, G) 1 where an answer was found
    correct: Tensor  # (P, G) 1 where it is right
    ranks_alike: int = 1  # ranks that have the same completions: those that sampled them together

    def row_length(self, sequence: int) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompts[sequence // self.rewards.shape[1]]) + self.lengths[sequence]


@dataclass
class MicroBatch:
    """Rows of one forward pass, padded on the right."""

    tokens: Tensor  # (b, T)
    mask: Tensor  # (b, T) 1 on completion tokens that are trained
    rollout_logp: Tensor  # (b, T) the sampler's log-probs, 0 outside the mask
    advantages: Tensor  # (b,)
    stale_logp: Tensor | None = None  # (b, T) the trainer's log-probs of the older policy that sampled
    old_logp: Tensor | None = None  # (b, T) of the policy before its first update; None in that update: its own
    ref_logp: Tensor | None = None  # (b, T) of the base model; None without a KL penalty
    packing: Packing | None = None  # how the rows become one packed sequence of M tokens
    routes: Tensor | None = None  # (b, T, L, K), packed (1, M, L, K): experts to replay, L MoE layers
    replayed: Tensor | None = None  # (b, T), packed (1, M): the number of rows whose token has a route here


# ------------------------------------------------------------------------------------------------ the engine


def check_engine(cfg: Config, arch: Architecture, ranks: int) -> None:
    """Raise InputError if the engine cannot run this configuration, or is not installed for it."""
    _engine_module(cfg).check(cfg, arch, ranks)


def open_engine(
    cfg: Config,
    arch: Architecture,
    device: torch.device,
    stop_tokens: set[int],
    pad_token: int,
    beat: Callable[[], None] = lambda: None,
) -> Engine:
    """The engine that cfg.rollout.engine names. It has no weights before its first load_weights.

    ``beat`` is called for every decoded token of a batch of rows.
    """
    return _engine_module(cfg).open_engine(cfg, arch, device, stop_tokens, pad_token, beat)


def _engine_module(cfg: Config) -> Any:
    return importlib.import_module(cfg.rollout.kind.module)


# ------------------------------------------------------------------------------------------------ sampling

Scoring = Callable[[Sequence[tuple[Question, Completion]]], list[Score]]


class Sampled(NamedTuple):
    """What a step has sampled. Without dynamic sampling there is one round, which is the batch."""

    batch: Rollout  # what is trained
    completions: list[list[Completion]]  # of the batch: those that this rank sampled, as the engine gave them
    asked: list[Question]  # P questions of the batch
    all_asked: list[Question]  # P questions of the first round, then those of the further rounds
    first: Rollout  # the first round, which no outcome has selected
    num_tokens: int  # sampled in all rounds
    extra: dict[str, float]  # metrics of dynamic sampling


def sample_step(
    engine: Engine, questions: Questions, score: Scoring, cfg: Config, parallel: Parallel, step: int
) -> Sampled:
    """The rollout of ``step``, after at most rollout.dynamic_rounds rounds of dynamic sampling (arXiv 2503.14476).

    A round replaces the groups that are all right or all wrong by groups of questions that the step has not asked; if
    too few such questions are left, the last groups stay. What is asked and drawn depends on the seed, the step, the
    round and the outcomes before, which all ranks know: they take the same rounds, and engines that sample in lockstep
    are called equally often. The rank that owns a prompt samples all of its groups, so replicas can have unequal work
    in a further round. Groups that are still equal after the last round stay in the batch.
    """
    settings = cfg.rollout
    draw = functools.partial(
        sample,
        engine,
        score=score,
        settings=settings,
        parallel=parallel,
        seed=cfg.train.seed,
        step=step,
        routed_experts=cfg.replay.mode == "r3",
    )
    asked = questions.pick(step, settings.prompts_per_step)
    first, completions = draw(asked)
    batch, all_asked, num_tokens, rounds = first, [*asked], sum(first.lengths), 1
    own = own_prompts(len(asked), settings.tensor, parallel)
    for round_ in range(1, settings.dynamic_rounds + 1):
        equal = (batch.correct.amax(dim=1) == batch.correct.amin(dim=1)).nonzero().flatten().tolist()
        if not (new := questions.pick_more(step, round_, len(equal), all_asked)):
            break
        indices = equal[: len(new)]
        for index, question in zip(indices, new, strict=True):
            asked[index] = question
        drawn, groups = draw(asked, round_=round_, indices=indices)
        batch = with_groups(batch, drawn, indices)
        for index, group in zip((index for index in own if index in indices), groups, strict=True):
            completions[own.index(index)] = group
        all_asked, num_tokens, rounds = all_asked + new, num_tokens + sum(drawn.lengths), round_ + 1
    if overlong := cfg.reward.overlong:
        lengths = torch.tensor(batch.lengths).view_as(batch.rewards)
        penalty = grpo.overlong_penalty(lengths, settings.max_new_tokens, overlong.buffer, overlong.penalty)
        batch = dataclasses.replace(batch, rewards=batch.rewards - penalty)
    extra = {
        "reward/first_round_correct": first.correct.double().mean().item(),
        "rollout/rounds": rounds,
        "rollout/dropped_groups_frac": 1 - len(asked) / len(all_asked),
        "rollout/sampled_per_trained": len(all_asked) / len(asked),
    }
    return Sampled(batch, completions, asked, all_asked, first, num_tokens, extra if settings.dynamic_rounds else {})


def with_groups(batch: Rollout, drawn: Rollout, indices: Collection[int]) -> Rollout:
    """``batch`` with the groups at ``indices`` of ``drawn``, which has the prompts of all groups."""
    group_size = batch.rewards.shape[1]
    replaced = [sequence // group_size in indices for sequence in range(len(batch.lengths))]
    rows = {"tokens": replaced, "logp": replaced, "truncated": replaced}
    rows |= dict.fromkeys(("rewards", "parsable", "correct"), replaced[::group_size])
    merged = {}
    for name, chosen in rows.items():
        merged[name] = getattr(batch, name).clone()
        merged[name][chosen] = getattr(drawn, name)[chosen]
    lengths = [new if taken else old for old, new, taken in zip(batch.lengths, drawn.lengths, replaced, strict=True)]
    return dataclasses.replace(drawn, lengths=lengths, **merged)


def sample(
    engine: Engine,
    asked: list[Question],
    score: Scoring,
    settings: RolloutConfig,
    parallel: Parallel,
    *,
    seed: int,
    step: int,
    round_: int = 0,
    indices: Collection[int] | None = None,
    routed_experts: bool = False,
) -> tuple[Rollout, list[list[Completion]]]:
    """G scored completions of each question: all of them on every rank, and this rank's own as the engine gave them.

    ``score`` scores answers to questions; the rank that samples a completion scores it. A completion depends on the
    seed, the step, the round and the index of its prompt, but not on the rank that samples it. With ``indices``, only
    the questions at these indices get completions; the rows of the others are 0.
    """
    replicas, of_round = parallel.world_size // settings.tensor, (round_,) if round_ else ()
    own_indices = own_prompts(len(asked), settings.tensor, parallel)
    sampled = [index for index in own_indices if indices is None or index in indices]
    own = [asked[index] for index in sampled]
    completions = engine.sample(
        [question.prompt for question in own],
        seeds=[derive_seed(seed, "rollout", step, index, *of_round) for index in sampled],
        num_samples=settings.group_size,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        return_routed_experts=routed_experts,
    )
    # One message of integers and one of fp32 numbers, of equal shape on every rank. Replica 0 has the most prompts.
    longest, num_own = settings.max_new_tokens, len(range(0, len(asked), replicas))
    integers = torch.zeros(num_own, settings.group_size, longest + 2, dtype=torch.int64)
    reals = torch.zeros(num_own, settings.group_size, longest + 3, dtype=torch.float32)
    scores = iter(score([(question, one) for question, group in zip(own, completions, strict=True) for one in group]))
    for index, group in zip(sampled, completions, strict=True):
        i = index // replicas
        for j, answer in enumerate(group):
            n = len(answer.tokens)
            integers[i, j, :n] = torch.tensor(answer.tokens)
            integers[i, j, longest:] = torch.tensor([n, answer.finish_reason == "length"])
            reals[i, j, :n] = torch.tensor(answer.logp)
            reals[i, j, longest:] = torch.tensor(next(scores), dtype=torch.float32)
    by_rank = (parallel.gather_rows(x) for x in (integers, reals))
    integers, reals = (in_prompt_order(x, len(asked), settings.tensor) for x in by_rank)
    batch = Rollout(
        prompts=[question.prompt for question in asked],
        tokens=integers[..., :longest].flatten(0, 1),
        logp=reals[..., :longest].flatten(0, 1),
        lengths=integers[..., longest].flatten().tolist(),
        truncated=integers[..., longest + 1].flatten().bool(),
        rewards=reals[..., longest],
        parsable=reals[..., longest + 1],
        correct=reals[..., longest + 2],
        ranks_alike=settings.tensor,
    )
    return batch, completions


def own_prompts(count: int, tensor: int, parallel: Parallel) -> range:
    """The indices of the prompts, of ``count``, that this rank's replica of ``tensor`` ranks samples."""
    return range(parallel.rank // tensor, count, parallel.world_size // tensor)


def in_prompt_order(by_rank: Tensor, count: int, tensor: int) -> Tensor:
    """The gathered results of all ranks, sorted into the order of the prompts.  (ranks, own, ...) -> (count, ...)

    ``by_rank`` has a rank's results for its own_prompts; the ``tensor`` ranks of a replica have the same ones.
    """
    return by_rank[::tensor].transpose(0, 1).flatten(0, 1)[:count].cpu()


def metrics(sampled: Sampled) -> dict[str, float]:
    """Metrics of a step's rollout by name: of the batch, and of the first round where an outcome must not select."""
    batch, first = sampled.batch, sampled.first
    lengths = torch.tensor(batch.lengths, dtype=torch.float64)
    equal = batch.rewards.amax(dim=1) == batch.rewards.amin(dim=1)
    by_group = batch.tokens.unflatten(0, batch.rewards.shape)  # (P, G, N)
    identical = (by_group == by_group[:, :1]).flatten(1).all(dim=1)
    return {
        "reward/mean": batch.rewards.double().mean().item(),
        "reward/unparsable_frac": 1 - first.parsable.double().mean().item(),
        "reward/equal_groups": int(equal.sum()),
        "rollout/identical_groups": int(identical.sum()),
        "rollout/entropy": -batch.logp.double().sum().item() / sum(batch.lengths),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": int(lengths.max()),
        "response_length/truncated_frac": first.truncated.double().mean().item(),
        "rollout/repeated_frac": repeated_frac(first),
    } | sampled.extra


def repeated_frac(batch: Rollout) -> float:
    """Share of the completions after the first of each group that repeat an earlier one of it, token by token."""
    tokens, group_size = batch.tokens.tolist(), batch.rewards.shape[1]
    completions = [tuple(row[:length]) for row, length in zip(tokens, batch.lengths, strict=True)]
    groups = [completions[first : first + group_size] for first in range(0, len(completions), group_size)]
    repeated = sum(len(group) - len(set(group)) for group in groups)
    return repeated / (len(completions) - len(groups))


# ------------------------------------------------------------------------------------------------ micro-batches


def plan(
    lengths: dict[int, int],
    data_ranks: int,
    tokens_per_micro_batch: int,
    multiple: int,
    group_size: int = 1,
    prompts: dict[int, int] | None = None,
) -> list[list[list[int]]]:
    """The sequences of each data rank in each micro-batch: [micro-batch][data rank] -> sequences.

    ``lengths``: tokens of each sequence's row. ``prompts``: tokens of each one's prompt, where rows are packed.
    No rank gets more than ``tokens_per_micro_batch`` in a micro-batch, unless a single row is longer. There are as few
    micro-batches as this limit allows, and they are as even as their number allows.
    Groups are sorted by their longest row and distributed in that order, so that the rows of a micro-batch are similar
    and ranks finish together. A group stays on one rank where it can, because its rows share the work on their prompt.
    Every rank gets the same number of micro-batches, some of them empty if necessary, because expert-parallel ranks
    exchange tokens in every layer. The result depends on the arguments alone, so all ranks compute the same.
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

    # The smallest limit that gives as few micro-batches as the largest one makes them even.
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
    """The tokens of ``rows`` in one forward pass.

    A padded row counts with its padding, up to a ``multiple``. Packed rows count as their packed sequence, which has
    each prompt once, plus a quarter of their padded size: attention copies padded rows, which are at most a quarter of
    what autograd keeps.
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
    """The rounds in order, each in the last micro-batch if all ranks have room for it there, otherwise in a new one."""
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
    """The rows of ``sequences``, padded on the right to the longest and to a multiple of ``multiple``.

    ``advantages``: (S,). ``records``: the routes of each sequence's tokens but the last, (row length - 1, L, K).
    Without sequences it is one row of padding, which trains nothing.
    """
    longest = max(map(rollout.row_length, sequences), default=1)
    shape = (max(1, len(sequences)), -(-longest // multiple) * multiple)
    tokens, mask, logp = torch.full(shape, pad_token), torch.zeros(shape), torch.zeros(shape)
    for row, sequence in enumerate(sequences):
        prompt = rollout.prompts[sequence // rollout.rewards.shape[1]]
        start, n = len(prompt), rollout.lengths[sequence]
        tokens[row, :start] = torch.tensor(prompt)
        tokens[row, start : start + n] = rollout.tokens[sequence, :n]
        mask[row, start : start + n] = 1
        logp[row, start : start + n] = rollout.logp[sequence, :n]
    chosen = advantages[sequences] if sequences else torch.zeros(1)
    micro = MicroBatch(tokens.to(device), mask.to(device), logp.to(device), chosen.to(device))
    if records is not None and sequences:
        routes = torch.zeros(*shape, *records[sequences[0]].shape[1:], dtype=torch.uint8)
        replayed = torch.zeros(shape, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            length = len(records[sequence])
            routes[row, :length], replayed[row, :length] = records[sequence], 1
        micro.routes, micro.replayed = routes.to(device), replayed.to(device)
    return micro
