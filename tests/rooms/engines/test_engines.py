"""What every engine keeps to, draws of tokens, and the embedded sampler."""

import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sampled import (
    FREE,
    Model,
    assert_alike,
    assert_drawn,
    assert_frequencies,
    assert_routes,
    embedded,
    flat,
)
from tiers import ci, nightly
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_ranks import PROMPTS, SEEDS, perturbed

from engines import torch_decoder, vllm_inside
from engines.drawing import inverse_cdf, pick, uniforms_of
from engines.interface import Completion, Engine, fault_of_log_probs
from engines.torch_sampler import TorchSampler
from facts.exits import InputError, Tripped
from knobs import LoraConfig
from weights.adapter_weights import adapted_modules
from weights.huggingface import fused_group

# -------------------------------------------------------------------------------------------------------------- engines
# What holds for every engine: its samples against transformers on the finished text (teacher forcing), its weights.
#
# Another engine is a line of ENGINES and a fixture NAME_of. What is special to vLLM is in test_vllm.py.
# Not covered: agreement with the Megatron model, accelerators.

NAMES = ["qwen3", "qwen2", ci("olmoe"), nightly("qwen2_no_qkv_bias")]
LONG = PROMPTS[4]  # 322 tokens
LAYER_2 = "model.layers.2."
QKV = [f"{LAYER_2}self_attn.{letter}_proj.weight" for letter in "qkv"]
SURPLUS = "model.layers.7.mlp.gate.weight"
EXPERTS = [f"{LAYER_2}mlp.experts.{e}.{part}_proj.weight" for e in range(16) for part in ("gate", "up", "down")]


ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(params=ENGINES)
def opened(request, sampled_models):
    """A function that gives an engine with the weights of a model, and the model."""
    open_engine = embedded if request.param == "torch" else request.getfixturevalue(f"{request.param}_of")

    def get(name: str = "qwen3", stops: Iterable[int] = (9,), **options) -> tuple[Engine, Model]:
        model = sampled_models(name)
        return open_engine(model, stops, **options), model

    return get


# ------------------------------------------------------------------------------------------------ against transformers


@pytest.mark.xdist_group("vllm")
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


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_logp_is_that_of_the_tempered_distribution(opened, temperature: float) -> None:
    engine, model = opened()
    answers = engine.sample(PROMPTS, seeds=SEEDS, **FREE | dict(temperature=temperature))
    assert model.gaps(PROMPTS, answers, temperature).max() <= 2e-5  # halving the temperature doubles the rounding


@pytest.mark.xdist_group("vllm")
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


@pytest.mark.xdist_group("vllm")
def test_bf16_stays_close_to_fp32(opened) -> None:
    engine, model = opened(dtype=torch.bfloat16)
    gap = model.gaps(PROMPTS, engine.sample(PROMPTS, seeds=SEEDS, **FREE))
    assert 1e-5 < gap.mean() < 0.03 and gap.max() < 0.3
    # Prompts may be padded in bf16, and the diagnosis of a gap compares layers without padding.
    assert [output.shape for output in engine.layer_outputs(PROMPTS[0])] == [(3, 64)] * 3


@pytest.mark.xdist_group("vllm")
def test_frequencies_are_the_models_probabilities(opened) -> None:
    engine, model = opened()
    (group,) = engine.sample([PROMPTS[0]], seeds=[1], num_samples=4000, max_new_tokens=1, temperature=0.5)
    assert_frequencies(group, model.next_probs(PROMPTS[0], 0.5))


@pytest.mark.xdist_group("vllm")
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


@pytest.mark.xdist_group("vllm")
def test_result_depends_on_the_seed_alone(opened) -> None:
    engine, _ = opened()
    engine.beat = itertools.count().__next__
    together = engine.sample(PROMPTS, seeds=SEEDS, **FREE)
    assert engine.beat() >= FREE["max_new_tokens"]  # beat is called for every token
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, **FREE)) == flat(together)
    assert_alike(engine.sample(PROMPTS[::-1], seeds=SEEDS[::-1], **FREE)[::-1], together)
    alone = [engine.sample([prompt], seeds=[seed], **FREE)[0] for prompt, seed in zip(PROMPTS, SEEDS, strict=True)]
    assert_alike(alone, together)
    others = engine.sample(PROMPTS, seeds=[seed + 1 for seed in SEEDS], **FREE)
    assert flat(others) != flat(together) and together[0][0].tokens != together[0][1].tokens


