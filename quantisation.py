"""Low-bit weights: packed codes and scales, the matrices that they stand for, and modules that hold them.

The formats are those of hf_config.FORMATS. A weight of a linear layer is (out, in), as in a Hugging Face checkpoint.
Along the input, neighbours share a scale. Codes, scales and packing equal those of the compressed-tensors package, bit
for bit. Rounding is to the nearest, symmetric around 0. No gradient reaches codes or scales.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inputs.files import InputError
from inputs.hf_config import FORMATS, Format

FP8_MAX, FP4_MAX = 448.0, 6.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; with 8 added they are negative
# Between two neighbours the nearest is chosen, and in the middle the one with the even code.
FP4_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

ALIGNED = 64  # rows or columns: whole groups, and addresses that matrix products take


@dataclass(frozen=True)
class Packed:
    """A quantised matrix (out, in), or a stack of them (E, out, in)."""

    codes: Tensor  # (..., out, in / per_word) int32 or uint8
    scales: Tensor  # (..., out, groups) of the model's type, or float8_e4m3fn
    factors: Tensor  # (..., blocks) fp32: of nvfp4, for blocks of out of equal size; otherwise blocks is 0
    format: str
    dtype: torch.dtype  # of the matrix that this stands for

    @property
    def shape(self) -> torch.Size:
        *experts, out, words = self.codes.shape
        return torch.Size([*experts, out, words * FORMATS[self.format].per_word])

    def __getitem__(self, experts: int | slice) -> "Packed":
        """One matrix of a stack, or a smaller stack; views."""
        return replace(self, codes=self.codes[experts], scales=self.scales[experts], factors=self.factors[experts])

    def pieces(self, most_bytes: int, *, along_out: bool) -> Iterator["Packed"]:
        """Views of all experts that cover the matrices in order, along out or along the input.

        What a piece stands for has at most ``most_bytes``, or the size of one group.
        """
        form, (experts, out, inputs) = FORMATS[self.format], self.shape
        whole, across = (out, inputs) if along_out else (inputs, out)
        size = most_bytes // (experts * across * self.dtype.itemsize) // ALIGNED * ALIGNED
        for first in range(0, whole, max(size, ALIGNED)):
            part = slice(first, first + max(size, ALIGNED))
            if along_out:
                factors = self.factors.repeat_interleave(out // max(1, self.factors.shape[-1]), -1)[:, part]
                yield replace(self, codes=self.codes[:, part], scales=self.scales[:, part], factors=factors)
                continue
            words, groups = (slice(part.start // n, part.stop // n) for n in (form.per_word, form.group or inputs))
            scales = self.scales[:, :, groups] if form.group else self.scales
            yield replace(self, codes=self.codes[:, :, words], scales=scales)

    def fill_(self, shards: list[Tensor], whole: list[Tensor], order: Callable[[Tensor], Tensor] | None = None) -> None:
        """Quantise the ``shards`` of the matrices ``whole`` into these codes and scales; ``order``: see copy_."""
        device = self.codes.device
        parts = [
            quantise(
                shard.to(device, self.dtype),
                self.format,
                factor_of(matrix.to(self.dtype)).to(device) if FORMATS[self.format].float else None,
            )
            for shard, matrix in zip(shards, whole, strict=True)
        ]
        self.copy_(parts, order)

    def read(self, tensors: dict[str, Tensor], name: str) -> "Packed":
        """The whole matrix ``name`` of a quantised checkpoint; InputError for scales that are not finite."""
        codes, scales = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
        factors = tensors.get(f"{name}_global_scale", torch.empty(0))
        return replace(self, codes=codes, scales=scales, factors=factors).checked(name)

    def checked(self, name: str) -> "Packed":
        """Itself; InputError that names ``name`` if its scales times the largest code are not finite numbers."""
        form = FORMATS[self.format]
        if not (self._steps() * (FP4_MAX if form.float else 2 ** (form.bits - 1))).to(self.dtype).isfinite().all():
            raise InputError(
                f"{name}: in {self.format} its scales hold values that are not finite, or give such weights in "
                f"{str(self.dtype).removeprefix('torch.')}; needed: other weights, or another model.quantisation"
            )
        return self

    def copy_(self, parts: list["Packed"], order: Callable[[Tensor], Tensor] | None = None) -> None:
        """Take the codes and scales of matrices that are joined along out; ``order`` arranges the joined rows."""
        rows = len(self.codes) // max(1, len(self.factors))  # that share a factor
        for name in ("codes", "scales", "factors")[: None if len(self.factors) else 2]:
            values = [getattr(part, name) for part in parts]
            if name == "factors":
                values = [factor.expand(len(part.codes) // rows) for factor, part in zip(values, parts, strict=True)]
            joined = torch.cat(values)
            getattr(self, name).copy_(order(joined) if order else joined)

    def shard(self, dim: int, size: int, rank: int) -> "Packed":
        """The part of a whole matrix that rank ``rank`` of ``size`` holds, split along out (0) or the input (1)."""
        scales = self.scales if dim == 1 and not FORMATS[self.format].group else self.scales.chunk(size, dim)[rank]
        return replace(self, codes=self.codes.chunk(size, dim)[rank], scales=scales)

    def _steps(self) -> Tensor:
        """What a code of 1 stands for in each group, in fp32.  -> (..., out, groups)"""
        scales, blocks = self.scales.float(), self.factors.shape[-1]
        if not blocks:
            return scales
        return scales / self.factors.repeat_interleave(scales.shape[-2] // blocks, -1)[..., None]

    def dequantised(self) -> Tensor:
        """The matrix, computed in fp32 and rounded once.  -> (..., out, in)"""
        scales, values = self._steps(), _values(self.codes.view(torch.uint8), FORMATS[self.format])
        return values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None]).flatten(-2).to(self.dtype)

    def inputs(self, every: int) -> Tensor:
        """`dequantised` at every so many-th input.  -> (..., out, in / every)"""
        form, steps = FORMATS[self.format], self._steps()
        places = torch.arange(0, self.shape[-1], every, device=self.codes.device)
        codes = self.codes.view(torch.uint8).index_select(-1, places * form.bits // 8)
        values = _values(codes, form).unflatten(-1, (len(places), -1))  # all that share a byte
        own = (places % values.shape[-1]).expand(*values.shape[:-1])[..., None]
        values = values.gather(-1, own).squeeze(-1)
        return values.mul_(steps.index_select(-1, places * steps.shape[-1] // self.shape[-1])).to(self.dtype)


def is_quantised(tensor: str, attention: bool) -> bool:
    """Whether a Hugging Face tensor is a matrix of a routed expert, or (with ``attention``) one around attention."""
    return ".mlp.experts." in tensor or (attention and ".self_attn." in tensor and tensor.endswith("_proj.weight"))


def stored_shapes(
    shapes: dict[str, tuple[int, ...]], dtypes: tuple[str, ...], name: str, attention: bool = False
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensor -> shape and possible dtypes in a model directory whose experts are in the format ``name``, or "none".

    With ``attention`` the matrices around attention are in this format, too.
    ``shapes`` are those of the model without quantisation, ``dtypes`` those that its tensors may have.
    """
    found = {tensor: (shape, dtypes) for tensor, shape in shapes.items()}
    for tensor in [tensor for tensor in shapes if name != "none" and is_quantised(tensor, attention)]:
        ((out, inputs), _), form = found.pop(tensor), FORMATS[name]
        found[f"{tensor}_packed"] = (out, inputs // form.per_word), ("uint8" if form.float else "int32",)
        found[f"{tensor}_scale"] = (out, form.groups(inputs)), ("float8_e4m3fn",) if form.float else dtypes
        if form.float:
            found[f"{tensor}_global_scale"] = (1,), ("float32",)
    return found


def empty(name: str, shape: tuple[int, ...], blocks: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Storage for a quantised (..., out, in) that joins ``blocks`` matrices along out: codes, scales, factors."""
    form, (*experts, out, inputs) = FORMATS[name], shape
    return {
        "codes": torch.empty(*experts, out, inputs // form.per_word, dtype=torch.uint8 if form.float else torch.int32),
        "scales": torch.empty(*experts, out, form.groups(inputs), dtype=torch.float8_e4m3fn if form.float else dtype),
        "factors": torch.empty(*experts, blocks * form.float, dtype=torch.float32),
    }


def quantise(weight: Tensor, name: str, factor: Tensor | None = None) -> Packed:
    """The codes and scales of a matrix, or of a shard of it, whose whole has the ``factor``.  (out, in) -> Packed"""
    form = FORMATS[name]
    groups = weight.unflatten(-1, (form.groups(weight.shape[-1]), -1))  # (out, groups, group)
    largest = groups.abs().amax(-1)
    if form.float:
        factor = factor_of(weight) if factor is None else factor
        scales = (factor * (largest.float() / FP4_MAX)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
        scales = torch.where(scales == 0, torch.finfo(torch.float8_e4m3fn).eps, scales)
        values = (groups.float() / (scales / factor)[..., None]).clamp(-FP4_MAX, FP4_MAX)
        codes, scales = _pack_floats(values.flatten(-2)), scales.to(torch.float8_e4m3fn)
        return Packed(codes, scales, factor, name, weight.dtype)
    scales = largest / (float(2**form.bits - 1) / 2)
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
    most = 2 ** (form.bits - 1)
    codes = (groups / scales[..., None]).round().clamp(-most, most - 1).flatten(-2).to(torch.int32) + most
    return Packed(_pack_integers(codes, form), scales, scales.new_empty(0, dtype=torch.float32), name, weight.dtype)


def factor_of(weight: Tensor) -> Tensor:
    """nvfp4's factor of a whole matrix, which maps its largest group scale to the largest FP8 number.  -> (1,) fp32

    A matrix of zeros, or one so near to it that the quotient is not finite, has the factor 1.
    """
    return (FP8_MAX * FP4_MAX / weight.abs().amax().float()).nan_to_num(nan=1.0, posinf=1.0).reshape(1)


def _pack_integers(codes: Tensor, form: Format) -> Tensor:
    """Codes from 0, the first in the lowest bits.  (..., in) int32 -> (..., in / per_word) int32"""
    shifts = torch.arange(form.per_word, device=codes.device, dtype=torch.int32) * form.bits
    return (codes.unflatten(-1, (-1, form.per_word)) << shifts).sum(-1, dtype=torch.int32)


def _pack_floats(values: Tensor) -> Tensor:
    """(..., in) -> (..., in / 2) uint8; the first value of a pair is in the lower bits"""
    size = values.abs()
    steps = ((size >= m if place % 2 else size > m).byte() for place, m in enumerate(FP4_MIDDLES))  # a tie: the even
    codes = sum(steps, 8 * (values < 0).byte())
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return low + 16 * high


def _values(codes: Tensor, form: Format) -> Tensor:
    """What the codes stand for without scales, in new memory.  (..., bytes) uint8 -> (..., in) fp32

    The arithmetic is on bytes as long as possible: on int32 it takes a CPU three times as long.
    """
    if form.float:  # a table of the two values of each byte
        values, byte = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)]), torch.arange(256)
        pairs = values[torch.stack([byte & 15, byte >> 4], -1)].to(codes.device)
        return torch.nn.functional.embedding(codes.int(), pairs).flatten(-2)
    if form.bits == 8:
        return codes.float().sub_(128)
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float().sub_(8)


def frozen(
    base: dict[str, Tensor], name: str, dtype: torch.dtype, quantisation: str, attention: bool = False
) -> Tensor:
    """The whole frozen tensor ``name`` as the trainer has it: of a quantised matrix, what its codes stand for.

    ``base``: the tensors of a model directory, which may hold codes or the weights that are quantised on loading.
    """
    if quantisation == "none" or not is_quantised(name, attention):
        return base[name].to(dtype)
    if name in base:
        return quantise(base[name].to(dtype), quantisation).checked(name).dequantised()
    nothing = torch.empty(0)
    return Packed(nothing, nothing, nothing, quantisation, dtype).read(base, name).dequantised()


# ------------------------------------------------------------------------------------------------ modules


class Quantised(torch.nn.Module):
    """A module whose frozen weight may be codes and scales, which are buffers."""

    quantisation = "none"

    def hold(self, name: str, shape: tuple[int, ...], blocks: int, dtype: torch.dtype) -> None:
        """Make storage in the format ``name``; see `empty`."""
        self.quantisation, self.dtype = name, dtype
        for key, tensor in empty(name, shape, blocks, dtype).items():
            self.register_buffer(key, tensor, persistent=False)

    @property
    def packed(self) -> Packed:
        """The codes and scales, as views."""
        return Packed(self.codes, self.scales, self.factors, self.quantisation, self.dtype)


class QuantisedLinear(Quantised):
    """A column or row parallel linear of attention; it replaces Megatron's, which keep a weight for the backward pass.

    Like there, sequence parallelism splits the tokens outside of the two linears. Both passes dequantise the whole
    shard, which is small beside the experts.
    """

    def __init__(self, in_size: int, out_size: int, *, config, bias: bool, input_is_parallel: bool = False, **unused):
        super().__init__()
        self.is_column, self.splits_tokens = not input_is_parallel, config.sequence_parallel
        ranks = config.tensor_model_parallel_size
        out_size, in_size = (out_size // ranks, in_size) if self.is_column else (out_size, in_size // ranks)
        # The rows of q, k and v are interleaved, so each row has a factor of its own.
        self.hold(config.quantisation, (out_size, in_size), out_size if self.is_column else 1, config.params_dtype)
        self.bias = torch.nn.Parameter(torch.empty(out_size, dtype=config.params_dtype)) if bias else None

    @property
    def weight(self) -> Tensor:
        """The weight that LoRA has merged, or what the codes stand for.  -> (out, in)"""
        return self._parameters["weight"] if "weight" in self._parameters else self.packed.dequantised()

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """(.., in) -> (.., out), and no bias that is still to be added"""
        from megatron.core.tensor_parallel import mappings

        if self.splits_tokens and self.is_column:
            x = mappings.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True)
        merged = "weight" in self._parameters
        y = torch.matmul(x, self.weight.t()) if merged else _QuantisedMatmul.apply(x, self.packed)
        if self.splits_tokens and not self.is_column:
            y = mappings.reduce_scatter_to_sequence_parallel_region(y)
        return y if self.bias is None else y + self.bias, None


class _QuantisedMatmul(torch.autograd.Function):
    """x times a frozen quantised matrix, transposed; autograd keeps codes only.  (.., in), (out, in) -> (.., out)"""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Packed) -> Tensor:
        ctx.packed = packed
        return torch.matmul(x, packed.dequantised().t())

    @staticmethod
    def backward(ctx, grad: Tensor):
        return torch.matmul(grad, ctx.packed.dequantised()), None
