"""Turns a rollout into optimizer steps on the LoRA adapters (step 4).

The loss of an update is one number over all its tokens on all ranks. Each micro-batch adds its share of this number, so
neither the number of ranks nor the size of a micro-batch changes the loss. A rollout has S = P x G sequences, and a
micro-batch has b rows of T tokens.
"""

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

import grpo
from engines.interface import Completion
from facts.exits import InputError, Tripped
from inputs import functions
from inputs.files import first_three
from knobs import Config
from lora_megatron import whole_shape
from model import batches, routing_replay
from model.batches import MicroBatch, Rollout
from model.routing_replay import RouterLoad, RoutingReplay
from runlog.progress import StepTimer
from weights import adapter_weights
from weights.adapter_weights import checksums
from weights.checkpoint import Checkpoint
from weights.policy import Policy

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's moments, with torch's names
ADAM_EPS = 1e-8  # added to the denominator, as in the paper (arXiv 1412.6980)


class Update(NamedTuple):
    """The data of one optimizer step."""

    micro_batches: list[MicroBatch]  # of this rank
    counts: dict[str, int]  # divisors of the loss over all data ranks: num_tokens, num_sequences and max_new_tokens
    trained: list[int]  # sequences of all ranks; loss.skip_equal_groups leaves out some that count in the loss


class Share(NamedTuple):
    """The part of a metric that one micro-batch adds, and the kind of the metric: a mean over updates or tokens."""

    value: Tensor  # already divided by one of the update's counts, for example by its tokens
    of: Literal["updates", "tokens"]


class LossShare(NamedTuple):
    """The part that one micro-batch adds to the loss and the metrics of its update."""

    loss: Tensor
    metrics: dict[str, Share]
    largest_gap: Tensor  # of any token, between sampler and trainer, in nats


class Pass(NamedTuple):
    """A forward pass without gradients that fills one field of each micro-batch before a rollout's first update."""

    phase: str  # phase of the timer
    field: str  # field of MicroBatch
    micro_batches: list[MicroBatch]
    adapters: Callable[[], contextlib.AbstractContextManager]  # sets the adapters of the pass
    logp: Callable[[MicroBatch], Tensor]


