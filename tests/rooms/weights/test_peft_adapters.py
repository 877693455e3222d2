"""PEFT's adapters: what is written in a form is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import reference
import torch

from facts.architectures import tensor_shapes
from inputs import hf_config
from weights import peft_adapters, probes


@pytest.mark.parametrize("form", ["full", "leaf", "stack"])
@pytest.mark.parametrize("width", [24, 32, 64], ids=["plain", "2 x width = hidden", "width = hidden"])
def test_an_adapter_is_read_as_it_was_written(tmp_path: Path, form: peft_adapters.Form, width: int) -> None:
    """The two stacks of a layer are told apart by their shapes, which share an axis where width = hidden."""
    base = reference.save("qwen3_moe", tmp_path / "base", moe_intermediate_size=width, hidden_size=64)
    arch = hf_config.read(base)
    names = [name.removesuffix(".weight") for name in tensor_shapes(arch) if "_proj.weight" in name]
    pairs = probes.draw(names, arch, rank=2, alpha=3.0, size=1.0)
    peft_adapters.write(tmp_path, str(base), arch, pairs, 3.0, form)
    read = peft_adapters.read(tmp_path, arch)
    assert read.keys() == pairs.keys()
    for name, pair in pairs.items():
        assert torch.equal(read[name].a, pair.a) and torch.equal(read[name].b, pair.b), name
        assert read[name].scale == pair.scale, name
