"""Sampling and scoring G completions of each prompt, micro-batches of them, and evaluations."""

import functools
import json
import math
import os
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import training
import world
from tiers import asked, ci, nightly

import evaluate
import rollout
from data_gsm8k import Question, Questions
from engines.interface import Completion
from facts.seeds import derive_seed
from inputs.config import to_yaml
from knobs import Config
from model import batches
from model.batches import Rollout
from tasks.scoring import Score

# -------------------------------------------------------------------------------------------------------------- rollout

CPU = torch.device("cpu")


# ------------------------------------------------------------------------------------------------ plan


def padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def assert_even_shares_of_alike_rows(plan: list[list[list[int]]], lengths: dict[int, int]) -> None:
    """Ranks finish a micro-batch together, and no later micro-batch has a longer row."""
    shortest_before = math.inf
    for micro in plan:
        counts = [len(rows) for rows in micro]
        sizes = [lengths[sequence] for rows in micro for sequence in rows]
        assert max(counts) - min(counts) <= 1 and max(sizes) <= shortest_before
        shortest_before = min(sizes)


def test_a_plan_takes_every_sequence_once_and_no_rank_is_over_the_budget_but_for_a_single_row() -> None:
    """Groups of unequal rows, packed and padded. The cost is counted as the docstring of batches.plan says."""
    shared = 0
    for seed in range(300):
        rng = random.Random(seed)
        ranks, multiple, group = rng.choice([1, 2, 3, 4, 16]), rng.choice([1, 2, 4]), rng.choice([1, 2, 4, 8])
        budget = rng.choice([1, 64, 250, 1000, 8192])
        chosen = [s for s in range(rng.randint(0, 12) * group) if rng.random() < 0.9]  # some are left out
        prompts = {s: random.Random(f"{seed} {s // group}").randint(1, 60) for s in chosen}
        lengths = {s: prompts[s] + rng.choice([1, rng.randint(1, 40), rng.randint(100, 400)]) for s in chosen}
        order = rng.sample(chosen, len(chosen))
        for packed in (prompts, None):
            plan = batches.plan(lengths, ranks, budget, multiple, group, packed)
            assert batches.plan({s: lengths[s] for s in order}, ranks, budget, multiple, group, packed) == plan, seed
            assert sorted(s for micro in plan for rows in micro for s in rows) == chosen, seed
            assert all(len(micro) == ranks and any(micro) for micro in plan), seed
            if group == 1:
                assert_even_shares_of_alike_rows(plan, lengths)
            for rows in [rows for micro in plan for rows in micro if len(rows) > 1]:
                cost = len(rows) * padded(max(lengths[s] for s in rows), multiple)
                if packed:
                    once = {s // group: prompts[s] for s in rows}
                    cost = sum(once.values()) + sum(lengths[s] - prompts[s] for s in rows) + cost / 4
                assert cost <= budget, (seed, packed, rows, cost)
                shared += 1
    assert shared > 900  # enough micro-batches had more than one row


def test_a_later_ranks_block_counts_too() -> None:
    """A block of four costs 203 on rank 0 and would cost 492 on rank 1, so both ranks take blocks of two."""
    lengths = {0: 100, 1: 2, 2: 2, 3: 2, 4: 99, 5: 99, 6: 99, 7: 99}
    # Two of 99: 1 + 98 + 98 + 198 / 4 = 246.5
    plan = batches.plan(lengths, 2, 250, 1, 4, dict.fromkeys(lengths, 1))
    assert plan == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_a_plan_by_hand() -> None:
    lengths = {10: 5, 11: 8, 12: 3, 13: 8, 14: 6}
    # budget 16, rows padded to a multiple of 4: two rows of 8 a rank; 8, 8, 6, 5 are dealt out in turn, then 3
    assert batches.plan(lengths, 2, 16, 4) == [[[11, 14], [13, 10]], [[12], []]]
    assert batches.plan({}, 2, 16, 4) == []


def test_a_plan_keeps_groups_whole_where_the_budget_lets_it() -> None:
    lengths = {sequence: 5 + sequence % 4 for sequence in range(12)} | {4: 9}  # three groups of four, 5 to 9 tokens
    groups = [set(range(start, start + 4)) for start in (4, 0, 8)]  # the one with the longest row comes first
    shares = batches.plan(lengths, 2, 36, 1, group_size=4)  # 36 / 9 = four rows
    assert [[set(rank) for rank in micro] for micro in shares] == [groups[:2], [{8, 9}, {10, 11}]]
    assert batches.plan(lengths, 1, 45, 1, group_size=4) == [[sorted(group)] for group in groups]  # five rows: a group


def test_micro_batches_are_as_few_as_fit_and_then_as_even() -> None:
    lengths = dict.fromkeys(range(64), 161)  # 50 rows fit, of which 48 are whole groups
    assert [len(rows) for (rows,) in batches.plan(lengths, 1, 8192, 1, group_size=8)] == [32, 32]
    for seed in range(50):
        rng = random.Random(seed)
        lengths = {sequence: rng.randint(1, 100) for sequence in range(rng.randint(2, 60))}
        ranks, budget = rng.choice([1, 2, 4]), rng.choice([100, 300, 1000])
        plan = batches.plan(lengths, ranks, budget, 1)
        shared = [rows for micro in plan for rows in micro if len(rows) > 1]
        largest = max((len(rows) * max(lengths[s] for s in rows) for rows in shared), default=0)
        assert not shared or len(batches.plan(lengths, ranks, largest - 1, 1)) > len(plan), seed


def test_packed_rows_count_their_prompt_once_and_a_quarter_of_their_padded_size() -> None:
    lengths, prompts = dict.fromkeys(range(8), 12), dict.fromkeys(range(8), 10)  # two groups of four
    # A group: 10 + 4 x 2 = 18 in the line, 48 as padded rows: 18 + 48 / 4 = 30. Both: 60.
    assert batches.plan(lengths, 1, 60, 1, 4, prompts) == [[list(range(8))]]
    assert batches.plan(lengths, 1, 59, 1, 4, prompts) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert len(batches.plan(lengths, 1, 60, 1, 4)) == 2  # as padded rows


# ------------------------------------------------------------------------------------------------ pack


@pytest.fixture
def batch() -> Rollout:
    """Two prompts, two completions each."""
    return Rollout(
        prompts=[[7, 8], [5, 6, 7]],
        tokens=torch.tensor([[11, 2, 0], [12, 13, 14], [2, 0, 0], [15, 16, 2]]),
        logp=-torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [6.0, 0.0, 0.0], [7.0, 8.0, 9.0]]),
        lengths=[2, 3, 1, 3],
        truncated=torch.tensor([False, True, False, False]),
        rewards=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        parsable=torch.tensor([[1.0, 0.0], [1.0, 1.0]]),
        correct=torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
    )


