"""The embedded sampler: truncation against its definition, waves, what a push checks. test_engines.py has the rest.

Expected log-probabilities come from transformers, expected frequencies from its probabilities.
"""

from __future__ import annotations

import dataclasses
import os
from types import SimpleNamespace

import pytest
import torch
from sampled import FREE, Model, assert_alike, assert_frequencies, assert_routes
from vllm_ranks import PROMPTS, SEEDS

from engines import torch_decoder
from engines.drawing import inverse_cdf
from engines.torch_sampler import TorchSampler
from facts.exits import InputError
from knobs import LoraConfig

LORA = LoraConfig(targets=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], rank=4, alpha=8.0)
MORE = FREE | dict(num_samples=4, max_new_tokens=40)  # the cache grows three times


@pytest.fixture
def model(sampled_models) -> Model:
    return sampled_models("qwen3")


def sampler(model: Model | SimpleNamespace, stop_tokens: set[int] = frozenset(), **options) -> TorchSampler:
    engine = TorchSampler(model.arch, stop_tokens=set(stop_tokens), pad_token=0, **options)
    engine.load_weights(model.tensors.items())
    return engine


def test_the_watcher_of_stalls_hears_of_every_layer_of_the_prompts(model) -> None:
    """Many prompts must not look like a stalled rank, on a slow or busy processor."""
    engine, beats = sampler(model), []
    engine.beat = lambda: beats.append(1)
    engine.sample(PROMPTS, seeds=SEEDS, num_samples=2, max_new_tokens=1, temperature=1.0)
    assert len(beats) == engine.arch.num_layers + 1


def test_widths_that_the_grouped_kernel_does_not_take_are_computed_too(sampled_models) -> None:
    odd = sampled_models("qwen3_odd_widths")
    answers = sampler(odd).sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
    assert odd.gaps(PROMPTS, answers).max() <= 1e-5
    assert_routes(odd, PROMPTS, answers)


# ------------------------------------------------------------------------------------------- against the definitions


def test_tokens_have_the_frequencies_of_their_probabilities(model) -> None:
    settings = dict(num_samples=8000, max_new_tokens=1, temperature=0.5)
    (group,) = sampler(model, max_sequences=4096).sample([PROMPTS[0]], seeds=[1], **settings)
    assert_frequencies(group, model.next_probs(PROMPTS[0], 0.5))


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


def test_finished_rows_stop_costing(model, monkeypatch) -> None:
    sizes, decode = [], torch_decoder.Decoder.decode

    def spy(self, token, *rest):
        sizes.append(len(token))
        return decode(self, token, *rest)

    monkeypatch.setattr(torch_decoder.Decoder, "decode", spy)
    settings = dict(num_samples=8, max_new_tokens=100, temperature=1.0)
    answers = sampler(model, set(range(0, 128, 4))).sample(PROMPTS[:4], seeds=SEEDS[:4], **settings)
    lengths = [len(one.tokens) for group in answers for one in group]
    assert len(sizes) == max(lengths) - 1 < 99  # the wave ended with its last row
    for n, size in enumerate(sizes, start=1):
        assert size < 2 * max(
            1, sum(length > n for length in lengths)
        )  # at most half of the rows that run have finished


# ------------------------------------------------------------------------------------------------ what must not matter


def test_result_does_not_depend_on_waves(model, monkeypatch) -> None:
    engine = sampler(model, set(range(0, 128, 16)))
    expected = engine.sample(PROMPTS, seeds=SEEDS, **MORE)
    for engine.max_sequences in (3, 4):  # 3 splits a prompt's group
        assert_alike(engine.sample(PROMPTS, seeds=SEEDS, **MORE), expected)
    monkeypatch.setattr(torch_decoder, "PREFILL_TOKENS", 650)  # prompts in three parts
    assert_alike(engine.sample(PROMPTS, seeds=SEEDS, **MORE), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_a_common_beginning_is_computed_once_in_fp32_and_changes_no_bit(
    sampled_models, name: str, dtype: torch.dtype, monkeypatch
) -> None:
    """Of tokens, log-probs and routes, with adapters. In bf16 every prompt is computed whole, as the trainer does.

    The gate of a shared expert has one output, and in fp32 such a product rounds as its number of rows says.
    """
    model, computed, qkv = sampled_models(name), [], torch_decoder.Decoder._qkv
    engine, generator = sampler(model, {7}, dtype=dtype, adapter=LORA), torch.Generator().manual_seed(0)
    engine.load_adapter(
        {
            name: (torch.randn(4, w.shape[1], generator=generator) / 8, torch.randn(len(w), 4, generator=generator) / 8)
            for name, w in model.tensors.items()
            if name.endswith("_proj.weight")
        }
    )
    monkeypatch.setattr(
        torch_decoder.Decoder,
        "_qkv",
        lambda self, layer, x, *rest: computed.append(len(x)) or qkv(self, layer, x, *rest),
    )
    # So many that each expert has four rows at least; 3, 1, 21, 4 and 1 tokens follow.
    prompts = [[*(token * 7 % 128 for token in range(300)), *own] for own in (*PROMPTS[:4], [6])]
    found = []
    for common, tokens in ((os.path.commonprefix, 300 + 30), (lambda _: [], 5 * 300 + 30)):
        monkeypatch.setattr(torch_decoder.os.path, "commonprefix", common)
        computed.clear()
        found.append(sum(engine.sample(prompts, seeds=SEEDS, return_routed_experts=True, **MORE), []))
        assert computed[0] == (tokens if dtype == torch.float32 else 5 * 336)
    assert found[0][0].tokens != found[0][4].tokens
    for one, other in zip(*found, strict=True):
        assert one.tokens == other.tokens
        exact = dtype == torch.bfloat16 or name == "qwen3"
        assert one.logp == (other.logp if exact else pytest.approx(other.logp, abs=1e-5))
        assert (one.routed_experts == other.routed_experts).all()


def test_prompts_that_are_equal_are_computed_once(model) -> None:
    """Also the last tokens, which the completions begin after, come from the common beginning then."""
    engine = sampler(model)
    (expected,) = engine.sample([PROMPTS[2]], seeds=[3], **FREE)
    assert_alike(engine.sample([PROMPTS[2]] * 3, seeds=[3] * 3, **FREE), [expected] * 3)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_cast_and_activations_that_overflow_are_errors(model) -> None:
    norm = {"model.norm.weight": torch.full((64,), 3.4e38)}
    huge = SimpleNamespace(arch=model.arch, tensors=model.tensors | norm)
    with pytest.raises(InputError, match="model.norm.weight has NaN"):
        sampler(huge, dtype=torch.bfloat16)
    with pytest.raises(InputError, match="not finite"):
        sampler(huge).sample(PROMPTS, seeds=SEEDS, **FREE)


def test_bad_sampler_is_refused(model) -> None:
    with pytest.raises(InputError, match="token 128 is not in the vocabulary"):
        TorchSampler(model.arch, stop_tokens={128}, pad_token=0)
    many = sampler(model)
    many.arch = dataclasses.replace(model.arch, num_experts=257)
    with pytest.raises(InputError, match="257 experts"):
        many.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
