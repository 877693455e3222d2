"""The speed of a step: its operations are those worked out by hand, and its unit is a device."""

from __future__ import annotations

import pytest

from inputs import hf_config
from inputs.config import load_config
from knobs import Config
from plan import utilisation

APART = ["rollout.sync=adapter", "rollout.expert_parallel=false"]  # no weights are merged
CONFIG = ("configs/qwen3.yaml", ["optim.prompts_per_update=96", *APART])
CFG = load_config(*CONFIG)
QWEN3 = hf_config.planned(CFG.model.path, CFG.tiny_model, CFG.row_tokens)[0]
ROWS = [(0, 100, 50), (0, 100, 350), (1, 60, 20), (1, 60, 180)]  # group, prompt, completion
NEW = 600  # tokens of the completions of ROWS
TIMING = {"timing/generate_s": 4.0, "timing/update_s": 5.0, "timing/step_s": 10.0}


def by_hand(rows: list[tuple[int, int, int]], layers: float, attention: float, heads: float, low_rank: float) -> float:
    """Operations in so many passes of each part. 3.04e9 parameters are active, with the head's 151,936 x 2,048; a token
    meets 99 M numbers of the factors. A prompt counts once a group, and only completions reach the head."""
    prompts = dict((group, prompt) for group, prompt, _ in rows)
    tokens, completions = sum(prompts.values()) + sum(c for *_, c in rows), sum(c for *_, c in rows)
    pairs = sum(prompt**2 / 2 for prompt in prompts.values()) + sum(c * (p + c) for _, p, c in rows)
    head, factors = 151_936 * 2048, 48 * (32 * (7168 + 6144) + 8 * 32 * 6400)
    parts = (layers * (3.0406e9 - head) * tokens, heads * head * completions, low_rank * factors * tokens)
    return 2 * sum(parts) + attention * 48 * 4 * 32 * 128 * pairs


def operations(cfg: Config, sampled: list[tuple[int, int, int]], trained: list[tuple[int, int, int]]) -> float:
    return utilisation.step_flops(
        QWEN3,
        cfg.lora,
        sampled,
        trained,
        merged=cfg.trains_merged,
        earlier_passes=cfg.earlier_passes,
        reference=cfg.loss.kl != "none",
    )


def test_operations_of_a_step_without_recompute_and_of_the_rows_that_trained() -> None:
    """Sampling is a pass, and so is the reference; an update has 1 + 1 of the layers, 1 + 2.5 of attention, 1 + 2 of
    the head, and 1 + 2 of the factors. Of two updates the old policy scores the rows of the second one."""
    once = by_hand(ROWS, 1, 1, 1, 0)
    assert operations(CFG, ROWS, ROWS) == pytest.approx(once + by_hand(ROWS, 3, 4.5, 4, 3), rel=2e-3)
    some = once + by_hand(ROWS[1:], 3, 4.5, 4, 3)
    assert operations(CFG, ROWS, ROWS[1:]) == pytest.approx(some, rel=2e-3)
    assert operations(CFG, ROWS, []) == pytest.approx(once, rel=2e-3)
    two = load_config(CONFIG[0], ["optim.prompts_per_update=48", *APART, "loss.kl=none"])
    found = operations(two, ROWS, ROWS)
    assert found == pytest.approx(once + by_hand(ROWS, 2.5, 4, 3.5, 3.5), rel=2e-3)


def test_tokens_a_second_are_of_one_device_and_the_mfu_of_its_peak() -> None:
    found = utilisation.speed(CFG, QWEN3, ROWS, ROWS[2:], TIMING, 4, 1e12, NEW)
    assert found["perf/generate_tokens_per_s_device"] == 600 / 4.0 / 4
    assert found["perf/train_tokens_per_s_device"] == (80 + 240) / 5.0 / 4
    flops = operations(CFG, ROWS, ROWS[2:])
    assert found["perf/mfu"] == pytest.approx(flops / (10.0 * 1e12 * 4), rel=1e-3)
    assert "perf/mfu" not in utilisation.speed(CFG, QWEN3, ROWS, [], TIMING, 4, None, NEW)


def test_the_peak_is_known_for_the_devices_of_the_data_sheets_in_bf16_alone() -> None:
    for kind, name, peak in (
        ("npu", "Ascend910_9392", 376e12),
        ("npu", "Ascend910B1", None),
        ("cuda", "NVIDIA H100 80GB HBM3", 989e12),
        ("cuda", "NVIDIA H100 PCIe", None),
        ("cuda", "NVIDIA H200", 989e12),
        ("cuda", "NVIDIA H200 NVL", None),
        ("cpu", "cpu", None),
    ):
        assert utilisation.peak_flops(kind, name, "bf16") == peak
        assert utilisation.peak_flops(kind, name, "fp32") is None