def test_rows_are_prompt_then_completion_padded_on_the_right(batch) -> None:
    assert [batch.row_length(sequence) for sequence in range(4)] == [4, 5, 4, 6]
    micro = batches.pack(batch, [3, 0], torch.tensor([0.1, 0.2, 0.3, 0.4]), CPU, 9, 4)
    assert micro.tokens.tolist() == [[5, 6, 7, 15, 16, 2, 9, 9], [7, 8, 11, 2, 9, 9, 9, 9]]
    assert micro.mask.tolist() == [[0, 0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0, 0, 0]]
    assert micro.rollout_logp.tolist() == [[0, 0, 0, -7, -8, -9, 0, 0], [0, 0, -1, -2, 0, 0, 0, 0]]
    assert micro.advantages.tolist() == pytest.approx([0.4, 0.1])
    assert batches.pack(batch, [2], torch.zeros(4), CPU, 9, 1).tokens.tolist() == [[5, 6, 7, 2]]


def test_routes_are_packed_with_their_rows_and_count_for_all_rows_of_a_prompt(batch) -> None:
    """Rows 2 and 3 share the prompt [5, 6, 7]; row 2 has one own token, row 3 three. The last token has no route."""
    records = {s: torch.full((batch.row_length(s) - 1, 1, 2), 10 * s, dtype=torch.uint8) for s in (2, 3)}
    for record in records.values():
        record[:, 0, 1] = torch.arange(len(record))  # the position of the token
    micro = batches.pack(batch, [2, 3], torch.zeros(4), CPU, 9, 4, records)
    assert micro.replayed.tolist() == [[2, 2, 2, 1, 1, 0, 0, 0]]  # the prompt, row 3's own tokens, filler
    own = micro.routes[0, :5, 0].tolist()
    assert own == [[20, 0], [20, 1], [20, 2], [30, 3], [30, 4]] and micro.routes.shape == (1, 8, 1, 2)


def test_no_sequences_make_one_row_that_trains_nothing(batch) -> None:
    micro = batches.pack(batch, [], torch.ones(4), CPU, 9, 4)
    assert micro.tokens.tolist() == [[9] * 4]
    assert not micro.mask.any() and not micro.rollout_logp.any() and not micro.advantages.any()


