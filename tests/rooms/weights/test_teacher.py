"""The teacher's factors in the shapes of the policy's: the update of each matrix of the base is the teacher's own.

The expected updates are scale x B A of the teacher's own factors, multiplied out here in float64. Refused files are in
tests/rooms/inputs/test_bad_input.py, and training runs in tests/runs/test_distillation.py.
"""

from pathlib import Path

import pytest
import reference
import torch
import training
from torch import Tensor

from facts.architectures import tensor_shapes
from facts.exits import InputError
from inputs import hf_config
from inputs.config import to_dict
from knobs import Config
from weights import checkpoint, peft_adapters, probes, teacher
from weights.adapter_weights import adapted_modules
from weights.peft_adapters import Pair

TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
OURS = {"lora__targets": TARGETS, "lora__rank": 8, "lora__expert_rank": 4, "lora__alpha": 16.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A model with a shared expert, whose second layer is dense."""
    return reference.save("qwen2_moe", tmp_path_factory.mktemp("base"))


def config(base: Path, named: Path | None = None, **changes: object) -> Config:
    chosen = {"loss__teacher": str(named)} if named else {}
    return training.config(base, base, **OURS | chosen | changes)


def checkpoint_with(folder: Path, cfg: Config) -> tuple[Path, dict[str, Tensor]]:
    """A run with a checkpoint of random factors, and these factors."""
    make = torch.Generator().manual_seed(5)
    modules = adapted_modules(hf_config.read(cfg.model.path), cfg.lora)
    shapes = {name: shape for module in modules for name, shape in module.factor_shapes().items()}
    factors = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    folder.mkdir()
    checkpoint.save(folder, 1, {"adapter": factors}, {}, to_dict(cfg), 1)
    return folder, factors


def updates(factors: dict[str, Tensor], cfg: Config) -> dict[str, Tensor]:
    """The update of each adapted module in float64: (out, in), or (E, in, out) of routed experts."""
    found = {}
    for name in {name[:-2] for name in factors}:
        a, b = factors[f"{name}.A"].double(), factors[f"{name}.B"].double()
        is_expert = a.dim() == 3
        rank = a.shape[-1] if is_expert else len(a)
        found[name] = cfg.lora.alpha / rank * (a @ b if is_expert else b @ a)
    return found


@pytest.mark.parametrize(
    "theirs",
    [
        {},
        {"lora__rank": 3, "lora__expert_rank": 1},
        {"lora__alpha": 5.0},
        {"lora__targets": ("linear_qkv", "linear_fc2"), "lora__expert_rank": 0, "lora__rank": 4, "lora__alpha": 1.0},
    ],
    ids=["equal", "smaller ranks", "another alpha", "fewer targets"],
)
def test_the_update_of_each_module_is_that_of_the_teacher(theirs: dict, base: Path, tmp_path: Path) -> None:
    made = config(base, **theirs)
    run, factors = checkpoint_with(tmp_path / "run", made)
    cfg = config(base, run)
    found = dict(teacher.read(cfg, hf_config.read(base)))
    shapes = {
        name: shape
        for module in adapted_modules(hf_config.read(base), cfg.lora)
        for name, shape in module.factor_shapes().items()
    }
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes
    expected = updates(factors, made)
    for name, update in updates(found, cfg).items():
        torch.testing.assert_close(update, expected.get(name, 0 * update), rtol=1e-6, atol=1e-6)
    if not theirs:
        assert all(torch.equal(found[name], factors[name]) for name in factors)


def test_a_run_stands_for_its_newest_checkpoint(base: Path, tmp_path: Path) -> None:
    cfg = config(base)
    run, _ = checkpoint_with(tmp_path / "run", cfg)
    zeros = {name: torch.zeros_like(value) for name, value in teacher.read(config(base, run), hf_config.read(base))}
    checkpoint.save(run, 10, {"adapter": zeros}, {}, to_dict(cfg.changed(train={"steps": 10})), 2)
    newest = dict(teacher.read(config(base, run), hf_config.read(base)))
    first = dict(teacher.read(config(base, run / "checkpoints" / "step-000001"), hf_config.read(base)))
    assert not any(value.any() for value in newest.values()) and all(value.any() for value in first.values())


@pytest.mark.parametrize("form", ["full", "leaf", "stack"])
def test_an_adapter_of_peft_is_that_of_the_checkpoint_bit_for_bit(form: str, base: Path, tmp_path: Path) -> None:
    """Written from the same factors, with one A for the matrices that a module fuses."""
    same = {"lora__targets": TARGETS[:-1], "lora__expert_rank": 0}
    cfg, arch = config(base, **same), hf_config.read(base)
    run, factors = checkpoint_with(tmp_path / "run", cfg)
    pairs = {}
    for module in adapted_modules(arch, cfg.lora):
        for name, a, b in module.pairs(factors):
            pairs[name.removesuffix(".weight")] = Pair(a, b, cfg.lora.alpha / 8)
    peft_adapters.write(tmp_path / "peft", str(base), arch, pairs, cfg.lora.alpha, form)
    read = [dict(teacher.read(config(base, named, **same), arch)) for named in (run, tmp_path / "peft")]
    assert read[0].keys() == read[1].keys()
    assert all(torch.equal(value, read[1][name]) for name, value in read[0].items())


def test_matrices_with_an_a_of_their_own_add_their_ranks_up(base: Path, tmp_path: Path) -> None:
    """Rank 2 of q, k and v is rank 6 of the module that fuses them, of gate and up rank 4."""
    arch = hf_config.read(base)
    names = [name.removesuffix(".weight") for name in tensor_shapes(arch) if "_proj.weight" in name]
    drawn = probes.draw(names, arch, rank=2, alpha=3.0, size=1.0)
    make = torch.Generator().manual_seed(1)
    pairs = {name: Pair(torch.randn(pair.a.shape, generator=make), pair.b, 1.5) for name, pair in drawn.items()}
    peft_adapters.write(tmp_path, str(base), arch, pairs, 3.0, "leaf")
    cfg = config(base, tmp_path)
    found = updates(dict(teacher.read(cfg, arch)), cfg)
    for module in adapted_modules(arch, cfg.lora):
        parts = []
        for name in module.names(slice(None)):
            pair = pairs.get(name.removesuffix(".weight"))
            if pair:
                parts.append(pair.scale * pair.b.double() @ pair.a.double())
        if module.is_expert:
            copies = module.module.copies
            each = len(parts) // copies
            expected = torch.stack([torch.cat(parts[first : first + each]).mT for first in range(0, len(parts), each)])
        else:
            expected = torch.cat(parts) if parts else torch.zeros_like(found[module.name])
        torch.testing.assert_close(found[module.name], expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(InputError, match="layers.0.self_attn.qkv_proj has rank 6; set lora.rank to that or more"):
        dict(teacher.read(config(base, tmp_path, lora__rank=5), arch))
