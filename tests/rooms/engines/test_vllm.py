"""vLLM as an engine, and its adapters."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import re
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import adapted
import numpy as np
import published
import pytest
import reference
import torch
import training
import world
from launched import launch
from lockstep_ranks import CALLS
from refused import refusal
from safetensors.torch import load_file, save_file
from sampled import DENSE, FREE, Model, assert_alike, flat
from source import ROOT
from tiers import asked, nightly
from vllm_ranks import PROMPTS, SEEDS, STALE, perturbed

import aqn
from engines import vllm_adapter, vllm_engine, vllm_inside, vllm_setup
from engines.interface import Completion
from engines.vllm_engine import VllmEngine
from facts import variables
from facts.architectures import tensor_shapes
from facts.exits import InputError
from hardware import device as devices
from inputs import hf_config
from inputs.config import load_config
from knobs import LoraConfig
from parallel_setup import Parallel
from run import check
from tasks.scoring import Scorer
from weight_sync import Push
from weights import huggingface
from weights.huggingface import fused_group
from weights.policy import Policy

# ----------------------------------------------------------------------------------------------------------------- vLLM
# vLLM as the sampler: its caches, its layouts and its packages. test_engines.py has what holds for every engine.
#
# One world of one rank serves all tests here; two ranks run as vllm_ranks.py under torchrun.
# Not covered: accelerators, several nodes.

pytestmark = pytest.mark.xdist_group("vllm")  # the files that import vLLM share a process
LONG = 4  # PROMPTS[LONG] has 322 tokens, more than two blocks of vLLM's prefix cache


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
def test_rows_that_do_not_fit_the_cache_are_put_off_and_sampled_alike(fresh) -> None:
    # Each row needs a second block of 128 tokens. 4 MiB hold 21 blocks, so vLLM takes blocks away from some rows.
    engine, _ = fresh
    prompts = [[(i + j) % 100 for j in range(124)] for i in range(20)]
    settings = dict(num_samples=1, max_new_tokens=12, temperature=1.0, return_routed_experts=True)
    crowded = engine.sample(prompts, seeds=list(range(20)), **settings)
    alone = [engine.sample([prompt], seeds=[i], **settings)[0] for i, prompt in enumerate(prompts)]
    assert_alike(crowded, alone)
    for (one,), (other,) in zip(crowded, alone, strict=True):
        assert (one.routed_experts == other.routed_experts).all()


# ------------------------------------------------------------------------------ what goes wrong without each safeguard


@pytest.mark.vllm
def test_prefix_cache_that_is_not_reset_answers_with_the_old_weights(fresh, monkeypatch, tmp_path: Path) -> None:
    engine, model = fresh
    engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    moved = perturbed(model.tensors)
    after = model.changed(moved, tmp_path / "moved")
    with monkeypatch.context() as without:
        without.setattr(engine.llm, "reset_prefix_cache", lambda: True)
        engine.load_weights(moved.items())
        answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert after.gaps([PROMPTS[LONG]], [answers[LONG]]).max() > 1e-3
    assert after.gaps([PROMPTS[0]], [answers[0]]).max() < 1e-5  # too short for the cache


@pytest.mark.vllm
def test_experts_that_are_not_packed_again_answer_wrongly(fresh, monkeypatch) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    engine, model = fresh
    expected = flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    with monkeypatch.context() as without:
        without.setattr(Method, "_setup_kernel", Method._setup_kernel.__wrapped__)
        engine.load_weights(model.tensors.items())
        assert model.gaps(PROMPTS, engine.sample(PROMPTS, seeds=SEEDS, **FREE)).mean() > 0.01
    engine.load_weights(model.tensors.items())
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == expected


@pytest.mark.vllm
def test_overflow_is_an_error_and_nothing_of_it_stays_in_the_caches(fresh, monkeypatch) -> None:
    engine, model = fresh
    expected = flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    huge = {"model.layers.0.input_layernorm.weight": torch.full((64,), 3.4e38)}

    def overflow_and_recover() -> None:
        engine.load_weights(huge.items())
        with pytest.raises(InputError, match="not finite"):
            engine.sample(PROMPTS, seeds=SEEDS, **FREE)
        engine.load_weights(model.tensors.items())
        assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == expected

    with monkeypatch.context() as without:  # the control
        without.setattr(vllm_inside, "clear_caches", lambda worker: None)
        with pytest.raises((InputError, AssertionError)):
            overflow_and_recover()
    engine.llm.collective_rpc(vllm_inside.clear_caches)
    overflow_and_recover()


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


@pytest.mark.vllm
def test_what_this_engine_cannot_sample_is_refused(fresh, monkeypatch) -> None:
    engine, _ = fresh
    monkeypatch.setattr(engine, "routed_experts", False)
    for change, message in (
        (dict(temperature=0.001), "temperature 0.001; vLLM needs 0, or 0.01 to 2.0"),
        (dict(return_routed_experts=True), "made without routed_experts"),
    ):
        with pytest.raises(InputError, match=message):
            engine.sample(PROMPTS, seeds=SEEDS, **FREE | change)


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ({}, {}, None),
        (dict(head_dim=24), {}, "head_dim 24; needed: 32, 64, 80.*or rollout.engine torch"),
        ({}, dict(tensor=3), "rollout.tensor: 3 does not divide 4 ranks; nearest: 2, 4"),
        (dict(num_heads=6, num_kv_heads=3), dict(tensor=2), "rollout.tensor: 2 and 3 key/value heads"),
        (dict(moe_layers=(False,) * 3), {}, "qwen3_moe needs a MoE layer, .* none; needed: rollout.engine torch"),
        (
            {},
            dict(kv_cache_mib=1, max_new_tokens=4936),
            "kv_cache_mib: 1 is too small for one row of 5000 .*needed: 4 for",
        ),
    ],
)
def test_layout_that_cannot_run_is_refused_without_vllm(sampled_models, monkeypatch, arch, change, message) -> None:
    monkeypatch.setattr(vllm_engine, "check_installed", lambda device_type: None)
    changed = dataclasses.replace(sampled_models("qwen3").arch, **arch)
    sizes = {"tensor": 2, "max_new_tokens": 296, "kv_cache_mib": 8} | change
    overrides = [f"rollout.{key}={value}" for key, value in sizes.items()]
    cfg = load_config(
        ROOT / "configs" / "tiny_cpu.yaml",
        ["rollout.engine=vllm", "data.max_prompt_tokens=64", "optim.tokens_per_micro_batch=8192", *overrides],
    )
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        vllm_setup.check(cfg, changed, 4)


@pytest.mark.parametrize(
    ("spec", "version", "message"),
    [
        (None, None, "vllm is not installed; needed on a CPU: requirements/cpu-vllm.txt"),
        ("vllm", None, "not a CPU build; needed on a CPU: requirements/cpu-vllm.txt"),
        ("vllm", "0.32.0", "found vllm-cpu 0.32.0; needed on a CPU: requirements/cpu-vllm.txt"),
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


@pytest.mark.parametrize(
    ("version", "runner", "message"),
    [
        ("0.23.0+empty", "0", None),
        ("0.30.0+empty", "0", "replay.mode: r3, but .* its Model Runner V2 only, .*; needed: r2, vllm-ascend 0.23, or"),
        ("0.30.0+empty", "1", None),
    ],
)
def test_recorded_routes_on_an_npu_need_a_version_or_a_runner_that_records_them(
    monkeypatch, version, runner, message
) -> None:
    monkeypatch.setattr(vllm_engine, "check_installed", lambda device_type: None)
    monkeypatch.setattr(devices, "resolve", lambda device: SimpleNamespace(type="npu"))
    monkeypatch.setattr(importlib.metadata, "version", {"vllm": version}.get)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    arch = hf_config.parse(published.QWEN3_30B_A3B)
    for mode, refused in (("r3", message), ("r2", None)):
        cfg = load_config(ROOT / "configs" / "qwen3.yaml", [f"replay.mode={mode}"])
        with pytest.raises(InputError, match=refused) if refused else contextlib.nullcontext():
            vllm_setup.check(cfg, arch, 16)


# --------------------------------------------------------------------------------------------------- two ranks


REPLICATED = asked(["qwen2", nightly("qwen3"), nightly("qwen2_no_qkv_bias")])


@pytest.fixture(scope="module")
def two_ranks(sampled_models, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of two ranks that run vllm_ranks.py beside the shared memory of a killed run."""
    out = tmp_path_factory.mktemp("ranks")
    dense = reference.save("qwen2_moe", tmp_path_factory.mktemp("dense"), **DENSE)
    stale = [Path(STALE.format(rank=rank)) for rank in range(2)]
    stale = [path for path in stale if not path.exists()]
    for path in stale:
        path.touch()
    script, folders = (
        Path(__file__).parents[2] / "support" / "vllm_ranks.py",
        [sampled_models(name).path for name in REPLICATED],
    )
    try:
        with launch(2, str(script), out, dense, *folders, log=out / "log") as ran:
            assert ran.wait(400) != 0, "its end is a failure of rank 1"
    finally:
        for path in stale:
            path.unlink()
    return out, ran.text


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


