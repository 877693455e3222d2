"""Adds LoRA (arXiv 2106.09685) to Megatron's linear layers, to the grouped experts, and to the router.

y = base(x) + (alpha / R) B A x, with factors in fp32. A starts random and B starts at zero, so an adapted model starts
as its base. For a column-parallel linear, each rank has the whole A and a shard of B's output rows. For a row-parallel
linear, each rank has a shard of A's input columns and the whole B. E is the number of local experts and R the rank.
Merging needs no communication, because each rank adds its own B A to its own shard.

When weights are merged in bf16, the sampler gets W + (alpha / R) B A rounded to bf16. The rounding removes most of a
small update. To keep the trained policy equal to the policy that samples, the forward pass then multiplies by the same
rounded weight. A and B get the gradient that they would have without the rounding (a straight-through estimator, arXiv
1308.3432).
"""

import contextlib
import itertools
import math
import re
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from facts.exits import InputError
from facts.limits import merged_together
from facts.seeds import derive_seed
from hardware import kernels
from knobs import Config, LoraConfig, Merging
from model.megatron_model import GroupedLinear
from parallel_setup import Factor, Parallel

# ------------------------------------------------------------------------------------------------ the adapters


class _GradientOf(torch.autograd.Function):
    """A function with the value ``y``. Its gradient goes to ``y`` and ``update``, as if it returned their sum."""

    @staticmethod
    def forward(ctx, y: Tensor, update: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad


@contextlib.contextmanager
def _using(module: torch.nn.Module, weight: Tensor) -> Iterator[None]:
    """Make ``module`` compute with ``weight`` in this block. Autograd saves ``weight`` for the backward pass."""
    own = module._parameters.get("weight")  # None for int4 experts, which have codes instead
    module._parameters["weight"] = weight
    try:
        yield
    finally:
        if own is None:
            del module._parameters["weight"]
        else:
            module._parameters["weight"] = own


def merge(weight: Tensor, first: Tensor, second: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Compute ``weight`` + scale x (first @ second) in fp32, and round once to the type of ``weight``.

    The result is written into ``out`` if it is given. A stack of matrices takes as many kernels as one matrix.
    (torch.baddbmm would round differently.)
    (.., m, n), fp32 (.., m, R), fp32 (.., R, n) -> (.., m, n)
    """
    merged = (first @ second).mul_(scale).add_(weight)
    return merged.to(weight.dtype) if out is None else out.copy_(merged)


def merged_parts(shape: tuple[int, ...]) -> list[slice]:
    """Split the experts of an (E, m, n) tensor into slices, each of which is merged in one call of `merge`.

    The trainer and the push use the same slices, because a product over different slices may round differently.
    """
    experts, rows, columns = shape
    size = merged_together(rows * columns)
    return [slice(first, min(first + size, experts)) for first in range(0, experts, size)]


def _in_passes(factor: Factor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return ``scale`` x ``factor`` as a copy in ``dtype``. Its gradient is scaled and added to that of ``factor``.

    One kernel scales and adds the gradient in fp32. If autograd knew how the copy is computed, each backward pass would
    first cast and scale the gradient in other kernels.
    """
    copy = torch.mul(factor.detach(), scale, out=torch.empty_like(factor, dtype=dtype)).requires_grad_()

    def add_gradient(copy: Tensor) -> None:
        if factor.grad is None:
            factor.grad = torch.zeros_like(factor)
        factor.grad.add_(copy.grad, alpha=scale)
        copy.grad = None

    copy.register_post_accumulate_grad_hook(add_gradient)
    return copy


class Adapter(torch.nn.Module):
    """A low-rank update (alpha / R) B A that can be switched off.

    If ``merges`` is true, the forward pass uses the merged weight (see the docstring of this file).
    """

    def __init__(self, rank: int, alpha: float, merges: bool) -> None:
        super().__init__()
        self.scale, self.merges, self.enabled = alpha / rank, merges, True
        # Only for routed experts: the engine's memory, if the trainer shares it, and the versions of A and B that are
        # merged into it.
        self.buffer: Tensor | None = None
        self.buffer_changes: tuple[int, int] | None = None
        # The A and (alpha / R) B that were last computed for the passes, after their dtype and the versions of A and B.
        self.working: tuple[tuple[torch.dtype, int, int], Tensor, Tensor] | None = None

    def working_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return copies of A and (alpha / R) B in ``dtype``, for the passes.

        The gradients of the copies are added to those of A and B. The copies are computed again only if A, B or
        ``dtype`` has changed.
        """
        state = dtype, self.A._version, self.B._version
        if self.working is None or self.working[0] != state:
            self.working = state, _in_passes(self.A, 1.0, dtype), _in_passes(self.B, self.scale, dtype)
        return self.working[1:]

    @torch.no_grad()
    def merged(self, weight: Tensor, experts: slice | None = None, out: Tensor | None = None) -> Tensor:
        """Compute W + (alpha / R) B A for ``weight``, a shard of W, in fp32, and round once.

        The result is written into ``out`` if it is given. The shape of the shard is (out, in), or (e, in, out) for the
        e local experts in the slice ``experts``.
        """
        return merge(weight, *self.products(experts), self.scale, out)

    def products(self, experts: slice | None) -> tuple[Tensor, Tensor]:
        """Return the two factors in the order of their product in `merged`. ``experts`` is a slice of the experts."""
        return (self.B, self.A) if experts is None else (self.A[experts], self.B[experts])


class LoRALinear(Adapter):
    """A column- or row-parallel linear layer with a low-rank update. The factors are sharded like the base.

    A is (R, in) and B is (out, R).
    """

    def __init__(
        self, base: torch.nn.Module, rank: int, alpha: float, merges: bool, *, is_column: bool, tensor: int
    ) -> None:
        super().__init__(rank, alpha, merges)
        self.base, self.is_column, self.sequence_parallel = base, is_column, tensor > 1
        # With sequence parallelism each tensor rank sees different tokens, so the factor that is not sharded gets only
        # a part of its gradient on each rank.
        is_partial = self.sequence_parallel
        weight = base.weight
        out_size, in_size = weight.shape
        self.A = Factor.zeros(weight.device, (rank, in_size), None if is_column else 1, is_partial)
        self.B = Factor.zeros(weight.device, (out_size, rank), 0 if is_column else None, is_partial)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if not (self.enabled and self.merges):
            y, bias = self.base(x)
            return y + self._update(x) if self.enabled else y, bias
        with _using(self.base, self.merged(self.base.weight)):
            y, bias = self.base(x)
        return _GradientOf.apply(y, self._update(x.detach())) if torch.is_grad_enabled() else y, bias

    def _update(self, x: Tensor) -> Tensor:
        """Compute (alpha / R) B A x, in the shape of the base's output."""
        from megatron.core.tensor_parallel import mappings

        first, second = self.working_factors(x.dtype)
        low = F.linear(x, first)  # (.., R)
        if self.sequence_parallel and self.is_column:
            # Gathering R columns is cheaper than gathering the hidden size. The backward pass sums the gradient of
            # these columns over the tensor ranks.
            low = mappings.gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
        elif self.sequence_parallel:
            low = mappings.reduce_scatter_to_sequence_parallel_region(low)
        return F.linear(low, second)


class LoRAGroupedLinear(Adapter):
    """Grouped expert weights with one low-rank update per expert. A is (E, in, R) and B is (E, R, out).

    The update takes two grouped matrix products through the small dimension R. For it, neither the forward nor the
    backward pass creates an (E, in, out) tensor. If there is a ``buffer`` (E, in, out), it is the memory of the weights
    with which the engine samples. The merged weight is computed in this buffer once per optimizer step.
    """

    def __init__(self, base: GroupedLinear, rank: int, alpha: float, merges: bool) -> None:
        super().__init__(rank, alpha, merges)
        self.base = base
        experts, in_size, out_size = base.shape
        device = next(itertools.chain(base.parameters(), base.buffers())).device
        self.A = Factor.zeros(device, (experts, in_size, rank))
        self.B = Factor.zeros(device, (experts, rank, out_size))

    def forward(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        if not (self.enabled and self.merges):
            y = self.base(x, tokens_per_expert)
            return y.add_(self._update(x, tokens_per_expert)) if self.enabled else y
        with _using(self.base, self.weight()):
            y = self.base(x, tokens_per_expert)
        return _GradientOf.apply(y, self._update(x.detach(), tokens_per_expert)) if torch.is_grad_enabled() else y

    @torch.no_grad()
    def weight(self) -> Tensor:
        """Return W + (alpha / R) B A of all local experts, in a new tensor or in `buffer`.

        `buffer` is computed again only if A or B has changed. torch counts the changes of a tensor in _version. Learner
        increments it after each optimizer step, because the optimizer's kernels may not do so. If a change were not
        counted, the check of every push (Policy.update_kept) would find the outdated weight.
        """
        changes = self.A._version, self.B._version
        if self.buffer is not None and self.buffer_changes == changes:
            return self.buffer
        weight = self.buffer
        if weight is None:
            weight = torch.empty(self.base.shape, dtype=self.base.dtype, device=self.A.device)
        for part in merged_parts(self.base.shape):
            self.merged(self.base.matrices(part), part, out=weight[part])
        self.buffer_changes = changes
        return weight

    def _update(self, x: Tensor, tokens_per_expert: Tensor) -> Tensor:
        first, second = self.working_factors(x.dtype)
        return kernels.grouped_mm(kernels.grouped_mm(x, first, tokens_per_expert), second, tokens_per_expert)


class LoRARouter(Adapter):
    """A low-rank update of the router's weight. Unless it is merged, it is added to the router's logits in fp32.

    A is (R, hidden size) and B is (number of all experts, R).
    """

    def __init__(self, router: torch.nn.Module, rank: int, alpha: float, merges: bool, *, tensor: int) -> None:
        super().__init__(rank, alpha, merges)
        self.A = Factor.zeros(router.weight.device, (rank, router.weight.shape[1]), is_partial=tensor > 1)
        self.B = Factor.zeros(router.weight.device, (router.weight.shape[0], rank), is_partial=tensor > 1)
        base_gating = router.gating

        def update(x: Tensor) -> Tensor:
            return F.linear(F.linear(x.float(), self.A), self.B.mul(self.scale))

        def gating(x: Tensor) -> Tensor:
            if not (self.enabled and self.merges):
                return base_gating(x) + update(x) if self.enabled else base_gating(x)
            with _using(router, self.merged(router.weight)):
                logits = base_gating(x)
            return _GradientOf.apply(logits, update(x.detach())) if torch.is_grad_enabled() else logits

        router.gating = gating


# ------------------------------------------------------------------------------------------------ on a model


def attach(
    model: torch.nn.Module, cfg: LoraConfig, parallel: Parallel, seed: int, merges: bool = False
) -> dict[str, Adapter]:
    """Freeze ``model``, put an adapter on every target, and return the adapters by module name, in the model's order.

    If ``merges`` is true, the forward passes use the merged weights (see Adapter). Raises InputError for a target that
    this model does not have.
    """
    modules = {name: module for name, module in model.named_modules() if name.rpartition(".")[2] in cfg.targets}
    missing = set(cfg.targets) - {name.rpartition(".")[2] for name in modules}
    if missing:
        raise InputError(f"lora.targets: {', '.join(sorted(missing))} matches no module of this model; remove it")
    model.requires_grad_(False)
    for name, module in modules.items():
        parent, _, target = name.rpartition(".")
        if target == "router":
            module.lora = LoRARouter(module, cfg.rank, cfg.alpha, merges, tensor=parallel.tensor)
            continue
        if isinstance(module, GroupedLinear):
            adapter: Adapter = LoRAGroupedLinear(module, cfg.rank_of(True), cfg.alpha, merges)
        else:
            is_column = target in ("linear_qkv", "linear_fc1")
            adapter = LoRALinear(module, cfg.rank, cfg.alpha, merges, is_column=is_column, tensor=parallel.tensor)
        setattr(model.get_submodule(parent), target, adapter)
    adapters = attached(model)
    for name, adapter in adapters.items():
        _initialise_(adapter, name, parallel, seed)
    return adapters


def attach_for(model: torch.nn.Module, cfg: Config, parallel: Parallel) -> None:
    """Attach the adapters of a run's configuration.

    The forward passes use the merged weights if cfg.merging includes the trainer's passes.
    """
    attach(model, cfg.lora, parallel, cfg.train.seed, merges=cfg.merging >= Merging.PASSES)


@torch.no_grad()
def _initialise_(adapter: Adapter, name: str, parallel: Parallel, seed: int) -> None:
    """Draw A uniformly between -1/sqrt(in) and 1/sqrt(in), as PEFT does.

    The draw depends on the seed, the name and the expert, but not on the layout.
    """
    factor, pieces, in_dim = adapter.A, {name: adapter.A}, 1
    if factor.is_expert:
        first = parallel.expert_rank * len(factor)
        pieces, in_dim = {f"{name}.{first + i}": piece for i, piece in enumerate(factor)}, 0
    size, rank = (1, 0) if factor.shard_dim is None else (parallel.tensor, parallel.tensor_rank)
    for key, piece in pieces.items():
        shape = list(piece.shape)
        shape[in_dim] *= size
        bound = 1 / math.sqrt(shape[in_dim])
        generator = torch.Generator().manual_seed(derive_seed(seed, "lora", key))
        whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        piece.copy_(whole.chunk(size, in_dim)[rank])


def factors(adapters: dict[str, Adapter]) -> dict[str, Factor]:
    """Return every trainable tensor by name: `<module>.A` and `<module>.B`."""
    return {f"{name}.{letter}": getattr(adapter, letter) for name, adapter in adapters.items() for letter in "AB"}


def whole_shape(factor: Factor, parallel: Parallel) -> tuple[int, ...]:
    """Return the shape of the whole tensor that ``factor`` is a shard of."""
    shape = list(factor.shape)
    if factor.is_expert:
        shape[0] *= parallel.expert
    if factor.shard_dim is not None:
        shape[factor.shard_dim] *= parallel.tensor
    return tuple(shape)


def attached(model: torch.nn.Module) -> dict[str, Adapter]:
    """Return the adapters on ``model`` by module name, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapter)}


@contextlib.contextmanager
def disabled(adapters: dict[str, Adapter]) -> Iterator[None]:
    """Switch every adapter off in this block, so that the model computes the same as before training."""
    for adapter in adapters.values():
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters.values():
            adapter.enabled = True


def describe(adapters: dict[str, Adapter], parallel: Parallel) -> str:
    """Describe the parameters that all ranks train: a line with the total, then a line for each kind of module."""
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
