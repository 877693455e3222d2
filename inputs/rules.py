"""Rules for a typed configuration: every key must have an effect, and values must not contradict each other.

`problems` applies the rules that need no model, then the rules about the model and the number of ranks. An engine adds
rules that depend on its installed package. A message names the key, the value found, the value needed, and the nearest
sizes that work.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import isqrt

from facts.architectures import Architecture
from facts.engines import ENGINES
from facts.exits import InputError
from facts.limits import ELEMENT_BYTES, cache_mib, int4_problem
from inputs.files import shown
from knobs import (
    GENERATED,
    AqnConfig,
    Config,
    DataConfig,
    EvalConfig,
    LoraConfig,
    LossConfig,
    Merging,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ReplayConfig,
    RewardConfig,
    RolloutConfig,
    TinyModelConfig,
    TrainConfig,
)

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # vLLM raises a value below 0.01 to it, and refuses one above 2
LARGEST_ADAPTER_RANK = 512  # the limit of vLLM's LoRA
VOCABULARY_BLOCK = 64  # tokens; vLLM pads the embedding and the head to a multiple of it
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # supported by vLLM's attention kernel for a CPU
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
STREAMED = "or set rollout.expert_parallel to false, which pushes whole tensors"
ENGINE_TORCH = "or set rollout.engine to torch"


def problems(
    cfg: Config, arch: Architecture | None = None, ranks: int | None = None, *, layout: bool = True
) -> list[str]:
    """Return the messages of all broken rules. Without ``arch`` and ``ranks``, only rules that need neither apply.

    Without ``layout``, the rules about the sizes of the layout (engine_shards and batch_sizes) do not apply.
    """
    found: list[str] = []
    if layout:
        found += engine_shards(cfg.rollout, cfg.parallel, cfg.device)
        found += batch_sizes(cfg.optim, cfg.rollout, cfg.data)
    if cfg.rollout.engine == "vllm":
        found += _vllm(cfg.rollout, cfg.eval, cfg.lora, apart=cfg.merging is Merging.NOWHERE)
    found += _data(cfg.data, cfg.eval, cfg.rollout.prompts_per_step)
    found += [*_loss(cfg.loss), *_importance(cfg.loss, cfg.rollout), *_overlong(cfg.reward, cfg.rollout)]
    found += _environment(cfg.rollout, cfg.reward, cfg.parallel)
    found += _teacher(cfg.loss, cfg.rollout, cfg.reward)
    found += _schedules(cfg.train, cfg.aqn, cfg.tiny_model)
    if arch is not None and ranks is not None:
        found += trainer_problems(cfg, arch, ranks)
        found += sampler_problems(cfg, arch, ranks)
    return found


def refuse_first(broken: Iterable[str]) -> None:
    """Raise InputError with the first message of the ``broken`` rules, if there is one."""
    for problem in broken:
        raise InputError(problem)


# ---------------------------------------------------------------------------------------- keys this run would not read


def _no_warm_start(tiny: TinyModelConfig | None) -> bool:
    return tiny is None or tiny.warm_start_steps == 0


# Each row has a test of whether the run would ignore the keys, the reason, and the keys.
IDLE: tuple[tuple[Callable[[Config], bool], str, str], ...] = (
    (lambda c: _no_warm_start(c.tiny_model), "tiny_model.warm_start_steps is 0",
     "tiny_model.drills_per_batch tiny_model.teacher_right tiny_model.teacher_calls "
     "tiny_model.teacher_wrong_operation"),
    (lambda c: c.data.source == "arithmetic", "data.source is arithmetic", "data.train_path data.test_path"),
    (lambda c: c.data.source != "file", "data.source is not file", "data.columns"),
    (lambda c: c.data.source != "arithmetic", "data.source reads files", "data.num_test data.seed"),
    # The warm start teaches arithmetic, whatever the questions of the run are.
    (lambda c: c.data.source != "arithmetic" and _no_warm_start(c.tiny_model), "data.source is not arithmetic",
     "data.operand_high data.operations_high"),
    (lambda c: not c.lora.expert_targets,
     "lora.targets has neither linear_fc1 nor linear_fc2", "lora.expert_rank"),
    (lambda c: not c.rollout.environment, "rollout.environment is not set",
     "rollout.stop rollout.max_turns rollout.environment_role rollout.environment_seconds"),
    (lambda c: bool(c.reward.function), "reward.function scores instead", "reward.method"),
    (lambda c: not c.reward.function and c.reward.method != "math", "reward.method has no limit", "reward.seconds"),
    (lambda c: c.loss.kind in ("gspo", "cispo", "dppo_tv"), "loss.kind is not ppo", "loss.dual_clip"),
    (lambda c: c.loss.kl == "none", "loss.kl is none", "loss.kl_coef"),
    (lambda c: not c.loss.teacher, "loss.teacher is not set", "loss.teacher_coef"),
    (lambda c: not c.loss.corrects, "loss.importance is none or uncorrected", "loss.importance_clip"),
    (lambda c: c.loss.importance != "icepop", "loss.importance is not icepop", "loss.importance_low"),
    (lambda c: c.aqn.schedule == "off", "aqn.schedule is off", "aqn.sigma_start aqn.targets"),
    (lambda c: not c.aqn.falls, "aqn.schedule does not change sigma", "aqn.sigma_end aqn.num_stages"),
    (lambda c: "logp_gap" in c.checks.off or c.model.dtype != "bf16",
     "logp_gap is in checks.off, or model.dtype is not bf16", "checks.logp_gap_bf16"),
    (lambda c: c.eval.samples == 0, "eval.samples is 0, so all answers are greedy", "eval.temperature"),
    (lambda c: c.train.checkpoint_every == 0, "train.checkpoint_every is 0, so one checkpoint is saved",
     "train.keep_last"),
)  # fmt: skip


def idle_keys(cfg: Config) -> dict[str, str]:
    """Return the dotted keys that a run of ``cfg`` never reads, each with the reason."""
    others = {key: engine for engine, kind in ENGINES.items() for key in kind.keys if key not in cfg.rollout.kind.keys}
    of_others = {f"rollout.{key}": f"rollout.engine is not {engine}" for key, engine in others.items()}
    return of_others | {key: reason for is_idle, reason, keys in IDLE if is_idle(cfg) for key in keys.split()}


# ------------------------------------------------------------------------------------ values that contradict each other


def nearest(value: int, working: Sequence[int]) -> str:
    """Return, as text for an error message, the nearest numbers in ``working`` below and above ``value``."""
    smaller = sorted(w for w in working if w < value)
    larger = sorted(w for w in working if w > value)
    return ", ".join(map(str, smaller[-1:] + larger[:1])) or "none"


def divisors(number: int) -> list[int]:
    """Return all divisors of ``number``, smallest first."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def engine_shards(rollout: RolloutConfig, parallel: ParallelConfig, device: str) -> Iterator[str]:
    """Yield the reasons why vLLM's shards would differ from the trainer's.

    With rollout.expert_parallel, the shards must be equal. ``device`` is the value of the key device, or the resolved
    device.
    """
    if rollout.expert_parallel and device in ("cpu", "cuda"):
        yield f"rollout.expert_parallel: vLLM packs its weights on device {device}; use npu, {STREAMED}"
    if rollout.expert_parallel and rollout.tensor != parallel.tensor:
        yield (
            f"rollout.tensor: {rollout.tensor} splits attention differently than parallel.tensor {parallel.tensor}, "
            f"but rollout.expert_parallel needs equal shards; set both to the same number, {STREAMED}"
        )


