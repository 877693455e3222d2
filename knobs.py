"""Every key of a configuration: its type, its default, its bounds, and one sentence that says what it does.

inputs/config.py reads a YAML file into these classes. P prompts a step, G completions a prompt, R LoRA rank.
"""

import enum
import math
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from facts.architectures import FamilyName
from facts.checks import LOGP_GAP_FP32
from facts.engines import ENGINES, EngineName, Kind


def knob(default: Any, description: str, **bounds: Any) -> Any:
    """A field with its description; with `...` as default the file must give a value."""
    return Field(default, description=description, **bounds)


def _paths(value: Any) -> str | tuple[str, ...]:
    """A text as it is, a list of texts as a tuple; ValueError with what is needed for all other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(path, str) and path for path in value):
        return tuple(value)
    raise ValueError("a path or a list of paths")


Paths = Annotated[str | tuple[str, ...], BeforeValidator(_paths)]


def listed(paths: Paths | Path) -> tuple[str, ...]:
    """Each of one or several paths."""
    return paths if isinstance(paths, tuple) else (str(paths),)


class Section(BaseModel):
    """Unknown keys and values of another type are errors; a loaded configuration cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelConfig(Section):
    path: str = knob(..., "folder of a Hugging Face model: config.json, safetensors files, tokenizer", min_length=1)
    dtype: Literal["fp32", "bf16"] = knob("bf16", "type of weights and activations; LoRA factors are always fp32")
    recompute: bool = knob(False, "recompute activations in the backward pass: less memory, one more forward pass")
    quantisation: Literal["none", "int4"] = knob(
        "none",
        "int4: the trainer holds the frozen routed experts in 4 bits, quantised on loading (hardware/quantisation.py)",
    )


class TinyModelConfig(Section):
    """A model that is made at model.path if there is none; names as in config.json, defaults of tiny_cpu.yaml."""

    architecture: FamilyName = knob(..., "model_type: that of Qwen3-30B-A3B, Qwen1.5-MoE or OLMoE")
    vocab_size: int = knob(400, "tokens; the tokenizer needs 256 bytes and 3 special tokens", ge=259, le=2**20)
    hidden_size: int = knob(64, "width of the residual stream", ge=1, le=2**14)
    num_layers: int = knob(2, "number of layers; every layer is an MoE layer", ge=1, le=128)
    num_heads: int = knob(4, "number of query heads", ge=1, le=256)
    num_kv_heads: int = knob(2, "number of key/value heads; it must divide num_heads", ge=1, le=256)
    head_dim: int = knob(16, "size of one head; RoPE needs an even number", ge=2, le=1024, multiple_of=2)
    num_experts: int = knob(8, "number of routed experts in a layer", ge=1, le=1024)
    experts_per_token: int = knob(2, "number of experts that the router chooses for a token", ge=1, le=1024)
    expert_width: int = knob(64, "intermediate size of one routed expert", ge=1, le=2**16)
    seed: int = knob(0, "seed of the initial weights and of the warm start's examples", ge=0, lt=2**32)
    warm_start_steps: int = knob(1200, "supervised steps before GRPO; with 0 the weights stay random", ge=0, le=10**6)
    drills_per_batch: int = knob(256, "bare sums in one batch of all ranks (the other batches)", ge=1, le=2**16)
    teacher_right: float = knob(0.35, "share of word problems that the teacher answers correctly", ge=0, le=1)
    teacher_wrong_operation: float = knob(
        0.55, "share of word problems with the wrong operation; the remaining results are off by 1 or 10", ge=0, le=1
    )


class ParallelConfig(Section):
    """Ranks = tensor x data = expert x expert_data; data and expert_data follow from the others."""

    tensor: int = knob(1, "ranks that split one attention matrix and the vocabulary", ge=1, le=2**16)
    expert: int = knob(1, "ranks that split the experts of one layer", ge=1, le=2**16)
    timeout_seconds: int = knob(1800, "a collective that waits longer than this ends the run", ge=1, lt=2**31)


GENERATED = 4096  # training questions of data.source arithmetic, if data.num_train does not say it


