"""Defines every key of a configuration, with its type, default, bounds, and a sentence that says what it does.

inputs/config.py reads a YAML file into these classes. P is the number of prompts per step, G the number of completions
per prompt, and R the LoRA rank.
"""

import enum
import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator

from facts.architectures import FamilyName
from facts.checks import LOGP_GAP_FP32
from facts.engines import ENGINES, EngineName, Kind, whole_experts


def knob(default: Any, description: str, **bounds: Any) -> Any:
    """Return a field with a description. If the default is `...`, the configuration file must give a value.

    ``bounds`` are pydantic's constraints on the value, such as ge and le.
    """
    return Field(default, description=description, **bounds)


class UserPath(str):
    """A path with the home folder in place of ~."""

    written: str  # the text that the user wrote, which a run records


def user_path(text: str) -> str:
    """Return a path with the home folder in place of ~. Raises ValueError for other text that a shell would expand.

    A path with $ is accepted if it exists. In FILE.py:NAME, only the file must exist.
    """
    path = UserPath(os.path.expanduser(text))
    path.written = text
    if (path.startswith("~") or "$" in path) and not (os.path.exists(path) or os.path.exists(path.rpartition(":")[0])):
        raise ValueError("a path without shell variables (only ~ and ~USER of this machine are expanded)")
    return path


def _written(paths: str | tuple[str, ...]) -> str | list[str]:
    """Return each path as the user wrote it, because a record must not contain the name of a home folder."""
    if isinstance(paths, tuple):
        return [getattr(path, "written", path) for path in paths]
    return getattr(paths, "written", paths)


def _paths(value: Any) -> str | tuple[str, ...]:
    """Apply user_path to a string, or to each string of a list. The result for a list is a tuple.

    Raises ValueError for other values.
    """
    if isinstance(value, str):
        return user_path(value)
    if isinstance(value, list | tuple) and value and all(isinstance(path, str) and path for path in value):
        return tuple(map(user_path, value))
    raise ValueError("a path or a list of paths")


AsWritten = PlainSerializer(_written)
OnePath = Annotated[str, AfterValidator(user_path), AsWritten]
Paths = Annotated[str | tuple[str, ...], PlainValidator(_paths), AsWritten]


def _logged(value: Any) -> str | int:
    """Return ``value``, which is "all" or a number of questions. Raises ValueError for other values."""
    if value == "all" or (type(value) is int and 0 <= value <= 10**9):
        return value
    raise ValueError("'all' or a number of questions, 0 or more")


Logged = Annotated[Literal["all"] | int, BeforeValidator(_logged)]


def listed(paths: Paths | Path) -> tuple[str, ...]:
    """Return one or several paths as a tuple."""
    return paths if isinstance(paths, tuple) else (str(paths),)


