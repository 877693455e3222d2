"""The policy under training on this rank: the frozen model, its LoRA adapters, and the operations on them.

The learner changes the factors, the push passes the policy to the sampler, and a checkpoint contains its whole factors.
Frozen weights never change. b is the number of rows, T the number of tokens per row, and R the rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

import lora_megatron
from facts.architectures import Architecture
from inputs.files import first_three
from knobs import Config, Merging
from model import megatron_model
from model.batches import MicroBatch
from model.megatron_model import TokenStats
from parallel_setup import Parallel
from weights import adapter_weights, huggingface
from weights.adapter_weights import checksums, hf_name
from weights.huggingface import WeightShard

SAMPLED_ROWS = 64  # rows of a large weight that `update_kept` compares, at a small part of the cost of a merge

Pieces = dict[tuple[str, str], Tensor]  # (name of the whole tensor, which piece of it) -> this rank's tensor


class Policy:
    """The model with its adapters. Every rank must call the same methods, because most of them are collective."""

    def __init__(
        self,
        cfg: Config,
        arch: Architecture,
        parallel: Parallel,
        model: torch.nn.Module,
    ) -> None:
        """Use ``model``, to which lora_megatron.attach_for has already attached adapters."""
        self.cfg, self.arch, self.parallel, self.model = cfg, arch, parallel, model
        self.adapters = lora_megatron.attached(model)
        self.factors = lora_megatron.factors(self.adapters)

    @classmethod
    def on(cls, cfg: Config, arch: Architecture, parallel: Parallel, model: torch.nn.Module) -> Policy:
        """Attach new adapters to ``model``, and return the policy."""
        lora_megatron.attach_for(model, cfg, parallel)
        return cls(cfg, arch, parallel, model)

    @classmethod
    def load(cls, cfg: Config, arch: Architecture, parallel: Parallel) -> Policy:
        """Load the model of model.path and attach new adapters, for a command that trains nothing."""
        return cls.on(cfg, arch, parallel, huggingface.load_model(cfg.model, arch, parallel))

    # ------------------------------------------------------------------------------------------------ its log-probs

    def logprobs(self, micro: MicroBatch) -> TokenStats:
        """Return the log-prob and the entropy of each token of ``micro``, at rollout.temperature.  (b, T) each"""
        stats = megatron_model.token_logprobs(
            self.model, micro.tokens, micro.mask, self.parallel, self.cfg.rollout.temperature, micro.packing
        )
        if not torch.is_grad_enabled():  # recompute in a backward pass needs the masks
            micro.packing.release_mask()
        return stats

    def reference(self) -> contextlib.AbstractContextManager[None]:
        """Switch the adapters off in this block, so that the model is the one from before training."""
        return lora_megatron.disabled(self.adapters)

    @contextlib.contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Set the factors to ``values`` in this block, and restore them afterwards."""
        own = self.copied_factors()
        adapter_weights.copy_(self.factors, values)
        try:
            yield
        finally:
            adapter_weights.copy_(self.factors, own)

    # ------------------------------------------------------------------------------------------------ whole tensors

    def copied_factors(self) -> dict[str, Tensor]:
        return {name: factor.detach().clone() for name, factor in self.factors.items()}

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each whole factor with its name in a checkpoint.

        The ranks gather one tensor at a time, so every rank must iterate to the end. A tensor may share memory with a
        factor.
        """
        for name, factor in self.factors.items():
            whole = adapter_weights.whole(name, factor, factor.detach(), self.arch, self.parallel)
            yield hf_name(name, self.arch), whole

    def gathered(self, values: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the same tensors as `whole`, on the host of rank 0, and None on the other ranks.

        If ``values`` with the shapes of the factors are passed, these are gathered instead of the factors. Only one
        whole tensor is on the device at a time.
        """
        for name, value in (self.factors if values is None else values).items():
            factor = self.factors[name]
            whole = adapter_weights.whole(name, factor, value.detach(), self.arch, self.parallel, join_on_host=True)
            on_host = whole.cpu().contiguous() if self.parallel.rank == 0 else None
            del whole  # before the next one is gathered
            yield hf_name(name, self.arch), on_host

    def load_(self, tensors: Mapping[str, Tensor], ending: str = "", into: Mapping[str, Tensor] | None = None) -> None:
        """Fill the factors, or ``into``, from the whole tensors in ``tensors`` whose names end in ``ending``.

        Raises InputError, before anything has changed, if the tensors do not fit this policy or have invalid values.
        """
        pieces = adapter_weights.scatter(self.adapters, tensors, self.arch, self.parallel, ending)
        adapter_weights.copy_(self.factors if into is None else into, pieces)

    # ------------------------------------------------------------------------------------------------ comparisons

    def unequal(self, frozen: bool) -> str:
        """Return a message that names tensors that are not equal on all ranks that store them, or "" if all are equal.

        All ranks call this together. With ``frozen``, the frozen weights are compared as well as the factors.
        """
        pieces = self._factor_pieces()
        if frozen:
            for slot in huggingface.slots(self.model, self.arch, self.parallel):
                pieces |= self._frozen_pieces(slot)
        return differing(pieces, self.parallel)

    def _factor_pieces(self) -> Pieces:
        """Return the factors of this rank that other ranks store as well."""
        pieces: Pieces = {}
        for name, factor in self.factors.items():
            shard = self.parallel.tensor_rank if factor.shard_dim is not None else ""
            experts = f" of experts {self.parallel.expert_rank}" if factor.is_expert else ""
            if self.parallel.copies(factor) > 1:
                pieces[hf_name(name, self.arch), f"{shard}{experts}"] = factor
        return pieces

    def _frozen_pieces(self, slot: WeightShard) -> Pieces:
        """Return the weights of ``slot``, each named after its first block, or {} if no other rank stores them."""
        if self.parallel.copies(slot) == 1:
            return {}
        shard = str(self.parallel.tensor_rank) if slot.shard_dim is not None else ""
        pieces: Pieces = {}
        for part, tensor in slot.held().items():
            matrices = tensor if slot.is_expert else tensor[None]
            for names, matrix in zip(slot.blocks, matrices, strict=True):
                pieces[names[0] + part, shard] = matrix
        return pieces

    @torch.no_grad()
    def update_kept(self) -> dict[str, float]:
        """Return metrics that show how much of the update the rounded policy keeps. All ranks call this together.

        The update in fp32 is U = (alpha / R) B A. The policy's change C is the merged weight as it is pushed, minus the
        base weight W. If the engine keeps the factors apart, C is (alpha / R) B A of the factors as they are pushed.
        sync/update_share is <C, U> / <U, U>, which is 1 if rounding drops nothing. sync/update_error is |C - U| / |U|.
        Before the first update, U is 0, and the metrics are 1 and 0. Large weights are represented by SAMPLED_ROWS of
        their rows.

        If trainer and engine share the memory of merged experts, their log-probs cannot show a wrong merge. Then C
        comes from this memory. sync/experts_wrong is the share of its sampled elements that are not W + U, in the
        expert where most are wrong. Here W + U is computed without Adapter.merged. In a correct merge, none of 10^5
        elements differs. If the merge misses an update of B by 1e-6, 400 of them differ.
        """
        products: list[Tensor] = []  # <U, U>, <U, C - U>; .., <C - U, C - U> of each adapted weight
        counts: list[float] = []  # weight of each product, which corrects for unsampled rows and for copies on ranks
        wrong: list[Tensor] = []
        for slot in huggingface.slots(self.model, self.arch, self.parallel):
            if slot.adapter is None:
                continue
            pair, wrong_shares = self._update_and_error(slot)
            wrong += wrong_shares
            products.append(pair.flatten(1) @ pair.flatten(1).t())
            copies = min(map(self.parallel.copies, (slot.adapter.A, slot.adapter.B)))  # on this many ranks
            counts.append(slot.stored.shape.numel() / pair[0].numel() / copies)
        weights = torch.tensor(counts).to(products[0].device)
        total = self.parallel.sum_over_ranks(torch.tensordot(weights, torch.stack(products), 1))
        (own, both), (_, lost) = total.tolist()
        metrics = {
            "sync/update_share": 1 + both / own if own else 1.0,
            "sync/update_error": (lost / own) ** 0.5 if own else 0.0,
        }
        # Every rank enters this collective, whether or not it shares memory.
        worst = self.parallel.max_over_ranks(torch.cat(wrong).amax().item() if wrong else -1.0)
        if worst >= 0:
            metrics["sync/experts_wrong"] = worst
        return metrics

    def _update_and_error(self, slot: WeightShard) -> tuple[Tensor, list[Tensor]]:
        """Return U and C - U of the sampled rows, and a list of shares of wrong elements.

        U and C are as in `update_kept`. If trainer and engine share the memory of the slot's e experts, the list has
        one tensor with a share for each of them. Otherwise the list is empty.
        (2, ..., rows, columns), [(e,)]
        """
        adapter = slot.adapter
        if slot.experts is None:
            first, second = adapter.B, adapter.A
        else:
            first, second = adapter.A[slot.experts], adapter.B[slot.experts]
        scale = self.cfg.lora.alpha / self.cfg.lora.rank_of(slot.is_expert)
        every, dtype = -(-first.shape[-2] // SAMPLED_ROWS), slot.stored.dtype
        first = first[..., ::every, :]
        pair = first.new_empty(2, *first.shape[:-1], second.shape[-1])
        update, error = pair
        torch.matmul(first, second, out=update).mul_(scale)
        wrong = []
        if self.cfg.merging is Merging.NOWHERE:
            if slot.kind != "router":
                first, second = first.to(dtype).float(), second.to(dtype).float()
            change = torch.matmul(first, second).mul_(scale)
        else:
            weight = slot.rows(every)
            policy = (update + weight).to(dtype)
            if adapter.buffer is not None:
                held = adapter.buffer[slot.experts][..., ::every, :]
                wrong.append(held.ne(policy).flatten(1).mean(1, dtype=torch.float32))
                policy = held
            change = policy.float().sub_(weight)
        torch.sub(change, update, out=error)
        return pair, wrong


@torch.no_grad()
def differing(pieces: Pieces, parallel: Parallel) -> str:
    """Return a message that names pieces that are not equal on all ranks that store them, or "" if all are equal.

    All ranks call this together.
    """
    own = dict(zip(pieces, checksums(list(pieces.values())), strict=True))
    held: dict[tuple[str, str], dict[int, tuple[int, int]]] = {}  # the checksum of a piece on each rank that stores it
    for rank, pieces_of_rank in enumerate(parallel.gather_objects(own)):
        for piece, checksum in pieces_of_rank.items():
            held.setdefault(piece, {})[rank] = checksum
    unequal = []
    for (name, _), by_rank in held.items():
        if len(set(by_rank.values())) > 1:
            unequal.append(f"{name} on ranks {', '.join(map(str, by_rank))}")
    return f"{first_three(unequal)}: not equal on all ranks that store it" if unequal else ""