# ------------------------------------------------------------------------------------------------------ vLLM's adapters
# rollout.sync adapter: vLLM samples the policy from base weights and LoRA factors, after every kind of push.
#
# The references: transformers with the merged weights, and the trainer. On a CPU vLLM runs models that are all dense;
# that the factors of MoE models are right is shown by test_one_policy.py. Not covered: adapters on a GPU.

ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
RANK, ALPHA = 4, 6.5  # vLLM makes room for rank 8; alpha / rank is no power of two
NOISE = {"aqn__schedule": "constant", "aqn__sigma_start": 0.05, "aqn__targets": ("attention", "mlp")}
ADAPTER = {"rollout__engine": "vllm", "rollout__sync": "adapter", "lora__targets": ALL}


def config(path: Path, **changes):
    return training.config(path, path, **ADAPTER, lora__rank=RANK, lora__alpha=ALPHA, **changes)


# ------------------------------------------------------------------------------------------------ what vLLM samples


def follow(parallel: Parallel, path: Path) -> dict:
    """The pushes of a run, clean and with noise: the largest log-prob gap to transformers with the intended policy."""
    merged = Model(path)
    model, arch = adapted.load(path, parallel)
    policy = Policy(config(path), arch, parallel, model)
    engine = VllmEngine(arch, path, stop_tokens={9}, max_tokens=360, kv_cache_mib=8, adapter=config(path).lora)

    def sampled() -> list[list[Completion]]:
        return engine.sample(PROMPTS, seeds=SEEDS, **FREE)

    def gap(answers: list[list[Completion]], **changed) -> float:
        merged.hf.load_state_dict(dict(huggingface.export(model, arch, parallel)) | changed)
        return merged.gaps(PROMPTS, answers).max().item()

    answer = {}
    for label, changes in (("off", {}), ("noise", NOISE)):
        cfg = config(path, **changes)
        adapted.move(policy.adapters, arch, parallel, step=7)  # as in a resumed run
        push = Push(adapted.placed(cfg, parallel), policy, engine)
        found = answer[label] = {"resumed": gap(sampled()), "pushes": [], "steps": [], "clean": []}
        seen = {}
        for step in (0, 1, 0):  # the third policy is the first again
            adapted.move(policy.adapters, arch, parallel, step)
            found["stale"] = gap(sampled())
            found["pushes"].append(push(step, PROMPTS[0]))
            noisy = {}
            if changes:
                targets = aqn.norm_targets(arch, cfg.aqn.targets)
                norms = aqn.clean_norms(huggingface.export(model, arch, parallel), targets)
                stream = huggingface.export(model, arch, parallel, only=targets)
                noisy = dict(aqn.perturb(stream, norms, sigma=0.05, seed=0, step=step))
            answers = sampled()
            found["steps"].append(gap(answers, **noisy))
            push(step, PROMPTS[0])
            assert answers == sampled(), "twice is once"
            assert seen.setdefault(step, answers) == answers, "the first policy again is what it was"
            push.clean()
            found["clean"].append(gap(sampled()))
        engine.ready = False  # the next gets a whole model
    engine.close()
    return answer


