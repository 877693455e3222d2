"""Run configuration: one YAML file, every knob typed and described here, `section.key=value` on the command line.

    python config.py configs/tiny_cpu.yaml optim.lr=2e-3        prints the resolved configuration, exit 2 on an error

An unknown key, a wrong type, values that cannot work together (config_rules.py), or a key that the run would not read
stops it before any weight is read. Legend: P prompts a step, G completions a prompt, R LoRA rank. Imports no torch.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import hashlib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from config_rules import check_layout, check_runnable, idle_keys, problems
from strict_yaml import InputError, dump_yaml, parse_override, read_file, shown

__all__ = ["Config", "InputError", "check_layout", "check_runnable", "load_config"]


# ------------------------------------------------------------------------------------------------------- the knobs


def knob(default: Any, description: str, **bounds: Any) -> Any:
    """A field with its description beside it; `...` as default: the file must give it."""
    return Field(default, description=description, **bounds)


class Section(BaseModel):
    """Unknown keys and converted types are errors; a loaded configuration does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = knob(..., "directory of a Hugging Face model: config.json, safetensors, tokenizer", min_length=1)
    dtype: Literal["fp32", "bf16"] = knob("bf16", "of weights and activations; LoRA factors are always fp32")
    recompute: bool = knob(False, "recompute every layer's activations in the backward: less memory, one more forward")


class TinyModelConfig(Section):
    """A model to be made at model.path if there is none; sizes as in config.json. Defaults: tiny_cpu.yaml's."""

    architecture: Literal["qwen3_moe", "qwen2_moe"] = knob(..., "Qwen3-30B-A3B's kind or Qwen1.5-MoE's")
    vocab_size: int = knob(400, "tokens; a byte-level BPE needs 256 bytes and 3 special tokens", ge=259)
    hidden_size: int = knob(64, "width of the residual stream", ge=1)
    num_layers: int = knob(2, "all of them MoE", ge=1)
    num_heads: int = knob(4, "query heads", ge=1)
    num_kv_heads: int = knob(2, "key/value heads; divides num_heads", ge=1)
    head_dim: int = knob(16, "of one head; even, for RoPE", ge=2, multiple_of=2)
    num_experts: int = knob(8, "routed experts a layer", ge=1)
    experts_per_token: int = knob(2, "top-k of the router", ge=1)
    expert_width: int = knob(64, "intermediate size of one routed expert", ge=1)
    shared_expert_width: int = knob(64, "intermediate size of the shared expert; qwen2_moe only", ge=1)
    seed: int = knob(0, "of the initial weights and the warm start's examples", ge=0, lt=2**32)
    warm_start_steps: int = knob(1200, "supervised steps before GRPO; 0: the weights stay random", ge=0)
    words_per_batch: int = knob(64, "word problems in every other warm-start batch, over all ranks", ge=1)
    drills_per_batch: int = knob(256, "bare sums in the batches between, over all ranks", ge=1)
    warm_start_lr: float = knob(3e-3, "AdamW's peak in the warm start; 6e-3 did not learn", gt=0)
    teacher_right: float = knob(0.35, "share of word problems that the sloppy teacher answers correctly", ge=0, le=1)
    teacher_wrong_operation: float = knob(0.55, "share with the wrong operation; the rest slip by 1 or 10", ge=0, le=1)


class ParallelConfig(Section):
    """Ranks = tensor x data = expert_tensor x expert x expert_data; `data` and `expert_data` follow from the world."""

    tensor: int = knob(1, "ranks that split one attention matrix and the vocabulary", ge=1)
    expert: int = knob(1, "ranks that split the experts of one layer", ge=1)
    expert_tensor: int = knob(1, "ranks that split one expert's matrices; 1: an expert is whole on its rank", ge=1)
    pipeline: int = knob(1, "ranks that split the layers; only 1 so far", ge=1)
    context: int = knob(1, "ranks that split a sequence; only 1 so far", ge=1)
    timeout_seconds: int = knob(600, "a collective that waits longer ends the run", ge=1, lt=2**31)


class DataConfig(Section):
    source: Literal["arithmetic", "gsm8k"] = knob(..., "generated word problems, or GSM8K files")
    train_path: str = knob("", "gsm8k: .jsonl or .parquet of the training questions")
    test_path: str = knob("", "gsm8k: .jsonl or .parquet of the held-out questions")
    max_prompt_tokens: int = knob(512, "longest prompt, chat template included", ge=1)
    overlong_prompts: Literal["refuse", "drop"] = knob("refuse", "a longer prompt stops the run, or is left out")
    prompt_template: str = knob("Question: {question}\nAnswer:", "used only if the tokenizer has no chat template")
    instruction: str = knob("", "appended to every question; quote it in YAML if it holds a '#'")
    num_train: int = knob(4096, "arithmetic: training questions", ge=1)
    num_test: int = knob(1024, "arithmetic: held-out questions (held out by operand pair)", ge=1)
    operand_low: int = knob(1, "arithmetic: smallest operand", ge=0)
    operand_high: int = knob(49, "arithmetic: largest operand", ge=0)
    seed: int = knob(0, "arithmetic: of the generated questions", ge=0, lt=2**32)


