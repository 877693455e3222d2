"""What holds for every engine: its samples against transformers on the finished text (teacher forcing), its weights.

Another engine is a line of ENGINES. What is special to an engine is in test_rollout_torch.py and test_rollout_vllm.py.
Not covered: agreement with the Megatron model, accelerators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from sampled import FREE, Model, assert_alike, assert_frequencies, assert_routes, flat, randomness
from tiers import ci
from vllm_ranks import PROMPTS, SEEDS, perturbed

from engines.torch_sampler import TorchSampler
from engines.vllm_engine import VllmEngine
from facts.exits import InputError
from weights.huggingface import fused_group

pytestmark = pytest.mark.xdist_group("vllm")  # the files that import vLLM share a process
NAMES = ["qwen3", "qwen2", "olmoe", ci("qwen2_no_qkv_bias")]
LONG = PROMPTS[4]  # 322 tokens
LAYER_2 = "model.layers.2."
QKV = [f"{LAYER_2}self_attn.{letter}_proj.weight" for letter in "qkv"]
SURPLUS = "model.layers.7.mlp.gate.weight"
EXPERTS = [f"{LAYER_2}mlp.experts.{e}.{part}_proj.weight" for e in range(16) for part in ("gate", "up", "down")]


def torch_of(_, model: Model, stops: Iterable[int], **options) -> TorchSampler:
    engine = TorchSampler(model.arch, stop_tokens=set(stops), pad_token=0, **options)
    engine.load_weights(model.tensors.items())
    return engine


def vllm_of(request, model: Model, stops: Iterable[int], **options) -> VllmEngine:
    return request.getfixturevalue("vllm_of")(model, stops, **options)


ENGINES = [pytest.param(torch_of, id="torch"), pytest.param(vllm_of, id="vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=ENGINES)
def opened(request, sampled_models):
    """A function that gives an engine with the weights of a model, and the model."""

    def get(name: str = "qwen3", stops: Iterable[int] = (9,), **options):
        model = sampled_models(name)
        return request.param(request, model, stops, **options), model

    return get


# ------------------------------------------------------------------------------------------------ against transformers


@pytest.mark.parametrize("name", NAMES)
def test_logp_is_the_teacher_forced_logp_of_transformers_and_routes_are_its_top_k(opened, name: str) -> None:
    # A tenth of the vocabulary stops a row, so rows finish at different times.
    engine, model = opened(name, range(0, 128, 10))
    settings = FREE | dict(num_samples=4, max_new_tokens=40)
    answers = engine.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **settings)
    lengths = {len(one.tokens) for group in answers for one in group}
    assert len(lengths) > 5 and [len(group) for group in answers] == [4] * 5
    assert model.gaps(PROMPTS, answers).max() <= 1e-5
    assert_routes(model, PROMPTS, answers)


@pytest.mark.parametrize("num_samples", [2, 5])
def test_the_greedy_answer_before_the_sampled_ones_changes_no_bit(opened, num_samples: int, monkeypatch) -> None:
    engine, _ = opened("qwen3", range(0, 128, 10))
    settings = FREE | dict(num_samples=num_samples)
    greedy = engine.sample(PROMPTS, seeds=SEEDS, **settings | dict(num_samples=1, temperature=0.0))
    sampled = engine.sample(PROMPTS, seeds=SEEDS, **settings)
    both = engine.sample(PROMPTS, seeds=SEEDS, greedy_first=True, **settings)
    assert flat(both) == flat([first + others for first, others in zip(greedy, sampled, strict=True)])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_logp_is_that_of_the_tempered_distribution(opened, temperature: float) -> None:
    engine, model = opened()
    answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE | dict(temperature=temperature))
    assert model.gaps(PROMPTS, answers, temperature).max() <= 2e-5  # halving the temperature doubles the rounding


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_generate(opened, name: str) -> None:
    stops = set(range(0, 128, 16))
    engine, model = opened(name, stops)
    settings = dict(num_samples=1, max_new_tokens=12, temperature=0)
    answers = engine.sample(PROMPTS, seeds=SEEDS, **settings)
    rule = dict(max_new_tokens=12, do_sample=False, eos_token_id=sorted(stops), pad_token_id=0)
    for prompt, (one,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        expected = model.hf.generate(ids, attention_mask=torch.ones_like(ids), **rule)
        assert one.tokens == expected[0, len(prompt) :].tolist()
    assert model.gaps(PROMPTS, answers).max() <= 1e-5


def test_bf16_stays_close_to_fp32(opened) -> None:
    engine, model = opened(dtype=torch.bfloat16)
    gap = model.gaps(PROMPTS, engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    assert 1e-5 < gap.mean() < 0.03 and gap.max() < 0.3
    # Prompts may be padded in bf16, and the diagnosis of a gap compares layers without padding.
    assert [output.shape for output in engine.layer_outputs(PROMPTS[0])] == [(3, 64)] * 3


def test_frequencies_are_the_models_probabilities(opened) -> None:
    engine, model = opened()
    (group,) = engine.sample([PROMPTS[0]], seeds=[1], num_samples=4000, max_new_tokens=1, temperature=0.5)
    assert_frequencies(group, model.next_probs(PROMPTS[0], 0.5))


@pytest.mark.parametrize("name", NAMES)
def test_layer_outputs_are_those_of_transformers_and_show_the_first_layer_that_differs(opened, name: str) -> None:
    """The hidden states of transformers are before the first layer and after each; the final norm changes the last."""
    engine, model = opened(name)
    engine.sample([LONG], seeds=[0], num_samples=1, max_new_tokens=1, temperature=0)  # fills a prefix cache
    with torch.no_grad():
        expected = model.hf(torch.tensor([LONG]), output_hidden_states=True).hidden_states[1:]
    outputs = engine.layer_outputs(LONG)
    assert [output.shape for output in outputs] == [(322, model.arch.hidden_size)] * model.arch.num_layers
    for found, right in zip(outputs[:-1], expected[:-1], strict=True):
        torch.testing.assert_close(found, right[0], rtol=1e-4, atol=1e-4)
    norm = f"{LAYER_2}post_attention_layernorm.weight"
    engine.load_weights([(norm, 1.5 * model.tensors[norm])])
    apart = [not torch.equal(now, before) for now, before in zip(engine.layer_outputs(LONG), outputs, strict=True)]
    assert apart == [layer >= 2 for layer in range(model.arch.num_layers)]


# ------------------------------------------------------------------------------------------------ what must not matter


def test_result_depends_on_the_seed_alone(opened) -> None:
    engine, _ = opened()
    before, engine.beat = randomness(), itertools.count().__next__
    together = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert engine.beat() >= FREE["max_new_tokens"]  # beat is called for every token
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == flat(together)
    assert_alike(engine.sample(PROMPTS[::-1], seeds=SEEDS[::-1], **FREE)[::-1], together)
    alone = [engine.sample([prompt], seeds=[seed], **FREE)[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert_alike(alone, together)
    others = engine.sample(PROMPTS, seeds=[seed + 1 for seed in SEEDS], **FREE)
    assert flat(others) != flat(together) and together[0][0].tokens != together[0][1].tokens
    assert randomness() == before


def test_stop_tokens_cut_what_would_have_been_sampled(opened) -> None:
    stops = {3, 17, 40, 77, 78, 101, 110, 127}
    free, cut = (
        opened(stops=some)[0].sample(PROMPTS, seeds=SEEDS, **FREE | {"num_samples": 8}) for some in ((), stops)
    )
    for whole, one in zip(sum(free, []), sum(cut, []), strict=True):
        end = next((i + 1 for i, token in enumerate(whole.tokens) if token in stops), None)
        assert one.tokens == whole.tokens[:end] and one.logp == pytest.approx(whole.logp[:end], abs=1e-5)
        assert one.finish_reason == ("stop" if end else "length") and whole.finish_reason == "length"
    assert {one.finish_reason for group in cut for one in group} == {"stop", "length"}


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("name", NAMES)
def test_a_push_of_whole_groups_is_as_good_as_one_of_the_whole_model(opened, name: str, tmp_path: Path) -> None:
    engine, model = opened(name)
    before = randomness()
    moved = perturbed(model.tensors)
    engine.load_weights(moved.items())
    after = model.changed(moved, tmp_path / "whole")
    answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert after.gaps(PROMPTS, answers).max() <= 1e-5 and model.gaps(PROMPTS, answers).max() > 1e-3
    answers = engine.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
    assert_routes(after, PROMPTS, answers)  # also of a prompt in a prefix cache

    # The tensors of a LoRA update with noisy norms, in whole groups whose tensors are mixed.
    groups = {fused_group(n) for n in moved if "_proj" in n or "layernorm" in n or ".mlp.gate." in n}
    part = {n: x for n, x in perturbed(moved, seed=1).items() if fused_group(n) in groups}
    assert 0 < len(part) < len(moved)
    engine.load_weights((n, x.clone()) for n, x in reversed(part.items()))
    both = moved | part
    by_part = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert model.changed(both, tmp_path / "part").gaps(PROMPTS, by_part).max() <= 1e-5
    engine.load_weights(both.items())
    for tensor in part.values():
        tensor.zero_()  # the engine has copies
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == flat(by_part)  # bit for bit what a full push gives
    assert randomness() == before
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)


BROKEN = {  # (the names of the tensors that come, their changes by name, the message)
    "one missing": ([name for name in EXPERTS if name != EXPERTS[5]], {}, f"{EXPERTS[5]} is missing .1 missing"),
    "no v": (QKV[:2], {}, f"{QKV[2]} is missing .1 missing, 2 found.; needed: whole fused groups"),
    "twice": ([*QKV, QKV[0]], {}, f"{QKV[0]} came twice"),
    "surplus": ([*QKV, SURPLUS], {}, f"{SURPLUS} is not a tensor of this"),
    "misshapen": (QKV, {QKV[0]: torch.t}, r"q_proj.weight: found torch.float32 \(64, 128\); needed"),
    "integers": (QKV, {QKV[0]: torch.Tensor.int}, "q_proj.weight: found torch.int32"),
    "NaN": (EXPERTS, {EXPERTS[7]: lambda x: x * math.nan}, f"{EXPERTS[7]} has NaN or infinity .1 such"),
}


@pytest.mark.parametrize("case", [*BROKEN, "stream breaks"])
def test_broken_push_names_the_tensor_and_asks_for_a_whole_one(opened, case: str) -> None:
    engine, model = opened()
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


def test_biases_travel_with_their_weights(opened) -> None:
    engine, model = opened("qwen2")
    with pytest.raises(InputError, match="layers.2.self_attn.q_proj.bias is missing .3 missing, 3 found"):
        engine.load_weights((name, model.tensors[name]) for name in QKV)


# ------------------------------------------------------------------------------------------------ bad calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompts=[[]], seeds=[1]), "prompt 0 is empty"),
        (dict(prompts=[[1], [128]], seeds=[1, 2]), "prompt 1 has a token outside"),
        (dict(prompts=[[-1]], seeds=[1]), "prompt 0 has a token outside"),
        (dict(seeds=[1]), "5 prompts but 1 seeds"),
        (dict(max_new_tokens=0), "max_new_tokens 0"),
        (dict(max_new_tokens=63), "prompt 4 has 322 tokens.*exceeds the 384"),
        (dict(num_samples=0), "num_samples 0"),
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=math.nan), "temperature"),
    ],
)
def test_bad_call_is_refused(opened, change: dict, message: str) -> None:
    engine, _ = opened()
    call = dict(prompts=PROMPTS, seeds=SEEDS, **FREE) | change
    with pytest.raises(InputError, match=message):
        engine.sample(call.pop("prompts"), **call)
    assert engine.sample([], seeds=[], **FREE) == []  # a rank may have no prompt in a small step