@pytest.mark.xdist_group("vllm")
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


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("name", NAMES)
def test_a_push_of_whole_groups_is_as_good_as_one_of_the_whole_model(opened, name: str, tmp_path: Path) -> None:
    engine, model = opened(name)
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
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)


BROKEN = {  # (the names of the tensors that come, their changes by name, the message)
    "one missing": ([name for name in EXPERTS if name != EXPERTS[5]], {}, f"{EXPERTS[5]} is missing .1 missing"),
    "no v": (QKV[:2], {}, f"{QKV[2]} is missing .1 missing, 2 found.; push whole fused groups"),
    "twice": ([*QKV, QKV[0]], {}, f"{QKV[0]} was pushed twice"),
    "surplus": ([*QKV, SURPLUS], {}, f"{SURPLUS} is not a tensor of this"),
    "misshapen": (QKV, {QKV[0]: torch.t}, r"q_proj.weight is torch.float32 \(64, 128\); push"),
    "integers": (QKV, {QKV[0]: torch.Tensor.int}, "q_proj.weight is torch.int32"),
    "NaN": (EXPERTS, {EXPERTS[7]: lambda x: x * math.nan}, f"{EXPERTS[7]} has NaN or infinity .1 such"),
}


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("case", [*BROKEN, "stream breaks"])
def test_broken_push_names_the_tensor_and_asks_for_a_whole_one(opened, case: str) -> None:
    engine, model = opened()
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


@pytest.mark.xdist_group("vllm")
def test_biases_travel_with_their_weights(opened) -> None:
    engine, model = opened("qwen2")
    with pytest.raises(InputError, match="layers.2.self_attn.q_proj.bias is missing .3 missing, 3 found"):
        engine.load_weights((name, model.tensors[name]) for name in QKV)


# ------------------------------------------------------------------------------------------------ bad calls


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(prompts=[[]], seeds=[1]), "prompt 0 is empty"),
        (dict(prompts=[[1], [128]], seeds=[1, 2]), "prompt 1 has a token outside"),
        (dict(prompts=[[-1]], seeds=[1]), "prompt 0 has a token outside"),
        (dict(max_new_tokens=63), "prompt 4 has 322 tokens.*exceeds the 384"),
    ],
)
def test_bad_call_is_refused(opened, change: dict, message: str) -> None:
    engine, _ = opened()
    call = dict(prompts=PROMPTS, seeds=SEEDS, **FREE) | change
    with pytest.raises(InputError, match=message):
        engine.sample(call.pop("prompts"), **call)
    assert engine.sample([], seeds=[], **FREE) == []  # a rank may have no prompt in a small step


# ---------------------------------------------------------------------------------------------------------------- draws
# How tokens are drawn: the table of uniform numbers, and the hooks by which vLLM draws from it.
#
# Both engines are compared on a model, and the hooks alone on given logits, where the engines' logits are equal to the
# bit. The hook of Model Runner V1 is called by the real vLLM; that of V2 replaces a method of vLLM's real class, whose
# tensors are stand-ins, because V2 needs a GPU. Not covered: accelerators, and the runner of vllm-ascend (docs/npu.md).

VOCABULARY = 40


@pytest.mark.xdist_group("vllm")
def test_the_numbers_of_a_prompt_are_those_of_a_generator_with_its_seed() -> None:
    table = uniforms_of([5, 2**60, 5], 3, 4)
    for seed, numbers in zip([5, 2**60, 5], table, strict=True):
        assert torch.equal(numbers, torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)))
    assert uniforms_of([], 3, 4).shape == (0, 3, 4)  # a rank may have no prompt


# ------------------------------------------------------------------------------------------------- both engines


@pytest.mark.xdist_group("vllm")
@pytest.mark.vllm
@pytest.mark.parametrize(("max_sequences", "temperature"), [(256, 1.0), (12, 0.7)])
def test_both_engines_sample_the_same_completions(sampled_models, vllm_of, max_sequences, temperature) -> None:
    """Thousands of tokens of rows that end at different times; with 12 rows at once, others take their places."""
    model, stops = sampled_models("qwen3"), set(range(0, 128, 40))
    settings = dict(num_samples=20, max_new_tokens=40, temperature=temperature)
    expected = embedded(model, stops).sample(PROMPTS, seeds=SEEDS, **settings)
    answers = vllm_of(model, stops, max_sequences=max_sequences).sample(PROMPTS, seeds=SEEDS, **settings)
    assert_alike(answers, expected)
    assert sum(len(tokens) for tokens, *_ in flat(answers)) > 1500
    assert len(Counter(len(tokens) for tokens, *_ in flat(answers))) > 10


