"""Does the sampler draw tokens with the probabilities that it reports? This is a part of preflight.py --layers.

The log-probs of the drawn tokens do not show how the tokens were drawn: they are right even if the random generator is
broken. Therefore these statistics of the draws are checked. A correct run fails with a probability below 1e-6.

- Many first tokens of a few prompts are compared with the probabilities of all tokens, in a chi-square test.
- The number of completions that repeat an earlier one of their prompt is compared with its expected value.
- A batch is requested again with the same seeds, and at least nine tenths of its first tokens must be the same.

P is the number of prompts, R of replicas, G of a replica's samples per prompt, and S of all samples of a prompt. C is
the number of classes, and V the size of the vocabulary. Question i of a batch gives prompt i // R to replica i % R.
"""

import math

import torch
from torch import Tensor

from model import megatron_model
from model.batches import Rollout
from parallel_setup import Parallel

# The bounds of all p-values sum to FALSE_ALARM. It is below 1e-6, because the tail of a chi-square statistic of counts
# is up to four times as heavy as that of the chi-square distribution. When the batch is sampled again, a tenth of the
# first tokens may differ, because kernels may round differently.
FALSE_ALARM, SAME_AGAIN = 1e-7, 0.9
FIRST_TOKENS = 4096  # first tokens per replica, enough to show a temperature that is 1.3 times too high
CLASSES, LEAST_EXPECTED = 16, 50.0  # classes have about equal probabilities; one with fewer expected tokens is skipped


@torch.no_grad()
def next_logprobs(model: torch.nn.Module, prompts: list[list[int]], parallel: Parallel, temperature: float) -> Tensor:
    """Return the log-probs of all tokens of the vocabulary after each prompt, computed by rank 0's trainer.

    The prompts must have equal lengths. All ranks call this together, and get the same result.

    -> (P, V) fp64 on the host
    """
    even = [prompt + [0] * (-len(prompt) % parallel.tensor) for prompt in prompts]  # sequence parallelism splits rows
    hidden = megatron_model.hidden_states(model, torch.tensor(even, device=parallel.device))[len(prompts[0]) - 1]
    logits = (hidden @ megatron_model.head_weight(model).t()).float() / temperature  # (P, V / tensor)
    of_tensor_ranks = parallel.gather_rows(logits)[: parallel.tensor]
    return torch.cat([*of_tensor_ranks], -1).double().log_softmax(-1)


def chi_square(batch: Rollout, logp: Tensor, replicas: int) -> list[float]:
    """Return the p-value of a chi-square test of each replica's first tokens.

    ``logp`` (P, V) has the trainer's log-probs. They divide the tokens into classes of about equal probability. Each
    drawn token is weighted by the ratio of the trainer's to the sampler's probability. Suppose a sampler draws
    with the probabilities that it reports. Then the expected sum of these weights in a class is the number of tokens
    that the trainer's probabilities predict. This also holds if the sampler's kernels round differently. A class has
    tokens of all prompts, so its count varies less than that of one multinomial distribution.
    """
    tokens = batch.tokens[:, 0].view(len(logp), replicas, -1)  # (P, R, G)
    ratios = (logp.gather(1, tokens.flatten(1)).view_as(tokens) - batch.logp[:, 0].view_as(tokens)).exp()
    order = logp.argsort(dim=1, descending=True, stable=True)
    places = (logp.exp().gather(1, order).cumsum(1) * CLASSES).long().clamp(max=CLASSES - 1)
    classes = torch.zeros_like(order).scatter(1, order, places)  # (P, V)
    expected = torch.bincount(classes.flatten(), logp.exp().flatten(), CLASSES) * tokens.shape[2]  # (C,)
    drawn = [classes.gather(1, tokens[:, replica]).flatten() for replica in range(replicas)]
    counts = torch.stack([torch.bincount(own, ratios[:, r].flatten(), CLASSES) for r, own in enumerate(drawn)])
    judged = expected >= LEAST_EXPECTED
    statistic = ((counts - expected).square() / expected)[:, judged].sum(1)  # (R,)
    return torch.special.gammaincc(judged.sum().double() / 2, statistic / 2).tolist()


def repeats(batch: Rollout, replicas: int) -> tuple[int, float, float]:
    """Count the completions that repeat an earlier one of their prompt.

    Returns this number, its expected value, and an upper bound on its p-value.

    ``batch`` has the list of prompts twice; in each list, every prompt has ``replicas`` successive questions. The
    probability that a completion repeats an earlier one is the sum of the probabilities of all different earlier ones.
    So the number of repeats minus its expected value is a martingale. The probability that it exceeds e - 2 times its
    variance by t is at most exp(-t) (Freedman, 1975).
    """
    tokens, logp = (
        x.unflatten(0, (2, -1, replicas * batch.rewards.shape[1])).transpose(0, 1).flatten(1, 2)
        for x in (batch.tokens, batch.logp)
    )
    repeated = (tokens[:, :, None] == tokens[:, None]).all(-1).tril(-1).any(-1)  # (P, S)
    new = logp.double().sum(-1).exp() * ~repeated
    chance = (new.cumsum(1) - new).clamp(max=1)
    excess = repeated.sum() - chance.sum() - (math.e - 2) * (chance * (1 - chance)).sum()
    return int(repeated.sum()), chance.sum().item(), math.exp(-max(0.0, excess.item()))


def figures(batch: Rollout, again: Rollout, first: Rollout, logp: Tensor, replicas: int) -> list[dict]:
    """Return all statistics as dicts with ``right``, ``text`` and ``values``. Most have one value per replica.

    In ``batch`` every replica gets every prompt twice, and ``again`` repeats this batch. ``first`` has many samples of
    the first token after each prompt, and ``logp`` the trainer's log-probs there. `chi_square` tests the tokens of
    ``first`` separately for each replica. `repeats` compares the completions of a prompt in ``batch`` across all
    replicas.
    """
    repeated, expected, p_value = repeats(batch, replicas)
    same = (batch.tokens[:, 0] == again.tokens[:, 0]).double().view(-1, replicas, batch.rewards.shape[1])
    least = FALSE_ALARM / (replicas + 1)
    rows = [
        ("p-value of a chi-square test of each sampler's first tokens", chi_square(first, logp, replicas), least),
        (f"p-value of {repeated} completions that repeat an earlier one, {expected:.4g} expected", [p_value], least),
        ("share of each sampler's first tokens that the same seeds repeat", same.mean((0, 2)).tolist(), SAME_AGAIN),
    ]
    return [
        {
            "right": all(value >= bound for value in values),
            "text": f"{what}: {', '.join(f'{value:.2g}' for value in values)}; at least {bound:.2g} expected",
            "values": values,
        }
        for what, values, bound in rows
    ]
