"""Scores of completions: the reward that is learned from, whether an answer was found, and whether it is correct."""

from typing import Any, NamedTuple

import reward_gsm8k
from knobs import RewardConfig


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
    """The reward of a run."""

    def __init__(self, reward: RewardConfig) -> None:
        self.method = reward.method

    def __call__(self, calls: list[Call]) -> list[Score]:
        """The score of each completion, in their order."""
        scores = []
        for completion, gold, _ in calls:
            reward = reward_gsm8k.score(completion, gold, self.method)
            scores.append(Score(reward, reward_gsm8k.parsable(completion, self.method), reward == 1.0))
        return scores
