"""Every knob of a run, typed and described beside its field; config.py reads a YAML file into these.

Legend: P prompts a step, G completions a prompt, R LoRA rank. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


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
    vocab_size: int = knob(400, "tokens; a byte-level BPE needs 256 bytes and 3 special tokens", ge=259, le=2**20)
    hidden_size: int = knob(64, "width of the residual stream", ge=1, le=2**14)
    num_layers: int = knob(2, "all of them MoE", ge=1, le=128)
    num_heads: int = knob(4, "query heads", ge=1, le=256)
    num_kv_heads: int = knob(2, "key/value heads; divides num_heads", ge=1, le=256)
    head_dim: int = knob(16, "of one head; even, for RoPE", ge=2, le=1024, multiple_of=2)
    num_experts: int = knob(8, "routed experts a layer", ge=1, le=1024)
    experts_per_token: int = knob(2, "top-k of the router", ge=1, le=1024)
    expert_width: int = knob(64, "intermediate size of one routed expert", ge=1, le=2**16)
    shared_expert_width: int = knob(64, "intermediate size of the shared expert; qwen2_moe only", ge=1, le=2**16)
    seed: int = knob(0, "of the initial weights and the warm start's examples", ge=0, lt=2**32)
    warm_start_steps: int = knob(1200, "supervised steps before GRPO; 0: the weights stay random", ge=0, le=10**6)
    words_per_batch: int = knob(64, "word problems in every other warm-start batch, over all ranks", ge=1, le=2**16)
    drills_per_batch: int = knob(256, "bare sums in the batches between, over all ranks", ge=1, le=2**16)
    warm_start_lr: float = knob(3e-3, "AdamW's peak in the warm start; 6e-3 did not learn", gt=0, le=1e3)
    teacher_right: float = knob(0.35, "share of word problems that the sloppy teacher answers correctly", ge=0, le=1)
    teacher_wrong_operation: float = knob(0.55, "share with the wrong operation; the rest slip by 1 or 10", ge=0, le=1)


class ParallelConfig(Section):
    """Ranks = tensor x data = expert_tensor x expert x expert_data; `data` and `expert_data` follow from the world."""

    tensor: int = knob(1, "ranks that split one attention matrix and the vocabulary", ge=1, le=2**16)
    expert: int = knob(1, "ranks that split the experts of one layer", ge=1, le=2**16)
    expert_tensor: int = knob(1, "ranks that split an expert's matrices; 1: each is whole on its rank", ge=1, le=2**16)
    pipeline: int = knob(1, "ranks that split the layers; only 1 so far", ge=1, le=2**16)
    context: int = knob(1, "ranks that split a sequence; only 1 so far", ge=1, le=2**16)
    timeout_seconds: int = knob(1800, "a collective that waits longer ends the run", ge=1, lt=2**31)


class DataConfig(Section):
    source: Literal["arithmetic", "gsm8k"] = knob(..., "generated word problems, or GSM8K files")
    train_path: str = knob("", "gsm8k: .jsonl or .parquet of the training questions")
    test_path: str = knob("", "gsm8k: .jsonl or .parquet of the held-out questions")
    max_prompt_tokens: int = knob(512, "longest prompt, chat template included", ge=1, le=2**20)
    overlong_prompts: Literal["refuse", "drop"] = knob("refuse", "a longer prompt stops the run, or is left out")
    prompt_template: str = knob("Question: {question}\nAnswer:", "used only if the tokenizer has no chat template")
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "passed to the chat template, e.g. {enable_thinking: false} for a hybrid model such as Qwen3-30B-A3B"
    )
    system: str = knob("", "the system turn, before everything else; empty: none, unless the template adds its own")
    few_shot_path: str = knob("", "worked examples, put before every question as earlier turns: .jsonl or .parquet")
    instruction: str = knob("", "appended to every question; quote it in YAML if it holds a '#'")
    num_train: int = knob(4096, "arithmetic: training questions", ge=1, le=10**6)
    num_test: int = knob(1024, "arithmetic: held-out questions (held out by operand pair)", ge=1, le=10**6)
    operand_low: int = knob(1, "arithmetic: smallest operand", ge=0, le=10**6)
    operand_high: int = knob(49, "arithmetic: largest operand", ge=0, le=10**6)
    seed: int = knob(0, "arithmetic: of the generated questions", ge=0, lt=2**32)


class RolloutConfig(Section):
    engine: Literal["torch", "vllm"] = knob("torch", "the embedded sampler, or vLLM")
    tensor: int = knob(1, "vllm: ranks that hold one copy of the model; others have other prompts", ge=1, le=2**16)
    expert_parallel: bool = knob(
        False, "vllm on npu: one engine over all ranks with the trainer's very shards; nothing travels in a push"
    )
    enforce_eager: bool = knob(True, "vllm: no graph capture; false on an accelerator, whose decoding is launch-bound")
    kv_cache_mib: int = knob(512, "vllm: key-value cache of a rank", ge=1, le=2**24)
    sync: Literal["merged", "adapter"] = knob("merged", "vllm: it gets whole weights, or the LoRA factors alone")
    prompts_per_step: int = knob(32, "P, questions a step; P x group_size = sequences a step", ge=1, le=10**6)
    group_size: int = knob(8, "G, completions a prompt; a group of one has no advantage", ge=2, le=2**16)
    max_new_tokens: int = knob(1024, "longest completion, its end token included", ge=1, le=2**20)
    temperature: float = knob(1.0, "of the sampling, and of the trainer's log-probabilities", gt=0)
    top_p: float = knob(1.0, "nucleus of the sampling; below 1 the policy gradient is biased", gt=0, le=1)
    top_k: int = knob(0, "most likely tokens kept; 0: all", ge=0, le=2**24)


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
    rank: int = knob(32, "R but of routed experts; under 32 large models under-learn", ge=1, le=2**12)
    alpha: float = knob(32.0, "the update is alpha / R x B A, R being that pair's own rank", gt=0, le=1e6)
    expert_rank: int = knob(0, "R of routed experts, e.g. rank / experts_per_token; 0: rank", ge=0, le=2**12)
    dropout: float = knob(0.0, "on the input of the A factor; above 0 a run depends on its layout", ge=0, lt=1)


class LossConfig(Section):
    advantage: Literal["std", "none", "loo"] = knob("std", "divided by the group's std; not (Dr.GRPO); leave-one-out")
    kind: Literal["ppo", "gspo", "cispo"] = knob("ppo", "clip per token; per sequence; clip the weight only")
    clip_low: float = knob(0.2, "ratio is clipped below at 1 - clip_low", ge=0, le=1)
    clip_high: float = knob(0.2, "ratio is clipped above at 1 + clip_high; DAPO 0.28", ge=0, le=1e6)
    dual_clip: float = knob(3.0, "ppo: bound of the loss for negative advantages, in advantages; 0: off", ge=0, le=1e6)
    aggregate: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "dr-grpo"] = knob(
        "token-mean", "from tokens to one loss, over the whole update and all ranks"
    )
    kl: Literal["none", "k1", "k2", "k3", "low_var_kl", "low_var_kl+", "abs"] = knob(
        "low_var_kl", "estimate of the divergence from the base model that is penalised; none: no reference forward"
    )
    kl_coef: float = knob(1e-3, "weight of the KL penalty", ge=0, le=1e6)
    entropy_coef: float = knob(0.0, "weight of the entropy bonus; 0: entropy is only logged", ge=0, le=1e6)
    importance: Literal["none", "token", "sequence"] = knob(
        "none", "truncated importance weights for the sampler's numerical difference from the trainer"
    )
    importance_clip: float = knob(2.0, "largest importance weight", gt=0, le=1e6)
    mask_truncated: bool = knob(False, "leave completions that hit max_new_tokens without an end out of the loss")
    skip_equal_groups: bool = knob(False, "leave groups of equal reward (advantage 0) out of the forward, KL included")


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimConfig(Section):
    lr: float = knob(1e-5, "AdamW's peak; LoRA wants about 10 x full fine-tuning's", gt=0, le=1e3)
    betas: tuple[Decay, Decay] = knob((0.9, 0.95), "AdamW's decays of the two moments", strict=False)
    eps: float = knob(1e-8, "AdamW's, in the denominator", gt=0, le=1)
    weight_decay: float = knob(0.0, "AdamW's; the LoRA factors start near 0 already", ge=0, le=1e3)
    warmup_steps: int = knob(5, "steps of linear warm-up", ge=0, le=10**9)
    decay: Literal["constant", "linear", "cosine"] = knob("constant", "of lr, from the warm-up's end to train.steps")
    min_lr_ratio: float = knob(0.1, "lr at the last step / peak", ge=0, le=1)
    max_grad_norm: float = knob(1.0, "gradients are scaled down to this norm over all ranks", gt=0, le=1e30)
    prompts_per_update: int = knob(32, "prompts an optimizer step; divides prompts_per_step", ge=1, le=10**6)
    tokens_per_micro_batch: int = knob(
        8192, "most tokens of one forward on one rank, padding included; packed rows count as rollout.plan says",
        ge=1, le=2**24,
    )  # fmt: skip


class EvalConfig(Section):
    every: int = knob(0, "steps between evaluations; first and last step always; 0: only those", ge=0, le=10**9)
    num_questions: int = knob(0, "first n held-out questions; 0: all", ge=0, le=10**6)
    samples: int = knob(1, "sampled answers a question, beside the greedy one; 0: greedy only", ge=0, le=2**16)
    temperature: float = knob(1.0, "of the sampled answers", gt=0)
    batch_size: int = knob(128, "questions a rank answers at once", ge=1, le=2**20)


class AqnConfig(Section):
    """Adaptive quantisation noise (QeRL, arXiv 2510.11696) on the RMSNorm weights of the sampler's copy, only there."""

    schedule: Literal["off", "qerl", "paper", "constant"] = knob("off", "how sigma falls over the run's steps")
    sigma_start: float = knob(1e-2, "std of the noise in the first noisy stage (constant: in every step)", gt=0, le=1e3)
    sigma_end: float = knob(1e-3, "std in the last stage", gt=0, le=1e3)
    num_stages: int = knob(10, "stages of equal length; under qerl the first one is without noise", ge=1, le=10**6)
    targets: tuple[str, ...] = knob(
        ("attention", "experts"),
        "norms by role (attention: before qkv; experts: before router and experts; mlp: before dense layers and the "
        "shared expert; router: only as the router sees it) or by pattern of their Hugging Face name",
        strict=False,
        min_length=1,
    )
    router: Literal["noisy", "clean"] = knob("noisy", "clean: the router is compensated exactly and routes as without")
    bf16: Literal["grid", "fp32"] = knob("grid", "bf16 models: noise on bf16's grid, or the sampler's norms in fp32")


