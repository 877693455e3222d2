"""A training with a fault planted on purpose, to see whether the benchmark of methods finds it.

    torchrun --nproc_per_node=1 benchmarks/planted_fault.py FAULT configs/bench.yaml [section.key=value ...]

A fault replaces one piece of source text by another while the module is imported; no file is changed. Everything else
is train_grpo.py. These runs are controls: if a comparison cannot find its fault, its other results mean nothing.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from input_files import BAD_INPUT, InputError, refused  # noqa: E402

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
        ".clamp(min=torch.finfo(scale.dtype).tiny)).round() * scale",
        ".clamp(min=torch.finfo(scale.dtype).tiny)).floor() * scale",
    ),
    # Evaluations measure the policy that samples, with noise or rounding, instead of the one that is trained.
    "altered_evaluation": (
        "train_grpo",
        "            run.weights.push_clean()\n",
        "            run.weights.push(step + 1, held_out[0].prompt)\n",
    ),
}


def plant(fault: str) -> None:
    """Import the module with the fault in it; InputError for an unknown fault, or if its place has changed."""
    if fault not in FAULTS:
        raise InputError(f"FAULT: found {fault!r}; needed: one of {', '.join(FAULTS)}")
    name, right, wrong = FAULTS[fault]
    path = ROOT / f"{name}.py"
    text = path.read_text()
    if text.count(right) != 1:
        raise InputError(f"{path}: {right.strip()!r} is there {text.count(right)} times; needed: once, for {fault}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    exec(compile(text.replace(right, wrong), path, "exec"), module.__dict__)


def main(arguments: list[str]) -> int:
    try:
        plant(arguments[0] if arguments else "")
    except BAD_INPUT as error:
        return refused(error)
    import parallel_setup
    import train_grpo

    return parallel_setup.run_command(train_grpo.main, arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