class RolloutConfig(Section):
    engine: Literal["torch", "vllm"] = knob("torch", "the embedded sampler, or vLLM")
    prompts_per_step: int = knob(32, "P, questions a step; P x group_size = sequences a step", ge=1)
    group_size: int = knob(8, "G, completions a prompt; a group of one has no advantage", ge=2)
    max_new_tokens: int = knob(1024, "longest completion, its end token included", ge=1)
    temperature: float = knob(1.0, "of the sampling, and of the trainer's log-probabilities", gt=0)
    top_p: float = knob(1.0, "nucleus of the sampling; below 1 the policy gradient is biased", gt=0, le=1)
    top_k: int = knob(0, "most likely tokens kept; 0: all", ge=0)


RewardMethod = Literal[
    "strict", "verl_strict", "verl_flexible", "openai", "lm_eval_strict", "lm_eval_flexible", "base_acc"
]


class RewardConfig(Section):
    method: RewardMethod = knob("strict", "strict is ours; the others repeat what their projects compute")
    permute: bool = knob(False, "control run: rewards are shuffled over the step's sequences, nothing may be learned")


LoraTarget = Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"]


class LoraConfig(Section):
    targets: tuple[LoraTarget, ...] = knob(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "attention in and out; dense, shared and routed experts in and out; the router only if asked",
        strict=False,  # a YAML list becomes a tuple; its members stay strict
        min_length=1,
    )
    rank: int = knob(32, "R of attention, shared expert and dense layers; under 32 large models under-learn", ge=1)
    alpha: float = knob(32.0, "the update is alpha / R x B A, R being that pair's own rank", gt=0)
    expert_rank: int = knob(0, "R of routed experts, e.g. rank / experts_per_token; 0: the same as rank", ge=0)
    dropout: float = knob(0.0, "on the input of the A factor; above 0 the first ratio is no longer 1", ge=0, lt=1)


class LossConfig(Section):
    advantage: Literal["std", "none", "loo"] = knob("std", "divided by the group's std; not (Dr.GRPO); leave-one-out")
    kind: Literal["ppo", "gspo", "cispo"] = knob("ppo", "clip per token; per sequence; clip the weight only")
    clip_low: float = knob(0.2, "ratio is clipped below at 1 - clip_low", ge=0, le=1)
    clip_high: float = knob(0.2, "ratio is clipped above at 1 + clip_high; DAPO 0.28", ge=0)
    dual_clip: float = knob(3.0, "ppo: bound of the loss for negative advantages, in advantages; 0: off", ge=0)
    aggregate: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr-grpo"] = knob(
        "token-mean", "from tokens to one loss, over the whole update and all ranks"
    )
    kl: Literal["none", "k1", "k2", "k3", "low_var_kl", "low_var_kl+", "abs"] = knob(
        "low_var_kl", "estimate of the divergence from the base model that is penalised; none: no reference forward"
    )
    kl_coef: float = knob(1e-3, "weight of the KL penalty", ge=0)
    entropy_coef: float = knob(0.0, "weight of the entropy bonus; 0: entropy is only logged", ge=0)
    importance: Literal["none", "token", "sequence"] = knob(
        "none", "truncated importance weights for the sampler's numerical difference from the trainer"
    )
    importance_clip: float = knob(2.0, "largest importance weight", gt=0)
    mask_truncated: bool = knob(False, "leave completions that hit max_new_tokens without an end out of the loss")
    skip_equal_groups: bool = knob(False, "leave groups of equal reward (advantage 0) out of the forward, KL included")


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = knob(1e-5, "AdamW's peak; LoRA wants about 10 x full fine-tuning's", gt=0)
    betas: tuple[Decay, Decay] = knob((0.9, 0.95), "AdamW's decays of the two moments", strict=False)
    eps: float = knob(1e-8, "AdamW's, in the denominator", gt=0)
    weight_decay: float = knob(0.0, "AdamW's; the LoRA factors start near 0 already", ge=0)
    warmup_steps: int = knob(5, "steps of linear warm-up", ge=0)
    decay: Literal["constant", "linear", "cosine"] = knob("constant", "of lr, from the warm-up's end to train.steps")
    min_lr_ratio: float = knob(0.1, "lr at the last step / peak", ge=0, le=1)
    max_grad_norm: float = knob(1.0, "gradients are scaled down to this norm over all ranks", gt=0)
    prompts_per_update: int = knob(32, "prompts an optimizer step; divides prompts_per_step", ge=1)
    tokens_per_micro_batch: int = knob(8192, "most tokens, padding included, of one forward on one rank", ge=1)


