"""vLLM as the sampler is compared with transformers on the finished text (teacher forcing), and with TorchSampler.

One world of one rank and one engine a model serve all tests here; two ranks run as vllm_ranks.py under torchrun.
Not covered: accelerators, a compiled engine (enforce_eager false), several nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import random
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from launched import launch
from lockstep_ranks import CALLS
from sampled import BAD_CALLS, Model, assert_frequencies, assert_greedy, assert_routes, assert_stops, flat
from scope import cases
from vllm_ranks import PROMPTS, SEEDS, STALE, perturbed

import environment
from engines import vllm_engine, vllm_inside
from engines.vllm_engine import VllmEngine
from input_files import InputError
from weights_hf import fused_group

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
MODELS = {
    "qwen3": ("qwen3_moe", HEADS),  # a dense layer in the middle
    # Biases, a shared expert, a tied head, and a vocabulary and widths that vLLM pads.
    "qwen2": ("qwen2_moe", HEADS | dict(hidden_size=128, vocab_size=131, moe_intermediate_size=40, mlp_only_layers=[],
                                        shared_expert_intermediate_size=56, tie_word_embeddings=True)),
    "olmoe": ("olmoe", HEADS | dict(hidden_size=128)),
    "qwen2_no_qkv_bias": ("qwen2_moe", HEADS | dict(hidden_size=128, qkv_bias=False)),
}  # fmt: skip
NAMES = cases(["qwen3", "qwen2", "olmoe"], ["qwen2_no_qkv_bias"])
LONG = 4  # PROMPTS[LONG] has 322 tokens, more than two blocks of vLLM's prefix cache
FREE = dict(num_samples=2, max_new_tokens=12, temperature=1.0)
STOPS = {9}
LAYER_2 = "model.layers.2."
QKV = [f"{LAYER_2}self_attn.{letter}_proj.weight" for letter in "qkv"]
SURPLUS = "model.layers.7.mlp.gate.weight"
EXPERTS = [f"{LAYER_2}mlp.experts.{e}.{part}_proj.weight" for e in range(16) for part in ("gate", "up", "down")]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    @functools.cache
    def get(name: str) -> Model:
        kind, changes = MODELS[name]
        return Model(reference.save(kind, tmp_path_factory.mktemp(name), **changes))

    return get


def randomness() -> tuple:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(), torch.set_num_threads


@pytest.fixture(scope="module")
def engine_of(models):
    """A function that makes each model's engine, without weights. World and environment are restored at the end."""
    environment = dict(os.environ)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    @functools.cache
    def get(name: str, **options) -> VllmEngine:
        model, before = models(name), randomness()
        engine = VllmEngine(model.arch, model.path, stop_tokens=STOPS, max_tokens=360, **options)
        assert randomness() == before
        return engine

    yield get
    from vllm.distributed.parallel_state import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()
    destroy_distributed_environment()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def fresh(models, engine_of):
    """A function that gives an engine with a model's weights and a small cache, and the model."""

    def get(name: str) -> tuple[VllmEngine, Model]:
        engine = engine_of(name, kv_cache_mib=4, routed_experts=True)
        engine.ready = False  # the next push must bring the whole model
        engine.load_weights(models(name).tensors.items())
        return engine, models(name)

    return get


# ----------------------------------------------------------------------------------------------- against transformers


@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_logp_is_that_of_transformers_after_every_kind_of_push(fresh, tmp_path: Path, name: str) -> None:
    engine, model = fresh(name)
    before = randomness()
    sample = functools.partial(engine.sample, PROMPTS, seeds=SEEDS, return_routed_experts=True)
    answers = sample(**FREE)
    assert [len(group) for group in answers] == [2] * 5
    assert model.gaps(PROMPTS, answers).max() <= 1e-5
    assert_routes(model, PROMPTS, answers)
    assert model.gaps(PROMPTS, sample(**FREE | {"temperature": 0.7}), 0.7).max() <= 1e-5
    engine.load_weights(model.tensors.items())  # the same again
    assert flat(sample(**FREE)) == flat(answers)

    moved = perturbed(model.tensors)
    engine.load_weights(moved.items())
    after = model.changed(moved, tmp_path / "whole")
    answers = sample(**FREE)
    assert after.gaps(PROMPTS, answers).max() <= 1e-5 and model.gaps(PROMPTS, answers).max() > 1e-3
    answers = sample(**FREE)  # now the long prompt is in the prefix cache
    assert_routes(after, PROMPTS, answers)

    # The tensors of a LoRA update with noisy norms, in whole groups whose tensors are mixed.
    groups = {fused_group(n) for n in moved if "_proj" in n or "layernorm" in n or ".mlp.gate." in n}
    part = {n: x for n, x in perturbed(moved, seed=1).items() if fused_group(n) in groups}
    assert 0 < len(part) < len(moved)
    engine.load_weights(reversed(part.items()))
    both = moved | part
    by_part = sample(**FREE)
    assert model.changed(both, tmp_path / "part").gaps(PROMPTS, by_part).max() <= 1e-5
    engine.load_weights(both.items())
    assert flat(sample(**FREE)) == flat(by_part)  # bit for bit what a full push gives
    assert randomness() == before
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.vllm
def test_compiled_model_takes_every_push_too(models, engine_of, tmp_path: Path) -> None:
    """With enforce_eager false, weights that the compiler folded into its code would never change."""
    engine, model = engine_of("qwen3", kv_cache_mib=4, enforce_eager=False), models("qwen3")
    for push, tensors in enumerate((model.tensors, perturbed(model.tensors))):
        engine.load_weights(tensors.items())
        answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
        assert model.changed(tensors, tmp_path / str(push)).gaps(PROMPTS, answers).max() <= 1e-5
    assert engine.layer_outputs(PROMPTS[0]) == [], "it runs as a graph: no hooks"


