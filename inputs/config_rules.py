"""What a typed configuration may still get wrong: keys that the run would not read, and values that contradict.

config.py asks for idle_keys and problems, the trainer also for layout_rules.check_sides, preflight.py for
all of them at once. A message says the key, what was found, what is needed, and the nearest sizes that work.
"""

import re
from collections.abc import Callable, Sequence
from math import isqrt

from engines.kinds import ENGINES
from inputs.files import shown
from knobs import GENERATED, Config

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 2.0  # vLLM raises a lower temperature to 0.01 and refuses a higher one
LARGEST_ADAPTER_RANK = 512  # of vLLM's LoRA
LARGEST_TINY_MODEL = 1e9  # parameters
VOCABULARY_BLOCK = 64  # tokens; vLLM pads the embedding and the head to a multiple of it
FIELD = re.compile(r"(?<![\\\w^_{}])\{\w*([.!:\[][^{}\s]*)?\}")  # looks like a field of str.format; \boxed{N} does not
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
STREAMED = "(or rollout.expert_parallel false, which pushes whole tensors)"


# ---------------------------------------------------------------------------------------- keys this run would not read


def _no_warm_start(cfg: Config) -> bool:
    return cfg.tiny_model is None or cfg.tiny_model.warm_start_steps == 0


# (whether the run would ignore the keys, the reason, the keys)
IDLE: tuple[tuple[Callable[[Config], bool], str, str], ...] = (
    (_no_warm_start, "tiny_model.warm_start_steps is 0",
     "tiny_model.drills_per_batch tiny_model.teacher_right tiny_model.teacher_wrong_operation"),
    (lambda c: c.data.source == "arithmetic", "data.source is arithmetic", "data.train_path data.test_path"),
    (lambda c: c.data.source != "file", "data.source is not file", "data.columns"),
    (lambda c: c.data.source != "arithmetic", "data.source is a file", "data.num_test data.seed"),
    # The warm start teaches arithmetic, whatever the questions of the run are.
    (lambda c: c.data.source != "arithmetic" and _no_warm_start(c), "data.source is not arithmetic",
     "data.operand_high data.operations_low data.operations_high"),
    (lambda c: not {"linear_fc1", "linear_fc2"} & set(c.lora.targets),
     "lora.targets has neither linear_fc1 nor linear_fc2", "lora.expert_rank"),
    (lambda c: bool(c.reward.function), "reward.function scores", "reward.method"),
    (lambda c: not c.reward.function and c.reward.method != "math", "reward.method needs no worker", "reward.seconds"),
    (lambda c: c.loss.kind in ("gspo", "cispo", "dppo_tv"), "loss.kind is not ppo", "loss.dual_clip"),
    (lambda c: c.loss.kl == "none", "loss.kl is none", "loss.kl_coef"),
    (lambda c: not c.loss.corrects, "loss.importance is none or uncorrected", "loss.importance_clip"),
    (lambda c: c.loss.importance != "icepop", "loss.importance is not icepop", "loss.importance_low"),
    (lambda c: c.optim.decay == "constant", "optim.decay is constant", "optim.min_lr_ratio"),
    (lambda c: c.aqn.schedule == "off", "aqn.schedule is off", "aqn.sigma_start aqn.targets"),
    (lambda c: c.aqn.schedule in ("off", "constant"), "aqn.schedule has one sigma", "aqn.sigma_end aqn.num_stages"),
    (lambda c: "logp_gap" in c.checks.off or c.model.dtype != "bf16",
     "logp_gap is in checks.off, or model.dtype is not bf16", "checks.logp_gap_bf16"),
    (lambda c: c.eval.samples == 0, "eval.samples is 0: greedy answers only", "eval.temperature"),
    (lambda c: c.train.checkpoint_every == 0, "train.checkpoint_every is 0: one checkpoint", "train.keep_last"),
)  # fmt: skip


def idle_keys(cfg: Config) -> dict[str, str]:
    """Dotted keys that a run of ``cfg`` never reads, each with the reason."""
    others = {key: engine for engine, kind in ENGINES.items() for key in kind.keys if key not in cfg.rollout.kind.keys}
    of_others = {f"rollout.{key}": f"rollout.engine is not {engine}" for key, engine in others.items()}
    return of_others | {key: reason for is_idle, reason, keys in IDLE if is_idle(cfg) for key in keys.split()}


# ------------------------------------------------------------------------------------------ values that contradict

Rule = tuple[bool, str]  # (whether the configuration breaks the rule, the message that says so)


def nearest(value: int, working: Sequence[int]) -> str:
    """The next smaller and the next larger of ``working`` around ``value``, as text for an error message."""
    below, above = [w for w in working if w < value], [w for w in working if w > value]
    return ", ".join(str(w) for w in (*sorted(below)[-1:], *sorted(above)[:1])) or "none"