def batch_sizes(optim: OptimConfig, rollout: RolloutConfig, data: DataConfig) -> Iterator[str]:
    """Yield a message if the updates of a step are unequal, or if the longest row does not fit into a micro-batch."""
    if rollout.prompts_per_step % optim.prompts_per_update:
        working = divisors(rollout.prompts_per_step)
        yield (
            f"optim.prompts_per_update: {optim.prompts_per_update} does not divide rollout.prompts_per_step "
            f"({rollout.prompts_per_step}); the nearest values that do: {nearest(optim.prompts_per_update, working)}"
        )
    row_tokens = data.max_prompt_tokens + rollout.max_new_tokens
    if row_tokens > optim.tokens_per_micro_batch:
        yield (
            f"optim.tokens_per_micro_batch: {optim.tokens_per_micro_batch} is less than the longest row, {row_tokens} "
            f"tokens (data.max_prompt_tokens {data.max_prompt_tokens} + rollout.max_new_tokens "
            f"{rollout.max_new_tokens}); set it to at least {row_tokens}"
        )


def _vllm(rollout: RolloutConfig, evaluation: EvalConfig, lora: LoraConfig, *, apart: bool) -> Iterator[str]:
    """Yield a message for each setting that vLLM cannot run, whatever the model is.

    With ``apart``, vLLM gets the LoRA factors separately from the weights.
    """
    for key, value in {"rollout.temperature": rollout.temperature, "eval.temperature": evaluation.temperature}.items():
        if not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE:
            yield (
                f"{key}: {value} works only with rollout.engine torch; for vllm, set {LOWEST_TEMPERATURE:g} to "
                f"{HIGHEST_TEMPERATURE:g}"
            )
    if not apart:
        return
    if rollout.expert_parallel:
        yield "rollout.sync: adapter conflicts with rollout.expert_parallel, which writes merged shards; set merged"
    if "router" in lora.targets:  # vLLM would compute the router's logits in model.dtype, and the trainer in fp32
        yield "lora.targets: router conflicts with rollout.sync adapter; set merged, or remove router"
    if lora.expert_rank not in (0, lora.rank):  # vLLM ignores PEFT's rank_pattern: every pair has one alpha / rank
        yield f"lora.expert_rank: {lora.expert_rank} conflicts with rollout.sync adapter; set 0 or {lora.rank}"
    if lora.rank > LARGEST_ADAPTER_RANK:
        yield (
            f"lora.rank: {lora.rank} is more than vLLM accepts with rollout.sync adapter; set at most "
            f"{LARGEST_ADAPTER_RANK}"
        )