class DataConfig(Section):
    source: Literal["arithmetic", "gsm8k", "file"] = knob(..., "generated word problems, GSM8K files, or other files")
    columns: dict[str, str] = knob({"question": "question", "answer": "answer"}, "file: their names; a.b is b inside a")
    train_path: Paths = knob("", "gsm8k, file: .jsonl, .json or .parquet file of the training questions, or a list")
    test_path: Paths = knob("", "gsm8k, file: .jsonl, .json or .parquet file of the held-out questions, or a list")
    max_prompt_tokens: int = knob(512, "longest prompt in tokens, chat template included", ge=1, le=2**20)
    overlong_prompts: Literal["refuse", "drop"] = knob("refuse", "whether a longer prompt stops the run or is left out")
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "variables of the chat template, e.g. {enable_thinking: false} for a hybrid model such as Qwen3-30B-A3B"
    )
    system: str = knob("", "text of the system turn; if empty there is none, unless the template adds its own")
    few_shot_path: str = knob("", "file of worked examples like train_path's, shown before every question as turns")
    instruction: str = knob("", "text appended to every question; YAML needs quotes if it contains a '#'")
    num_train: int = knob(
        0, "training questions: generated (0: 4,096), or of a file, evenly spaced in it (0: all)", ge=0, le=10**6
    )
    num_test: int = knob(
        1024, "arithmetic: held-out questions; training has none of their operand pairs", ge=1, le=10**6
    )
    operand_high: int = knob(49, "arithmetic: largest operand", ge=0, le=10**6)
    operations_high: int = knob(
        1, "arithmetic: a question has 1 to so many operations; each later one uses the result so far", ge=1, le=8
    )
    seed: int = knob(0, "arithmetic: seed of the generated questions", ge=0, lt=2**32)


class RolloutConfig(Section):
    engine: EngineName = knob("torch", "what samples: the embedded sampler, or vLLM")
    tensor: int = knob(1, "vllm: ranks that share one copy of the model; each copy has its own prompts", ge=1, le=2**16)
    expert_parallel: bool = knob(
        False, "vllm on npu: one engine over all ranks, sharded exactly like the trainer, so a push copies locally"
    )
    enforce_eager: bool = knob(True, "vllm: no graph capture; false decodes faster on an accelerator")
    kv_cache_mib: int = knob(512, "vllm: MiB of the key-value cache of one rank", ge=1, le=2**24)
    sync: Literal["auto", "merged", "adapter"] = knob(
        "auto",
        "the policy of sampler and trainer. merged: weights with LoRA merged, in bf16 rounded; adapter: weights and "
        "factors apart; auto: adapter in bf16 with the embedded sampler, else merged",
    )
    prompts_per_step: int = knob(32, "P, questions a step; a step has P x group_size sequences", ge=1, le=10**6)
    group_size: int = knob(8, "G, completions a prompt; a group of one has no advantage", ge=2, le=2**16)
    dynamic_rounds: int = knob(0, "rounds that replace groups all right or all wrong (DAPO); 0: off", ge=0, le=100)
    max_new_tokens: int = knob(1024, "longest completion in tokens, its end token included", ge=1, le=2**20)
    temperature: float = knob(1.0, "temperature of sampling and of the trainer's log-probabilities", gt=0)
    staleness: int = knob(0, "steps by which the policy that samples is older than the trained one", ge=0, le=64)

    @property
    def kind(self) -> Kind:
        return ENGINES[self.engine]

    @property
    def replica_ranks(self) -> int:
        """Ranks that share one copy of the model to sample."""
        return self.tensor if self.kind.splits else 1


RewardMethod = Literal[
    "strict", "verl_strict", "verl_flexible", "openai", "lm_eval_strict", "lm_eval_flexible", "base_acc", "math"
]
FUNCTION = r"^.+\.py:[A-Za-z_][A-Za-z0-9_]*$"  # FILE.py:NAME, inputs/functions.py
Function = Annotated[str, Field(pattern=FUNCTION)]


class OverlongConfig(Section):
    buffer: int = knob(..., "B: the last tokens before max_new_tokens, over which the penalty rises", ge=1, le=2**20)
    penalty: float = knob(..., "taken off the reward of a completion of max_new_tokens", gt=0, le=1e6)


class RewardConfig(Section):
    method: RewardMethod = knob(
        "strict",
        "strict: the number after the last ####; math: the last \\boxed{}, by math-verify; the others: other projects'",
    )
    function: Function | None = knob(
        None, "FILE.py:NAME instead: (completion, gold, row) -> score, or (score, answer found, correct)"
    )
    seconds: float = knob(10.0, "longest call of reward.function, which ends the run, or of the method math", gt=0)
    check_gold: bool = knob(True, "refuse to start unless every gold answer is scored as correct")
    permute: bool = knob(False, "control run: the rewards of a step are shuffled, so accuracy must not rise")
    overlong: OverlongConfig | None = knob(None, "{buffer: B, penalty: p}: long completions earn less (DAPO)")


