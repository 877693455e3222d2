"""What a rollout is, who samples it, and how its sequences become the micro-batches of the update.

P prompts, G completions a prompt, S = P x G sequences, N = max_new_tokens, b rows of a micro-batch, T tokens of a row.
A replica is the rollout.tensor ranks that hold one copy of the model; replica r of n samples the prompts at r, r + n,
..., and afterwards every rank knows the whole rollout.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import device as devices
from config import derive_seed
from data_gsm8k import Question
from engines import vllm_adapter
from engines.interface import Completion
from hf_config import Architecture
from input_files import InputError
from knobs import Config
from packing import Packing
from parallel_setup import Parallel


@dataclass
class Rollout:
    """A step's sequences, the same on every rank; sequence s answers prompt s // G."""

    prompts: list[list[int]]  # P
    tokens: Tensor  # (S, N) int64, 0 after the end
    logp: Tensor  # (S, N) the sampler's, of each sampled token
    lengths: list[int]  # S completion lengths
    truncated: Tensor  # (S,) bool: stopped by max_new_tokens
    rewards: Tensor  # (P, G)
    parsable: Tensor  # (P, G) 1 where an answer was found

    def row_length(self, sequence: int) -> int:
        """Prompt and completion, tokens."""
        return len(self.prompts[sequence // self.rewards.shape[1]]) + self.lengths[sequence]


@dataclass
class MicroBatch:
    """Rows of one forward pass, padded on the right."""

    tokens: Tensor  # (b, T)
    mask: Tensor  # (b, T) 1 on completion tokens that are trained
    rollout_logp: Tensor  # (b, T) the sampler's log-probs, 0 outside the mask
    advantages: Tensor  # (b,)
    routes: Tensor | None = None  # (b, T, L, K) experts to replay, L MoE layers
    packing: Packing | None = None  # the rows as one line of tokens, where no routes are replayed
    replayed: Tensor | None = None  # (b, T) true where there is a route: not on a last token, not on padding


# ------------------------------------------------------------------------------------------------ sampling


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check_engine(cfg: Config, arch: Architecture, ranks: int) -> None:
    """Raise InputError for what the engine cannot run or is not installed for."""
    if cfg.rollout.engine == "vllm":
        from engines import vllm_engine

        device_type, dtype = devices.resolve(cfg.device).type, DTYPES[cfg.model.dtype]
        if device_type == "npu" and cfg.rollout.temperature != 1:
            # vllm-ascend 0.23.0, model_runner_v1.py:333: its own sampler leaves logprobs_mode unread.
            raise InputError(
                f"rollout.temperature: {cfg.rollout.temperature:g}, but vllm-ascend reports log-probs at temperature 1 "
                "only; needed: 1.0, or rollout.engine torch"
            )
        vllm_engine.check(
            arch,
            device_type=device_type,
            ranks=ranks,
            tensor=cfg.rollout.tensor,
            dtype=dtype,
            max_tokens=cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens,
            kv_cache_mib=cfg.rollout.kv_cache_mib,
        )
        if cfg.rollout.sync == "adapter":
            vllm_adapter.check(arch, cfg.lora, device_type=device_type, dtype=dtype)
        if cfg.rollout.expert_parallel:
            from engines import vllm_colocated

            vllm_colocated.check(arch, device_type=device_type, ranks=ranks, tensor=cfg.rollout.tensor)


def open_engine(cfg: Config, arch: Architecture, device: torch.device, stop_tokens: set[int], pad_token: int):
    """The engine that cfg.rollout.engine names. Its weights come with its first load_weights."""
    dtype = DTYPES[cfg.model.dtype]
    if cfg.rollout.engine == "torch":
        from engines.torch_sampler import TorchSampler

        norms = torch.float32 if cfg.aqn.bf16 == "fp32" else dtype  # which then take noise that bf16 would round away
        return TorchSampler(
            arch, stop_tokens=stop_tokens, pad_token=pad_token, dtype=dtype, device=device, norm_dtype=norms
        )
    if cfg.rollout.expert_parallel:
        from engines.vllm_colocated import ColocatedEngine as Engine
    else:
        from engines.vllm_engine import VllmEngine as Engine

    return Engine(
        arch,
        cfg.model.path,
        stop_tokens=stop_tokens,
        max_tokens=cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens,
        dtype=dtype,
        device=device,
        tensor=cfg.rollout.tensor,
        enforce_eager=cfg.rollout.enforce_eager,
        kv_cache_mib=cfg.rollout.kv_cache_mib,
        routed_experts=cfg.replay.mode == "r3",
        adapter=cfg.lora if cfg.rollout.sync == "adapter" else None,
    )


def sample(
    engine,
    asked: list[Question],
    score: Callable[[Question, Completion], tuple[float, bool]],
    cfg: Config,
    parallel: Parallel,
    step: int,
) -> tuple[Rollout, list[list[Completion]]]:
    """G scored completions of each question, all of them on every rank, and this rank's own in full.

    ``score`` gives a completion's reward and whether an answer was found in it; each is scored where it was sampled.
    What is sampled depends on (seed, step, place of the prompt) alone, not on which rank does it.
    """
    places = own_places(len(asked), cfg, parallel)
    own = [asked[place] for place in places]
    completions = engine.sample(
        [question.prompt for question in own],
        seeds=[derive_seed(cfg.train.seed, "rollout", step, place) for place in places],
        num_samples=cfg.rollout.group_size,
        max_new_tokens=cfg.rollout.max_new_tokens,
        temperature=cfg.rollout.temperature,
        top_p=cfg.rollout.top_p,
        top_k=cfg.rollout.top_k,
        return_routed_experts=cfg.replay.mode == "r3",
    )
    scores = [[score(question, one) for one in group] for question, group in zip(own, completions, strict=True)]
    return _gather(asked, completions, scores, cfg, parallel), completions


def own_places(count: int, cfg: Config, parallel: Parallel) -> range:
    """Which of ``count`` prompts this rank's replica samples."""
    return range(parallel.rank // cfg.rollout.tensor, count, parallel.world_size // cfg.rollout.tensor)


def in_place(by_rank: Tensor, count: int, cfg: Config) -> Tensor:
    """What every rank found for its own places, in the order of the prompts.  (ranks, own, ...) -> (count, ...)"""
    return by_rank[:: cfg.rollout.tensor].transpose(0, 1).flatten(0, 1)[:count].cpu()


def _gather(asked, completions, scores, cfg: Config, parallel: Parallel) -> Rollout:
    """Exchange what each rank sampled: one integer and one fp32 message of equal shape from every rank."""
    group, longest = cfg.rollout.group_size, cfg.rollout.max_new_tokens
    num_own = len(range(0, len(asked), parallel.world_size // cfg.rollout.tensor))  # of replica 0, which has the most
    whole = torch.zeros(num_own, group, longest + 2, dtype=torch.int64)
    real = torch.zeros(num_own, group, longest + 2, dtype=torch.float32)
    for i, answers in enumerate(completions):
        for j, answer in enumerate(answers):
            n = len(answer.tokens)
            whole[i, j, :n] = torch.tensor(answer.tokens)
            whole[i, j, longest:] = torch.tensor([n, answer.finish_reason == "length"])
            real[i, j, :n] = torch.tensor(answer.logp)
            real[i, j, longest:] = torch.tensor(scores[i][j], dtype=torch.float32)
    whole, real = (in_place(parallel.gather_rows(x), len(asked), cfg) for x in (whole, real))
    return Rollout(
        prompts=[question.prompt for question in asked],
        tokens=whole[..., :longest].flatten(0, 1),
        logp=real[..., :longest].flatten(0, 1),
        lengths=whole[..., longest].flatten().tolist(),
        truncated=whole[..., longest + 1].flatten().bool(),
        rewards=real[..., longest],
        parsable=real[..., longest + 1],
    )


def metrics(batch: Rollout) -> dict[str, float]:
    """What was sampled, before anything is learned from it."""
    lengths = torch.tensor(batch.lengths, dtype=torch.float64)
    equal = batch.rewards.amax(dim=1) == batch.rewards.amin(dim=1)
    by_group = batch.tokens.unflatten(0, batch.rewards.shape)  # (P, G, N)
    identical = (by_group == by_group[:, :1]).flatten(1).all(dim=1)
    return {
        "reward/mean": batch.rewards.double().mean().item(),
        "reward/unparsable_frac": 1 - batch.parsable.double().mean().item(),
        "reward/equal_groups": int(equal.sum()),
        "rollout/identical_groups": int(identical.sum()),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": int(lengths.max()),
        "response_length/truncated_frac": batch.truncated.double().mean().item(),
    }


# ------------------------------------------------------------------------------------------------ packing


def plan(
    lengths: dict[int, int],
    data_ranks: int,
    tokens_per_micro_batch: int,
    multiple: int,
    group_size: int = 1,
    prompts: dict[int, int] | None = None,
) -> list[list[list[int]]]:
    """Which sequences each data rank takes in each micro-batch: [micro-batch][data rank] -> sequences.

    ``lengths``: row length of each sequence, ``prompts``: of each one's prompt, where rows are packed; tokens. Groups
    are sorted by their longest row and dealt out, so that rows of one micro-batch are alike and ranks finish together;
    a group stays whole where it can, since its rows share the work on their prompt. No rank gets more than the bound in
    any micro-batch, unless a single row is more. The micro-batches are as few as the bound allows, and then as even as
    their number allows. Rows count with their padding; packed ones as their line, which has each prompt once, and a
    quarter of that. Every rank gets the same number, some of them empty if need be: expert-parallel ranks meet in every
    layer. A pure function, so all ranks agree.
    """
    longest_row: dict[int, int] = {}
    for sequence, length in lengths.items():
        longest_row[sequence // group_size] = max(length, longest_row.get(sequence // group_size, 0))
    in_order = sorted(lengths, key=lambda sequence: (-longest_row[sequence // group_size], sequence))

    def tokens(rows: list[int]) -> float:
        padded = len(rows) * -(-max(lengths[s] for s in rows) // multiple) * multiple
        if prompts is None:
            return padded
        line = sum(lengths[s] - prompts[s] for s in rows) + sum({s // group_size: prompts[s] for s in rows}.values())
        return line + padded / 4  # attention's copies are of padded rows: at most a quarter of what autograd keeps

    def fit(by_rank: list[list[int]], room: int) -> bool:
        return all(tokens(rows) <= room for rows in by_rank if rows)

    rounds: list[list[list[int]]] = []  # a block of rows for every rank, which stays together
    todo = in_order
    while todo:
        for block in range(min(group_size, -(-len(todo) // data_ranks)), 0, -1):
            round_ = [todo[rank * block : (rank + 1) * block] for rank in range(data_ranks)]
            if fit(round_, tokens_per_micro_batch):
                break
        rounds.append(round_)
        todo = todo[data_ranks * block :]

    def fill(room: int) -> list[list[list[int]]]:
        """The rounds in order, each in the last micro-batch where all ranks have room for it, else in a new one."""
        micro_batches: list[list[list[int]]] = []
        for round_ in rounds:
            if micro_batches:
                grown = [[*rows, *more] for rows, more in zip(micro_batches[-1], round_, strict=True)]
                if fit(grown, room):
                    micro_batches[-1] = grown
                    continue
            micro_batches.append(round_)
        return micro_batches

    fewest = len(fill(tokens_per_micro_batch))
    if fewest < 2:
        return fill(tokens_per_micro_batch)
    rooms = range(tokens_per_micro_batch + 1)
    return fill(rooms[bisect.bisect_left(rooms, True, key=lambda room: len(fill(room)) <= fewest)])


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

    ``advantages``: (S,). ``records``: routes of each sequence's tokens but the last, (row length - 1, L, K).
    No sequences make one row that is all padding and trains nothing.
    """
    longest = max([rollout.row_length(sequence) for sequence in sequences], default=1)
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
    micro = MicroBatch(*(x.to(device) for x in (tokens, mask, logp, chosen)))
    if records is not None and sequences:
        routes = torch.zeros(*shape, *records[sequences[0]].shape[1:], dtype=torch.uint8)
        replayed = torch.zeros(shape, dtype=torch.bool)
        for row, sequence in enumerate(sequences):
            record = records[sequence]
            routes[row, : len(record)], replayed[row, : len(record)] = record, True
        micro.routes, micro.replayed = routes.to(device), replayed.to(device)
    return micro
