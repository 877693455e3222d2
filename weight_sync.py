"""Step 1: give the engine the policy, first the whole model, then what training changes, with noise.

With rollout.sync adapter the engine keeps the base weights and gets the LoRA factors; with merged it gets whole weights
with LoRA merged. Every push starts from the clean weights, so noise never adds up. Only the engine's copy has noise:
the trainer, the reference and the evaluations do not.
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
from plan import grid, parameters
from weights import huggingface
from weights.policy import Policy

# At temperature 1 the log-probs of a confident policy are exactly 0, so noise would not show; 2 is vLLM's maximum.
# (vllm-ascend 0.23 always reports the log-probs of temperature 1.)
FLAT = 2.0


# ------------------------------------------------------------------------------------------------ the ways

Stream = Iterator[tuple[str, Tensor]]


class Tensors:
    """The engine gets whole tensors with LoRA merged, which every rank gathers from all ranks. Collective."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def tensors(self, only: set[str] | None = None, experts: bool = True) -> Stream:
        """What load_weights takes, with the tensors that training changes; ``only``, ``experts``: huggingface.export"""
        of = self.policy
        return huggingface.export(of.model, of.arch, of.parallel, only=only, experts=experts)

    def start(self, push: "Push") -> None:
        """Give the engine the whole model."""
        push.engine.load_weights(push._export())

    def send(self, push: "Push", through: Callable[[Stream], Stream]) -> None:
        """Give the engine what training or noise changes, ``through`` what watches the tensors."""
        if push.stacks:
            push.engine.load_stacks(through(push._merged_stacks()))
        push.engine.load_weights(through(push._export(set(push.clean_norms))))


class Shards(Tensors):
    """Every rank copies its own shards into its engine, without communication (rollout.expert_parallel)."""

    def tensors(self, only: set[str] | None = None, experts: bool = True) -> Stream:
        of = self.policy
        return vllm_colocated.shards(of.model, of.arch, of.parallel, only=only, experts=experts)


class Factors(Tensors):
    """The engine keeps the base weights and gets the LoRA factors, whole (rollout.sync adapter). Collective."""

    def tensors(self, only: set[str] | None = None, experts: bool = True) -> Stream:
        of = self.policy
        return huggingface.export(of.model, of.arch, of.parallel, only=only, merge=False, experts=experts)

    def start(self, push: "Push") -> None:
        super().start(push)
        push.engine.load_adapter(dict(self.policy.whole()))

    def send(self, push: "Push", through: Callable[[Stream], Stream]) -> None:
        if push.clean_norms:
            push.engine.load_weights(through(push._export(set(push.clean_norms))))
        push.engine.load_adapter(dict(through(self.policy.whole())))


def way_of(cfg: Config) -> type[Tensors]:
    """The way in which the policy of a run goes to its engine."""
    if cfg.merging is Merging.NOWHERE:
        return Factors
    return Shards if cfg.rollout.expert_parallel else Tensors


def make_room(cfg: Config, policy: Policy) -> None:
    """Keep experts that the engine is going to share on the host until then: the device never holds them twice."""
    device, layout = policy.parallel.device, grid.of(cfg.parallel, cfg.rollout, policy.parallel.world_size)
    shares = parameters.has_stacks(cfg, layout, device.type) and parameters.shared_experts(cfg, policy.arch, layout)[0]
    if cfg.merging is Merging.NOWHERE and shares:
        for module in policy.model.modules():
            if isinstance(module, GroupedLinear):
                module.weight = torch.nn.Parameter(module.weight.detach().cpu(), requires_grad=False)
        devices.release(device)


# ------------------------------------------------------------------------------------------------ the push


