"""The faults that benchmarks/planted_fault.py can plant into a training, and that a sweep may name for its controls."""

# fault -> the module, its text, and the text in its place
FAULTS: dict[str, tuple[str, str, str]] = {
    # Importance weights are those of the sampler over the trainer, the reciprocals of the right ones.
    "inverted_weights": (
        "grpo",
        "log_ratio = _inside(mask, old_logp) - _inside(mask, rollout_logp)",
        "log_ratio = _inside(mask, rollout_logp) - _inside(mask, old_logp)",
    ),
    # PPO takes the smaller of the two losses: it clips what should pass, and passes what should be clipped.
    "reversed_clip": ("grpo", "torch.maximum(plain, clipped)", "torch.minimum(plain, clipped)"),
    # Each token is replayed on the experts of the token before it.
    "foreign_routes": ("routing_replay", "self._local(routes).long()", "self._local(routes.roll(1, 1)).long()"),
    # The adapters of the experts never reach the sampler, in training and in evaluations.
    "lost_experts": (
        "weights_hf",
        "values = [merged(slot) if merge else slot.weight for slot in together]",
        "values = [merged(slot) if merge and slot.expert is None else slot.weight for slot in together]",
    ),
    # The sampler's weights are rounded down instead of to the nearest.
    "rounded_down": (
        "weight_sync",
        "(part / scale).round() * scale",
        "(part / scale).floor() * scale",
    ),
    # Evaluations measure the policy that samples, with noise or rounding, instead of the one that is trained.
    "altered_evaluation": (
        "train_grpo",
        "            run.weights.push_clean()\n",
        "            run.weights.push(step + 1, held_out[0].prompt)\n",
    ),
}
