"""Measures how evenly routers use the experts (RouterLoad), and replays routes (RoutingReplay).

In routing replay the trainer routes a token to the experts that an earlier pass chose for it. R3 (arXiv 2510.11370)
replays the routes of the rollout engine, and R2 replays the routes of the old policy's pass in the trainer. Only the
selection is replayed. The weights are the trainer's: the softmax over the logits of the chosen experts. If the model
does not renormalise (norm_topk_prob false), the weights are the chosen entries of the softmax over all experts. So the
router still gets a gradient.
b is the number of rows, T the number of tokens per row, and N the number of tokens in this rank's sequence shard. L is
the number of MoE layers, E the number of experts, and K the number of experts per token.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from facts.architectures import Architecture
from facts.exits import Tripped
from hardware import kernels
from model.batches import MicroBatch, Rollout
from parallel_setup import Parallel, gather

Value = TypeVar("Value")


def routers(model: torch.nn.Module, arch: Architecture) -> list[torch.nn.Module]:
    """Return Megatron's router of each MoE layer."""
    return [layer.mlp.router for layer, is_moe in zip(model.decoder.layers, arch.moe_layers, strict=True) if is_moe]


def _local(rows: Tensor, parallel: Parallel) -> Tensor:
    """Return this rank's sequence shard of ``rows``.  (b, T, ...) -> (N, ...)

    In Megatron, tokens are time-major and split over the tensor ranks.
    """
    return rows.transpose(0, 1).chunk(parallel.tensor)[parallel.tensor_rank].flatten(0, 1)


