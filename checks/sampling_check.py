"""Does the sampler draw tokens by the probabilities that it reports? A part of preflight.py --layers.

Log-probs of the tokens that were drawn do not say how they were drawn: a broken random generator has right log-probs.
These statistics of the draws are judged, so that a sound run fails with a probability below 1e-6:

- many first tokens of few prompts, by chi-square against the probabilities of all tokens;
- the later tokens, by chi-square of their places in the trainer's distribution;
- completions and first tokens that repeat an earlier one of their prompt, against the number that is predicted, also
  where one prompt is at all places of a batch;
- the first tokens of a batch that is asked for again with the same seeds.

P prompts, R replicas, G samples, V vocabulary, C classes. Place i of a batch asks prompt i // R of replica i % R.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

import model_megatron
from parallel_setup import Parallel
from rollout import Rollout

# All bounds of p sum to FALSE_ALARM. It is not 1e-6, because the tail of a chi-square of counts is up to four times as
# heavy as that of its distribution. Of the first tokens a tenth may differ, because kernels may round otherwise.
FALSE_ALARM, SAME_AGAIN = 1e-7, 0.9
FIRST_TOKENS = 4096  # of each replica; so many show a temperature that is 1.3 times too high
NUMBERS = 2**22  # of probabilities that are computed at once
CLASSES, LEAST_EXPECTED = 16, 50.0  # of about equal probability; a class with fewer expected tokens is not judged


@torch.no_grad()
def next_logprobs(model: torch.nn.Module, prompts: list[list[int]], parallel: Parallel, temperature: float) -> Tensor:
    """The log-prob of every token after each of equally long prompts, by rank 0's trainer.  -> (P, V) fp64 on the host

    Collective. The result is the same on every rank.
    """
    even = [prompt + [0] * (-len(prompt) % parallel.tensor) for prompt in prompts]  # sequence parallelism splits rows
    hidden = model_megatron.hidden_states(model, torch.tensor(even, device=parallel.device))[len(prompts[0]) - 1]
    return _all_logprobs(model, hidden, parallel, temperature)


def _all_logprobs(model: torch.nn.Module, hidden: Tensor, parallel: Parallel, temperature: float) -> Tensor:
    """The log-probs of all tokens from the last hidden states, by rank 0's trainer.  (.., h) -> (.., V) fp64"""
    by_rank = parallel.gather_rows(
        (hidden @ model_megatron.head_weight(model).t()).float() / temperature
    )  # (ranks, .., V / tensor)
    return by_rank[: parallel.tensor].movedim(0, -2).flatten(-2).double().log_softmax(-1)