# ------------------------------------------------------------------------------------------------ sample


class EchoEngine:
    """It answers with the last token of the prompt and the digits of the seed; the second sample never stops.

    Nor does the third one of the prompt that ends with 41, so groups differ.
    """

    arch = SimpleNamespace(vocab_size=128)

    def sample(self, prompts, *, seeds, num_samples, max_new_tokens, temperature, **rest):
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            digits = [int(digit) for digit in str(seed)[:4]]
            ended = Completion([prompt[-1], *digits, 2], [-0.5, *(-1.0 * d for d in digits), -0.25], "stop")
            cut = Completion([prompt[-1]] * max_new_tokens, [-1.5] * max_new_tokens, "length")
            last = cut if prompt[-1] == 41 else ended
            answers.append([ended, cut, last][:num_samples])
        return answers


def same(found: Rollout, expected: Rollout) -> None:
    for name, value in vars(expected).items():
        assert torch.equal(torch.as_tensor(getattr(found, name)), torch.as_tensor(value)), name


def gathered(cfg: Config, num_prompts: int, step: int) -> Rollout:
    asked = [Question(f"q{i}", "", "", [1, 40 + i]) for i in range(num_prompts)]
    ranks = torch.distributed.get_world_size()
    parallel = world.open_layout({1: "TP1", 2: "TP2", 4: "TP2_EP4"}[ranks])

    def score(answers):
        return [Score(len(one.tokens), asked.question == "q1", len(one.tokens) == 8) for asked, one in answers]

    batch, own, _ = rollout.sample(EchoEngine(), asked, score, cfg.rollout, parallel, seed=cfg.train.seed, step=step)
    assert len(own) == len(range(parallel.rank, num_prompts, ranks))
    return batch


@pytest.mark.parametrize("num_prompts", [3, ci(1), ci(5)])
def test_every_rank_knows_the_same_rollout_whoever_sampled_it(num_prompts, tmp_path: Path) -> None:
    """This includes fewer prompts than ranks, and a number of prompts that the ranks do not divide."""
    cfg = training.config(tmp_path, tmp_path, rollout__group_size=3, rollout__max_new_tokens=8)
    (alone,) = training.in_world("TP1", gathered, cfg, num_prompts, 7)
    assert alone.prompts == [[1, 40 + i] for i in range(num_prompts)]
    lengths = [[6, 8, 8 if i == 1 else 6] for i in range(num_prompts)]
    assert alone.rewards.tolist() == lengths and alone.lengths == sum(lengths, [])
    assert alone.truncated.tolist() == [length == 8 for length in alone.lengths]
    assert alone.parsable.tolist() == [[float(i == 1)] * 3 for i in range(num_prompts)]
    assert alone.correct.flatten().tolist() == alone.truncated.tolist()  # by ``score``
    for place in range(num_prompts):
        first, cut, _ = alone.tokens[3 * place : 3 * place + 3].tolist()
        assert first[0] == 40 + place and first[5:] == [2, 0, 0] and cut == [40 + place] * 8
        assert alone.logp[3 * place].tolist() == [-0.5, *(-1.0 * d for d in first[1:5]), -0.25, 0, 0]
    for layout in ("TP2", "TP2_EP4"):
        for batch in training.in_world(layout, gathered, cfg, num_prompts, 7):
            same(batch, alone)
    (other_step,) = training.in_world("TP1", gathered, cfg, num_prompts, 8)
    assert not torch.equal(other_step.tokens, alone.tokens)


class TalkingEngine(EchoEngine):
    """An environment gives the second and third token of each group's first answer, once with the token 0."""

    def sample(self, prompts, **rest):
        groups = super().sample(prompts, **rest)
        for first, *_ in groups:
            first.tokens[1:3], first.logp[1:3], first.mask[1:3] = [0, 127], [0.0, 0.0], [False, False]
        return groups


def talked(cfg: Config) -> tuple[Rollout, dict[str, float]]:
    ranks = torch.distributed.get_world_size()
    parallel = world.open_layout({1: "TP1", 2: "TP2"}[ranks])
    questions = Questions([Question(f"q{i}", "", "", [1, 40 + i]) for i in range(9)], 0)
    engine = TalkingEngine()
    sampled = rollout.sample_step(
        engine, questions, lambda answers: [Score(len(one.tokens), True, True) for _, one in answers], cfg, parallel, 7
    )
    assert sampled.num_tokens == sum(sampled.batch.lengths)
    return sampled.batch, rollout.metrics(sampled)


