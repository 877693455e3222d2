"""What tests of prompts share: a tiny tokenizer in a model's folder, a section of data, and files of questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import data_gsm8k
from knobs import DataConfig
from tiny_model import build_tokenizer


def make_model_dir(folder: Path) -> Path:
    """A model's folder without weights: a tokenizer whose chat template is ChatML, and config.json."""
    pairs = data_gsm8k.arithmetic(1500, heldout=False, seed=1, low=1, high=49)
    build_tokenizer((f"user\n{question}\nassistant\n{answer}" for question, answer in pairs), 400, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    return folder


def data(**keys: Any) -> DataConfig:
    """The section data; the questions are generated unless ``keys`` says otherwise."""
    return DataConfig(**{"source": "arithmetic", **keys})


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