class ReplayConfig(Section):
    """Routing replay: the experts a token met when it was sampled (r3), or in the old policy's pass (r2), train it."""

    mode: Literal["off", "r2", "r3"] = knob("off", "r3: the engine's routes (arXiv 2510.11370); r2: the trainer's own")
    reference: Literal["replayed", "native"] = knob("replayed", "whether the reference pass replays them too")


Action = Literal["warn", "stop", "off"]


class ChecksConfig(Section):
    """Tripwires against silently wrong runs: `warn` says it and goes on, `stop` ends the run with the cause."""

    reward_constant: Action = knob("stop", "every reward of the first reward_constant_steps steps is the same")
    reward_constant_steps: int = knob(20, "steps until a constant reward counts", ge=1, le=10**9)
    unparsable: Action = knob("warn", "more completions than unparsable_share hold no answer at all, in any step")
    unparsable_share: float = knob(0.95, "of the completions of a step", gt=0, lt=1)
    truncated: Action = knob("warn", "most completions are cut off at max_new_tokens")
    truncated_share: float = knob(0.5, "of the completions of as many steps as have 256 together", gt=0, lt=1)
    sampling: Action = knob("stop", "completions all identical, none that ends by itself, or always one question")
    held_out: Action = knob("stop", "a held-out question among the training questions")
    state: Action = knob("stop", "ranks differ in what they hold in common, or a resume from its checkpoint")
    impossible: Action = knob("stop", "a negative KL estimate or entropy, or a KL of exactly 0 after updates")
    collapse: Action = knob("warn", "ten steps' mean reward or KL is beyond collapse_reward or collapse_kl")
    collapse_reward: float = knob(0.2, "share of the mean reward of the run's first ten steps", gt=0, lt=1)
    collapse_kl: float = knob(1.0, "nats a token", gt=0)
    logp_gap: Action = knob("stop", "sampler and trainer disagree: mean |log-prob difference|; of a probe under noise")
    logp_gap_fp32: float = knob(1e-3, "bound in fp32, nats a token; the gap is some 1e-7 when all is well", gt=0)
    logp_gap_bf16: float = knob(0.1, "bound in bf16; the gap is some 1e-2 when all is well", gt=0)
    reference_kl: Action = knob("stop", "the KL to the reference is not exactly 0 before the first update")
    adapters: Action = knob("stop", "after an update the sampler still gets the tensors of before")
    noise: Action = knob("stop", "AQN noise that the sampler does not feel; noise not as asked always stops")
    non_finite: Action = knob("stop", "a metric is NaN or infinite; a gradient that is always stops the run")
    gradient_spike: Action = knob("warn", "gradient norm over gradient_spike_factor x its median of the last 50 steps")
    gradient_spike_factor: float = knob(20.0, "how large is a spike", gt=1)
    entropy: Action = knob("warn", "the policy's entropy falls under entropy_floor: it has stopped exploring")
    entropy_floor: float = knob(1e-4, "nats a token", gt=0)


