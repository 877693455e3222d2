"""The environment of a completion: a user's function that answers the policy's turns (rollout.environment).

Text from the policy is never tokenised again. Each answer is tokenised once, separately, and its tokens are appended.
If the policy ends its turn with an end token, the answer is written as a turn of the model's chat template. If the
policy writes a string of rollout.stop, the answer follows unchanged, within the policy's turn. The function runs in the
worker processes of tasks/scoring.py.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from facts.exits import InputError
from knobs import RolloutConfig
from tasks.question_files import Question
from tasks.scoring import ENVIRONMENT, Failure, Pool

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Waiting = Callable[[], contextlib.AbstractContextManager[None]]


class Turn(NamedTuple):
    """An unfinished completion whose last token may have ended the policy's turn."""

    prompt: int  # index of the prompt in the engine's call
    tokens: list[int]  # the completion so far
    mask: list[bool]  # whether the policy sampled a token, as in Completion
    left: int  # number of new tokens that are still allowed


class Reply(NamedTuple):
    """The tokens that follow a Turn, or the reason why the completion ends. With neither, the policy just continues."""

    tokens: list[int] = []  # the environment's tokens
    reason: str = ""  # the finish_reason if the completion ends here


class Turns(NamedTuple):
    """The environment's interface for one call to an engine."""

    may_end: frozenset[int]  # the tokens, including end tokens, after which the engine calls `reply`
    reply: Callable[[Sequence[Turn]], list[Reply]]
    waiting: Waiting = contextlib.nullcontext  # makes a context in which a rank waits while another rank calls `reply`


class Template(NamedTuple):
    """The tokens that a chat template adds between two turns of the policy, around the environment's text."""

    end: int | None = None  # the token that ends the policy's turn; None without a chat template
    before: Sequence[int] = ()  # the tokens between ``end`` and the environment's text
    after: Sequence[int] = ()  # the tokens between the environment's text and the policy's next turn


class Environment:
    """The function of rollout.environment, in a form that an engine can call.

    An engine works with tokens, and the function works with strings.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: Collection[int],
        template: Template,
        pool: Pool,
        waiting: Waiting = contextlib.nullcontext,
    ) -> None:
        if template.end is None and not rollout.stop:
            raise InputError("rollout.stop: missing; set a text that ends a turn, or use a model with a chat template")
        self.rollout, self.tokenizer, self.pool, self.waiting = rollout, tokenizer, pool, waiting
        self.template, self.stop_tokens, self.stops = template, frozenset(stop_tokens), rollout.stop
        self.may_end = self.stop_tokens | self._completing()
        self.seconds = 0.0  # how long decoding has waited for the function; callers reset it to 0

    def turns(self, questions: Sequence[Question]) -> Turns:
        """Return the Turns for one call to an engine. The prompts of this call are those of ``questions``."""
        return Turns(
            self.may_end, lambda turns: self.reply([questions[turn.prompt] for turn in turns], turns), self.waiting
        )

    def reply(self, questions: Sequence[Question], turns: Sequence[Turn]) -> list[Reply]:
        """Return the reply to each of ``turns``. ``questions`` has the question of each turn.

        All calls of the user's function are passed to the worker processes together.
        """
        replies = [self._without_asking(turn) for turn in turns]
        asked = [index for index, reply in enumerate(replies) if reply is None]
        spoken = [self.texts(turns[index].tokens, turns[index].mask) for index in asked]
        answers = self.answers([(texts, questions[index].columns) for index, texts in zip(asked, spoken, strict=True)])
        for index, texts, answer in zip(asked, spoken, answers, strict=True):
            replies[index] = self._reply(turns[index], len(texts) // 2 + 1, answer)
        return replies

    def answers(self, calls: Sequence[tuple[list[str], dict[str, Any]]]) -> list[str | None]:
        """Call the function for each (turns, row) and return its answers.

        Raises InputError if a call fails or takes too long.
        """
        began, answers = time.monotonic(), []
        results = self.pool.results(ENVIRONMENT, calls, self.rollout.environment_seconds)
        for (texts, row), result in zip(calls, results, strict=True):
            if isinstance(result, Failure):
                self.pool.refuse(ENVIRONMENT, result, row, "turn", texts[-1])
            answers.append(result)
        self.seconds += time.monotonic() - began
        return answers

    def _without_asking(self, turn: Turn) -> Reply | None:
        """Return the reply to a turn that the function need not answer, or None if the function has to answer it.

        The function need not answer if the turn has not ended. It also need not answer if the turn has ended with an
        end token other than the template's.
        """
        if turn.tokens[-1] in self.stop_tokens:
            return None if turn.tokens[-1] == self.template.end else Reply(reason="stop")
        return None if self._stopped(turn.tokens, turn.mask) else Reply()

    def _reply(self, turn: Turn, number: int, text: str | None) -> Reply:
        """Convert the function's ``text`` into the reply to ``turn``, the policy's ``number``-th turn."""
        by_end_token = turn.tokens[-1] in self.stop_tokens
        if text is None:
            return Reply(reason="stop" if by_end_token else "environment")
        answer = plain_ids(text, self.tokenizer)
        if by_end_token:
            answer = [*self.template.before, *answer, *self.template.after]
        if answer and number >= self.rollout.max_turns:
            return Reply(reason="turns")
        if answer and len(answer) >= turn.left:
            return Reply(reason="length")
        return Reply(answer)

    def shown(self) -> str:
        """Return a line for `--check` that shows an answer after an end token as the model sees it.

        Without a chat template, the line is empty.
        """
        if self.template.end is None:
            return ""
        tokens = [self.template.end, *self.template.before, *plain_ids("ANSWER", self.tokenizer), *self.template.after]
        return f"after an end token the environment answers: {self.tokenizer.decode(tokens)!r}\n"

    def texts(self, tokens: list[int], mask: list[bool]) -> list[str]:
        """Return the texts of all turns, which are alternately the policy's and the environment's.

        The texts do not include the template's tokens.
        """
        found, ended = [], False
        for own, pairs in itertools.groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1]):
            ids = [token for token, _ in pairs]
            if not own and ended:
                ids = ids[len(self.template.before) : len(ids) - len(self.template.after)]
            found.append(self.tokenizer.decode(ids))
            ended = ids[-1:] == [self.template.end]
        return found

    def _stopped(self, tokens: list[int], mask: list[bool]) -> bool:
        """Return whether the last token completes a string of rollout.stop in the policy's current turn."""
        turn = max((i + 1 for i, own in enumerate(mask) if not own), default=0)  # the start of the turn
        window = tokens[max(turn, len(tokens) - 1 - max(map(len, self.stops), default=0)) :]
        now, before = self.tokenizer.decode(window), self.tokenizer.decode(window[:-1])
        return any(now.count(stop) > before.count(stop) for stop in self.stops)

    def _completing(self) -> frozenset[int]:
        """Return the tokens that can complete a string of rollout.stop.

        Such a token contains the whole string, or begins with the last part of the string.
        """
        if not self.stops:
            return frozenset()
        texts = [self.tokenizer.decode([token]) for token in range(len(self.tokenizer))]
        ends = tuple({stop[start:] for stop in self.stops for start in range(len(stop))})
        return frozenset(
            token
            for token, text in enumerate(texts)
            if text.startswith(ends) or any(stop in text for stop in self.stops)
        )


def plain_ids(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of ``text``.

    If the text contains the name of a special token, the name is tokenised as plain text, so it cannot end a turn.
    """
    return list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
