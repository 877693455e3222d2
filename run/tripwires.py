"""Checks that every step of a correct run passes. They stop a run that is silently wrong.

facts/checks.py names the checks and says when each of them fires. A failed check raises Tripped with a message of at
most ten lines, which names the likely cause. The lists `checks.warn` and `checks.off` of the configuration name the
checks that only warn, and the checks that are off.
"""

import functools
import math
from collections.abc import Callable, Mapping
from statistics import fmean, median

from facts.checks import (
    COLLAPSE_KL,
    COLLAPSE_REWARD,
    CONSTANT_STEPS,
    ENTROPY_FLOOR,
    KERNEL_GAP,
    LEAST_KL,
    LEAST_KL_COEF,
    SHORTEST,
    SPIKE_FACTOR,
    SPIKE_START,
    SPIKE_WINDOW,
    STUCK_STEPS,
    STUCK_TOKENS,
    TRUNCATED_COMPLETIONS,
    TRUNCATED_SHARE,
    TRUNCATED_TEMPERATURE,
    UNPARSABLE_SHARE,
    UNSURE,
    WINDOW,
)
from facts.exits import Tripped
from knobs import Config, Merging, RolloutConfig

GAP_START, GAP_FACTOR, GAP_FLOOR, GAP_STEPS = 10, 10, 0.1, 3  # see _far_above_the_first_steps
IDENTICAL_NATS = 200.0  # equal completions are a fault if their probability is below e^-200
MOST_WRONG = 1e-3  # share of an expert's sampled elements that may be rounded differently
REWARD_START = 0.02  # a mean reward below this cannot fall in a meaningful way
ROUNDING = -1e-6  # by rounding, an estimate that cannot be negative may be as low as this
NOT_NEGATIVE = ("k2", "k3", "low_var_kl", "low_var_kl+", "abs")  # kinds of loss.kl


def wrong_merge(share: float) -> str:
    """Return a description of the fault if ``share`` is too large, or "" if it is not.

    ``share`` is the metric sync/experts_wrong (Policy.update_kept).
    """
    if share <= MOST_WRONG:
        return ""
    return (
        f"{share:.2%} of an expert's sampled elements in the memory that sampler and trainer share are not "
        f"W + (alpha / R) B A; at most {MOST_WRONG:.1%} is allowed"
    )


def teaches(kl: float, coef: float) -> bool:
    """Return whether ``kl`` with the weight ``coef`` is so large that its gradient cannot be exactly 0."""
    return kl >= LEAST_KL and coef >= LEAST_KL_COEF