@pytest.mark.vllm
@pytest.mark.slow
def test_logp_after_every_push_is_that_of_transformers_with_merged_weights_and_the_noise(
    vllm_imported, tmp_path: Path
) -> None:
    path = reference.save("qwen2_moe", tmp_path, **DENSE)
    assert not any(hf_config.read(path).moe_layers)
    for label, found in world.in_layouts(["TP1"], follow, path)["TP1"][0].items():
        assert max(found["resumed"], *found["steps"], *found["clean"]) <= 1e-5
        assert found["stale"] > 1e-3, "control: before the push the gap is large"
        sums = [push["sync/checksum"] for push in found["pushes"]]
        assert sums[0] == sums[2] != sums[1]
        for push in found["pushes"]:
            assert push.get("aqn/probe_gap", 0) <= 1e-5  # Megatron with unmerged adapters against vLLM
            assert (push.get("aqn/probe_shift", 0) > 1e-3) == (label == "noise")


def make_dense(folder: Path) -> Path:
    """A tiny model of training.make_model without its experts: random dense layers in their place."""
    sizes = dict(num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=128)
    training.make_model(folder, "qwen2_moe", **sizes)
    about = json.loads((folder / "config.json").read_text()) | {"mlp_only_layers": [0, 1], "intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps(about))
    old, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    shapes = tensor_shapes(hf_config.read(folder))
    new = {name: old.get(name, 0.08 * torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.ci
@pytest.mark.vllm
@pytest.mark.slow
def test_a_run_samples_and_evaluates_as_with_merged_weights(vllm_imported, tmp_path: Path) -> None:
    """With the same questions, seeds and tripwires, log-probs, answers and updates agree up to rounding."""
    model = make_dense(tmp_path / "model")
    shared = dict(lora__rank=RANK, lora__alpha=ALPHA, eval__every=1, **NOISE | {"aqn__schedule": "qerl"})
    shared |= {"aqn__num_stages": 3}
    cfgs = {
        sync: training.config(model, tmp_path / sync, **ADAPTER | {"rollout__sync": sync}, **shared)
        for sync in ("adapter", "merged")
    }
    training.in_world("TP1", training.train_each, [("TP1", cfg) for cfg in cfgs.values()])
    runs = {sync: training.only_run(cfg) for sync, cfg in cfgs.items()}
    rows, merged_rows = (training.metrics(runs[sync]) for sync in cfgs)
    assert rows[0]["rollout/logp_gap_mean"] < 1e-5 and rows[0]["aqn/sigma"] == 0
    for row, other in zip(rows[1:], merged_rows[1:], strict=True):
        assert row["aqn/probe_gap"] < 1e-5 < 1e-4 < row["aqn/probe_shift"]
        assert row["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-3)
    evaluations = [(runs[sync] / "eval_outcomes.jsonl").read_text() for sync in cfgs]
    assert evaluations[0] == evaluations[1] and len(set(evaluations[0].splitlines())) > 9


# ------------------------------------------------------------------------------------------------------ refusals


LORA = LoraConfig(targets=ALL, rank=RANK, alpha=ALPHA)
ARCH = hf_config.parse(published.QWEN3_30B_A3B)
DENSE_ARCH = dataclasses.replace(hf_config.parse(published.QWEN15_MOE), moe_layers=(False,) * 24)


@pytest.mark.parametrize(
    ("arch", "device_type", "dtype", "targets", "version", "message"),
    [
        (ARCH, "cpu", "fp32", ALL[:1], "", "MoE layers by Triton kernels, which do not run on a CPU"),
        (DENSE_ARCH, "npu", "bf16", ALL, "0.23.0+empty", "vllm-ascend before 0.30 takes none beside shared"),
        (ARCH, "npu", "bf16", ALL, "0.30.0+empty", None),
        (ARCH, "npu", "fp32", ALL, "0.30.0+empty", "no fp32 on a GPU or an NPU"),
        (ARCH, "npu", "bf16", ALL[:3], "0.30.0+empty", "all three matrices of an expert or none"),
        (ARCH, "cuda", "bf16", ALL[:2], "0.31.1+cu130", None),
        (ARCH, "cuda", "bf16", ALL, "0.23.0", "vLLM 0.23.0 may ignore weights that are pushed"),
        (ARCH, "cuda", "fp32", ALL, "0.30.0", "no fp32 on a GPU"),
        (ARCH, "cuda", "bf16", ALL[:3], "0.30.0", "all three matrices of an expert or none"),
    ],
)
def test_what_vllm_cannot_take_is_refused_without_it(
    arch, device_type, dtype, targets, version, message, monkeypatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    monkeypatch.setattr(devices, "resolve", lambda name: SimpleNamespace(type=device_type))
    monkeypatch.setattr(vllm_engine, "check_installed", lambda device: None)
    overrides = [f"model.dtype={dtype}", f"lora.targets=[{', '.join(targets)}]", "rollout.sync=adapter"]
    more = ["rollout.expert_parallel=false", "replay.mode=r2"]
    cfg = load_config("configs/qwen3.yaml", [*overrides, *more])
    refused = pytest.raises(InputError, match=f"^rollout.sync: adapter: .*{message}.*; needed: merged$")
    with refused if message else contextlib.nullcontext():
        vllm_setup.check(cfg, arch, 16)


def test_it_is_refused_before_any_weight_is_read(tmp_path: Path, monkeypatch) -> None:
    path = reference.save("qwen3_moe", tmp_path, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    (path / "model.safetensors").unlink()
    monkeypatch.setattr("engines.vllm_engine.check_installed", lambda device_type: None)
    with pytest.raises(InputError, match="rollout.sync: adapter: vLLM adapts models with MoE layers by Triton"):
        check.check_inputs(cfg := config(path), 1, Scorer(cfg.reward))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.targets=[linear_qkv, router]"], "lora.targets: router cannot go with rollout.sync adapter; needed"),
        (["lora.rank=513", "lora.expert_rank=0"], "lora.rank: 513 is more than vLLM accepts .*needed: at most 512"),
    ],
)
def test_what_no_device_can_take_is_refused_by_its_key(overrides: list[str], message: str) -> None:
    found = refusal(ROOT / "configs" / "tiny_cpu.yaml", "rollout.engine=vllm", "rollout.sync=adapter", *overrides)
    assert re.search(message, found), found


WEIGHT = "model.layers.0.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("name", "a", "b", "message"),
    [
        ("model.norm.weight", torch.ones(RANK, 8), torch.ones(8, RANK), "model.norm.weight is not a matrix"),
        (WEIGHT, torch.ones(2, 6), torch.ones(8, 2), r"A of .*o_proj.weight: found \(2, 6\); needed: \(4, 6\)"),
        (WEIGHT, torch.ones(RANK, 6), torch.ones(7, RANK), r"B of .*found \(7, 4\); needed: \(8, 4\)"),
        (WEIGHT, torch.ones(RANK, 6), torch.full((8, RANK), torch.nan), "B of .*o_proj.weight has NaN or infinity"),
    ],
)
def test_broken_factors_are_refused_and_those_before_stay(name, a, b, message) -> None:
    adapter = vllm_adapter.Adapter(LORA, {WEIGHT: (8, 6), "model.norm.weight": (8,)}, torch.float32)
    with pytest.raises(InputError, match="sample: no adapter"):
        adapter.request()
    taken = torch.zeros(RANK, 6)
    adapter.take({WEIGHT: (taken, torch.zeros(8, RANK))})
    taken += 1  # the trainer's tensor changes, the copy does not
    with pytest.raises(InputError, match=message):
        adapter.take({name: (a, b)})
    assert all(tensor.sum() == 0 for tensor in adapter.tensors.values())
