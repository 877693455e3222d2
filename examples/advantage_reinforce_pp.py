"""An example of your own advantage: REINFORCE++ with the group's mean as its baseline (arXiv 2501.03262).

    bash run_cpu.sh loss.advantage=examples/advantage_reinforce_pp.py:advantages

As in GRPO, the baseline of a question is the mean reward of its completions. The scale, however, comes from all
completions of the step. So a question whose completions get nearly equal rewards does not count more than a question
whose rewards differ.
"""

from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """Return each reward minus its group's mean, divided by the standard deviation of all these differences.

    P is the number of prompts, and G the number of completions per prompt.  (P, G) -> (P, G)
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return centred / (centred.std() + 1e-8)
