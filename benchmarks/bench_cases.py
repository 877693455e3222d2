"""Defines the model, the cases and their configuration, which both sides of the benchmark share.

The model is a tiny Qwen3-MoE with 1.9 M parameters, or SmolLM2-135M as a mixture of experts (weights/smol_model.py). A
step samples 8 completions, all of the same length, for each of 8 prompts (with SmolLM2, 4 prompts). The cases differ in
the model, in the trained modules and in the number of sampled tokens. TRL gets the same sizes as JSON.
This file adds the folder of the repository to sys.path, so the benchmarks import it before the files of the repository.
"""

import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from facts.root import ROOT
from knobs import Config

MODEL = dict(
    architecture="qwen3_moe", vocab_size=512, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
    num_experts=8, experts_per_token=2, expert_width=128, warm_start_steps=0,
)  # fmt: skip
PROMPTS, GROUP, KL_COEF, LEARNING_RATE = 8, 8, 0.04, 1e-4
ATTENTION = ("linear_qkv", "linear_proj")
SMOL = "models/smollm2_moe"


class Case(NamedTuple):
    """A case: the modules with adapters, their rank, the tokens per completion, the prompts per step, and the model."""

    targets: tuple[str, ...]
    rank: int
    new_tokens: int
    prompts: int = PROMPTS
    smol: bool = False  # whether the model is SmolLM2 instead of the tiny model, which the benchmark creates

    def model(self, work: Path) -> Path:
        """Return the folder of the model."""
        return ROOT / SMOL if self.smol else work / "model"


CASES = {
    "attention_r8_64": Case(ATTENTION, 8, 64),
    "attention_r8_128": Case(ATTENTION, 8, 128),
    "all_r32_64": Case((*ATTENTION, "linear_fc1", "linear_fc2"), 32, 64),
    "all_r32_128": Case((*ATTENTION, "linear_fc1", "linear_fc2"), 32, 128),
    "smol_attention_r16_32": Case(ATTENTION, 16, 32, prompts=4, smol=True),
    "smol_all_r16_32": Case((*ATTENTION, "linear_fc1", "linear_fc2"), 16, 32, prompts=4, smol=True),
}
TINY = [name for name, case in CASES.items() if not case.smol]


def config(case: Case, work: Path) -> Config:
    """Return the configuration of a run of ``case`` in the folder ``work``. Every step uses all questions."""
    tree: dict = {
        "name": "bench",
        "device": "cpu",
        "model": {"path": str(case.model(work)), "dtype": "fp32"},
        **({} if case.smol else {"tiny_model": dict(MODEL)}),
        "data": {
            "source": "arithmetic",
            "max_prompt_tokens": 128 if case.smol else 64,
            "num_train": case.prompts,
            "num_test": 1,
        },
        "rollout": {"prompts_per_step": case.prompts, "group_size": GROUP, "max_new_tokens": case.new_tokens},
        "reward": {"check_gold": False},  # the benchmark's reward does not look at the gold answers
        "lora": {"targets": case.targets, "rank": case.rank, "alpha": 2.0 * case.rank},
        "loss": {"kl_coef": KL_COEF},
        "optim": {"lr": LEARNING_RATE, "warmup_steps": 0, "prompts_per_update": case.prompts},
        # The adapters start with non-zero values, so the first KL is not 0. No completion ends by itself, and the
        # benchmark's reward does not read answers.
        "checks": {"off": ("reference_kl", "sampling", "truncated", "unparsable", "reward_constant")},
        "eval": {"num_questions": 1, "samples": 0},
        "train": {
            "steps": 10**6,
            "out_dir": str(work / "runs"),
            "checkpoint_every": 0,
            "resume": "never",
            "stall_seconds": 0,
        },
    }
    return Config.model_validate(tree)


def reward(text: str) -> float:
    """Return a number that depends on every character of ``text``.

    So rewards differ within a group, and no advantage is 0.
    """
    return sum(map(ord, text)) % 100 / 100
