"""The embedded sampler is compared with transformers, and with the definitions of sampling.

Expected log-probabilities, greedy tokens and routes come from transformers run on the finished text (teacher forcing),
expected frequencies from its probabilities. Not covered here: agreement with the Megatron model, accelerators.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from types import SimpleNamespace

import pytest
import reference
import torch
from sampled import BAD_CALLS, Model, assert_frequencies, assert_greedy, assert_routes, assert_stops, flat
from scope import cases

from engines import torch_decoder
from engines.torch_sampler import TorchSampler, inverse_cdf, truncate
from input_files import InputError

MODELS = {
    "qwen3": ("qwen3_moe", dict(num_key_value_heads=2)),  # grouped queries, a dense layer in the middle
    "qwen3_tied": ("qwen3_moe", dict(tie_word_embeddings=True, mlp_only_layers=[])),
    "qwen3_odd_widths": (
        "qwen3_moe",
        dict(hidden_size=30, moe_intermediate_size=7),
    ),  # the grouped kernel does not take these widths
    "qwen3_one_key_head": ("qwen3_moe", dict(num_key_value_heads=1)),
    "qwen3_weights_not_renormalised": ("qwen3_moe", dict(norm_topk_prob=False)),
    "qwen2": ("qwen2_moe", {}),  # biases, shared expert, a dense layer
    "qwen2_grouped_queries": ("qwen2_moe", dict(num_key_value_heads=2, mlp_only_layers=[])),
    "olmoe": ("olmoe", dict(num_key_value_heads=2)),
}
FEW = ["olmoe", "qwen3_tied", "qwen3_odd_widths", "qwen2_grouped_queries"]
TESTED = cases(FEW, [name for name in MODELS if name not in FEW])
PROMPTS = [[5, 3, 99], [7], list(range(40, 61)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [120, 0, 0, 64]]
SEEDS = [11, 12, 13, 14, 15]
FREE = dict(num_samples=4, max_new_tokens=40, temperature=1.0)  # the cache grows three times


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that makes each model once."""

    @functools.cache
    def get(name: str) -> Model:
        kind, changes = MODELS[name]
        return Model(reference.save(kind, tmp_path_factory.mktemp(name), **changes))

    return get


def sampler(model: Model | SimpleNamespace, stop_tokens: set[int] = frozenset(), **options) -> TorchSampler:
    engine = TorchSampler(model.arch, stop_tokens=set(stop_tokens), pad_token=0, **options)
    engine.load_weights(model.tensors.items())
    return engine


def test_the_watcher_of_stalls_hears_of_every_layer_of_the_prompts_and_every_decoded_token(models) -> None:
    """Neither many prompts nor long answers may look like a stalled rank, on a slow or busy processor."""
    engine, beats = sampler(models("qwen3")), []
    engine.beat = lambda: beats.append(1)
    engine.sample(PROMPTS, seeds=[0] * len(PROMPTS), num_samples=2, max_new_tokens=9, temperature=1.0)
    assert len(beats) >= 9 + engine.arch.num_layers
    beats.clear()
    engine.sample(PROMPTS, seeds=[0] * len(PROMPTS), num_samples=2, max_new_tokens=1, temperature=1.0)
    assert len(beats) == engine.arch.num_layers + 1


# ----------------------------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", TESTED)
def test_logp_is_the_teacher_forced_logp_of_transformers_and_routes_are_its_top_k(models, name: str) -> None:
    # A tenth of the vocabulary stops a row, so rows finish at different times and the caches shrink.
    model = models(name)
    answers = sampler(model, set(range(0, 128, 10))).sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
    lengths = {len(one.tokens) for group in answers for one in group}
    assert len(lengths) > 5 and [len(group) for group in answers] == [4] * 5
    assert model.gaps(PROMPTS, answers).max() <= 1e-5
    assert_routes(model, PROMPTS, answers)


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_logp_is_that_of_the_tempered_untruncated_distribution(models, temperature: float) -> None:
    model, settings = models("qwen3"), FREE | dict(temperature=temperature)
    answers = sampler(model).sample(PROMPTS, seeds=SEEDS, top_p=0.8, top_k=20, **settings)
    assert model.gaps(PROMPTS, answers, temperature).max() <= 2e-5  # halving the temperature doubles the rounding


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_greedy_tokens_are_those_of_generate(models, name: str) -> None:
    stops = set(range(0, 128, 16))
    assert_greedy(models(name), sampler(models(name), stops), PROMPTS, stops)