def test_the_environments_tokens_reach_every_rank_with_a_mask_and_count_apart(tmp_path: Path) -> None:
    keys = {"group_size": 2, "max_new_tokens": 8, "prompts_per_step": 3}
    cfg = training.config(tmp_path, tmp_path, **{f"rollout__{key}": value for key, value in keys.items()})
    ((batch, metrics),) = training.in_world("TP1", talked, cfg)
    assert batch.lengths == [6, 8] * 3 and batch.sampled_lengths == [4, 8] * 3
    assert batch.tokens[::2, 1:3].tolist() == [[0, 127]] * 3
    assert batch.mask.tolist() == [[True, False, False, True, True, True, False, False], [True] * 8] * 3
    digits = batch.tokens[::2, 3:5].sum().item()
    assert metrics["rollout/entropy"] == pytest.approx((3 * 0.75 + digits + 3 * 8 * 1.5) / (3 * 4 + 3 * 8))
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (6, 8)
    assert (metrics["environment/turns_mean"], metrics["environment/tokens_mean"]) == (1.5, 1)
    for found, _ in training.in_world("TP2", talked, cfg):
        same(found, batch)


class CountingEngine(EchoEngine):
    calls = 0

    def sample(self, prompts, **rest):
        self.calls += 1
        return super().sample(prompts, **rest)


def stepped(cases: list[tuple[Config, int, int]], step: int) -> list[tuple[rollout.Sampled, int]]:
    """Steps of ``cases`` (configuration, questions, one in so many has mixed groups), and the calls of the engine."""
    ranks = torch.distributed.get_world_size()
    parallel = world.open_layout({1: "TP1", 2: "TP2", 4: "TP2_EP4"}[ranks])

    def scored(mixed: int, answers) -> list[Score]:
        ends = [len(one.tokens) == 8 and question.prompt[-1] % mixed == 0 for question, one in answers]
        return [Score(len(one.tokens) / 16, True, end) for (_, one), end in zip(answers, ends, strict=True)]

    found = []
    for cfg, num, mixed in cases:
        questions, engine = Questions([Question(f"q{i}", "", "", [1, 40 + i]) for i in range(num)], 0), CountingEngine()
        sampled = rollout.sample_step(engine, questions, functools.partial(scored, mixed), cfg, parallel, step)
        own = range(parallel.rank, len(sampled.asked), ranks)
        assert [group[1].tokens[0] for group in sampled.completions] == [sampled.asked[i].prompt[-1] for i in own]
        found.append((sampled, engine.calls))
    return found


def test_groups_of_equal_correctness_are_replaced_by_those_of_new_questions_alike_on_every_rank(tmp_path) -> None:
    small = {"rollout__group_size": 3, "rollout__max_new_tokens": 8, "rollout__prompts_per_step": 5}

    def case(num: int, mixed: int, **changes: object) -> tuple[Config, int, int]:
        return training.config(tmp_path, tmp_path, **small | changes), num, mixed

    fixed = {"reward__overlong": {"buffer": 4, "penalty": 0.5}}
    cases = [
        case(40, 3),
        case(40, 3, rollout__dynamic_rounds=2),
        case(40, 1, rollout__dynamic_rounds=2),
        case(7, 50, rollout__dynamic_rounds=9),
        case(40, 3, rollout__dynamic_rounds=99, **fixed),
        case(40, 1),
    ]
    (alone,) = training.in_world("TP1", stepped, cases, 7)
    plain, two, all_mixed, few, many, mixed_plain = (sampled for sampled, _ in alone)

    def is_mixed(question: Question) -> bool:
        return question.prompt[-1] % 3 == 0

    questions = Questions([Question(f"q{i}", "", "", [1, 40 + i]) for i in range(40)], 0)
    assert plain.asked == plain.all_asked == questions.pick(7, 5) and plain.extra == {}
    expected = [(question, 0) for question in plain.asked]  # by place: the question, and the round that has asked it
    asked = [*plain.asked]
    for round_ in (1, 2):
        equal = [place for place, (question, _) in enumerate(expected) if not is_mixed(question)]
        assert equal  # otherwise this test shows nothing
        new = questions.pick_more(7, round_, len(equal), asked)
        for place, question in zip(equal, new, strict=True):
            expected[place] = question, round_
        asked += new
    assert two.asked == [question for question, _ in expected] and two.all_asked == asked
    assert len({question.question for question in asked}) == len(asked) and len({r for _, r in expected}) == 3
    assert two.batch.prompts == [question.prompt for question in two.asked]
    for place, (question, round_) in enumerate(expected):
        seed = derive_seed(0, "rollout", 7, place, *[round_] * (round_ > 0))
        ended = [question.prompt[-1], *map(int, str(seed)[:4]), 2, 0, 0]
        assert two.batch.tokens[3 * place : 3 * place + 3].tolist() == [ended, [question.prompt[-1]] * 8, ended]
        assert two.batch.correct[place].tolist() == [0, float(is_mixed(question)), 0]
    assert two.num_tokens == 20 * len(asked) and two.first.prompts == plain.batch.prompts
    right = sum(map(is_mixed, plain.asked)) / 15
    assert two.extra == {
        "reward/first_round_correct": pytest.approx(right),
        "rollout/rounds": 3,
        "rollout/dropped_groups_frac": pytest.approx(1 - 5 / len(asked)),
        "rollout/sampled_per_trained": len(asked) / 5,
    }
    same(all_mixed.batch, mixed_plain.batch)  # without equal groups: the bits of a run without the key
    # Of 7 questions two are left for the first round, for the first two places, and then none.
    assert len(few.all_asked) == 7 and few.extra["rollout/rounds"] == 2 and few.asked[2:] == few.all_asked[2:5]
    assert few.asked[:2] == few.all_asked[5:]
    assert all(map(is_mixed, many.asked)) and many.batch.correct.tolist() == [[0, 1, 0]] * 5
    assert many.batch.rewards.tolist() == [[0.125, 0, 0.125]] * 5  # of 6 and 8 tokens, a buffer of 4 before 8
    for layout in ("TP2", "TP2_EP4"):
        for found in training.in_world(layout, stepped, cases, 7):
            for (sampled, calls), (want, wanted_calls) in zip(found, alone, strict=True):
                assert calls == wanted_calls and sampled.all_asked == want.all_asked and sampled.extra == want.extra
                same(sampled.batch, want.batch)


