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
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from vllm_ranks import PROMPTS, SEEDS, STALE, perturbed

import environment
import hf_config
from engines import vllm_engine, vllm_inside
from engines.torch_sampler import TorchSampler
from engines.vllm_engine import VllmEngine
from input_files import InputError
from weights_hf import fused_group

HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
MODELS = {
    "qwen3": ("qwen3_moe", HEADS),  # a dense layer in the middle
    # Biases, a shared expert, a tied head, and a vocabulary and widths that vLLM pads.
    "qwen2": ("qwen2_moe", HEADS | dict(hidden_size=128, vocab_size=131, moe_intermediate_size=40, mlp_only_layers=[],
                                        shared_expert_intermediate_size=56, tie_word_embeddings=True)),
    "qwen2_no_qkv_bias": ("qwen2_moe", HEADS | dict(hidden_size=128, qkv_bias=False)),
}  # fmt: skip
LONG = 4  # PROMPTS[LONG] has 322 tokens, more than two blocks of vLLM's prefix cache
FREE = dict(num_samples=2, max_new_tokens=12, temperature=1.0)
STOPS = {9}
LAYER_2 = "model.layers.2."
QKV = [f"{LAYER_2}self_attn.{letter}_proj.weight" for letter in "qkv"]
EXPERTS = [f"{LAYER_2}mlp.experts.{e}.{part}_proj.weight" for e in range(16) for part in ("gate", "up", "down")]


