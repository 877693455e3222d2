"""rollout.ranks: ranks that only sample give the bytes of a run whose ranks do both, and no fault passes unnoticed.

The ranks are forked processes with the whole command: without an agent, so that each must notice by itself that
another one is lost, or with torchrun's (agents.py).
"""

import contextlib
import functools
import itertools
import json
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import agents
import apart
import launched
import live_bytes
import planted
import pytest
import torch
import training
import world
from planting import before
from refused import refusal
from tiers import ci, nightly

import rollout
from facts import exits
from facts.exits import InputError, Tripped
from inputs.config import to_yaml
from knobs import Config
from learner import Learner
from parallel_setup import Parallel
from run import check, opening
from run.bridge import Bridge
from run.sampling_ranks import Delivery, Samplers, SeparateSampler
from weights import adapter_weights

OWN = Path(__file__).parents[1] / "support" / "own.py"
RUN = {
    "reward__function": f"{OWN}:reward",
    "reward__check_gold": False,
    "loss__importance": "token",
    "train__steps": 4,
    "train__checkpoint_every": 1,
    "train__completions_logged": 3,
    "train__keep_last": 9,
    "eval__every": 3,
    "rollout__staleness": 1,
}
BF16 = {"model__dtype": "bf16"}


def configuration(model: Path, folder: Path, layout: str = "TP2_EP2", ranks: int = 2, **changes: object) -> Config:
    """A run whose last ``ranks`` ranks sample; 0: all ranks do both."""
    return training.in_layout(training.config(model, folder, rollout__ranks=ranks, **RUN | changes), layout)


def colocated(model: Path, folder: Path, layout: str = "TP2_EP2", **changes: object) -> Path:
    """The folder of the run whose ranks do both."""
    cfg = configuration(model, folder, layout, 0, **changes)
    training.in_world(layout, training.train_each, [(layout, cfg)], False)
    run = training.only_run(cfg)
    assert all(row["actor/grad_norm"] > 0.01 for row in training.metrics(run)), "its policy must move"
    return run


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory) -> Path:
    """The run of two ranks that do both, in the layout TP2_EP2."""
    return colocated(model, tmp_path_factory.mktemp("reference"))


def assert_same_bytes(found: Path, expected: Path, records: Sequence[str] = training.RECORDS) -> None:
    """The records, and all tensors of the checkpoints, are equal to the byte."""
    tensors = [str(path.relative_to(expected)) for path in expected.glob("checkpoints/step-*/*.safetensors")]
    assert len(tensors) >= 3
    training.assert_same_bytes(found, expected, [*records, *tensors])


# ------------------------------------------------------------------------------------------------ the same bytes


def test_two_trainers_and_two_samplers_under_torchrun_write_what_two_ranks_write(model, reference, tmp_path) -> None:
    cfg = configuration(model, tmp_path / "out")
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    code, text = agents.start(4, "train_grpo.py", tmp_path / "config.yaml", log=tmp_path / "log").end()
    assert code == 0, text
    assert_same_bytes(training.only_run(cfg), reference)


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ci("TP2_EP2", BF16 | {"rollout__sync": "merged", "replay__mode": "r3"}),
        nightly("EP2", BF16 | {"rollout__sync": "adapter", "optim__prompts_per_update": 3}),
        nightly("DP2", {"aqn__schedule": "constant"}),
        nightly("TP2", {"rollout__dynamic_rounds": 2}),
        nightly("EP2", {"replay__mode": "r2", "eval__every": 1}),
        nightly("TP1", {"eval__every": 0}),
    ],
)
def test_other_runs_write_what_ranks_that_do_both_write(layout, changes, model, tmp_path) -> None:
    expected = colocated(model, tmp_path / "colocated", layout, **changes)
    ranks = world.LAYOUTS[layout][0]  # to train, and as many to sample
    cfg = configuration(model, tmp_path / "apart", layout, ranks, **changes)
    ended = apart.run(2 * ranks, cfg, tmp_path)
    assert ended.codes == [0] * 2 * ranks, ended.text
    assert_same_bytes(training.only_run(cfg), expected)


