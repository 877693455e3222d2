"""The embedded sampler is compared with transformers, and with the definitions of sampling.

Expected log-probabilities, greedy tokens and routes come from transformers run on the finished text (teacher forcing),
expected frequencies from its probabilities. Not covered here: agreement with the Megatron model, accelerators.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import reference
import torch
from safetensors.torch import load_file

import hf_config
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
}
PROMPTS = [[5, 3, 99], [7], list(range(40, 61)), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [120, 0, 0, 64]]
SEEDS = [11, 12, 13, 14, 15]
FREE = dict(num_samples=4, max_new_tokens=40, temperature=1.0)  # the cache grows three times


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A function that makes each model once: the one of transformers, its tensors as saved, and its architecture."""
    made = {}

    def get(name: str) -> SimpleNamespace:
        if name not in made:
            kind, changes = MODELS[name]
            path = reference.save(kind, tmp_path_factory.mktemp(name), **changes)
            tensors, arch = load_file(path / "model.safetensors"), hf_config.read(path)
            made[name] = SimpleNamespace(hf=reference.load(path), tensors=tensors, arch=arch)
            made[name].hf.set_experts_implementation("eager")  # its grouped kernel does not take every width
        return made[name]

    return get


def sampler(model: SimpleNamespace, stop_tokens: set[int] = frozenset(), **options) -> TorchSampler:
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


