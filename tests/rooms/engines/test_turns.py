"""Completions with an environment, of every engine: against transformers on the whole text, and against one turn."""

from collections.abc import Callable, Iterable

import pytest
import torch
from sampled import FREE, Model, assert_alike, assert_routes, embedded, flat
from vllm_ranks import PROMPTS, SEEDS

from engines.interface import Completion, Engine
from tasks.environment import Reply, Turns

STOPS, SAYS = frozenset(range(0, 128, 10)), 7  # tokens that end a turn; tokens of an answer
MORE = FREE | dict(num_samples=4, max_new_tokens=40)


@pytest.fixture(params=["torch", pytest.param("vllm", marks=pytest.mark.vllm)])
def opened(request, sampled_models):
    """As in test_engines.py."""
    open_engine = embedded if request.param == "torch" else request.getfixturevalue(f"{request.param}_of")

    def get(name: str = "qwen3", stops: Iterable[int] = STOPS, **options) -> tuple[Engine, Model]:
        model = sampled_models(name)
        return open_engine(model, stops, **options), model

    return get


def talk(prompt: int, tokens: list[int], mask: list[bool], left: int) -> Reply:
    """Three turns at most. The answer has 0 to 6 tokens, which depend on what was said. 120 ends no turn."""
    turn = sum(own and not before for own, before in zip(mask, [False, *mask], strict=False))
    answer = [(sum(tokens) + prompt + i) % 128 for i in range(tokens[-1] // 10 % SAYS)]
    if tokens[-1] == 120:
        return Reply()
    if turn == 3:
        return Reply(reason="stop")
    return Reply(answer) if len(answer) < left else Reply(reason="length")


def turns_of(reply: Callable[[int, list[int], list[bool], int], Reply]) -> Turns:
    """The turns of an environment that replies to one turn after the other."""
    return Turns(STOPS, lambda turns: [reply(*turn) for turn in turns])


def masked_gaps(model: Model, answers: list[list[Completion]]) -> torch.Tensor:
    gaps, own = model.gaps(PROMPTS, answers), [one.mask for group in answers for one in group]
    return gaps[torch.tensor(sum(own, []))]


@pytest.mark.xdist_group("vllm")
@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_logp_of_the_policy_is_teacher_forced_and_routes_are_those_of_the_whole_text(opened, name: str) -> None:
    engine, model = opened(name)
    answers = engine.sample(PROMPTS, seeds=SEEDS, return_routed_experts=True, turns=turns_of(talk), **MORE)
    rows = [one for group in answers for one in group]
    assert {one.finish_reason for one in rows} == {"stop", "length"}
    assert sum(not all(one.mask) for one in rows) > 10 and all(one.mask[-1] for one in rows)
    for one in rows:
        assert len(one.mask) == len(one.tokens) == len(one.logp) <= 40
        assert all(logp == 0.0 for logp, own in zip(one.logp, one.mask, strict=True) if not own)
    assert masked_gaps(model, answers).max() <= 1e-5
    assert_routes(model, PROMPTS, answers)


@pytest.mark.xdist_group("vllm")
def test_given_tokens_change_nothing_but_their_mask(opened) -> None:
    """An environment that says what the policy would have said: a row of several turns is a row of one."""
    engine, _ = opened(stops=())
    alone = engine.sample(PROMPTS, seeds=SEEDS, **MORE)
    said = {}  # (prompt, tokens so far) -> the next three

    for prompt, group in enumerate(alone):
        for one in group:
            for n in range(1, 36):
                said[prompt, tuple(one.tokens[:n])] = one.tokens[n : n + 3]

    def repeat(prompt: int, tokens: list[int], mask: list[bool], left: int) -> Reply:
        return Reply(said[prompt, tuple(tokens)] if left > 3 else [])

    answers = engine.sample(PROMPTS, seeds=SEEDS, turns=turns_of(repeat), **MORE)
    assert sum(one.mask.count(False) for group in answers for one in group) > 50
    for one, other in zip(sum(answers, []), sum(alone, []), strict=True):
        assert one.tokens == other.tokens and one.finish_reason == other.finish_reason == "length"
        own = torch.tensor(one.mask)
        assert torch.allclose(torch.tensor(one.logp)[own], torch.tensor(other.logp)[own], atol=1e-5)


@pytest.mark.xdist_group("vllm")
def test_a_turn_equals_the_first_turn_of_a_prompt_with_the_turns_before(opened) -> None:
    engine, _ = opened()
    greedy = MORE | dict(temperature=0, num_samples=1)
    answers = engine.sample(PROMPTS, seeds=SEEDS, turns=turns_of(talk), **greedy)
    compared = 0
    for prompt, (one,) in zip(PROMPTS, answers, strict=True):
        starts = [n for n in range(1, len(one.tokens)) if one.mask[n] and not one.mask[n - 1]]
        for start in starts:
            ((other,),) = engine.sample(
                [prompt + one.tokens[:start]], seeds=[0], **greedy | dict(max_new_tokens=40 - start)
            )
            n = one.mask[start:].index(False) if False in one.mask[start:] else len(one.tokens) - start
            n = min(n, len(other.tokens))
            assert one.tokens[start : start + n] == other.tokens[:n]
            assert torch.allclose(torch.tensor(one.logp[start : start + n]), torch.tensor(other.logp[:n]), atol=1e-5)
            compared += 1
    assert compared >= 2


@pytest.mark.xdist_group("vllm")
def test_waves_and_an_idle_environment_change_nothing(opened) -> None:
    engine, model = opened()
    plain = engine.sample(PROMPTS, seeds=SEEDS, **MORE)
    idle = turns_of(lambda prompt, tokens, mask, left: Reply(reason="stop"))
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, turns=idle, **MORE)) == flat(plain)
    together = engine.sample(PROMPTS, seeds=SEEDS, turns=turns_of(talk), **MORE)
    assert flat(engine.sample(PROMPTS, seeds=SEEDS, turns=turns_of(talk), **MORE)) == flat(together)
    few, _ = opened(max_sequences=8)
    assert_alike(few.sample(PROMPTS, seeds=SEEDS, turns=turns_of(talk), **MORE), together)
    assert engine.sample([], seeds=[], turns=idle, **MORE) == []


@pytest.mark.xdist_group("vllm")
@pytest.mark.vllm
@pytest.mark.parametrize("max_sequences", [256, 12])
def test_both_engines_have_the_same_turns(sampled_models, vllm_of, max_sequences: int) -> None:
    model, settings = sampled_models("qwen3"), dict(num_samples=20, max_new_tokens=40, temperature=0.7)
    turns = turns_of(talk)
    expected = embedded(model, STOPS).sample(PROMPTS, seeds=SEEDS, turns=turns, **settings)
    answers = vllm_of(model, STOPS, max_sequences=max_sequences).sample(PROMPTS, seeds=SEEDS, turns=turns, **settings)
    assert_alike(answers, expected)
    pairs = [(one, other) for a, b in zip(answers, expected, strict=True) for one, other in zip(a, b, strict=True)]
    assert all(one.mask == other.mask and one.finish_reason == other.finish_reason for one, other in pairs)
    assert sum(not all(one.mask) for one, _ in pairs) > 50


def test_bf16_keeps_its_turns(sampled_models) -> None:
    """RowCache, whose rows the trainer computes bit for bit."""
    model = sampled_models("qwen3")
    engine = embedded(model, STOPS, dtype=torch.bfloat16)
    answers = engine.sample(PROMPTS, seeds=SEEDS, turns=turns_of(talk), **MORE)
    assert masked_gaps(model, answers).mean() < 0.03