@pytest.mark.xdist_group("vllm")
@pytest.mark.vllm
def test_a_row_that_vllm_preempts_and_continues_draws_the_same_tokens(sampled_models, vllm_of, monkeypatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler, "_preempt_request", lambda *args, **more: preempted.append(1) or preempt(*args, **more)
    )
    model = sampled_models("qwen3")
    prompts = [[(i + j) % 100 for j in range(124)] for i in range(20)]  # 40 blocks of 128 tokens; 4 MiB hold 21
    settings = dict(num_samples=1, max_new_tokens=12, temperature=1.0, return_routed_experts=True)
    answers = vllm_of(model, ()).sample(prompts, seeds=list(range(20)), **settings)
    assert preempted
    assert_alike(answers, embedded(model).sample(prompts, seeds=list(range(20)), **settings))
    assert_routes(model, prompts, answers)


@pytest.mark.xdist_group("vllm")
def test_the_first_log_prob_that_is_not_finite_tells_an_overflow_from_a_fault_of_the_sampler() -> None:
    def fault(*logps: float) -> str:
        sound = Completion([1], [-0.5], "length")
        return fault_of_log_probs([[sound], [Completion([4, 5, 6], list(logps), "length")]], torch.bfloat16)

    overflow = "sample: a log-probability is not finite: the loaded model overflows in torch.bfloat16\n"
    assert fault(0.0, -1e30, -2.0) == ""
    assert fault(-1.0, -np.inf, np.nan).startswith("sample: token 5 was drawn, although its probability is 0")
    assert fault(-1.0, np.nan, -np.inf).startswith(overflow)
    assert fault(np.inf, -1.0, -1.0).startswith(overflow)


# ------------------------------------------------------------------------------------- the hooks on given logits


class Reads(dict):
    """A dictionary that counts how often it is read."""

    count = 0

    def __getitem__(self, key):
        self.count += 1
        return super().__getitem__(key)


def runner_1(rows: list[int]) -> SimpleNamespace:
    """A worker of Model Runner V1 whose batch has one request for each of ``rows`` of the table."""
    from vllm.v1.sample.sampler import Sampler

    requests = Reads({str(row): SimpleNamespace(sampling_params=SimpleNamespace(seed=row)) for row in rows})
    batch = SimpleNamespace(
        req_ids=list(requests),
        sampling_metadata=object(),
        num_prompt_tokens=np.full(256, 7, np.int32),
        num_tokens_no_spec=np.full(256, 7, np.int32),
    )
    sampler = Sampler(logprobs_mode="processed_logprobs")
    return SimpleNamespace(sampler=sampler, requests=requests, input_batch=batch, device=torch.device("cpu"))


def runner_2(rows: list[int]) -> SimpleNamespace:
    """A worker of Model Runner V2 with a request for each of ``rows``, in slots of another order, prompts of 7."""
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    sampler = object.__new__(Sampler)
    seeds = torch.tensor([-1, *reversed(rows)])
    sampler.sampling_states = SimpleNamespace(seeds=SimpleNamespace(gpu=seeds))
    lengths = SimpleNamespace(gpu=torch.full(seeds.shape, 7, dtype=torch.int32))
    return SimpleNamespace(
        sampler=sampler, req_states=SimpleNamespace(prompt_len=lengths), device=torch.device("cpu"), rows=rows
    )


def drawn_1(runner, logits, position: int, k=None, p=None) -> tuple:
    runner.input_batch.num_tokens_no_spec[:] = 7 + position
    return runner.sampler.topk_topp_sampler(logits.clone(), {}, k, p)


def drawn_2(runner, logits, position: int, k=None, p=None) -> tuple:
    slots = torch.arange(len(logits), 0, -1, dtype=torch.int32)  # row 0 is in the last slot
    pos = torch.full((len(logits),), 7 + position - 1)
    return runner.sampler._sample_random(logits.clone(), slots, slots.numpy(), pos, k, p, False)


RUNNERS = [
    pytest.param((runner_1, drawn_1), id="V1", marks=pytest.mark.vllm),
    pytest.param((runner_2, drawn_2), id="V2", marks=pytest.mark.vllm),
]


def hooked(runner, table: torch.Tensor | None) -> SimpleNamespace:
    vllm_inside.draw_by_table(SimpleNamespace(model_runner=runner)).set_table(table)
    return runner


