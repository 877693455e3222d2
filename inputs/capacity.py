"""How many rows an engine decodes together, and the bytes of vLLM's key-value cache that a row takes. No torch.

The plan and engines/ ask the same functions, so an engine takes as many rows at once as the plan says.
"""

from facts.architectures import Architecture
from facts.limits import ELEMENT_BYTES, cache_bytes_per_token, cache_mib
from knobs import Config

PREFILL_TOKENS = 8192  # prompt tokens that vLLM computes at once; this limits the activations
# Rows that are decoded together: a wave of the embedded sampler, vLLM's largest graph, and what MC2 sends from a rank.
MOST_SEQUENCES = 512


def rows_of_a_step(cfg: Config, ranks: int) -> int:
    """Sequences of the fullest replica in a step: that of the most prompts."""
    replicas = ranks // cfg.rollout.replica_ranks
    return -(-cfg.rollout.prompts_per_step // replicas) * cfg.rollout.group_size


def max_sequences(cfg: Config, arch: Architecture, ranks: int) -> int:
    """Rows that an engine decodes together: at most those of a step or an evaluation, and those that its cache holds.

    vLLM's cache must hold them at their full length, because vLLM would drop a row for which it has no room, and later
    compute it again. The samples of a prompt share its keys and values. The embedded sampler makes a cache for each
    wave, however many rows it has.
    """
    rollout = cfg.rollout
    if not rollout.kind.reserves:
        return MOST_SEQUENCES
    tokens = cfg.data.max_prompt_tokens / rollout.group_size + rollout.max_new_tokens
    row = tokens * cache_bytes_per_token(arch, rollout.tensor, ELEMENT_BYTES[cfg.model.dtype])
    asked = max(rows_of_a_step(cfg, ranks), cfg.eval.batch_size * max(1, cfg.eval.samples))
    return max(1, min(asked, int(rollout.kv_cache_mib * 2**20 // row), MOST_SEQUENCES))


def cache_mib_per_row(cfg: Config, arch: Architecture) -> int:
    """MiB of vLLM's key-value cache on a rank that the longest row needs."""
    return cache_mib(arch, cfg.rollout.tensor, cfg.row_tokens, ELEMENT_BYTES[cfg.model.dtype])