def _data(data: DataConfig, evaluation: EvalConfig, prompts: int) -> Iterator[str]:
    """Yield a message for each fault in the keys about data. ``prompts`` is the number of prompts per step."""
    if data.source != "arithmetic":
        for key, path in {"train_path": data.train_path, "test_path": data.test_path}.items():
            if not path:
                yield f"data.{key}: missing; give a .jsonl, .json or .parquet file for data.source {data.source}"
    if data.columns.keys() != {"question", "answer"} or not all(data.columns.values()):
        yield f"data.columns: must be {{question: NAME, answer: NAME}}, not {data.columns}"
    sets = evaluation.sets.items()
    unusable = [f"{name}: {shown(path)}" for name, path in sets if not (path and NAME.fullmatch(name))]
    if unusable:
        yield f"eval.sets: found {', '.join(unusable)}; use names of letters, digits, . _ and -, each with a file"
    count = data.num_train
    if data.source == "arithmetic":
        count = data.num_train or GENERATED
        if evaluation.num_questions > data.num_test:
            yield f"eval.num_questions: {evaluation.num_questions} exceeds data.num_test {data.num_test}"
    if 0 < count < prompts:
        yield f"rollout.prompts_per_step: {prompts} exceeds data.num_train {count}"


def _loss(loss: LossConfig) -> Iterator[str]:
    """Yield a message for each value in the section loss that makes no sense."""
    if loss.kl != "none" and loss.kl_coef == 0:
        yield f"loss.kl_coef: 0, so the KL of loss.kl {loss.kl} would be computed but not used; set loss.kl to none"
    if 0 < loss.dual_clip <= 1:
        yield f"loss.dual_clip: {loss.dual_clip} would also cut unclipped tokens; set more than 1, or 0 for off"