@pytest.mark.nightly
@pytest.mark.vllm
@pytest.mark.parametrize("tensor", [1, 2])
def test_vllm_on_ranks_of_its_own_writes_what_ranks_that_do_both_write(tensor, tmp_path) -> None:
    """With a copy of the model on each sampler, and with one that both share; with the routes of vLLM."""
    model, runs = training.make_model(tmp_path / "model", head_dim=32, expert_width=32), []
    vllm = {"rollout__engine": "vllm", "rollout__tensor": tensor, "replay__mode": "r3"}
    for name, ranks in (("both", 0), ("apart", 2)):
        cfg = configuration(model, tmp_path / name, ranks=ranks, **vllm)
        path = tmp_path / f"{name}.yaml"
        path.write_text(to_yaml(cfg))
        with launched.launch(2 + ranks, "train_grpo.py", path, log=tmp_path / f"{name}.log") as started:
            assert started.wait() == 0, started.text
        runs.append(training.only_run(cfg))
    assert_same_bytes(runs[1], runs[0])


@pytest.mark.ci
@pytest.mark.parametrize("layout", ["TP2_EP2", nightly("DP2")])
def test_two_trainers_and_one_sampler_write_what_two_ranks_write(layout, model, tmp_path) -> None:
    """Of the colocated run each rank samples all prompts, as the sampler does, so the batches of decoding are equal.

    sync/update_share and sync/update_error are sums over the shards of the sampling side, of which one has one shard
    and the other two, so the order of the additions differs.
    """
    expected = colocated(model, tmp_path / "colocated", layout, rollout__tensor=2)
    cfg = configuration(model, tmp_path / "apart", layout, 1)
    ended = apart.run(3, cfg, tmp_path)
    assert ended.codes == [0] * 3, ended.text
    found = training.only_run(cfg)
    assert_same_bytes(found, expected, training.RECORDS[1:])
    for row, wanted in zip(training.metrics(found), training.metrics(expected), strict=True):
        sums = {key for key in wanted if key.startswith("sync/update_")}
        assert sums and row == wanted | {key: pytest.approx(wanted[key], rel=1e-4, abs=1e-7) for key in sums}


# ------------------------------------------------------------------------------------------------ a rank that is lost

# In step 3 of 4. The fourth policy that is sent is that before step 3, after two at the start; the fourth message from
# the samplers is the rollout of step 3, after an evaluation.
PLACES = {
    "the policy is gathered": [(Bridge, "send_policy", 4), (adapter_weights, "whole", 3)],
    "the policy is sent": [(Bridge, "send_policy", 4), (Bridge, "broadcast", 3)],
    "the policy is taken": [(Bridge, "receive_policy", 4), (Bridge, "broadcast", 3)],
    "the rollout is half sent": [(Samplers, "_send", 4), (Bridge, "broadcast", 2)],
    "the rollout is half taken": [(SeparateSampler, "_receive_rollout", 3), (Bridge, "broadcast", 2)],
    "the step is learned": [(Parallel, "sync_gradients_", 3)],
    "the step is sampled": [(rollout, "sample_step", 3)],
    "the last step is saved": [(opening.Run, "finish", 1)],
}
LOST = [
    ci(3, "the policy is taken"),
    nightly(0, "the rollout is half taken"),
    nightly(0, "the policy is sent"),
    nightly(1, "the policy is gathered"),
    nightly(1, "the step is learned"),
    nightly(2, "the rollout is half sent"),
    nightly(3, "the step is sampled"),
    nightly(0, "the last step is saved"),  # after the end of the samplers, which have nothing to do after the restart
]


@pytest.mark.parametrize(("rank", "place"), LOST)
def test_a_killed_rank_ends_all_others_and_the_resumed_run_has_the_same_bytes(
    rank, place, model, reference, tmp_path
) -> None:
    """Ranks 0 and 1 train, 2 and 3 sample."""
    cfg = configuration(model, tmp_path / "out")
    killed = apart.run(4, cfg, tmp_path, apart.strike("die", rank, *PLACES[place]))
    assert killed.codes[rank] == -signal.SIGKILL, killed.text
    ended = {0} if place == "the last step is saved" else set()
    assert all(code is not None for code in killed.codes) and ended == {0} & {*killed.codes}, killed.text
    run = training.only_run(cfg)
    saved = len([*run.glob("checkpoints/step-*")])
    assert 1 <= saved <= 4 and (rank == 0 or "error: " in (run / "log.txt").read_text())
    again = apart.run(4, cfg, tmp_path)
    assert again.codes == [0] * 4 and f"resumed {run.name} after {saved} of 4 steps" in again.text, again.text
    assert (run / "finished.json").exists()
    assert_same_bytes(training.only_run(cfg), reference)


