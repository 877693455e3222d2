"""An example of your own loss: SAPO, soft adaptive policy optimisation (arXiv 2511.20347).

    bash run_cpu.sh loss.kind=examples/loss_sapo.py:sapo

SAPO does not clip the ratio. Instead, a smooth gate weights each token. The gradient is largest where the ratio r is 1,
and decreases on both sides, faster for tokens with a negative advantage.
"""

import torch
from torch import Tensor

from grpo import LossInputs

TAU_POSITIVE, TAU_NEGATIVE = 1.0, 1.05  # temperatures of the gate, from the paper


def sapo(x: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -A f(r) with f(r) = (4 / tau) sigmoid(tau (r - 1)), where tau depends on the sign of A.

    r is the ratio and A the advantage of a token. The first result is the loss of each token. The second is a
    dictionary that maps NAME to a measurement of each token, whose mean becomes the metric actor/NAME. Both are (B, T)
    tensors, for B rows of T tokens.
    """
    ratio = (x.logp - x.old_logp).clamp(-20, 20).exp()
    tau = torch.where(x.advantages > 0, TAU_POSITIVE, TAU_NEGATIVE)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -x.advantages * gate, {"ratio_mean": ratio, "ratio_gap": (ratio - 1).abs()}
