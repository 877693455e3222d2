"""What every engine gives back, whichever samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Completion:
    """One sampled answer to one prompt."""

    tokens: list[int]  # the stop token included when there is one
    logp: list[float]  # float32, one a token: log-probability under the temperature-scaled, untruncated distribution
    finish_reason: str  # stop | length
    routed_experts: np.ndarray | None = None  # uint8 (prompt + generated - 1, MoE layers, K); the last token has no row
