"""What must hold in every step of a sound run, and what stops one that is silently wrong, with the cause to look for.

Each tripwire is a key of the config's `checks` section: warn, stop or off. A stop is a Tripped, at most ten lines.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from statistics import fmean, median

from knobs import Config

GAP_START, GAP_FACTOR, GAP_FLOOR, GAP_STEPS = 10, 10, 0.1, 3  # see _far_above_the_first_steps
TRUNCATED_COMPLETIONS, TRUNCATED_TEMPERATURE = 256, 1.5  # fewer say little; hotter ones ramble whatever the model
IDENTICAL_NATS = 200.0  # e^-200: how unlikely equal completions must be before they count as a fault
STUCK_STEPS = 3  # steps with a KL of exactly 0 after updates, or with the same questions
STUCK_TOKENS = {"fp32": 500, "bf16": 20_000}  # of those steps: in bf16 a small update changes few of them
SHORTEST = 20  # a max_new_tokens below it may well be too few for any answer to end
REWARD_START = 0.02  # a lower reward cannot fall in a way that means anything
WINDOW = 10  # steps whose mean is compared with the mean of the first ones
ROUNDING = -1e-6  # an estimate that cannot be negative may be this much below 0
NOT_NEGATIVE = ("k2", "k3", "low_var_kl", "low_var_kl+", "abs")  # estimates of loss.kl
SPIKE_WINDOW = 50  # steps whose median gradient norm says what is usual
SPIKE_START = 10  # steps before which nothing is usual yet


class Tripped(RuntimeError):
    """A run that went on would be silently wrong; the message says what was found and what to look at."""


class Tripwires:
    """Looks at the metrics of every step.

    Every rank must be given the same numbers, to the last bit: then every rank stops or none, and all of them meet in
    ``where_apart``, which is collective.
    """

    def __init__(self, cfg: Config, say: Callable[[str], None], where_apart: Callable[[float], str]) -> None:
        """``say`` prints; ``where_apart`` finds, collectively, the layer in which sampler and trainer part."""
        self.cfg, self.checks, self.say, self.where_apart = cfg, cfg.checks, say, where_apart
        self.warned: set[str] = set()
        self.rewards: set[float] = set()
        self.steps = 0  # that this process has seen: a resumed run looks again
        self.truncated: list[float] = []
        self.norms: list[float] = []
        self.gaps: list[float] = []
        self.steps_above = 0
        self.updated = False  # whether an update with a gradient has been made
        self.kl_zero: list[float] = []  # tokens of the last steps, whose KL was 0
        self.identical_nats = 0.0
        self.questions: list[frozenset[str]] = []
        self.outcomes: list[tuple[float, float]] = []  # reward and KL of each step
        self.checksums: list[float] = []

    def trip(self, check: str, found: str, look_at: str) -> None:
        """Act on a broken check as its action says; a warning is given once."""
        action = getattr(self.checks, check)
        message = f"checks.{check}: {found}\n  look at: {look_at}"
        if action == "stop":
            raise Tripped(f"{message}\n  to go on regardless: checks.{check}=warn")
        if action == "warn" and check not in self.warned:
            self.warned.add(check)
            self.say(f"warning: {message}")

    def after_step(self, step: int, metrics: dict[str, float], rewards: tuple[float, float]) -> None:
        """Check the metrics of ``step`` (from 0); ``rewards``: the smallest and the largest of its rewards."""
        broken = [key for key, value in metrics.items() if not math.isfinite(value)]
        if broken:
            self.trip("non_finite", f"step {step + 1}: {', '.join(broken)} not finite", "optim.lr, and the data")
        self._reward(step, metrics, rewards)
        self._sampling(step, metrics)
        self._agreement(step, metrics)
        self._possible(step, metrics)
        self._collapse(step, metrics)
        self._health(step, metrics)

    def _reward(self, step: int, metrics: dict[str, float], rewards: tuple[float, float]) -> None:
        self.rewards.update(rewards)
        self.steps += 1
        if self.steps == self.checks.reward_constant_steps and len(self.rewards) == 1:
            self.trip(
                "reward_constant",
                f"every reward of {self.steps} steps is {rewards[0]:g}: all advantages are 0 and nothing is learned",
                "completions.jsonl of the run folder, against reward.method and data.instruction",
            )
        if metrics["reward/unparsable_frac"] > self.checks.unparsable_share:
            self.trip(
                "unparsable",
                f"step {step + 1}: {metrics['reward/unparsable_frac']:.1%} of the completions hold no answer",
                "the prompt's form (data.instruction, chat template) and rollout.max_new_tokens",
            )
        self._truncated(step, metrics["response_length/truncated_frac"])

    def _truncated(self, step: int, share: float) -> None:
        """Whether most of the last 256 completions or more, in whole steps, were cut off; fewer may be so by chance."""
        rollout = self.cfg.rollout
        steps = -(-TRUNCATED_COMPLETIONS // (rollout.prompts_per_step * rollout.group_size))
        self.truncated = [*self.truncated, share][-steps:]
        if len(self.truncated) < steps or rollout.temperature > TRUNCATED_TEMPERATURE:
            return
        mean, where = fmean(self.truncated), f"step {step + 1}"
        where += f", the last {steps}" if steps > 1 else ""
        if mean == 1 and rollout.max_new_tokens >= SHORTEST:
            self.trip(
                "sampling",
                f"{where}: not one completion ended by itself within {rollout.max_new_tokens} tokens",
                "the end tokens of the tokenizer and of generation_config.json; rollout.max_new_tokens",
            )
        if mean > self.checks.truncated_share:
            self.trip(
                "truncated",
                f"{where}: {mean:.1%} of the completions are cut off at {rollout.max_new_tokens} tokens",
                "completions.jsonl of the run folder; a larger rollout.max_new_tokens; a hybrid model thinks unless "
                "data.chat_template_kwargs={enable_thinking: false}",
            )

    def asked(self, step: int, asked: list[str], num_questions: int, held_out: frozenset[str]) -> None:
        """Check the questions of ``step``; ``num_questions`` there are to train on, ``held_out`` are not for it."""
        if leaked := held_out.intersection(asked):
            self.trip(
                "held_out",
                f"step {step + 1} asks {len(leaked)} held-out questions, for example {min(leaked)[:60]!r}",
                "data.train_path and data.test_path, which must not overlap",
            )
        self.questions = [*self.questions, frozenset(asked)][-STUCK_STEPS:]
        same = len(self.questions) == STUCK_STEPS and len(set(self.questions)) == 1
        if same and num_questions >= 2 * len(asked):
            self.trip(
                "sampling",
                f"step {step + 1}: the same {len(asked)} of {num_questions} questions for the {STUCK_STEPS}rd time",
                "data_gsm8k.Questions.pick, and the step that it is given",
            )

    def _sampling(self, step: int, metrics: dict[str, float]) -> None:
        """Whether completions of a group differ as the policy's entropy says that they must.

        Two completions are equal by chance with a probability of about e^-(entropy x length). The exponents of all
        groups add up over consecutive steps in which all groups are identical.
        """
        rollout = self.cfg.rollout
        if metrics["rollout/identical_groups"] < rollout.prompts_per_step or rollout.top_k or rollout.top_p < 1:
            self.identical_nats = 0.0
            return
        pairs = rollout.prompts_per_step * (rollout.group_size - 1)
        self.identical_nats += pairs * metrics["actor/entropy"] * metrics["response_length/mean"]
        if self.identical_nats > IDENTICAL_NATS:
            self.trip(
                "sampling",
                f"step {step + 1}: all completions of every group are identical, with an entropy of "
                f"{metrics['actor/entropy']:.2g} nats a token: all advantages are 0",
                "the engine's seeds of the samples of one prompt",
            )

    def state(self, step: int, differing: str) -> None:
        """Stop on ``differing`` pieces of ranks, or a resume that is not its checkpoint (see adapter_weights.py)."""
        if differing:
            self.trip(
                "state",
                f"after {step} steps: {differing}",
                "what restores and synchronises them (learner.py, parallel_setup.sync_gradients_, weights_hf.load)",
            )

    def _possible(self, step: int, metrics: dict[str, float]) -> None:
        """Values that no sound step has: a negative KL estimate or entropy, a KL that stays 0 through updates."""
        kl = metrics.get("actor/kl_loss")
        negative = [("actor/entropy", metrics["actor/entropy"])]
        negative += [("actor/kl_loss", kl)] if kl is not None and self.cfg.loss.kl in NOT_NEGATIVE else []
        for name, value in negative:
            if value < ROUNDING:
                found = f"step {step + 1}: {name} is {value:.2g}, which cannot be negative"
                self.trip("impossible", found, "the sign in grpo.py, and in model_megatron.py for the entropy")
        rollout = self.cfg.rollout
        tokens = metrics["response_length/mean"] * rollout.prompts_per_step * rollout.group_size
        if not self._untrained(metrics):
            self.kl_zero = [*self.kl_zero, tokens] if kl == 0 and self.updated else []
        if len(self.kl_zero) >= STUCK_STEPS and sum(self.kl_zero) >= STUCK_TOKENS[self.cfg.model.dtype]:
            self.trip(
                "impossible",
                f"step {step + 1}: the KL to the reference is exactly 0 in {len(self.kl_zero)} steps after updates",
                "whether the reference is computed with the adapters off (lora_megatron.disabled)",
            )
        self.updated = self.updated or (metrics["actor/grad_norm"] > 0 and metrics["actor/lr"] > 0)

    def _collapse(self, step: int, metrics: dict[str, float]) -> None:
        """Reward far below its own start, or a policy far from the reference, in the mean of ten steps."""
        self.outcomes.append((metrics["reward/mean"], metrics.get("actor/kl_loss", 0.0)))
        if len(self.outcomes) < 2 * WINDOW or self.cfg.reward.permute:  # shuffled rewards do that, and are meant to
            return
        first, last = self.outcomes[:WINDOW], self.outcomes[-WINDOW:]
        before, now, kl = fmean(r for r, _ in first), fmean(r for r, _ in last), fmean(kl for _, kl in last)
        fallen = before > REWARD_START and now < self.checks.collapse_reward * before
        if fallen or kl > self.checks.collapse_kl:
            self.trip(
                "collapse",
                f"step {step + 1}: mean reward {now:.3f}, after {before:.3f} in this run's first {WINDOW} steps; KL to "
                f"the reference {kl:.2g} nats a token",
                "completions.jsonl of the run folder; optim.lr, loss.kl_coef, updates a rollout",
            )

    def _agreement(self, step: int, metrics: dict[str, float]) -> None:
        """Sampler and trainer, trainer and reference."""
        bound = getattr(self.checks, f"logp_gap_{self.cfg.model.dtype}")
        noisy = metrics.get("aqn/sigma", 0) > 0
        gap = metrics["aqn/probe_gap" if noisy else "rollout/logp_gap_mean"]  # noisy answers say nothing about the sync
        dropout = self.cfg.lora.dropout  # on in the update's passes, not in the sampler's and the probe's
        watched = self.checks.logp_gap != "off" and "logp_gap" not in self.warned and (noisy or not dropout)
        if watched and self._far_above_the_first_steps(gap, bound):
            self.say(
                f"warning: checks.logp_gap: step {step + 1}: sampler and trainer differ by {gap:.2g} nats a token, "
                f"after {median(self.gaps):.2g} in this run's first {GAP_START} steps;\n"
                f"  with the weights pushed once more, {self.where_apart(bound * GAP_FLOOR)}"
            )
        if watched and not gap <= bound:
            self.trip(
                "logp_gap",
                f"step {step + 1}: sampler and trainer differ by {gap:.2g} nats a token, at most {bound:g} expected;\n"
                f"  with the weights pushed once more, {self.where_apart(bound)}",
                "that layer's tensors in what is pushed (weight_sync.py, weights_hf.export), and how it is computed",
            )
        if noisy and metrics["aqn/probe_shift"] == 0:
            self.trip(
                "noise",
                f"step {step + 1}: sigma is {metrics['aqn/sigma']:g} but the sampler's log-prob on the probe prompt is "
                "to the last bit what it was before the noise",
                "whether the engine takes pushed norms (aqn.targets, the engine's load_weights)",
            )
        if step == 0 and metrics.get("actor/kl_loss", 0) != 0:
            updates = self.cfg.rollout.prompts_per_step // self.cfg.optim.prompts_per_update
            same_routes = self.cfg.replay.mode != "r3" or self.cfg.replay.reference == "replayed"
            if updates == 1 and not dropout and same_routes:  # later updates of the first step have moved already
                self.trip(
                    "reference_kl",
                    f"before the first update the KL to the reference is {metrics['actor/kl_loss']:.2g}, not 0",
                    "whether the adapters start at 0 and the reference is the same model with them off",
                )

    def _far_above_the_first_steps(self, gap: float, bound: float) -> bool:
        """Whether this is the third step in a row with a gap of 10 x the median of this process's first ten, or more.

        Gaps under a tenth of the bound do not count. One step alone says nothing: a token at which two experts almost
        tie can be a nat apart in a sound run, 3e-4 of a mean that is 3e-7 otherwise. True once.
        """
        if len(self.gaps) < GAP_START:
            self.gaps.append(gap)
            return False
        above = gap > max(GAP_FACTOR * median(self.gaps), GAP_FLOOR * bound)
        self.steps_above = self.steps_above + 1 if above or self.steps_above >= GAP_STEPS else 0
        return self.steps_above == GAP_STEPS

    def _health(self, step: int, metrics: dict[str, float]) -> None:
        norm, factor = metrics["actor/grad_norm"], self.checks.gradient_spike_factor
        if len(self.norms) >= SPIKE_START:
            usual = median(self.norms)
            if usual and norm > factor * usual:
                self.trip(
                    "gradient_spike",
                    f"step {step + 1}: gradient norm {norm:.3g}, {norm / usual:.0f} x the usual {usual:.3g}",
                    "the step's completions, optim.lr, loss.clip_high",
                )
        self.norms = [*self.norms, norm][-SPIKE_WINDOW:]
        if metrics["actor/entropy"] < self.checks.entropy_floor and not self._untrained(metrics):
            self.trip(
                "entropy",
                f"step {step + 1}: entropy {metrics['actor/entropy']:.2g} nats a token: completions repeat themselves",
                "loss.entropy_coef, optim.lr, loss.kl_coef",
            )

    def _untrained(self, metrics: dict[str, float]) -> bool:
        """Whether the step left out all its rows, so that there is none of which to take an entropy or a KL."""
        return metrics["actor/grad_norm"] == 0 and (self.cfg.loss.skip_equal_groups or self.cfg.loss.mask_truncated)

    def after_push(self, step: int, checksums: list[float], last_norm: float | None) -> None:
        """Check what was pushed for ``step``: it must not be what was pushed before an update that had a gradient.

        ``checksums``: every rank's, of what it pushed; ``last_norm``: the gradient norm of the last update.
        """
        before, self.checksums = self.checksums, checksums
        stuck = [rank for rank, pair in enumerate(zip(before, checksums, strict=False)) if pair[0] == pair[1]]
        if stuck and last_norm:
            ranks = "" if len(stuck) == len(checksums) else f" on rank {', '.join(map(str, stuck))}"
            self.trip(
                "adapters",
                f"step {step + 1}: the last update had a gradient norm of {last_norm:.3g}, but the tensors pushed to "
                f"the sampler{ranks} are the ones of before",
                "the merge of the adapters (weights_hf.export); in bf16 also whether optim.lr can move the weights",
            )


# --------------------------------------------------------------------------------------------- a rank that stands still

EXIT_CODE = 4
GRACE_SECONDS = 2.0  # from the report to the exit: the other ranks, which wait for this one, say where they are


class Heartbeat:
    """A watcher thread: without a `beat` for ``stall_seconds`` it prints the phase and every thread's stack, and exits.

    The stack names the collective that waits, if one does. 0 seconds: no watcher.
    """

    def __init__(self, rank: int, stall_seconds: int) -> None:
        self.rank, self.stall_seconds = rank, stall_seconds
        self.place, self.last = "start", time.monotonic()
        self.stopped = threading.Event()
        if stall_seconds:
            threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()

    def beat(self, place: str) -> None:
        """This rank is alive, and now at ``place``."""
        self.place, self.last = place, time.monotonic()

    def go_on(self) -> None:
        """This rank is alive, and still at the same place."""
        self.last = time.monotonic()

    def stop(self) -> None:
        """No more watching."""
        self.stopped.set()

    def _watch(self) -> None:
        while not self.stopped.wait(min(1.0, self.stall_seconds / 4)):
            still = time.monotonic() - self.last
            if still > self.stall_seconds:
                said = (
                    f"rank {self.rank}: stood still for {still:.0f} s after: {self.place} (train.stall_seconds = "
                    f"{self.stall_seconds}); its stacks:\n{stacks()}"
                )
                os.write(sys.stderr.fileno(), said.encode())  # at once: the ranks share a terminal or a log
                time.sleep(GRACE_SECONDS)
                os._exit(EXIT_CODE)


def stacks() -> str:
    """Where every other thread of this process is: innermost call last, the main thread at the end."""
    frames = sys._current_frames()
    others = [thread for thread in reversed(threading.enumerate()) if thread is not threading.current_thread()]
    return "\n".join(
        f"thread {thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
        for thread in others
        if thread.ident in frames
    )
