"""Named faults of completions with several turns: whose a token is, and what follows a turn.

The names are in FAULTS at the end.
"""

from collections.abc import Callable

import torch
from planting import Plant, after, instead
from pytest import MonkeyPatch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import data_gsm8k
import rollout
from engines.torch_sampler import Given
from model.batches import Rollout
from tasks import environment as environments
from tasks.environment import Environment, Reply, Template, Turn


def all_own(_: None, batch: Rollout) -> None:
    batch.mask = torch.arange(batch.tokens.shape[1]) < torch.tensor(batch.lengths)[:, None]


def counted_whole(patch: MonkeyPatch) -> None:
    patch.setattr(Rollout, "sampled_lengths", property(lambda batch: batch.lengths))


def templates(change: Callable[[Template], Template]) -> Plant:
    return after(data_gsm8k, "turn_tokens", lambda template, *_: change(template))


def controls(real: Callable, text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def keeps_logp(real: Callable, given: Given, n: int, row_ids: Tensor, token: Tensor, logp: Tensor) -> tuple:
    return real(given, n, row_ids, token, logp)[0], logp


def keeps_drawn(real: Callable, given: Given, n: int, row_ids: Tensor, token: Tensor, logp: Tensor) -> tuple:
    return token, real(given, n, row_ids, token, logp)[1]


def cut(real: Callable, environment: Environment, turn: Turn, number: int, text: str | None) -> Reply:
    """An answer that is too long is cut off."""
    reply = real(environment, turn._replace(left=10**6), number, text)
    return reply._replace(tokens=reply.tokens[: turn.left - 1])


def merged_without_mask(real: Callable, batch: Rollout, drawn: Rollout, indices) -> Rollout:
    merged = real(batch, drawn, indices)
    merged.mask = batch.mask
    return merged


FAULTS: dict[str, Plant] = {
    "an environment's tokens are trained": after(Rollout, "__post_init__", all_own),
    "an environment's tokens count in the loss": counted_whole,
    "a new group keeps the old one's masks": instead(rollout, "with_groups", merged_without_mask),
    "given tokens keep their log-probs": instead(Given, "instead", keeps_logp),
    "drawn tokens are in the place of given ones": instead(Given, "instead", keeps_drawn),
    "the newline after an end token is gone": templates(lambda template: template._replace(before=template.before[1:])),
    "no turn of the policy is opened": templates(lambda template: template._replace(after=[])),
    "an answer has control tokens": instead(environments, "plain_ids", controls),
    "answers go to another row": after(Environment, "answers", lambda answers, *_: answers[::-1]),
    "turns are those of another question": instead(
        Environment, "turns", lambda real, environment, questions: real(environment, questions[::-1])
    ),
    "there is a turn too many": instead(
        Environment, "_reply", lambda real, self, turn, number, text: real(self, turn, number - 1, text)
    ),
    "an answer that does not fit is cut": instead(Environment, "_reply", cut),
    "the function gets the last turn alone": after(Environment, "texts", lambda texts, *_: texts[-1:]),
    "a stop that the environment began counts": instead(
        Environment, "_stopped", lambda real, self, tokens, mask: real(self, tokens, [True] * len(mask))
    ),
    "every end token is answered": instead(
        Environment,
        "_without_asking",
        lambda real, self, turn: None if turn.tokens[-1] in self.stop_tokens else real(self, turn),
    ),
    "only whole stops can end a turn": after(
        Environment,
        "_completing",
        lambda found, self: frozenset(token for token in found if self.tokenizer.decode([token]) in self.stops),
    ),
}
