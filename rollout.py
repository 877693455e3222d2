"""Samples G completions for each prompt and scores them (step 2).

P is the number of prompts, G the number of completions per prompt, S = P x G the number of sequences, and
N = max_new_tokens. A replica is a group of rollout.tensor ranks that share one copy of the model. Replica r of
n samples the prompts r, r + n, r + 2 n, ... All ranks then exchange their results, so every rank has the whole rollout.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import re
import statistics
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

import grpo
from data_gsm8k import Question, Questions
from engines.interface import Completion, Engine
from facts.seeds import derive_seed
from knobs import Config, RolloutConfig
from model.batches import Rollout
from parallel_setup import Parallel
from runlog.completions import Row
from tasks.environment import Environment
from tasks.scoring import Call, Score, Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CUT_OFF = {"length": 1, "turns": 2}  # maps a finish_reason to its number in a message; 0 means any other
OPENING_TOKENS = 16  # enough for `<think>` and the line breaks at the end of a prompt
Scoring = Callable[[Sequence[tuple[Question, Completion]]], list[Score]]


class Sampled(NamedTuple):
    """The result of sampling in one step. Without dynamic sampling, the batch is the only round."""

    batch: Rollout  # the sequences to train on
    completions: list[list[Completion]]  # the part of the batch that this rank sampled, as the engine returned it
    rows: list[Row]  # a row per completion that this rank sampled, including groups that were replaced later
    asked: list[Question]  # the P questions of the batch
    all_asked: list[Question]  # the P questions of the first round, followed by those of later rounds
    first: Rollout  # the first round, before any group was replaced because of its outcome
    num_tokens: int  # tokens of the completions of all rounds, including those of the environment
    extra: dict[str, float]  # the metrics of dynamic sampling


def sample_step(
    engine: Engine,
    questions: Questions,
    score: Scoring,
    cfg: Config,
    parallel: Parallel,
    step: int,
    *,
    environment: Environment | None = None,
) -> Sampled:
    """Sample and score a step's completions, with up to rollout.dynamic_rounds dynamic rounds (arXiv 2503.14476).

    Each round replaces the groups that are all right or all wrong with groups for questions that the step has not asked
    yet. If too few new questions are left, the last of these groups stay. Groups that are still all right or all wrong
    after the last round stay too. The questions and samples depend on the seed, the step, the round and the earlier
    outcomes. All ranks know these, so they make the same rounds, and engines that sample in lockstep are called equally
    often. The rank that samples a group also samples the groups that replace it, so in later rounds the replicas can
    have unequal work.
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
        environment=environment,
    )
    asked = questions.pick(step, settings.prompts_per_step)
    first, completions, rows = draw(asked)
    batch, all_asked, num_tokens, rounds = first, [*asked], sum(first.lengths), 1
    own = own_prompts(len(asked), settings.tensor, parallel)
    for round_ in range(1, settings.dynamic_rounds + 1):
        equal = (batch.correct.amax(dim=1) == batch.correct.amin(dim=1)).nonzero().flatten().tolist()
        if not (new := questions.pick_more(step, round_, len(equal), all_asked)):
            break
        indices = equal[: len(new)]
        for index, question in zip(indices, new, strict=True):
            asked[index] = question
        drawn, groups, new_rows = draw(asked, round_=round_, indices=indices)
        batch = with_groups(batch, drawn, indices)
        for index, group in zip((index for index in own if index in indices), groups, strict=True):
            completions[own.index(index)] = group
        for one in rows:
            one["dropped"] |= one["prompt"] in indices
        rows += new_rows
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
    extra = extra if settings.dynamic_rounds else {}
    return Sampled(batch, completions, rows, asked, all_asked, first, num_tokens, extra)


def with_groups(batch: Rollout, drawn: Rollout, indices: Collection[int]) -> Rollout:
    """Return ``batch`` with the groups at ``indices`` taken from ``drawn``, which has the prompts of all groups."""
    group_size = batch.rewards.shape[1]
    replaced = [sequence // group_size in indices for sequence in range(len(batch.lengths))]
    rows = dict.fromkeys(("tokens", "logp", "mask", "truncated", "out_of_turns"), replaced)
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
    environment: Environment | None = None,
) -> tuple[Rollout, list[list[Completion]], list[Row]]:
    """Sample and score G completions for each question.

    Returns the completions of all ranks as a Rollout, this rank's completions as the engine returned them, and a row
    for each of this rank's completions. All ranks call this together.
    The rank that samples a completion also scores it, with ``score``. A completion depends on the seed, the step, the
    round and the index of its prompt, but not on the rank. If ``indices`` is given, only the questions at these indices
    get completions, and the rows of the others are 0.
    """
    own = [p for p in own_prompts(len(asked), settings.tensor, parallel) if indices is None or p in indices]
    completions = engine.sample(
        [asked[p].prompt for p in own],
        seeds=[derive_seed(seed, "rollout", step, p, *([round_] if round_ else [])) for p in own],
        num_samples=settings.group_size,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        return_routed_experts=routed_experts,
        turns=environment.turns([asked[p] for p in own]) if environment else None,
    )
    answers = [(p, j, one) for p, group in zip(own, completions, strict=True) for j, one in enumerate(group)]
    scores = score([(asked[p], one) for p, _, one in answers])
    fields = gather_answers(answers, scores, len(asked), settings, parallel)
    batch = Rollout(prompts=[question.prompt for question in asked], ranks_alike=settings.tensor, **fields)
    return batch, completions, rows_of(asked, "train", answers, scores)