class RouterLoad:
    """The number of tokens that each expert gets in the updates of a step, and the confidence of the routers.

    The confidence is the largest probability of a token's softmax over the experts. Only forward passes count. A token
    counts once for each row that contains it, although packed rows share the tokens of their prompt. The last token of
    a row and padding do not count. So the numbers depend neither on the layout nor on the micro-batches.
    """

    def __init__(self, model: torch.nn.Module, arch: Architecture, parallel: Parallel) -> None:
        self.arch, self.parallel = arch, parallel
        self.rows: Tensor | None = None  # (N,) number of rows for which each token of the counted pass counts
        layers = routers(model, arch)
        # (L, E + 1) the tokens of each expert, then the sum of the confidence. fp32 represents counts up to 2^24
        # exactly.
        self.sums = torch.zeros(len(layers), arch.num_experts + 1, device=parallel.device)
        self.by_layer: dict[str, list[float]] = {}  # of the last step, L values each; {} if it trained no token
        for sums, router in zip(self.sums, layers, strict=True):
            router.routing = functools.partial(self._routing, router.routing, sums)

    def _routing(self, inner: Callable, sums: Tensor, logits: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Return the routes that ``inner`` computes, unchanged, and count them in ``sums``.  (tokens, E)"""
        probs, chosen = inner(logits, *args, **kwargs)
        if self.rows is not None:
            own = logits.detach().view(-1, self.arch.num_experts).float()
            # add_ is used because += would also copy the result onto itself.
            sums[:-1].add_((chosen * self.rows[:, None]).sum(0))
            sums[-1].add_(((own.amax(-1) - own.logsumexp(-1)).exp() * self.rows).sum())
        return probs, chosen

    @contextlib.contextmanager
    def counting(self, micro: MicroBatch) -> Iterator[None]:
        """Count the routes of the forward pass in this block. ``micro`` is the micro-batch of this pass.

        The backward pass must be outside the block, because its recompute must not count.
        """
        self.rows = _local(micro.packing.num_rows[None].float(), self.parallel)
        try:
            yield
        finally:
            self.rows = None

    def metrics(self) -> dict[str, float]:
        """Return the moe/... metrics of all ranks since the last call, averaged over the layers.

        ``by_layer`` then has the values of each layer. Without an MoE layer or a counted token, the metrics and
        ``by_layer`` are empty. All ranks call this together.
        """
        sums = self.parallel.sum_over_ranks(self.sums).double()
        self.sums.zero_()
        if not sums.any():
            self.by_layer = {}
            return {}
        counts, experts = sums[:, :-1], self.arch.num_experts
        share = counts / counts.sum(-1, keepdim=True)
        values = {
            "moe/load_max": share.amax(-1) * experts,
            "moe/load_entropy": torch.special.entr(share).sum(-1) / math.log(max(2, experts)),
            "moe/unused_frac": (counts == 0).double().mean(-1),
            "moe/confidence": sums[:, -1] * self.arch.experts_per_token / counts.sum(-1),
        }
        self.by_layer = {name: [round(value, 4) for value in by.tolist()] for name, by in values.items()}
        return {name: by.mean().item() for name, by in values.items()}


class RoutingReplay:
    """A wrapper around the top-k of the model's routers, which passes their choice through, records it or replaces it.

    Layer numbers count only MoE layers. A record has the routes of a pass. It stays bound to a micro-batch until the
    backward pass is done. Activation recompute routes again in that pass and must choose the same experts.
    """

    def __init__(self, model: torch.nn.Module, arch: Architecture, parallel: Parallel) -> None:
        self.arch, self.parallel = arch, parallel
        self.routes: Tensor | None = None  # (N, L, K) of the bound micro-batch
        self.replayed: Tensor | None = None  # (N,) number of rows with a record for the token; 0: the router chooses
        self.written: dict[int, Tensor] | None = None  # layer -> (N, K), during `record`
        self.uses = [0] * sum(arch.moe_layers)  # how often each layer has read the bound record
        self.counting = False
        # (2,) numbers of (token, layer) pairs: those whose top-k differs from the record, and all pairs
        self.counts = torch.zeros(2, dtype=torch.int64, device=parallel.device)
        for index, router in enumerate(routers(model, arch)):
            router.routing = functools.partial(self._routing, router.routing, index)

    def _routing(self, native: Callable, layer: int, logits: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Return the weights of the experts for each token of one MoE layer, and whether the token uses each expert.

        The experts are those of the record or, without one, those that the router chooses. If this object neither
        records nor replays, ``native``, which is Megatron's routing, computes both.  (tokens, E) -> (N, E), (N, E)
        """
        if self.routes is None and self.written is None:
            return native(logits, *args, **kwargs)
        logits = logits.view(-1, self.arch.num_experts)
        chosen = logits.topk(self.arch.experts_per_token, dim=-1).indices  # (N, K)
        if self.routes is not None:
            record = self.routes[:, layer]
            if self.counting and not self.uses[layer]:  # a recompute is not counted
                same = (kernels.sortable(chosen).sort(-1).values == kernels.sortable(record).sort(-1).values).all(-1)
                self.counts += torch.stack([(~same * self.replayed).sum(), self.replayed.sum()])
            chosen = torch.where(self.replayed[:, None] > 0, record, chosen)
            self.uses[layer] += 1
        if self.written is not None:
            self.written[layer] = chosen
        weights = routing_weights(logits, chosen, self.arch.norm_topk_prob)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    @contextlib.contextmanager
    def replaying(self, routes: Tensor, replayed: Tensor, *, count: bool = False) -> Iterator[None]:
        """Use ``routes`` in every forward pass and recompute in this block, for the tokens where ``replayed`` is not 0.

        ``replayed`` is the number of rows for which a token counts, because packed rows share the tokens of their
        prompt. With ``count``, differing_share includes this pass. Raises Tripped unless every layer has used the
        record when the block ends, because a run with an unused record would only seem to replay. Both tensors have
        whole rows, of which each rank takes its sequence shard.  (b, T, L, K), (b, T)
        """
        self.routes = _local(routes, self.parallel).long()
        self.replayed = _local(replayed, self.parallel)
        self.uses, self.counting = [0] * len(self.uses), count
        try:
            yield
            if not all(self.uses):
                raise Tripped(f"routing replay: not every MoE layer read its record; reads by layer: {self.uses}")
        finally:
            self.routes = self.replayed = None

    def record(self, run: Callable[[], Value], num_rows: int) -> tuple[Value, Tensor]:
        """Return the value of ``run``, which makes one forward pass of ``num_rows`` rows, and the routes of that pass.

        All tensor ranks call this together, and each gets the routes of the whole rows as uint8.

        routes: (b, T, L, K)
        """
        self.written = {}
        try:
            value = run()
            routes = torch.stack([self.written[layer] for layer in range(len(self.uses))], dim=1).to(torch.uint8)
        finally:
            self.written = None
        by_rank = gather(routes, self.parallel.tensor, self.parallel.tensor_group)
        return value, by_rank.flatten(0, 1).unflatten(0, (-1, num_rows)).transpose(0, 1)  # tokens are time-major

    def differing_share(self) -> float:
        """Return the share of (token, layer) pairs, over all ranks, where the trainer's top-k differs from the record.

        Only the pairs since the last call count. All ranks call this together.
        """
        counts = self.parallel.sum_over_ranks(self.counts.float())
        self.counts.zero_()
        return (counts[0] / counts[1].clamp(min=1)).item()


def routing_weights(logits: Tensor, chosen: Tensor, norm_topk_prob: bool) -> Tensor:
    """Return the weights of the chosen experts in fp32, exactly as Megatron computes them.  (N, E), (N, K) -> (N, K)"""
    if norm_topk_prob:
        return logits.float().gather(1, chosen).softmax(dim=-1)
    return logits.float().softmax(dim=-1).gather(1, chosen)


# ------------------------------------------------------------------------------------------------ records of the engine


def collect(
    batch: Rollout,
    own: list[list[np.ndarray]],
    shares: list[list[list[int]]],
    arch: Architecture,
    parallel: Parallel,
) -> dict[int, Tensor]:
    """Return the engine's routes of every sequence that this rank trains: sequence -> (row length - 1, L, K).

    ``own`` has the routes of the completions that this rank sampled. ``shares`` is the result of batches.plan:
    [micro-batch][data rank] -> sequences. The tensor ranks of a data rank train the same sequences. Ranks that
    sampled together have the same completions, and the first of these ranks sends the routes. All ranks call this
    together.
    """
    group, replicas = batch.rewards.shape[1], parallel.world_size // batch.ranks_alike
    needed_by = {
        sequence: [data_rank * parallel.tensor + i for i in range(parallel.tensor)]
        for share in shares
        for data_rank, sequences in enumerate(share)
        for sequence in sequences
    }
    records = {
        (parallel.rank // batch.ranks_alike + i * replicas) * group + j: torch.from_numpy(routes)
        for i, group_routes in enumerate(own)
        for j, routes in enumerate(group_routes)
    }
    owner = {sequence: sequence // group % replicas * batch.ranks_alike for sequence in needed_by}
    shapes = {
        sequence: (batch.row_length(sequence) - 1, sum(arch.moe_layers), arch.experts_per_token)
        for sequence in needed_by
    }
    return exchange(records, owner, needed_by, shapes, parallel.rank)


def exchange(
    own: dict[int, Tensor], owner: dict[int, int], needed_by: dict[int, list[int]], shapes: dict[int, tuple], rank: int
) -> dict[int, Tensor]:
    """Return the records of the sequences that this rank trains. One rank sends each record to all ranks that need it.

    ``own`` maps each sequence whose record is on this rank to the record, a uint8 tensor. The other maps are equal on
    every rank. ``owner`` has the rank that sends the record of a sequence, ``needed_by`` the ranks that train the
    sequence, and ``shapes`` the shape of its record. All ranks call this together, in one all-to-all of uint8.
    """
    peers = range(dist.get_world_size())
    outgoing = [_message(rank, peer, owner, needed_by) for peer in peers]
    incoming = [_message(peer, rank, owner, needed_by) for peer in peers]
    size = {s: math.prod(shapes[s]) for s in needed_by}
    sent = [sum(size[s] for s in message) for message in outgoing]
    received = [sum(size[s] for s in message) for message in incoming]
    send = torch.cat([torch.empty(0, dtype=torch.uint8), *(own[s].flatten() for s in chain.from_iterable(outgoing))])
    receive = torch.empty(sum(received), dtype=torch.uint8)
    dist.all_to_all_single(receive, send, received, sent)
    wanted = [*chain.from_iterable(incoming)]
    return {s: p.view(shapes[s]) for s, p in zip(wanted, receive.split([size[s] for s in wanted]), strict=True)}


def _message(sender: int, receiver: int, owner: dict[int, int], needed_by: dict[int, list[int]]) -> list[int]:
    """Return the sequences whose records ``sender`` sends to ``receiver``, in the order of the message."""
    return sorted(s for s, ranks in needed_by.items() if owner[s] == sender and receiver in ranks)