class Model:
    """The model of transformers and its tensors as saved. `changed` gives the model with other weights."""

    def __init__(self, path: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
        self.path, self.arch = path, hf_config.read(path)
        self.tensors = tensors or load_file(path / "model.safetensors")
        self.hf = reference.load(path)
        self.hf.set_experts_implementation("eager")

    def changed(self, tensors: dict[str, torch.Tensor], folder: Path) -> Model:
        folder.mkdir()
        shutil.copy(self.path / "config.json", folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return Model(folder, tensors)

    @torch.no_grad()
    def logp(self, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        logits = self.hf(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


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


def gaps(model: Model, answers, temperature: float = 1.0) -> torch.Tensor:
    return torch.cat([
        (model.logp(prompt, one.tokens, temperature) - torch.tensor(one.logp)).abs()
        for prompt, group in zip(PROMPTS, answers, strict=True)
        for one in group
    ])  # fmt: skip


def flat(answers) -> list[tuple]:
    return [(one.tokens, one.logp, one.finish_reason) for group in answers for one in group]


# ----------------------------------------------------------------------------------------------- against transformers


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
def test_logp_is_that_of_transformers_after_every_kind_of_push(fresh, tmp_path: Path, name: str) -> None:
    engine, model = fresh(name)
    answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert [len(group) for group in answers] == [2] * 5
    assert gaps(model, answers).max() <= 1e-5
    assert gaps(model, engine.sample(PROMPTS, seeds=SEEDS, **FREE | {"temperature": 0.7}), 0.7).max() <= 1e-5
    engine.load_weights(model.tensors.items())  # the same again
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == flat(answers)

    moved = perturbed(model.tensors)
    engine.load_weights(moved.items())
    after = model.changed(moved, tmp_path / "whole")
    answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert gaps(after, answers).max() <= 1e-5 and gaps(model, answers).max() > 1e-3

    # The tensors of a LoRA update with noisy norms, in whole groups whose tensors are mixed.
    groups = {fused_group(n) for n in moved if "_proj" in n or "layernorm" in n or ".mlp.gate." in n}
    part = {n: x for n, x in perturbed(moved, seed=1).items() if fused_group(n) in groups}
    assert 0 < len(part) < len(moved)
    engine.load_weights(reversed(part.items()))
    both = moved | part
    by_part = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert gaps(model.changed(both, tmp_path / "part"), by_part).max() <= 1e-5
    engine.load_weights(both.items())
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == flat(by_part)  # bit for bit what a full push gives


@pytest.mark.slow
@pytest.mark.vllm
def test_compiled_model_takes_every_push_too(models, engine_of, tmp_path: Path) -> None:
    """With enforce_eager false, weights that the compiler folded into its code would never change."""
    engine, model = engine_of("qwen3", kv_cache_mib=4, enforce_eager=False), models("qwen3")
    for push, tensors in enumerate((model.tensors, perturbed(model.tensors))):
        engine.load_weights(tensors.items())
        answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
        assert gaps(model.changed(tensors, tmp_path / str(push)), answers).max() <= 1e-5
    assert engine.layer_outputs(PROMPTS[0]) == [], "it runs as a graph: no hooks"


@pytest.mark.vllm
def test_bf16_stays_close_to_fp32(models, engine_of) -> None:
    engine = engine_of("qwen3", dtype=torch.bfloat16, kv_cache_mib=4)
    engine.load_weights(models("qwen3").tensors.items())
    gap = gaps(models("qwen3"), engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    assert 1e-4 < gap.mean() < 0.03 and gap.max() < 0.3
    with pytest.raises(InputError, match="made without routed_experts"):
        engine.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_generate(fresh, name: str) -> None:
    engine, model = fresh(name)
    answers = engine.sample(PROMPTS, seeds=SEEDS, num_samples=1, max_new_tokens=12, temperature=0, top_p=0.5, top_k=3)
    for prompt, (one,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        rule = dict(max_new_tokens=12, do_sample=False, eos_token_id=sorted(STOPS), pad_token_id=0)
        expected = model.hf.generate(ids, attention_mask=torch.ones_like(ids), **rule)
        assert one.tokens == expected[0, len(prompt) :].tolist()
    assert gaps(model, answers).max() <= 1e-5


@pytest.mark.vllm
def test_frequencies_are_the_models_probabilities(fresh) -> None:
    engine, model = fresh("qwen3")
    (group,) = engine.sample([PROMPTS[0]], seeds=[1], num_samples=4000, max_new_tokens=1, temperature=0.5)
    with torch.no_grad():
        expected = torch.softmax(model.hf(torch.tensor([PROMPTS[0]])).logits[0, -1].double() / 0.5, -1) * 4000
    counts = torch.bincount(torch.tensor([one.tokens[0] for one in group]), minlength=128).double()
    often = expected >= 10
    assert often.sum() > 5
    degrees = int(often.sum()) - 1  # Pearson's chi-square, at five standard deviations
    assert ((counts - expected)[often] ** 2 / expected[often]).sum() < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
def test_routed_experts_are_those_of_the_embedded_decoder_and_of_transformers(fresh, name: str) -> None:
    engine, model = fresh(name)
    embedded = TorchSampler(model.arch, stop_tokens=STOPS, pad_token=0)
    embedded.load_weights(model.tensors.items())
    for _ in range(2):  # the second time, the long prompt is in the prefix cache
        answers = engine.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
        for prompt, group in zip(PROMPTS, answers, strict=True):
            for one in group:
                text = prompt + one.tokens[:-1]  # the last token was never run
                settings = dict(seeds=[0], num_samples=1, max_new_tokens=1, temperature=0, return_routed_experts=True)
                ((same,),) = embedded.sample([text], **settings)
                assert one.routed_experts.dtype == np.uint8 and one.routed_experts.shape == same.routed_experts.shape
                assert (np.sort(one.routed_experts, -1) == np.sort(same.routed_experts, -1)).all()
                with torch.no_grad():
                    logits = model.hf(torch.tensor([text]), output_router_logits=True).router_logits
                expected = torch.stack([layer.view(len(text), -1).topk(4).indices for layer in logits], 1)
                assert (np.sort(one.routed_experts, -1) == expected.sort(-1).values.numpy()).all()


@pytest.mark.vllm
@pytest.mark.parametrize("name", MODELS)
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
    settings = FREE | {"num_samples": 8}
    engine.stop_tokens = []
    free = sum(engine.sample(PROMPTS, seeds=SEEDS, **settings), [])
    engine.stop_tokens = stops = [3, 17, 40, 77, 78, 101, 110, 127]
    cut = sum(engine.sample(PROMPTS, seeds=SEEDS, **settings), [])
    engine.stop_tokens = sorted(STOPS)
    for whole, one in zip(free, cut, strict=True):
        end = next((i + 1 for i, token in enumerate(whole.tokens) if token in stops), None)
        assert one.tokens == whole.tokens[:end] and one.logp == pytest.approx(whole.logp[:end], abs=1e-5)
        assert one.finish_reason == ("stop" if end else "length") and whole.finish_reason == "length"
    assert {one.finish_reason for one in cut} == {"stop", "length"}


@pytest.mark.vllm
def test_pushing_and_sampling_leave_the_global_generators_alone(fresh) -> None:
    engine, model = fresh("qwen3")
    before = randomness()
    engine.load_weights(model.tensors.items())
    engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert randomness() == before
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)


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
    (prompt, one), (short, other) = (PROMPTS[LONG], answers[LONG][0]), (PROMPTS[0], answers[0][0])
    assert (after.logp(prompt, one.tokens) - torch.tensor(one.logp)).abs().max() > 1e-3
    assert (after.logp(short, other.tokens) - torch.tensor(other.logp)).abs().max() < 1e-5  # too short for the cache
    engine.load_weights(moved.items())
    assert gaps(after, engine.sample(PROMPTS, seeds=SEEDS, **FREE)).max() <= 1e-5


@pytest.mark.vllm
def test_experts_that_are_not_packed_again_answer_wrongly(fresh, monkeypatch) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    engine, model = fresh("qwen3")
    expected = flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    with monkeypatch.context() as without:
        without.setattr(Method, "_setup_kernel", Method._setup_kernel.__wrapped__)
        engine.load_weights(model.tensors.items())
        assert gaps(model, engine.sample(PROMPTS, seeds=SEEDS, **FREE)).mean() > 0.01
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

    overflow_and_recover()
    with monkeypatch.context() as without:
        without.setattr(vllm_inside, "clear_caches", lambda worker: None)
        with pytest.raises((InputError, AssertionError)):
            overflow_and_recover()
    engine.llm.collective_rpc(vllm_inside.clear_caches)
    overflow_and_recover()


@pytest.mark.vllm
def test_push_holds_one_group_at_a_time(fresh) -> None:
    engine, model = fresh("qwen3")
    alive, peak = weakref.WeakSet(), 0

    def stream():
        nonlocal peak
        for name, tensor in model.tensors.items():
            copy = tensor.clone()
            alive.add(copy)
            peak = max(peak, len(alive))
            yield name, copy

    engine.load_weights(stream())
    sizes = {}
    for name in model.tensors:
        sizes[fused_group(name)] = sizes.get(fused_group(name), 0) + 1
    assert peak <= max(sizes.values()) + 8 < len(model.tensors) / 2


# --------------------------------------------------------------------------------------------------- bad pushes


def without(names: list[str]):
    return lambda tensors: {name: x for name, x in tensors.items() if name not in names}


def put(name: str, change):
    return lambda tensors: tensors | {name: change(tensors.get(name))}


BROKEN = {
    "one missing": (without([EXPERTS[5]]), f"{EXPERTS[5]} is missing .1 missing.*whole model"),
    "surplus": (put("model.layers.7.mlp.gate.weight", lambda _: torch.ones(1)), "layers.7.* is not a tensor of this"),
    "misshapen": (put(QKV[0], lambda x: x.t()), r"q_proj.weight: found torch.float32 \(64, 128\); needed"),
    "integers": (put(QKV[0], lambda x: x.int()), "q_proj.weight: found torch.int32"),
    "NaN": (put(EXPERTS[7], lambda x: x * math.nan), f"{EXPERTS[7]} has NaN or infinity .1 such"),
    "infinity": (put("lm_head.weight", lambda x: x / 0), "lm_head.weight has NaN or infinity"),
}
BROKEN_PARTS = {
    "no v": (QKV[:2], f"{QKV[2]} is missing .1 missing, 2 found.; needed: whole fused groups"),
    "no down": (
        [name for name in EXPERTS if "down" not in name],
        f"{LAYER_2}mlp.experts.0.down_proj.weight is missing .16 missing",
    ),
    "twice": ([*QKV, QKV[0]], f"{QKV[0]} came twice"),
}


@pytest.mark.vllm
@pytest.mark.parametrize("case", [*BROKEN, *BROKEN_PARTS, "stream breaks"])
def test_broken_push_names_the_tensor_and_asks_for_a_whole_one(fresh, case: str) -> None:
    engine, model = fresh("qwen3")
    expected = flat(engine.sample(PROMPTS[:2], seeds=SEEDS[:2], **FREE))
    moved, error = perturbed(model.tensors), InputError

    def breaking():
        yield QKV[0], moved[QKV[0]]
        raise OSError("connection lost")

    if case in BROKEN:
        change, message = BROKEN[case]
        engine.ready = False
        stream = change(moved).items()
    elif case in BROKEN_PARTS:
        names, message = BROKEN_PARTS[case]
        stream = ((name, moved[name]) for name in names)
    else:
        stream, error, message = breaking(), OSError, "connection lost"
    with pytest.raises(error, match=message):
        engine.load_weights(stream)
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
        (dict(prompts=[[]], seeds=[1]), "prompt 0 is empty"),
        (dict(prompts=[[1], [128]], seeds=[1, 2]), "prompt 1 has a token outside"),
        (dict(prompts=[[-1]], seeds=[1]), "prompt 0 has a token outside"),
        (dict(seeds=[1]), "5 prompts but 1 seeds"),
        (dict(max_new_tokens=39), "prompt 4 has 322 tokens.*exceeds the 360"),
        (dict(max_new_tokens=0), "max_new_tokens 0"),
        (dict(num_samples=0), "num_samples 0"),
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(temperature=0.001), "temperature 0.001; vLLM needs 0, or 0.01 to 2.0"),
        (dict(top_p=0.9), "top_p 0.9, top_k 0; vLLM needs 1 and 0"),
        (dict(top_k=5), "top_p 1.0, top_k 5"),
    ],
)
def test_bad_call_is_refused(fresh, change: dict, message: str) -> None:
    engine, _ = fresh("qwen3")
    call = dict(prompts=PROMPTS, seeds=SEEDS, **FREE) | change
    with pytest.raises(InputError, match=message):
        engine.sample(call.pop("prompts"), **call)


@pytest.mark.vllm
def test_no_prompts_no_answers(fresh) -> None:  # a replica may have no prompt in a small step
    assert fresh("qwen3")[0].sample([], seeds=[], **FREE) == []


@pytest.mark.vllm
def test_head_sizes_are_those_of_the_installed_kernel(fresh) -> None:
    fresh("qwen3")  # it imports vLLM in the right environment
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert tuple(CPUAttentionBackend.get_supported_head_sizes()) == vllm_engine.CPU_HEAD_DIMS


FITS = dict(device_type="cpu", ranks=4, tensor=2, dtype=torch.float32, max_tokens=360, kv_cache_mib=8)


@pytest.mark.parametrize(
    ("arch", "change", "message"),
    [
        ({}, {}, None),
        (dict(head_dim=24), {}, "head_dim 24; needed: 32, 64, 80.*or rollout.engine torch"),
        (dict(hidden_size=48), {}, "hidden_size 48; needed: a multiple of 32"),
        (dict(head_dim=24, hidden_size=48), dict(device_type="npu"), None),
        ({}, dict(tensor=3), "rollout.tensor: 3 does not divide 4 ranks; nearest: 2, 4"),
        ({}, dict(ranks=8, tensor=8), "rollout.tensor: 8 does not divide 4 attention heads; nearest: 4"),
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


def test_environment_that_overrides_the_cache_is_refused(models, monkeypatch) -> None:
    monkeypatch.setattr(vllm_engine, "_check_installed", lambda device_type: None)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    with pytest.raises(InputError, match="VLLM_CPU_KVCACHE_SPACE"):
        vllm_engine.check(models("qwen3").arch, **FITS)


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


def test_version_that_is_checked_is_the_one_that_is_pinned() -> None:
    pins = Path(__file__).parents[1] / "requirements" / "cpu-vllm.txt"
    assert f"\nvllm-cpu=={environment.VLLM_CPU} ;" in pins.read_text()


# --------------------------------------------------------------------------------------------------- two ranks


@pytest.mark.vllm
def test_two_replicas_and_one_of_two_ranks_sample_what_one_rank_samples(models, tmp_path: Path) -> None:
    """It runs under torchrun beside the shared memory of a killed run, and leaves no shared memory behind."""
    stale = [Path(STALE.format(rank=rank)) for rank in range(2)]
    stale = [path for path in stale if not path.exists()]
    for path in stale:
        path.touch()
    folders = [str(models(name).path) for name in MODELS]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=localhost"]
    command += ["--nproc_per_node=2", str(Path(__file__).parent / "support" / "vllm_ranks.py"), str(tmp_path), *folders]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=400)
    finally:
        for path in stale:
            path.unlink()
    assert ran.returncode == 0, ran.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert [answer["ranks"] for answer in ranks] == [2.0, 2.0]
    assert [answer["shared"] for answer in ranks] == [[], []]
    for i, name in enumerate(MODELS):
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
