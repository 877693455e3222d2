"""How tokens are drawn: the table of uniform numbers, and the hooks by which vLLM draws from it.

Both engines are compared on a model, and the hooks alone on given logits, where the engines' logits are equal to the
bit. The hook of Model Runner V1 is called by the real vLLM; that of V2 replaces a method of vLLM's real class, whose
tensors are stand-ins, because V2 needs a GPU. Not covered: accelerators, and the runner of vllm-ascend (docs/npu.md).
"""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sampled import FREE, assert_alike, assert_drawn, flat
from torch.utils._python_dispatch import TorchDispatchMode
from vllm_ranks import PROMPTS, SEEDS

from engines import torch_sampler, vllm_inside
from engines.drawing import inverse_cdf, pick, uniforms_of
from engines.interface import Completion, fault_of_log_probs
from engines.torch_sampler import TorchSampler
from facts.exits import InputError

pytestmark = pytest.mark.xdist_group("vllm")  # the files that import vLLM share a process
VOCABULARY = 40


def test_the_numbers_of_a_prompt_are_those_of_a_generator_with_its_seed() -> None:
    table = uniforms_of([5, 2**60, 5], 3, 4)
    for seed, numbers in zip([5, 2**60, 5], table, strict=True):
        assert torch.equal(numbers, torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)))
    assert uniforms_of([], 3, 4).shape == (0, 3, 4)  # a rank may have no prompt


# ------------------------------------------------------------------------------------------------- both engines


def embedded(model, stops: set[int]) -> TorchSampler:
    engine = TorchSampler(model.arch, stop_tokens=stops, pad_token=0)
    engine.load_weights(model.tensors.items())
    return engine


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


@pytest.mark.vllm
def test_a_row_that_vllm_preempts_and_continues_draws_the_same_tokens(sampled_models, vllm_of, monkeypatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, preempt = [], Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler, "_preempt_request", lambda *args, **more: preempted.append(1) or preempt(*args, **more)
    )
    model = sampled_models("qwen3")
    prompts = [[(i + j) % 100 for j in range(124)] for i in range(20)]  # 40 blocks of 128 tokens; 4 MiB hold 21
    settings = dict(num_samples=1, max_new_tokens=12, temperature=1.0)
    answers = vllm_of(model, ()).sample(prompts, seeds=list(range(20)), **settings)
    assert preempted
    assert_alike(answers, embedded(model, set()).sample(prompts, seeds=list(range(20)), **settings))


NEVER = "sample: token 127 was drawn, whose probability is 0. This is a fault of the sampler; .* 13394"


@pytest.mark.vllm
def test_a_drawn_token_of_probability_0_is_called_a_fault_of_the_sampler(sampled_models, vllm_of, monkeypatch) -> None:
    """As vllm-ascend's issue 13394 draws masked ids; the other rows of the batch are right, in both engines."""
    model, wanted = sampled_models("qwen3"), torch.tensor(127)

    def masked(logits, *more):
        return logits.index_fill(1, wanted, -torch.inf)

    def draws_it(logits, *more):
        token, logp = pick(masked(logits), *more)
        token[-1] = wanted
        return token, logp.index_fill(0, torch.tensor(len(logp) - 1), -torch.inf)

    engine = vllm_of(model)
    drawn = engine.draws.in_runner_1
    monkeypatch.setattr(
        engine.draws.runner.sampler.topk_topp_sampler, "forward", lambda logits, *more: drawn(masked(logits), *more)
    )
    engine.sample(PROMPTS, seeds=SEEDS, **FREE)  # the mask alone is no fault
    for module in (vllm_inside, torch_sampler):
        monkeypatch.setattr(module, "pick", draws_it)
    for each in (engine, embedded(model, set())):
        with pytest.raises(InputError, match=NEVER):
            each.sample(PROMPTS, seeds=SEEDS, **FREE)


def test_the_first_log_prob_that_is_not_finite_tells_an_overflow_from_a_fault_of_the_sampler() -> None:
    def fault(*logps: float) -> str:
        sound = Completion([1], [-0.5], "length")
        return fault_of_log_probs([[sound], [Completion([4, 5, 6], list(logps), "length")]], torch.bfloat16)

    assert fault(0.0, -1e30, -2.0) == ""
    assert fault(-1.0, -np.inf, np.nan).startswith("sample: token 5 was drawn, whose probability is 0")
    assert fault(-1.0, np.nan, -np.inf).endswith("not finite: the loaded model overflows in torch.bfloat16")
    assert fault(np.inf, -1.0, -1.0).endswith("not finite: the loaded model overflows in torch.bfloat16")


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