@torch.no_grad()
def teacher_forced(hf, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """transformers' log-probability of each of ``tokens`` after ``prompt``."""
    logits = hf(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


@torch.no_grad()
def next_probs(hf, prompt: list[int], temperature: float = 1.0) -> torch.Tensor:
    return torch.softmax(hf(torch.tensor([prompt])).logits[0, -1].double() / temperature, -1)


def largest_gap(model: SimpleNamespace, answers, temperature: float = 1.0) -> float:
    gaps = [
        (teacher_forced(model.hf, prompt, one.tokens, temperature) - torch.tensor(one.logp)).abs().max().item()
        for prompt, group in zip(PROMPTS, answers, strict=True)
        for one in group
    ]
    return max(gaps)


def tokens_of(answers) -> list[list[list[int]]]:
    return [[one.tokens for one in group] for group in answers]


def assert_frequencies(sampled: torch.Tensor, probs: torch.Tensor) -> None:
    """Pearson's chi-square of ``sampled`` tokens against ``probs``, at five standard deviations."""
    expected, counts = probs * len(sampled), torch.bincount(sampled, minlength=len(probs)).double()
    assert counts[probs == 0].sum() == 0
    rare = expected < 10  # pooled, because the test needs several counts in every bin
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected, counts = expected[expected > 1], counts[expected > 1]
    degrees = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    assert degrees >= 1 and statistic < degrees + 5 * math.sqrt(2 * degrees), (statistic, degrees)


# ----------------------------------------------------------------------------------------------- against transformers


@pytest.mark.parametrize("name", MODELS)
def test_logp_is_the_teacher_forced_logp_of_transformers(models, name: str) -> None:
    # A tenth of the vocabulary stops a row, so rows finish at different times and the caches shrink.
    model = models(name)
    answers = sampler(model, set(range(0, 128, 10))).sample(PROMPTS, seeds=SEEDS, **FREE)
    lengths = {len(one.tokens) for group in answers for one in group}
    assert len(lengths) > 5 and [len(group) for group in answers] == [4] * 5
    assert largest_gap(model, answers) <= 1e-5


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_logp_is_that_of_the_tempered_untruncated_distribution(models, temperature: float) -> None:
    model, settings = models("qwen3"), FREE | dict(temperature=temperature)
    answers = sampler(model).sample(PROMPTS, seeds=SEEDS, top_p=0.8, top_k=20, **settings)
    assert largest_gap(model, answers, temperature) <= 2e-5  # halving the temperature doubles the rounding


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_greedy_tokens_are_those_of_generate(models, name: str) -> None:
    model = models(name)
    stops = set(range(0, 128, 16))
    greedy = dict(num_samples=1, max_new_tokens=16, temperature=0, top_k=3, top_p=0.5)
    answers = sampler(model, stops).sample(PROMPTS, seeds=SEEDS, **greedy)
    for prompt, (one,) in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        rule = dict(max_new_tokens=16, do_sample=False, eos_token_id=sorted(stops), pad_token_id=0)
        expected = model.hf.generate(ids, attention_mask=torch.ones_like(ids), **rule)
        assert one.tokens == expected[0, len(prompt) :].tolist()
    assert largest_gap(model, answers) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_routed_experts_are_the_top_k_of_transformers_router(models, name: str) -> None:
    model = models(name)
    answers = sampler(model, set(range(0, 128, 10))).sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
    for prompt, group in zip(PROMPTS, answers, strict=True):
        for one in group:
            assert one.routed_experts.dtype == "uint8" and one.routed_experts.shape[1:] == (2, 4)
            with torch.no_grad():
                text = torch.tensor([prompt + one.tokens[:-1]])  # the last token was never run, so it has no row
                logits = model.hf(text, output_router_logits=True).router_logits
            expected = torch.stack([layer.view(text.shape[1], -1).topk(4).indices for layer in logits], 1)
            assert torch.equal(torch.from_numpy(one.routed_experts).long().sort(-1).values, expected.sort(-1).values)


def test_bf16_stays_close_to_fp32(models) -> None:
    model = models("qwen3")
    answers = sampler(model, dtype=torch.bfloat16).sample(PROMPTS, seeds=SEEDS, **FREE)
    assert 1e-5 < largest_gap(model, answers) < 0.1


# ------------------------------------------------------------------------------------------- against the definitions


@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_frequencies_are_the_models_probabilities(models, temperature: float) -> None:
    model = models("qwen3")
    settings = dict(num_samples=20000, max_new_tokens=1, temperature=temperature)
    (group,) = sampler(model, max_sequences=4096).sample([PROMPTS[0]], seeds=[1], **settings)
    assert_frequencies(torch.tensor([one.tokens[0] for one in group]), next_probs(model.hf, PROMPTS[0], temperature))


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 5), (0.3, 0), (0.9, 0), (0.5, 10), (1e-9, 0), (1.0, 1), (0.9, 999)])
def test_truncation_samples_the_renormalised_set_and_nothing_else(models, top_p: float, top_k: int) -> None:
    model = models("qwen2")
    settings = dict(num_samples=8000, max_new_tokens=1, temperature=0.5, top_p=top_p, top_k=top_k)
    (group,) = sampler(model, max_sequences=4096).sample([PROMPTS[0]], seeds=[1], **settings)
    probs = next_probs(model.hf, PROMPTS[0], 0.5)
    chain = sorted(range(128), key=lambda token: -probs[token])[: top_k or None]
    mass, kept, total = 0.0, [], sum(probs[token].item() for token in chain)
    while mass < top_p * total and len(kept) < len(chain):
        kept.append(chain[len(kept)])
        mass += probs[kept[-1]].item()
    sampled = torch.tensor([one.tokens[0] for one in group])
    if len(kept) == 1:
        assert set(sampled.tolist()) == set(kept)
        return
    allowed = torch.zeros(128, dtype=torch.float64)
    allowed[kept] = probs[kept] / mass
    assert_frequencies(sampled, allowed)


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
    free = sampler(model).sample(PROMPTS, seeds=SEEDS, **FREE)
    cut = sampler(model, stops).sample(PROMPTS, seeds=SEEDS, **FREE)
    reasons = set()
    for whole, one in zip(sum(free, []), sum(cut, []), strict=True):
        end = next((i + 1 for i, token in enumerate(whole.tokens) if token in stops), None)
        assert one.tokens == whole.tokens[:end]
        assert one.finish_reason == ("stop" if end else "length")
        assert one.logp == pytest.approx(whole.logp[:end], abs=1e-5)
        reasons.add((one.finish_reason, whole.finish_reason))
    assert reasons == {("stop", "length"), ("length", "length")}


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
    engine = sampler(models("qwen2"), {9})
    first, second = (engine.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE) for _ in range(2))
    for one, other in zip(sum(first, []), sum(second, []), strict=True):
        assert (one.tokens, one.logp) == (other.tokens, other.logp)
        assert (one.routed_experts == other.routed_experts).all()
    assert tokens_of(engine.sample(PROMPTS, seeds=[seed + 1 for seed in SEEDS], **FREE)) != tokens_of(first)
    assert len({tuple(one.tokens) for one in first[0]}) == 4  # samples of one prompt differ