class TrainConfig(Section):
    steps: int = knob(..., "a step is one rollout and its updates", ge=1, le=10**9)
    seed: int = knob(0, "of the order of questions, sampling and LoRA's start", ge=0, lt=2**32)
    out_dir: str = knob("out", "run folders go here as <name>-<time>", min_length=1)
    checkpoint_every: int = knob(20, "steps between checkpoints; the last step always; 0: only that", ge=0, le=10**9)
    keep_last: int = knob(2, "checkpoints kept", ge=1, le=10**6)
    resume: str = knob("auto", "auto: the newest unfinished run of this name; never; or a run folder", min_length=1)
    changed_inputs: Literal["refuse", "accept"] = knob(
        "refuse", "a resume whose model, tokenizer or data are not what inputs.json says; accept records them anew"
    )
    completions_logged: int = knob(2, "completions written to the run folder a step", ge=0, le=2**16)
    tensorboard: bool = knob(False, "also write TensorBoard events")
    deterministic: bool = knob(
        False, "a run repeats itself to the last bit on npu and cuda too, at some speed; on a cpu it does so anyway"
    )
    stall_seconds: int = knob(1200, "a rank that stands still longer says where and ends; 0: off", ge=0, le=10**9)


class Config(Section):
    name: str = knob("unnamed", "leads the run folder's name", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=150)
    device: Literal["auto", "cpu", "cuda", "npu"] = knob("auto", "auto: the first of npu, cuda, cpu that is there")
    model: ModelConfig = knob(..., "which model is trained")
    tiny_model: TinyModelConfig | None = knob(None, "absent for real models")
    parallel: ParallelConfig = knob(ParallelConfig(), "how ranks share the model")
    data: DataConfig = knob(..., "questions and prompts")
    rollout: RolloutConfig = knob(RolloutConfig(), "sampling")
    reward: RewardConfig = knob(RewardConfig(), "scoring")
    lora: LoraConfig = knob(LoraConfig(), "what is trained")
    loss: LossConfig = knob(LossConfig(), "the GRPO objective")
    optim: OptimConfig = knob(OptimConfig(), "AdamW and how a step is cut into updates")
    aqn: AqnConfig = knob(AqnConfig(), "noise on the sampler's weights")
    replay: ReplayConfig = knob(ReplayConfig(), "routing of the trainer's forward passes")
    checks: ChecksConfig = knob(ChecksConfig(), "what stops a run that is silently wrong")
    eval: EvalConfig = knob(EvalConfig(), "accuracy of the clean policy on held-out questions")
    train: TrainConfig = knob(..., "length, seeds, run folder")
