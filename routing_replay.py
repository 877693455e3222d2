"""Routing replay: the experts that a token met when it was sampled are the experts that it trains.

R3 (arXiv 2510.11370) replays the rollout engine's routes, R2 those of the old policy's own forward pass in the trainer.
Only the selection is replayed, the weights stay the trainer's: softmax over the chosen experts' live logits, or, where
the model does not renormalise (norm_topk_prob false), the chosen entries of the softmax over all. So the router keeps
its gradient. b rows, T tokens, L MoE layers, K experts a token, E experts, N tokens of this rank's sequence shard.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from engines.interface import Completion
from hf_config import Architecture
from parallel_setup import Parallel
from rollout import Rollout


class RoutingReplay:
    """Stands between the model's routers and their top-k: lets it be, writes it down, or puts a record in its place.

    Layers count MoE layers only. A record is bound to a micro-batch for as long as anything runs on it: activation
    recompute routes again in the backward pass and must find the same.
    """

    def __init__(self, model: torch.nn.Module, arch: Architecture, parallel: Parallel) -> None:
        self.arch, self.parallel = arch, parallel
        self.routes: Tensor | None = None  # (N, L, K) of the bound micro-batch
        self.replayed: Tensor | None = None  # (N,) which tokens have a record; the others are routed natively
        self.written: list[Tensor | None] | None = None  # per layer (N, K), while recording
        self.uses = [0] * sum(arch.moe_layers)  # how often each layer read the bound record
        self.counting = False
        self.differing = self.compared = 0  # (token, layer) pairs whose own choice was another set of experts
        moe_layers = [layer for layer, is_moe in zip(model.decoder.layers, arch.moe_layers, strict=True) if is_moe]
        for index, layer in enumerate(moe_layers):
            self._take_over(layer.mlp.router, index)

    def _take_over(self, router: torch.nn.Module, layer: int) -> None:
        native = router.routing

        def routing(logits: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
            if self.routes is None and self.written is None:
                return native(logits, *args, **kwargs)
            return self._route(logits.view(-1, self.arch.num_experts), layer)

        router.routing = routing

    def _route(self, logits: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """What Megatron's router returns, with the recorded experts where there is a record.  (N, E) -> (N, E) twice"""
        chosen = logits.topk(self.arch.experts_per_token, dim=-1).indices  # (N, K)
        if self.routes is not None:
            record = self.routes[:, layer]
            if self.counting and not self.uses[layer]:  # a recompute is not counted again
                same = (chosen.sort(-1).values == record.sort(-1).values).all(-1)
                self.differing += int((~same & self.replayed).sum())
                self.compared += int(self.replayed.sum())
            chosen = torch.where(self.replayed[:, None], record, chosen)
            self.uses[layer] += 1
        if self.written is not None:
            self.written[layer] = chosen
        weights = routing_weights(logits, chosen, self.arch.norm_topk_prob)
        probs = torch.zeros_like(logits).scatter(1, chosen, weights.to(logits.dtype))
        return probs, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    @contextlib.contextmanager
    def replaying(self, routes: Tensor, replayed: Tensor, *, count: bool = False) -> Iterator[None]:
        """Every forward and recompute inside the block is routed by ``routes`` where ``replayed`` is true.

        (b, T, L, K), (b, T) of the whole rows; each rank takes its sequence shard. ``count``: this pass is the policy's
        own, which differing_share compares with the record. Every layer must have used the
        record when the block ends: a record that nobody read is a run that only looks replayed.
        """
        self.routes = self._local(routes).long()
        self.replayed = self._local(replayed)
        self.uses, self.counting = [0] * len(self.uses), count
        try:
            yield
            assert all(self.uses), f"routing replay: not every MoE layer read its record: {self.uses}"
        finally:
            self.routes = self.replayed = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[list]:
        """Collects the routes of one forward pass: afterwards the yielded list holds one (T x b, L, K) uint8 tensor."""
        self.written, found = [None] * len(self.uses), []
        try:
            yield found
            found.append(self._whole(torch.stack(self.written, dim=1)))
        finally:
            self.written = None

    def differing_share(self) -> float:
        """Share of replayed (token, layer) pairs, over all ranks, where the trainer's own top-k was another set.

        Collective; counts since the last call.
        """
        counts = self.parallel.sum_over_ranks(torch.tensor([self.differing, self.compared], dtype=torch.float32))
        self.differing = self.compared = 0
        return (counts[0] / counts[1].clamp(min=1)).item()

    def _local(self, rows: Tensor) -> Tensor:
        """(b, T, ...) -> (N, ...): Megatron's tokens are time-major, and cut over the tensor ranks along time."""
        return rows.transpose(0, 1).chunk(self.parallel.tensor)[self.parallel.tensor_rank].flatten(0, 1)

    def _whole(self, routes: Tensor) -> Tensor:
        """(N, L, K) -> (T x b, L, K) uint8, gathered over the tensor ranks; `rows_of` gives it the rows' shape."""
        routes = routes.to(torch.uint8).contiguous()
        if self.parallel.tensor == 1:
            return routes
        out = routes.new_empty((self.parallel.tensor * len(routes), *routes.shape[1:]))
        dist.all_gather_into_tensor(out, routes, group=self.parallel.tensor_group)
        return out