def test_result_does_not_depend_on_waves_or_company(models, monkeypatch) -> None:
    model, stops = models("qwen3"), set(range(0, 128, 16))
    expected = sampler(model, stops).sample(PROMPTS, seeds=SEEDS, **FREE)

    def assert_same(answers, wanted) -> None:
        assert tokens_of(answers) == tokens_of(wanted)
        for one, other in zip(sum(answers, []), sum(wanted, []), strict=True):
            assert one.logp == pytest.approx(other.logp, abs=1e-5)

    alone = sampler(model, stops)
    for alone.max_sequences in (1, 3, 4, 9, 512):  # 1 and 3 split a prompt's group
        assert_same(alone.sample(PROMPTS, seeds=SEEDS, **FREE), expected)
    for prompt, seed, group in zip(PROMPTS, SEEDS, expected, strict=True):
        assert_same(alone.sample([prompt], seeds=[seed], **FREE), [group])
    assert_same(alone.sample(PROMPTS[::-1], seeds=SEEDS[::-1], **FREE), expected[::-1])
    monkeypatch.setattr(torch_decoder, "PREFILL_TOKENS", 30)  # prompts in three parts
    assert_same(alone.sample(PROMPTS, seeds=SEEDS, **FREE), expected)


def test_global_rng_and_prompts_are_untouched(models) -> None:
    engine, prompts = sampler(models("qwen3")), [list(prompt) for prompt in PROMPTS]
    before = torch.get_rng_state()
    engine.sample(prompts, seeds=SEEDS, top_p=0.9, **FREE)
    assert torch.equal(torch.get_rng_state(), before) and prompts == PROMPTS
    assert engine.sample([], seeds=[], **FREE) == []


# ------------------------------------------------------------------------------------------------------------- weights

QKV = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "qkv"]
GATE_UP = [f"model.layers.2.mlp.experts.{e}.{half}_proj.weight" for e in range(16) for half in ("gate", "up")]
EXPERTS_DOWN = [f"model.layers.2.mlp.experts.{e}.down_proj.weight" for e in range(16)]


def test_partial_reload_equals_full_reload_and_weights_are_copies(models) -> None:
    model = models("qwen3")
    names = [*QKV, *GATE_UP, *EXPERTS_DOWN, "model.norm.weight"]
    changed = {name: model.tensors[name] * 1.5 for name in names}
    partly = sampler(model)
    before = tokens_of(partly.sample(PROMPTS, seeds=SEEDS, **FREE))
    partly.load_weights((name, tensor.clone()) for name, tensor in reversed(changed.items()))
    wholly = sampler(SimpleNamespace(arch=model.arch, tensors=model.tensors | changed))
    expected = wholly.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert partly.sample(PROMPTS, seeds=SEEDS, **FREE) == expected and tokens_of(expected) != before
    for tensor in changed.values():
        tensor.zero_()
    assert wholly.sample(PROMPTS, seeds=SEEDS, **FREE) == expected


BIAS = "model.layers.1.self_attn.k_proj.bias"
DOWN = "model.layers.2.mlp.experts.5.down_proj.weight"
BROKEN_LOADS = {
    "missing": (lambda t: {k: v for k, v in t.items() if k != DOWN}, f"{DOWN} is missing .1 missing"),
    "surplus": (lambda t: t | {"model.layers.3.mlp.gate.weight": torch.ones(16, 64)}, "3.mlp.gate.weight is not"),
    "shape": (lambda t: t | {BIAS: torch.ones(65)}, rf"{BIAS}: .*\(65,\).*\(64,\)"),
    "integers": (lambda t: t | {BIAS: torch.ones(64, dtype=torch.int64)}, f"{BIAS}: .*int64"),
    "nan": (lambda t: t | {BIAS: torch.full((64,), math.nan)}, f"{BIAS} has NaN"),
    "one infinity": (lambda t: t | {DOWN: t[DOWN].index_fill(0, torch.tensor([3]), math.inf)}, f"{DOWN} has NaN"),
    "nothing": (lambda t: {}, "embed_tokens.weight is missing"),
}