def gather_answers(
    answers: list[tuple[int, int, Completion]],
    scores: list[Score],
    count: int,
    settings: RolloutConfig,
    parallel: Parallel,
) -> dict[str, Any]:
    """Return the fields of a Rollout of ``count`` prompts, from all ranks' ``answers`` and their ``scores``.

    An answer is a tuple of the index of its prompt, its number in the group, and a completion. Rows without an answer
    are 0. All ranks call this together. Each rank sends one message of integers and one message of fp32 numbers. Their
    shapes must be equal on every rank, so they are those of replica 0, which has the most prompts. A token t of the
    environment is sent as ~t, which is negative.
    """
    longest = settings.max_new_tokens
    replicas = parallel.world_size // settings.tensor
    shape = len(range(0, count, replicas)), settings.group_size
    integers = torch.zeros(*shape, longest + 2, dtype=torch.int64)  # tokens, their number, a value of CUT_OFF
    reals = torch.zeros(*shape, longest + 3, dtype=torch.float32)  # the log-probs, and the three numbers of a Score
    for (p, j, one), scored in zip(answers, scores, strict=True):
        row = p // replicas, j
        n = len(one.tokens)
        tokens, mask = torch.tensor(one.tokens), torch.tensor(one.mask)
        integers[row][:n] = torch.where(mask, tokens, ~tokens)
        integers[row][longest:] = torch.tensor([n, CUT_OFF.get(one.finish_reason, 0)])
        reals[row][:n] = torch.tensor(one.logp)
        reals[row][longest:] = torch.tensor(scored[:3], dtype=torch.float32)
    integers = in_prompt_order(parallel.gather_rows(integers), count, settings.tensor)
    reals = in_prompt_order(parallel.gather_rows(reals), count, settings.tensor)
    sent, lengths, cut_off = integers.flatten(0, 1).split([longest, 1, 1], dim=1)
    return {
        "tokens": torch.where(sent < 0, ~sent, sent),
        "mask": (sent >= 0) & (torch.arange(longest) < lengths),
        "lengths": lengths.flatten().tolist(),
        "truncated": cut_off.flatten() > 0,
        "out_of_turns": cut_off.flatten() == CUT_OFF["turns"],
        "logp": reals[..., :longest].flatten(0, 1),
        "rewards": reals[..., longest],
        "parsable": reals[..., longest + 1],
        "correct": reals[..., longest + 2],
    }


def score_completions(
    answers: Sequence[tuple[Question, Completion]], tokenizer: PreTrainedTokenizerBase, scorer: Scorer
) -> list[Score]:
    """Score each completion as an answer to its question, with tasks/scoring.py.

    The scored text does not include the stop token. It begins with the `<think>` at the end of the prompt, if there is
    one (see opened_thinking).
    """
    calls = []
    for question, completion in answers:
        stopped = completion.finish_reason == "stop"
        tokens = completion.tokens[:-1] if stopped else completion.tokens
        text = opened_thinking(question.prompt, tokenizer) + tokenizer.decode(tokens)
        calls.append(Call(text, question.gold, question.columns))
    return [one._replace(text=call.completion) for one, call in zip(scorer(calls), calls, strict=True)]


