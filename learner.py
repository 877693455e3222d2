"""How a rollout becomes optimizer steps: the policy under training, its loss, its AdamW, and its state.

The loss of an update is one number over all its tokens on all ranks; each micro-batch adds its share, so neither the
number of ranks nor the size of a micro-batch changes it. S = P x G sequences, b rows, T tokens of a row.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

import adapter_weights
import device as devices
import grpo
import lora_megatron
import model_megatron
import packing
import parallel_setup
import rollout
import routing_replay
from checkpoint import Pending
from config import derive_seed
from engines.interface import Completion
from hf_config import Architecture
from input_files import InputError, shown
from knobs import Config
from parallel_setup import Parallel
from rollout import MicroBatch, Rollout
from routing_replay import RoutingReplay
from tripwires import Heartbeat, Tripped

MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, in torch's names
LOSSES = ("actor/loss", "actor/policy_loss")  # all else that a micro-batch reports is a mean over tokens


class Learner:
    """The policy under training: model, adapters and optimizer, and how a rollout becomes optimizer steps."""

    def __init__(
        self,
        cfg: Config,
        arch: Architecture,
        parallel: Parallel,
        model: torch.nn.Module,
        adapters: dict[str, torch.nn.Module],
        pad_token: int,
    ) -> None:
        self.cfg, self.arch, self.parallel, self.model, self.adapters = cfg, arch, parallel, model, adapters
        self.pad_token = pad_token
        self.replay = RoutingReplay(model, arch, parallel) if cfg.replay.mode != "off" else None
        # Records of routes follow the rows, padding included; an NPU's attention takes rows, padded on the right.
        self.packs = self.replay is None and parallel.device.type != "npu"
        self.factors = lora_megatron.factors(adapters)
        self.parameters = list(self.factors.values())
        self.moments = {
            moment: {name: torch.zeros_like(factor) for name, factor in self.factors.items()} for moment in MOMENTS
        }
        self.optimizer_steps = 0

    def update(
        self, batch: Rollout, own: list[list[Completion]], advantages: Tensor, step: int, clock: Clock
    ) -> dict[str, float]:
        """Optimizer steps on one rollout, and their metrics.  ``advantages``: (P x G,)

        ``own``: what this rank sampled, with the engine's routes under replay r3. One count of tokens and sequences for
        all ranks and micro-batches of an update, known before its first backward, makes the split irrelevant.
        """
        cfg, group = self.cfg, self.cfg.rollout.group_size
        per_update = cfg.optim.prompts_per_update * group
        updates = [list(range(i, i + per_update)) for i in range(0, len(advantages), per_update)]
        packed = [self._pack(batch, own, sequences, advantages) for sequences in updates]
        old_logp = None
        if len(updates) > 1 or cfg.replay.mode == "r2":
            # With one update the policy that sampled is the policy that learns, and the ratio is 1 without this pass.
            old_logp = [
                [self._old_logp(micro, step, index, i) for i, micro in enumerate(micro_batches)]
                for index, (micro_batches, _, _) in enumerate(packed)
            ]
            clock.lap("old_logp")
        sums: dict[str, Tensor] = {}
        peak_gap, norms = torch.zeros((), device=self.parallel.device), []
        measured = sum(num_tokens for _, _, num_tokens in packed)
        for index, (micro_batches, counts, _) in enumerate(packed):
            for i, micro in enumerate(micro_batches):
                seed_dropout(cfg, step, index, i, self.parallel.rank)
                ref_logp = self._reference_logp(micro, clock)
                with self._routed(micro, count=True):
                    loss, stats, gap = self._loss(micro, old_logp[index][i] if old_logp else None, ref_logp, counts)
                    loss.backward()  # inside: activation recompute routes again
                del loss  # with it what the graph still holds, before the next micro-batch's forward
                clock.lap("update")
                for name, value in stats.items():
                    share = 1 / len(updates) if name in LOSSES else counts["num_tokens"] / max(1, measured)
                    sums[name] = sums.get(name, 0) + value * share
                peak_gap = torch.maximum(peak_gap, gap)
            self.parallel.sync_gradients_(self.parameters)
            norms.append(self._step(step))
            clock.lap("update")
        totals = self.parallel.sum_over_data(torch.stack(list(sums.values())))
        metrics = dict(zip(sums, totals.tolist(), strict=True))
        if self.replay:
            metrics["replay/differing_frac"] = self.replay.differing_share()
        return metrics | {
            "rollout/logp_gap_max": self.parallel.max_over_ranks(peak_gap.item()),
            "actor/grad_norm": sum(norms) / len(norms),
            "actor/lr": learning_rate(cfg, step),
        }

    def _pack(
        self, batch: Rollout, own: list[list[Completion]], sequences: list[int], advantages: Tensor
    ) -> tuple[list[MicroBatch], dict, int]:
        """This rank's micro-batches of one update, its counts over all data ranks, and its tokens in the forward.

        The last are fewer where groups of equal reward are left out: a loss counts those, as 0; a metric cannot.
        """
        cfg, parallel = self.cfg, self.parallel
        if cfg.loss.mask_truncated:
            sequences = [s for s in sequences if not batch.truncated[s]]
        counts = {
            "num_tokens": sum(batch.lengths[s] for s in sequences),
            "num_sequences": len(sequences),
            "max_new_tokens": cfg.rollout.max_new_tokens,
        }
        if cfg.loss.skip_equal_groups:
            mixed = batch.rewards.amax(dim=1) > batch.rewards.amin(dim=1)
            sequences = [s for s in sequences if mixed[s // cfg.rollout.group_size]]
        lengths = {s: batch.row_length(s) for s in sequences}
        how = (parallel.data, cfg.optim.tokens_per_micro_batch, parallel.tensor)
        if self.packs:
            prompts = {s: lengths[s] - batch.lengths[s] for s in sequences}
            shares = rollout.plan(lengths, *how, cfg.rollout.group_size, prompts)
        else:
            shares = rollout.plan(lengths, *how)
        shares = shares or [[[]] * parallel.data]  # nothing to learn from: one empty micro-batch keeps ranks in step
        mine = [share[parallel.data_rank] for share in shares]
        records = None
        if cfg.replay.mode == "r3":
            records = routing_replay.collect(batch, own, shares, self.arch, parallel, cfg.rollout.tensor)
        pack = (advantages, parallel.device, self.pad_token, parallel.tensor, records)
        measured = sum(batch.lengths[s] for s in sequences)
        micro_batches = [rollout.pack(batch, rows, *pack) for rows in mine]
        if self.packs:
            for micro in micro_batches:
                micro.packing = packing.pack(micro.tokens, micro.mask, parallel.tensor)
        return micro_batches, counts, measured

    def _routed(self, micro: MicroBatch, count: bool = False) -> contextlib.AbstractContextManager:
        """Inside, every forward of ``micro`` is routed by its record, if it has one; ``count`` compares own choices."""
        if micro.routes is None:
            return contextlib.nullcontext()
        return self.replay.replaying(micro.routes, micro.replayed, count=count)

    @torch.no_grad()
    def _old_logp(self, micro: MicroBatch, step: int, update: int, place: int) -> Tensor:
        """The policy before its first update of this rollout; under r2 its routes become the micro-batch's.  (b, T)"""
        # The masks that the update will draw: its ratio starts at 1, and a resumed run repeats the uninterrupted one.
        seed_dropout(self.cfg, step, update, place, self.parallel.rank)
        if self.cfg.replay.mode == "r2":
            (logp, _), micro.routes = self.replay.record(lambda: self._logp(micro), len(micro.tokens))
            micro.replayed = torch.ones_like(micro.tokens, dtype=torch.bool)
            return logp
        with self._routed(micro):
            return self._logp(micro)[0]

    def _reference_logp(self, micro: MicroBatch, clock: Clock) -> Tensor | None:
        """Log-probs of the base model, adapters off; None without a KL penalty.  -> (b, T)"""
        cfg = self.cfg
        if cfg.loss.kl == "none":
            return None
        routed = self._routed(micro) if cfg.replay.reference == "replayed" else contextlib.nullcontext()
        with routed, lora_megatron.disabled(self.adapters), torch.no_grad():
            logp = self._logp(micro)[0]
        clock.lap("reference")
        return logp

    def _logp(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return model_megatron.token_logprobs(
            self.model, micro.tokens, micro.mask, self.parallel, self.cfg.rollout.temperature, micro.packing
        )

    def _loss(
        self, micro: MicroBatch, old_logp: Tensor | None, ref_logp: Tensor | None, counts: dict
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """This micro-batch's share of the loss and of the metrics, and its largest sampler-trainer gap."""
        loss_cfg = self.cfg.loss
        logp, entropy = self._logp(micro)  # (b, T) twice
        old_logp = logp.detach() if old_logp is None else old_logp
        weights = grpo.rollout_weights(
            old_logp, micro.rollout_logp, micro.mask, loss_cfg.importance, loss_cfg.importance_clip
        )
        policy_loss, stats = grpo.policy_loss(
            logp, old_logp, micro.advantages, micro.mask, weights=weights, kind=loss_cfg.kind,
            clip_low=loss_cfg.clip_low, clip_high=loss_cfg.clip_high, dual_clip=loss_cfg.dual_clip,
            aggregate=loss_cfg.aggregate, **counts,
        )  # fmt: skip

        def per_token_mean(value: Tensor) -> Tensor:
            return grpo.aggregate_loss(value.detach(), micro.mask, num_tokens=counts["num_tokens"])

        metrics = {f"actor/{name}": value for name, value in stats.items()}
        loss = policy_loss
        if ref_logp is not None:
            kl = grpo.kl(logp, ref_logp, loss_cfg.kl, micro.mask)
            loss = loss + loss_cfg.kl_coef * grpo.aggregate_loss(kl, micro.mask, aggregate=loss_cfg.aggregate, **counts)
            metrics["actor/kl_loss"] = per_token_mean(kl)
        if loss_cfg.entropy_coef:
            bonus = grpo.aggregate_loss(entropy, micro.mask, aggregate=loss_cfg.aggregate, **counts)
            loss = loss - loss_cfg.entropy_coef * bonus
        gap = (old_logp - micro.rollout_logp).abs() * micro.mask
        metrics |= {
            "actor/loss": loss.detach(),
            "actor/entropy": per_token_mean(entropy),
            "rollout/logp_gap_mean": per_token_mean(gap),
        }
        if loss_cfg.importance != "none":
            metrics["rollout/importance_mean"] = per_token_mean(weights)
            clipped = (weights >= loss_cfg.importance_clip) * micro.mask
            metrics["rollout/importance_clip_frac"] = per_token_mean(clipped)
        return loss, metrics, gap.amax()

    def first_differing_layer(self, engine, prompt: list[int], bound: float) -> str:
        """Where, on ``prompt``, an engine's forward pass leaves the trainer's, said alike on all ranks. Collective."""
        row = model_megatron.one_row(prompt, self.parallel)
        ours = [output[0, : len(prompt)] for output in model_megatron.layer_outputs(self.model, row)]
        theirs = engine.layer_outputs(prompt)
        if not theirs:
            return "rollout.enforce_eager=true would name the layer: a graph's layers cannot be looked into"
        shares = []  # of the layer's largest value, by which the engine is apart
        for mine, its in zip(ours, theirs, strict=True):
            apart = (mine.float() - its.to(mine.device).float()).abs().max() / mine.float().abs().max()
            shares.append(apart.cpu())
        by_rank = self.parallel.gather_rows(torch.stack(shares))  # (ranks, layers)
        for layer, apart in enumerate(by_rank.unbind(1)):
            wrong = (~(apart <= bound)).nonzero().flatten().tolist()
            if wrong:
                ranks = "" if len(wrong) == len(apart) else f", on rank {', '.join(map(str, wrong))} alone"
                return (
                    f"layer {layer} is the first whose output differs, by {apart.max():.2g} of its largest value{ranks}"
                )
        return "all layers agree on the probe prompt: look at the final norm, the head, and the sampling"

    @torch.no_grad()
    def _step(self, step: int) -> float:
        """Clip over the whole sharded parameter set, one AdamW step, and the norm before clipping."""
        norm = self.parallel.gradient_norm(self.parameters).item()
        if not math.isfinite(norm):
            raise Tripped(
                f"step {step + 1}: the gradient norm is {norm}; nothing was updated or saved\n"
                "  look at: optim.lr and the checkpoint before; in bf16 also loss.aggregate and the longest completions"
            )
        shrink = min(1.0, self.cfg.optim.max_grad_norm / (norm + 1e-6))
        for parameter in self.parameters:
            parameter.grad *= shrink
        optim, steps = self.cfg.optim, [torch.tensor(float(self.optimizer_steps)) for _ in self.parameters]
        # The function of torch.optim.AdamW without its class, whose first use imports torch's compiler: half a second
        # and 40 MiB.
        adamw(
            self.parameters, [parameter.grad for parameter in self.parameters],
            *(list(self.moments[moment].values()) for moment in MOMENTS), [], steps, amsgrad=False, maximize=False,
            lr=learning_rate(self.cfg, step), beta1=optim.betas[0], beta2=optim.betas[1], eps=optim.eps,
            weight_decay=optim.weight_decay,
        )  # fmt: skip
        self.optimizer_steps += 1
        for parameter in self.parameters:
            parameter.grad = None
        return norm

    def state(self) -> tuple[dict[str, dict[str, Pending]], dict[str, int]]:
        """Whole factors and moments by Hugging Face name, which any layout can load, and the count of optimizer steps.

        A tensor is gathered when it is made, which is collective: all ranks make all of them, in this order.
        """

        def pending(name: str, value: Tensor) -> Pending:
            factor = self.factors[name]
            make = functools.partial(adapter_weights.whole, name, factor, value, self.arch, self.parallel, True)
            return Pending(adapter_weights.whole_shape(factor, self.parallel), value.dtype, make)

        whole: dict[str, dict[str, Pending]] = {"adapter": {}, "optimizer": {}}
        for kind, end, values in self._parts():
            for name, value in values.items():
                whole[kind][adapter_weights.hf_name(name) + end] = pending(name, value)
        return whole, {"optimizer_steps": self.optimizer_steps}

    @torch.no_grad()
    def restore(self, tensors: dict[str, Mapping[str, Tensor]], counts: dict[str, int]) -> None:
        """Take up a state(), whatever layout wrote it. InputError where names or shapes are not this model's."""
        steps = counts.get("optimizer_steps")
        if type(steps) is not int or not 0 <= steps < 2**31 or not {"adapter", "optimizer"} <= tensors.keys():
            found = f"{', '.join(tensors) or 'no tensors'}, optimizer_steps {shown(steps)}"
            raise InputError(f"checkpoint: found {found}; needed: adapter, optimizer and a number of steps")
        for kind, end, values in self._parts():
            pieces = adapter_weights.scatter(self.adapters, tensors[kind], self.arch, self.parallel, end)
            for name, value in pieces.items():
                values[name].copy_(value)
        self.optimizer_steps = steps

    def _parts(self) -> list[tuple[str, str, dict[str, Tensor]]]:
        """What is saved: the file's kind, the end of its names, and this rank's tensors by factor name."""
        moments = [("optimizer", f".{moment}", self.moments[moment]) for moment in MOMENTS]
        return [("adapter", "", self.factors), *moments]


def learning_rate(cfg: Config, step: int) -> float:
    """AdamW's rate at ``step`` (from 0): linear warm-up, then constant, or linear or cosine to min_lr_ratio x peak."""
    optim = cfg.optim
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    if optim.decay == "constant":
        return optim.lr
    share = (step - optim.warmup_steps) / max(1, cfg.train.steps - 1 - optim.warmup_steps)  # 0 -> 1 at the last step
    fall = share if optim.decay == "linear" else (1 - math.cos(math.pi * share)) / 2
    return optim.lr * (1 - (1 - optim.min_lr_ratio) * fall)


def seed_dropout(cfg: Config, step: int, update: int, micro: int, rank: int) -> None:
    """LoRA dropout is the one draw from global generators: it depends on the step, and on how rows are split."""
    if cfg.lora.dropout:
        parallel_setup.seed_dropout(derive_seed(cfg.train.seed, "dropout", step, update, micro, rank))


class Clock:
    """Wall time of a step's phases, which add up; a phase met several times counts once, with its sum.

    Also the most memory in use in each, where ``device`` counts it.
    """

    def __init__(self, heartbeat: Heartbeat, step: int, device: torch.device | None = None) -> None:
        self.heartbeat, self.step, self.device = heartbeat, step, device
        self.peaks: dict[str, float] = {}  # GiB
        self._peak("between_steps")  # loading, an evaluation, a checkpoint
        self.start = self.last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """Everything since the last lap was ``phase``."""
        self.heartbeat.beat(f"{phase} of step {self.step + 1}")
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self.last
        self.last = now
        self._peak(phase)

    def _peak(self, phase: str) -> None:
        if self.device is not None and (peak := devices.peak_memory_gib(self.device)) is not None:
            self.peaks[phase] = max(peak, self.peaks.get(phase, 0.0))

    def device_peak(self) -> tuple[float, str] | tuple[()]:
        """GiB and name of the phase that had most of the device in use; () where it is not counted."""
        return max(((gib, phase) for phase, gib in self.peaks.items()), default=())

    def timing(self, new_tokens: int) -> dict[str, float]:
        """Seconds by phase and of the whole step, and generated tokens a second of the whole step."""
        total = time.perf_counter() - self.start
        phases = {f"timing/{phase}_s": round(seconds, 4) for phase, seconds in self.seconds.items()}
        return phases | {"timing/step_s": round(total, 4), "perf/tokens_per_s": round(new_tokens / total, 1)}