def rows_of(routes: Tensor, num_rows: int) -> Tensor:
    """(T x b, L, K), time-major -> (b, T, L, K)"""
    return routes.unflatten(0, (-1, num_rows)).transpose(0, 1)


def routing_weights(logits: Tensor, chosen: Tensor, norm_topk_prob: bool) -> Tensor:
    """Weights of the chosen experts, in fp32, from live logits, to the last bit as Megatron forms them natively.

    (N, E), (N, K) -> (N, K)
    """
    if norm_topk_prob:
        return logits.float().gather(1, chosen).softmax(dim=-1)
    return logits.float().softmax(dim=-1).gather(1, chosen)


# ------------------------------------------------------------------------------------------------ who needs what


def collect(
    batch: Rollout,
    own: list[list[Completion]],
    shares: list[list[list[int]]],
    arch: Architecture,
    parallel: Parallel,
    sampler_tensor: int = 1,
) -> dict[int, Tensor]:
    """The engine's routes of every sequence that this rank trains, sequence -> (row length - 1, L, K). Collective.

    ``shares``: rollout.plan's [micro-batch][data rank] -> sequences. The tensor ranks of one data rank train the same.
    ``sampler_tensor``: ranks of one replica of the sampler, the first of which sends what they sampled.
    """
    group, replicas = batch.rewards.shape[1], parallel.world_size // sampler_tensor
    needed_by = {
        sequence: [data_rank * parallel.tensor + i for i in range(parallel.tensor)]
        for share in shares
        for data_rank, sequences in enumerate(share)
        for sequence in sequences
    }
    assert parallel.rank == parallel.data_rank * parallel.tensor + parallel.tensor_rank
    rest = (sum(arch.moe_layers), arch.experts_per_token)
    records = {
        (parallel.rank // sampler_tensor + i * replicas) * group + j: torch.from_numpy(answer.routed_experts)
        for i, answers in enumerate(own)
        for j, answer in enumerate(answers)
    }
    owner = {sequence: sequence // group % replicas * sampler_tensor for sequence in needed_by}
    shapes = {sequence: (batch.row_length(sequence) - 1, *rest) for sequence in needed_by}
    for sequence, record in records.items():
        assert sequence not in shapes or record.shape == shapes[sequence], (record.shape, shapes[sequence])
    received = exchange(records, owner, needed_by, shapes, parallel.rank)
    for sequence, record in received.items():
        distinct = record.sort(dim=-1).values.diff(dim=-1).ne(0).all()
        if not distinct or int(record.max()) >= arch.num_experts:
            raise RuntimeError(
                f"routing replay: the record of sequence {sequence} repeats an expert or names one of more than "
                f"{arch.num_experts}; the engine must return logical ids (no expert load balancing)"
            )
    return received


def exchange(
    own: dict[int, Tensor], owner: dict[int, int], needed_by: dict[int, list[int]], shapes: dict[int, tuple], rank: int
) -> dict[int, Tensor]:
    """The records of the sequences that this rank trains, each sent once by the rank that sampled it.

    ``own``: this rank's records, sequence -> uint8. ``owner``, ``needed_by``, ``shapes``: the same on every rank: who
    holds a sequence, who trains it, and its record's shape. Collective; uint8 rows and nothing else travel.
    """
    ranks = dist.get_world_size()
    order = sorted(needed_by)
    outgoing = [[s for s in order if owner[s] == rank and peer in needed_by[s]] for peer in range(ranks)]
    incoming = [[s for s in order if owner[s] == peer and rank in needed_by[s]] for peer in range(ranks)]
    size = {s: int(torch.Size(shapes[s]).numel()) for s in order}
    empty = torch.empty(0, dtype=torch.uint8)
    send = torch.cat([empty, *(own[s].flatten() for peer in outgoing for s in peer)])
    splits = [[sum(size[s] for s in peer) for peer in side] for side in (outgoing, incoming)]
    receive = torch.empty(sum(splits[1]), dtype=torch.uint8)
    dist.all_to_all_single(receive, send, splits[1], splits[0])
    wanted = [s for peer in incoming for s in peer]
    parts = receive.split([size[s] for s in wanted])
    return {s: part.view(shapes[s]) for s, part in zip(wanted, parts, strict=True)}