def divisors(number: int) -> list[int]:
    """All divisors of ``number``, smallest first."""
    small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _layout_rules(cfg: Config) -> list[Rule]:
    """Sizes that must fit each other. With rollout.expert_parallel vLLM's shards are those of the trainer."""
    prompts, update = cfg.rollout.prompts_per_step, cfg.optim.prompts_per_update
    room, longest, shared = cfg.optim.tokens_per_micro_batch, cfg.row_tokens, cfg.rollout.expert_parallel
    return [
        (
            shared and cfg.device in ("cpu", "cuda"),
            f"rollout.expert_parallel: device {cfg.device} packs vLLM's weights; needed: npu {STREAMED}",
        ),
        (
            # With rollout.ranks, layout_rules.sides chooses sizes that fit.
            shared and not cfg.rollout.ranks and cfg.rollout.tensor != cfg.parallel.tensor,
            f"rollout.tensor: {cfg.rollout.tensor} with rollout.expert_parallel splits attention differently than "
            f"parallel.tensor {cfg.parallel.tensor}; needed: the same {STREAMED}",
        ),
        (
            prompts % update > 0,
            f"optim.prompts_per_update: {update} does not divide rollout.prompts_per_step {prompts}; "
            f"nearest: {nearest(update, divisors(prompts))}",
        ),
        (
            longest > room,
            f"optim.tokens_per_micro_batch: {room} cannot hold one row of data.max_prompt_tokens "
            f"{cfg.data.max_prompt_tokens} + rollout.max_new_tokens {cfg.rollout.max_new_tokens} = {longest} tokens",
        ),
    ]


def _vllm_rules(cfg: Config) -> list[Rule]:
    outside = f"is for rollout.engine torch; vllm needs {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
    temperatures = {"rollout.temperature": cfg.rollout.temperature, "eval.temperature": cfg.eval.temperature}
    adapter, lora = cfg.keeps_factors_apart, cfg.lora
    return [
        *(
            (not LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE, f"{key}: {value} {outside}")
            for key, value in temperatures.items()
        ),
        (
            adapter and cfg.rollout.expert_parallel,
            "rollout.sync: adapter cannot go with rollout.expert_parallel, which writes merged shards; needed: merged",
        ),
        (  # vLLM would compute the router's logits in model.dtype, the trainer computes them in fp32
            adapter and "router" in lora.targets,
            "lora.targets: router cannot go with rollout.sync adapter; needed: merged, or targets without it",
        ),
        (  # vLLM ignores PEFT's rank_pattern and scales every pair by the same alpha / rank
            adapter and lora.expert_rank not in (0, lora.rank),
            f"lora.expert_rank: {lora.expert_rank} cannot go with rollout.sync adapter; needed: 0 or {lora.rank}",
        ),
        (
            adapter and lora.rank > LARGEST_ADAPTER_RANK,
            f"lora.rank: {lora.rank} is more than vLLM accepts under rollout.sync adapter; needed: at most "
            f"{LARGEST_ADAPTER_RANK}",
        ),
    ]


def _engine_rules(cfg: Config) -> list[Rule]:
    """What an engine cannot do, whatever the model."""
    return {"vllm": _vllm_rules}.get(cfg.rollout.engine, lambda cfg: [])(cfg)


def _data_rules(cfg: Config) -> list[Rule]:
    data = cfg.data
    generated, prompts = data.source == "arithmetic", cfg.rollout.prompts_per_step
    count = data.num_train or GENERATED * generated
    needed = f"data.source {data.source} needs a .jsonl, .json or .parquet file"
    sets = [f"{name}: {shown(path)}" for name, path in cfg.eval.sets.items() if not (path and NAME.fullmatch(name))]
    fields = [found[0] for found in FIELD.finditer(data.prompt_template.replace("{question}", " "))]
    return [
        (not generated and not data.train_path, f"data.train_path: missing; {needed}"),
        (not generated and not data.test_path, f"data.test_path: missing; {needed}"),
        (
            data.columns.keys() != {"question", "answer"} or not all(data.columns.values()),
            f"data.columns: found {data.columns}; needed: {{question: NAME, answer: NAME}}",
        ),
        (
            bool(sets),
            f"eval.sets: found {', '.join(sets)}; needed: names of letters, digits, . _ and -, each with a file",
        ),
        (
            "{question}" not in data.prompt_template,
            f"data.prompt_template: {data.prompt_template!r} does not contain {{question}}",
        ),
        (bool(fields), f"data.prompt_template: {', '.join(fields)} is not replaced; needed: {{question}} alone"),
        (
            data.operations_low > data.operations_high,
            f"data.operations_low: {data.operations_low} exceeds data.operations_high {data.operations_high}",
        ),
        (0 < count < prompts, f"rollout.prompts_per_step: {prompts} exceeds data.num_train {count}"),
        (
            generated and cfg.eval.num_questions > data.num_test,
            f"eval.num_questions: {cfg.eval.num_questions} exceeds data.num_test {data.num_test}",
        ),
    ]