@pytest.mark.vllm
def test_bf16_stays_close_to_fp32(models, engine_of) -> None:
    engine = engine_of("qwen3", dtype=torch.bfloat16, kv_cache_mib=4)
    engine.load_weights(models("qwen3").tensors.items())
    gap = models("qwen3").gaps(PROMPTS, engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    assert 1e-4 < gap.mean() < 0.03 and gap.max() < 0.3
    with pytest.raises(InputError, match="made without routed_experts"):
        engine.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)


@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate(fresh, name: str) -> None:
    engine, model = fresh(name)
    assert_greedy(model, engine, PROMPTS, STOPS)


@pytest.mark.vllm
def test_frequencies_are_the_models_probabilities(fresh) -> None:
    engine, model = fresh("qwen3")
    (group,) = engine.sample([PROMPTS[0]], seeds=[1], num_samples=4000, max_new_tokens=1, temperature=0.5)
    assert_frequencies(group, model.next_probs(PROMPTS[0], 0.5))


@pytest.mark.vllm
@pytest.mark.parametrize("name", NAMES)
def test_layer_outputs_are_those_of_transformers_and_show_the_first_layer_that_differs(fresh, name: str) -> None:
    """The hidden states of transformers are before the first layer and after each; the final norm changes the last."""
    engine, model = fresh(name)
    prompt = PROMPTS[LONG]
    engine.sample([prompt], seeds=[0], num_samples=1, max_new_tokens=1, temperature=0)  # fills the prefix cache
    with torch.no_grad():
        expected = model.hf(torch.tensor([prompt]), output_hidden_states=True).hidden_states[1:]
    outputs = engine.layer_outputs(prompt)
    assert [output.shape for output in outputs] == [(322, model.arch.hidden_size)] * model.arch.num_layers
    for found, right in zip(outputs[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(found, right[0], rtol=1e-4, atol=1e-4)
    name = f"{LAYER_2}post_attention_layernorm.weight"
    engine.load_weights([(name, 1.5 * model.tensors[name])])
    apart = [not torch.equal(now, before) for now, before in zip(engine.layer_outputs(prompt), outputs, strict=True)]
    assert apart == [layer >= 2 for layer in range(model.arch.num_layers)]


# ------------------------------------------------------------------------------------------- what must not matter


@pytest.mark.vllm
def test_result_depends_on_the_seed_alone(fresh) -> None:
    engine, _ = fresh("qwen3")
    engine.beat = itertools.count().__next__
    together = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert engine.beat() >= FREE["max_new_tokens"]  # beat is called for every token
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == flat(together)
    backwards = engine.sample(PROMPTS[::-1], seeds=SEEDS[::-1], **FREE)[::-1]
    alone = [engine.sample([prompt], seeds=[seed], **FREE)[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    for answers in (backwards, alone):
        for one, other in zip(sum(answers, []), sum(together, []), strict=True):
            assert one.tokens == other.tokens and one.logp == pytest.approx(other.logp, abs=1e-5)
    others = engine.sample(PROMPTS, seeds=[seed + 1 for seed in SEEDS], **FREE)
    assert flat(others) != flat(together) and together[0][0].tokens != together[0][1].tokens


@pytest.mark.vllm
def test_rows_that_do_not_fit_the_cache_are_put_off_and_sampled_alike(fresh) -> None:
    # Each row needs a second block of 128 tokens. 4 MiB hold 21 blocks, so vLLM takes blocks away from some rows.
    engine, model = fresh("qwen3")
    prompts = [[(i + j) % 100 for j in range(124)] for i in range(20)]
    settings = dict(num_samples=1, max_new_tokens=12, temperature=1.0, return_routed_experts=True)
    crowded = engine.sample(prompts, seeds=list(range(20)), **settings)
    for i, prompt in enumerate(prompts):
        ((one,),) = engine.sample([prompt], seeds=[i], **settings)
        assert crowded[i][0].tokens == one.tokens
        assert crowded[i][0].logp == pytest.approx(one.logp, abs=1e-5)
        assert (crowded[i][0].routed_experts == one.routed_experts).all()


@pytest.mark.vllm
def test_stop_tokens_cut_what_would_have_been_sampled(fresh) -> None:
    engine, _ = fresh("qwen3")
    stops, answers = {3, 17, 40, 77, 78, 101, 110, 127}, []
    for engine.stop_tokens in ([], sorted(stops)):
        answers.append(engine.sample(PROMPTS, seeds=SEEDS, **FREE | {"num_samples": 8}))
    engine.stop_tokens = sorted(STOPS)
    assert_stops(*answers, stops)


# ------------------------------------------------------------------------------ what goes wrong without each safeguard


@pytest.mark.vllm
def test_prefix_cache_that_is_not_reset_answers_with_the_old_weights(fresh, monkeypatch, tmp_path: Path) -> None:
    engine, model = fresh("qwen3")
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

    engine, model = fresh("qwen3")
    expected = flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    with monkeypatch.context() as without:
        without.setattr(Method, "_setup_kernel", Method._setup_kernel.__wrapped__)
        engine.load_weights(model.tensors.items())
        assert model.gaps(PROMPTS, engine.sample(PROMPTS, seeds=SEEDS, **FREE)).mean() > 0.01
    engine.load_weights(model.tensors.items())
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == expected


@pytest.mark.vllm
def test_overflow_is_an_error_and_nothing_of_it_stays_in_the_caches(fresh, monkeypatch) -> None:
    engine, model = fresh("qwen3")
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
    engine, model = fresh("qwen3")
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


# --------------------------------------------------------------------------------------------------- bad pushes


BROKEN = {  # (the names of the tensors that come, their changes by name, the message)
    "one missing": ([name for name in EXPERTS if name != EXPERTS[5]], {}, f"{EXPERTS[5]} is missing .1 missing"),
    "no v": (QKV[:2], {}, f"{QKV[2]} is missing .1 missing, 2 found.; needed: whole fused groups"),
    "twice": ([*QKV, QKV[0]], {}, f"{QKV[0]} came twice"),
    "surplus": ([*QKV, SURPLUS], {}, f"{SURPLUS} is not a tensor of this"),
    "misshapen": (QKV, {QKV[0]: torch.t}, r"q_proj.weight: found torch.float32 \(64, 128\); needed"),
    "integers": (QKV, {QKV[0]: torch.Tensor.int}, "q_proj.weight: found torch.int32"),
    "NaN": (EXPERTS, {EXPERTS[7]: lambda x: x * math.nan}, f"{EXPERTS[7]} has NaN or infinity .1 such"),
}


@pytest.mark.vllm
@pytest.mark.parametrize("case", [*BROKEN, "stream breaks"])
def test_broken_push_names_the_tensor_and_asks_for_a_whole_one(fresh, case: str) -> None:
    engine, model = fresh("qwen3")
    expected = flat(engine.sample(PROMPTS[:2], seeds=SEEDS[:2], **FREE))
    moved = perturbed(model.tensors) | {SURPLUS: torch.ones(1)}
    names, changes, message = BROKEN.get(case, (QKV[:1], {}, "connection lost"))

    def stream():
        for name in names:
            yield name, changes.get(name, torch.clone)(moved[name])
        if case not in BROKEN:
            raise OSError("connection lost")

    with pytest.raises(InputError if case in BROKEN else OSError, match=message):
        engine.load_weights(stream())
    with pytest.raises(InputError, match="no usable weights"):
        engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    with pytest.raises(InputError, match="missing.*the whole model"):
        engine.load_weights((name, model.tensors[name]) for name in QKV)
    engine.load_weights(model.tensors.items())
    assert flat(engine.sample(PROMPTS[:2], seeds=SEEDS[:2], **FREE)) == expected


@pytest.mark.vllm
def test_biases_travel_with_their_weights(fresh) -> None:
    engine, model = fresh("qwen2")
    with pytest.raises(InputError, match="layers.2.self_attn.q_proj.bias is missing .3 missing, 3 found"):
        engine.load_weights((name, model.tensors[name]) for name in QKV)


# --------------------------------------------------------------------------------------------------- bad calls


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        *BAD_CALLS,
        (dict(max_new_tokens=39), "prompt 4 has 322 tokens.*exceeds the 360"),
        (dict(temperature=0.001), "temperature 0.001; vLLM needs 0, or 0.01 to 2.0"),
        (dict(top_p=0.9), "top_p 0.9, top_k 0; vLLM needs 1 and 0"),
    ],
)
def test_bad_call_is_refused(fresh, change: dict, message: str) -> None:
    engine, _ = fresh("qwen3")
    call = dict(prompts=PROMPTS, seeds=SEEDS, **FREE) | change
    with pytest.raises(InputError, match=message):
        engine.sample(call.pop("prompts"), **call)
    assert engine.sample([], seeds=[], **FREE) == []  # a replica may have no prompt in a small step


FITS = dict(device_type="cpu", ranks=4, tensor=2, dtype=torch.float32, max_tokens=360, kv_cache_mib=8)


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ({}, {}, None),
        (dict(head_dim=24), {}, "head_dim 24; needed: 32, 64, 80.*or rollout.engine torch"),
        ({}, dict(tensor=3), "rollout.tensor: 3 does not divide 4 ranks; nearest: 2, 4"),
        (dict(num_heads=6, num_kv_heads=3), dict(tensor=2), "rollout.tensor: 2 and 3 key/value heads"),
        (dict(moe_layers=(False,) * 3), {}, "qwen3_moe needs a MoE layer, .* none; needed: rollout.engine torch"),
        ({}, dict(kv_cache_mib=1, max_tokens=5000), "kv_cache_mib: 1 is too small for one row of 5000 .*needed: 4 for"),
    ],
)
def test_layout_that_cannot_run_is_refused_without_vllm(models, monkeypatch, arch, change, message) -> None:
    monkeypatch.setattr(vllm_engine, "_check_installed", lambda device_type: None)
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    changed = dataclasses.replace(models("qwen3").arch, **arch)
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        vllm_engine.check(changed, **FITS | change)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    with pytest.raises(InputError, match=message or "VLLM_CPU_KVCACHE_SPACE"):
        vllm_engine.check(changed, **FITS | change)


