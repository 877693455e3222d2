"""preflight.py as a command: what it accepts, what it refuses, and that the layouts it proposes work.

The sizes of the real models come from their published config.json. No weights and no torch are needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiers import ci

import preflight
from facts.devices import HARDWARE
from inputs import config, hf_config, rules
from plan import whole_run

ROOT = Path(__file__).parents[1]
QWEN3, QWEN15, TINY = (str(ROOT / "configs" / f"{name}.yaml") for name in ("qwen3", "qwen15_moe", "tiny_cpu"))


def report(capsys, *arguments: str) -> dict:
    """The JSON object of one call, whose exit code must fit its verdict."""
    code = preflight.main([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (code, found["verdict"]) in ((0, "fits"), (1, "refused"))
    return found


@pytest.mark.parametrize("name", ["qwen3", "qwen15_moe", "tiny_cpu", "tiny_16"])
def test_the_configurations_we_ship_fit(name, capsys):
    found = report(capsys, str(ROOT / "configs" / f"{name}.yaml"))
    assert found["verdict"] == "fits" and found["reasons"] == [] and found["alternatives"] == []
    assert found["ranks"] == (2 if name == "tiny_cpu" else 16)
    assert all(0 < size < found["per_rank"]["capacity_bytes"] for size in found["per_rank"]["phases"].values())


R3_ON_TWO_DIES = [  # run_2npu.sh
    "--ranks",
    "2",
    "parallel.tensor=2",
    "parallel.expert=2",
    "rollout.tensor=2",
    "model.quantisation=int4",
    "lora.expert_rank=16",
    "rollout.kv_cache_mib=4096",
    "replay.mode=r3",
    "model.recompute=true",
]


REFUSALS = [  # arguments, a part of the reason
    ([QWEN15, "parallel.expert=8"], "parallel.expert: 8 does not divide 60 experts"),
    ([QWEN3, "--ranks", "8"], "parallel.expert: 16 does not divide 8 ranks"),
    ([QWEN3, "optim.prompts_per_update=36"], "36 does not divide rollout.prompts_per_step 96; nearest: 32, 48"),
    ([QWEN3, "optim.tokens_per_micro_batch=1000"], "cannot hold one row"),
    ([QWEN3, "parallel.tensor=1", "parallel.expert=1", "rollout.expert_parallel=false"], "GiB on a rank"),
    ([QWEN3, "parallel.tensor=2"], "rollout.tensor: 4 with rollout.expert_parallel splits attention differently"),
    # 17 blocks of 128 tokens, 24,576 bytes a token
    ([QWEN3, "rollout.kv_cache_mib=10"], "10 is too small for one row of 2048 tokens; needed: 51 for one"),
    ([QWEN3, *R3_ON_TWO_DIES], "the 2 ranks of a single replica split the tokens"),
    ci([QWEN3, "parallel.tensor=3", "--ranks", "48"], "3 does not divide 4 key/value heads"),
    ci([QWEN3, "rollout.tensor=6"], "rollout.tensor: 6 does not divide 16 ranks"),
    ci([QWEN3, "parallel.tensor=1", "parallel.expert=1", "rollout.tensor=1", "--ranks", "1"], "GiB on a rank"),
    ci([TINY, "tiny_model.vocab_size=401", "parallel.tensor=2", "--ranks", "2"], "401 tokens of the vocabulary"),
]


def test_routes_are_recorded_where_each_rank_sees_all_tokens_or_replicas_share_the_experts(capsys):
    """The layouts that the refusal names; without replay, and under r2, run_2npu.sh's own layout fits."""
    for change in ("replay.mode=r2", "replay.mode=off", "rollout.expert_parallel=false"):
        assert report(capsys, QWEN3, *R3_ON_TWO_DIES, change)["verdict"] == "fits", change
    for arguments in ([QWEN3], ["configs/qwen15_moe.yaml"], [QWEN3, "--ranks", "32", "rollout.expert_parallel=false"]):
        assert report(capsys, *arguments, "replay.mode=r3")["verdict"] == "fits", arguments
    for other in report(capsys, QWEN3, *R3_ON_TWO_DIES)["alternatives"]:
        assert other["ranks"] > 2 or "rollout.expert_parallel=false" in other["overrides"]


