"""Bytes that ranks send each other in a step, and the seconds of the phases that consist of them. No torch here."""

import functools
from collections.abc import Callable

from architecture import Architecture, Module, over_layers
from knobs import Config, LoraConfig
from plan.grid import WHOLE, RankGrid
from plan.hardware import Hardware
from plan.parameters import adapter_size, lora_parameters, on_rank


def slower(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    """The slower one of two things that happen at the same time."""
    return max(one, other, key=lambda causes: sum(causes.values()))


def exchange_bytes(
    arch: Architecture, layout: RankGrid, tokens: float, element: int, passes: int = 1, ends: int = 2
) -> dict[str, float]:
    """Bytes that a rank sends when ``tokens`` pass all layers ``passes`` times, forward or backward.

    Tensor ranks gather and scatter the sequence: around attention, a dense layer and a shared expert, and at ``ends``:
    after the embedding and before the head. Expert ranks exchange rows; expert_tensor ranks gather them, and sum them
    in fp32.
    """
    h, tensor, parts = arch.hidden_size, layout.tensor, layout.expert_tensor
    split = arch.num_layers + sum(bool(not is_moe or arch.shared_expert_ffn_size) for is_moe in arch.moe_layers)
    sequence = (2 * split * passes + ends) * tokens / layout.data * h * element * (1 - 1 / tensor)
    rows = passes * sum(arch.moe_layers) * tokens / layout.ranks * arch.experts_per_token * h
    traded = 2 * rows * element * (1 - 1 / layout.expert) + rows * (parts - 1) * (element + 4)
    return {"tensor exchange": sequence, "expert exchange": traded}


def sync_seconds(
    cfg: Config, arch: Architecture, layout: RankGrid, hardware: Hardware, element: int
) -> dict[str, float]:
    """One push of the policy: every rank receives whole adapted tensors, or reads and writes only its own shards.

    Before that a rank merges its own shards. With rollout.sync=adapter, only the fp32 factors are sent.
    """
    h, lora = arch.hidden_size, cfg.lora
    targets = lora.targets
    mlp = "linear_fc1" in targets or "linear_fc2" in targets
    dense = sum(arch.shared_expert_ffn_size if is_moe else arch.dense_ffn_size for is_moe in arch.moe_layers)
    heads = arch.qkv_size * ("linear_qkv" in targets) + arch.num_heads * arch.head_dim * ("linear_proj" in targets)
    split = h * (arch.num_layers * heads + 3 * dense * mlp)
    experts = 3 * h * sum(arch.moe_layers) * arch.num_experts * arch.expert_ffn_size * mlp
    if cfg.keeps_factors_apart:
        size = 4 * lora_parameters(arch, lora, WHOLE)
        sent = hardware.sends(size, layout.away_of(layout.ranks)) / hardware.link_share
        return {"exchange": sent, "memory": size * 2 / hardware.bandwidth}
    split_share, experts_share = split / layout.tensor, experts / layout.expert
    products = 2 * (lora.rank * split_share + lora.rank_of(True) * experts_share)
    whole = layout.engine_expert <= layout.engine_tensor
    size = (split + experts if whole else split_share + experts_share) * element
    longer = slower({"memory": size * 2 / hardware.bandwidth}, {"arithmetic": products / hardware.flops})
    sent = hardware.sends(size, layout.away_of(layout.ranks)) / hardware.link_share
    return longer | ({"exchange": sent} if whole else {})


def gradient_bytes(arch: Architecture, lora: LoraConfig, layout: RankGrid) -> dict[str, float]:
    """Bytes that a rank sends over each kind of group when the fp32 gradients of an update are summed.

    Factors of routed experts are summed over expert_data, all others over data. A factor that tensor ranks hold whole
    is summed over these first: A of a column-parallel matrix, B of a row-parallel one, both of the router.
    """

    def held_whole(module: Module) -> int:
        copies, rows, columns = on_rank(module, layout)
        factors = columns * (module.split != 1) + rows * (module.split != 0)
        return copies * lora.rank_of(module.kind == "experts") * factors * (module.target in lora.targets)

    def parameters(size: Callable[[Module], int], *, of_experts: bool) -> int:
        return over_layers(arch, lambda module: size(module) * ((module.kind == "experts") == of_experts))

    own = functools.partial(adapter_size, lora, layout)
    sizes = {
        "tensor": (layout.tensor, parameters(held_whole, of_experts=False)),
        "expert_tensor": (layout.expert_tensor, parameters(held_whole, of_experts=True)),
        "data": (layout.data, parameters(own, of_experts=False)),
        "expert_data": (layout.expert_data, parameters(own, of_experts=True)),
    }
    return {kind: 4 * size * 2 * (1 - 1 / ranks) for kind, (ranks, size) in sizes.items()}


def optimizer_seconds(
    cfg: Config, arch: Architecture, layout: RankGrid, hardware: Hardware, updates: int
) -> dict[str, float]:
    """All optimizer steps: the sum of fp32 gradients over the ranks that share a factor, and AdamW's memory traffic."""
    size = 4 * lora_parameters(arch, cfg.lora, layout)
    # 13 passes: two copies into and out of the message, clipping, and AdamW's four reads and three writes.
    seconds = {
        "exchange": sum(
            hardware.sends(sent, layout.away(kind)) / hardware.link_share
            for kind, sent in gradient_bytes(arch, cfg.lora, layout).items()
        ),
        "memory": 13 * size / hardware.bandwidth,
    }
    return {cause: updates * value for cause, value in seconds.items()}