class LoraConfig(Section):
    targets: tuple[Literal["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router"], ...] = knob(
        ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        "adapted layers: attention in and out, MLP in and out (dense, shared and routed experts), router",
        strict=False,  # a YAML list becomes a tuple; its members stay strict
        min_length=1,
    )
    rank: int = knob(32, "R, except of routed experts; large models learn too little below 32", ge=1, le=2**12)
    alpha: float = knob(32.0, "the update is alpha / R x B A, with the R of that pair", gt=0, le=1e6)
    expert_rank: int = knob(0, "R of routed experts, e.g. rank / experts_per_token; 0 for rank", ge=0, le=2**12)

    def rank_of(self, is_expert: bool) -> int:
        """R of a module; ``is_expert``: of the routed experts."""
        return self.expert_rank or self.rank if is_expert else self.rank


class LossConfig(Section):
    advantage: Literal["std", "none", "loo"] | Function = knob(
        "std",
        "reward minus the group's mean, divided by its std; not divided (Dr.GRPO); minus the mean of the others; or "
        "FILE.py:NAME, (rewards) -> advantages, both (P, G)",
    )
    kind: Literal["ppo", "gspo", "cispo", "dppo_tv"] | Function = knob(
        "ppo",
        "clips a ratio a token, a ratio a sequence, or a weight; masks a changed probability; or FILE.py:NAME, "
        "(grpo.LossInputs) -> (loss of each token (B, T), {name: what is measured of it (B, T)})",
    )
    clip_low: float = knob(0.2, "the ratio is clipped below at 1 - clip_low; dppo_tv: largest fall", ge=0, le=1)
    clip_high: float = knob(0.2, "the ratio is clipped above at 1 + clip_high; DAPO has 0.28", ge=0, le=1e6)
    dual_clip: float = knob(3.0, "ppo: bound of the loss for negative advantages, in advantages; 0: off", ge=0, le=1e6)
    aggregate: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr-grpo"] = knob(
        "token-mean", "how the losses of tokens become one loss, over the whole update and all ranks"
    )
    kl: Literal["none", "k1", "k2", "k3", "low_var_kl", "low_var_kl+", "abs"] = knob(
        "low_var_kl", "estimator of the penalised KL to the base model; none saves the reference forward pass"
    )
    kl_coef: float = knob(1e-3, "weight of the KL penalty", ge=0, le=1e6)
    entropy_coef: float = knob(0.0, "weight of the entropy bonus; with 0 entropy is only logged", ge=0, le=1e6)
    importance: Literal["none", "token", "sequence", "icepop", "mis", "uncorrected"] = knob(
        "none",
        "importance weights, which correct the difference of sampler and trainer: truncated (token, sequence), or 0 "
        "for a token (icepop) or a sequence (mis) whose difference is large. rollout.staleness needs them, or "
        "uncorrected, which says that there are none on purpose",
    )
    importance_clip: float = knob(2.0, "largest importance weight; a larger one is cut, or masked", gt=0, le=1e6)
    importance_low: float = knob(0.5, "icepop: smallest importance weight; a smaller one is masked", ge=0, le=1e6)
    mask_truncated: bool = knob(False, "leave completions without an end token out of the loss")
    skip_equal_groups: bool = knob(False, "skip groups of equal reward (advantage 0) in the update, their KL included")

    @property
    def corrects(self) -> bool:
        """Whether importance weights correct the difference of sampler and trainer."""
        return self.importance not in ("none", "uncorrected")


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = knob(1e-5, "peak learning rate of AdamW; LoRA needs about 10 x that of full fine-tuning", gt=0, le=1e3)
    betas: tuple[Decay, Decay] = knob((0.9, 0.95), "AdamW's decay rates of the two moments", strict=False)
    weight_decay: float = knob(0.0, "AdamW's weight decay; 0, as LoRA factors are small already", ge=0, le=1e3)
    warmup_steps: int = knob(5, "steps of linear warm-up", ge=0, le=10**9)
    decay: Literal["constant", "linear", "cosine"] = knob("constant", "how lr falls to a tenth after the warm-up")
    max_grad_norm: float = knob(1.0, "gradients are scaled down to this norm over all ranks", gt=0, le=1e30)
    prompts_per_update: int = knob(32, "prompts of one optimizer step; divides prompts_per_step", ge=1, le=10**6)
    tokens_per_micro_batch: int = knob(
        8192, "most tokens of one forward pass on a rank, padding included; batches.plan counts packed rows",
        ge=1, le=2**24,
    )  # fmt: skip

    def rate(self, step: int, num_steps: int) -> float:
        """AdamW's rate at ``step`` (from 0): linear warm-up, then constant, or linear or cosine to a tenth of lr."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.lr
        share = (step - self.warmup_steps) / max(1, num_steps - 1 - self.warmup_steps)  # 0 -> 1 at the last step
        fall = share if self.decay == "linear" else (1 - math.cos(math.pi * share)) / 2
        return self.lr * (1 - 0.9 * fall)


class EvalConfig(Section):
    every: int = knob(0, "steps between evaluations; the first and the last step always evaluate", ge=0, le=10**9)
    num_questions: int = knob(0, "held-out questions of each set, from the first one; 0 for all", ge=0, le=10**6)
    sets: dict[str, Paths] = knob({}, "{NAME: file or list of files} of questions, measured beside data.test_path")
    samples: int = knob(1, "sampled answers a question, beside the greedy one; 0 for greedy only", ge=0, le=2**16)
    temperature: float = knob(1.0, "temperature of the sampled answers", gt=0)
    batch_size: int = knob(128, "questions that a rank answers at once", ge=1, le=2**20)


class AqnConfig(Section):
    """Adaptive quantisation noise (QeRL, arXiv 2510.11696) on the RMSNorm weights of the sampler's copy only."""

    schedule: Literal["off", "qerl", "paper", "constant"] = knob("off", "how sigma falls over the steps of the run")
    sigma_start: float = knob(1e-2, "std of the noise in the first noisy stage (constant: in every step)", gt=0, le=1e3)
    sigma_end: float = knob(1e-3, "std of the noise in the last stage", gt=0, le=1e3)
    num_stages: int = knob(10, "stages of equal length; with qerl the first one has no noise", ge=1, le=10**6)
    targets: tuple[Literal["attention", "experts", "mlp"], ...] = knob(
        ("attention", "experts"),
        "norms with noise: before qkv (attention); of MoE layers, before router and experts (experts); of dense layers "
        "and before a shared expert (mlp)",
        strict=False,
        min_length=1,
    )

    @property
    def falls(self) -> bool:
        """Whether sigma depends on the step, and on how many there are."""
        return self.schedule not in ("off", "constant")


