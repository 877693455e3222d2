"""Handing the policy to the engine: the whole model once, then what training changes, with the step's noise if any.

The engine's copy is written from clean weights at every push, so noise never piles up; the trainer, the reference and
evaluations never see it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import aqn
import weights_hf
from config import Config
from hf_config import Architecture
from parallel_setup import Parallel


class WeightSync:
    """The one way from the trainer to the engine. Collective: every rank pushes the same tensors to its own engine."""

    def __init__(self, engine, model: torch.nn.Module, arch: Architecture, parallel: Parallel, cfg: Config) -> None:
        """Push the whole model. Raises InputError for noise targets that this model does not have."""
        self.engine, self.model, self.arch, self.parallel, self.cfg = engine, model, arch, parallel, cfg
        self.noise: dict[str, aqn.NormNoise] = {}
        if cfg.aqn.schedule != "off":
            self.noise = aqn.norm_targets(arch, cfg.aqn.targets, router=cfg.aqn.router)
        self.touched = aqn.touched_names(self.noise)
        self.clean = aqn.clean_norms(weights_hf.export(model, arch, parallel, only=self.touched), self.noise)
        self.checksum = 0.0  # sum of the adapted tensors of the last push, without noise
        engine.load_weights(weights_hf.export(model, arch, parallel))

    def push_clean(self) -> None:
        """The policy as the trainer has it: W + (alpha / R) B A, and the norms without noise."""
        self.engine.load_weights(self._changed())

    def push(self, step: int) -> dict[str, float]:
        """The policy with the noise of ``step`` (from 0), and what went: its checksum, and what the noise came to.

        Raises AqnError when the noise that arrived is not the noise that was asked for.
        """
        if not self.noise:
            self.push_clean()
            return {"sync/checksum": self.checksum}
        cfg = self.cfg
        sigma = aqn.sigma_at(
            step,
            cfg.train.steps,
            sigma_start=cfg.aqn.sigma_start,
            sigma_end=cfg.aqn.sigma_end,
            num_stages=cfg.aqn.num_stages,
            schedule=cfg.aqn.schedule,
        )
        stream, report = aqn.perturb(
            self._changed(), self.noise, self.clean, sigma=sigma, seed=cfg.train.seed, step=step
        )
        self.engine.load_weights(stream)
        aqn.check_report(report)
        return {
            "sync/checksum": self.checksum,
            "aqn/sigma": sigma,
            "aqn/modules": report.num_modules,
            "aqn/changed_elements": report.num_changed,
            "aqn/realised_std": report.std,
        }

    def _changed(self) -> Iterator[tuple[str, Tensor]]:
        """What training or noise changes, clean."""
        self.checksum = 0.0
        for name, tensor in weights_hf.export(self.model, self.arch, self.parallel, only=self.touched):
            if name not in self.touched:
                self.checksum += tensor.float().sum().item()
            yield name, tensor