@pytest.mark.vllm
def test_requests_that_come_or_go_are_seen() -> None:
    table, logits = uniforms_of([1], 6, 1)[0], logits_of(6)
    runner, (expected, _) = hooked(runner_1([0, 1, 2, 3, 4, 5]), table), pick(logits, table, 1.0)
    for left in ([0, 1, 2, 3, 4, 5], [5, 1, 4], [3]):
        runner.input_batch.req_ids, runner.input_batch.sampling_metadata = [str(row) for row in left], object()
        assert torch.equal(drawn_1(runner, logits[left], 0)[0], expected[left])


@pytest.mark.vllm
def test_a_hook_keeps_vllms_log_probs() -> None:
    table, logits = uniforms_of([4], 60, 1)[0], logits_of(60)
    token, logp = drawn_1(hooked(runner_1(list(range(60))), table), logits, 0)
    again, processed = drawn_2(hooked(runner_2(list(range(60))), table), logits, 0)
    assert torch.equal(processed, logits)
    assert torch.equal(logp, runner_1([]).sampler.topk_topp_sampler.forward_native(logits.clone(), {}, None, None)[1])
    assert torch.equal(token, again) and torch.equal(token, pick(logits, table, 1.0)[0])


@pytest.mark.vllm
def test_greedy_calls_are_left_alone_and_versions_without_a_place_are_refused() -> None:
    runner = hooked(runner_1([0, 1]), None)
    torch.manual_seed(0)
    before = runner.sampler.topk_topp_sampler.forward_native(logits_of(2), {}, None, None)[1]
    assert torch.equal(drawn_1(runner, logits_of(2), 0)[1], before) and runner.requests.count == 0
    older = SimpleNamespace(model_runner=SimpleNamespace(sampler=SimpleNamespace(sample=None)))
    with pytest.raises(InputError, match="rollout.engine: Model Runner V2 .*13394.*; needed: unset VLLM_USE_V2_MODEL_"):
        vllm_inside.draw_by_table(older)


# ------------------------------------------------------------------------------------------------- distribution

ROWS, POSITIONS = 3000, 16
FAULTS = {  # the numbers that a faulty sampler would use instead of the table (R, N)
    "none": None,
    "3 % too small": lambda table: table * 0.97,
    "crowded in the middle": lambda table: 0.5 + 0.97 * (table - 0.5),
    "one for all positions": lambda table: table[:, :1].expand_as(table).contiguous(),
    "one for two rows": lambda table: table[torch.arange(ROWS) // 2 * 2],
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", RUNNERS)
def test_tokens_and_pairs_of_tokens_have_the_probabilities_of_the_logits(kind, fault: str) -> None:
    """48,000 draws; pairs are adjacent positions of a row and adjacent rows of a position. Every fault must fail."""
    make, draw = kind
    table = uniforms_of(list(range(ROWS // 10)), 10, POSITIONS).flatten(0, 1)
    probs = torch.tensor([0.05, 0.1, 0.2, 0.05, 0.25, 0.1, 0.05, 0.2], dtype=torch.float64)
    logits = probs.log().float().expand(ROWS, -1) + 5
    runner = hooked(make(list(range(ROWS))), FAULTS[fault](table) if FAULTS[fault] else table)
    if make is runner_1:
        runner.input_batch.num_prompt_tokens = np.full(ROWS, 7, np.int32)
        runner.input_batch.num_tokens_no_spec = np.full(ROWS, 7, np.int32)
    tokens = torch.stack([draw(runner, logits, position)[0] for position in range(POSITIONS)], 1)
    pairs = (probs[:, None] * probs).flatten()

    def judge() -> None:
        assert_drawn(tokens.flatten(), probs)
        assert_drawn((8 * tokens[:, 0::2] + tokens[:, 1::2]).flatten(), pairs)
        assert_drawn((8 * tokens[0::2] + tokens[1::2]).flatten(), pairs)

    if fault == "none":
        judge()
    else:
        with pytest.raises(AssertionError):
            judge()


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
