"""preflight.py --groups: groups that work pass, and a group that does not work is named."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.distributed as dist
import world
from launched import launch

import parallel_setup
from checks import groups
from checks.launched import Answer
from knobs import ParallelConfig
from parallel_setup import Parallel


def check_layout(tensor: int, expert: int) -> tuple[list, str, bool]:
    return check(parallel_setup.open_layout(ParallelConfig(tensor=tensor, expert=expert), torch.device("cpu")))


def check(parallel: Parallel) -> tuple[list, str, bool]:
    results = groups.measure(parallel)
    rows = groups.summary(results)
    return results, groups.as_text(rows), all(row["answer"] == "right" for row in rows)


def check_with_a_fault(parallel: Parallel, collective: str, place: int) -> tuple[str, bool]:
    """One element is wrong on one rank, in every answer of one collective over a group of two ranks."""
    real = getattr(dist, collective)

    def faulty(out, *args, group, **kwargs):
        real(out, *args, group=group, **kwargs)
        if parallel.rank == place and dist.get_world_size(group) == 2:
            out.view(-1)[3] += 1

    setattr(dist, collective, faulty)
    return check(parallel)[1:]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (
            (8, 2, 4),
            {
                "tensor": {(0, 1), (2, 3), (4, 5), (6, 7)},
                "expert": {(0, 1, 2, 3), (4, 5, 6, 7)},
                "data": {(0, 2, 4, 6), (1, 3, 5, 7)},
                "expert_data": {(0, 4), (1, 5), (2, 6), (3, 7)},
            },
        ),
        (
            (4, 2, 4),
            {"tensor": {(0, 1), (2, 3)}, "expert": {(0, 1, 2, 3)}, "data": {(0, 2), (1, 3)}},
        ),
    ],
)
def test_the_groups_that_carry_traffic_are_checked_and_no_other(sizes, expected):
    """Computed by hand: tensor ranks are neighbours, then come expert ranks; all other ranks hold copies."""
    ranks, *layout = sizes
    for results, table, right in world.run(ranks, check_layout, *layout):
        assert right and "WRONG" not in table
        assert all(0 < result.milliseconds < 60e3 for result in results)
        found: dict[str, set] = {}
        for result in results:
            found.setdefault(result.group, set()).add(tuple(result.ranks))
        assert found == expected | {"world": {tuple(range(ranks))}}


@pytest.mark.parametrize(
    ("collective", "shown"),
    [("all_reduce", "all-reduce"), ("all_gather_into_tensor", "all-gather"), ("all_to_all_single", "all-to-all")],
)
def test_a_wrong_answer_is_named_with_its_group_and_ranks(collective, shown):
    """In TP2 x DP2, rank 2 shares a tensor group with rank 3 and a data group with rank 0."""
    for table, right in world.in_layouts(["TP2_EP2_DP2"], check_with_a_fault, collective, 2)["TP2_EP2_DP2"]:
        assert not right
        wrong = [line for line in table.splitlines() if "WRONG" in line]
        assert all(shown in line for line in wrong)
        assert any(re.match(r"tensor .*WRONG in ranks \[2, 3\]: element 3 is", line) for line in wrong)
        assert any(re.match(r"data .*WRONG in ranks \[0, 2\]: element 3 is", line) for line in wrong)


def test_the_exit_code_says_whether_all_were_right(monkeypatch):
    world._import_megatron()
    for right, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(groups, "answer", lambda cfg, parallel, right=right: Answer(right, "", []))
        assert world.as_torchrun(1, groups.main, ["configs/tiny_cpu.yaml", "parallel.expert=1"]) == [code]


@pytest.mark.nightly
def test_both_sides_of_rollout_ranks_and_what_goes_between_them_are_checked(tmp_path):
    """Two trainers and one sampler, as processes; each side answers for itself."""
    asked = ("configs/tiny_cpu.yaml", "rollout.ranks=1", "rollout.staleness=1", "loss.importance=token")
    with launch(3, "preflight.py", "--groups", *asked, "--json", tmp_path / "f.json", log=tmp_path / "log") as started:
        assert started.wait() == 0, started.text
    rows = [json.loads((tmp_path / name).read_text()) for name in ("f.json", "samplers-f.json")]
    between = [("to samplers", "right"), ("to trainers", "right")]
    assert [[(row["group"], row["answer"]) for row in side][-2:] for side in rows] == [between, between]
    assert {row["group"] for row in rows[0]} > {"expert", "world"} and rows[1][0]["group"] == "world"