class Section(BaseModel):
    """A part of the configuration. Unknown keys and wrong types are errors, and no value can change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: OnePath = knob(..., "folder of a Hugging Face model: config.json, safetensors files, tokenizer", min_length=1)
    dtype: Literal["fp32", "bf16"] = knob("bf16", "type of the weights and activations; LoRA factors are always fp32")
    recompute: bool = knob(False, "recompute activations in the backward pass: less memory, one more forward pass")
    quantisation: Literal["none", "int4"] = knob(
        "none",
        "int4: the trainer quantises the frozen routed experts to 4 bits when it loads them (hardware/quantisation.py)",
    )


class TinyModelConfig(Section):
    """A model that is created if model.path does not exist. The defaults give the model of configs/tiny_cpu.yaml."""

    architecture: FamilyName = knob(..., "the model_type of Qwen3-30B-A3B, Qwen1.5-MoE or OLMoE")
    vocab_size: int = knob(
        400, "number of tokens; the tokenizer needs 256 bytes and 3 special tokens", ge=259, le=2**20
    )
    hidden_size: int = knob(64, "width of the residual stream", ge=1, le=2**14)
    num_layers: int = knob(2, "number of layers, all of them MoE layers", ge=1, le=128)
    num_heads: int = knob(4, "number of query heads", ge=1, le=256)
    num_kv_heads: int = knob(2, "number of key/value heads, which must divide num_heads", ge=1, le=256)
    head_dim: int = knob(16, "size of one head, which must be even for RoPE", ge=2, le=1024, multiple_of=2)
    num_experts: int = knob(8, "number of routed experts in a layer", ge=1, le=1024)
    experts_per_token: int = knob(2, "number of experts that the router chooses for each token", ge=1, le=1024)
    expert_width: int = knob(64, "intermediate size of one routed expert", ge=1, le=2**16)
    seed: int = knob(0, "seed of the initial weights and of the examples of the warm start", ge=0, lt=2**32)
    warm_start_steps: int = knob(1200, "supervised steps before GRPO; with 0 the weights stay random", ge=0, le=10**6)
    drills_per_batch: int = knob(
        256, "bare sums per batch of all ranks; the other batches contain word problems", ge=1, le=2**16
    )
    teacher_right: float = knob(0.35, "share of word problems that the teacher answers correctly", ge=0, le=1)
    teacher_calls: float = knob(
        0.0, "share of word problems that the teacher answers by GSM8K's calculator, as <<37-25=12>>", ge=0, le=1
    )
    teacher_wrong_operation: float = knob(
        0.55, "share with the wrong operation; the remaining answers of the teacher are off by 1 or 10", ge=0, le=1
    )


class ParallelConfig(Section):
    """The rank grid: ranks = tensor x data = expert x expert_data. The run computes data and expert_data."""

    tensor: int = knob(1, "number of ranks that split each attention matrix and the vocabulary", ge=1, le=2**16)
    expert: int = knob(1, "number of ranks that split the experts of each layer", ge=1, le=2**16)
    timeout_seconds: int = knob(1800, "the run ends if a collective waits longer than this", ge=1, lt=2**31)


FUNCTION = r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$"  # FILE.py:NAME, inputs/functions.py
Function = Annotated[str, Field(pattern=FUNCTION), AfterValidator(user_path), AsWritten]

GENERATED = 4096  # number of training questions for data.source arithmetic, unless data.num_train sets it


class DataConfig(Section):
    source: Literal["arithmetic", "gsm8k", "file"] = knob(..., "generated word problems, GSM8K files, or other files")
    columns: dict[str, str] = knob(
        {"question": "question", "answer": "answer"}, "file: names of both columns; a.b is column b in a"
    )
    train_path: Paths = knob("", "gsm8k, file: training questions: a .jsonl, .json or .parquet file, or a list of them")
    test_path: Paths = knob("", "gsm8k, file: held-out questions: a .jsonl, .json or .parquet file, or a list of them")
    max_prompt_tokens: int = knob(512, "length of the longest prompt in tokens, with the chat template", ge=1, le=2**20)
    overlong_prompts: Literal["refuse", "drop"] = knob("refuse", "whether a longer prompt stops the run or is left out")
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "variables for the chat template, e.g. {enable_thinking: false} for a hybrid model such as Qwen3-30B-A3B"
    )
    system: str = knob("", "text of the system turn; if empty, there is none unless the template adds one")
    few_shot_path: OnePath = knob(
        "", "file of worked examples in train_path's form, shown as turns before each question"
    )
    instruction: str = knob("", "text to append to every question; YAML needs quotes if it contains a '#'")
    num_train: int = knob(
        0, "number of training questions, generated (0: 4,096) or evenly spaced in a file (0: all)", ge=0, le=10**6
    )
    num_test: int = knob(
        1024, "arithmetic: number of held-out questions; training has none of their operand pairs", ge=1, le=10**6
    )
    operand_high: int = knob(49, "arithmetic: largest operand", ge=0, le=10**6)
    operations_high: int = knob(
        1, "arithmetic: most operations in a question; each after the first uses the result so far", ge=1, le=8
    )
    seed: int = knob(0, "arithmetic: seed of the generated questions", ge=0, lt=2**32)


class RolloutConfig(Section):
    engine: EngineName = knob("torch", "engine that samples: the embedded sampler (torch) or vLLM")
    tensor: int = knob(
        1, "vllm: ranks that share one copy of the model; each copy gets its own prompts", ge=1, le=2**16
    )
    expert_parallel: bool = knob(
        False, "vllm on npu: one engine over all ranks, sharded exactly like the trainer, so a push copies locally"
    )
    enforce_eager: bool = knob(True, "vllm: capture no graphs; false decodes faster on an accelerator")
    kv_cache_mib: int = knob(512, "vllm: size of the key-value cache of each rank, in MiB", ge=1, le=2**24)
    sync: Literal["auto", "merged", "adapter"] = knob(
        "auto",
        "how sampler and trainer compute the policy. merged: with LoRA merged into the weights, rounded in bf16; "
        "adapter: with separate factors; auto: adapter in bf16 with the embedded sampler, otherwise merged",
    )
    prompts_per_step: int = knob(32, "P, questions per step; a step has P x group_size sequences", ge=1, le=10**6)
    group_size: int = knob(8, "G, completions per prompt; a group of one would have no advantage", ge=2, le=2**16)
    dynamic_rounds: int = knob(0, "most rounds that replace all-right or all-wrong groups (DAPO); 0: off", ge=0, le=100)
    max_new_tokens: int = knob(
        1024, "length of the longest completion in tokens, with its end token and all answers to it", ge=1, le=2**20
    )
    temperature: float = knob(1.0, "temperature for sampling and for the trainer's log-probabilities", gt=0)
    staleness: int = knob(0, "number of steps by which the sampling policy is older than the trained one", ge=0, le=64)
    environment: Function | None = knob(
        None, "FILE.py:NAME, (turns, row) -> text or None: a function that answers the policy's turns (docs/usage.md)"
    )
    stop: tuple[Annotated[str, Field(pattern=r"^[ -~]{1,64}$")], ...] = knob(
        (), "texts that end a turn like an end token; the answer then follows without a chat template", strict=False
    )
    environment_seconds: float = knob(10.0, "time limit for one call of rollout.environment, which ends the run", gt=0)
    max_turns: int = knob(8, "most turns of the policy in a completion; beyond them it is cut off", ge=1, le=10**4)
    environment_role: Literal["tool", "user"] = knob("tool", "role of the answer after an end token")

    @property
    def kind(self) -> Kind:
        return ENGINES[self.engine]

    @property
    def replica_ranks(self) -> int:
        """The number of ranks that share a copy of the model for sampling."""
        return self.tensor if self.kind.splits else 1


RewardMethod = Literal[
    "strict", "verl_strict", "verl_flexible", "openai", "lm_eval_strict", "lm_eval_flexible", "base_acc", "math"
]


class OverlongConfig(Section):
    buffer: int = knob(..., "B: last tokens before max_new_tokens, over which the penalty rises", ge=1, le=2**20)
    penalty: float = knob(..., "p: penalty for a completion of max_new_tokens", gt=0, le=1e6)


class RewardConfig(Section):
    method: RewardMethod = knob(
        "strict",
        "strict: the number after the last ####; math: the last \\boxed{}, by math-verify; others: as other projects",
    )
    function: Function | None = knob(
        None,
        "FILE.py:NAME to use instead: (completion, gold, row) -> score, (score, answer found, correct) or {score, ..}",
    )
    seconds: float = knob(
        10.0, "time limit for one score; beyond it, reward.function ends the run and math finds no answer", gt=0
    )
    check_gold: bool = knob(True, "refuse to start unless the reward scores every gold answer as correct")
    permute: bool = knob(False, "control run: shuffle the rewards of each step, so accuracy must not rise")
    overlong: OverlongConfig | None = knob(None, "{buffer: B, penalty: p} lowers the reward of long completions (DAPO)")


class LoraConfig(Section):
    targets: tuple[Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"], ...] = knob(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "layers to adapt: attention in and out, MLP in and out (dense, shared and routed experts), router",
        strict=False,  # a YAML list becomes a tuple; its members stay strict
        min_length=1,
    )
    rank: int = knob(32, "R, except for routed experts; below 32 large models learn too little", ge=1, le=2**12)
    alpha: float = knob(32.0, "the update is alpha / R x B A; routed experts may have another R", gt=0, le=1e6)
    expert_rank: int = knob(0, "R of routed experts, e.g. rank / experts_per_token; 0: like rank", ge=0, le=2**12)

    def rank_of(self, is_expert: bool) -> int:
        """Return the LoRA rank of the routed experts if ``is_expert`` is true, otherwise that of all other modules."""
        return self.expert_rank or self.rank if is_expert else self.rank

    @property
    def expert_targets(self) -> set[str]:
        """The targets that routed experts have."""
        return {"linear_fc1", "linear_fc2"} & {*self.targets}


class LossConfig(Section):
    advantage: Literal["std", "none", "loo", "zero"] | Function = knob(
        "std",
        "std: reward minus the group's mean, divided by its std; none: not divided (Dr.GRPO); loo: reward minus the "
        "mean of the others; zero: rewards are only measured, and loss.teacher teaches; or FILE.py:NAME, (rewards) -> "
        "advantages, both (P, G)",
    )
    teacher: Annotated[str, Field(min_length=1), AfterValidator(user_path), AsWritten] | None = knob(
        None,
        "run, checkpoint or PEFT folder with an adapter for the same base: on-policy distillation, which subtracts "
        "teacher_coef x (log-prob of the policy - log-prob of the teacher) from the advantage of each token",
    )
    teacher_coef: float = knob(1.0, "weight of the reverse KL to the teacher in the advantages", gt=0, le=1e6)
    kind: Literal["ppo", "gspo", "cispo", "dppo_tv"] | Function = knob(
        "ppo",
        "ppo clips a ratio per token, gspo a ratio per sequence, cispo a weight; dppo_tv masks a changed probability; "
        "or FILE.py:NAME, (grpo.LossInputs) -> (loss of each token (B, T), {name: metric of each token (B, T)})",
    )
    clip_low: float = knob(0.2, "clip the ratio from below at 1 - clip_low; dppo_tv: largest fall", ge=0, le=1)
    clip_high: float = knob(0.2, "clip the ratio from above at 1 + clip_high; DAPO uses 0.28", ge=0, le=1e6)
    dual_clip: float = knob(3.0, "ppo: bound of the loss of negative advantages, x |advantage|; 0: off", ge=0, le=1e6)
    aggregate: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr-grpo"] = knob(
        "token-mean", "how the token losses of the whole update and all ranks become one loss"
    )
    kl: Literal["none", "k1", "k2", "k3", "low_var_kl", "low_var_kl+", "abs"] = knob(
        "low_var_kl", "estimator of the KL penalty to the base model; none saves the reference forward pass"
    )
    kl_coef: float = knob(1e-3, "weight of the KL penalty", ge=0, le=1e6)
    entropy_coef: float = knob(0.0, "weight of the entropy bonus; with 0 entropy is only logged", ge=0, le=1e6)
    importance: Literal["none", "token", "sequence", "icepop", "mis", "uncorrected"] = knob(
        "none",
        "importance weights that correct the difference between sampler and trainer. token, sequence: truncated; "
        "icepop, mis: 0 for a token or a sequence with a large difference. rollout.staleness needs one of these, or "
        "uncorrected, for none on purpose",
    )
    importance_clip: float = knob(2.0, "largest importance weight; larger ones are truncated or masked", gt=0, le=1e6)
    importance_low: float = knob(0.5, "icepop: smallest importance weight; smaller ones are masked", ge=0, le=1e6)
    mask_truncated: bool = knob(False, "leave completions without an end token out of the loss")
    skip_equal_groups: bool = knob(
        False, "leave groups with equal rewards (advantage 0) and their KL out of the update"
    )

    @property
    def corrects(self) -> bool:
        """Whether importance weights correct the difference between sampler and trainer."""
        return self.importance not in ("none", "uncorrected")


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = knob(1e-5, "peak learning rate of AdamW; LoRA needs about 10 x that of full fine-tuning", gt=0, le=1e3)
    betas: tuple[Decay, Decay] = knob((0.9, 0.95), "AdamW's decay rates for the two moments", strict=False)
    weight_decay: float = knob(0.0, "AdamW's weight decay; 0 because LoRA factors are small already", ge=0, le=1e3)
    warmup_steps: int = knob(5, "number of steps of linear warm-up", ge=0, le=10**9)
    decay: Literal["constant", "linear", "cosine"] = knob("constant", "how lr falls to a tenth after the warm-up")
    max_grad_norm: float = knob(1.0, "scale gradients down to this norm over all ranks", gt=0, le=1e30)
    prompts_per_update: int = knob(32, "prompts per optimizer step; must divide prompts_per_step", ge=1, le=10**6)
    tokens_per_micro_batch: int = knob(
        8192, "most tokens of a forward pass on one rank, with padding; batches.plan counts packed rows",
        ge=1, le=2**24,
    )  # fmt: skip

    def rate(self, step: int, num_steps: int) -> float:
        """Return the learning rate at ``step`` (from 0).

        It rises linearly during the warm-up. Then it stays constant or decays to a tenth of lr.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.lr
        share = (step - self.warmup_steps) / max(1, num_steps - 1 - self.warmup_steps)  # 0 -> 1 at the last step
        fall = share if self.decay == "linear" else (1 - math.cos(math.pi * share)) / 2
        return self.lr * (1 - 0.9 * fall)