def kept(cfg: Config, layout: str, step: int) -> tuple[list[dict], dict[str, float], list[tuple[str, bool]]]:
    """The rows of a step, the means of their parts, and by place and round the question and whether it is mixed."""
    parallel = world.open_layout(layout)
    questions = Questions([Question(f"q{i}", "", "", [1, 40 + i], position=i) for i in range(40)], 0)

    def is_mixed(question: Question) -> bool:
        return question.prompt[-1] % 3 == 0

    def scored(answers) -> list[Score]:
        scores = []
        for question, one in answers:
            n = len(one.tokens)
            parts = {"length": float(n), "name": question.question} | ({"long": 1.0} if n == 8 else {})
            scores.append(Score(n / 16, True, n == 8 and is_mixed(question), None, parts, f"{question.question} {n}"))
        return scores

    sampled = rollout.sample_step(CountingEngine(), questions, scored, cfg, parallel, step)
    advantages = torch.arange(5 * 3).view(5, 3) / 8
    rows = rollout.of_step(sampled, advantages, {}, parallel)
    return rows, rollout.part_means(rows), [(one.question, is_mixed(one)) for one in sampled.all_asked]


def test_rank_0_alone_has_a_row_of_every_completion_also_of_replaced_groups(tmp_path) -> None:
    """By place: the replaced groups in the order of their rounds, then the trained one, alike in every layout."""
    small = {"rollout__group_size": 3, "rollout__max_new_tokens": 8, "rollout__prompts_per_step": 5}
    more = {"rollout__dynamic_rounds": 2, "reward__overlong": {"buffer": 4, "penalty": 0.5}}
    cfg = training.config(tmp_path, tmp_path, **small, **more)
    ((rows, means, all_asked),) = training.in_world("TP1", kept, cfg, "TP1", 7)
    by_place: list[list[tuple[str, bool]]] = [[one] for one in all_asked[:5]]
    later = all_asked[5:]
    for _ in range(2):
        for groups in by_place:
            if not groups[-1][1]:
                groups.append(later.pop(0))
    assert later == [] and max(map(len, by_place)) == 3
    expected = []
    for place, groups in enumerate(by_place):
        for name, is_mixed in groups:
            trained = (name, is_mixed) == groups[-1]
            for sample, (n, logp) in enumerate(((6, None), (8, -1.5), (6, None))):
                penalty = 0.5 * (n - 4) / 4  # of 6 and 8 tokens, a buffer of 4 before 8
                known = {"step": 0, "id": f"train:{name[1:]}", "prompt": place, "sample": sample, "question": name}
                known |= {"gold": "", "reward": n / 16 - penalty * trained, "correct": n == 8 and is_mixed}
                known |= {"parsable": True, "answer": None, "tokens": n, "finish": "length" if n == 8 else "stop"}
                known |= {"advantage": round((3 * place + sample) / 8, 4) if trained else None, "dropped": not trained}
                known |= {"parts": {"length": float(n), "name": name} | ({"long": 1.0} if n == 8 else {})}
                expected.append((known | {"completion": f"{name} {n}"}, logp))
    for row, (want, logp) in zip(rows, expected, strict=True):
        assert {"step": 0, **row} == want | {"logp": logp or row["logp"]}
    assert means == {"reward/part/length": 100 / 15, "reward/part/long": 1.0}
    for layout, tensor in (("TP2", 1), ("TP2", 2), ("TP2_EP4", 2)):
        split = cfg.changed(rollout={"tensor": tensor})
        (first, *_), *others = training.in_world(layout, kept, split, layout, 7)
        assert first == rows and all(found[:2] == ([], {}) for found in others)


