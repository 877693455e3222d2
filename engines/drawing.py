"""Draws tokens by inverting the cumulative distribution at numbers from a table of uniform numbers.

All engines draw in this way, so engines with equal logits sample equal tokens. The random number of a token depends
only on the seed of its prompt, its sample and its position. It does not depend on the other rows that are decoded at
the same time.
P is the number of prompts, S of samples per prompt, N of new tokens, R of rows, and V the size of the vocabulary.
"""

import torch
from torch import Tensor


def uniforms_of(seeds: list[int], *shape: int) -> Tensor:
    """Draw uniform numbers in [0, 1) for each prompt, with a generator that has its seed.  -> (P, *shape) float32"""
    table = torch.empty(len(seeds), *shape)
    for seed, numbers in zip(seeds, table, strict=True):
        numbers.uniform_(generator=torch.Generator().manual_seed(seed))
    return table


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Return, for each row, the first index at which the cumulative sum of ``probs`` exceeds ``uniform`` * sum(probs).

    ``probs`` need not sum to 1, and ``uniform`` is in [0, 1). An entry of probability 0 is never chosen.

    (R, V), (R, 1) -> (R, 1)
    """
    # right=True finds the first entry strictly above the target, so a target of 0 skips leading zeros. The target stays
    # below the total: u <= 1 - 2^-24 in float32, and 2^-24 of the total is at least half the spacing of floats there.
    if torch.are_deterministic_algorithms_enabled():
        # CUDA has no deterministic cumulative sum of floats. Probabilities below 2^-40 of the largest become 0.
        cdf = (probs * 2**40).long().cumsum(-1)
        total, drawn = cdf[:, -1:], (uniform * 2**24).long()
        target = (total >> 24) * drawn + ((total & (2**24 - 1)) * drawn >> 24)  # total x drawn / 2^24, rounded down
    else:
        cdf = probs.cumsum(-1)
        target = uniform * cdf[:, -1:]
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=probs.shape[-1] - 1)
    possible = probs.gather(-1, index) > 0
    if not possible.all():  # on an accelerator, rounding may let the parallel sum decrease, so that a 0 is chosen
        index = torch.where(possible, index, probs.argmax(-1, keepdim=True))
    return index


def pick(logits: Tensor, uniform: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """Choose one token per row, and return it with its log-probability.

    Without ``uniform`` the choice is greedy. At temperature 0 the log-probability is that of temperature 1.

    (R, V), (R, 1) or None -> (R,), (R,) float32
    """
    # Both steps round as in the trainer: megatron_model._VocabularyLogProbs.
    scores = logits.float() if temperature in (0, 1) else logits.float() / temperature
    scores = scores - scores.amax(-1, keepdim=True)
    probs = scores.exp()  # the probabilities times a constant
    token = logits.argmax(-1, keepdim=True) if uniform is None else inverse_cdf(probs, uniform)
    return token[:, 0], (scores.gather(-1, token) - probs.sum(-1, keepdim=True).log())[:, 0]