class EvalConfig(Section):
    every: int = knob(0, "steps between evaluations; first and last step always; 0: only those", ge=0)
    num_questions: int = knob(0, "first n held-out questions; 0: all", ge=0)
    samples: int = knob(1, "sampled answers a question, beside the greedy one; 0: greedy only", ge=0)
    temperature: float = knob(1.0, "of the sampled answers", gt=0)
    batch_size: int = knob(128, "questions a rank answers at once", ge=1)


class TrainConfig(Section):
    steps: int = knob(..., "a step is one rollout and its updates", ge=1)
    seed: int = knob(0, "of the order of questions, sampling and LoRA's start", ge=0, lt=2**32)
    out_dir: str = knob("out", "run folders go here as <name>-<time>", min_length=1)
    checkpoint_every: int = knob(20, "steps between checkpoints; the last step always; 0: only that", ge=0)
    keep_last: int = knob(2, "checkpoints kept", ge=1)
    resume: str = knob("auto", "auto: the newest unfinished run of this name; never; or a run folder", min_length=1)
    completions_logged: int = knob(2, "completions written to the run folder a step", ge=0)
    tensorboard: bool = knob(False, "also write TensorBoard events")


class Config(Section):
    name: str = knob("unnamed", "leads the run folder's name", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    device: Literal["auto", "cpu", "cuda", "npu"] = knob("auto", "auto: the accelerator that is there, else cpu")
    model: ModelConfig = knob(..., "which model is trained")
    tiny_model: TinyModelConfig | None = knob(None, "absent for real models")
    parallel: ParallelConfig = knob(ParallelConfig(), "how ranks share the model")
    data: DataConfig = knob(..., "questions and prompts")
    rollout: RolloutConfig = knob(RolloutConfig(), "sampling")
    reward: RewardConfig = knob(RewardConfig(), "scoring")
    lora: LoraConfig = knob(LoraConfig(), "what is trained")
    loss: LossConfig = knob(LossConfig(), "the GRPO objective")
    optim: OptimConfig = knob(OptimConfig(), "AdamW and how a step is cut into updates")
    eval: EvalConfig = knob(EvalConfig(), "accuracy of the clean policy on held-out questions")
    train: TrainConfig = knob(..., "length, seeds, run folder")


# ------------------------------------------------------------------------------------------------------------ loading


def load_config(path: str | Path, overrides: Sequence[str] = (), notes: list[str] | None = None) -> Config:
    """The file at ``path`` with ``section.key=value`` overrides applied, every value checked; InputError otherwise.

    The file must be right on its own. A key of the file that only the overrides made idle takes its default again and
    is reported in ``notes`` (appended to); an idle key in the file itself or among the overrides is an error.
    """
    notes = [] if notes is None else notes
    file_tree = read_file(path)
    file_cfg = _typed(file_tree, f"{path}: ")
    _refuse_idle(flatten(file_tree), file_cfg, f"{path}: ")

    tree = copy.deepcopy(file_tree)
    overridden = _apply_overrides_(tree, overrides, notes)
    cfg = _typed(tree, "override ")
    _refuse_idle(overridden, cfg, "override ")
    for key, reason in idle_keys(cfg).items():
        section, name = key.split(".")
        if name in (tree.get(section) or {}):
            del tree[section][name]
            notes.append(f"{key}: not read, {reason}")
    cfg = _typed(tree, "")
    if found := problems(cfg):
        raise InputError("; ".join(found))
    return cfg


def flatten(tree: dict) -> dict[str, Any]:
    """{section: {key: value}} -> {"section.key": value}; values outside a section keep their name."""
    flat = {}
    for name, value in tree.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _apply_overrides_(tree: dict, overrides: Sequence[str], notes: list[str]) -> list[str]:
    """Sets each override in ``tree``; returns the dotted keys that were given."""
    given: list[str] = []
    for item in overrides:
        key, value = parse_override(item)
        section, dot, name = key.partition(".")
        if key in given:
            notes.append(f"{key}: given twice on the command line, the last one counts")
        given.append(key)
        if key == "tiny_model" and value is None:
            tree[key] = None
        elif not dot and key in _sections():
            raise InputError(f"override {key}: this is a section; expected {key}.key=value")
        elif not dot:
            tree[key] = value
        elif isinstance(tree.setdefault(section, {}), dict | None):
            tree[section] = {**(tree[section] or {}), name: value}
        else:
            raise InputError(f"override {key}: unknown key; {section} is a single value")
    return given


def _refuse_idle(keys: Iterable[str], cfg: Config, where: str) -> None:
    if idle := [f"{where}{key}: not read, {reason}" for key, reason in idle_keys(cfg).items() if key in keys]:
        raise InputError("; ".join(idle))


# what pydantic calls it -> what is needed
NEEDED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text (in quotes, if it looks like something else)",
    "string_too_short": "text",
    "string_pattern_mismatch": "text like {pattern}",
    "literal_error": "{expected}",
    "tuple_type": "a list: [a, b]",
    "too_short": "at least {min_length} members",
    "too_long": "at most {max_length} members",
    "model_type": "a mapping of keys",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
}