@pytest.mark.parametrize("case", BROKEN_LOADS)
def test_broken_load_names_the_tensor_and_leaves_no_usable_sampler(models, case: str) -> None:
    model = models("qwen2")
    change, message = BROKEN_LOADS[case]
    engine = TorchSampler(model.arch, stop_tokens={1}, pad_token=0)
    with pytest.raises(InputError, match=message):
        engine.load_weights(change(model.tensors).items())
    with pytest.raises(InputError, match="no usable weights"):
        engine.sample(PROMPTS, seeds=SEEDS, **FREE)


@pytest.mark.parametrize(
    ("names", "message"),
    [(QKV[:2], f"{QKV[2]} is missing"), (GATE_UP[:-1], f"{GATE_UP[-1]} is missing"), ([*QKV, QKV[0]], "came twice")],
)
def test_failed_partial_load_asks_for_a_whole_one(models, names: list[str], message: str) -> None:
    model = models("qwen3")
    engine = sampler(model)
    expected = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    with pytest.raises(InputError, match=message):
        engine.load_weights((name, model.tensors[name] * 2) for name in names)
    with pytest.raises(InputError, match="no usable weights"):
        engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    with pytest.raises(InputError, match="missing.*the whole model"):
        engine.load_weights((name, model.tensors[name]) for name in QKV)
    engine.load_weights(model.tensors.items())
    assert engine.sample(PROMPTS, seeds=SEEDS, **FREE) == expected


def test_stream_that_breaks_leaves_no_usable_sampler(models) -> None:
    model = models("qwen3")
    engine = sampler(model)

    def stream():
        yield QKV[0], model.tensors[QKV[0]] * 2
        raise OSError("connection lost")

    with pytest.raises(OSError):
        engine.load_weights(stream())
    with pytest.raises(InputError, match="no usable weights"):
        engine.sample(PROMPTS, seeds=SEEDS, **FREE)


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
        (dict(prompts=[[]], seeds=[1]), "prompt 0 is empty"),
        (dict(prompts=[[1], [128]], seeds=[1, 2]), "prompt 1 has a token outside"),
        (dict(prompts=[[-1]], seeds=[1]), "prompt 0 has a token outside"),
        (dict(seeds=[1]), "5 prompts but 1 seeds"),
        (dict(max_new_tokens=236), "prompt 2 has 21 tokens.*256 positions"),
        (dict(max_new_tokens=0), "max_new_tokens 0"),
        (dict(num_samples=0), "num_samples 0"),
        (dict(temperature=-0.1), "temperature"),
        (dict(temperature=math.nan), "temperature"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.1), "top_p"),
        (dict(top_k=-1), "top_k"),
    ],
)
def test_bad_call_is_refused(models, change: dict, message: str) -> None:
    call = dict(prompts=PROMPTS, seeds=SEEDS, **FREE) | change
    with pytest.raises(InputError, match=message):
        sampler(models("qwen3")).sample(call.pop("prompts"), **call)


def test_longest_possible_text_is_sampled(models) -> None:
    settings = dict(num_samples=1, max_new_tokens=235, temperature=1.0)
    assert len(sampler(models("qwen3")).sample([PROMPTS[2]], seeds=[1], **settings)[0][0].tokens) == 235


def test_bad_sampler_is_refused(models) -> None:
    arch = models("qwen3").arch
    with pytest.raises(InputError, match="token 128 is not in the vocabulary"):
        TorchSampler(arch, stop_tokens={128}, pad_token=0)
    many = TorchSampler(dataclasses.replace(arch, num_experts=257), stop_tokens=set(), pad_token=0)
    many.decoder.ready = True  # the refusal comes before any weight is used
    with pytest.raises(InputError, match="257 experts"):
        many.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
