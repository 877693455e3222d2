"""The roofline against figures that were worked out apart from it, for Qwen3-30B-A3B on 16 dies of a 910C server."""

from __future__ import annotations

import dataclasses

import pytest

import hf_config
import layout_plan
import memory_plan
import time_plan
from config import load_config
from time_plan import MACHINES

NPU = MACHINES["npu"]  # 376 TFLOP/s, 1.6 TB/s, 196 GB/s
QWEN3 = hf_config.planned(load_config("configs/qwen3.yaml"))[0]


def planned(*overrides: str, ranks: int = 16, machine=NPU, prompt: float = 120, completion: float = 256):
    cfg = load_config("configs/qwen3.yaml", list(overrides))
    layout = layout_plan.of(cfg, ranks)
    memory = memory_plan.plan(cfg, QWEN3, layout, "npu", 61 * 2**30)
    return time_plan.plan(cfg, QWEN3, layout, machine, memory, prompt, completion), cfg, memory


def test_a_token_meets_3_billion_parameters():
    assert time_plan.active_parameters(QWEN3) == pytest.approx(3.04e9, rel=0.002)


@pytest.mark.parametrize(
    ("prompt", "completion", "step_ms", "rollout_seconds"), [(120, 256, 5.3, 1.4), (1024, 1024, 9.1, 9.3)]
)
def test_decode_step_with_the_experts_over_16_dies(prompt, completion, step_ms, rollout_seconds):
    """768 sequences in one wave; attention on each die by itself, experts spread over all of them."""
    step = time_plan.decode_step(
        QWEN3, NPU, ranks=16, tensor=1, expert=16, sequences=768, context=prompt + completion / 2, element=2
    )
    assert step["total"] * 1e3 == pytest.approx(step_ms, rel=0.02)
    assert step["total"] * completion == pytest.approx(rollout_seconds, abs=0.05)
    assert {name: round(seconds * 1e3, 2) for name, seconds in step.items()} | {"cache": 0, "total": 0} == {
        "weights": 3.80, "cache": 0, "arithmetic": 0.78, "exchange": 0.77, "total": 0
    }  # fmt: skip


@pytest.mark.parametrize(("prompt", "completion", "seconds"), [(120, 256, 6), (1024, 1024, 36)])
def test_update_with_recompute_and_reference_pass(prompt, completion, seconds):
    """At 20 % of the peak: three forward passes' worth and one, exchange left out."""
    unlinked = dataclasses.replace(NPU, link=1e18)
    times, _, _ = planned("optim.prompts_per_update=96", machine=unlinked, prompt=prompt, completion=completion)
    phases = times.phases
    assert phases["update forward"] + phases["update backward"] + phases["reference"] == pytest.approx(
        seconds, rel=0.02
    )
    assert phases["old policy"] == 0


def test_experts_exchange_as_worked_out_for_four_passes():
    """2.17 s for EP16 in the short case; attention unsplit."""
    cfg = load_config("configs/qwen3.yaml", ["parallel.tensor=1", "rollout.expert_parallel=false"])
    layout = layout_plan.of(cfg, 16)
    assert 4 * time_plan.exchange_seconds(QWEN3, NPU, layout, 768 * 376, 2) == pytest.approx(2.17, rel=0.01)


def test_more_work_takes_longer_and_more_ranks_do_not():
    base, _, _ = planned()
    assert planned(completion=512)[0].total > base.total
    assert planned("rollout.group_size=16")[0].total > base.total
    assert planned(ranks=32)[0].total < base.total
    assert planned("loss.kl=none")[0].phases["reference"] == 0
    assert planned("optim.prompts_per_update=48")[0].phases["old policy"] > 0
    assert planned("model.recompute=false")[0].phases["update backward"] < base.phases["update backward"]


def test_a_small_cache_takes_waves_and_is_named_as_the_cause():
    times, cfg, memory = planned("rollout.kv_cache_mib=512", completion=1024)
    assert times.waves > 1 and times.phases["decode"] > planned(completion=1024)[0].phases["decode"]
    assert times.bottleneck == "decode" and "rollout.kv_cache_mib" in time_plan.advice(cfg, times, memory)


def test_decoding_that_waits_for_launches_says_so():
    times, cfg, memory = planned("rollout.enforce_eager=true")
    assert times.launch_bound and times.decode["total"] < NPU.decode_step_seconds
    assert times.phases["decode"] == pytest.approx(256 * NPU.decode_step_seconds)
    forced = dataclasses.replace(times, phases={"decode": 1.0})
    assert "rollout.enforce_eager=false" in time_plan.advice(cfg, forced, memory)