def test_bf16_stays_close_to_fp32(models) -> None:
    model = models("qwen3")
    answers = sampler(model, dtype=torch.bfloat16).sample(PROMPTS, seeds=SEEDS, **FREE)
    assert 1e-5 < model.gaps(PROMPTS, answers).max() < 0.1


# ------------------------------------------------------------------------------------------- against the definitions


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_frequencies_are_the_models_probabilities(models, temperature: float) -> None:
    model = models("qwen3")
    settings = dict(num_samples=20000, max_new_tokens=1, temperature=temperature)
    (group,) = sampler(model, max_sequences=4096).sample([PROMPTS[0]], seeds=[1], **settings)
    assert_frequencies(group, model.next_probs(PROMPTS[0], temperature))


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.9, 0), (0.5, 10), (1e-9, 0)])
def test_truncation_samples_the_renormalised_set_and_nothing_else(models, top_p: float, top_k: int) -> None:
    model = models("qwen2")
    settings = dict(num_samples=8000, max_new_tokens=1, temperature=0.5, top_p=top_p, top_k=top_k)
    (group,) = sampler(model, max_sequences=4096).sample([PROMPTS[0]], seeds=[1], **settings)
    probs = model.next_probs(PROMPTS[0], 0.5)
    chain = sorted(range(128), key=lambda token: -probs[token])[: top_k or None]
    mass, kept, total = 0.0, [], sum(probs[token].item() for token in chain)
    while mass < top_p * total and len(kept) < len(chain):
        kept.append(chain[len(kept)])
        mass += probs[kept[-1]].item()
    if len(kept) == 1:
        assert {one.tokens[0] for one in group} == set(kept)
        return
    allowed = torch.zeros(128, dtype=torch.float64)
    allowed[kept] = probs[kept] / mass
    assert_frequencies(group, allowed)


def test_nucleus_is_the_smallest_set_that_reaches_its_mass() -> None:
    probs = torch.tensor([[0.125, 0.5, 0.125, 0.25]])
    for top_p, size in [(0.01, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.9, 4), (1.0, 4)]:
        assert (truncate(probs, top_p, 0)[0] > 0).sum() == size, top_p
    kept, ids = truncate(probs, 0.6, 2)  # the mass of top-2 is 0.75, and 0.5 is two thirds of it
    assert kept.tolist() == [[0.5, 0.0]] and ids.tolist() == [[1, 3]]


def test_inverse_cdf_at_both_ends_and_around_zeros() -> None:
    last = 1 - 2**-24  # the largest float32 below 1, and the largest that torch.rand returns
    probs = torch.tensor([[0.0, 0.0, 0.25, 0.0, 0.75, 0.0]])
    for uniform, token in [(0.0, 2), (0.2499, 2), (0.25, 4), (0.2501, 4), (last, 4)]:
        assert inverse_cdf(probs, torch.tensor([[uniform]])).item() == token, uniform
    generator = torch.Generator().manual_seed(0)
    probs = torch.rand(2000, 300, generator=generator).pow(8) * torch.rand(2000, 1, generator=generator)
    probs[torch.rand(2000, 300, generator=generator) < 0.5] = 0
    probs[:, [0, -1]] = 0
    for uniform in (0.0, 2**-24, 0.5, last):  # totals of any size
        chosen = inverse_cdf(probs, torch.full((2000, 1), uniform))
        assert (probs.gather(1, chosen) > 0).all(), uniform


