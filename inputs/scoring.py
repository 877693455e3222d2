"""Scores of completions: the reward that is learned from, whether an answer was found, and whether it is correct.

reward.method computes them in this process; reward.function and the method math in processes of their own.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import reward_gsm8k
from inputs.files import InputError
from inputs.workers import Failure, Workers
from knobs import RewardConfig

MATH = f"{Path(__file__).parent / 'math_answers.py'}:score"
ARGUMENTS = ("completion", "gold", "row")


class Call(NamedTuple):
    """What a completion is scored by."""

    completion: str
    gold: str
    row: dict[str, Any]  # the question's columns in its file


class Score(NamedTuple):
    reward: float
    found: bool  # an answer was found in the completion
    correct: bool  # this is what accuracy counts


class Scorer:
    """The reward of a run. Make it before the device is started: it may start processes."""

    def __init__(self, reward: RewardConfig, beat: Callable[[], None] = lambda: None) -> None:
        """``beat`` is called at least once a second while the processes work."""
        self.reward, self.workers = reward, None
        self.name = f"reward.function: {reward.function}" if reward.function else f"reward.method: {reward.method}"
        if reward.function:
            self.workers = Workers("reward.function", reward.function, ARGUMENTS, reward.seconds, beat)
        elif reward.method == "math":
            self.workers = Workers("reward.method math", MATH, ARGUMENTS, reward.seconds, beat)

    def __call__(self, calls: list[Call]) -> list[Score]:
        """The score of each completion, in their order.

        InputError if a call of reward.function fails or takes too long (its traceback is printed), or if the method
        cannot compare anything with the gold answer. The method math
        finds no answer in a completion that takes it too long.
        """
        if self.workers is None:
            return [self._of_method(call) for call in calls]
        scores = self.workers(calls, stops=bool(self.reward.function))
        for call, failure in [(c, s) for c, s in zip(calls, scores, strict=True) if isinstance(s, Failure)]:
            if self.reward.function:
                sys.stderr.write(failure.trace)
                raise InputError(
                    f"reward.function: {self.reward.function} {failure.cause}; "
                    f"question {str(call.row.get('question', call.row))[:60]!r}, completion {call.completion[:60]!r}"
                )
        return [Score(0.0, False, False) if isinstance(score, Failure) else Score(*score) for score in scores]

    def _of_method(self, call: Call) -> Score:
        try:
            reward = reward_gsm8k.score(call.completion, call.gold, self.reward.method)
        except ValueError as error:  # a gold answer that is no number
            raise InputError(
                f"{self.name}: {error}; other answers need reward.method math or a reward.function"
            ) from None
        return Score(reward, reward_gsm8k.parsable(call.completion, self.reward.method), reward == 1.0)

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
