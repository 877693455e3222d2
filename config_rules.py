"""What a typed configuration may still get wrong: keys that the run would not read, values that contradict each other,
and layouts that do not fit the model or the ranks. config.py calls the first two, the trainer check_layout as well;
preflight.py asks for all of them at once.

A rule says the key, what was found, what is needed, and the nearest sizes that work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from input_files import InputError

if TYPE_CHECKING:
    from hf_config import Architecture  # both import from here, so only their names are known at run time
    from knobs import Config


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
        for key in ("tensor", "expert_parallel", "enforce_eager", "kv_cache_mib")
    },
    "rollout.sync": (
        lambda c: c.rollout.engine != "vllm",
        "rollout.engine is not vllm, and the embedded sampler's is always merged",
    ),
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
    "aqn.bf16": (lambda c: _no_noise(c) or c.model.dtype != "bf16", "aqn.schedule is off, or model.dtype is not bf16"),
    "replay.reference": (lambda c: c.replay.mode == "off" or c.loss.kl == "none", "replay.mode is off or loss.kl none"),
    "checks.reward_constant_steps": (lambda c: c.checks.reward_constant == "off", "checks.reward_constant is off"),
    "checks.unparsable_share": (lambda c: c.checks.unparsable == "off", "checks.unparsable is off"),
    "checks.truncated_share": (lambda c: c.checks.truncated == "off", "checks.truncated is off"),
    "checks.collapse_reward": (lambda c: c.checks.collapse == "off", "checks.collapse is off"),
    "checks.collapse_kl": (lambda c: c.checks.collapse == "off", "checks.collapse is off"),
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


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # below it vLLM would sample at this one; above it refuses


def _engine_problems(cfg: Config) -> Iterator[str]:
    if cfg.rollout.engine == "vllm":
        for key, temperature in (("rollout", cfg.rollout.temperature), ("eval", cfg.eval.temperature)):
            if not LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE:
                bounds = f"{LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
                yield f"{key}.temperature: {temperature} is for rollout.engine torch; vllm needs {bounds}"
        for key, off in (("top_p", 1.0), ("top_k", 0)):
            if (value := getattr(cfg.rollout, key)) != off:
                yield f"rollout.{key}: {value} is for rollout.engine torch; vllm reports no untruncated log-probs then"
        if cfg.aqn.bf16 == "fp32" and "aqn.bf16" not in idle_keys(cfg):
            yield "aqn.bf16: fp32 is for rollout.engine torch; vllm keeps its norms in model.dtype; needed: grid"


STREAMED = "(or rollout.expert_parallel false, which pushes whole tensors)"


def _shared_shards_problems(cfg: Config) -> Iterator[str]:
    """What would make vLLM's shards others than the trainer's, whatever the model."""
    if not cfg.rollout.expert_parallel:
        return
    if cfg.device in ("cpu", "cuda"):
        yield f"rollout.expert_parallel: device {cfg.device} packs vLLM's weights; needed: npu {STREAMED}"
    if cfg.rollout.tensor != cfg.parallel.tensor:
        yield (
            f"rollout.tensor: {cfg.rollout.tensor} with rollout.expert_parallel splits attention differently than "
            f"parallel.tensor {cfg.parallel.tensor}; needed: the same {STREAMED}"
        )
    if cfg.parallel.expert_tensor != 1:
        yield (
            f"parallel.expert_tensor: {cfg.parallel.expert_tensor} splits experts, which vLLM keeps whole under "
            f"rollout.expert_parallel; needed: 1 {STREAMED}"
        )


def _adapter_problems(cfg: Config) -> Iterator[str]:
    if cfg.rollout.sync != "adapter" or "rollout.sync" in idle_keys(cfg):
        return
    lora = cfg.lora
    if cfg.rollout.expert_parallel:
        yield "rollout.sync: adapter cannot go with rollout.expert_parallel, which writes merged shards; needed: merged"
    if "router" in lora.targets:  # vLLM's logits with it would be of model.dtype, the trainer's are fp32
        yield "lora.targets: router cannot go with rollout.sync adapter; needed: merged, or targets without it"
    if lora.expert_rank not in (0, lora.rank):  # vLLM ignores PEFT's rank_pattern, and scales all by one alpha / rank
        yield f"lora.expert_rank: {lora.expert_rank} cannot go with rollout.sync adapter; needed: 0 or {lora.rank}"
    if lora.rank > 512:
        yield f"lora.rank: {lora.rank} is more than vLLM takes under rollout.sync adapter; needed: at most 512"


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


LARGEST_TINY_MODEL = 1e9  # parameters


def _tiny_model_problems(cfg: Config) -> Iterator[str]:
    if (tiny := cfg.tiny_model) is None:
        return
    if tiny.num_heads % tiny.num_kv_heads:
        yield (
            f"tiny_model.num_kv_heads: {tiny.num_kv_heads} does not divide num_heads {tiny.num_heads}; "
            f"nearest: {nearest(tiny.num_kv_heads, divisors(tiny.num_heads))}"
        )
    mlps = tiny.num_layers * tiny.num_experts * tiny.expert_width
    size = tiny.hidden_size * (2 * tiny.vocab_size + 3 * mlps + 4 * tiny.num_layers * tiny.num_heads * tiny.head_dim)
    if size > LARGEST_TINY_MODEL:
        yield f"tiny_model: about {size:.1e} parameters; needed: at most {LARGEST_TINY_MODEL:.0e}"
    if tiny.experts_per_token > tiny.num_experts:
        yield f"tiny_model.experts_per_token: {tiny.experts_per_token} exceeds num_experts {tiny.num_experts}"
    if tiny.teacher_right + tiny.teacher_wrong_operation > 1 + 1e-9:
        yield (
            f"tiny_model.teacher_right: {tiny.teacher_right} + teacher_wrong_operation "
            f"{tiny.teacher_wrong_operation} exceeds 1"
        )


Rules = tuple[Callable[["Config"], Iterator[str]], ...]
LAYOUT_RULES: Rules = (_parallel_problems, _shared_shards_problems, _batch_problems)  # preflight.py names what works
OTHER_RULES: Rules = (
    _engine_problems, _adapter_problems, _noise_problems, _data_problems, _loss_problems, _tiny_model_problems,
)  # fmt: skip


def problems(cfg: Config, rules: Rules = LAYOUT_RULES + OTHER_RULES) -> list[str]:
    """One sentence for every set of values that cannot work together, whatever the model and the number of ranks."""
    return [problem for rule in rules for problem in rule(cfg)]


def check_layout(cfg: Config, arch: Architecture, world_size: int) -> None:
    """Raises InputError for the first of layout_problems."""
    for problem in layout_problems(cfg, arch, world_size):
        raise InputError(problem)


def layout_problems(cfg: Config, arch: Architecture, world_size: int) -> Iterator[str]:
    """Why ``world_size`` ranks cannot train ``arch`` as cfg says: splits, positions, routing replay.

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
    yield from _split_problem("parallel.tensor", tensor, split_by_tensor, world_size)
    split_by_expert_tensor = {"columns of an expert": arch.expert_ffn_size, "ranks": world_size}
    yield from _split_problem("parallel.expert_tensor", expert_tensor, split_by_expert_tensor, world_size)
    expert_ranks = f"ranks ({world_size} / expert_tensor {expert_tensor})"
    split_by_expert = {"experts": arch.num_experts, expert_ranks: world_size // expert_tensor}
    yield from _split_problem("parallel.expert", expert, split_by_expert, world_size)
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    if longest > arch.max_positions:
        yield (
            f"data.max_prompt_tokens: {cfg.data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{cfg.rollout.max_new_tokens} = {longest} exceeds the model's {arch.max_positions} positions"
        )
    if cfg.replay.mode != "off" and (arch.num_experts > 256 or not any(arch.moe_layers)):
        yield f"replay.mode: {cfg.replay.mode} needs MoE layers of at most 256 experts"
    if cfg.rollout.expert_parallel:
        yield from _shared_shards_of(cfg, arch, world_size)


VOCABULARY_BLOCK = 64  # tokens; vLLM's embedding and head have a multiple of it


def _shared_shards_of(cfg: Config, arch: Architecture, world_size: int) -> Iterator[str]:
    """Why vLLM's shards of this model on these ranks would not be the trainer's."""
    if arch.num_experts % world_size:
        sizes = [d for d in divisors(arch.num_experts) if d % cfg.parallel.tensor == 0]
        yield (
            f"rollout.expert_parallel: {arch.num_experts} experts cannot be shared out evenly over all {world_size} "
            f"ranks; nearest: {nearest(world_size, sizes)} ranks {STREAMED}"
        )
    elif cfg.parallel.expert != world_size:
        yield (
            f"parallel.expert: {cfg.parallel.expert}, while rollout.expert_parallel spreads vLLM's experts over all "
            f"{world_size} ranks; needed: {world_size} {STREAMED}"
        )
    if arch.vocab_size % VOCABULARY_BLOCK:
        yield (
            f"rollout.expert_parallel: vLLM pads a vocabulary of {arch.vocab_size} to a multiple of "
            f"{VOCABULARY_BLOCK} before it splits it, the trainer does not; needed: a multiple {STREAMED}"
        )
    if arch.shared_expert_ffn_size and cfg.aqn.schedule != "off":
        yield (
            f"aqn.schedule: {cfg.aqn.schedule} needs the shared expert's whole matrices, of which "
            f"rollout.expert_parallel leaves every rank its part; needed: off {STREAMED}"
        )


def check_engine_layout(cfg: Config, arch: Architecture, world_size: int) -> None:
    """Raises InputError for the first of engine_layout_problems."""
    for problem in engine_layout_problems(cfg, arch, world_size):
        raise InputError(problem)


CACHE_BLOCK = 128  # tokens; vLLM hands out its key-value cache in blocks, and keeps one for padding


def engine_layout_problems(cfg: Config, arch: Architecture, world_size: int) -> Iterator[str]:
    """Why vLLM, if it samples, cannot hold ``arch`` on ``world_size`` ranks as cfg.rollout says."""
    if cfg.rollout.engine == "vllm":
        longest, element = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens, _element(cfg)
        yield from replica_problems(arch, world_size, cfg.rollout.tensor, longest, cfg.rollout.kv_cache_mib, element)


def replica_problems(
    arch: Architecture, ranks: int, tensor: int, longest: int, kv_cache_mib: int, element: int
) -> Iterator[str]:
    """Why ``tensor`` of ``ranks`` ranks cannot hold one copy of ``arch`` in vLLM, and the keys and values of one row.

    A row has up to ``longest`` tokens; an element has ``element`` bytes.
    """
    split = {
        "ranks": ranks,
        "attention heads": arch.num_heads,
        "columns of an expert": arch.expert_ffn_size,
        "columns of the shared expert": arch.shared_expert_ffn_size,
        "columns of a dense layer": 0 if all(arch.moe_layers) else arch.dense_ffn_size,
    }
    yield from _split_problem("rollout.tensor", tensor, split, ranks)
    if arch.num_kv_heads % tensor and tensor % arch.num_kv_heads:
        yield f"rollout.tensor: {tensor} and {arch.num_kv_heads} key/value heads: one must divide the other"
    needed = _cache_mib(arch, tensor, longest, element)
    if needed > kv_cache_mib:
        yield (
            f"rollout.kv_cache_mib: {kv_cache_mib} is too small for one row of {longest} tokens; "
            f"needed: {needed} for one, and as much for each row that runs beside it"
        )


def cache_mib_per_row(cfg: Config, arch: Architecture) -> int:
    """MiB of vLLM's key-value cache on a rank that the longest row takes, rounded up."""
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    return _cache_mib(arch, cfg.rollout.tensor, longest, _element(cfg))


def _cache_mib(arch: Architecture, tensor: int, longest: int, element: int) -> int:
    blocks = -(-longest // CACHE_BLOCK) + 1
    return -(-blocks * CACHE_BLOCK * cache_bytes_per_token(arch, tensor, element) // 2**20)


def _element(cfg: Config) -> int:
    """Bytes of one number in model.dtype."""
    return 2 if cfg.model.dtype == "bf16" else 4


def cache_bytes_per_token(arch: Architecture, tensor: int, element: int) -> int:
    """Keys and values of one token in all layers on one of ``tensor`` ranks, in elements of ``element`` bytes."""
    return 2 * arch.num_layers * max(1, arch.num_kv_heads // tensor) * arch.head_dim * element


def _split_problem(key: str, ranks: int, parts: Mapping[str, int], world_size: int) -> Iterator[str]:
    """The first number of ``parts`` that ``ranks`` does not divide, with the nearest sizes that divide all."""
    for what, number in parts.items():
        if number % ranks:
            working = [d for d in divisors(world_size) if all(n % d == 0 for n in parts.values())]
            yield f"{key}: {ranks} does not divide {number} {what}; nearest: {nearest(ranks, working)}"
            return