class EvalConfig(Section):
    every: int = knob(0, "steps between evaluations; the first and the last step always evaluate", ge=0, le=10**9)
    num_questions: int = knob(0, "number of held-out questions of each set, from the first on; 0: all", ge=0, le=10**6)
    sets: dict[str, Paths] = knob({}, "{NAME: file or list of files}: more held-out questions to measure")
    samples: int = knob(1, "sampled answers per question, in addition to the greedy one; 0: none", ge=0, le=2**16)
    temperature: float = knob(1.0, "temperature of the sampled answers", gt=0)
    batch_size: int = knob(128, "number of questions that a rank answers at once", ge=1, le=2**20)


class AqnConfig(Section):
    """Adaptive quantisation noise (QeRL, arXiv 2510.11696) on the RMSNorm weights of the sampler's copy only."""

    schedule: Literal["off", "qerl", "paper", "constant"] = knob("off", "how the noise falls over the steps of a run")
    sigma_start: float = knob(1e-2, "std of the noise in the first noisy stage (constant: in every step)", gt=0, le=1e3)
    sigma_end: float = knob(1e-3, "std of the noise in the last stage", gt=0, le=1e3)
    num_stages: int = knob(10, "number of stages, equally long; with qerl the first one has no noise", ge=1, le=10**6)
    targets: tuple[Literal["attention", "experts", "mlp"], ...] = knob(
        ("attention", "experts"),
        "norms that get noise. attention: before qkv; experts: before router and experts of MoE layers; mlp: in dense "
        "layers and before a shared expert",
        strict=False,
        min_length=1,
    )

    @property
    def falls(self) -> bool:
        """Whether sigma depends on the step and on the number of steps."""
        return self.schedule not in ("off", "constant")


