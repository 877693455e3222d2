"""Sends the policy to the engine (step 1): first the whole model, later the tensors that training or AQN changes.

If rollout.sync is adapter, the engine keeps the base weights and gets the LoRA factors. If it is merged, the engine
gets whole weights with LoRA merged into them. Every push starts from the clean weights, so noise never accumulates.
Only the engine's copy has noise; the trainer, the reference and the evaluations have none.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import aqn
from engines import vllm_colocated
from engines.interface import Engine, Stack
from engines.probe import Probe
from facts.architectures import modules
from facts.exits import InputError, Tripped
from hardware import device as devices
from knobs import Config, Merging
from lora_megatron import LoRAGroupedLinear
from model.megatron_model import GroupedLinear
from parallel_setup import gather
from plan import grid
from plan.way import Way
from weights import huggingface
from weights.policy import Policy

# At temperature 1 a confident policy has log-probs of exactly 0, which would hide the noise. 2 is vLLM's maximum.
# (vllm-ascend 0.23 always reports log-probs at temperature 1.)
FLAT = 2.0

Stream = Iterator[tuple[str, Tensor]]

# ------------------------------------------------------------------------------------------------ the three ways


class Tensors(Way):
    """The way in which the engine gets whole tensors with LoRA merged.

    Every rank gathers them from all ranks, so all ranks call the methods together.
    """

    def __init__(self, cfg: Config, policy: Policy) -> None:
        parallel = policy.parallel
        super().__init__(cfg, grid.of(cfg.parallel, cfg.rollout, parallel.world_size), parallel.device.type)
        self.policy = policy

    def make_room(self) -> None:
        """Do nothing before the engine is opened, because merged experts are shared only after the first push."""

    def tensors(self, only: set[str] | None = None, experts: bool = True) -> Stream:
        """Yield the tensors for Engine.load_weights. For ``only`` and ``experts`` see huggingface.export."""
        of = self.policy
        return huggingface.export(of.model, of.arch, of.parallel, only=only, experts=experts)

    def send_all(self, push: "Push") -> None:
        """Give the engine the whole model."""
        push.engine.load_weights(push.tensors())

    def send(self, push: "Push", watched: Callable[[Stream], Stream]) -> None:
        """Give the engine everything that training or noise changes. Every stream passes through ``watched``."""
        if push.stacks:
            push.engine.load_stacks(watched(push.merged_stacks()))
        push.engine.load_weights(watched(push.tensors(set(push.clean_norms))))


class Shards(Tensors):
    """The way in which every rank copies its own shards into its engine, without communication.

    It is used with rollout.expert_parallel.
    """

    def tensors(self, only: set[str] | None = None, experts: bool = True) -> Stream:
        of = self.policy
        return vllm_colocated.shards(of.model, of.arch, of.parallel, only=only, experts=experts)


class Factors(Tensors):
    """The way to push in which the engine keeps the base weights and gets whole LoRA factors (rollout.sync adapter).

    All ranks call the methods together.
    """

    def make_room(self) -> None:
        """Move the experts to the host until they are shared, so that the device never stores them twice."""
        if not self.shares(adapted=True):
            return
        for module in self.policy.model.modules():
            if isinstance(module, GroupedLinear):
                module.weight = torch.nn.Parameter(module.weight.detach().cpu(), requires_grad=False)
        devices.release(self.policy.parallel.device)

    def tensors(self, only: set[str] | None = None, experts: bool = True) -> Stream:
        of = self.policy
        return huggingface.export(of.model, of.arch, of.parallel, only=only, merge=False, experts=experts)

    def send_all(self, push: "Push") -> None:
        super().send_all(push)
        push.engine.load_adapter(dict(self.policy.whole()))

    def send(self, push: "Push", watched: Callable[[Stream], Stream]) -> None:
        if push.clean_norms:
            push.engine.load_weights(watched(push.tensors(set(push.clean_norms))))
        push.engine.load_adapter(dict(watched(self.policy.whole())))


def way_of(cfg: Config, policy: Policy) -> Tensors:
    """Return the way in which a run sends its policy to the engine."""
    if cfg.merging is Merging.NOWHERE:
        return Factors(cfg, policy)
    return Shards(cfg, policy) if cfg.rollout.expert_parallel else Tensors(cfg, policy)


# ------------------------------------------------------------------------------------------------ the push


class Push:
    """The only path by which the policy reaches the engine. All ranks make the same calls together."""

    def __init__(self, way: Tensors, engine: Engine) -> None:
        """Push the whole model. Raises InputError for a member of aqn.targets that matches no norm of the model."""
        self.way, self.cfg, self.policy, self.engine = way, way.cfg, way.policy, engine
        self.model, self.arch, self.parallel = self.policy.model, self.policy.arch, self.policy.parallel
        self.probe = Probe(engine, self.policy, self.cfg.rollout)
        self.stacks: dict[str, Stack] = {}
        self.clean_norms: dict[str, Tensor] = {}  # the noise-free weights of the norms that noise changes
        if self.cfg.aqn.schedule != "off":
            norms = aqn.norm_targets(self.arch, self.cfg.aqn.targets)
            self.clean_norms = aqn.clean_norms(self.tensors(set(norms)), norms)
        way.send_all(self)
        self.stacks = self._usable_stacks()
        if not self._fits():
            self.stacks = {}
        self.shared_bytes = self._share_experts()
        if not self.shared_bytes and way.shares(adapted=True):  # make_room may have moved the experts to the host
            self.model.to(self.parallel.device)

    def _usable_stacks(self) -> dict[str, Stack]:
        """Return the engine's stacks of experts if every rank has the stacks that the plan assumes, otherwise {}.

        All ranks call this together.
        """
        if not self.way.fills_stacks:
            return {}
        expected = range(self.arch.num_experts)
        if self.way.splits_as_trainer:
            expected = huggingface.own_experts(self.arch, self.parallel)
        stacks = self.engine.stacks()
        as_planned = {stack.experts for stack in stacks.values()} == {expected}
        return stacks if all(self.parallel.gather_objects(as_planned)) else {}

    def _fits(self) -> bool:
        """Return whether the memory of every engine contains the experts that were pushed to it.

        If not, an engine stores them in another layout. Experts that the trainer stores quantised are not compared.
        All ranks call this together.
        """
        fits = True
        for name, linear in self._experts() if self.stacks else ():
            memory, base = self.stacks[name].memory, getattr(linear, "base", linear)
            if self.way.merges(linear is not base):
                fits &= torch.equal(self._for_engine(linear.weight()), memory)
            elif base.quantisation == "none":
                fits &= torch.equal(self._for_engine(base.weight.to(memory.device)), memory)
        return not self.parallel.max_over_ranks(float(not fits))

    def _share_experts(self) -> int:
        """Make the trainer use the engine's memory for shared experts (Way.shares). Returns the number of shared bytes.

        If the experts are merged, the trainer then computes with the same weights as the engine. If they are frozen,
        the engine's memory replaces the trainer's. Without `stacks`, no rank shares anything, and the engines get their
        experts by name.
        """
        own, shared_bytes = huggingface.own_experts(self.arch, self.parallel), 0
        for name, linear in self._experts() if self.stacks else ():
            (memory, experts), base = self.stacks[name], getattr(linear, "base", linear)
            if not self.way.shares(linear is not base):
                continue
            mine = memory if own == experts else memory[own.start : own.stop]
            shared_bytes += mine.nbytes
            if self.way.merges(linear is not base):
                linear.buffer = mine
            else:
                base.weight = torch.nn.Parameter(mine, requires_grad=False)
        return shared_bytes

    def _experts(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the name of each stack of the engine, with the module that has this rank's experts of that stack."""
        for i, (layer, is_moe) in enumerate(zip(self.model.decoder.layers, self.arch.moe_layers, strict=True)):
            for module in modules(self.arch, is_moe):
                if module.kind == "experts":
                    yield f"model.layers.{i}.{module.fused}", layer.get_submodule(module.megatron[: -len(".weight")])

    def _for_engine(self, local: Tensor) -> Tensor:
        """Return the stack that the engine needs: this rank's experts (``local``), or those of all ranks.

        All ranks call this together.
        """
        if self.way.splits_as_trainer:
            return local
        return gather(local, self.parallel.expert, self.parallel.expert_group).flatten(0, 1)

    def tensors(self, only: set[str] | None = None) -> Stream:
        """Yield the tensors for the engine, without the routed experts if the engine gets those through `stacks`."""
        return self.way.tensors(only, experts=not self.stacks)

    def merged_stacks(self) -> Stream:
        """Yield the merged stacks of the experts that LoRA adapts. All ranks call this together."""
        for name, linear in self._experts():
            if isinstance(linear, LoRAGroupedLinear):
                yield name, self._for_engine(linear.weight())

    def check_start(self, probe: list[int]) -> None:
        """Raise Tripped unless engine and trainer agree on answers to ``probe``, even after pushing the policy again.

        This finds a shard in the wrong position, order or layout, or a captured graph that reads old memory. If a
        failure of the check logp_gap does not stop the run, nothing is compared.
        """
        if not self.cfg.checks.stops("logp_gap"):
            return
        bound = self.cfg.largest_gap
        for push in ("the first push", "a second push of the same policy"):
            gap = self.probe.gap(probe)
            if not gap <= bound:
                raise Tripped(
                    f"checks.logp_gap: after {push}, the log-probs of sampler and trainer on the probe differ by "
                    f"{gap:.2g} nats per token; at most {bound:g} is allowed\n  look at: whether they agree with "
                    "rollout.expert_parallel=false (which pushes whole tensors) or rollout.enforce_eager=true"
                )
            self.clean()

    def clean(self) -> None:
        """Push the trainer's policy, W + (alpha / R) B A, without noise on the norms."""
        self._push_policy()

    def differing_layer(self, probe: list[int], bound: float) -> str:
        """Push again, and name the first layer in which sampler and trainer differ by more than ``bound``."""
        self.clean()
        return self.probe.first_differing_layer(probe, bound)

    def __call__(self, step: int, probe: list[int]) -> dict[str, float]:
        """Push the policy for sampling at ``step`` (from 0), with noise, and return metrics.

        The clean policy is pushed first. sync/checksum is the sum of the elements of all adapted tensors, or of the
        LoRA factors, without noise. With rollout.expert_parallel, it is the sum of this rank's shards only. The
        effects of the noise are measured on the prompt ``probe``.
        """
        checksum, targets = self._push_policy()
        metrics = {"sync/checksum": checksum} | self.policy.update_kept()
        if self.clean_norms:
            metrics |= self._add_noise(step, probe, targets)
        return metrics

    def _add_noise(self, step: int, probe: list[int], targets: dict[str, Tensor]) -> dict[str, float]:
        """Push ``targets`` with the noise of ``step``, after the clean policy, and return metrics.

        Two metrics are measured on the prompt ``probe``. aqn/probe_gap is measured before the noise, in nats per token.
        It shows whether the engine has the trainer's policy. aqn/probe_shift shows whether the noise changes the
        engine's output. It is the largest change in the log-prob of a sampled token. The engine samples these tokens
        after the first half of the prompt, at temperature FLAT. If it ignores the noise, aqn/probe_shift is exactly 0.
        Each metric is the worst value of all ranks (the largest gap, the smallest shift), so all ranks check the same
        numbers. Raises AqnError if the noise differs from the requested noise.
        """
        cfg = self.cfg
        sigma = aqn.sigma_at(
            step,
            cfg.train.steps,
            sigma_start=cfg.aqn.sigma_start,
            sigma_end=cfg.aqn.sigma_end,
            num_stages=cfg.aqn.num_stages,
            schedule=cfg.aqn.schedule,
        )
        report, gap, shift = aqn.NoiseReport(sigma), 0.0, 0.0
        if sigma:
            gap = self.probe.gap(probe)
            # After half a prompt the policy is uncertain how to continue, so noise changes its log-probs.
            half = probe[: -(-len(probe) // 2)]
            clean = self.probe.answers(half, FLAT)
            noisy_tensors = aqn.perturb(targets.items(), self.clean_norms, report, seed=cfg.train.seed, step=step)
            self._load(self.engine.load_weights, noisy_tensors)
            noisy = self.probe.answers(half, FLAT)
            pairs = [zip(after.logp, before.logp, strict=False) for after, before in zip(noisy, clean, strict=True)]
            shift = max(abs(after - before) for pair in pairs for after, before in pair)
            shift = -self.parallel.max_over_ranks(-shift)  # the smallest on any rank
            aqn.check_report(report, self.clean_norms)
        return {
            "aqn/sigma": sigma,
            "aqn/modules": len(report.norms),
            "aqn/changed_elements": report.num_changed,
            "aqn/realised_std": report.std,
            "aqn/probe_shift": shift,
            "aqn/probe_gap": gap,
        }

    def _push_policy(self) -> tuple[float, dict[str, Tensor]]:
        """Push all tensors that training or noise changes, still without noise.

        Returns the checksum, and the tensors to which noise will be added.
        """
        sums: list[Tensor] = []
        targets: dict[str, Tensor] = {}
        self._load(self.way.send, self, lambda stream: self._summed(stream, sums, targets))
        return _total(sums), targets

    def _load(self, load: Callable, *what: object) -> None:
        """Call ``load`` with the arguments ``what``, and turn an InputError into Tripped.

        The base weights were valid when they were read, so only training can have made them unusable.
        """
        try:
            load(*what)
        except InputError as error:
            raise Tripped(
                f"the push to the sampler failed: {error}\n  look at: optim.lr and the gradient norms of the last steps"
            ) from None

    def _summed(self, stream: Stream, sums: list[Tensor], targets: dict[str, Tensor]) -> Stream:
        """Yield ``stream`` unchanged, while filling ``targets`` and ``sums``.

        Tensors that noise changes are added to ``targets``, and the sums of all others to ``sums``.
        """
        for name, tensor in stream:
            if name in self.clean_norms:
                targets[name] = tensor
            else:
                sums.append(tensor.sum(dtype=torch.float32))
            yield name, tensor


def _total(sums: list[Tensor]) -> float:
    """Return the sum of scalars in fp64, on the host. The function waits for the device only once."""
    return torch.stack(sums).cpu().double().sum().item() if sums else 0.0