def logits_of(rows: int) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3))


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("kind", RUNNERS)
def test_a_hook_draws_what_the_embedded_sampler_draws_from_equal_logits(kind) -> None:
    """For any order of the rows; and it reads nothing of single requests as long as the same ones are in the batch."""
    make, draw = kind
    table, logits = uniforms_of([1, 2, 3], 30, 8).flatten(0, 1), logits_of(90)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).tolist()
    some = order[:50]
    whole, part = hooked(make(list(range(90))), table), hooked(make(some), table)
    for position in range(8):
        expected, _ = pick(logits, table[:, position, None], 1.0)
        assert torch.equal(draw(whole, logits, position)[0], expected)
        assert torch.equal(draw(part, logits[some], position)[0], expected[some])
    if make is runner_1:
        assert whole.requests.count == 90  # once each in eight positions


@pytest.mark.xdist_group("vllm")
@pytest.mark.vllm
def test_requests_that_come_or_go_are_seen() -> None:
    table, logits = uniforms_of([1], 6, 1)[0], logits_of(6)
    runner, (expected, _) = hooked(runner_1([0, 1, 2, 3, 4, 5]), table), pick(logits, table, 1.0)
    for left in ([0, 1, 2, 3, 4, 5], [5, 1, 4], [3]):
        runner.input_batch.req_ids, runner.input_batch.sampling_metadata = [str(row) for row in left], object()
        assert torch.equal(drawn_1(runner, logits[left], 0)[0], expected[left])


@pytest.mark.xdist_group("vllm")
@pytest.mark.vllm
def test_a_hook_keeps_vllms_log_probs() -> None:
    table, logits = uniforms_of([4], 60, 1)[0], logits_of(60)
    token, logp = drawn_1(hooked(runner_1(list(range(60))), table), logits, 0)
    again, processed = drawn_2(hooked(runner_2(list(range(60))), table), logits, 0)
    assert torch.equal(processed, logits)
    assert torch.equal(logp, runner_1([]).sampler.topk_topp_sampler.forward_native(logits.clone(), {}, None, None)[1])
    assert torch.equal(token, again) and torch.equal(token, pick(logits, table, 1.0)[0])


@pytest.mark.xdist_group("vllm")
@pytest.mark.vllm
def test_greedy_calls_are_left_alone_and_versions_without_a_place_are_refused() -> None:
    runner = hooked(runner_1([0, 1]), None)
    torch.manual_seed(0)
    before = runner.sampler.topk_topp_sampler.forward_native(logits_of(2), {}, None, None)[1]
    assert torch.equal(drawn_1(runner, logits_of(2), 0)[1], before) and runner.requests.count == 0
    older = SimpleNamespace(model_runner=SimpleNamespace(sampler=SimpleNamespace(sample=None)))
    with pytest.raises(InputError, match="rollout.engine: Model Runner V2 .*13394.*; unset VLLM_USE_V2_MODEL_"):
        vllm_inside.draw_by_table(older)


# ------------------------------------------------------------------------------------------------- distribution

ROWS, POSITIONS = 3000, 16


