"""How many rows an engine decodes together. No torch.

The plan and engines/ ask the same functions, so an engine takes as many rows at once as the plan says.
"""

from facts.architectures import Architecture
from facts.limits import ELEMENT_BYTES, cache_bytes_per_token
from knobs import EvalConfig, RolloutConfig

PREFILL_TOKENS = 8192  # prompt tokens that vLLM computes at once; this limits the activations
# Rows that are decoded together: a wave of the embedded sampler, vLLM's largest graph, and what MC2 sends from a rank.
MOST_SEQUENCES = 512


def rows_of_a_step(rollout: RolloutConfig, ranks: int) -> int:
    """Sequences of the fullest replica in a step: that of the most prompts."""
    replicas = ranks // rollout.replica_ranks
    return -(-rollout.prompts_per_step // replicas) * rollout.group_size


def max_sequences(
    rollout: RolloutConfig, evaluation: EvalConfig, arch: Architecture, ranks: int, *, prompt_tokens: int, dtype: str
) -> int:
    """Rows that an engine decodes together: at most those of a step or an evaluation, and those that its cache holds.

    vLLM's cache must hold them at their full length, because vLLM would drop a row for which it has no room, and later
    compute it again. The samples of a prompt share its keys and values. The embedded sampler makes a cache for each
    wave, which has all samples of a prompt. ``prompt_tokens``: of the longest prompt.
    """
    if not rollout.kind.reserves:
        return max(MOST_SEQUENCES, rollout.group_size, evaluation.samples)
    tokens = prompt_tokens / rollout.group_size + rollout.max_new_tokens
    row = tokens * cache_bytes_per_token(arch, rollout.tensor, ELEMENT_BYTES[dtype])
    asked = max(rows_of_a_step(rollout, ranks), evaluation.batch_size * max(1, evaluation.samples))
    return max(1, min(asked, int(rollout.kv_cache_mib * 2**20 // row), MOST_SEQUENCES))