@pytest.mark.nightly
def test_a_run_goes_on_without_ranks_of_its_own_for_sampling(model, reference, tmp_path) -> None:
    """The machine of the samplers is lost after two steps; the trainers go on with staleness 1, and do both."""
    cfg = configuration(model, tmp_path / "out")
    apart.run(4, cfg, tmp_path, apart.strike("die", 2, *PLACES["the step is sampled"]))
    again = apart.run(2, configuration(model, tmp_path / "out", ranks=0), tmp_path)
    assert again.codes == [0, 0] and re.search(r"resumed tiny-\S+ after [12] of 4 steps", again.text), again.text
    assert_same_bytes(training.only_run(cfg), reference)


@pytest.mark.nightly
def test_torchrun_ends_with_the_lost_sampler_and_a_restart_goes_on(model, reference, tmp_path) -> None:
    """After the restart, which resumes from step 2, the sampler has no fourth step."""
    cfg = configuration(model, tmp_path / "out")
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    lost = apart.strike("die", 2, (rollout, "sample_step", 4))
    agent = agents.start(4, "train_grpo.py", tmp_path / "config.yaml", log=tmp_path / "log", plant=lost, restarts=1)
    code, text = agent.end()
    assert code == 0 and "after 2 of 4 steps" in text, text
    assert_same_bytes(training.only_run(cfg), reference)


# ------------------------------------------------------------------------------------------------ a rank that stalls

STALL = 6
WAITS = "the other side was asked for"
STALLED = [
    ("stop", 2, "the step is sampled", f"rank 0: stood still for {{}} s after: {WAITS} the policy to be taken "),
    nightly("stop", 0, "the step is learned", f"rank 2: stood still for {{}} s after: {WAITS} "),
    nightly("stop", 1, "the step is learned", "rank 0: stood still for {} s after: update of step 3 "),
    nightly("hang", 3, "the step is sampled", "rank 3: stood still for {} s after: sync of step 3 "),
    nightly("hang", 2, "the rollout is half sent", f"rank 2: stood still for {{}} s after: {WAITS} a rollout or "),
]


@pytest.mark.ci
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rank", "place", "said"), STALLED)
def test_a_rank_that_stands_still_ends_the_run_and_the_message_says_where(
    kind, rank, place, said, model, tmp_path
) -> None:
    """A stopped process cannot say anything itself; the ranks that wait for it do."""
    cfg = configuration(model, tmp_path / "out", train__stall_seconds=STALL)
    ended = apart.run(4, cfg, tmp_path, apart.strike(kind, rank, *PLACES[place]))
    assert ended.codes.count(None) == (kind == "stop") and (ended.codes[rank] is None) == (kind == "stop"), ended.text
    assert 0 not in ended.codes and exits.STALLED in ended.codes, ended.codes
    before, after = map(re.escape, said.split("{}"))
    assert re.search(rf"{before}\d+{after}", ended.text), ended.text


@pytest.mark.nightly
@pytest.mark.slow
def test_a_side_that_works_for_long_does_not_end_the_other(model, tmp_path) -> None:
    """Steps have progress, but for longer than the limits on standing still and on collectives.

    The trainers wait for the second rollout before they send a policy, and for the last one without sending any. The
    samplers wait while the second step is learned.
    """

    def slow(*args) -> None:
        beat = args[-1].heartbeat.beat if isinstance(args[0], Learner) else args[0].beat
        for _ in range(25):
            time.sleep(0.3)
            beat()

    def plant(patch: pytest.MonkeyPatch) -> None:
        for owner, name, steps in ((rollout, "sample_step", (2, 4)), (Learner, "update", (2,))):
            calls = itertools.count(1)
            act = functools.partial(lambda calls, steps, *args: next(calls) in steps and slow(*args), calls, steps)
            before(owner, name, act)(patch)

    cfg = configuration(model, tmp_path / "out", train__stall_seconds=3, parallel__timeout_seconds=6)
    ended = apart.run(4, cfg, tmp_path, plant)
    assert ended.codes == [0] * 4, ended.text
    rows = [json.loads(line) for line in (training.only_run(cfg) / "timing.jsonl").read_text().splitlines()]
    assert max(row["timing/step_s"] for row in rows) > 6, rows


