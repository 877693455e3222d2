"""The checks in every step of a run: their names, their bounds, and the condition under which each one fires.

run/tripwires.py runs them. The lists `checks.warn` and `checks.off` of a configuration contain their names.
"""

LOGP_GAP_FP32 = 1e-3  # nats per token; 1e-7 is normal
UNPARSABLE_SHARE = 0.95  # share of the completions of a step
TRUNCATED_SHARE, TRUNCATED_COMPLETIONS = 0.5, 256  # checked over at least this many completions
TRUNCATED_TEMPERATURE = 1.5  # at a higher temperature, long completions say nothing about the model
STUCK_STEPS = 3  # steps with a KL of exactly 0 after updates, or with the same questions
STUCK_TOKENS = {"fp32": 500, "bf16": 20_000}  # least number in those steps: in bf16 a small update changes few tokens
SHORTEST = 20  # below this max_new_tokens, it may be normal that no answer ends
CONSTANT_STEPS = 20  # first steps of a run; if all their rewards are equal, nothing is learned
WINDOW = 10  # steps: the mean over the last ones is compared with the mean over the first ones
COLLAPSE_REWARD, COLLAPSE_KL = 0.2, 1.0  # share of the mean reward of the first steps; nats per token
UNSURE = 1.0  # nats per token: with a smaller entropy, sure tokens or those capped by loss.kl may have no gradient
LEAST_KL, LEAST_KL_COEF = 1e-3, 1e-9  # nats per token, and loss.kl_coef; from these on, the KL must have a gradient
KERNEL_GAP = 0.02  # nats per token between kernels for two memory orders; docs/policy.md has the measurements
SPIKE_WINDOW, SPIKE_START, SPIKE_FACTOR = 50, 10, 20.0  # steps of the usual median, steps before any check, ratio to it
ENTROPY_FLOOR = 1e-4  # nats per token

# Maps a check to the condition under which it fires. A test compares the list in docs/checks.md with this one.
CHECKS = {
    "reward_constant": f"All rewards of the first {CONSTANT_STEPS} steps are equal.",
    "unparsable": f"More than {100 * UNPARSABLE_SHARE:g} % of the completions of a step contain no answer.",
    "truncated": f"More than {100 * TRUNCATED_SHARE:g} % of the last {TRUNCATED_COMPLETIONS} completions are cut off, "
    f"at a temperature of {TRUNCATED_TEMPERATURE} or below.",
    "sampling": f"None of the last {TRUNCATED_COMPLETIONS} completions ends by itself, though max_new_tokens is at "
    f"least {SHORTEST}. Or all completions of every group are equal, which their entropy makes improbable. Or "
    f"{STUCK_STEPS} steps in a row ask the same questions.",
    "held_out": "A held-out question is also a training question (the run is refused), or is asked for training.",
    "state": "Ranks differ in a LoRA factor that they share (compared after each step), or in a base weight (compared "
    "at the start and before a checkpoint). Or a new checkpoint does not contain what the ranks hold; earlier ones "
    "stay. Or a resumed run has not loaded what its checkpoint contains.",
    "impossible": "The entropy is negative, or a KL estimate that cannot be negative is negative. Or the KL to the "
    f"teacher is exactly 0. Or the KL to the reference is exactly 0 in {STUCK_STEPS} successive steps after updates "
    f"(of at least {STUCK_TOKENS['fp32']} tokens, or {STUCK_TOKENS['bf16']:,} in bf16). Or the gradient is exactly 0 "
    f"although the entropy is at least {UNSURE:g} nat, in one of three cases: the KL in the loss is at least "
    f"{LEAST_KL:g}; the KL to the teacher is at least {LEAST_KL:g}; rewards of a group differ, without a teacher.",
    "collapse": f"The mean reward of the last {WINDOW} steps is below {100 * COLLAPSE_REWARD:g} % of that of the first "
    f"{WINDOW}, or the mean KL of the last {WINDOW} is above {COLLAPSE_KL:g} nat per token.",
    "logp_gap": f"The log-probs of sampler and trainer differ by more than {LOGP_GAP_FP32:g} nats per token in fp32, "
    "or checks.logp_gap_bf16 in bf16. With noise, those of a probe are compared. A gap far above the run's own first "
    "steps only warns.",
    "reference_kl": "Before the first update of a start or resume, the log-probs of the reference are not those of the "
    "policy without its LoRA update. In a new run, this is the policy with the new adapters. Otherwise B is 0 for one "
    "forward pass. For adapters merged in bf16, if the experts are quantised or in vLLM's memory, a difference of up "
    f"to {KERNEL_GAP:g} nats per token is allowed.",
    "adapters": "After an update, the sampler still receives the old tensors. Or the merged experts that trainer and "
    "sampler share are not W + (alpha / R) B A.",
    "noise": "AQN noise does not change the sampler. Noise that differs from the requested noise always stops the run.",
    "gradient_spike": f"The gradient norm exceeds {SPIKE_FACTOR:g} times its median of {SPIKE_WINDOW} steps.",
    "entropy": f"The policy's entropy is below {ENTROPY_FLOOR:g} nats per token: it has stopped exploring.",
}