def test_stop_tokens_cut_what_would_have_been_sampled(models) -> None:
    model, stops = models("qwen3"), {3, 17, 40, 77, 78, 101, 110, 127}
    free, cut = (sampler(model, some).sample(PROMPTS, seeds=SEEDS, **FREE) for some in (set(), stops))
    assert_stops(free, cut, stops)


def test_finished_rows_stop_costing(models, monkeypatch) -> None:
    sizes, decode = [], torch_decoder.Decoder.decode

    def spy(self, token, n, cache):
        sizes.append(len(token))
        return decode(self, token, n, cache)

    monkeypatch.setattr(torch_decoder.Decoder, "decode", spy)
    settings = dict(num_samples=8, max_new_tokens=100, temperature=1.0)
    answers = sampler(models("qwen3"), set(range(0, 128, 4))).sample(PROMPTS, seeds=SEEDS, **settings)
    lengths = [len(one.tokens) for group in answers for one in group]
    assert len(sizes) == max(lengths) - 1 < 99  # the wave ended with its last row
    for n, size in enumerate(sizes, start=1):
        assert size < 2 * max(
            1, sum(length > n for length in lengths)
        )  # at most half of the rows that run have finished


# ------------------------------------------------------------------------------------------------ what must not matter


def test_same_seed_same_result_and_other_seed_another(models) -> None:
    engine, before = sampler(models("qwen2"), {9}), torch.get_rng_state()
    first, second = (engine.sample(PROMPTS, seeds=SEEDS, top_p=0.9, **FREE) for _ in range(2))
    assert flat(first) == flat(second)
    assert flat(engine.sample(PROMPTS, seeds=[seed + 1 for seed in SEEDS], top_p=0.9, **FREE)) != flat(first)
    assert len({tuple(one.tokens) for one in first[0]}) == 4  # samples of one prompt differ
    assert torch.equal(torch.get_rng_state(), before) and engine.sample([], seeds=[], **FREE) == []


def test_result_does_not_depend_on_waves_or_company(models, monkeypatch) -> None:
    model, stops = models("qwen3"), set(range(0, 128, 16))
    expected = sampler(model, stops).sample(PROMPTS, seeds=SEEDS, **FREE)

    def assert_same(answers, wanted) -> None:
        for one, other in zip(sum(answers, []), sum(wanted, []), strict=True):
            assert one.tokens == other.tokens
            assert one.logp == pytest.approx(other.logp, abs=1e-5)

    alone = sampler(model, stops)
    for alone.max_sequences in (3, 4, 512):  # 3 splits a prompt's group
        assert_same(alone.sample(PROMPTS, seeds=SEEDS, **FREE), expected)
    for prompt, seed, group in zip(PROMPTS, SEEDS, expected, strict=True):
        assert_same(alone.sample([prompt], seeds=[seed], **FREE), [group])
    assert_same(alone.sample(PROMPTS[::-1], seeds=SEEDS[::-1], **FREE), expected[::-1])
    monkeypatch.setattr(torch_decoder, "PREFILL_TOKENS", 30)  # prompts in three parts
    assert_same(alone.sample(PROMPTS, seeds=SEEDS, **FREE), expected)


# ------------------------------------------------------------------------------------------------------------- weights

QKV = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
GATE_UP = [f"model.layers.2.mlp.experts.{e}.{half}_proj.weight" for e in range(16) for half in ("gate", "up")]
EXPERTS_DOWN = [f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in range(16)]