class Push:
    """The only path from the policy to the engine, in one of the ways above. Every rank makes the same calls."""

    def __init__(self, cfg: Config, policy: Policy, engine: Engine) -> None:
        """Push the whole model. InputError for noise targets that it does not have."""
        self.cfg, self.policy, self.engine = cfg, policy, engine
        self.model, self.arch, self.parallel = policy.model, policy.arch, policy.parallel
        self.probe, self.way = Probe(engine, policy, cfg.rollout), way_of(cfg)(policy)
        self.stacks: dict[str, Stack] = {}
        self.clean_norms: dict[str, Tensor] = {}  # of the norms that noise changes
        if cfg.aqn.schedule != "off":
            norms = aqn.norm_targets(self.arch, cfg.aqn.targets)
            self.clean_norms = aqn.clean_norms(self._export(set(norms)), norms)
        self.way.start(self)
        self.stacks = self._usable_stacks()
        self.shared_bytes = self._share_experts()
        if not self.shared_bytes:  # what make_room has moved away
            self.model.to(self.parallel.device)

    def _usable_stacks(self) -> dict[str, Stack]:
        """The engine's stacks, if they are on every rank what the plan assumes; else {} on every rank. Collective."""
        layout = grid.of(self.cfg.parallel, self.cfg.rollout, self.parallel.world_size)
        if not parameters.has_stacks(self.cfg, layout, self.parallel.device.type):
            return {}
        expected = range(self.arch.num_experts)
        if parameters.splits_as_trainer(layout):
            expected = huggingface.own_experts(self.arch, self.parallel)
        stacks = self.engine.stacks()
        as_planned = {stack.experts for stack in stacks.values()} == {expected}
        return stacks if all(self.parallel.gather_objects(as_planned)) else {}

    def _share_experts(self) -> int:
        """Let trainer and engine hold an expert once, where the engine's memory has the trainer's layout.  -> bytes

        The trainer then computes with the merged experts that sample (Merging.ONCE). Frozen experts that are
        pushed as they are become the trainer's own. An engine whose memory is not what was pushed to it has another
        layout; then no rank shares anything, and the engines get their experts by name. Collective.
        """
        own, fits, shared = huggingface.own_experts(self.arch, self.parallel), True, []
        for name, linear in self._experts() if self.stacks else ():
            (memory, experts), base = self.stacks[name], getattr(linear, "base", linear)
            merged = linear is not base and self.cfg.merging > Merging.NOWHERE
            if not merged and base.quantisation != "none":
                continue
            fits &= torch.equal(self._for_engine(linear.weight() if merged else base.weight.to(memory.device)), memory)
            if self.cfg.merging is Merging.ONCE or not merged:
                mine = memory if own == experts else memory[own.start : own.stop]
                shared.append((linear if merged else base, mine))
        if self.parallel.max_over_ranks(float(not fits)):
            self.stacks, shared = {}, []
        for module, memory in shared:
            if isinstance(module, LoRAGroupedLinear):
                module.buffer = memory
            else:
                module.weight = torch.nn.Parameter(memory, requires_grad=False)
        return sum(memory.nbytes for _, memory in shared)

    def _experts(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The name of each of the engine's stacks, and the module that holds this rank's experts of it."""
        for i, (layer, is_moe) in enumerate(zip(self.model.decoder.layers, self.arch.moe_layers, strict=True)):
            for module in modules(self.arch, is_moe):
                if module.kind == "experts":
                    yield f"model.layers.{i}.{module.fused}", layer.get_submodule(module.megatron[: -len(".weight")])

    def _for_engine(self, local: Tensor) -> Tensor:
        """The experts of the engine's stack from this rank's: the same ones, or those of all ranks. Collective."""
        if parameters.splits_as_trainer(grid.of(self.cfg.parallel, self.cfg.rollout, self.parallel.world_size)):
            return local
        return gather(local, self.parallel.expert, self.parallel.expert_group).flatten(0, 1)

    def _export(self, only: set[str] | None = None) -> Stream:
        """The tensors that the engine takes; no routed experts if it has `stacks`, which bring them."""
        return self.way.tensors(only, experts=not self.stacks)

    def check_start(self, probe: list[int]) -> None:
        """Raise Tripped unless engine and trainer agree on answers to ``probe``, also after a second, equal push.

        This finds a shard in the wrong place, order or layout, and a captured graph that reads old memory.
        """
        if not self.cfg.checks.stops("logp_gap"):
            return
        bound = self.cfg.largest_gap
        for push in ("the first push", "a second push of the same policy"):
            gap = self.probe.gap(probe)
            if not gap <= bound:
                raise Tripped(
                    f"checks.logp_gap: after {push} sampler and trainer differ by {gap:.2g} nats a token on the probe, "
                    f"at most {bound:g} expected\n  look at: whether rollout.expert_parallel=false (whole tensors are "
                    "pushed) or rollout.enforce_eager=true agrees"
                )
            self.clean()

    def clean(self) -> None:
        """Push the policy as the trainer has it: W + (alpha / R) B A, and the norms without noise."""
        self._push_policy()

    def differing_layer(self, probe: list[int], bound: float) -> str:
        """The layer in which sampler and trainer differ by more than ``bound`` on ``probe``, after another push."""
        self.clean()
        return self.probe.first_differing_layer(probe, bound)

    def __call__(self, step: int, probe: list[int]) -> dict[str, float]:
        """Push the policy as training samples from it at ``step`` (from 0): with noise.  -> metrics

        The checksum is the sum of the adapted tensors, or of the LoRA factors, without noise. With
        rollout.expert_parallel it is that of this rank's shards. The clean policy is pushed first. ``probe``: a prompt
        on which two effects of the noise are measured.
        """
        checksum, targets = self._push_policy()
        metrics = {"sync/checksum": checksum} | self.policy.update_kept()
        if self.clean_norms:
            metrics |= self._add_noise(step, probe, targets)
        return metrics

    def _add_noise(self, step: int, probe: list[int], targets: dict[str, Tensor]) -> dict[str, float]:
        """Push the tensors ``targets`` with the noise of ``step``, after the clean policy.  -> metrics

        Two things are measured on the prompt ``probe``. aqn/probe_gap (nats a token, before the noise) shows whether
        the engine has the trainer's policy. aqn/probe_shift shows whether noise changes it: the largest change of a
        token's log-prob, at temperature FLAT and after half of the prompt. It is exactly 0 for an engine that ignores
        the noise. Both come from the rank with the worst value, so all ranks judge the same numbers. Raises AqnError
        if the noise is not the noise that was asked for.
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
            # Continuations of half a prompt are uncertain, so noise changes their log-probs.
            half = probe[: -(-len(probe) // 2)]
            clean = self.probe.answers(half, FLAT)
            noisy_tensors = aqn.perturb(targets.items(), self.clean_norms, report, seed=cfg.train.seed, step=step)
            self._load(self.engine.load_weights, noisy_tensors)
            noisy = self.probe.answers(half, FLAT)
            pairs = [zip(after.logp, before.logp, strict=False) for after, before in zip(noisy, clean, strict=True)]
            shift = max(abs(after - before) for pair in pairs for after, before in pair)
            shift = -self.parallel.max_over_ranks(-shift)  # the smallest of all ranks
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
        """Push what training or noise changes, clean: the checksum, and the tensors that noise is going to change."""
        sums: list[Tensor] = []
        targets: dict[str, Tensor] = {}
        self._load(self.way.send, self, lambda stream: self._summed(stream, sums, targets))
        return _total(sums), targets

    def _load(self, load: Callable, *what: object) -> None:
        """Call ``load``. The base weights were valid when they were read, so a refusal now comes from training."""
        try:
            load(*what)
        except InputError as error:
            raise Tripped(
                f"the push to the sampler failed: {error}\n  look at: optim.lr, the last steps' norms"
            ) from None

    def _merged_stacks(self) -> Stream:
        """The stacks of experts that LoRA adapts. Collective."""
        for name, linear in self._experts():
            if isinstance(linear, LoRAGroupedLinear):
                yield name, self._for_engine(linear.weight())

    def _summed(self, stream: Stream, sums: list[Tensor], targets: dict[str, Tensor]) -> Stream:
        """``stream``; a tensor that noise changes is added to ``targets``, the sum of any other one to ``sums``."""
        for name, tensor in stream:
            if name in self.clean_norms:
                targets[name] = tensor
            else:
                sums.append(tensor.sum(dtype=torch.float32))
            yield name, tensor


def _total(sums: list[Tensor]) -> float:
    """The sum of scalars in fp64 on the host. It waits for the device once, not once for each scalar."""
    return torch.stack(sums).cpu().double().sum().item() if sums else 0.0