@torch.no_grad()
def places(model: torch.nn.Module, batch: Rollout, parallel: Parallel, temperature: float) -> Tensor:
    """Where each token stands in the trainer's distribution, from the most probable one: in [0, 1).  -> (S, T)

    A token stands at a random point of its own probability (a randomised probability integral transform), so the places
    of soundly drawn tokens are uniform, whatever the distributions are. -1 for first tokens, and where there is none.
    Collective; all prompts have the same length, and the result is the same on every rank.
    """
    length, (number, longest) = len(batch.prompts[0]), batch.tokens.shape
    group, generator = batch.rewards.shape[1], torch.Generator().manual_seed(0)
    prompts = torch.tensor(batch.prompts).repeat_interleave(group, 0)
    rows = F.pad(torch.cat([prompts, batch.tokens], 1), (0, -(length + longest) % parallel.tensor))
    standing = torch.full((number, longest), -1.0, dtype=torch.float64)
    at_once = max(1, NUMBERS // (longest * len(model_megatron.head_weight(model))))
    for some in torch.arange(number).split(at_once) if longest > 1 else ():
        hidden = model_megatron.hidden_states(model, rows[some].to(parallel.device))[length : length + longest - 1]
        chance = _all_logprobs(model, hidden, parallel, temperature).exp().transpose(0, 1)  # (s, T - 1, V)
        own = chance.gather(2, batch.tokens[some, 1:, None])
        before = (chance * (chance > own)).sum(2)
        standing[some, 1:] = before + own[..., 0] * torch.rand(before.shape, generator=generator, dtype=torch.float64)
    is_token = torch.arange(longest) < torch.tensor(batch.lengths)[:, None]
    return standing.where(is_token, -1.0)


def uniform(places_of_tokens: Tensor, replicas: int, group: int) -> list[float]:
    """The p-value of a chi-square of the places of each replica's tokens.  (S, T) -> R values"""
    replica = torch.arange(len(places_of_tokens)) // group % replicas
    values = []
    for own in (places_of_tokens[replica == r] for r in range(replicas)):
        counts = torch.histc(own[own >= 0].clamp(max=1.0), CLASSES, 0.0, 1.0)
        expected = counts.sum() / CLASSES
        statistic = (counts - expected).square().sum() / expected.clamp(min=1)
        enough = expected >= LEAST_EXPECTED
        values.append(torch.special.gammaincc(torch.tensor((CLASSES - 1) / 2), statistic / 2).item() if enough else 1.0)
    return values


def chi_square(batch: Rollout, logp: Tensor, order: Tensor, replicas: int) -> list[float]:
    """The p-value of each replica's first tokens, where tokens that follow each other in ``order`` (P, V) are classed.

    ``logp``: (P, V) of the trainer, which gives the classes and their probabilities. A drawn token counts as the ratio
    of the trainer's to the sampler's probability. The sum of these ratios in a class has the trainer's probability of
    the class as its mean for every sampler that draws as it reports, also where its kernels round otherwise.
    A class has tokens of all prompts. Its count then varies less than that of one multinomial distribution.
    """
    tokens = batch.tokens[:, 0].view(len(logp), replicas, -1)  # (P, R, G)
    ratios = (logp.gather(1, tokens.flatten(1)).view_as(tokens) - batch.logp[:, 0].view_as(tokens)).exp()
    places = (logp.exp().gather(1, order).cumsum(1) * CLASSES).long().clamp(max=CLASSES - 1)
    classes = torch.zeros_like(order).scatter(1, order, places)  # (P, V)
    expected = torch.bincount(classes.flatten(), logp.exp().flatten(), CLASSES) * tokens.shape[2]  # (C,)
    drawn = [classes.gather(1, tokens[:, replica]).flatten() for replica in range(replicas)]
    counts = torch.stack([torch.bincount(own, ratios[:, r].flatten(), CLASSES) for r, own in enumerate(drawn)])
    judged = expected >= LEAST_EXPECTED
    statistic = ((counts - expected).square() / expected)[:, judged].sum(1)  # (R,)
    return torch.special.gammaincc(judged.sum().double() / 2, statistic / 2).tolist()


def repeats(batch: Rollout, what: str, copies: int, replicas: int) -> tuple[str, list[float]]:
    """How many completions repeat an earlier one of the same prompt, the number expected, and a bound of its p-value.

    ``copies`` times the batch has each prompt at ``replicas`` places that follow each other, all prompts each time.
    Given the completions before it, a completion repeats one of them with the sum of their probabilities. So the number
    less its expectation is a martingale, and exceeds e - 2 times its variance by t with a probability of at most
    exp(-t) (Freedman, 1975).
    """
    tokens, logp = (
        x.unflatten(0, (copies, -1, replicas * batch.rewards.shape[1])).transpose(0, 1).flatten(1, 2)
        for x in (batch.tokens, batch.logp)
    )
    repeated = (tokens[:, :, None] == tokens[:, None]).all(-1).tril(-1).any(-1)  # (P, S)
    new = logp.double().sum(-1).exp() * ~repeated
    chance = (new.cumsum(1) - new).clamp(max=1)
    excess = repeated.sum() - chance.sum() - (math.e - 2) * (chance * (1 - chance)).sum()
    text = f"p of {repeated.sum()} {what} that repeat an earlier one, {chance.sum():.4g} expected"
    return text, [math.exp(-max(0.0, excess.item()))]


def figures(
    batch: Rollout, again: Rollout, first: Rollout, alone: Rollout, logp: Tensor, later: Tensor, replicas: int
) -> list[dict]:
    """Every statistic: whether it is right, a text for a reader, and its values, most of them one for each replica.

    ``batch``: every replica is asked every prompt twice. ``again``: the same once more. ``first``: first tokens after
    the prompts of ``logp``; replicas are judged apart there, because every two of their tokens are compared. ``alone``:
    one prompt at every place. ``later``: what `places` returns for ``batch``.
    """
    group = batch.rewards.shape[1]
    orders = {"probability": logp.argsort(1, descending=True), "id": torch.arange(logp.shape[1]).expand_as(logp)}
    p_values = [
        *((f"p of a chi-square of each sampler's first tokens, classed by {name}",
           chi_square(first, logp, order, replicas)) for name, order in orders.items()),
        ("p of a chi-square of each sampler's later tokens, by their places", uniform(later, replicas, group)),
        repeats(batch, "completions", copies=2, replicas=replicas),
        repeats(alone, "completions of one prompt", copies=len(alone.prompts) // replicas, replicas=replicas),
        repeats(first, "first tokens", copies=1, replicas=1),
    ]  # fmt: skip
    least = FALSE_ALARM / sum(len(values) for _, values in p_values)
    same = (batch.tokens[:, 0] == again.tokens[:, 0]).double().view(-1, replicas, group)
    shares = ("share of each sampler's first tokens that the same seeds give again", same.mean((0, 2)).tolist())
    return [
        {
            "right": all(value >= bound for value in values),
            "text": f"{what}: {', '.join(f'{value:.2g}' for value in values)}; at least {bound:.2g} expected",
            "values": values,
        }
        for bound, rows in ((least, p_values), (SAME_AGAIN, [shares]))
        for what, values in rows
    ]
