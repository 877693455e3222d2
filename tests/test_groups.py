"""preflight.py --groups: groups that work pass, and a group that does not work is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import world
from launched import launch as start

import parallel_setup
from knobs import ParallelConfig
from parallel_setup import Parallel
from plan import groups, launched

ROOT = Path(__file__).parents[1]
LAYOUTS = {  # name: (ranks, tensor, expert, expert_tensor)
    "TP8": (8, 8, 1, 1),
    "TP2_EP4_DP4": (8, 2, 4, 1),
    "TP2_EP2_ETP2": (4, 2, 2, 2),
}


def check_layouts(layouts: list[tuple[int, int, int]]) -> list[tuple[list, str, bool]]:
    answers = []
    for tensor, expert, expert_tensor in layouts:
        sizes = {"tensor": tensor, "expert": expert, "expert_tensor": expert_tensor}
        answers.append(check(parallel_setup.open_layout(ParallelConfig(**sizes), torch.device("cpu"))))
        parallel_setup.close_layout()
    return answers


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


@pytest.fixture(scope="module")
def everywhere() -> dict[str, list]:
    answers = {}
    for ranks in {sizes[0] for sizes in LAYOUTS.values()}:
        names = [name for name, sizes in LAYOUTS.items() if sizes[0] == ranks]
        by_rank = world.run(ranks, check_layouts, [LAYOUTS[name][1:] for name in names])
        answers |= {name: [rank[i] for rank in by_rank] for i, name in enumerate(names)}
    return answers


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_a_sound_world_are_right_and_their_times_are_known(layout, everywhere):
    for results, table, right in everywhere[layout]:
        assert right and "WRONG" not in table
        assert all(0 < result.milliseconds < 60e3 for result in results)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("TP8", {"tensor": {tuple(range(8))}, "expert_data": {tuple(range(8))}}),
        (
            "TP2_EP4_DP4",
            {
                "tensor": {(0, 1), (2, 3), (4, 5), (6, 7)},
                "expert": {(0, 1, 2, 3), (4, 5, 6, 7)},
                "data": {(0, 2, 4, 6), (1, 3, 5, 7)},
                "expert_data": {(0, 4), (1, 5), (2, 6), (3, 7)},
            },
        ),
        (
            "TP2_EP2_ETP2",
            {
                "tensor": {(0, 1), (2, 3)},
                "expert": {(0, 2), (1, 3)},
                "expert_tensor": {(0, 1), (2, 3)},
                "expert_tensor x expert": {(0, 1, 2, 3)},
                "data": {(0, 2), (1, 3)},
            },
        ),
    ],
)
def test_the_groups_that_carry_traffic_are_checked_and_no_other(layout, expected, everywhere):
    """Computed by hand: tensor ranks are neighbours, then come expert ranks; all other ranks hold copies."""
    ranks = LAYOUTS[layout][0]
    for results, _, _ in everywhere[layout]:
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
        monkeypatch.setattr(groups, "answer", lambda cfg, parallel, right=right: launched.Answer(right, "", []))
        assert world.as_torchrun(1, groups.main, ["configs/tiny_cpu.yaml", "parallel.expert=1"]) == [code]


@pytest.mark.slow
def test_the_command_proves_sixteen_ranks(tmp_path):
    command = ["configs/tiny_16.yaml", "parallel.tensor=4", "parallel.expert=4"]
    world._import_megatron()
    codes = world.as_torchrun(16, groups.main, command, log=tmp_path / "log")
    lines = (tmp_path / "log").read_text().splitlines()
    assert codes == [0] * 16, lines
    assert "16 ranks on cpu, gloo" in lines
    for group, count, ranks in (("tensor", 4, 4), ("expert", 4, 4), ("data", 4, 4), ("expert_data", 4, 4)):
        row = next(line.split() for line in lines if re.match(rf"{group} .*all-to-all", line))
        assert row[1:4] == [str(count), str(ranks), "all-to-all"] and row[-1] == "right"


def test_a_layout_that_does_not_fit_is_one_line(tmp_path):
    with start(1, "preflight.py", "--groups", "configs/tiny_16.yaml", log=tmp_path / "log") as started:
        assert started.wait(120) == 1  # the exit code of torchrun itself
    assert "error: parallel.tensor: 4 ranks of a group do not divide the 1 that were started" in started.text


def test_a_missing_configuration_is_one_line(capsys):
    assert groups.main([]) == 2
    assert capsys.readouterr().err == "error: CONFIG: missing; needed: a YAML file, e.g. configs/qwen3.yaml\n"