def _typed(tree: dict, where: str) -> Config:
    """The Config of a raw tree; InputError with the first few faults in one line, each led by ``where``."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        faults = [_sentence(fault) for fault in error.errors(include_url=False)]
    more = f"; and {len(faults) - 3} more" if len(faults) > 3 else ""
    raise InputError("; ".join(where + fault for fault in faults[:3]) + more)


def _sentence(fault: Any) -> str:
    """One of pydantic's faults in this project's words: key, what was found, what is needed."""
    section, *rest = fault["loc"]
    key = str(section) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in rest)
    if fault["type"] in ("extra_forbidden", "invalid_key"):
        return f"{key}: unknown key; {_suggestion(*fault['loc'])}"
    if fault["type"] == "missing":
        return f"{key}: missing; needed: {_description(*fault['loc'][:2])}"
    needed = NEEDED.get(fault["type"], fault["msg"]).format(**fault.get("ctx", {}))
    return f"{key}: expected {needed}, found {shown(fault['input'])}"


def _sections() -> dict[str, type[Section]]:
    """Section name -> its model."""
    kinds = {name: (field.annotation, *get_args(field.annotation)) for name, field in Config.model_fields.items()}
    return {n: k for n, options in kinds.items() for k in options if isinstance(k, type) and issubclass(k, Section)}


def _description(section: str, key: str = "") -> str:
    fields = _sections()[section].model_fields if key else Config.model_fields
    return fields[key or section].description or ""


def _suggestion(*loc: Any) -> str:
    """What the writer of an unknown key may have meant: its section, or the nearest known key."""
    sections, name = _sections(), str(loc[-1])
    known = list(sections[loc[0]].model_fields if len(loc) > 1 else Config.model_fields)
    if elsewhere := [f"{section}.{name}" for section, model in sections.items() if name in model.model_fields]:
        return f"did you mean {' or '.join(elsewhere)}?"
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"


# ------------------------------------------------------------------------------------------------- the run's own record


# A resumed run may change these: where it writes, how it is laid out and batched, not what it computes.
MAY_CHANGE = frozenset(
    {"name", "device", "model.recompute", "optim.tokens_per_micro_batch", "eval.batch_size"}
    | {f"parallel.{key}" for key in ParallelConfig.model_fields}
    | {"train.out_dir", "train.checkpoint_every", "train.keep_last", "train.resume"}
    | {"train.completions_logged", "train.tensorboard"}
)


def to_dict(cfg: Config) -> dict[str, Any]:
    """Every key that the run reads, in field order, as plain values; load_config accepts it back."""
    idle = idle_keys(cfg)
    tree = {}
    for name, value in cfg.model_dump(mode="json", exclude_none=True).items():
        is_section = isinstance(value, dict)
        tree[name] = {k: v for k, v in value.items() if f"{name}.{k}" not in idle} if is_section else value
    return tree


def to_yaml(cfg: Config) -> str:
    """to_dict as the text of a configuration file."""
    return dump_yaml(to_dict(cfg))


def config_hash(cfg: Config) -> str:
    """sha256 (hex) of what the run computes: all keys that it reads but MAY_CHANGE."""
    fixed = {key: value for key, value in flatten(to_dict(cfg)).items() if key not in MAY_CHANGE}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def changed_keys(old: dict, new: Config) -> list[str]:
    """One "section.key: old -> new" for each key outside MAY_CHANGE that differs; ``old`` is an earlier to_dict."""
    before, after = flatten(old), flatten(to_dict(new))
    keys = [key for key in {**after, **before} if key not in MAY_CHANGE and before.get(key) != after.get(key)]
    return [f"{key}: {shown(before.get(key))} -> {shown(after.get(key))}" for key in keys]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the resolved configuration; notes and errors go to stderr. Returns the exit code, 2 on an InputError."""
    parser = argparse.ArgumentParser(description="Print the resolved configuration.")
    parser.add_argument("config", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_args(arguments)
    notes: list[str] = []
    try:
        cfg = load_config(args.config, args.overrides, notes)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(to_yaml(cfg), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