# ------------------------------------------------------------------------------------------------ planted faults

TRAINERS, SAMPLERS = (0, 1), (2, 3)


def a_bit_flipped(patch: pytest.MonkeyPatch) -> None:
    """The lowest bit of one number of the fourth policy that arrives."""

    def flip() -> None:
        broadcast = Bridge.broadcast

        def flipped(bridge: Bridge, group, tensor: torch.Tensor, *args) -> None:
            broadcast(bridge, group, tensor, *args)
            tensor.view(torch.int32).flatten()[-1] ^= 1
            patch.setattr(Bridge, "broadcast", broadcast)

        patch.setattr(Bridge, "broadcast", flipped)

    apart.arm(patch, [(Bridge, "receive_policy", 4), (Bridge, "broadcast", 2)], flip)


STUCK = {"checks__off": ("logp_gap",)}
KEPT, SENT = planted.FAULTS["samplers keep old factors"], planted.FAULTS["trainers send the policy before"]
FAULTS = {
    "all samplers keep old factors": (SAMPLERS, KEPT, STUCK, "checks.adapters: step 3: the update of step 1"),
    "a sampler keeps old factors": ((3,), KEPT, {}, "checks.logp_gap: step 3: "),
    "the trainers send the policy before": (TRAINERS, SENT, STUCK, "checks.adapters: step 3: the update"),
    "the trainers count other steps": (
        TRAINERS,
        planted.FAULTS["trainers count other steps"],
        {},
        "rollout.ranks: sampler 0 needs the policy after 1 steps and got ",
    ),
    "two rollouts in the wrong order": (
        SAMPLERS,
        planted.FAULTS["two rollouts in the wrong order"],
        {},
        "rollout.ranks: step 2 got the rollout of step 2, which the policy after 0 steps sampled, without the quest",
    ),
    "a rollout with the number of another": (
        SAMPLERS,
        planted.FAULTS["a rollout with the number of another"],
        {},
        "rollout.ranks: step 2 got the rollout of step 3, which the policy after 0 steps sampled, with the quest",
    ),
    "experts of another rank": (SAMPLERS, planted.FAULTS["experts of another rank"], {}, "checks.logp_gap: step 3: "),
    "columns of another rank": (SAMPLERS, planted.FAULTS["columns of another rank"], {}, "checks.logp_gap: step 3: "),
    "a bit changed on the way": ((3,), a_bit_flipped, {}, "rollout.ranks: sampler 1 needs the policy after 2 steps "),
}


@pytest.mark.parametrize("name", [name if name == "a sampler keeps old factors" else nightly(name) for name in FAULTS])
def test_a_planted_fault_ends_the_run_and_is_named(name, model, tmp_path) -> None:
    ranks, plant, changes, message = FAULTS[name]
    cfg = configuration(model, tmp_path / "out", **changes)
    ended = apart.run(4, cfg, tmp_path, apart.on(ranks, plant))
    assert 0 not in ended.codes and ended.codes[ended.first] == 3, (ended.codes, ended.text)
    assert f"stopped: {message}" in ended.text and "  look at: " in ended.text, ended.text


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({}, None),
        ({"step": 4}, "step 4 got the rollout of step 5, which the policy after 2 steps sampled, with the questions"),
        ({"version": 3}, "which the policy after 3 steps sampled, with the questions"),
        ({"version": 3, "questions": [8, 7, 9]}, "which the policy after 3 steps sampled, without the questions"),
        ({"questions": [8, 7, 9]}, "which the policy after 2 steps sampled, without the questions"),
    ],
)
def test_a_rollout_of_another_step_policy_or_question_is_refused(found, said, monkeypatch) -> None:
    """The step has two questions. The third one is of a second round of dynamic sampling."""
    cfg = training.config(Path("model"), Path("out"), rollout__prompts_per_step=2)
    right = {"step": 3, "version": 2, "questions": [7, 8, 9]} | found
    questions = [SimpleNamespace(prompt=[token]) for token in right["questions"]]
    batch = live_bytes.rollout_of(cfg)
    sampled = rollout.Sampled(batch, [], [], questions, batch, 0, {})
    delivery = Delivery(right["step"], right["version"], {}, sampled, {})
    monkeypatch.setattr(SeparateSampler, "_receive_rollout", lambda self, what: (delivery, []))
    drawn = SimpleNamespace(pick=lambda step, count: [SimpleNamespace(prompt=[7]), SimpleNamespace(prompt=[8])])
    trainers = SeparateSampler(cfg, None, SimpleNamespace(questions=drawn), None, None)
    with pytest.raises(Tripped, match=said) if said else contextlib.nullcontext():
        trainers.sample(3)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [SAMPLERS, (3,)])