@pytest.mark.xdist_group("vllm")
def test_tokens_and_pairs_of_tokens_have_the_probabilities_of_the_logits() -> None:
    """48,000 draws; pairs are adjacent positions of a row and adjacent rows of a position."""
    table = uniforms_of(list(range(ROWS // 10)), 10, POSITIONS).flatten(0, 1)
    probs = torch.tensor([0.05, 0.1, 0.2, 0.05, 0.25, 0.1, 0.05, 0.2], dtype=torch.float64)
    logits = probs.log().float().expand(ROWS, -1) + 5
    tokens = torch.stack([pick(logits, table[:, position, None], 1.0)[0] for position in range(POSITIONS)], 1)
    pairs = (probs[:, None] * probs).flatten()
    assert_drawn(tokens.flatten(), probs)
    assert_drawn((8 * tokens[:, 0::2] + tokens[:, 1::2]).flatten(), pairs)
    assert_drawn((8 * tokens[0::2] + tokens[1::2]).flatten(), pairs)


@pytest.mark.xdist_group("vllm")
def test_strict_determinism_draws_by_whole_numbers(request) -> None:
    """CUDA has no deterministic cumulative sum of floats. The choice is computed here with Python's integers."""

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "cumsum" not in func.__name__ or not args[0].is_floating_point()
            return func(*args, **(kwargs or {}))

    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(200, 50, generator=generator).mul(8).softmax(-1)
    probs[:, ::7] = 0
    uniform = torch.rand(200, 1, generator=generator)
    uniform[0] = 0.0
    free = inverse_cdf(probs, uniform)
    request.addfinalizer(lambda: torch.use_deterministic_algorithms(False))
    torch.use_deterministic_algorithms(True)
    with Sums():
        strict = inverse_cdf(probs, uniform)
    for row in range(200):
        numerators = [int(p * 2**40) for p in probs[row].double().tolist()]
        target = sum(numerators) * int(uniform[row].item() * 2**24) // 2**24
        passed = [total > target for total in itertools.accumulate(numerators)]
        assert strict[row].item() == passed.index(True)
    assert (strict == free).float().mean() > 0.99


# ------------------------------------------------------------------------------------------------- the embedded sampler
# The embedded sampler: truncation against its definition, waves, what a push checks. The first part has the rest.
#
# Expected log-probabilities come from transformers, expected frequencies from its probabilities.

LORA = LoraConfig(targets=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], rank=4, alpha=8.0)
MORE = FREE | dict(num_samples=4, max_new_tokens=40)  # the cache grows three times


@pytest.fixture
def model(sampled_models) -> Model:
    return sampled_models("qwen3")


def test_the_watcher_of_stalls_hears_of_every_layer_of_the_prompts(model) -> None:
    """Many prompts must not look like a stalled rank, on a slow or busy processor."""
    engine, beats = embedded(model), []
    engine.beat = lambda: beats.append(1)
    engine.sample(PROMPTS, seeds=SEEDS, num_samples=2, max_new_tokens=1, temperature=1.0)
    assert len(beats) == engine.arch.num_layers + 1


def test_widths_that_the_grouped_kernel_does_not_take_are_computed_too(sampled_models) -> None:
    odd = sampled_models("qwen3_odd_widths")
    answers = embedded(odd).sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, **FREE)
    assert odd.gaps(PROMPTS, answers).max() <= 1e-5
    assert_routes(odd, PROMPTS, answers)


# ------------------------------------------------------------------------------------------- against the definitions


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
    answers = embedded(model, set(range(0, 128, 4))).sample(PROMPTS[:4], seeds=SEEDS[:4], **settings)
    lengths = [len(one.tokens) for group in answers for one in group]
    assert len(sizes) == max(lengths) - 1 < 99  # the wave ended with its last row
    for n, size in enumerate(sizes, start=1):
        assert size < 2 * max(
            1, sum(length > n for length in lengths)
        )  # at most half of the rows that run have finished


# ------------------------------------------------------------------------------------------------ what must not matter


def test_result_does_not_depend_on_waves(model, monkeypatch) -> None:
    engine = embedded(model, set(range(0, 128, 16)))
    expected = engine.sample(PROMPTS, seeds=SEEDS, **MORE)
    for engine.max_sequences in (3, 8):  # waves of one and of two prompts
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
    engine, generator = embedded(model, {7}, dtype=dtype, adapter=LORA), torch.Generator().manual_seed(0)
    shapes = {}
    for module in adapted_modules(model.arch, LORA):
        shapes |= module.factor_shapes()
    engine.load_adapter({name: torch.randn(shape, generator=generator) / 16 for name, shape in shapes.items()})
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
    engine = embedded(model)
    (expected,) = engine.sample([PROMPTS[2]], seeds=[3], **FREE)
    assert_alike(engine.sample([PROMPTS[2]] * 3, seeds=[3] * 3, **FREE), [expected] * 3)


# ----------------------------------------------------------------------------------------------------------- refusals


def test_overflow_is_an_error(model) -> None:
    huge = {"model.layers.0.input_layernorm.weight": torch.full((64,), 3.4e38)}
    with pytest.raises(Tripped, match="not finite"):
        embedded(SimpleNamespace(arch=model.arch, tensors=model.tensors | huge)).sample(PROMPTS, seeds=SEEDS, **FREE)


def test_a_cast_that_overflows_is_an_error(model) -> None:
    huge = {"model.norm.weight": torch.full((64,), 3.4e38)}
    with pytest.raises(InputError, match="model.norm.weight has NaN"):
        embedded(SimpleNamespace(arch=model.arch, tensors=model.tensors | huge), dtype=torch.bfloat16)


def test_bad_sampler_is_refused(model) -> None:
    with pytest.raises(InputError, match="token 128 is not in the vocabulary"):
        TorchSampler(model.arch, stop_tokens={128}, pad_token=0)