@pytest.mark.parametrize(
    ("spec", "version", "message"),
    [
        (None, None, "vllm is not installed; needed on a CPU: requirements/cpu-vllm.txt"),
        ("vllm", None, "not a CPU build; needed on a CPU: requirements/cpu-vllm.txt"),
        ("vllm", "0.32.0", "found vllm-cpu 0.32.0; needed on a CPU: requirements/cpu-vllm.txt"),
        ("vllm", environment.VLLM_CPU, None),
    ],
)
def test_absent_or_other_vllm_is_refused_by_the_list_that_has_it(monkeypatch, spec, version, message) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        vllm_engine._check_installed("cpu")


# --------------------------------------------------------------------------------------------------- two ranks


REPLICATED = cases(["qwen2"], ["qwen3", "qwen2_no_qkv_bias"])


@pytest.fixture(scope="module")
def two_ranks(models, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the output of two ranks that run vllm_ranks.py beside the shared memory of a killed run."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
                 num_key_value_heads=2, vocab_size=128, max_position_embeddings=64, rms_norm_eps=1e-6,
                 tie_word_embeddings=False)  # fmt: skip
    out, dense = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("dense")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(dense)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, mlp_only_layers=[0, 1])
    as_moe = sizes | experts | {"model_type": "qwen3_moe", "norm_topk_prob": True, "hidden_act": "silu"}
    (dense / "as_moe.json").write_text(json.dumps(as_moe))  # what our Architecture is read from
    stale = [Path(STALE.format(rank=rank)) for rank in range(2)]
    stale = [path for path in stale if not path.exists()]
    for path in stale:
        path.touch()
    script, folders = Path(__file__).parent / "support" / "vllm_ranks.py", [models(name).path for name in REPLICATED]
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