def test_samplers_that_read_other_questions_end_the_run_before_a_step(ranks, model, tmp_path) -> None:
    cfg = configuration(model, tmp_path / "out")
    ended = apart.run(4, cfg, tmp_path, apart.on(ranks, planted.FAULTS["another question"]))
    assert 0 not in ended.codes and ended.codes[ended.first] == 2, (ended.codes, ended.text)
    who, whom = ("the samplers", "the trainers") if ranks == SAMPLERS else ("rank 1", "rank 0")
    message = f"error: the training questions as prompts: {who} did not read what {whom} read; needed: the same files"
    assert message in ended.text and "step 1/4" not in ended.text, ended.text


# ------------------------------------------------------------------------------------------------ at the same time


def test_a_step_is_learned_while_the_next_one_is_sampled(model, tmp_path) -> None:
    """Each of the two waits until the other one has begun. A run that does one after the other would wait for ever."""

    def meet(here: str, there: str) -> None:
        (tmp_path / here).touch()
        deadline = time.monotonic() + 300
        while not (tmp_path / there).exists():
            assert time.monotonic() < deadline, f"{here} has begun, {there} has not"
            time.sleep(0.01)

    def sampled(*args) -> None:
        step = args[-1]
        if step > 0:
            meet(f"sampling-{step}", f"learning-{step - 1}")

    def learned(*args) -> None:
        step = args[4]
        if step + 1 < RUN["train__steps"]:
            meet(f"learning-{step}", f"sampling-{step + 1}")

    def plant(patch: pytest.MonkeyPatch) -> None:
        before(rollout, "sample_step", sampled)(patch)
        before(Learner, "update", learned)(patch)

    ended = apart.run(4, configuration(model, tmp_path / "out"), tmp_path, plant)
    assert ended.codes == [0] * 4, ended.text
    assert len([*tmp_path.glob("*ing-*")]) == 6


# ------------------------------------------------------------------------------------------------ refusals


def test_what_cannot_work_is_refused_with_what_is_needed(model, tmp_path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(configuration(model, tmp_path / "out")))
    for staleness in (0, 2):
        assert refusal(path, f"rollout.staleness={staleness}") == (
            f"rollout.staleness: {staleness}; needed with rollout.ranks, which are one step ahead: 1"
        )
    assert refusal(path, "loss.importance=none").startswith("rollout.staleness: 1 trains on samples of an older policy")
    for ranks, layout, message in (
        (2, "TP1", "rollout.ranks: 2 of 2 ranks sample, so none trains; needed: fewer"),
        (1, "TP1", "rollout.ranks: 2 of 1 ranks sample, so none trains; needed: fewer"),
        (5, "TP2_EP2", "trainers: parallel.tensor: 2 does not divide 3 ranks; nearest: 1"),
    ):
        cfg = configuration(model, tmp_path / "out", layout)
        with pytest.raises(InputError) as caught:
            check.check_settings(cfg, ranks)
        assert str(caught.value) == message


@pytest.mark.ci
def test_the_command_refuses_before_it_makes_a_folder(model, tmp_path) -> None:
    ended = apart.run(2, configuration(model, tmp_path / "out"), tmp_path)
    assert ended.codes == [2, 2], ended.text
    assert "\nrank 1: error: rollout.ranks: 2 of 2 ranks sample, so none trains; needed: fewer\n" in ended.text
    assert not [*tmp_path.glob("out/tiny-*")]
