"""The checks in every step of a run: their names, their bounds, and the condition that each one reports.

run/tripwires.py makes them. The lists `checks.warn` and `checks.off` of a configuration contain their names.
"""

LOGP_GAP_FP32 = 1e-3  # nats per token; 1e-7 is normal
UNPARSABLE_SHARE = 0.95  # of the completions of a step
TRUNCATED_SHARE, TRUNCATED_COMPLETIONS = 0.5, 256  # checked over at least this many completions
TRUNCATED_TEMPERATURE = 1.5  # at a higher temperature, long completions say nothing about the model
STUCK_STEPS = 3  # steps with a KL of exactly 0 after updates, or with the same questions
STUCK_TOKENS = {"fp32": 500, "bf16": 20_000}  # in those steps: in bf16 a small update changes few tokens
SHORTEST = 20  # below this max_new_tokens, it may be normal that no answer ends
CONSTANT_STEPS = 20  # the first ones; with equal rewards in all of them nothing is learned
WINDOW = 10  # steps: the mean of the last ones is compared with the mean of the first ones
COLLAPSE_REWARD, COLLAPSE_KL = 0.2, 1.0  # share of the mean reward of the first steps; nats per token
UNSURE = 1.0  # nats per token: with a smaller entropy, sure tokens or those capped by loss.kl may have no gradient
LEAST_KL, LEAST_KL_COEF = 1e-3, 1e-9  # nats per token, and loss.kl_coef, above which the KL must have a gradient
KERNEL_GAP = 0.02  # nats per token between kernels for two orders of memory; docs/policy.md has the measurements
SPIKE_WINDOW, SPIKE_START, SPIKE_FACTOR = 50, 10, 20.0  # steps of the usual median, steps before any check, ratio to it
ENTROPY_FLOOR = 1e-4  # nats per token

# A check -> when it fires. A test compares the table of docs/checks.md with it.
CHECKS = {
    "reward_constant": f"all rewards of the first {CONSTANT_STEPS} steps are equal",
    "unparsable": f"more than {100 * UNPARSABLE_SHARE:g} % of the completions of a step hold no answer",
    "truncated": f"more than {100 * TRUNCATED_SHARE:g} % of the last {TRUNCATED_COMPLETIONS} completions are cut off, "
    f"at temperature {TRUNCATED_TEMPERATURE} or below",
    "sampling": f"none of the last {TRUNCATED_COMPLETIONS} completions ends by itself, though max_new_tokens is at "
    f"least {SHORTEST}; or all completions of every group are equal, improbable by the entropy; or the same questions "
    f"are asked in {STUCK_STEPS} steps in a row",
    "held_out": "a held-out question is a training question (refused before the run), or is asked for training",
    "state": "ranks differ in a LoRA factor (compared after each step) or base weight (at the start, before a "
    "checkpoint) that they share; or a new checkpoint does not hold what the ranks hold (earlier ones stay); or a "
    "resumed run has not taken up what its checkpoint holds",
    "impossible": "the entropy, or a KL estimate that cannot be negative, is negative; or the KL to the teacher is "
    f"exactly 0; or the KL to the reference is exactly 0 in {STUCK_STEPS} successive steps after updates (of "
    f"{STUCK_TOKENS['fp32']} tokens or more, {STUCK_TOKENS['bf16']:,} in bf16); or the gradient is "
    f"exactly 0 although the entropy is at least {UNSURE:g} nat and the KL in the loss, or to the teacher, at least "
    f"{LEAST_KL:g}, or rewards of a group differ without a teacher",
    "collapse": f"the mean reward of the last {WINDOW} steps is below {100 * COLLAPSE_REWARD:g} % of that of the first "
    f"{WINDOW}, or their mean KL above {COLLAPSE_KL:g} nat a token",
    "logp_gap": f"the log-probs of sampler and trainer differ by more than {LOGP_GAP_FP32:g} nats a token in fp32 or "
    "checks.logp_gap_bf16 in bf16 (under noise: those of a probe); a gap far above the run's own first steps is a "
    "warning",
    "reference_kl": "before the first update of a start or resume, the log-probs of the reference are not those of the "
    "policy without its LoRA update: adapters that a new run has just made, or B set to 0 for one forward pass (merged "
    f"in bf16 and quantised or for vLLM: they differ by more than {KERNEL_GAP:g} nats a token)",
    "adapters": "after an update the sampler still receives the old tensors; or the merged experts that trainer and "
    "sampler share are not W + (alpha / R) B A",
    "noise": "AQN noise does not change the sampler; noise other than asked for always stops",
    "gradient_spike": f"the gradient norm exceeds {SPIKE_FACTOR:g} x its median of {SPIKE_WINDOW} steps",
    "entropy": f"the policy's entropy is below {ENTROPY_FLOOR:g} nats a token: it has stopped exploring",
}
