"""REINFORCE++ with the group's mean as its baseline (arXiv 2501.03262), as an advantage of one's own.

    python train_grpo.py configs/tiny_cpu.yaml loss.advantage=examples/advantage_reinforce_pp.py:advantages

The mean of a question's completions is its baseline, as in GRPO, but the scale is that of all completions of the step.
So a question on which nearly all completions agree does not count more than one on which they differ.
"""

from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """Rewards minus the mean of their group, over the standard deviation of all of them.  (P, G) -> (P, G)"""
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (centred.std() + 1e-8)
