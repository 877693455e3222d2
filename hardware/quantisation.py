"""int4 experts: packed codes with scales, and the matrices that they represent.

A weight of a linear layer is (out, in), as in a Hugging Face checkpoint. Each group of INT4_GROUP neighbouring values
along the input shares a scale. Rounding is to the nearest, symmetric around 0. Codes, scales and packing are
bit-identical to those of the compressed-tensors package. No gradient reaches them. E is the number of experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from facts.exits import InputError
from facts.limits import INT4_GROUP

WORD = 8  # codes in one int32, the first one in the lowest bits
ALIGNED = 64  # pieces have a multiple of this many rows or columns, for whole groups and aligned addresses


@dataclass(frozen=True)
class Packed:
    """A quantised matrix (out, in), or a stack of them (E, out, in)."""

    codes: Tensor  # (..., out, in / WORD) int32
    scales: Tensor  # (..., out, in / INT4_GROUP) of the model's type

    @property
    def dtype(self) -> torch.dtype:
        """The type of the matrices that the codes represent."""
        return self.scales.dtype

    @property
    def shape(self) -> torch.Size:
        *outer, words = self.codes.shape
        return torch.Size([*outer, words * WORD])

    def __getitem__(self, experts: int | slice) -> "Packed":
        """Return one matrix of a stack, or a smaller stack; both are views."""
        return Packed(self.codes[experts], self.scales[experts])

    def pieces(self, most_bytes: int, *, along_out: bool) -> Iterator["Packed"]:
        """Yield views that cover the matrices in order.

        A view has some rows of all experts if ``along_out`` is true, and otherwise some columns. The dequantised
        matrices of a view take at most ``most_bytes`` together. If ALIGNED rows or columns take more, a view has
        ALIGNED of them.
        """
        experts, out, inputs = self.shape
        whole, across = (out, inputs) if along_out else (inputs, out)
        size = most_bytes // (experts * across * self.dtype.itemsize) // ALIGNED * ALIGNED
        size = max(size, ALIGNED)
        for first in range(0, whole, size):
            end = first + size
            if along_out:
                yield Packed(self.codes[:, first:end], self.scales[:, first:end])
            else:
                codes = self.codes[:, :, first // WORD : end // WORD]
                yield Packed(codes, self.scales[:, :, first // INT4_GROUP : end // INT4_GROUP])

    def copy_(self, other: "Packed") -> None:
        """Copy the codes and scales of ``other``."""
        self.codes.copy_(other.codes)
        self.scales.copy_(other.scales)

    def checked(self, name: str) -> "Packed":
        """Return self. Raises InputError if a scale or a possible weight is not finite.

        The message begins with ``name``. The possible weight of largest magnitude is -8 times its scale, because the
        lowest code means -8.
        """
        if not (self.scales.float() * 8).to(self.dtype).isfinite().all():
            raise InputError(
                f"{name}: in int4 its scales, or the weights that they give, have values that are not finite in "
                f"{str(self.dtype).removeprefix('torch.')}; use other weights, or set model.quantisation to none"
            )
        return self

    def dequantised(self) -> Tensor:
        """Return the matrices, computed in fp32 and rounded once.  -> (..., out, in)

        The codes are unpacked from bytes, because a CPU takes three times as long to unpack them from int32.
        """
        pairs = self.codes.view(torch.uint8)
        values = torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).float().sub_(8)
        groups = values.unflatten(-1, (-1, INT4_GROUP))
        return groups.mul_(self.scales.float()[..., None]).flatten(-2).to(self.dtype)

    def inputs(self, every: int) -> Tensor:
        """Return every n-th column of `dequantised` without computing the others. n is ``every``.

        -> (..., out, in / every)
        """
        positions = torch.arange(0, self.shape[-1], every, device=self.codes.device)
        pairs = self.codes.view(torch.uint8).index_select(-1, positions // 2)
        values = torch.where(positions % 2 == 0, pairs & 15, pairs >> 4).float().sub_(8)
        scales = self.scales.float().index_select(-1, positions // INT4_GROUP)
        return values.mul_(scales).to(self.dtype)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Packed:
    """Return uninitialised storage for quantised matrices of ``shape`` (..., out, in), in a model of type ``dtype``."""
    *outer, inputs = shape
    codes = torch.empty(*outer, inputs // WORD, dtype=torch.int32)
    return Packed(codes, torch.empty(*outer, inputs // INT4_GROUP, dtype=dtype))


def quantise(weight: Tensor) -> Packed:
    """Quantise a matrix, a stack of matrices, or a shard that has whole groups.  (..., out, in) -> Packed"""
    groups = weight.unflatten(-1, (-1, INT4_GROUP))
    scales = groups.abs().amax(-1) / 7.5  # half of the 15 steps from the lowest to the highest code
    scales = torch.where(scales == 0, torch.finfo(scales.dtype).eps, scales)
    codes = (groups / scales[..., None]).round().clamp(-8, 7).flatten(-2).to(torch.int32) + 8
    shifts = torch.arange(WORD, device=codes.device, dtype=torch.int32) * 4
    return Packed((codes.unflatten(-1, (-1, WORD)) << shifts).sum(-1, dtype=torch.int32), scales)


def frozen(base: dict[str, Tensor], name: str, dtype: torch.dtype, quantisation: str) -> Tensor:
    """Return the whole frozen tensor ``name`` of the model ``base`` with the values that the trainer uses.

    ``quantisation`` is model.quantisation. If it is not none, an expert is quantised and dequantised.
    """
    weight = base[name].to(dtype)
    if quantisation == "none" or ".mlp.experts." not in name:
        return weight
    return quantise(weight).checked(name).dequantised()