def opened_thinking(prompt: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the `<think>` at the end of the prompt with the whitespace after it, or "" if there is none.

    Some chat templates write it there.
    """
    end = re.search(r"<think>\s*\Z", tokenizer.decode(prompt[-OPENING_TOKENS:]))
    return end[0] if end else ""


def own_prompts(count: int, tensor: int, parallel: Parallel) -> range:
    """Return the indices of the ``count`` prompts that this rank's replica, a group of ``tensor`` ranks, samples."""
    return range(parallel.rank // tensor, count, parallel.world_size // tensor)


def in_prompt_order(by_rank: Tensor, count: int, tensor: int) -> Tensor:
    """Sort the gathered results of all ranks into the order of the prompts.  (ranks, own, ...) -> (count, ...)

    Each row of ``by_rank`` has one rank's results for its own prompts (own_prompts). The ``tensor`` ranks of a replica
    have the same results.
    """
    return by_rank[::tensor].transpose(0, 1).flatten(0, 1)[:count].cpu()


def rows_of(questions: Any, split: str, answers: list[tuple[int, int, Completion]], scores: list[Score]) -> list[Row]:
    """Return the row that a run stores for each of ``answers``, with its score.

    An answer is a tuple of the index of its prompt, its number in the group, and a completion. `of_step` adds values
    that only the trainer knows.
    """
    rows = []
    for (prompt, sample, one), score in zip(answers, scores, strict=True):
        question, mask = questions[prompt], one.mask
        begun = [later and not earlier for earlier, later in zip(mask, mask[1:], strict=False)]
        turns = {"turns": 1 + sum(begun), "environment_tokens": mask.count(False)}
        row = {
            "id": f"{split}:{question.position}",
            "prompt": prompt,
            "sample": sample,
            "question": question.question,
            "gold": question.gold,
            "reward": score.reward,
            "correct": score.correct,
            "parsable": score.found,
            "answer": score.answer,
            "tokens": sum(mask),
            "finish": one.finish_reason,
            "advantage": None,
            "logp": round(sum(one.logp) / max(1, sum(mask)), 4),
            "dropped": False,
            **(turns if False in mask else {}),
            "parts": score.parts,
            "completion": score.text,
        }
        rows.append(row)
    return rows


def of_step(sampled: Sampled, advantages: Tensor, teacher_kl: dict[int, Tensor], parallel: Parallel) -> list[Row]:
    """Return the rows of all ranks as by_prompt does, with the values that only the trainer knows.

    These are the rewards with penalties, the ``advantages`` (P, G), and ``teacher_kl`` from the Learner. A group that
    dynamic sampling has dropped precedes the group that replaced it. All ranks call this together.
    """
    rows = by_prompt(sampled.rows, sampled.batch.ranks_alike, parallel)
    trained = [one for one in rows if not one["dropped"]]  # in the order of the sequences
    for sequence, one in enumerate(trained):
        one["reward"] = sampled.batch.rewards.flatten()[sequence].item()  # including penalties
        one["advantage"] = round(advantages.flatten()[sequence].item(), 4)
    for sequence, kl in parallel.join_on_first([*teacher_kl.items()]):
        trained[sequence]["teacher_kl"] = round(kl.item(), 4)
    return rows


def by_prompt(rows: list[Row], tensor: int, parallel: Parallel) -> list[Row]:
    """Return on rank 0 the rows of all ranks in the order of the prompts, and [] on other ranks.

    ``tensor`` is the number of ranks of a replica. All ranks call this together.
    """
    sends = parallel.rank % tensor == 0  # other ranks of the replica have the same rows
    return sorted(parallel.join_on_first(rows if sends else []), key=operator.itemgetter("prompt"))


def part_means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of each numeric part of the reward, over the trained completions that have this part."""
    found = collections.defaultdict(list)
    for one in rows:
        for name, part in one["parts"].items():
            if not one["dropped"] and not isinstance(part, str):
                found[f"reward/part/{name}"].append(part)
    return {name: statistics.fmean(numbers) for name, numbers in found.items()}


def metrics(sampled: Sampled) -> dict[str, float]:
    """Compute the metrics of a step's rollout.

    Metrics that the selection of groups would bias are computed from the first round only.
    """
    batch, first = sampled.batch, sampled.first
    lengths = torch.tensor(batch.sampled_lengths, dtype=torch.float64)
    equal = batch.rewards.amax(dim=1) == batch.rewards.amin(dim=1)
    by_group = batch.tokens.unflatten(0, batch.rewards.shape)  # (P, G, N)
    identical = (by_group == by_group[:, :1]).flatten(1).all(dim=1)
    return (
        {
            "reward/mean": batch.rewards.double().mean().item(),
            "reward/unparsable_frac": 1 - first.parsable.double().mean().item(),
            "reward/equal_groups": int(equal.sum()),
            "rollout/identical_groups": int(identical.sum()),
            "rollout/entropy": -batch.logp.double().sum().item() / sum(batch.sampled_lengths),
            "response_length/mean": lengths.mean().item(),
            "response_length/max": int(lengths.max()),
            "response_length/truncated_frac": first.truncated.double().mean().item(),
            "rollout/repeated_frac": repeated_frac(first),
        }
        | environment_metrics(batch, first)
        | sampled.extra
    )


def environment_metrics(batch: Rollout, first: Rollout) -> dict[str, float]:
    """Compute the metrics environment/..., averaged over the completions, or {} if the environment gave no answer."""
    given = torch.tensor(batch.lengths) - torch.tensor(batch.sampled_lengths)
    if not (given.any() or first.out_of_turns.any()):
        return {}
    begins = batch.mask[:, 1:] & ~batch.mask[:, :-1]  # the starts of all turns but the first
    turns = 1 + begins.sum(dim=1)
    return {
        "environment/turns_mean": turns.double().mean().item(),
        "environment/tokens_mean": given.double().mean().item(),
        "environment/max_turns_frac": first.out_of_turns.double().mean().item(),
    }


def repeated_frac(batch: Rollout) -> float:
    """Return the share of completions that repeat an earlier completion of their group, token by token.

    The first completion of each group does not count.
    """
    tokens, group_size = batch.tokens.tolist(), batch.rewards.shape[1]
    completions = [tuple(row[:length]) for row, length in zip(tokens, batch.lengths, strict=True)]
    groups = [completions[first : first + group_size] for first in range(0, len(completions), group_size)]
    repeated = sum(len(group) - len(set(group)) for group in groups)
    return repeated / (len(completions) - len(groups))