def answered(*groups: list[tuple[list[int], float]]) -> Rollout:
    """A rollout of these groups of (tokens, probability of the completion)."""
    rows = [row for group in groups for row in group]
    width = max(len(tokens) for tokens, _ in rows)
    padded_tokens = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens, _ in rows])
    logp = torch.tensor([[math.log(p), *[0.0] * (width - 1)] for _, p in rows])
    shape = (len(groups), len(groups[0]))
    lengths = [len(tokens) for tokens, _ in rows]
    return Rollout([[1]] * len(groups), padded_tokens, logp, lengths, torch.zeros(len(rows)), *[torch.zeros(shape)] * 3)


def test_repeated_completions_are_counted() -> None:
    a, b = ([5], 0.5), ([5, 0], 0.25)  # b is a with one more token, of the id with which rows are filled up
    assert rollout.repeated_frac(answered([a, b, a, a], [b, b, b, b])) == (2 + 3) / 6


# ------------------------------------------------------------------------------------------------------------- evaluate


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
        (29, 29, 1 - 0.1170, 1.0),  # by hand: n / (n + z^2)
    ],
)
def test_wilson_gives_the_textbook_intervals(successes, n, low, high) -> None:
    assert evaluate.wilson(successes / n, n) == pytest.approx((low, high), abs=5e-5)


# ------------------------------------------------------------------------------------------------ evaluate

QUESTIONS = [Question(f"q{i}", "", str(i), [1, i + 3], position=i) for i in range(7)]


class SeedEngine:
    """A greedy answer is the prompt's last token. Sample j has 1 + j + (last digit of the seed) such tokens."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def sample(self, prompts, *, seeds, num_samples, max_new_tokens, temperature, turns):
        if temperature == 0.0:
            self.calls.append(len(prompts))
            return [[Completion([prompt[-1]], [], "stop")] for prompt in prompts]
        assert temperature == 0.5
        answers = []
        for prompt, seed in zip(prompts, seeds, strict=True):
            sizes = [seed % 10 + 1 + sample for sample in range(num_samples)]
            answers.append([Completion([prompt[-1]] * size, [], "stop") for size in sizes])
        return answers


def score(answers: Sequence[tuple[Question, Completion]]) -> list[Score]:
    """A greedy answer is right if its question is even, a sampled answer if 3 divides its length plus its token.

    Accuracy counts right answers, whatever they earn.
    """
    sizes = [(one.tokens[0], len(one.tokens)) for _, one in answers]
    return [Score(-0.5, n != 2, bool(token % 2) if n == 1 else (n + token) % 3 == 0) for token, n in sizes]


def evaluated(cfg: Config, layout: str, **sets: list[Question]) -> tuple[dict, list[dict], list[int]]:
    """Summary and outcomes, and the number of prompts in each call of this rank's engine."""
    engine, held_out = SeedEngine(), {"": QUESTIONS, **sets}
    result = evaluate.evaluate(engine, held_out, score, cfg.eval, cfg.rollout, world.open_layout(layout))
    return *result, engine.calls


def config(tmp_path: Path, **changes: object) -> Config:
    return training.config(tmp_path, tmp_path, **{"eval__samples": 2, "eval__temperature": 0.5, **changes})


def test_an_evaluation_depends_neither_on_ranks_nor_on_waves_nor_on_the_seed(tmp_path) -> None:
    """Every rank samples equally often: engines in lockstep wait for each other in every call."""
    ((*expected, _),) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    for layout in asked(["DP2", "TP2_EP2_DP2", nightly("TP4_EP4_DP2")]):  # eight have less than one question each
        cfg = config(tmp_path, eval__batch_size=3, train__seed=1)
        ranks = training.in_world(layout, evaluated, cfg, layout)
        assert all([*found[:2]] == expected[:2] for found in ranks)
        assert [rows for _, _, rows, _ in ranks] == [expected[2], *[[]] * (len(ranks) - 1)]
        if layout == "DP2":  # two ranks have 4 and 3 questions: a call for each wave
            assert [calls for *_, calls in ranks] == [[3, 1], [3, 0]]