@pytest.mark.slow
@pytest.mark.vllm
def test_two_replicas_and_one_of_two_ranks_sample_what_one_rank_samples(models, two_ranks, tmp_path: Path) -> None:
    """It leaves no shared memory behind."""
    ranks = of_ranks(two_ranks[0], "{rank}.json")
    assert [answer["ranks"] for answer in ranks] == [2.0, 2.0]
    assert [answer["shared"] for answer in ranks] == [[], []]
    for i, name in enumerate(REPLICATED):
        moved = models(name).changed(perturbed(models(name).tensors), tmp_path / name)
        for j, model in enumerate((models(name), moved)):
            one, same = (rank["results"][4 * i + j] for rank in ranks)
            replicas = [rank["results"][4 * i + 2 + j] for rank in ranks]
            assert one == same  # both ranks of a replica hold all its answers
            split = [replicas[place % 2][place // 2] for place in range(len(PROMPTS))]
            for prompt, alone, shared in zip(PROMPTS, split, one, strict=True):
                for (tokens, logp, routes), (tokens_2, logp_2, routes_2) in zip(alone, shared, strict=True):
                    assert tokens == tokens_2 and np.array_equal(np.sort(routes), np.sort(routes_2))
                    expected = model.logp(prompt, tokens)
                    for found in (logp, logp_2):
                        assert (torch.tensor(found) - expected).abs().max() <= 1e-5


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
