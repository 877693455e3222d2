"""The engine that holds the policy: pushes, rollouts and evaluations.

run/sampling_ranks.py has the same for engines on ranks of their own (rollout.ranks). Steps count from 0.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import evaluate
import rollout
from engines import factory
from knobs import Config
from plan import grid, parameters
from rollout import Sampled
from run.check import Inputs
from runlog.progress import Heartbeat
from weight_sync import Push
from weights.policy import Policy

Evaluation = tuple[dict, list[dict]]  # what evaluate.evaluate returns


class Pushed(NamedTuple):
    metrics: dict[str, float]
    checksums: list[float]  # of what each rank has pushed


class Sampler:
    """An engine that gets the policy. All of its ranks make the same calls."""

    seconds: dict[str, float] = {}  # of the phases of ranks that only sample: there are none

    def __init__(
        self,
        cfg: Config,
        inputs: Inputs,
        policy: Policy,
        heartbeat: Heartbeat,
        sampling_policy: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Open the engine and give it ``policy``, whose model goes to the device.

        Within ``sampling_policy()`` the adapters are those of rollout.staleness steps ago.
        """
        self.sampling_policy = sampling_policy
        self.pushed = Pushed({}, [])  # the last push
        self.cfg, self.inputs, self.parallel, self.heartbeat = cfg, inputs, policy.parallel, heartbeat
        self.probe = inputs.held_out[""][0].prompt
        device, layout = policy.parallel.device, grid.of(cfg.parallel, cfg.rollout, policy.parallel.world_size)
        routes, shares_frozen = cfg.replay.mode == "r3", cfg.model.quantisation == "none"
        if (
            cfg.keeps_factors_apart
            and parameters.has_stacks(cfg.rollout, layout, device.type, routes=routes, adapter=True)
            and parameters.shared_experts(
                policy.arch, cfg.lora, layout, adapter=True, shares_merged=False, shares_frozen=shares_frozen
            )[0]
        ):
            Push.frozen_experts_to_host_(policy.model, device)
        # The engine reports progress, because decoding may take longer than train.stall_seconds.
        self.engine = factory.open_engine(
            cfg, policy.arch, device, inputs.stop_tokens, inputs.pad_token, heartbeat.beat
        )
        self.push_policy = Push(cfg, policy, self.engine)
        if not self.push_policy.shared_bytes:
            policy.model.to(device)
        heartbeat.beat("the first push of the whole model")
        if cfg.rollout.expert_parallel:
            self.push_policy.check_start(self.probe)

    def push(self, step: int) -> None:
        """Give the engine the policy of rollout.staleness steps before ``step``, with the noise of ``step``."""
        with self.sampling_policy():
            metrics = self.push_policy(step, self.probe)
        self.pushed = Pushed(metrics, self.parallel.gather_objects(metrics["sync/checksum"]))

    def sample(self, step: int) -> tuple[Sampled, Pushed]:
        """The scored rollout of ``step``, and the push before it."""
        questions, score = self.inputs.questions, self.inputs.score
        return rollout.sample_step(self.engine, questions, score, self.cfg, self.parallel, step), self.pushed

    def push_clean(self, version: int) -> None:
        """Give the engine the policy after ``version`` steps, as its adapters are now."""
        self.push_policy.clean()

    def evaluate(self, version: int) -> Evaluation:
        """Evaluate the policy after ``version`` steps, which the engine has."""
        cfg, inputs = self.cfg, self.inputs
        return evaluate.evaluate(
            self.engine, inputs.held_out, inputs.score, cfg.eval, cfg.rollout, self.parallel, self.heartbeat.beat
        )

    def differing_layer(self, bound: float) -> str:
        """The layer in which sampler and trainer differ by more than ``bound``, after another push."""
        self.push_policy.clean()
        return self.push_policy.probe.first_differing_layer(self.probe, bound)

    def close(self) -> None:
        self.engine.close()