def _method_rules(cfg: Config) -> list[Rule]:
    loss, aqn, targets = cfg.loss, cfg.aqn, cfg.lora.targets
    repeated = sorted({target for target in targets if targets.count(target) > 1})
    trackers, late = cfg.train.trackers, [step for step in cfg.train.profile_steps if step > cfg.train.steps]
    return [
        (
            loss.kl != "none" and loss.kl_coef == 0,
            f"loss.kl_coef: 0, so the KL of loss.kl {loss.kl} would be computed but not used; use loss.kl: none",
        ),
        (
            0 < loss.dual_clip <= 1,
            f"loss.dual_clip: {loss.dual_clip} would cut unclipped tokens too; needed: more than 1, or 0 for off",
        ),
        (
            loss.importance == "icepop" and loss.importance_low >= loss.importance_clip,
            f"loss.importance_low: {loss.importance_low} is not below loss.importance_clip {loss.importance_clip}",
        ),
        (
            cfg.rollout.staleness > 0 and loss.importance == "none",
            f"rollout.staleness: {cfg.rollout.staleness} trains on samples of an older policy; needed: a "
            "loss.importance, which corrects for it, or loss.importance uncorrected",
        ),
        (
            cfg.rollout.ranks > 0 and cfg.rollout.staleness != 1,
            f"rollout.staleness: {cfg.rollout.staleness}; needed with rollout.ranks, which are one step ahead: 1",
        ),
        (
            cfg.rollout.staleness == 0 and loss.importance == "uncorrected",
            "loss.importance: uncorrected is for rollout.staleness above 0; needed: none",
        ),
        (
            cfg.reward.overlong is not None and cfg.reward.overlong.buffer > cfg.rollout.max_new_tokens,
            f"reward.overlong.buffer: {cfg.reward.overlong and cfg.reward.overlong.buffer} exceeds "
            f"rollout.max_new_tokens {cfg.rollout.max_new_tokens}",
        ),
        (bool(repeated), f"lora.targets: {', '.join(repeated)} given twice"),
        (len(set(trackers)) < len(trackers), f"train.trackers: found [{', '.join(trackers)}]; needed: each one once"),
        (bool(late), f"train.profile_steps: found {late}; needed: 1 to train.steps, which is {cfg.train.steps}"),
        (
            aqn.schedule in ("qerl", "paper") and (aqn.num_stages < 2 or cfg.train.steps < 2),
            f"aqn.num_stages: {aqn.num_stages} over {cfg.train.steps} steps has no noisy stage under "
            f"{aqn.schedule}; needed: 2 or more of both, or schedule constant",
        ),
    ]


def _tiny_model_rules(cfg: Config) -> list[Rule]:
    if (tiny := cfg.tiny_model) is None:
        return []
    top_k, right, wrong = tiny.experts_per_token, tiny.teacher_right, tiny.teacher_wrong_operation
    mlps = tiny.num_layers * tiny.num_experts * tiny.expert_width
    size = tiny.hidden_size * (2 * tiny.vocab_size + 3 * mlps + 4 * tiny.num_layers * tiny.num_heads * tiny.head_dim)
    return [
        (
            tiny.num_heads % tiny.num_kv_heads > 0,
            f"tiny_model.num_kv_heads: {tiny.num_kv_heads} does not divide num_heads {tiny.num_heads}; "
            f"nearest: {nearest(tiny.num_kv_heads, divisors(tiny.num_heads))}",
        ),
        (size > LARGEST_TINY_MODEL, f"tiny_model: about {size:.1e} parameters; needed: at most {LARGEST_TINY_MODEL:g}"),
        (top_k > tiny.num_experts, f"tiny_model.experts_per_token: {top_k} exceeds num_experts {tiny.num_experts}"),
        (right + wrong > 1 + 1e-9, f"tiny_model.teacher_right: {right} + teacher_wrong_operation {wrong} exceeds 1"),
    ]


Rules = tuple[Callable[[Config], list[Rule]], ...]
LAYOUT_RULES: Rules = (_layout_rules,)  # preflight.py names layouts that keep them
OTHER_RULES: Rules = (_engine_rules, _data_rules, _method_rules, _tiny_model_rules)


def problems(cfg: Config, rules: Rules = LAYOUT_RULES + OTHER_RULES) -> list[str]:
    """The messages of all broken rules; these rules need neither the model nor the number of ranks."""
    return [message for rule in rules for broken, message in rule(cfg) if broken]
