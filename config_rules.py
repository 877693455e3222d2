"""What a typed configuration may still get wrong: keys that the run would not read, values that contradict each other,
and layouts that do not fit the model or the ranks. config.py calls the first two, the trainer check_layout as well.

A rule says the key, what was found, what is needed, and the nearest sizes that work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from strict_yaml import InputError

if TYPE_CHECKING:
    from config import Config
    from hf_config import Architecture  # both import from here, so only their names are known at run time


# ---------------------------------------------------------------------------------------- keys this run would not read


def _no_warm_start(cfg: Config) -> bool:
    return cfg.tiny_model is None or cfg.tiny_model.warm_start_steps == 0


def _no_arithmetic(cfg: Config) -> bool:
    return cfg.data.source != "arithmetic"


def _no_noise(cfg: Config) -> bool:
    return cfg.aqn.schedule == "off"


# key -> (is it unread under this configuration?, why)
IDLE: dict[str, tuple[Callable[[Config], bool], str]] = {
    "tiny_model.shared_expert_width": (
        lambda c: c.tiny_model is None or c.tiny_model.architecture != "qwen2_moe",
        "tiny_model.architecture is not qwen2_moe",
    ),
    "tiny_model.warm_start_lr": (_no_warm_start, "tiny_model.warm_start_steps is 0"),
    "tiny_model.words_per_batch": (_no_warm_start, "tiny_model.warm_start_steps is 0"),
    "tiny_model.drills_per_batch": (_no_warm_start, "tiny_model.warm_start_steps is 0"),
    "tiny_model.teacher_right": (_no_warm_start, "tiny_model.warm_start_steps is 0"),
    "tiny_model.teacher_wrong_operation": (_no_warm_start, "tiny_model.warm_start_steps is 0"),
    "data.train_path": (lambda c: c.data.source != "gsm8k", "data.source is arithmetic, which is generated"),
    "data.test_path": (lambda c: c.data.source != "gsm8k", "data.source is arithmetic, which is generated"),
    "data.num_train": (_no_arithmetic, "data.source is not arithmetic"),
    "data.num_test": (_no_arithmetic, "data.source is not arithmetic"),
    # The warm start teaches arithmetic whatever the questions of the run are.
    "data.operand_low": (lambda c: _no_arithmetic(c) and _no_warm_start(c), "data.source is not arithmetic"),
    "data.operand_high": (lambda c: _no_arithmetic(c) and _no_warm_start(c), "data.source is not arithmetic"),
    "data.seed": (_no_arithmetic, "data.source is not arithmetic"),
    **{
        f"rollout.{key}": (lambda c: c.rollout.engine != "vllm", "rollout.engine is not vllm")
        for key in ("tensor", "enforce_eager", "kv_cache_mib")
    },
    "lora.expert_rank": (
        lambda c: not {"linear_fc1", "linear_fc2"} & set(c.lora.targets),
        "lora.targets has neither linear_fc1 nor linear_fc2",
    ),
    "loss.dual_clip": (lambda c: c.loss.kind != "ppo", "loss.kind is not ppo"),
    "loss.kl_coef": (lambda c: c.loss.kl == "none", "loss.kl is none"),
    "loss.importance_clip": (lambda c: c.loss.importance == "none", "loss.importance is none"),
    "optim.min_lr_ratio": (lambda c: c.optim.decay == "constant", "optim.decay is constant"),
    "aqn.sigma_start": (_no_noise, "aqn.schedule is off"),
    "aqn.sigma_end": (lambda c: c.aqn.schedule in ("off", "constant"), "aqn.schedule is off or constant"),
    "aqn.num_stages": (lambda c: c.aqn.schedule in ("off", "constant"), "aqn.schedule is off or constant"),
    "aqn.targets": (_no_noise, "aqn.schedule is off"),
    "aqn.router": (_no_noise, "aqn.schedule is off"),
    "replay.reference": (lambda c: c.replay.mode == "off" or c.loss.kl == "none", "replay.mode is off or loss.kl none"),
    "checks.reward_constant_steps": (lambda c: c.checks.reward_constant == "off", "checks.reward_constant is off"),
    "checks.unparsable_share": (lambda c: c.checks.unparsable == "off", "checks.unparsable is off"),
    "checks.logp_gap_fp32": (
        lambda c: c.checks.logp_gap == "off" or c.model.dtype != "fp32",
        "checks.logp_gap is off, or model.dtype is not fp32",
    ),
    "checks.logp_gap_bf16": (
        lambda c: c.checks.logp_gap == "off" or c.model.dtype != "bf16",
        "checks.logp_gap is off, or model.dtype is not bf16",
    ),
    "checks.noise": (_no_noise, "aqn.schedule is off"),
    "checks.gradient_spike_factor": (lambda c: c.checks.gradient_spike == "off", "checks.gradient_spike is off"),
    "checks.entropy_floor": (lambda c: c.checks.entropy == "off", "checks.entropy is off"),
    "eval.temperature": (lambda c: c.eval.samples == 0, "eval.samples is 0: greedy answers only"),
    "train.keep_last": (lambda c: c.train.checkpoint_every == 0, "train.checkpoint_every is 0: one checkpoint"),
}


def idle_keys(cfg: Config) -> dict[str, str]:
    """Dotted keys that a run of ``cfg`` never reads, each with the reason."""
    return {key: reason for key, (is_idle, reason) in IDLE.items() if is_idle(cfg)}


# ------------------------------------------------------------------------------------------ values that contradict


def nearest(value: int, working: Sequence[int]) -> str:
    """The next smaller and the next larger of ``working`` around ``value``, as text for an error message."""
    below, above = [w for w in working if w < value], [w for w in working if w > value]
    return ", ".join(str(w) for w in ([max(below)] if below else []) + ([min(above)] if above else [])) or "none"


def divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _batch_problems(cfg: Config) -> Iterator[str]:
    prompts, update = cfg.rollout.prompts_per_step, cfg.optim.prompts_per_update
    if prompts % update:
        yield (
            f"optim.prompts_per_update: {update} does not divide rollout.prompts_per_step {prompts}; "
            f"nearest: {nearest(update, divisors(prompts))}"
        )
    longest, room = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens, cfg.optim.tokens_per_micro_batch
    if longest > room:
        yield (
            f"optim.tokens_per_micro_batch: {room} cannot hold one row of data.max_prompt_tokens "
            f"{cfg.data.max_prompt_tokens} + rollout.max_new_tokens {cfg.rollout.max_new_tokens} = {longest} tokens"
        )


def _engine_problems(cfg: Config) -> Iterator[str]:
    if cfg.rollout.engine == "vllm":
        for key, off in (("top_p", 1.0), ("top_k", 0)):
            if (value := getattr(cfg.rollout, key)) != off:
                yield f"rollout.{key}: {value} is for rollout.engine torch; vllm reports no untruncated log-probs then"


def _noise_problems(cfg: Config) -> Iterator[str]:
    if cfg.aqn.schedule in ("qerl", "paper") and (cfg.aqn.num_stages < 2 or cfg.train.steps < 2):
        yield (
            f"aqn.num_stages: {cfg.aqn.num_stages} over {cfg.train.steps} steps has no noisy stage under "
            f"{cfg.aqn.schedule}; needed: 2 or more of both, or schedule constant"
        )


def _parallel_problems(cfg: Config) -> Iterator[str]:
    for axis in ("pipeline", "context"):
        if (size := getattr(cfg.parallel, axis)) != 1:
            yield f"parallel.{axis}: {size} is not supported yet; only 1 is"


def _data_problems(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if "{question}" not in data.prompt_template:
        yield f"data.prompt_template: {data.prompt_template!r} does not contain {{question}}"
    if data.operand_low > data.operand_high:
        yield f"data.operand_low: {data.operand_low} exceeds data.operand_high {data.operand_high}"
    if data.source == "gsm8k":
        for key in ("train_path", "test_path"):
            if not getattr(data, key):
                yield f"data.{key}: missing; data.source gsm8k needs a .jsonl or .parquet file"
        return
    if cfg.rollout.prompts_per_step > data.num_train:
        yield f"rollout.prompts_per_step: {cfg.rollout.prompts_per_step} exceeds data.num_train {data.num_train}"
    if cfg.eval.num_questions > data.num_test:
        yield f"eval.num_questions: {cfg.eval.num_questions} exceeds data.num_test {data.num_test}"


def _loss_problems(cfg: Config) -> Iterator[str]:
    if cfg.loss.kl != "none" and cfg.loss.kl_coef == 0:
        yield f"loss.kl_coef: 0 pays for loss.kl {cfg.loss.kl} without effect; use loss.kl: none"
    if 0 < cfg.loss.dual_clip <= 1:
        yield f"loss.dual_clip: {cfg.loss.dual_clip} would cut unclipped tokens too; needed: more than 1, or 0 for off"
    if repeated := sorted({t for t in cfg.lora.targets if cfg.lora.targets.count(t) > 1}):
        yield f"lora.targets: {', '.join(repeated)} given twice"


def _tiny_model_problems(cfg: Config) -> Iterator[str]:
    if (tiny := cfg.tiny_model) is None:
        return
    if tiny.num_heads % tiny.num_kv_heads:
        yield (
            f"tiny_model.num_kv_heads: {tiny.num_kv_heads} does not divide num_heads {tiny.num_heads}; "
            f"nearest: {nearest(tiny.num_kv_heads, divisors(tiny.num_heads))}"
        )
    if tiny.experts_per_token > tiny.num_experts:
        yield f"tiny_model.experts_per_token: {tiny.experts_per_token} exceeds num_experts {tiny.num_experts}"
    if tiny.teacher_right + tiny.teacher_wrong_operation > 1 + 1e-9:
        yield (
            f"tiny_model.teacher_right: {tiny.teacher_right} + teacher_wrong_operation "
            f"{tiny.teacher_wrong_operation} exceeds 1"
        )


PROBLEMS = (
    _parallel_problems,
    _engine_problems,
    _noise_problems,
    _batch_problems,
    _data_problems,
    _loss_problems,
    _tiny_model_problems,
)


def problems(cfg: Config) -> list[str]:
    """One sentence for every set of values that cannot work together, whatever the model and the number of ranks."""
    return [problem for rule in PROBLEMS for problem in rule(cfg)]


def check_layout(cfg: Config, arch: Architecture, world_size: int) -> None:
    """Raises InputError unless ``world_size`` ranks can hold ``arch`` as cfg.parallel says, and its positions suffice.

    tensor x data = expert_tensor x expert x expert_data = world_size; a split matrix has equal parts on all ranks.
    """
    tensor, expert, expert_tensor = cfg.parallel.tensor, cfg.parallel.expert, cfg.parallel.expert_tensor
    split_by_tensor = {
        "key/value heads": arch.num_kv_heads,
        "attention heads": arch.num_heads,
        "tokens of the vocabulary": arch.vocab_size,
        "columns of a dense layer": 0 if all(arch.moe_layers) else arch.dense_ffn_size,
        "columns of the shared expert": arch.shared_expert_ffn_size,
        "ranks": world_size,
    }
    _check_split("parallel.tensor", tensor, split_by_tensor, world_size)
    split_by_expert_tensor = {"columns of an expert": arch.expert_ffn_size, "ranks": world_size}
    _check_split("parallel.expert_tensor", expert_tensor, split_by_expert_tensor, world_size)
    expert_ranks = f"ranks ({world_size} / expert_tensor {expert_tensor})"
    split_by_expert = {"experts": arch.num_experts, expert_ranks: world_size // expert_tensor}
    _check_split("parallel.expert", expert, split_by_expert, world_size)
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    if longest > arch.max_positions:
        raise InputError(
            f"data.max_prompt_tokens: {cfg.data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{cfg.rollout.max_new_tokens} = {longest} exceeds the model's {arch.max_positions} positions"
        )


def _check_split(key: str, ranks: int, parts: Mapping[str, int], world_size: int) -> None:
    """Raises InputError unless ``ranks`` divides every number of ``parts``, naming the nearest that does."""
    for what, number in parts.items():
        if number % ranks:
            working = [d for d in divisors(world_size) if all(n % d == 0 for n in parts.values())]
            raise InputError(f"{key}: {ranks} does not divide {number} {what}; nearest: {nearest(ranks, working)}")