def test_summary_and_outcomes_by_hand(tmp_path) -> None:
    ((summary, outcomes, rows, _),) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    assert [(row["id"], row["sample"]) for row in rows[:4]] == [
        ("test:0", 0),
        ("test:0", 1),
        ("test:0", 2),
        ("test:1", 0),
    ]
    assert [row["correct"] for row in rows[::3]] == [bool(one["greedy"]) for one in outcomes]
    assert [row["question"] for row in outcomes] == list(range(7))
    assert [row["gold"] for row in outcomes] == ["0", "1", "2", "3", "4", "5", "6"]
    assert [row["greedy"] for row in outcomes] == [1, 0, 1, 0, 1, 0, 1]
    assert summary["eval/greedy_accuracy"] == pytest.approx(4 / 7)
    assert (summary["eval/greedy_low"], summary["eval/greedy_high"]) == evaluate.wilson(4 / 7, 7)
    assert summary["eval/greedy_unparsable"] == 0 and summary["eval/greedy_length_mean"] == 1
    # Two lengths in succession: at most one of the samples is right.
    samples = [row["sampled"] for row in outcomes]
    assert all(len(pair) == 2 for pair in samples)
    assert summary["eval/sampled_accuracy"] == pytest.approx(sum(map(sum, samples)) / 14)
    assert summary["eval/pass@2"] == pytest.approx(sum(map(max, samples)) / 7) and 0 < summary["eval/pass@2"] < 1
    low, high = evaluate.wilson(summary["eval/sampled_accuracy"], 7)  # questions are counted, not samples
    assert (summary["eval/sampled_low"], summary["eval/sampled_high"]) == (low, high)
    assert summary["eval/num_questions"] == 7 and summary["eval/samples"] == 2


def test_sets_are_measured_beside_the_main_one_and_change_none_of_its_bits(tmp_path) -> None:
    """An answer depends on the name of its set and its place: not on the other sets or on their order."""
    few = QUESTIONS[2:6]
    ((summary, outcomes, *_),) = training.in_world("TP1", evaluated, config(tmp_path), "TP1")
    results = {}
    for layout, names in (("TP1", ["math", "other"]), ("DP2", ["other", "math"])):
        cfg = config(tmp_path, eval__num_questions=6, eval__batch_size=3)
        with_sets = functools.partial(evaluated, **dict.fromkeys(names, few))
        both, rows, *_ = training.in_world(layout, with_sets, cfg, layout)[0]
        assert rows[:6] == outcomes[:6] and "set" not in rows[0]
        results[layout] = both, {name: [row for row in rows if row.get("set") == name] for name in names}
    assert results["TP1"] == results["DP2"]
    both, by_set = results["TP1"]
    assert {key for key in both if key.count("/") == 1} == summary.keys()
    assert {key.replace("eval/math/", "eval/") for key in both if "math" in key} == summary.keys()
    assert both["eval/math/num_questions"] == 4 and both["eval/num_questions"] == 6  # at most so many of each
    assert [row["greedy"] for row in by_set["math"]] == [1, 0, 1, 0] and both["eval/math/greedy_accuracy"] == 0.5
    assert both["eval/other/pass@2"] == sum(max(row["sampled"]) for row in by_set["other"]) / 4
    assert [row["sampled"] for row in by_set["math"]] != [row["sampled"] for row in by_set["other"]]
    assert evaluate.headline(both, "math").endswith("greedy 50.0 % (15.0-85.0), n = 4")


def test_no_samples_and_fewer_questions(tmp_path) -> None:
    cfg = config(tmp_path, eval__samples=0, eval__num_questions=3)
    ((summary, outcomes, _, _),) = training.in_world("TP1", evaluated, cfg, "TP1")
    assert summary["eval/greedy_accuracy"] == pytest.approx(2 / 3) and len(outcomes) == 3
    assert not [key for key in summary if "sampled" in key or "pass@" in key]
    assert all(row["sampled"] == [] for row in outcomes)