class Learner:
    """The optimizer of a policy. Its method `update` learns from a rollout."""

    def __init__(self, cfg: Config, policy: Policy, pad_token: int) -> None:
        self.cfg, self.policy, self.pad_token = cfg, policy, pad_token
        self.arch, self.parallel = policy.arch, policy.parallel
        self.replay = RoutingReplay(policy.model, self.arch, self.parallel) if cfg.replay.mode != "off" else None
        self.router_load = RouterLoad(policy.model, self.arch, self.parallel)
        self.trained: list[int] = []  # the sequences of all ranks on which the last step trained
        self.parameters = list(policy.factors.values())
        self.moments = {
            moment: {name: torch.zeros_like(factor) for name, factor in policy.factors.items()} for moment in MOMENTS
        }
        self.optimizer_steps = 0
        self.is_restored = False
        self.reference_gap: float | None = None  # see _reference_gap; None until a reference pass has been compared
        # The factors before each of the last rollout.staleness training steps, the oldest first.
        self.stale_factors: deque[dict[str, Tensor]] = deque(maxlen=cfg.rollout.staleness)
        self.teacher: dict[str, Tensor] = {}  # the factors of loss.teacher
        self.teacher_kl: dict[int, Tensor] = {}  # mean per token, of each of this rank's sequences of the last step

    # ------------------------------------------------------------------------------------ the policy that samples

    def sampling_policy(self) -> contextlib.AbstractContextManager:
        """Switch to the adapters of rollout.staleness training steps ago in this block.

        In the first steps of a run, these are the adapters from the start of the run. Before a step, they are the
        adapters that will sample the step's rollout. During the step, until _keep_factors is called, they are those
        that sampled it.
        """
        return self.policy.holding(self.stale_factors[0]) if self.stale_factors else contextlib.nullcontext()

    def _keep_factors(self) -> None:
        """Keep a copy of the factors, for sampling the rollout that comes rollout.staleness training steps later."""
        if len(self.stale_factors) < self.cfg.rollout.staleness:
            self.stale_factors.append(self.policy.copied_factors())
        elif self.stale_factors:  # the memory of the oldest copy gets the newest one
            self.stale_factors.rotate(-1)
            adapter_weights.copy_(self.stale_factors[-1], self.policy.factors)

    def learn_from(self, teacher: Iterable[tuple[str, Tensor]]) -> None:
        """Store this rank's pieces of the teacher's factors.

        ``teacher`` yields each whole factor of loss.teacher, with its name in a checkpoint.
        """
        self.teacher = self.policy.copied_factors()
        names = {adapter_weights.hf_name(name, self.arch): name for name in self.teacher}
        for whole_name, whole in teacher:
            name = names[whole_name]
            piece = adapter_weights.piece(name, self.policy.factors[name], whole, self.arch, self.parallel)
            self.teacher[name].copy_(piece)

    # -------------------------------------------------------------------------------------------- one rollout

    def update(
        self, batch: Rollout, completions: list[list[Completion]], advantages: Tensor, step: int, timer: StepTimer
    ) -> dict[str, float]:
        """Make the optimizer steps of one rollout and return their metrics. ``advantages`` has the shape (S,).

        ``completions`` are those that this rank sampled. With replay r3, they contain the routes of the engine.
        """
        per_update = self.cfg.optim.prompts_per_update * self.cfg.rollout.group_size
        updates = []
        for first in range(0, len(advantages), per_update):
            sequences = list(range(first, first + per_update))
            updates.append(self._prepare(batch, completions, sequences, advantages))
        self.teacher_kl = {}
        self.trained = [sequence for update in updates for sequence in update.trained]
        trained_tokens = sum(batch.sampled_lengths[sequence] for sequence in self.trained)

        self._add_logprobs(updates, timer)
        self._keep_factors()  # after the last use of the factors that sampled, before the first optimizer step

        sums: dict[str, Tensor] = {}
        largest_gap, norms = torch.zeros((), device=self.parallel.device), []
        for update in updates:
            # A share was divided by its update's tokens. A weight turns it into a share of the mean over all tokens.
            weights = {"updates": 1 / len(updates), "tokens": update.counts["num_tokens"] / max(1, trained_tokens)}
            for micro in update.micro_batches:
                with timer.phase("update"):
                    loss = self._backward(micro, update.counts)
                for name, share in loss.metrics.items():
                    sums[name] = sums.get(name, 0) + share.value * weights[share.of]
                largest_gap = torch.maximum(largest_gap, loss.largest_gap)
            with timer.phase("update"):
                self.parallel.sync_gradients_(self.parameters)
                norms.append(self._step(step))

        totals = self.parallel.sum_over_data(torch.stack([*sums.values()])).tolist()
        metrics = dict(zip(sums, totals, strict=True))
        if self.replay:
            metrics["replay/differing_frac"] = self.replay.differing_share()
        metrics["rollout/logp_gap_max"] = self.parallel.max_over_ranks(largest_gap.item())
        load = self.router_load.metrics()
        metrics = metrics | load if trained_tokens else {}  # without a trained token these metrics mean nothing
        metrics["actor/grad_norm"] = sum(norms) / len(norms)
        metrics["actor/lr"] = self.cfg.optim.rate(step, self.cfg.train.steps)
        return metrics

    def _prepare(
        self, batch: Rollout, completions: list[list[Completion]], sequences: list[int], advantages: Tensor
    ) -> Update:
        """Prepare the update on ``sequences``. Skipped groups add no loss, but count in the loss's denominators."""
        cfg = self.cfg
        kept = [s for s in sequences if not (cfg.loss.mask_truncated and batch.truncated[s])]
        counts = {
            "num_tokens": sum(batch.sampled_lengths[s] for s in kept),
            "num_sequences": len(kept),
            "max_new_tokens": cfg.rollout.max_new_tokens,
        }
        if cfg.loss.skip_equal_groups:
            mixed = batch.rewards.amax(dim=1) > batch.rewards.amin(dim=1)
            kept = [s for s in kept if mixed[s // cfg.rollout.group_size]]
        return Update(self._micro_batches(batch, completions, kept, advantages), counts, kept)

    def _micro_batches(
        self, batch: Rollout, completions: list[list[Completion]], sequences: list[int], advantages: Tensor
    ) -> list[MicroBatch]:
        """Pack this rank's rows of ``sequences`` into micro-batches. All ranks get the same number of them."""
        cfg, parallel = self.cfg, self.parallel
        lengths = {s: batch.row_length(s) for s in sequences}
        prompts = {s: lengths[s] - batch.lengths[s] for s in sequences}
        shares = batches.plan(
            lengths,
            parallel.data,
            cfg.optim.tokens_per_micro_batch,
            multiple=parallel.tensor,
            group_size=cfg.rollout.group_size,
            prompts=prompts,
        )
        shares = shares or [[[]] * parallel.data]  # if empty, one empty micro-batch keeps ranks in step
        routes = None
        if cfg.replay.mode == "r3":
            own_routes = [[one.routed_experts for one in group] for group in completions]
            routes = routing_replay.collect(batch, own_routes, shares, self.arch, parallel)
        own = [share[parallel.data_rank] for share in shares]
        return [
            batches.pack(batch, rows, advantages, parallel.device, self.pad_token, parallel.tensor, routes)
            for rows in own
        ]

    # -------------------------------------------------------------------------------------------- forward passes

    def _routed(self, micro: MicroBatch, count: bool = False) -> contextlib.AbstractContextManager:
        """Replay the routes of ``micro`` in this block, if it has any.

        If ``count`` is true, RoutingReplay.differing_share includes this pass. Without replay, and in a micro-batch
        without rows, there are no routes.
        """
        if micro.routes is None:
            return contextlib.nullcontext()
        return self.replay.replaying(micro.routes, micro.replayed, count=count)

    def _add_logprobs(self, updates: list[Update], timer: StepTimer) -> None:
        """Store in each micro-batch the log-probs that stay the same during all updates of this rollout."""
        for each in self._passes(updates):
            with timer.phase(each.phase), each.adapters():
                for micro in each.micro_batches:
                    setattr(micro, each.field, each.logp(micro))
        compares = self.cfg.loss.kl != "none" and "reference_kl" not in self.cfg.checks.off
        trained = [update.micro_batches[0] for update in updates if update.trained]
        if trained and compares and self.reference_gap is None:  # once in a run
            with timer.phase("reference"):
                self.reference_gap = self._reference_gap(trained[0])

    def _passes(self, updates: list[Update]) -> list[Pass]:
        """Return the passes that this run needs, in their order.

        stale_logp comes from the policy that sampled, for the metrics of the gap to the sampler. old_logp comes from
        the policy before the first optimizer step, and the ratios of later updates are relative to it. The first update
        needs no pass for old_logp, because the policy has not changed yet and its ratio is 1. With replay r2 every
        update has this pass, because it also records the routes.
        """
        cfg, current = self.cfg, contextlib.nullcontext
        every, later = all_micro_batches(updates), all_micro_batches(updates[1:])
        passes = []
        if cfg.rollout.staleness:
            passes.append(Pass("old_logp", "stale_logp", every, self.sampling_policy, self._logp))
        if cfg.replay.mode == "r2":
            passes.append(Pass("old_logp", "old_logp", every, current, self._recording))
        elif later:
            passes.append(Pass("old_logp", "old_logp", later, current, self._logp))
        if cfg.loss.kl != "none":
            passes.append(Pass("reference", "ref_logp", every, self.policy.reference, self._logp))
        if cfg.loss.teacher:
            passes.append(
                Pass("teacher", "teacher_logp", every, lambda: self.policy.holding(self.teacher), self._freely)
            )
        return passes

    @torch.no_grad()
    def _logp(self, micro: MicroBatch) -> Tensor:
        """Compute the log-probs on the routes of ``micro``, with the adapters that the caller has set.  -> (b, T)"""
        with self._routed(micro):
            return self.policy.logprobs(micro).logp

    @torch.no_grad()
    def _freely(self, micro: MicroBatch) -> Tensor:
        """Compute the log-probs without replay, because replayed routes would change a teacher's output.  -> (b, T)"""
        return self.policy.logprobs(micro).logp

    @torch.no_grad()
    def _recording(self, micro: MicroBatch) -> Tensor:
        """Compute the log-probs, and store this pass's routes in ``micro`` for replay in later passes.  -> (b, T)"""
        micro.replayed = micro.packing.num_rows[None]
        stats, micro.routes = self.replay.record(lambda: self.policy.logprobs(micro), num_rows=1)
        return stats.logp

    def _reference_gap(self, micro: MicroBatch) -> float:
        """Return the mean gap between ref_logp and the log-probs of a policy whose B is 0, in nats per token.

        With B = 0 the adapters change nothing, so the two must agree. In a new run B is 0 already; in a resumed run it
        is replaced by 0 for this comparison. All ranks call this together.
        """
        unchanged = dict(self.policy.factors)
        for name, factor in unchanged.items():
            if name.endswith(".B") and self.is_restored:
                unchanged[name] = factor.new_zeros(())
        with self.policy.holding(unchanged):
            gap = (self._logp(micro) - micro.ref_logp).abs() * micro.mask
        total, tokens = self.parallel.sum_over_data(torch.stack([gap.sum(), micro.mask.sum()])).tolist()
        return total / tokens

    def _backward(self, micro: MicroBatch, counts: dict[str, int]) -> LossShare:
        """Compute the loss share of ``micro``, add its gradients to those of the factors, and return the share."""
        with self._routed(micro, count=True):
            share = self._loss(micro, counts)
            share.loss.backward()  # in the replay block, because activation recompute routes the tokens again
        micro.packing.release_mask()
        return share._replace(loss=share.loss.detach())  # frees the autograd graph before the next forward pass

    def _loss(self, micro: MicroBatch, counts: dict[str, int]) -> LossShare:
        """Compute the share of ``micro`` in the update's loss and in the metrics. For ``counts`` see Update."""
        loss_cfg = self.cfg.loss
        with self.router_load.counting(micro):
            stats = self.policy.logprobs(micro)
        logp, entropy = stats.logp, stats.entropy  # (b, T) each
        old_logp = logp.detach() if micro.old_logp is None else micro.old_logp  # None: the first update
        # The sampler is the behaviour policy: the weights correct its rounding, its noise and its staleness.
        weights = grpo.rollout_weights(
            old_logp,
            micro.rollout_logp,
            micro.mask,
            loss_cfg.importance,
            loss_cfg.importance_clip,
            loss_cfg.importance_low,
        )
        advantages = micro.advantages  # (b,), or (b, T) with a teacher
        if micro.teacher_logp is not None:
            advantages = grpo.distilled(advantages, old_logp, micro.teacher_logp, micro.mask, loss_cfg.teacher_coef)
        loss, measured = grpo.policy_loss(
            logp,
            old_logp,
            advantages,
            micro.mask,
            weights=weights,
            kind=functions.token_loss(loss_cfg.kind),
            clip_low=loss_cfg.clip_low,
            clip_high=loss_cfg.clip_high,
            dual_clip=loss_cfg.dual_clip,
            aggregate=loss_cfg.aggregate,
            **counts,
        )

        def combined(per_token: Tensor) -> Tensor:
            return grpo.aggregate_loss(per_token, micro.mask, aggregate=loss_cfg.aggregate, **counts)

        def mean(per_token: Tensor) -> Share:
            value = grpo.aggregate_loss(per_token, micro.mask, num_tokens=counts["num_tokens"])
            return Share(value, "tokens")

        metrics = {f"actor/{name}": Share(value, "tokens") for name, value in measured.items()}
        metrics["actor/policy_loss"] = Share(measured["policy_loss"], "updates")
        if micro.teacher_logp is not None:
            reverse_kl = grpo.kl(old_logp, micro.teacher_logp, "k1", micro.mask)
            metrics["actor/teacher_kl"] = mean(reverse_kl)
            by_row = reverse_kl.sum(dim=1) / micro.mask.sum(dim=1).clamp(min=1)
            # Without a sequence, there is one row that trains nothing.
            self.teacher_kl |= zip(micro.sequences, by_row.cpu(), strict=False)
        if micro.ref_logp is not None:
            kl = grpo.kl(logp, micro.ref_logp, loss_cfg.kl, micro.mask)
            loss = loss + loss_cfg.kl_coef * combined(kl)
            metrics["actor/kl_loss"] = mean(kl.detach())
        if loss_cfg.entropy_coef:
            loss = loss - loss_cfg.entropy_coef * combined(entropy)
        trainer_logp = old_logp if micro.stale_logp is None else micro.stale_logp  # of the policy that sampled
        gap = (trainer_logp - micro.rollout_logp).abs() * micro.mask
        metrics |= {"actor/loss": Share(loss.detach(), "updates"), "actor/entropy": mean(entropy.detach())}
        metrics["rollout/logp_gap_mean"] = mean(gap)
        if loss_cfg.corrects:
            metrics["rollout/importance_mean"] = mean(weights)
            if loss_cfg.importance in grpo.MASKING_MODES:
                metrics["rollout/importance_masked_frac"] = mean((weights == 0) * micro.mask)
            else:
                metrics["rollout/importance_clip_frac"] = mean((weights >= loss_cfg.importance_clip) * micro.mask)
        return LossShare(loss, metrics, gap.amax())

    # -------------------------------------------------------------------------------------------- the optimizer

    @torch.no_grad()
    def _step(self, step: int) -> float:
        """Clip the gradient, make one AdamW step, and return the gradient's norm before clipping.

        The learning rate depends on the training ``step``, so all optimizer steps of a rollout have the same rate.
        Raises Tripped if the norm is not finite.
        """
        norm = self.parallel.gradient_norm(self.parameters).item()
        if not math.isfinite(norm):
            raise Tripped(
                f"step {step + 1}: the gradient norm is {norm}; this step is not saved\n"
                "  look at: optim.lr and the last checkpoint; in bf16 also loss.aggregate and the longest completions"
            )
        optim = self.cfg.optim
        gradients = [parameter.grad for parameter in self.parameters]
        torch._foreach_mul_(gradients, min(1.0, optim.max_grad_norm / (norm + 1e-6)))
        # This is torch.optim.AdamW's function without its class. The first use of the class imports torch's compiler,
        # which takes half a second and 40 MiB.
        adamw(
            [*self.parameters],
            gradients,
            max_exp_avg_sqs=[],
            exp_avgs=list(self.moments["exp_avg"].values()),
            exp_avg_sqs=list(self.moments["exp_avg_sq"].values()),
            state_steps=[torch.tensor(float(self.optimizer_steps)) for _ in self.parameters],
            amsgrad=False,
            maximize=False,
            foreach=self.parallel.device.type != "cpu",  # few launches; torch's default excludes the type Factor
            lr=optim.rate(step, self.cfg.train.steps),
            beta1=optim.betas[0],
            beta2=optim.betas[1],
            eps=ADAM_EPS,
            weight_decay=optim.weight_decay,
        )
        torch.autograd.graph.increment_version(self.parameters)  # a backend's foreach kernel may not count its change
        self.optimizer_steps += 1
        self.policy.model.zero_grad()
        return norm

    # -------------------------------------------------------------------------------------------- its state

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
        """Return whole factors and moments by Hugging Face name, and the number of optimizer steps.

        Any layout can load them. All ranks call this together, but only rank 0 gets the tensors, on the host.
        """
        tensors: dict[str, dict[str, Tensor]] = {kind: {} for kind, *_ in self.saved_parts()}
        for kind, ending, values in self.saved_parts():
            for name, whole in self.policy.gathered(values):
                if whole is not None:
                    tensors[kind][name + ending] = whole
        return tensors, {"optimizer_steps": self.optimizer_steps}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Mapping[str, Tensor]], counts: dict[str, int]) -> None:
        """Load the result of `state` from any layout. Raises InputError if names or shapes do not fit this model."""
        steps = counts["optimizer_steps"]  # checkpoint.mismatch has compared it with the configuration
        done = steps * self.cfg.optim.prompts_per_update // self.cfg.rollout.prompts_per_step
        for _ in range(min(done, self.cfg.rollout.staleness)):  # filled below, like all of saved_parts
            self.stale_factors.append(self.policy.copied_factors())
        needed = dict.fromkeys(kind for kind, *_ in self.saved_parts())
        if tensors.keys() != needed.keys():
            raise InputError(f"checkpoint: has {', '.join(tensors) or 'no tensors'} instead of {', '.join(needed)}")
        # scatter compares only names that end like those of the moments
        if unknown := [name for name in tensors["optimizer"] if not name.endswith(tuple(f".{m}" for m in MOMENTS))]:
            raise InputError(
                f"checkpoint: optimizer: {unknown[0]} is unknown; only {' and '.join(MOMENTS)} belong there"
            )
        for kind, ending, values in self.saved_parts():
            self.policy.load_(tensors[kind], ending, into=values)
        self.optimizer_steps = steps
        self.is_restored = True

    def saved_parts(self) -> list[tuple[str, str, Mapping[str, Tensor]]]:
        """Return the parts of the state to save.

        Each part is a tuple of the kind of file, the suffix of names in the file, and this rank's tensors by name.
        """
        parts: list[tuple[str, str, Mapping[str, Tensor]]] = [("adapter", "", self.policy.factors)]
        parts += [("optimizer", f".{moment}", self.moments[moment]) for moment in MOMENTS]
        for age, factors in zip(range(len(self.stale_factors), 0, -1), self.stale_factors, strict=True):
            parts.append((f"adapter-behind-{age}", "", factors))
        return parts

    @torch.no_grad()
    def not_saved(self, saved: Checkpoint | None) -> str:
        """Return a message that names adapters, moments or counts that differ from ``saved``, or "".

        All ranks call this together, but only rank 0 needs ``saved``. Rank 0 cuts each whole tensor into the pieces of
        all ranks and compares their checksums. This also checks Policy.gathered, because cutting is its inverse.
        """
        parallel = self.parallel
        tensors = {}
        for kind, ending, values in self.saved_parts():
            for name, value in values.items():
                tensors[kind, name, ending] = value
        sums = dict(zip(tensors, checksums(list(tensors.values())), strict=True))
        by_rank = parallel.gather_objects((parallel.tensor_rank, parallel.expert_rank, sums))
        differences: list[str] = []
        if parallel.rank == 0 and saved is not None:
            differences = self._differences(saved, by_rank)
        said = f"{first_three(differences)}: differs from {saved.path}" if differences else ""
        return parallel.gather_objects(said)[0]

    def _differences(self, saved: Checkpoint, by_rank: list[tuple[int, int, dict]]) -> list[str]:
        """Return the names of tensors and counts whose values differ between ``saved`` and the current state.

        For every rank, ``by_rank`` has its tensor rank, its expert rank and the checksums of its tensors.
        """
        differences = []
        if (steps := saved.state.get("optimizer_steps")) != self.optimizer_steps:
            differences.append(f"optimizer_steps {self.optimizer_steps} instead of {steps}")
        stored = {f"{kind} {name}": value for kind, named in saved.tensors.items() for name, value in named.items()}
        for kind, name, ending in by_rank[0][2]:
            label = f"{kind} {adapter_weights.hf_name(name, self.arch)}{ending}"
            whole = stored.pop(label, None)
            sums = [(tensor, expert, of_rank[kind, name, ending]) for tensor, expert, of_rank in by_rank]
            if whole is None or not self._fits(name, whole, sums):
                differences.append(label)
        return differences + sorted(stored)

    def _fits(self, name: str, whole: Tensor, sums: list[tuple[int, int, tuple[int, int]]]) -> bool:
        """Return whether the pieces of ``whole`` have the checksums in ``sums``.

        ``whole`` is the factor ``name`` or one of its moments. For every rank, ``sums`` has its tensor rank, its expert
        rank and the checksum of its piece.
        """
        factor = self.policy.factors[name]
        if tuple(whole.shape) != whole_shape(factor, self.parallel):
            return False
        pieces: dict[int, tuple[int, int]] = {}  # a piece is cut once, however many ranks have it
        for tensor_rank, expert_rank, checksum in sums:
            key = expert_rank if factor.is_expert else tensor_rank
            if key not in pieces:
                there = dataclasses.replace(self.parallel, tensor_rank=tensor_rank, expert_rank=expert_rank)
                [pieces[key]] = checksums([adapter_weights.piece(name, factor, whole, self.arch, there)])
            if pieces[key] != checksum:
                return False
        return True


def all_micro_batches(updates: list[Update]) -> list[MicroBatch]:
    return [micro for update in updates for micro in update.micro_batches]