class ReplayConfig(Section):
    """Routing replay: the trainer routes each token as the sampler did (r3) or as the old policy's pass did (r2)."""

    mode: Literal["off", "r2", "r3"] = knob(
        "off", "r3: the engine's routes (arXiv 2510.11370); r2: the trainer's routes"
    )


class ChecksConfig(Section):
    """The checks of run/tripwires.py that only warn or are off, and one bound. A check in both lists is off."""

    warn: tuple[str, ...] = knob(
        ("unparsable", "truncated", "collapse", "gradient_spike", "entropy"),
        "checks that only warn, once; a check in neither list stops the run (docs/checks.md)",
        strict=False,
    )
    off: tuple[str, ...] = knob((), "checks to switch off", strict=False)
    logp_gap_bf16: float = knob(
        0.1, "bf16: bound of the mean gap, nats per token; 1e-2 is normal with vLLM, 0 to 1e-4 with torch", gt=0
    )

    def stops(self, check: str) -> bool:
        """Return whether the run ends if ``check`` fails."""
        return check not in (*self.warn, *self.off)


class TrainConfig(Section):
    steps: int = knob(..., "number of steps; a step is one rollout and its updates", ge=1, le=10**9)
    seed: int = knob(0, "seed for the order of questions, sampling and LoRA's initial values", ge=0, lt=2**32)
    out_dir: OnePath = knob("out", "folder that contains the run folders, which are called <name>-<time>", min_length=1)
    checkpoint_every: int = knob(20, "steps between checkpoints; 0: save only after the last step", ge=0, le=10**9)
    keep_last: int = knob(2, "number of checkpoints to keep", ge=1, le=10**6)
    resume: OnePath = knob(
        "auto",
        "run to continue. auto: the newest unfinished one of this name, which must fit; never; or a run folder",
        min_length=1,
    )
    changed_inputs: Literal["refuse", "accept"] = knob(
        "refuse", "what a resume does if model, tokenizer or data differ from inputs.json; accept records the new ones"
    )
    completions_logged: Logged = knob(
        "all", "number of questions per step whose completions are written; 0 also writes none of evaluations"
    )
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab"], ...] = knob(
        (), "programs that also get the metrics; offline unless their API key is in the environment", strict=False
    )
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = knob(
        (), "steps, counted from 1, for which every rank writes a profiler's trace", strict=False
    )
    deterministic: bool = knob(
        False, "npu and cuda: make repeated runs bit-identical, but slower; runs on a cpu always are"
    )
    stall_seconds: int = knob(
        1200, "a rank without progress for this long reports where it is and ends; 0: off", ge=0, le=10**9
    )

    @property
    def questions_logged(self) -> float:
        """The largest number of questions per step whose completions are written."""
        return math.inf if self.completions_logged == "all" else self.completions_logged

    def is_due(self, steps_done: int, every: int) -> bool:
        """Return whether an action is due after ``steps_done`` steps.

        The action is due every ``every`` steps and after the last step. If ``every`` is 0, it is due only after the
        last step.
        """
        return steps_done == self.steps or (every > 0 and steps_done % every == 0)


