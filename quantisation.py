"""Low-bit weights: packed codes and scales, and the matrices that they stand for.

The formats are those of hf_config.FORMATS. A weight of a linear layer is (out, in), as in a Hugging Face checkpoint.
Along the input, neighbours share a scale. Codes, scales and packing equal those of the compressed-tensors package, bit
for bit. Rounding is to the nearest, symmetric around 0. No gradient reaches codes or scales.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_config import FORMATS, Format
from input_files import InputError

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
    factors: Tensor  # (..., blocks) fp32: of nvfp4, for each of the joined matrices; otherwise blocks is 0
    format: str
    dtype: torch.dtype  # of the matrix that this stands for

    @property
    def shape(self) -> torch.Size:
        *experts, out, words = self.codes.shape
        return torch.Size([*experts, out, words * FORMATS[self.format].per_word])

    def experts(self, which: int | slice) -> "Packed":
        """One matrix of a stack, or some of them; views."""
        return replace(self, codes=self.codes[which], scales=self.scales[which], factors=self.factors[which])

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

    def fill_(self, shards: list[Tensor], whole: list[Tensor]) -> None:
        """Quantise the ``shards`` of the matrices ``whole``, joined along out, into these codes and scales."""
        device = self.codes.device
        parts = [
            quantise(shard.to(device, self.dtype), self.format, factor_of(matrix.to(self.dtype)).to(device))
            for shard, matrix in zip(shards, whole, strict=True)
        ]
        self.copy_(parts)

    def read(self, tensors: dict[str, Tensor], name: str) -> "Packed":
        """The whole matrix ``name`` of a quantised checkpoint; InputError for scales that are not finite."""
        codes, scales = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
        factors = tensors.get(f"{name}_global_scale", torch.empty(0))
        if not (scales.float().isfinite().all() and factors.isfinite().all()):
            raise InputError(f"{name}: its scales hold values that are not finite")
        return replace(self, codes=codes, scales=scales, factors=factors)

    def copy_(self, parts: list["Packed"]) -> None:
        """Take the codes and scales of matrices that are joined along out."""
        for name in ("codes", "scales", "factors"):
            getattr(self, name).copy_(torch.cat([getattr(part, name) for part in parts]))

    def shard(self, dim: int, size: int, rank: int) -> "Packed":
        """The part of a whole matrix that rank ``rank`` of ``size`` holds, split along out (0) or the input (1)."""
        scales = self.scales if dim == 1 and not FORMATS[self.format].group else self.scales.chunk(size, dim)[rank]
        return replace(self, codes=self.codes.chunk(size, dim)[rank], scales=scales)

    def dequantised(self) -> Tensor:
        """The matrix, computed in fp32 and rounded once.  -> (..., out, in)"""
        form, scales = FORMATS[self.format], self.scales.float()
        if form.float:
            blocks = self.factors.shape[-1]  # joined along out, all of one size
            scales = scales / self.factors.repeat_interleave(scales.shape[-2] // blocks, -1)[..., None]
        values = _values(self.codes.view(torch.uint8), form)
        return values.unflatten(-1, (scales.shape[-1], -1)).mul_(scales[..., None]).flatten(-2).to(self.dtype)


def stored_shapes(
    shapes: dict[str, tuple[int, ...]], dtypes: tuple[str, ...], name: str
) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensor -> shape and possible dtypes in a model directory whose experts are in the format ``name``, or "none".

    ``shapes`` are those of the model without quantisation, ``dtypes`` those that its tensors may have.
    """
    found = {tensor: (shape, dtypes) for tensor, shape in shapes.items()}
    for tensor in [tensor for tensor in shapes if ".mlp.experts." in tensor and name != "none"]:
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
    """nvfp4's factor of a whole matrix, which maps its largest group scale to the largest FP8 number.  -> (1,) fp32"""
    return (FP8_MAX * FP4_MAX / weight.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)).reshape(1)


def _pack_integers(codes: Tensor, form: Format) -> Tensor:
    """Codes from 0, the first in the lowest bits.  (..., in) int32 -> (..., in / per_word) int32"""
    shifts = torch.arange(form.per_word, device=codes.device, dtype=torch.int32) * form.bits
    return (codes.unflatten(-1, (-1, form.per_word)) << shifts).sum(-1, dtype=torch.int32)


def _pack_floats(values: Tensor) -> Tensor:
    """(..., in) -> (..., in / 2) uint8; the first value of a pair is in the lower bits"""
    size = values.abs()
    codes = torch.bucketize(size, torch.tensor(FP4_MIDDLES, device=values.device), right=True)
    middle = torch.isin(size, torch.tensor(FP4_MIDDLES, device=values.device))  # a tie: the even code
    codes = torch.where(middle & (codes % 2 == 1), codes - 1, codes) + 8 * (values < 0)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low + 16 * high).to(torch.uint8)


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


def frozen(base: dict[str, Tensor], name: str, dtype: torch.dtype, quantisation: str) -> Tensor:
    """The whole frozen tensor ``name`` as the trainer has it: of a quantised expert, what its codes stand for.

    ``base``: the tensors of a model directory, which may hold codes or the weights that are quantised on loading.
    """
    if quantisation == "none" or ".mlp.experts." not in name:
        return base[name].to(dtype)
    if name in base:
        return quantise(base[name].to(dtype), quantisation).dequantised()
    nothing = torch.empty(0)
    return Packed(nothing, nothing, nothing, quantisation, dtype).read(base, name).dequantised()
