"""LoRA (arXiv 2106.09685) on Megatron's column and row parallel linears, on grouped experts, and on the router.

y = base(x) + (alpha / R) B A x in fp32 factors. A is random and B is zero, so an adapted model starts as its base.
A column-parallel linear holds A whole and B split by output rows; a row-parallel linear holds A split by input columns
and B whole. E local experts, R rank. Merging needs no communication: each rank adds its own B A to its own shard.
"""

import contextlib
import math
import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from config import derive_seed
from input_files import InputError
from knobs import LoraConfig
from model_megatron import GroupedLinear
from parallel_setup import Parallel

# ------------------------------------------------------------------------------------------------ the adapters


def _factor(
    weight: Tensor, shape: tuple[int, ...], shard_dim: int | None, partial_over: str | None
) -> torch.nn.Parameter:
    """A zero fp32 factor on the device of ``weight``, marked with its place in the layout.

    ``shard_dim``: the dimension that is split over ranks; None: every rank of the group holds the whole factor, and if
    ``partial_over`` names the group, each of its ranks computes a partial gradient. Parallel.sync_gradients_ and the
    checkpoints read these marks. The factor is made on its final device, because Module.to may replace a parameter.
    """
    factor = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=weight.device))
    factor.is_expert, factor.shard_dim = len(shape) == 3, shard_dim
    factor.partial_over = partial_over if shard_dim is None else None
    return factor


class Adapter(torch.nn.Module):
    """A low-rank update (alpha / R) B A, which can be switched off."""

    def __init__(self, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.scale, self.dropout, self.enabled = alpha / rank, dropout, True

    def delta(self, expert: int | None = None) -> Tensor:
        """The shard of the update on this rank, fp32.  -> (out, in); with ``expert``, of one local expert: (in, out)"""
        return self.scale * (self.B @ self.A if expert is None else self.A[expert] @ self.B[expert])


class LoRALinear(Adapter):
    """A column or row parallel linear with its low-rank update.  A (R, in), B (out, R), sharded like the base"""

    def __init__(
        self, base: torch.nn.Module, rank: int, alpha: float, dropout: float, is_column: bool, tensor: int
    ) -> None:
        super().__init__(rank, alpha, dropout)
        self.base, self.is_column, self.sequence_parallel = base, is_column, tensor > 1
        # With sequence parallelism every tensor rank sees other tokens, so the factor that all of them hold whole gets
        # a partial gradient on each.
        partial_over = "tensor" if self.sequence_parallel else None
        out_size, in_size = base.weight.shape
        self.A = _factor(base.weight, (rank, in_size), None if is_column else 1, partial_over)
        self.B = _factor(base.weight, (out_size, rank), 0 if is_column else None, partial_over)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from megatron.core.tensor_parallel import mappings

        y, bias = self.base(x)
        if not self.enabled:
            return y, bias
        low = F.linear(F.dropout(x, self.dropout, self.training), self.A.to(x.dtype))  # (.., R)
        if self.sequence_parallel and self.is_column:
            # Gathering R columns is cheaper than gathering the hidden size. The backward pass sums their gradient over
            # the tensor ranks.
            low = mappings.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        elif self.sequence_parallel:
            low = mappings.reduce_scatter_to_sequence_parallel_region(low)
        return y + F.linear(self.scale * low, self.B.to(x.dtype)), bias  # scaled where only R columns are multiplied


class LoRAGroupedLinear(Adapter):
    """Grouped expert weights with one low-rank update per expert.  A (E, in, R), B (E, R, out)

    The update is two thin grouped products, so neither pass ever forms an (E, in, out) tensor.
    """

    def __init__(
        self, base: GroupedLinear, rank: int, alpha: float, dropout: float, is_column: bool, expert_tensor: int
    ) -> None:
        super().__init__(rank, alpha, dropout)
        self.base = base
        partial_over = "expert_tensor" if expert_tensor > 1 else None
        experts, in_size, out_size = base.weight.shape
        self.A = _factor(base.weight, (experts, in_size, rank), None if is_column else 1, partial_over)
        self.B = _factor(base.weight, (experts, rank, out_size), 2 if is_column else None, partial_over)

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        y = self.base(x, tokens_per_expert)
        if not self.enabled:
            return y
        low = kernels.grouped_mm(F.dropout(x, self.dropout, self.training), self.A.to(x.dtype), tokens_per_expert)
        return y.add_(kernels.grouped_mm(self.scale * low, self.B.to(x.dtype), tokens_per_expert))


class LoRARouter(Adapter):
    """A low-rank update of the router's weight, added to its logits in fp32.  A (R, h), B (all experts, R)"""

    def __init__(self, router: torch.nn.Module, rank: int, alpha: float, dropout: float, tensor: int) -> None:
        super().__init__(rank, alpha, dropout)
        partial_over = "tensor" if tensor > 1 else None
        self.A = _factor(router.weight, (rank, router.weight.shape[1]), None, partial_over)
        self.B = _factor(router.weight, (router.weight.shape[0], rank), None, partial_over)
        base_gating = router.gating

        def gating(x: Tensor) -> Tensor:
            logits = base_gating(x)
            if not self.enabled:
                return logits
            x = F.dropout(x.float(), self.dropout, self.training)
            return logits + self.scale * F.linear(F.linear(x, self.A), self.B)

        router.gating = gating


# ------------------------------------------------------------------------------------------------ on a model


def attach(model: torch.nn.Module, cfg: LoraConfig, parallel: Parallel, seed: int) -> dict[str, Adapter]:
    """Freeze ``model``, put adapters on every target, and return them by module name, in the order of the model.

    Raises InputError for a target that this model does not have.
    """
    modules = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in cfg.targets}
    missing = set(cfg.targets) - {name.rpartition(".")[2] for name in modules}
    if missing:
        raise InputError(f"lora.targets: {', '.join(sorted(missing))} matches no module of this model")
    model.requires_grad_(False)
    for name, module in modules.items():
        parent, _, target = name.rpartition(".")
        if target == "router":
            module.lora = LoRARouter(module, cfg.rank, cfg.alpha, cfg.dropout, parallel.tensor)
            continue
        is_expert = isinstance(module, GroupedLinear)
        kind, rank = (LoRAGroupedLinear, cfg.expert_rank or cfg.rank) if is_expert else (LoRALinear, cfg.rank)
        is_column, shards = target in ("linear_qkv", "linear_fc1"), parallel.shards(is_expert)
        setattr(model.get_submodule(parent), target, kind(module, rank, cfg.alpha, cfg.dropout, is_column, shards.size))
    adapters = attached(model)
    for name, adapter in adapters.items():
        _initialise_(adapter, name, parallel, seed)
    return adapters