def truncated_steps(rollout: RolloutConfig) -> int:
    """Return the number of steps that sample enough completions to check the share that is truncated."""
    return -(-TRUNCATED_COMPLETIONS // (rollout.prompts_per_step * rollout.group_size))


class Tripwires:
    """The checks on the metrics of every step.

    All ranks must pass exactly the same numbers to the methods, so that either all ranks stop or none does.
    ``differing_layer`` is a collective, which all ranks call together. After a resume, "the first steps" are those of
    the new process.
    """

    def __init__(self, cfg: Config, say: Callable[[str], None], earlier: Mapping[str, str] | None = None) -> None:
        """Prepare the checks of a run. ``say`` prints a line.

        If the run resumes, ``earlier`` has the ``messages`` from the checkpoint.
        """
        self.cfg, self.say = cfg, say
        self.warned: set[str] = set()
        self.messages = dict(earlier or {})  # the first warning of each check
        self.history: list[dict[str, float]] = []  # the metrics of every step that this process has seen
        self.rewards: set[float] = set()
        self.gaps: list[float] = []  # nats per token, of every checked step
        self.reported_gap = False
        self.kl_zero: list[float] = []  # numbers of tokens of the latest steps in a row with a KL of exactly 0
        self.identical_nats = 0.0
        self.questions: list[frozenset[str]] = []  # of the last steps
        self.checksums: list[float] = []  # of the last push

    def cannot_judge(self) -> dict[str, str]:
        """Return the checks that this run can never fail, each with the reason."""
        cfg = self.cfg
        least_steps = {
            "truncated": truncated_steps(cfg.rollout),
            "gradient_spike": SPIKE_START + 1,
            "reward_constant": CONSTANT_STEPS,
            "collapse": 2 * WINDOW,
        }
        rules = [
            ("noise", cfg.aqn.schedule == "off", "aqn.schedule is off"),
            ("reference_kl", cfg.loss.kl == "none", "loss.kl is none"),
            ("reward_constant", cfg.loss.advantage == "zero", "loss.advantage is zero"),
            (
                "truncated",
                cfg.rollout.temperature > TRUNCATED_TEMPERATURE,
                f"rollout.temperature is above {TRUNCATED_TEMPERATURE}",
            ),
            ("collapse", cfg.reward.permute, "reward.permute shuffles the rewards, so both are expected"),
            *(
                (check, cfg.train.steps < least, f"train.steps is below {least}")
                for check, least in least_steps.items()
            ),
        ]
        return dict.fromkeys(cfg.checks.off, "off") | {check: reason for check, holds, reason in rules if holds}

    def trip(self, check: str, found: str, look_at: str) -> None:
        """Raise Tripped for a failed check, unless cannot_judge lists the check.

        If checks.warn lists it, this function prints a warning instead, once per process.
        """
        if check in self.cannot_judge():
            return
        warn = self.cfg.checks.warn
        message = f"checks.{check}: {found}\n  look at: {look_at}"
        if check not in warn:
            raise Tripped(f"{message}\n  to continue anyway, set checks.warn=[{','.join((*warn, check))}]")
        if check not in self.warned:
            self.warned.add(check)
            self._warn(check, f"{found}\n  look at: {look_at}")

    def _warn(self, check: str, message: str) -> None:
        self.messages.setdefault(check, message.partition("\n")[0])
        self.say(f"warning: checks.{check}: {message}")

    # -------------------------------------------------------------------------------- before a step

    def state(self, step: int, find: Callable[[], str]) -> None:
        """Check that all ranks, or ranks and files, have the same state after ``step`` steps.

        ``find`` returns the differences, or "" if there are none; see Policy.unequal. If the check is off, ``find`` is
        not called.
        """
        if "state" not in self.cfg.checks.off and (differing := find()):
            self.trip(
                "state",
                f"after {step} steps: {differing}",
                "how they are restored and synchronised (learner.py, parallel_setup.sync_gradients_, huggingface.load)",
            )

    def after_push(self, step: int, checksums: list[float], metrics: dict[str, float]) -> None:
        """Check that an update with a gradient has changed the pushed tensors.

        It also checks that the merged experts in the memory shared by trainer and sampler are W + (alpha / R) B A.
        ``checksums`` has a checksum for each rank, of the tensors that the rank pushed for ``step``. ``metrics`` are
        the metrics of the same push.
        """
        if wrong := wrong_merge(metrics.get("sync/experts_wrong", 0.0)):
            self.trip(
                "adapters",
                f"step {step + 1}: {wrong}",
                "lora_megatron.LoRAGroupedLinear.weight, and other code that writes there (weight_sync.py, the engine)",
            )
        before, self.checksums = self.checksums, checksums
        stuck = [rank for rank, pair in enumerate(zip(before, checksums, strict=False)) if pair[0] == pair[1]]
        since = len(self.history) - 1 - self.cfg.rollout.staleness  # the latest step whose update is in this push
        norm = self.history[since]["actor/grad_norm"] if since >= 0 else 0.0
        if stuck and norm:
            ranks = "" if len(stuck) == len(checksums) else f" on rank {', '.join(map(str, stuck))}"
            self.trip(
                "adapters",
                f"step {step + 1}: the update of step {since + 1} had a gradient norm of {norm:.3g}, but the tensors "
                f"pushed to the sampler{ranks} are the same as before",
                "how the adapters are merged (huggingface.export); in bf16 also whether optim.lr can move the weights",
            )

    def asked(self, step: int, asked: list[str], num_questions: int, held_out: frozenset[str]) -> None:
        """Check the questions that ``step`` asks. They were drawn from ``num_questions`` questions.

        None may be in ``held_out``, and STUCK_STEPS steps in a row must not ask the same questions. In ``asked``, the
        questions of the first round come first, followed by those of dynamic sampling.
        """
        if leaked := held_out.intersection(asked):
            self.trip(
                "held_out",
                f"step {step + 1} asks {len(leaked)} held-out questions, for example {min(leaked)[:60]!r}",
                "data.train_path and data.test_path, which must not overlap",
            )
        prompts = self.cfg.rollout.prompts_per_step
        self.questions = [*self.questions, frozenset(asked[:prompts])][-STUCK_STEPS:]
        same = len(self.questions) == STUCK_STEPS and len(set(self.questions)) == 1
        if same and num_questions >= 2 * prompts:
            self.trip(
                "sampling",
                f"step {step + 1} asks the same {prompts} of {num_questions} questions for the {STUCK_STEPS}rd time",
                "data_gsm8k.Questions.pick, and the step that it gets",
            )

    # -------------------------------------------------------------------------------- after a step

    def after_step(
        self,
        step: int,
        metrics: dict[str, float],
        rewards: tuple[float, float],
        differing_layer: Callable[[float], str],
    ) -> None:
        """Check the metrics of ``step`` (from 0). ``rewards`` are its smallest and its largest reward.

        ``differing_layer(bound)`` names the layer in which sampler and trainer differ by more than ``bound``.
        """
        self.history.append(metrics)
        self.rewards.update(rewards)
        broken = [key for key, value in metrics.items() if not math.isfinite(value)]
        if broken:
            raise Tripped(
                f"step {step + 1}: these metrics are not finite: {', '.join(broken)}\n  look at: optim.lr, and the data"
            )
        when = f"step {step + 1}"
        for judge in (
            self._answers,
            self._truncated,
            self._identical,
            functools.partial(self._agreement, differing_layer),
            self._impossible,
            self._collapse,
            self._gradient_and_entropy,
        ):
            judge(when, metrics)

    def reference(self, step: int, gap: float | None) -> None:
        """Check the reference pass before the first update that trains a token after a start or resume.

        ``gap`` is Learner.reference_gap after ``step``. Experts that are dequantised, or merged in the memory of an
        engine with a separate model, may have another memory order than in the reference pass. Some kernels then round
        differently, so a gap of up to KERNEL_GAP is allowed.
        """
        other_order = self.cfg.model.quantisation != "none" or self.cfg.rollout.engine != "torch"
        most = KERNEL_GAP if self.cfg.merging >= Merging.PASSES and other_order else 0.0
        if gap is not None and not gap <= most:
            self.trip(
                "reference_kl",
                f"step {step + 1}: before the first update, the log-probs of the reference and of the policy without "
                f"the LoRA update differ by {gap:.2g} nats per token; at most {most:g} is allowed",
                "whether new adapters start at 0, and whether the reference is the same model with its adapters off "
                "and with the routes of the update",
            )

    def _column(self, key: str, default: float = math.nan) -> list[float]:
        """Return the values of one metric in all steps so far."""
        return [metrics.get(key, default) for metrics in self.history]

    def _answers(self, when: str, metrics: dict[str, float]) -> None:
        if len(self.history) == CONSTANT_STEPS and len(self.rewards) == 1:
            self.trip(
                "reward_constant",
                f"every reward of {len(self.history)} steps is {min(self.rewards):g}, so all advantages are 0 and "
                "nothing is learned",
                "the completions (report.py show RUN), compared with reward.method and data.instruction",
            )
        if metrics["reward/unparsable_frac"] > UNPARSABLE_SHARE:
            self.trip(
                "unparsable",
                f"{when}: {metrics['reward/unparsable_frac']:.1%} of the completions contain no answer",
                "the prompt's form (data.instruction, chat template) and rollout.max_new_tokens",
            )

    def _truncated(self, when: str, metrics: dict[str, float]) -> None:
        """Check whether most completions are truncated. With fewer than 256 completions, this could be chance.

        So enough steps for 256 completions are checked together.
        """
        rollout, steps = self.cfg.rollout, truncated_steps(self.cfg.rollout)
        # At a higher temperature, long completions say nothing about the model, so "sampling" is also silent.
        if len(self.history) < steps or rollout.temperature > TRUNCATED_TEMPERATURE:
            return
        share = fmean(self._column("response_length/truncated_frac")[-steps:])
        where = f"{when}, the last {steps}" if steps > 1 else when
        if share == 1 and rollout.max_new_tokens >= SHORTEST:
            self.trip(
                "sampling",
                f"{where}: no completion ended by itself within {rollout.max_new_tokens} tokens",
                "the end tokens of the tokenizer and of generation_config.json; rollout.max_new_tokens",
            )
        if share > TRUNCATED_SHARE:
            self.trip(
                "truncated",
                f"{where}: {share:.1%} of the completions are cut off at {rollout.max_new_tokens} tokens",
                "the completions (report.py show RUN); rollout.max_new_tokens, which may be too small; a hybrid model "
                "thinks unless data.chat_template_kwargs={enable_thinking: false}",
            )

    def _identical(self, when: str, metrics: dict[str, float]) -> None:
        """Check whether the completions of a group differ, as the entropy of the policy requires.

        Two completions are equal by chance with a probability of about e^-(entropy x length). The exponents of all
        groups are summed over consecutive steps in which every group has only identical completions.
        """
        rollout = self.cfg.rollout
        if metrics["rollout/identical_groups"] < rollout.prompts_per_step:
            self.identical_nats = 0.0
            return
        pairs = rollout.prompts_per_step * (rollout.group_size - 1)
        self.identical_nats += pairs * metrics.get("actor/entropy", 0.0) * metrics["response_length/mean"]
        if self.identical_nats > IDENTICAL_NATS:
            self.trip(
                "sampling",
                f"{when}: in every group all completions are equal, by chance only with a probability of "
                f"e^-{self.identical_nats:.0f}",
                "the seeds that the engine uses for the samples of one prompt",
            )

    def _agreement(self, differing_layer: Callable[[float], str], when: str, metrics: dict[str, float]) -> None:
        """Check whether sampler and trainer agree, and whether the sampler uses the noise."""
        noisy = metrics.get("aqn/sigma", 0) > 0
        if noisy and metrics["aqn/probe_shift"] == 0:
            self.trip(
                "noise",
                f"{when}: sigma is {metrics['aqn/sigma']:g} but the sampler's log-prob on the probe prompt "
                "is bit-identical to the one before the noise",
                "aqn.sigma_end: rounding has removed all of this noise"
                if metrics.get("aqn/changed_elements") == 0
                else "whether the engine uses the pushed norms (aqn.targets, the engine's load_weights)",
            )
        if "logp_gap" in (*self.cfg.checks.off, *self.warned):
            return
        bound = self.cfg.largest_gap
        # With noise, the completions cannot show the gap. Without a trained row, the metric is absent.
        gap = metrics["aqn/probe_gap"] if noisy else metrics.get("rollout/logp_gap_mean", 0.0)
        self.gaps.append(gap)
        if not self.reported_gap and self._far_above_the_first_steps(bound):
            self.reported_gap = True
            self._warn(
                "logp_gap",
                f"{when}: the log-probs of sampler and trainer differ by {gap:.2g} nats per token on average, "
                f"after {median(self.gaps[:GAP_START]):.2g} in this run's first {GAP_START} steps\n"
                f"  after another push of the weights, {differing_layer(bound * GAP_FLOOR)}",
            )
        if not gap <= bound:
            self.trip(
                "logp_gap",
                f"{when}: the log-probs of sampler and trainer differ by {gap:.2g} nats per token on average; at most "
                f"{bound:g} is allowed\n  after another push of the weights, {differing_layer(bound)}",
                "how this layer's tensors are pushed (weight_sync.py, huggingface.export) and how it is computed",
            )

    def _far_above_the_first_steps(self, bound: float) -> bool:
        """Return whether the gaps of the last three steps all exceed 10 x the median of the first ten steps.

        Gaps below a tenth of the bound do not count. A single step proves nothing. If a router scores two experts
        almost equally for a token, the token's log-prob can differ by a nat in a correct run. This adds 3e-4 to a mean
        that is otherwise 3e-7.
        """
        first, last = self.gaps[:GAP_START], self.gaps[GAP_START:][-GAP_STEPS:]
        usual = max(GAP_FACTOR * median(first), GAP_FLOOR * bound)
        return len(last) == GAP_STEPS and all(gap > usual for gap in last)

    def _impossible(self, when: str, metrics: dict[str, float]) -> None:
        """Check for values that no correct step has: a negative KL or entropy, or a KL that stays 0 after updates."""
        kl, rollout = metrics.get("actor/kl_loss"), self.cfg.rollout
        for name in ("actor/entropy", "actor/kl_loss") if self.cfg.loss.kl in NOT_NEGATIVE else ("actor/entropy",):
            if metrics.get(name, 0) < ROUNDING:
                self.trip(
                    "impossible",
                    f"{when}: {name} is {metrics[name]:.2g}, which cannot be negative",
                    "the sign in grpo.py, and for the entropy in model/megatron_model.py",
                )
        updated = any(row["actor/grad_norm"] > 0 and row["actor/lr"] > 0 for row in self.history[:-1])
        if kl is not None:
            tokens = metrics["response_length/mean"] * rollout.prompts_per_step * rollout.group_size
            self.kl_zero = [*self.kl_zero, tokens] if kl == 0 and updated else []
        if len(self.kl_zero) >= STUCK_STEPS and sum(self.kl_zero) >= STUCK_TOKENS[self.cfg.model.dtype]:
            self.trip(
                "impossible",
                f"{when}: the KL to the reference is exactly 0 in {len(self.kl_zero)} steps after updates",
                "whether the reference is computed with the adapters off (lora_megatron.disabled)",
            )
        if metrics.get("actor/teacher_kl") == 0:
            self.trip(
                "impossible",
                f"{when}: the KL to the teacher is exactly 0, so the teacher is the policy itself and teaches nothing",
                "loss.teacher, whether its factors B are 0, and Learner.teacher",
            )
        if reason := self._gradient_expected(metrics):
            self.trip(
                "impossible",
                f"{when}: the gradient is exactly 0, although {reason}",
                "optim.lr: after an update that is too large, the activations overflow and the policy stays uniform",
            )

    def _gradient_expected(self, metrics: dict[str, float]) -> str:
        """Return why the gradient should not be 0, or "" if it is not 0 or may be 0."""
        cfg, loss = self.cfg, self.cfg.loss
        if metrics["actor/grad_norm"] != 0 or metrics.get("actor/entropy", 0.0) < UNSURE:
            return ""
        kl = metrics.get("actor/kl_loss", 0.0)
        if loss.kl in NOT_NEGATIVE and teaches(kl, loss.kl_coef):
            return f"the KL to the reference is {kl:.2g}"
        if not metrics.get("rollout/importance_mean", 1.0) > 0 or ":" in loss.kind:
            return ""
        if loss.teacher:
            kl = metrics.get("actor/teacher_kl", 0.0)
            return f"the KL to the teacher is {kl:.2g}" * teaches(abs(kl), loss.teacher_coef)
        if loss.mask_truncated or cfg.reward.permute or ":" in f"{loss.advantage} {cfg.reward.function}":
            return ""  # different rewards may train nothing, or train equal completions in opposite directions
        differing = cfg.rollout.prompts_per_step - metrics.get("reward/equal_groups", cfg.rollout.prompts_per_step)
        return f"the rewards of {differing:.0f} groups differ" if differing > 0 else ""

    def _collapse(self, when: str, metrics: dict[str, float]) -> None:
        """Check the last ten steps for a much lower reward than in the first ten, or for a large KL."""
        if len(self.history) < 2 * WINDOW:
            return
        rewards = [row.get("reward/first_round_correct", row["reward/mean"]) for row in self.history]
        before, now = fmean(rewards[:WINDOW]), fmean(rewards[-WINDOW:])
        kl = fmean(self._column("actor/kl_loss", 0.0)[-WINDOW:])
        fallen = before > REWARD_START and now < COLLAPSE_REWARD * before
        if fallen or kl > COLLAPSE_KL:
            self.trip(
                "collapse",
                f"{when}: the mean reward is {now:.3f}, after {before:.3f} in this run's first {WINDOW} steps; the KL "
                f"to the reference is {kl:.2g} nats per token",
                "the completions (report.py show RUN); optim.lr, loss.kl_coef, updates per rollout",
            )

    def _gradient_and_entropy(self, when: str, metrics: dict[str, float]) -> None:
        norm, norms = metrics["actor/grad_norm"], self._column("actor/grad_norm")[-SPIKE_WINDOW - 1 : -1]
        usual = median(norms) if len(norms) >= SPIKE_START else 0.0
        if usual and norm > SPIKE_FACTOR * usual:
            self.trip(
                "gradient_spike",
                f"{when}: the gradient norm is {norm:.3g}, {norm / usual:.0f} x the usual {usual:.3g}",
                "the step's completions, optim.lr, loss.clip_high",
            )
        if metrics.get("actor/entropy", math.inf) < ENTROPY_FLOOR:  # absent if no row was trained
            self.trip(
                "entropy",
                f"{when}: the entropy is {metrics['actor/entropy']:.2g} nats per token, so completions repeat",
                "loss.entropy_coef, optim.lr, loss.kl_coef",
            )