def test_partial_reload_equals_full_reload_and_weights_are_copies(models) -> None:
    model = models("qwen3")
    names = [*QKV, *GATE_UP, *EXPERTS_DOWN, "model.norm.weight"]
    changed = {name: model.tensors[name] * 1.5 for name in names}
    partly = sampler(model)
    before = partly.sample(PROMPTS, seeds=SEEDS, **FREE)
    partly.load_weights((name, tensor.clone()) for name, tensor in reversed(changed.items()))
    wholly = sampler(SimpleNamespace(arch=model.arch, tensors=model.tensors | changed))
    expected = wholly.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert partly.sample(PROMPTS, seeds=SEEDS, **FREE) == expected and expected != before
    for tensor in changed.values():
        tensor.zero_()
    assert wholly.sample(PROMPTS, seeds=SEEDS, **FREE) == expected


BIAS, SURPLUS = "model.layers.1.self_attn.k_proj.bias", "model.layers.3.mlp.gate.weight"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (BIAS, None, f"{BIAS} is missing .1 missing"),
        (SURPLUS, torch.ones(16, 64), f"{SURPLUS} is not"),
        (BIAS, torch.ones(65), rf"{BIAS}: .*\(65,\).*\(64,\)"),
        (BIAS, torch.full((64,), math.nan), f"{BIAS} has NaN"),
    ],
)
def test_broken_load_names_the_tensor_and_leaves_no_usable_sampler(models, name: str, value, message: str) -> None:
    model = models("qwen2")
    tensors = {key: tensor for key, tensor in model.tensors.items() if key != name}
    engine = TorchSampler(model.arch, stop_tokens={1}, pad_token=0)
    with pytest.raises(InputError, match=message):
        engine.load_weights((tensors if value is None else tensors | {name: value}).items())
    with pytest.raises(InputError, match="no usable weights"):
        engine.sample(PROMPTS, seeds=SEEDS, **FREE)


def test_failed_partial_load_asks_for_a_whole_one(models) -> None:
    model = models("qwen3")
    engine = sampler(model)
    expected = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    for names, message in ((GATE_UP[:-1], f"{GATE_UP[-1]} is missing"), ([*QKV, QKV[0]], "came twice")):
        with pytest.raises(InputError, match=message):
            engine.load_weights((name, model.tensors[name] * 2) for name in names)
        with pytest.raises(InputError, match="missing.*the whole model"):
            engine.load_weights((name, model.tensors[name]) for name in QKV)
        with pytest.raises(InputError, match="no usable weights"):
            engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    engine.load_weights(model.tensors.items())
    assert engine.sample(PROMPTS, seeds=SEEDS, **FREE) == expected


def test_cast_and_activations_that_overflow_are_errors(models) -> None:
    model = models("qwen3")
    norm = {"model.norm.weight": torch.full((64,), 3.4e38)}
    with pytest.raises(InputError, match="model.norm.weight has NaN"):
        sampler(SimpleNamespace(arch=model.arch, tensors=model.tensors | norm), dtype=torch.bfloat16)
    engine = sampler(SimpleNamespace(arch=model.arch, tensors=model.tensors | norm))
    with pytest.raises(InputError, match="not finite"):
        engine.sample(PROMPTS, seeds=SEEDS, **FREE)


# ----------------------------------------------------------------------------------------------------------- bad calls


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *BAD_CALLS,
        (dict(max_new_tokens=236), "prompt 2 has 21 tokens.*256 positions"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_k=-1), "top_k"),
    ],
)
def test_bad_call_is_refused(models, change: dict, message: str) -> None:
    call = dict(prompts=PROMPTS, seeds=SEEDS, **FREE) | change
    with pytest.raises(InputError, match=message):
        sampler(models("qwen3")).sample(call.pop("prompts"), **call)


def test_bad_sampler_is_refused(models) -> None:
    arch = models("qwen3").arch
    with pytest.raises(InputError, match="token 128 is not in the vocabulary"):
        TorchSampler(arch, stop_tokens={128}, pad_token=0)
    many = TorchSampler(dataclasses.replace(arch, num_experts=257), stop_tokens=set(), pad_token=0)
    many.ready = True  # the refusal comes before any weight is used
    with pytest.raises(InputError, match="257 experts"):
        many.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
