"""Computes how many rows an engine decodes together. Nothing here imports torch.

The plan and engines/ call the same functions, so an engine decodes as many rows at once as the plan assumes.
"""

from facts.architectures import Architecture
from facts.limits import ELEMENT_BYTES, cache_bytes_per_token
from knobs import EvalConfig, RolloutConfig

PREFILL_TOKENS = 8192  # prompt tokens that vLLM computes at once; this limits the activations
# The largest number of rows that are decoded together. It limits a wave of the embedded sampler, vLLM's largest graph,
# and the rows that MC2 sends from a rank.
MOST_SEQUENCES = 512


def rows_of_a_step(rollout: RolloutConfig, ranks: int) -> int:
    """Return the number of sequences that the replica with the most prompts samples in a step."""
    replicas = ranks // rollout.replica_ranks
    return -(-rollout.prompts_per_step // replicas) * rollout.group_size


def max_sequences(
    rollout: RolloutConfig, evaluation: EvalConfig, arch: Architecture, ranks: int, *, prompt_tokens: int, dtype: str
) -> int:
    """Return the largest number of rows that an engine decodes together.

    For vLLM, this is the number of rows in a step or in a batch of an evaluation, whichever is larger. MOST_SEQUENCES
    limits it, and so does the key-value cache, which must hold every row at its full length. Otherwise vLLM would drop
    a row for which it has no space, and compute it again later. The samples of a prompt share its keys and values.
    The embedded sampler makes a cache for each wave, the rows that it decodes together. A wave has at most
    MOST_SEQUENCES rows, or all samples of one prompt if there are more of them. ``prompt_tokens`` is the length of the
    longest prompt.
    """
    if not rollout.kind.reserves:
        return max(MOST_SEQUENCES, rollout.group_size, evaluation.samples)
    tokens = prompt_tokens / rollout.group_size + rollout.max_new_tokens
    row = tokens * cache_bytes_per_token(arch, rollout.tensor, ELEMENT_BYTES[dtype])
    asked = max(rows_of_a_step(rollout, ranks), evaluation.batch_size * max(1, evaluation.samples))
    return max(1, min(asked, int(rollout.kv_cache_mib * 2**20 // row), MOST_SEQUENCES))