class ReplayConfig(Section):
    """Routing replay trains each token on the experts of its sampling (r3) or of the old policy's forward pass (r2)."""

    mode: Literal["off", "r2", "r3"] = knob("off", "r3: routes of the engine (arXiv 2510.11370); r2: of the trainer")


class ChecksConfig(Section):
    """Which checks of run/tripwires.py do not stop a run. A name in both lists is off."""

    warn: tuple[str, ...] = knob(
        ("unparsable", "truncated", "collapse", "gradient_spike", "entropy"),
        "checks that only warn, once; a check that is in neither list stops the run (docs/checks.md)",
        strict=False,
    )
    off: tuple[str, ...] = knob((), "checks that are not made", strict=False)
    logp_gap_bf16: float = knob(
        0.1, "bf16: largest mean difference, nats a token; normal is 1e-2 with vLLM, 0 to 1e-4 with torch", gt=0
    )

    def stops(self, check: str) -> bool:
        """Whether the run ends if ``check`` fails."""
        return check not in (*self.warn, *self.off)


class TrainConfig(Section):
    steps: int = knob(..., "a step is one rollout and its updates", ge=1, le=10**9)
    seed: int = knob(0, "seed of the order of questions, of sampling and of LoRA's initial values", ge=0, lt=2**32)
    out_dir: str = knob("out", "folder of the run folders, which are called <name>-<time>", min_length=1)
    checkpoint_every: int = knob(20, "steps between checkpoints; 0 saves the last step only", ge=0, le=10**9)
    keep_last: int = knob(2, "number of checkpoints that are kept", ge=1, le=10**6)
    resume: str = knob(
        "auto", "auto: the newest unfinished run of this name, which must fit; never; or a run folder", min_length=1
    )
    changed_inputs: Literal["refuse", "accept"] = knob(
        "refuse", "what a resume does if model, tokenizer or data differ from inputs.json; accept records them anew"
    )
    completions_logged: int = knob(2, "completions of a step that are written to the run folder", ge=0, le=2**16)
    trackers: tuple[Literal["tensorboard", "wandb", "swanlab"], ...] = knob(
        (), "programs that show the metrics as well; without an API key in the environment, offline", strict=False
    )
    profile_steps: tuple[Annotated[int, Field(ge=1)], ...] = knob(
        (), "steps, counted from 1, of which every rank writes a profiler's trace", strict=False
    )
    deterministic: bool = knob(
        False, "npu and cuda: a run repeats itself to the last bit, but more slowly; a cpu run always repeats itself"
    )
    stall_seconds: int = knob(1200, "a rank without progress for so long says where, and ends; 0: off", ge=0, le=10**9)

    def is_due(self, steps_done: int, every: int) -> bool:
        """Whether a thing is due that happens ``every`` so many steps (0: never), and after the last step."""
        return steps_done == self.steps or (every > 0 and steps_done % every == 0)


