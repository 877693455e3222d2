"""The last rollout.ranks ranks sample, one step ahead of the others, which train.

The sampling of a rollout, with the policy before the last update, takes place while the trainers learn from the rollout
before. The two sides are worlds of their own, each with its layout. They meet twice a step at a Bridge, in a fixed
order: the policy's factors go to the samplers, and a scored rollout comes back. There is no queue and no clock, so a
run repeats itself to the byte, and equals a run with rollout.staleness 1 whose ranks do both. Here steps count from 0,
and a policy's version is the number of steps after which it had these factors.
"""

import dataclasses
import os
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

import parallel_setup
from engines.interface import Completion
from facts.exits import Tripped
from inputs.config import to_yaml
from knobs import Config
from learner import Learner
from parallel_setup import Parallel
from rollout import Sampled
from run.bridge import Bridge
from run.check import Inputs, texts
from run.sampler import Evaluation, Pushed, Sampler
from runlog.progress import Heartbeat, StepTimer
from weights.policy import Policy


class Delivery(NamedTuple):
    """A rollout on its way to the trainers."""

    step: int
    version: int  # of the policy that sampled
    pushed: Pushed
    sampled: Sampled  # ``completions`` has the groups of all prompts
    seconds: dict[str, float]  # of the phases of the samplers


# ------------------------------------------------------------------------------------------------ seen by the trainers


@dataclass
class SeparateSampler:
    """The sampler on ranks of its own, as the trainers see it."""

    cfg: Config
    parallel: Parallel
    inputs: Inputs
    learner: Learner
    bridge: Bridge
    sent: int = -1  # the version of the policy that was sent last
    seconds: dict[str, float] = field(default_factory=dict)  # of the samplers' phases for the last rollout

    def start(self, first_step: int, read: dict[str, str]) -> None:
        """Agree on the input (``read``: its checksums) and on the step, and send the policy that samples first."""
        if self.parallel.rank == 0:
            self.bridge.send((first_step, read), "the start of the other side")
        with self.learner.sampling_policy():
            self.bridge.send_policy(self.learner.policy, max(0, first_step - 1))

    def push(self, step: int) -> None:
        """Send the policy before ``step``, with which the next rollout is sampled while ``step`` is learned."""
        if step + 1 < self.cfg.train.steps and self.sent != step:
            self.push_clean(step)

    def sample(self, step: int) -> tuple[Sampled, Pushed]:
        """The rollout of ``step``, and the push before it.

        Tripped for a rollout of another step or policy, or to other questions than those of the step.
        """
        found, completions = self._receive_rollout(f"the rollout of step {step + 1}")
        sampled, asked = found.sampled, self.inputs.questions.pick(step, self.cfg.rollout.prompts_per_step)
        same = [one.prompt for one in sampled.all_asked[: len(asked)]] == [one.prompt for one in asked]
        if (found.step, found.version) != (step, max(0, step - 1)) or not same:
            raise Tripped(
                f"rollout.ranks: step {step + 1} got the rollout of step {found.step + 1}, which the policy after "
                f"{found.version} steps sampled, {'with' if same else 'without'} the questions of this step; needed: "
                f"after {max(0, step - 1)} steps\n  look at: the order of exchanges in sampling_ranks.Samplers.serve"
            )
        self.seconds = found.seconds
        # Each rank has other completions now, however many ranks of the samplers had the same ones.
        batch = dataclasses.replace(sampled.batch, ranks_alike=1)
        return sampled._replace(batch=batch, completions=completions), found.pushed

    def _receive_rollout(self, what: str) -> tuple[Delivery, list[list[Completion]]]:
        """What rank 0 receives, for every rank; of the completions each has those that it would sample itself."""
        box, own, by_rank = [None], [None], None
        if self.parallel.rank == 0:
            found = self.bridge.receive(what)
            groups, ranks = found.sampled.completions, self.parallel.world_size
            by_rank = [groups[rank::ranks] for rank in range(ranks)]
            box[0] = found._replace(sampled=found.sampled._replace(completions=[]))
        self.bridge.wait_for_first(what)
        dist.broadcast_object_list(box, src=0)
        dist.scatter_object_list(own, by_rank)
        return box[0], own[0]

    def push_clean(self, version: int) -> None:
        """Send the policy after ``version`` steps."""
        self.bridge.send_policy(self.learner.policy, version)
        self.sent = version

    def evaluate(self, version: int) -> Evaluation:
        """The evaluation of the policy after ``version`` steps, which was sent last."""
        found, evaluation = self.bridge.receive_for_all("an evaluation")
        if found != version:
            raise Tripped(f"rollout.ranks: got an evaluation after {found} steps; needed: after {version} steps")
        return evaluation

    def differing_layer(self, bound: float) -> str:
        return "a run with rollout.ranks=0 names the layer"

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------------ the sampling side


