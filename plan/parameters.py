"""Counts the weights on one rank: frozen, adapted, merged, and shared with the engine. Needs no torch."""

import functools
import math

from facts.architectures import Architecture, Module, every_module, modules, over_layers
from facts.limits import PIECE, int4_bytes, merged_together
from knobs import LoraConfig
from plan import grid
from plan.grid import RankGrid
from plan.way import Way


def on_rank(module: Module, layout: RankGrid) -> tuple[int, int, int]:
    """Return the number of copies (experts) of a module on a trainer rank, and the rows and columns of each copy."""
    return (
        module.copies // layout.expert if module.kind == "experts" else 1,
        module.out_size // (layout.tensor if module.split == 0 else 1),
        module.in_size // (layout.tensor if module.split == 1 else 1),
    )


def base_parameters(arch: Architecture, layout: RankGrid) -> int:
    """Count the frozen parameters of one rank of the trainer."""

    def held(module: Module) -> int:
        copies, rows, columns = on_rank(module, layout)
        return copies * rows * (columns + module.bias)

    vocabulary = arch.vocab_size * arch.hidden_size // layout.tensor * (1 if arch.tied_head else 2)
    return vocabulary + arch.hidden_size + over_layers(arch, held)


def engine_parameters(arch: Architecture, layout: RankGrid) -> int:
    """Count the engine's parameters on one rank.

    A rank has some of the routed experts or a part of each expert, and a part of the other weights.
    """
    experts = sum(arch.moe_layers) * arch.num_experts * 3 * arch.hidden_size * arch.expert_ffn_size
    ranks = layout.engine_tensor
    rest = base_parameters(arch, RankGrid(ranks, ranks, 1, ranks, ranks)) - experts
    return rest + experts // layout.engine_expert


def base_bytes(arch: Architecture, layout: RankGrid, element: int, quantisation: str) -> tuple[int, int]:
    """Return the bytes of the frozen weights on a trainer rank, and those of the part that is dequantised at one time.

    This part exists in fp32 and in the model's dtype at the same time. Without quantisation, its size is 0.
    """
    whole = base_parameters(arch, layout) * element
    if quantisation == "none":
        return whole, 0
    h, width = arch.hidden_size, arch.expert_ffn_size
    experts = arch.num_experts // layout.expert
    saved = 3 * (h * width * element - int4_bytes(h, width, element))
    piece = min(experts * 2 * h * width, PIECE // element)
    return whole - sum(arch.moe_layers) * experts * saved, piece * (4 + element)


def lora_parameters(arch: Architecture, lora: LoraConfig, layout: RankGrid) -> int:
    """Count the trainable parameters of one rank."""
    return over_layers(arch, functools.partial(adapter_size, lora, layout))


def checkpoint_bytes(arch: Architecture, lora: LoraConfig, staleness: int) -> int:
    """Return the bytes of a checkpoint in fp32.

    It contains the LoRA factors, AdamW's two moments, and the factors of ``staleness`` earlier steps.
    """
    return 4 * (3 + staleness) * lora_parameters(arch, lora, grid.WHOLE)


def adapter_size(lora: LoraConfig, layout: RankGrid, module: Module) -> int:
    """Count a module's trainable parameters on one rank: R x (inputs + outputs) for a pair of factors of rank R."""
    copies, rows, columns = on_rank(module, layout)
    return copies * lora.rank_of(module.kind == "experts") * (rows + columns) * (module.target in lora.targets)


def shared_experts(way: Way, arch: Architecture) -> tuple[int, int]:
    """Count the parameters of the frozen and the merged experts that trainer and engine share on one rank.

    Returns the two counts in this order.
    """
    sizes = [0, 0]
    for module in every_module(arch):
        adapted = module.target in way.cfg.lora.targets
        if module.kind == "experts" and way.shares(adapted):
            sizes[way.merges(adapted)] += sum(arch.moe_layers) * math.prod(on_rank(module, way.layout))
    return sizes[0], sizes[1]


def merged_by_target(arch: Architecture, lora: LoraConfig, layout: RankGrid, is_moe: bool, experts: bool) -> list[int]:
    """Return the number of parameters that each of lora.targets adapts in one layer on one rank.

    Routed experts count only if ``experts`` is true.
    """
    own = [module for module in modules(arch, is_moe) if experts or module.kind != "experts"]
    return [sum(math.prod(on_rank(m, layout)) for m in own if m.target == target) for target in lora.targets]


def merged_at_once(arch: Architecture, lora: LoraConfig, layout: RankGrid, experts: bool = True) -> int:
    """Count the elements of the largest tensor that is merged in one product.

    The tensor is a weight, or a part of a stack of experts (lora_megatron.merged_parts). Routed experts count only if
    ``experts`` is true.
    """

    def at_once(module: Module) -> int:
        copies, rows, columns = on_rank(module, layout)
        return min(copies, merged_together(rows * columns)) * rows * columns

    own = [module for module in every_module(arch) if experts or module.kind != "experts"]
    return max((at_once(module) for module in own if module.target in lora.targets), default=0)


def merged_weights(
    arch: Architecture, lora: LoraConfig, layout: RankGrid, recompute: bool, experts: bool = True
) -> int:
    """Count the parameters of the merged weights that exist during a micro-batch.

    With ``recompute``, only the merged weights of one layer exist at a time. If the merged experts are in the engine's
    memory, ``experts`` is false, and only the other weights are counted.
    """
    layers = {is_moe: sum(merged_by_target(arch, lora, layout, is_moe, experts)) for is_moe in {*arch.moe_layers}}
    return max(layers.values()) if recompute else sum(layers[is_moe] for is_moe in arch.moe_layers)


def gathered_by_a_save(arch: Architecture, lora: LoraConfig, device: str) -> int:
    """Return the largest number of bytes that a save needs on a rank in addition to the rank's shards.

    This is the size of the largest whole factor in fp32. On a CPU it is three times as much, because the host joins the
    shards, and gloo copies the data that it sends and receives.
    """
    adapted = [module for module in every_module(arch) if module.target in lora.targets]
    largest = 4 * max(m.copies * lora.rank_of(m.kind == "experts") * max(m.out_size, m.in_size) for m in adapted)
    return largest * (3 if device == "cpu" else 1)
