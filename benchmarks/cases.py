"""What every benchmark measures on: a tiny Qwen3-MoE of 1.9 M parameters, 8 prompts x 8 completions, forced lengths.

The cases differ in what is trained and in how many tokens are sampled. TRL's side gets the same sizes as JSON.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from knobs import Config

ROOT = Path(__file__).parents[1]
MODEL = dict(
    architecture="qwen3_moe", vocab_size=512, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
    num_experts=8, experts_per_token=2, expert_width=128, warm_start_steps=0,
)  # fmt: skip
PROMPTS, GROUP, KL_COEF, LEARNING_RATE = 8, 8, 0.04, 1e-4
ATTENTION = ("linear_qkv", "linear_proj")


class Case(NamedTuple):
    """What is trained, and how many tokens every completion has."""

    targets: tuple[str, ...]
    rank: int
    new_tokens: int


CASES = {
    "attention_r8_64": Case(ATTENTION, 8, 64),
    "attention_r8_128": Case(ATTENTION, 8, 128),
    "all_r32_64": Case((*ATTENTION, "linear_fc1", "linear_fc2"), 32, 64),
    "all_r32_128": Case((*ATTENTION, "linear_fc1", "linear_fc2"), 32, 128),
}


def config(case: Case, model_dir: Path, out_dir: Path, steps: int, **changes: object) -> Config:
    """A run of ``case``: every step asks all PROMPTS questions. ``changes``: section__key=value."""
    tree: dict = {
        "name": "bench",
        "device": "cpu",
        "model": {"path": str(model_dir), "dtype": "fp32"},
        "tiny_model": dict(MODEL),
        "data": {"source": "arithmetic", "max_prompt_tokens": 64, "num_train": PROMPTS, "num_test": 1},
        "rollout": {"prompts_per_step": PROMPTS, "group_size": GROUP, "max_new_tokens": case.new_tokens},
        "lora": {"targets": case.targets, "rank": case.rank, "alpha": 2.0 * case.rank},
        "loss": {"kl_coef": KL_COEF},
        "optim": {"lr": LEARNING_RATE, "warmup_steps": 0, "prompts_per_update": PROMPTS},
        # The adapters start away from 0, so that their product, the reference and the loss are not trivial.
        "checks": {"reference_kl": "off", "unparsable": "off", "reward_constant": "off"},
        "eval": {"num_questions": 1, "samples": 0},
        "train": {
            "steps": steps,
            "out_dir": str(out_dir),
            "checkpoint_every": 0,
            "resume": "never",
            "stall_seconds": 0,
        },
    }
    for key, value in changes.items():
        section, name = key.split("__")
        tree.setdefault(section, {})[name] = value
    return Config.model_validate(tree)


def reward(text: str) -> float:
    """A number that differs inside every group, whatever a random model says: no group has advantage 0."""
    return sum(map(ord, text)) % 100 / 100


def table(rows: list[dict]) -> str:
    """``rows`` of equal keys as aligned columns."""
    cells = [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    cells.insert(0, list(rows[0]))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)
    return "\n".join(lines)


def store(name: str, about: str, rows: list[dict], measured: dict, out: Path | None) -> Path:
    """Write the printed table, what it was made from, commit and machine; out/<name>.json unless told otherwise.

    ``about``: the benchmark's docstring; its first paragraph says what was measured. `report.py add` keeps the file.
    """
    import os
    import platform
    import shlex
    import sys

    import torch

    from run_record import cpu_name, git_state

    result = {
        "about": about.split("\n\n")[0].replace("\n", " "),
        "command": shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]),
        **git_state()[0],
        "machine": {"cpu": cpu_name(), "cores": os.cpu_count(), "python": platform.python_version(),
                    "torch": torch.__version__, "load": " ".join(f"{load:.1f}" for load in os.getloadavg())},
        "table": rows,
        "measured": measured,
    }  # fmt: skip
    path = out or ROOT / "out" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path