class Merging(enum.IntEnum):
    """The places where (alpha / R) B A is merged into weights in model.dtype. Each value includes those before it."""

    NOWHERE = 0  # the engine gets the factors separately from the weights
    PUSHES = 1  # in the pushed weights; the trainer adds the update to a layer's output, which differs by 1e-7 in fp32
    PASSES = 2  # also in the trainer's passes, so that it trains the rounded policy that samples
    ONCE = 3  # only once for both, in memory that both share, if the engine's ranks have the trainer's experts


class Config(Section):
    name: str = knob(
        "unnamed", "first part of the run folder's name", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=150
    )
    device: Literal["auto", "cpu", "cuda", "npu"] = knob("auto", "auto uses the first that exists: npu, cuda, cpu")
    model: ModelConfig = knob(..., "which model to train")
    tiny_model: TinyModelConfig | None = knob(None, "the tiny model to make; leave it out for real models")
    parallel: ParallelConfig = knob(ParallelConfig(), "how the ranks share the model")
    data: DataConfig = knob(..., "questions and prompts")
    rollout: RolloutConfig = knob(RolloutConfig(), "how completions are sampled")
    reward: RewardConfig = knob(RewardConfig(), "how completions are scored")
    lora: LoraConfig = knob(LoraConfig(), "which parameters are trained")
    loss: LossConfig = knob(LossConfig(), "the GRPO objective")
    optim: OptimConfig = knob(OptimConfig(), "AdamW, and how a step is divided into updates")
    aqn: AqnConfig = knob(AqnConfig(), "noise on the sampler's weights")
    replay: ReplayConfig = knob(ReplayConfig(), "routing in the trainer's forward passes")
    checks: ChecksConfig = knob(ChecksConfig(), "which checks stop a run that goes wrong silently")
    eval: EvalConfig = knob(EvalConfig(), "accuracy of the policy, without noise, on held-out questions")
    train: TrainConfig = knob(..., "length, seed and run folder")

    def changed(self, **sections: dict[str, Any]) -> "Config":
        """Return a copy with some keys of some sections changed. The new values are not checked."""
        new = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=new)

    @property
    def row_tokens(self) -> int:
        """The length in tokens of the longest row, a prompt and its completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def largest_gap(self) -> float:
        """The bound of the check logp_gap, in nats per token."""
        return self.checks.logp_gap_bf16 if self.model.dtype == "bf16" else LOGP_GAP_FP32

    @property
    def merging(self) -> Merging:
        """The places where the LoRA update is merged into the weights."""
        rollout, is_bf16 = self.rollout, self.model.dtype == "bf16"
        apart_by_default = rollout.kind.prefers_factors and is_bf16
        if rollout.sync == "adapter" or (rollout.sync == "auto" and apart_by_default):
            return Merging.NOWHERE
        if not is_bf16:
            return Merging.PUSHES
        return Merging.PASSES if rollout.staleness else Merging.ONCE  # with staleness another policy samples

    def has_whole_experts(self, device: str) -> bool:
        """Return whether each rank of a replica of vLLM has whole experts on ``device`` (facts/engines.py)."""
        return whole_experts(device, routes=self.replay.mode == "r3", adapter=self.merging is Merging.NOWHERE)

    @property
    def earlier_passes(self) -> float:
        """The number of the policy's forward passes without gradients before the first update of a step.

        A pass over a part of the step's tokens counts as that part of a pass. One pass computes the old log-probs of
        the tokens of all updates but the first. The first update needs no such pass, because the policy has not changed
        yet and its ratio is 1. With r2 this pass covers all tokens, because it also records the routes. With
        rollout.staleness there is one more pass, with the adapters of the older policy. The passes of the reference and
        of a teacher are not counted.
        """
        first = 0 if self.replay.mode == "r2" else self.optim.prompts_per_update
        return 1 - first / self.rollout.prompts_per_step + (self.rollout.staleness > 0)
