"""Limits on the data that trainer and sampler store at one time. The program keeps to them, and the plan uses them."""

from facts.architectures import Architecture

ROWS_PER_CHUNK = 2048  # enough to keep any device busy; the logits of a small vocabulary then fit into the cache
PIECE = 2**26  # bytes of dequantised experts at one time
INT4_GROUP = 32  # this many neighbours along the input of an int4 matrix share a scale
STACK = 2**26  # elements of experts that are merged at once, a quarter of a GiB in fp32; at least one expert
ELEMENT_BYTES = {"bf16": 2, "fp32": 4}  # model.dtype -> bytes of one number
# MiB of the buffer of an HCCL communicator, by Megatron's name of the group. A communicator has two such buffers on
# every rank. A smaller buffer only cuts a transfer into more slices. A group without an entry, like those of the
# engine, gets the default of 200. Megatron's other groups transfer nothing, and HCCL creates a communicator at its
# first use.
HCCL_BUFFER_MIB = {
    "tp": 64,  # 8192 tokens x 2048 x 2 bytes = 32 MiB, gathered and scattered
    "ep": 128,  # 2048 tokens x 8 experts x 2048 x 2 bytes = 64 MiB if balanced, twice as much if not
    "dp": 50,  # fp32 gradients of the attention's LoRA, 39 MiB at rank 32
    "ep_dp": 50,  # fp32 gradients of the experts' LoRA, in slices
}
CACHE_BLOCK = 128  # tokens; vLLM allocates its key-value cache in blocks, and keeps one block for padding


def logits_per_chunk(device: str) -> int:
    """Return the number of fp32 logits that may exist at one time on this type of device, for any batch.

    An accelerator reads the whole head again for each chunk, so a few large chunks are faster.
    """
    return 2**24 if device == "cpu" else 2**26


def int4_bytes(out: int, inputs: int, element: int) -> int:
    """Return the size in bytes of an int4 matrix (hardware/quantisation.py). A scale has ``element`` bytes."""
    return out * inputs // 2 + out * inputs // INT4_GROUP * element


def int4_problem(arch: Architecture) -> str:
    """Return why int4 cannot store the experts of ``arch``, or "" if it can."""
    for what, inputs in {"hidden_size": arch.hidden_size, "moe_intermediate_size": arch.expert_ffn_size}.items():
        if inputs % INT4_GROUP:
            return f"model.quantisation: int4 cannot store {what} {inputs}, no multiple of {INT4_GROUP}; set it to none"
    return ""


def cache_mib(arch: Architecture, tensor: int, longest: int, element: int) -> int:
    """Return the MiB of cache, in whole blocks, that a row of ``longest`` tokens needs on one of ``tensor`` ranks.

    A number has ``element`` bytes.
    """
    blocks = -(-longest // CACHE_BLOCK) + 1
    return -(-blocks * CACHE_BLOCK * cache_bytes_per_token(arch, tensor, element) // 2**20)


def merged_together(matrix: int) -> int:
    """Return the number of experts that are merged at once: as many as STACK allows, at least 1.

    Each expert has ``matrix`` elements.
    """
    return max(1, STACK // matrix)


def cache_bytes_per_token(arch: Architecture, tensor: int, element: int) -> int:
    """Return the size in bytes of one token's keys and values in all layers, on one of ``tensor`` ranks.

    A number has ``element`` bytes.
    """
    return 2 * arch.num_layers * max(1, arch.num_kv_heads // tensor) * arch.head_dim * element