@torch.no_grad()
def _initialise_(adapter: Adapter, name: str, parallel: Parallel, seed: int) -> None:
    """Draw A uniformly from +-1/sqrt(in) as PEFT does. The draw depends on (seed, name, expert), not on the layout."""
    factor, pieces, in_dim = adapter.A, {name: adapter.A}, 1
    if factor.is_expert:
        first = parallel.expert_rank * len(factor)
        pieces, in_dim = {f"{name}.{first + i}": piece for i, piece in enumerate(factor)}, 0
    shards = parallel.shards(factor.is_expert)
    size, rank = (1, 0) if factor.shard_dim is None else (shards.size, shards.rank)
    for key, piece in pieces.items():
        shape = list(piece.shape)
        shape[in_dim] *= size
        bound = 1 / math.sqrt(shape[in_dim])
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", key))
        whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        piece.copy_(whole.chunk(size, in_dim)[rank])


def factors(adapters: dict[str, Adapter]) -> dict[str, torch.nn.Parameter]:
    """Every trainable tensor by name, `<module>.A` and `<module>.B`."""
    return {f"{name}.{letter}": getattr(adapter, letter) for name, adapter in adapters.items() for letter in "AB"}


def whole_shape(factor: torch.nn.Parameter, parallel: Parallel) -> tuple[int, ...]:
    """Shape of the whole tensor of which ``factor`` is a shard."""
    shape = list(factor.shape)
    if factor.is_expert:
        shape[0] *= parallel.expert
    if factor.shard_dim is not None:
        shape[factor.shard_dim] *= parallel.shards(factor.is_expert).size
    return tuple(shape)


def attached(model: torch.nn.Module) -> dict[str, Adapter]:
    """The adapters on ``model`` by module name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


@contextlib.contextmanager
def disabled(adapters: dict[str, Adapter]) -> Iterator[None]:
    """A context in which every adapter is off, so that the model is the one before training."""
    for adapter in adapters.values():
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters.values():
            adapter.enabled = True


def describe(adapters: dict[str, Adapter], parallel: Parallel) -> str:
    """What is trained on all ranks: the total, and one line for each kind of module, with layers and experts."""
    kinds: dict[str, list[Adapter]] = {}
    for name, adapter in adapters.items():
        kinds.setdefault(re.sub(r"^.*?layers\.\d+\.", "", name).replace(".", " "), []).append(adapter)
    lines, total = [], 0
    for kind, members in kinds.items():
        size = sum(math.prod(whole_shape(factor, parallel)) for module in members for factor in (module.A, module.B))
        experts = f" x {len(members[0].A) * parallel.expert} experts" if members[0].A.is_expert else ""
        lines.append(f"  {kind}: {len(members)} layers{experts}, {size:,} parameters")
        total += size
    mine = sum(factor.numel() for factor in factors(adapters).values())
    first = f"LoRA: {total:,} trainable parameters ({total * 4 / 2**20:.2f} MiB in fp32), {mine:,} on this rank"
    return "\n".join([first, *lines])