def _importance(loss: LossConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield the reasons why the importance correction does not fit the policy that samples."""
    if loss.importance == "icepop" and loss.importance_low >= loss.importance_clip:
        yield f"loss.importance_low: {loss.importance_low} must be below loss.importance_clip {loss.importance_clip}"
    if rollout.staleness > 0 and loss.importance == "none":
        yield (
            f"rollout.staleness: {rollout.staleness} trains on samples of an older policy; to correct for this, set "
            "loss.importance to token, sequence, icepop or mis (or to uncorrected, for no correction)"
        )
    if rollout.staleness == 0 and loss.importance == "uncorrected":
        yield "loss.importance: uncorrected is only for rollout.staleness above 0; set none"


def _overlong(reward: RewardConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Yield a message if every completion would get a penalty for its length."""
    overlong = reward.overlong
    if overlong is not None and overlong.buffer > rollout.max_new_tokens:
        yield f"reward.overlong.buffer: {overlong.buffer} exceeds rollout.max_new_tokens {rollout.max_new_tokens}"


def _environment(rollout: RolloutConfig, reward: RewardConfig, parallel: ParallelConfig) -> Iterator[str]:
    """Yield a message if rollout.environment conflicts with the reward, or may be too slow for the other ranks."""
    if not rollout.environment:
        return
    if not reward.function and reward.method.endswith("flexible"):
        yield (
            f"reward.method: {reward.method} reads the last number, which rollout.environment may have written; set a "
            "method that reads a form which only the policy writes (strict, math), or a reward.function"
        )
    if reward.overlong is not None:
        yield "reward.overlong: it would count the environment's tokens; remove it, or rollout.environment"
    longest = rollout.environment_seconds * rollout.max_turns
    if longest >= parallel.timeout_seconds:
        yield (
            f"rollout.environment_seconds: {rollout.environment_seconds:g} x rollout.max_turns {rollout.max_turns} = "
            f"{longest:g} s, but other ranks wait at most parallel.timeout_seconds {parallel.timeout_seconds}; "
            "lower one of the two"
        )


def _teacher(loss: LossConfig, rollout: RolloutConfig, reward: RewardConfig) -> Iterator[str]:
    if loss.advantage == "zero" and not loss.teacher:
        yield "loss.advantage: zero teaches nothing by itself; set loss.teacher or another advantage"
    if loss.advantage == "zero" and rollout.dynamic_rounds:
        yield "rollout.dynamic_rounds: with loss.advantage zero, groups of equal reward teach as much as others; set 0"
    if loss.teacher and loss.skip_equal_groups:
        yield "loss.skip_equal_groups: groups of equal reward still learn from loss.teacher; set false"
    if loss.teacher and reward.permute:
        yield "reward.permute: loss.teacher can raise accuracy although rewards are shuffled; remove one of the two"


def _schedules(train: TrainConfig, aqn: AqnConfig, tiny: TinyModelConfig | None) -> Iterator[str]:
    late = [step for step in train.profile_steps if step > train.steps]
    if late:
        yield f"train.profile_steps: found {late}; list steps from 1 to train.steps, which is {train.steps}"
    if aqn.falls and (aqn.num_stages < 2 or train.steps < 2):
        yield (
            f"aqn.num_stages: {aqn.num_stages} over {train.steps} steps has no noisy stage with {aqn.schedule}; "
            "set at least 2 stages and 2 steps, or schedule constant"
        )
    if tiny is not None and tiny.teacher_right + tiny.teacher_wrong_operation > 1 + 1e-9:
        yield (
            f"tiny_model.teacher_right: {tiny.teacher_right} + teacher_wrong_operation "
            f"{tiny.teacher_wrong_operation} exceeds 1; lower one of them"
        )


# -------------------------------------------------------------------------------- the model, and the ranks that hold it


def trainer_problems(cfg: Config, arch: Architecture, ranks: int) -> list[str]:
    """Return the reasons why ``ranks`` ranks cannot train ``arch``.

    Examples are shards of unequal size, too few positions, and a routing replay that the model does not allow.
    """
    return [
        *_splits(cfg.parallel, arch, ranks),
        *_model(cfg.model, cfg.data, cfg.rollout, cfg.replay, arch),
        *(_shared_shards(cfg.rollout, cfg.parallel, cfg.replay, arch, ranks) if cfg.rollout.expert_parallel else []),
    ]


def _splits(parallel: ParallelConfig, arch: Architecture, ranks: int) -> Iterator[str]:
    yield from _split_problem(
        "parallel.tensor",
        parallel.tensor,
        {
            "key/value heads": arch.num_kv_heads,
            "attention heads": arch.num_heads,
            "tokens of the vocabulary": arch.vocab_size,
            "columns of a dense layer": 0 if all(arch.moe_layers) else arch.dense_ffn_size,
            "columns of the shared expert": arch.shared_expert_ffn_size,
            "ranks": ranks,
        },
        ranks,
    )
    experts = {"experts": arch.num_experts, "ranks": ranks}
    yield from _split_problem("parallel.expert", parallel.expert, experts, ranks)


def _model(
    model: ModelConfig, data: DataConfig, rollout: RolloutConfig, replay: ReplayConfig, arch: Architecture
) -> Iterator[str]:
    if model.quantisation == "int4" and (problem := int4_problem(arch)):
        yield problem
    row_tokens = data.max_prompt_tokens + rollout.max_new_tokens
    if row_tokens > arch.max_positions:
        yield (
            f"data.max_prompt_tokens: {data.max_prompt_tokens} + rollout.max_new_tokens {rollout.max_new_tokens} = "
            f"{row_tokens} exceeds the model's {arch.max_positions} positions; lower one of them"
        )
    if replay.mode != "off" and (arch.num_experts > 256 or not any(arch.moe_layers)):
        yield f"replay.mode: {replay.mode} needs MoE layers of at most 256 experts; set off"


def _shared_shards(
    rollout: RolloutConfig, parallel: ParallelConfig, replay: ReplayConfig, arch: Architecture, ranks: int
) -> Iterator[str]:
    """Yield the reasons why trainer and vLLM would split the model differently.

    With rollout.expert_parallel every rank copies its shards into vLLM, so both must split the model in the same way.
    """
    if arch.num_experts % ranks:
        sizes = [size for size in divisors(arch.num_experts) if size % parallel.tensor == 0]
        yield (
            f"rollout.expert_parallel: {arch.num_experts} experts cannot be divided evenly among all {ranks} ranks; "
            f"use one of the nearest numbers of ranks that work ({nearest(ranks, sizes)}), {STREAMED}"
        )
    elif parallel.expert != ranks:
        yield (
            f"parallel.expert: {parallel.expert}, but rollout.expert_parallel spreads vLLM's experts over all "
            f"{ranks} ranks; set it to {ranks}, {STREAMED}"
        )
    if arch.vocab_size % VOCABULARY_BLOCK:
        yield (
            f"rollout.expert_parallel: vLLM pads a vocabulary of {arch.vocab_size} to a multiple of "
            f"{VOCABULARY_BLOCK} before it splits it, but the trainer does not; use a model whose vocabulary is "
            f"a multiple, {STREAMED}"
        )
    # patch_routed_experts_capture.py of vllm-ascend 0.23.0 joins the ranks' shares only under data parallelism.
    if replay.mode == "r3" and rollout.tensor == ranks > 1:
        yield (
            f"replay.mode: r3 would lack routes: with rollout.expert_parallel the {ranks} ranks of a single replica "
            "split the tokens, and vllm-ascend records the routes of one rank's share; set r2, lower rollout.tensor "
            f"below the {ranks} ranks, {STREAMED}"
        )


def sampler_problems(cfg: Config, arch: Architecture, ranks: int) -> list[str]:
    """Return the reasons why vLLM cannot run ``arch`` on ``ranks`` ranks.

    Rules about a device apply only if cfg.device names this device.
    """
    if cfg.rollout.engine != "vllm":
        return []
    cache = cache_mib(arch, cfg.rollout.tensor, cfg.row_tokens, ELEMENT_BYTES[cfg.model.dtype])
    exchanging = exchanging_ranks(cfg, arch, ranks)
    return [
        *_replicas(cfg.rollout.tensor, arch, ranks),
        *_cache(cfg.rollout, cfg.row_tokens, cache),
        *_vllm_model(cfg.device, cfg.rollout, arch),
        *(_expert_kernels(cfg.rollout, arch, exchanging) if exchanging > 1 else []),
        *(_vllm_lora(cfg.device, cfg.model, cfg.lora, arch) if cfg.merging is Merging.NOWHERE else []),
    ]


def _replicas(tensor: int, arch: Architecture, ranks: int) -> Iterator[str]:
    """Yield the reasons why ``tensor`` ranks (rollout.tensor) cannot share one copy of the model."""
    kv_heads = arch.num_kv_heads
    split = {
        "ranks": ranks,
        "attention heads": arch.num_heads,
        "columns of an expert": arch.expert_ffn_size,
        "columns of the shared expert": arch.shared_expert_ffn_size,
        "columns of a dense layer": 0 if all(arch.moe_layers) else arch.dense_ffn_size,
    }
    yield from _split_problem("rollout.tensor", tensor, split, ranks)
    if kv_heads % tensor and tensor % kv_heads:
        yield (
            f"rollout.tensor: {tensor} ranks cannot split {kv_heads} key/value heads; set a divisor or a multiple of "
            f"{kv_heads}"
        )


def _cache(rollout: RolloutConfig, row_tokens: int, needed: int) -> Iterator[str]:
    """Yield a message if a rank's cache is too small for the longest row.

    This row has ``row_tokens`` tokens and needs ``needed`` MiB.
    """
    if needed > rollout.kv_cache_mib:
        yield (
            f"rollout.kv_cache_mib: {rollout.kv_cache_mib} is too small for one row of {row_tokens} tokens; "
            f"set it to {needed} for one row, and add as much for each other row that is sampled at the same time"
        )


def _vllm_model(device: str, rollout: RolloutConfig, arch: Architecture) -> Iterator[str]:
    """Yield a message for each limit of vLLM's models, or of its kernels on ``device``, that the run exceeds.

    The limits come from the code of vLLM 0.23 and 0.30.
    """
    hidden, head_dim = arch.hidden_size, arch.head_dim
    # vllm-ascend 0.23.0 and 0.30.0rc2, model_runner_v1.py: self.sampler = AscendSampler() gets no logprobs_mode.
    if device == "npu" and rollout.temperature != 1:
        yield (
            f"rollout.temperature: {rollout.temperature:g}, but vllm-ascend reports log-probs at temperature 1 "
            "only; set it to 1.0, or set rollout.engine to torch"
        )
    if arch.model_type in ("qwen2_moe", "olmoe") and head_dim * arch.num_heads != hidden:
        yield (
            f"rollout.engine: vllm's {arch.model_type} needs a head_dim of hidden_size / heads = "
            f"{hidden // arch.num_heads}, not {head_dim}; use such a model, {ENGINE_TORCH}"
        )
    if arch.model_type == "olmoe" and (arch.rms_norm_eps != 1e-5 or arch.norm_topk_prob):
        yield (
            "rollout.engine: vllm's olmoe has rms_norm_eps 1e-5 and no norm_topk_prob, but this model has "
            f"{arch.rms_norm_eps:g} and {arch.norm_topk_prob}; set torch"
        )
    if arch.model_type == "qwen3_moe" and not any(arch.moe_layers):
        yield "rollout.engine: vllm's qwen3_moe needs an MoE layer, and this model has none; set torch"
    if device == "cpu" and head_dim not in CPU_HEAD_DIMS:
        known = ", ".join(map(str, CPU_HEAD_DIMS))
        yield f"rollout.engine: vllm on a CPU cannot run head_dim {head_dim}; use one of {known}, {ENGINE_TORCH}"
    if device == "cpu" and hidden % 32:  # a limit of vLLM's grouped kernel for the experts
        yield f"rollout.engine: vllm on a CPU cannot run hidden_size {hidden}; use a multiple of 32, {ENGINE_TORCH}"


def exchanging_ranks(cfg: Config, arch: Architecture, ranks: int) -> int:
    """Return the number of ranks of vllm-ascend that store different experts and exchange tokens by MC2.

    With rollout.expert_parallel these are all ranks. Otherwise they are the ranks of a replica, if each rank has whole
    experts. If no ranks exchange tokens, the number is 1.
    """
    if cfg.device != "npu" or not any(arch.moe_layers):
        return 1
    if cfg.rollout.expert_parallel:
        return ranks
    return cfg.rollout.tensor if cfg.has_whole_experts(cfg.device) else 1


def _expert_kernels(rollout: RolloutConfig, arch: Architecture, exchanging: int) -> Iterator[str]:
    """Yield a message for each limit of MC2 that the run exceeds.

    The limits come from CANN's documentation of aclnnMoeDistributeDispatchV2. No configuration exceeds the third limit,
    512 tokens per rank: see MOST_SEQUENCES in plan/capacity.py.
    """
    key = "rollout.expert_parallel" if rollout.expert_parallel else "rollout.tensor"
    # With rollout.expert_parallel, _shared_shards checks this.
    if arch.num_experts % exchanging and not rollout.expert_parallel:
        yield (
            f"{key}: an NPU's expert kernels need equally many experts on each of {exchanging} ranks, which "
            f"{arch.num_experts} experts do not allow; use another number of ranks, {ENGINE_TORCH}"
        )
    for what, found, low, high in (
        ("hidden_size", arch.hidden_size, 1024, 8192),
        ("experts per token", arch.experts_per_token, 1, 16),
    ):
        if not low <= found <= high:
            yield (
                f"{key}: an NPU's expert kernels need {what} from {low} to {high}, not {found}; use such a model, "
                f"{ENGINE_TORCH}"
            )


def _vllm_lora(device: str, model: ModelConfig, lora: LoraConfig, arch: Architecture) -> Iterator[str]:
    """Yield a message for each limit of vLLM's LoRA that the run exceeds.

    The limits come from the code of vLLM 0.23 and 0.30.
    """
    moe = any(arch.moe_layers)
    # fused_moe/oracle/unquantized.py: "if moe_config.is_lora_enabled: ... UnquantizedMoeBackend.TRITON", and
    # TritonExperts._supports_current_device: "current_platform.is_cuda_alike() or current_platform.is_xpu()".
    if device == "cpu" and moe:
        yield (
            "rollout.sync: adapter: vLLM adapts MoE layers with Triton kernels, which do not run on a CPU; set merged"
        )
    # lora_shrink_op.py: "assert inputs.dtype in [torch.float16, torch.bfloat16]"; vllm-ascend's kernels have it too.
    if device in ("cuda", "npu") and model.dtype == "fp32":
        yield "rollout.sync: adapter: vLLM's LoRA kernels do not support fp32 on a GPU or an NPU; set merged"
    # lora_weights.py: pack_moe has three asserts for this.
    if device in ("cuda", "npu") and moe and len(lora.expert_targets) == 1:
        yield "rollout.sync: adapter: vLLM adapts all three matrices of an expert or none; set merged"


def _split_problem(key: str, ranks: int, parts: Mapping[str, int], world_size: int) -> list[str]:
    """Return a message for the first number in ``parts`` that ``ranks`` does not divide.

    The message gives the nearest numbers of ranks that divide all numbers in ``parts``.
    """
    for what, number in parts.items():
        if number % ranks:
            working = [d for d in divisors(world_size) if all(n % d == 0 for n in parts.values())]
            return [
                f"{key}: {ranks} does not divide the {number} {what}; the nearest that do: {nearest(ranks, working)}"
            ]
    return []