def test_the_result_is_told_in_one_line() -> None:
    before = {"eval/sampled_accuracy": 0.312, "eval/sampled_low": 0.285, "eval/sampled_high": 0.341}
    after = {"eval/sampled_accuracy": 0.84, "eval/sampled_low": 0.816, "eval/sampled_high": 0.861}
    assert evaluate.result_line(before, after | {"eval/num_questions": 1024}, "arithmetic") == (
        "arithmetic accuracy 31.2 % -> 84.0 % (95 % interval 81.6-86.1, sampled, n = 1,024 held-out questions)"
    )


def measured(arguments: list[str]) -> int:
    training.lighten()
    return evaluate.main(arguments)


def measured_in(folder: Path) -> int:
    os.chdir(folder / f"rank{os.environ['RANK']}")
    return measured(["config.yaml"])


@pytest.mark.parametrize(
    ("tensor", "golds", "named"),
    [((1, 2), "22", "the section parallel of the configuration"), ((1, 1), "23", "the held-out questions")],
)
def test_ranks_that_have_read_other_files_are_told_before_they_measure(model, tmp_path, tensor, golds, named) -> None:
    """Each rank has files of its own, as on another node. The sizes decide which groups a rank waits for."""
    for rank, gold in enumerate(golds):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        files = {"data__source": "file", "data__train_path": "questions.jsonl", "data__test_path": "questions.jsonl"}
        cfg = training.config(model, tmp_path, parallel__tensor=tensor[rank], **files)
        (folder / "config.yaml").write_text(to_yaml(cfg))
        question = {"question": "1 + 1?", "answer": f"#### {gold}"}
        (folder / "questions.jsonl").write_text(json.dumps(question) + "\n")
    log = tmp_path / "log"
    assert world.as_torchrun(2, measured_in, tmp_path, log=log) == [2, 2]
    assert f"error: {named}: rank 1 did not read what rank 0 read; use the same files" in log.read_text()


def test_the_command_refuses_an_engine_that_cannot_run_the_model(model, tmp_path) -> None:
    """And what no engine can do with the model."""
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(training.config(model, tmp_path)))
    refused = {
        "rollout.engine=vllm": "rollout.engine: vllm",
        "model.quantisation=int4": "model.quantisation: int4 cannot store moe_intermediate_size 16, no multiple of 32",
    }
    for override, said in refused.items():
        log = tmp_path / override
        assert world.as_torchrun(1, measured, [str(path), override], log=log) == [2], override
        assert log.read_text().startswith(f"error: {said}"), log.read_text()


@pytest.mark.parametrize("quantisation", ["int4", ci("none")])
def test_the_command_measures_what_the_first_evaluation_of_a_run_measures(tmp_path: Path, quantisation: str) -> None:
    """On another number of ranks, and with the overrides of the command line."""
    width = 32 if quantisation == "int4" else 16  # 32 values of int4 have one scale
    model = training.make_model(tmp_path / "model", expert_width=width)
    sets = tmp_path / "own.jsonl"
    sets.write_text("".join(json.dumps({"question": f"{n} + 1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(5)))
    changes = {"eval__samples": 2, "eval__sets": {"own": str(sets)}, "model__quantisation": quantisation}
    cfg = training.config(model, tmp_path, train__steps=1, **changes)
    run_dir = training.run_all({"run": ("DP2", cfg)})["run"]
    first = json.loads((run_dir / "eval.jsonl").read_text().splitlines()[0])
    assert 0 < first["eval/greedy_accuracy"] < 1 and first["eval/num_questions"] == 9
    path, log = tmp_path / "config.yaml", tmp_path / "log"
    path.write_text(to_yaml(cfg))
    assert first["eval/own/num_questions"] == 5
    lines = [
        f"{model}: arithmetic accuracy: {evaluate.headline(first)}",
        f"{model}: own accuracy: {evaluate.headline(first, 'own')}",
    ]
    for ranks in asked([1, ci(2)]):
        arguments = [str(path), "train.seed=5", f"name=ranks{ranks}"]
        assert world.as_torchrun(ranks, measured, arguments, log=log) == [0] * ranks
        assert log.read_text().splitlines()[-2:] == lines
    if quantisation != "none":  # it makes a difference
        assert world.as_torchrun(1, measured, [str(path), "model.quantisation=none"], log=log) == [0]
        assert log.read_text().splitlines()[-2] != lines[0]
    sets.write_text('{"question": "1 + 1?", "answer": "Two"}\n')  # a gold answer that strict cannot compare
    own = [str(path), "data.source=file", f"data.train_path={sets}", f"data.test_path={sets}", "eval.sets={}"]
    assert world.as_torchrun(1, measured, own, log=log) == [2] and "must be one number, not 'Two'" in log.read_text()
