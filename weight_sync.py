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
        self.clean: dict[str, Tensor] = {}
        if self.noise:
            self.clean = aqn.clean_norms(weights_hf.export(model, arch, parallel, only=self.touched), self.noise)
        self.checksum = 0.0  # sum of the adapted tensors of the last push, without noise
        engine.load_weights(weights_hf.export(model, arch, parallel))

    def push_clean(self) -> None:
        """The policy as the trainer has it: W + (alpha / R) B A, and the norms without noise."""
        self.engine.load_weights(self._changed())

    def push(self, step: int, probe: list[int]) -> dict[str, float]:
        """The policy with the noise of ``step`` (from 0), and what went: its checksum, and what the noise came to.

        Noise goes after the clean policy, so that its effect on the prompt ``probe`` shows by itself: it is exactly 0
        for an engine that does not take it. Raises AqnError when the noise is not the noise that was asked for.
        """
        if not self.noise:
            self.push_clean()
            return {"sync/checksum": self.checksum}
        touched: dict[str, Tensor] = {}
        self.engine.load_weights(self._changed(touched))
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
            touched.items(), self.noise, self.clean, sigma=sigma, seed=cfg.train.seed, step=step
        )
        shift = 0.0
        if sigma:
            clean_logp = self._greedy_logp(probe)
            self.engine.load_weights(stream)
            shift = self._greedy_logp(probe) - clean_logp
        aqn.check_report(report)
        return {
            "sync/checksum": self.checksum,
            "aqn/sigma": sigma,
            "aqn/modules": report.num_modules,
            "aqn/changed_elements": report.num_changed,
            "aqn/realised_std": report.std,
            "aqn/probe_shift": abs(shift),
        }

    def _greedy_logp(self, prompt: list[int]) -> float:
        """The engine's log-prob of its likeliest next token."""
        return self.engine.sample([prompt], seeds=[0], num_samples=1, max_new_tokens=1, temperature=0.0)[0][0].logp[0]

    def _changed(self, touched: dict[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """What training or noise changes, clean; what noise changes is also kept in ``touched``."""
        self.checksum = 0.0
        for name, tensor in weights_hf.export(self.model, self.arch, self.parallel, only=self.touched):
            if name not in self.touched:
                self.checksum += tensor.float().sum().item()
            elif touched is not None:
                touched[name] = tensor
            yield name, tensor
