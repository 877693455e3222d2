"""SAPO, soft adaptive policy optimisation (arXiv 2511.20347), as a loss of one's own.

    python train_grpo.py configs/tiny_cpu.yaml loss.kind=examples/loss_sapo.py:sapo

Instead of a ratio that is clipped, a smooth gate weighs each token: its gradient is largest where the ratio r is 1 and
falls off on both sides, faster for tokens with a negative advantage.
"""

import torch
from torch import Tensor

from grpo import LossInputs

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # temperatures of the gate, of the paper


def sapo(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """-A f(r) with f(r) = 4 / tau sigmoid(tau (r - 1)), tau by the sign of A.

    Returns the loss of each token (B, T), and what is measured of it, each (B, T): the metrics actor/NAME are means.
    """
    ratio = (x.logp - x.old_logp).clamp(-20, 20).exp()
    tau = torch.where(x.advantages > 0, TAU_POSITIVE, TAU_NEGATIVE)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -x.advantages * gate, {"ratio_mean": ratio, "ratio_gap": (ratio - 1).abs()}