@pytest.mark.parametrize(("arguments", "reason"), REFUSALS)
def test_a_refusal_names_its_rule_and_lists_layouts_that_fit(arguments, reason, capsys):
    found = report(capsys, *arguments)
    assert found["verdict"] == "refused" and any(reason in each for each in found["reasons"]), found["reasons"]
    assert found["alternatives"]
    own_overrides = [argument for argument in arguments[1:] if "=" in argument]
    for other in found["alternatives"]:
        again = report(capsys, arguments[0], *own_overrides, *other["overrides"], "--ranks", str(other["ranks"]))
        assert again["verdict"] == "fits" and again["per_rank"]["peak_bytes"] == other["peak_bytes"]
        # The trainer's own rules accept them, too.
        cfg = config.load_config(arguments[0], [*own_overrides, *other["overrides"]])
        arch = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0]
        rules.refuse_first(rules.trainer_problems(cfg, arch, other["ranks"]))
    asked = found["ranks"]
    order = [(other["ranks"] > asked, round(other["peak_bytes"] / 2**30, 1)) for other in found["alternatives"]]
    assert order == sorted(order), "what needs more ranks comes last"


def test_after_a_die_has_failed_the_largest_number_that_is_left_is_offered_with_its_script(capsys):
    """On a node of 16; run_12npu.sh and run_6npu.sh are for these models and numbers."""
    for path, asked, left, script in (
        (QWEN3, 14, 12, "run_12npu.sh"),
        (QWEN3, 11, 8, "run_8npu.sh"),
        (QWEN15, 7, 6, "run_6npu.sh"),
        (QWEN15, 13, 12, None),
    ):
        offered = {
            other["ranks"]: other["script"] for other in report(capsys, path, "--ranks", str(asked))["alternatives"]
        }
        assert max(ranks for ranks in offered if ranks < asked) == left and offered[left] == script
    assert preflight.main([QWEN3, "--ranks", "14"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "--ranks 12 " in line]
    assert line.endswith("rollout.expert_parallel=false model.recompute=true  (run_12npu.sh)")
    for ranks in range(1, 17):
        found = report(capsys, QWEN3, "--ranks", str(ranks))
        assert found["verdict"] == "fits" or found["alternatives"], ranks


def test_the_fastest_layouts_are_those_of_a_search_and_can_be_typed(capsys):
    """Each is asked for again with its overrides; some that a user would try first are not faster. Seconds."""
    asked, found = report(capsys, QWEN3, "--ranks", "16"), report(capsys, QWEN3, "--ranks", "16", "--fastest")
    listed = found["alternatives"]
    assert len(listed) == 5 and found["verdict"] == "fits" and not asked["alternatives"]
    seconds = [other["step_seconds"] for other in listed]
    assert seconds == sorted(seconds) and seconds[-1] < asked["step_seconds"]["total"]
    # The trainers are the slower side here, so samplers of tensor 1, 2 and 4 are equally fast: 4 was asked.
    assert {"rollout.ranks=4", "rollout.tensor=4"} <= {*listed[-1]["overrides"]}
    for other in listed:
        again = report(capsys, QWEN3, "--ranks", "16", *other["overrides"])
        assert again["verdict"] == "fits" and again["per_rank"]["peak_bytes"] == other["peak_bytes"]
        assert round(again["step_seconds"]["total"], 3) == other["step_seconds"]
    graphs = ["rollout.enforce_eager=false"]
    for changes in (
        graphs,
        [*graphs, "model.recompute=false"],
        [*graphs, "parallel.tensor=2", "rollout.tensor=2"],
        [*graphs, "parallel.tensor=1", "rollout.tensor=1", "model.recompute=false"],
    ):
        tried = report(capsys, QWEN3, "--ranks", "16", *changes)
        assert tried["verdict"] == "refused" or tried["step_seconds"]["total"] >= seconds[0] - 0.001, changes
    assert preflight.main([QWEN3, "--ranks", "8", "--fastest"]) == 1
    refused = capsys.readouterr().out
    assert (
        refused.index("verdict: refused") < refused.index("the fastest that fit:") and refused.count("--ranks 8") == 5
    )
    assert preflight.main([QWEN3, "--ranks", "1", "--fastest"]) == 1
    assert capsys.readouterr().out.endswith("no layout of these ranks fits\n")


APART = ["--ranks", "32", "rollout.ranks=16", "rollout.staleness=1"]


def test_ranks_that_only_sample_are_planned_beside_those_that_only_train(capsys):
    """Qwen3-30B-A3B on 16 + 16 dies: a side has what it needs, and the slower side and the exchange are the step."""
    both, found = report(capsys, QWEN3, "--ranks", "16", "rollout.staleness=1"), report(capsys, QWEN3, *APART)
    assert found["verdict"] == "fits" and (found["ranks"], found["samplers"]["ranks"]) == (32, 16)
    together, trains, samples = (each["per_rank"]["parts"] for each in (both, found, found["samplers"]))
    assert all(trains[name] == together[name] for name in ("base", "lora", "optimizer", "older factors", "activations"))
    assert trains["older factors"] == trains["lora"] and trains["engine weights"] == trains["key-value cache"] == 0
    same = ("base", "lora", "engine weights", "key-value cache")
    assert all(samples[name] == together[name] for name in same) and samples["optimizer"] == 0
    assert found["samplers"]["per_rank"]["phases"].keys() == {"load", "start", "sync", "rollout"}
    seconds = found["step_seconds"]
    phases = dict(seconds["phases"])
    # Factors of rank 32 in fp32: 48 layers of 128 experts x 3 x (2048 + 768), and of the attention's two matrices
    # (2048 + 5120) + (4096 + 2048).
    size = 4 * 32 * 48 * (128 * (2048 + 1536 + 768 + 2048) + 2048 + 5120 + 4096 + 2048)
    exchange = size / 0.9e9 + 4 * size / 3.1e9  # to the first of 16 samplers, which sends log2 16 copies
    assert phases.pop("exchange") == pytest.approx(exchange)
    sampling = sum(phases.pop(name) for name in ("sync", "prefill", "decode"))
    slower = max(sampling, sum(phases.values()))
    assert seconds["total"] == pytest.approx(slower + exchange)
    assert found["step_s"]["low"] < seconds["total"] < found["step_s"]["high"]


@pytest.mark.nightly
def test_both_ways_of_sampling_are_among_the_fastest_and_a_side_that_does_not_fit_is_named(capsys):
    ways = {f"rollout.ranks={samplers}" for samplers in (4, 8, 12)}
    for lengths in ([], ["--completion-tokens", "300", "--prompt-tokens", "150"]):
        listed = report(capsys, QWEN3, "--ranks", "16", "--fastest", *lengths)["alternatives"]
        apart = [bool(ways & {*other["overrides"]}) for other in listed]
        assert {True, False} == set(apart), (lengths, listed)
    announced = ["rollout.ranks=14", "rollout.staleness=1", "loss.importance=uncorrected"]
    listed = report(capsys, QWEN3, "--ranks", "16", "--fastest", *announced)["alternatives"]
    for other in listed:  # can be typed, and keeps the announced choice
        config.load_config(QWEN3, [*announced, *other["overrides"]])
        assert ("loss.importance" in str(other["overrides"])) == ("rollout.ranks=0" in other["overrides"]), other
    refused = report(capsys, QWEN3, *APART, "rollout.ranks=12")
    assert refused["reasons"][0].startswith("trainers: ") and refused["alternatives"]
    assert "samplers: rollout.expert_parallel: 128 experts cannot be divided" in "".join(refused["reasons"])
    alone = report(capsys, QWEN3, "--ranks", "16", "rollout.ranks=16", "rollout.staleness=1")
    assert alone["reasons"] == ["rollout.ranks: 16 of 16 ranks sample, so none trains; needed: fewer"]


def test_the_text_says_layout_and_verdict(capsys):
    assert preflight.main([QWEN3]) == 0
    text = capsys.readouterr().out
    assert "16 ranks on 1 node of 16 = tensor 4 x data 4 = expert 16 x expert_data 1" in text
    assert "logits chunk              0.500 GiB, within the activations" in text  # 2 copies of 2^26 fp32 numbers
    assert "verdict: fits" in text


def test_the_plan_of_a_run_adds_evaluations_and_checkpoints_worked_out_by_hand(capsys):
    """Launches bind decoding: 1,536 steps for each of four batches of 96 of the 330 questions of a replica.

    Each question gets a greedy and a sampled answer. Prefill takes the step's share of its 96 prompts for 1,319, twice.
    Evaluations are before and after 20, 40, 60 and 77 steps. Of a checkpoint's factors and two moments in fp32, those
    of the last two stay: 2 x 12 bytes x 48 x 32 x (128 x 6,400 + 13,312) numbers.
    """
    found = report(capsys, QWEN3, "--ranks", "16")
    step, run = found["step_seconds"], found["run_seconds"]
    launches = 48 * HARDWARE["npu"].eager_layer_seconds
    evaluation = 2 * 4 * 1536 * launches + 2 * 1319 / 96 * step["phases"]["prefill"]
    assert run["steps"] == pytest.approx(77 * step["total"])
    assert run["evaluations"] == pytest.approx(5 * evaluation, rel=1e-3)
    fewer = ["eval.num_questions=96", "eval.samples=0", "eval.sets={more: more.jsonl}"]  # of each of two sets
    short = report(capsys, QWEN3, "--ranks", "16", *fewer)["run_seconds"]["evaluations"]
    assert short == pytest.approx(5 * 2 * (1536 * launches + step["phases"]["prefill"]), rel=1e-3)
    preflight.main([QWEN3, "--ranks", "16", "--completion-tokens", "240"])
    text = capsys.readouterr().out
    assert "if answers have a mean of 240 of 1536 tokens" in text and "; 28.6 GiB of checkpoints stay\n" in text
    assert "a runtime of 2 GiB and, with graphs in the engine, 1.5 GiB more" in text and "3.500 GiB" in text


def test_memory_refusals_follow_the_size_of_the_device(capsys):
    needed = report(capsys, QWEN3)["per_rank"]["phases"]
    smallest = max(needed.values()) / 0.95 / 2**30  # the margin is 5 %
    assert report(capsys, QWEN3, "--device-gib", str(smallest + 0.01))["verdict"] == "fits"
    assert report(capsys, QWEN3, "--device-gib", str(smallest - 0.01))["verdict"] == "refused"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no/such.yaml"],
        [QWEN3, "parallel.tensors=4"],
        [QWEN3, "--ranks", "0"],
        [QWEN3, "--ranks", "16", "--ranks-per-node", "7"],
        [QWEN3, "--ranks", "24"],  # one and a half of the servers with 16
        [QWEN3, "--device-gib", "1e300"],
        [QWEN3, "--completion-tokens", "1537"],  # the mean, of rows of at most 1,536
        [QWEN3, "model.path=models/unheard-of"],
    ],
)
def test_unusable_input_is_one_line_and_exit_code_2(arguments, capsys):
    assert preflight.main([*arguments, "--json"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1


def test_nodes_cut_the_groups_that_span_them(capsys):
    found = report(capsys, QWEN3, "parallel.expert=32", "--ranks", "32")
    crossing = {kind: count for kind, count in found["groups_across_nodes"].items() if count}
    # Groups of 8 data ranks, 4 apart; one group of 32 expert ranks; TP4 stays within a node.
    assert crossing == {"data": 4, "expert": 1}
    for members in found["groups"].values():
        assert sorted(rank for group in members for rank in group) == list(range(32))
    streamed = report(capsys, QWEN3, "rollout.expert_parallel=false", "--ranks", "32")
    assert streamed["groups_across_nodes"]["expert"] == 0
    two = report(capsys, QWEN3, "--ranks", "16", "--ranks-per-node", "2")["groups_across_nodes"]
    assert two["tensor"] == two["rollout"] == 4


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import preflight, plan.doctor
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
sys.setprofile(count)
code = preflight.main(sys.argv[1:])
sys.setprofile(None)
print(calls, file=sys.stderr)
sys.exit(code)
"""


def test_a_plan_takes_few_calls_without_torch_and_prints_one_object():
    """A refusal on 1,024 ranks without alternatives: 3.0 million calls of functions, which take 2.5 CPU seconds."""
    arguments = [QWEN3, "--device-gib", "1", "--ranks", "1024", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1 and json.loads(done.stdout)["verdict"] == "refused"
    assert int(done.stderr) < 5_000_000


@pytest.mark.parametrize(("seconds", "said"), [(540_000, "150"), (5_400_000, "1,500"), (11_232, "3.12"), (360, "0.1")])
def test_a_long_run_is_said_without_an_exponent(seconds, said):
    text = whole_run.sentence(whole_run.WholeRun(seconds, 0, 1, 1319, 150 * 2**30), 100)
    assert text.startswith(
        f"estimated run: {said} h = 100 steps {said} h + 1 evaluations of 1,319 questions 0 h; 150 GiB"
    )