@dataclass
class Samplers:
    """The sampling side of a run."""

    sampler: Sampler
    policy: Policy
    bridge: Bridge
    first_step: int
    version: int  # of the policy

    def serve(self) -> None:
        """Sample every rollout and make every evaluation, in the order in which the trainers ask for them."""
        cfg = self.sampler.cfg
        steps = cfg.train.steps
        if self.first_step == 0:
            self._evaluate()
        for step in range(self.first_step, steps):
            timer = StepTimer(self.sampler.heartbeat, step, self.policy.parallel.device)
            version = self.version
            with timer.phase("sync"):
                self.sampler.push(step)
            with timer.phase("generate"):
                sampled, pushed = self.sampler.sample(step)
                groups = self._all_groups(sampled)
            evaluates = step > self.first_step and cfg.train.is_due(step, cfg.eval.every)
            if evaluates or step + 1 < steps:
                self._take(step)
            if evaluates:
                self._evaluate()
            seconds = {f"samplers/{phase}_s": round(value, 4) for phase, value in timer.seconds.items()}
            self._send(Delivery(step, version, pushed, sampled._replace(completions=groups), seconds))
        if self.first_step < steps:
            self._take(steps)
            self._evaluate()
        self.sampler.close()

    def _take(self, version: int) -> None:
        self.bridge.receive_policy(self.policy, version)
        self.version = version

    def _evaluate(self) -> None:
        if self.version:
            self.sampler.push_clean(self.version)
        self._send((self.version, self.sampler.evaluate(self.version)))

    def _send(self, value: object) -> None:
        if self.policy.parallel.rank == 0:
            self.bridge.send(value, "a rollout or evaluation to be taken")

    def _all_groups(self, sampled: Sampled) -> list:
        """The groups of all prompts, on rank 0."""
        parallel = self.policy.parallel
        by_rank: list = [None] * parallel.world_size
        is_first = parallel.rank == 0
        dist.gather_object(sampled.completions, by_rank if is_first else None)
        if not is_first:
            return []
        replicas = by_rank[:: self.sampler.cfg.rollout.replica_ranks]
        return [replicas[prompt % len(replicas)][prompt // len(replicas)] for prompt in range(len(sampled.asked))]


def open_samplers(cfg: Config, parallel: Parallel, heartbeat: Heartbeat, inputs: Inputs, bridge: Bridge) -> Samplers:
    """The ranks that only sample, with the policy that samples first. Collective over them."""
    # vLLM takes its place in the world of these ranks from the variables of torchrun, which counted all ranks.
    os.environ |= {"RANK": str(parallel.rank), "WORLD_SIZE": str(parallel.world_size)}
    with heartbeat.waiting():  # as in open_run
        read = parallel_setup.refuse_unequal(texts(to_yaml(cfg), inputs))
    policy = Policy.load(bridge.side.cfg, inputs.arch, parallel)
    heartbeat.beat("loading the base weights")
    first_step = bridge.agreed_start(read)
    version = max(0, first_step - 1)
    bridge.receive_policy(policy, version)
    sampler = Sampler(bridge.side.cfg, inputs, policy, heartbeat)
    return Samplers(sampler, policy, bridge, first_step, version)