class Merging(enum.IntEnum):
    """Where the update (alpha / R) B A is merged into the weights in model.dtype; each value includes those before."""

    NOWHERE = 0  # the engine gets the factors, apart from the weights
    PUSHES = 1  # in what the engine gets; the trainer adds the update to a layer's output, in fp32 1e-7 beside it
    PASSES = 2  # in the trainer's passes, too, so that what is trained is the rounded policy that samples
    ONCE = 3  # for both in one memory, where an engine's ranks hold the trainer's experts


class Config(Section):
    name: str = knob(
        "unnamed", "start of the run folder's name", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=150
    )
    device: Literal["auto", "cpu", "cuda", "npu"] = knob("auto", "auto takes the first that exists: npu, cuda, cpu")
    model: ModelConfig = knob(..., "which model is trained")
    tiny_model: TinyModelConfig | None = knob(None, "the model to make; absent for real models")
    parallel: ParallelConfig = knob(ParallelConfig(), "how the ranks share the model")
    data: DataConfig = knob(..., "questions and prompts")
    rollout: RolloutConfig = knob(RolloutConfig(), "how completions are sampled")
    reward: RewardConfig = knob(RewardConfig(), "how completions are scored")
    lora: LoraConfig = knob(LoraConfig(), "which parameters are trained")
    loss: LossConfig = knob(LossConfig(), "the GRPO objective")
    optim: OptimConfig = knob(OptimConfig(), "AdamW, and how a step is divided into updates")
    aqn: AqnConfig = knob(AqnConfig(), "noise on the sampler's weights")
    replay: ReplayConfig = knob(ReplayConfig(), "routing of the trainer's forward passes")
    checks: ChecksConfig = knob(ChecksConfig(), "what stops a run that is silently wrong")
    eval: EvalConfig = knob(EvalConfig(), "accuracy of the policy without noise on held-out questions")
    train: TrainConfig = knob(..., "length, seeds, run folder")

    def changed(self, **sections: dict[str, Any]) -> "Config":
        """A copy with some keys of some sections changed. The new values are not checked."""
        new = {name: getattr(self, name).model_copy(update=keys) for name, keys in sections.items()}
        return self.model_copy(update=new)

    @property
    def row_tokens(self) -> int:
        """Tokens of the longest row: prompt and completion."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def largest_gap(self) -> float:
        """The bound of the check logp_gap, nats a token."""
        return self.checks.logp_gap_bf16 if self.model.dtype == "bf16" else LOGP_GAP_FP32

    @property
    def merging(self) -> Merging:
        """Where the LoRA update is merged into the weights."""
        rollout, is_bf16 = self.rollout, self.model.dtype == "bf16"
        apart_by_default = rollout.kind.prefers_factors and is_bf16
        if rollout.sync == "adapter" or (rollout.sync == "auto" and apart_by_default):
            return Merging.NOWHERE
        if not is_bf16:
            return Merging.PUSHES
        return Merging.PASSES if rollout.staleness else Merging.ONCE  # the policy that samples is another, or the same

    @property
    def earlier_passes(self) -> float:
        """Passes without gradients over a step's tokens, before its first update.

        One computes the log-probs of the tokens of all later updates: in the first update the policy that sampled still
        learns, so its ratio is 1. Under r2 it also records the routes, of all tokens. Under rollout.staleness there is
        another one, with the adapters of the older policy.
        """
        first = 0 if self.replay.mode == "r2" else self.optim.prompts_per_update
        return 1 - first / self.rollout.prompts_per_step + (self.rollout.staleness > 0)
