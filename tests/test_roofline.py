"""The roofline equals independently computed figures for Qwen3-30B-A3B on 16 dies of a 910C server."""

from __future__ import annotations

import dataclasses

import pytest

import preflight
from facts.devices import HARDWARE
from inputs import hf_config
from inputs.config import load_config
from plan import grid, roofline
from plan.memory import step_memory

# 376 TFLOP/s, 1.6 TB/s, 196 GB/s; at 20 % in training. A decode step takes 20 ms with graphs, 34 ms without.
NPU = dataclasses.replace(
    HARDWARE["npu"], training_share=0.2, graph_layer_seconds=0.020 / 48, eager_layer_seconds=0.034 / 48
)
SHIPPED = load_config("configs/qwen3.yaml")
QWEN3 = hf_config.planned(SHIPPED.model.path, SHIPPED.tiny_model, SHIPPED.row_tokens)[0]


def planned(
    *overrides: str, ranks: int = 16, hardware=NPU, prompt: float = 120, completion: float = 256, longest: float = 0
):
    """All rows are ``completion`` tokens long, or that in the mean and one of them ``longest``."""
    assumed = ["rollout.enforce_eager=false", "model.recompute=true"]  # by the figures
    cfg = load_config("configs/qwen3.yaml", [*assumed, *overrides])
    layout = grid.of(cfg.parallel, cfg.rollout, ranks)
    memory = step_memory(cfg, QWEN3, layout, "npu", 61 * 2**30)
    times = roofline.step_times(cfg, QWEN3, layout, hardware, memory, prompt, completion, longest or completion)
    return times, cfg


@pytest.mark.parametrize(
    ("prompt", "completion", "step_ms", "rollout_seconds"), [(120, 256, 5.3, 1.4), (1024, 1024, 9.1, 9.3)]
)
def test_decode_step_with_the_experts_over_16_dies(prompt, completion, step_ms, rollout_seconds):
    """768 sequences in one wave. Each die has the whole attention; the experts are spread over all dies."""
    step = roofline.decode_step(
        QWEN3, NPU, ranks=16, tensor=1, expert=16, sequences=768, context=prompt + completion / 2, element=2
    )
    assert step["total"] * 1e3 == pytest.approx(step_ms, rel=0.02)
    assert step["total"] * completion == pytest.approx(rollout_seconds, abs=0.05)
    assert {name: round(seconds * 1e3, 2) for name, seconds in step.items()} | {"cache": 0, "total": 0} == {
        "weights": 3.80,
        "cache": 0,
        "arithmetic": 0.78,
        "exchange": 0.77,
        "total": 0,
    }


@pytest.mark.parametrize(("prompt", "completion", "seconds"), [(120, 256, 4.6), (1024, 1024, 24)])
def test_update_with_recompute_and_reference_pass(prompt, completion, seconds):
    """At 20 % of the peak, without communication, for 768 rows; 8 rows share the work on their prompt.

    Worked out by hand: the linear layers and the head are passed four times (reference, forward, again, backward),
    attention 5.5 times (backward 2.5), and the factors, of which a token meets 99 M, four times (backward twice). The
    trainer merges no weights.
    """
    apart = ["optim.prompts_per_update=96", "rollout.sync=adapter", "rollout.expert_parallel=false"]
    unlinked = dataclasses.replace(NPU, link=1e18)
    times, _ = planned(*apart, hardware=unlinked, prompt=prompt, completion=completion)
    tokens = 768 * (completion + prompt / 8)
    head = 2 * 151_936 * 2048 * 768 * completion
    linear = 2 * (3.04e9 - 151_936 * 2048) * tokens
    attention = 48 * 4 * 32 * 128 * 768 * (completion * (prompt + completion) + prompt**2 / 16)
    low_rank = 2 * 48 * (32 * (7168 + 6144) + 8 * 32 * 6400) * tokens
    by_hand = (4 * linear + 4 * head + 5.5 * attention + 4 * low_rank) / (16 * 376e12 * 0.2)
    phases = times.phases
    found = phases["update forward"] + phases["update backward"] + phases["reference"]
    assert found == pytest.approx(by_hand, rel=0.005) and by_hand == pytest.approx(seconds, rel=0.05)
    assert phases["old policy"] == 0


EXPERTS, ATTENTION = 48 * 8 * 3 * 2048 * 768, 48 * 2048 * (5120 + 4096) // 4  # adapted parameters of a rank


def test_merging_reads_and_writes_28_bytes_of_an_expert_in_each_update_and_of_attention_in_each_pass():
    """The first update of a step finds the experts as the push has merged them in the engine's memory."""
    times = planned()[0]
    micro_batches = 4 * 3  # 4 updates of 48 rows; of 256 + 120 / 8 + 376 / 4 tokens, 22 rows fit into 8,192
    of_experts, of_passes = (28 / 1.6e12 * size for size in (EXPERTS, micro_batches * ATTENTION))
    # The backward pass recomputes the forward pass; the old policy scores the rows of the last three updates.
    for phase, by_hand in (
        ("sync", of_experts),
        ("old policy", 0.75 * of_passes),
        ("update forward", of_passes + 3 * of_experts),
        ("update backward", of_passes),
    ):
        assert times.causes[phase]["merging"] == pytest.approx(by_hand, rel=1e-6)


@pytest.mark.parametrize(("flops", "cause"), [(376e12, "memory"), (1e12, "arithmetic")])
def test_a_push_takes_the_longer_of_its_products_and_its_writes(flops: float, cause: str):
    """The engine's shards: 8 experts of a layer, and a quarter of attention. B A has rank 32."""
    times = planned(hardware=dataclasses.replace(NPU, flops=flops))[0]
    numbers = EXPERTS + ATTENTION
    by_hand = {"memory": numbers * 2 * 2 / 1.6e12, "arithmetic": 2 * 32 * numbers / flops}
    assert times.causes["sync"].keys() == {cause, "merging"}
    assert times.causes["sync"][cause] == pytest.approx(by_hand[cause], rel=1e-6)
    assert by_hand[cause] == max(by_hand.values())


def test_the_cause_of_a_phase_is_named_with_what_to_change():
    times, cfg = planned(hardware=dataclasses.replace(NPU, link=40e9))
    assert planned()[0].bound("reference") == "arithmetic" and times.bound("reference") == "expert exchange"
    assert "parallel.expert" in preflight.advice(cfg.rollout, cfg.model, times, "reference")
    times, cfg = planned("parallel.expert=16", ranks=32)
    small, _ = planned("parallel.expert=16", "lora.expert_rank=4", ranks=32)
    assert 3 < times.phases["optimizer"] / small.phases["optimizer"] < 8
    assert "lora.expert_rank" in preflight.advice(cfg.rollout, cfg.model, times, "optimizer")


def test_experts_exchange_and_active_parameters_are_those_worked_out_by_hand():
    """2.17 s for four passes of EP16 with short completions; the attention is not split."""
    cfg = load_config("configs/qwen3.yaml", ["parallel.tensor=1", "rollout.expert_parallel=false"])
    found = roofline.exchange_bytes(QWEN3, grid.of(cfg.parallel, cfg.rollout, 16), 768 * 376, 2)
    assert found["tensor exchange"] == 0
    assert 4 * found["expert exchange"] / (196e9 / 2) == pytest.approx(2.17, rel=0.01)
    assert roofline.active_parameters(QWEN3) == pytest.approx(3.04e9, rel=0.002)


def test_what_leaves_a_node_goes_at_the_rate_between_nodes():
    """Two nodes of 16. Of 31 other expert ranks, 16 are on the other node; a die has 25 GB/s there and 196 GB/s here.

    Of the 8 ranks that hold the same attention, 4 are there. With EP16 both ranks that hold the same experts are apart.
    """
    cfg = load_config("configs/qwen3.yaml", ["parallel.expert=32"])
    within, across = (grid.of(cfg.parallel, cfg.rollout, 32, ranks_per_node) for ranks_per_node in (32, 16))
    kinds = ("tensor", "expert", "data", "expert_data", "rollout")
    assert [within.away(kind) for kind in kinds] == [0, 0, 0, 0, 0]
    assert [across.away(kind) for kind in kinds] == [0, 16 / 31, 4 / 7, 0, 0]
    apart = load_config("configs/qwen3.yaml", ["rollout.expert_parallel=false"])
    ep16 = grid.of(apart.parallel, apart.rollout, 32, 16)
    assert (ep16.away("expert"), ep16.away("expert_data")) == (0, 1)
    assert NPU.sends(1e9, 0) == 1 / 196 and NPU.sends(1e9, 16 / 31) == pytest.approx(16 / 31 / 25)
    assert NPU.sends(1e9, 0.01) == pytest.approx(0.99 / 196)  # the link takes longer while little leaves
    memory = step_memory(cfg, QWEN3, within, "npu", 61 * 2**30)
    slow, fast = (roofline.step_times(cfg, QWEN3, one, NPU, memory, 120, 256, 256).causes for one in (across, within))
    for phase in ("reference", "update forward", "update backward"):
        ratio = slow[phase]["expert exchange"] / fast[phase]["expert exchange"]
        assert ratio == pytest.approx(16 / 31 / 25 * 196)
        assert slow[phase]["tensor exchange"] == fast[phase]["tensor exchange"]


def test_more_work_takes_longer_and_more_ranks_do_not():
    base, _ = planned()
    assert planned(completion=512)[0].total > base.total
    assert planned("rollout.group_size=16")[0].total > base.total
    assert planned(ranks=32)[0].total < base.total
    assert planned("loss.kl=none")[0].phases["reference"] == 0
    assert planned("optim.prompts_per_update=48")[0].phases["old policy"] > 0
    assert planned("model.recompute=false")[0].phases["update backward"] < base.phases["update backward"]


def test_a_small_cache_takes_waves_and_is_named_as_the_cause():
    times, cfg = planned("rollout.kv_cache_mib=512", completion=1024)
    assert times.waves > 1 and times.phases["decode"] > planned(completion=1024)[0].phases["decode"]
    assert max(times.phases, key=times.phases.get) == "decode" and "rollout.kv_cache_mib" in preflight.advice(
        cfg.rollout, cfg.model, times, "decode"
    )


def test_a_step_of_two_sides_has_the_phases_of_the_slower_side_and_the_exchange():
    """Samplers 9 s, trainers 7 s, the exchange 1 s. The range allows for a factor of 1.5."""
    seconds = {"sync": {"memory": 1.0}, "decode": {"launches": 8.0}, "reference": {"arithmetic": 7.0}}
    seconds["exchange"] = {"factors": 1.0}
    times = roofline.Times(seconds, 0, {}, waves=1, micro_batches=1, apart=True)
    assert times.total == 10
    assert times.long_phases == ["sync", "decode", "exchange"]  # a tenth of the step is long
    assert times.step == (10 / 1.5, 10 * 1.5)


def test_launches_of_a_pass_are_those_that_a_dry_run_counted_and_count_where_they_take_longer():
    """On 16 ranks: 3,073 calls of the reference, 3,464 of the old policy, 4,195 forward and 8,985 backward.

    At 1 ms a launch 12 micro-batches are bound by them, 9 of the old policy.
    """
    slow = dataclasses.replace(NPU, eager_layer_seconds=0.001 * roofline.FORWARD_LAUNCHES)
    times = planned(hardware=slow)[0]
    counted = {"reference": 3073, "old policy": 3464 * 0.75, "update forward": 4195, "update backward": 8985}
    for phase, calls in counted.items():
        assert times.causes[phase]["launches"] == pytest.approx(12 * calls * 0.001, rel=0.005)
        assert "arithmetic" not in times.causes[phase]


@pytest.mark.parametrize(
    ("eager", "step_ms", "what"), [("true", 34, "enforce_eager=false"), ("false", 20, "sequences")]
)
def test_decoding_waits_for_launches_with_and_without_graphs(eager, step_ms, what):
    """A step of 20 or 34 ms, while its roofline is 5 ms."""
    times, cfg = planned(f"rollout.enforce_eager={eager}")
    assert times.causes["decode"] == {"launches": pytest.approx(256 * step_ms / 1e3)}
    assert what in preflight.advice(cfg.rollout, cfg.model, times, "decode")


def test_decoding_ends_with_the_longest_row_of_which_others_have_ended():
    """256 tokens in the mean, one row of 1,536: the decode steps are 1,536, not 256; training has the mean's tokens."""
    mean, longest = planned()[0], planned(longest=1536)[0]
    assert mean.causes["decode"] == {"launches": pytest.approx(256 * 0.020)}
    assert longest.causes["decode"] == {"launches": pytest.approx(1536 * 0.020)}
    others = [{name: seconds for name, seconds in each.phases.items() if name != "decode"} for each in (mean, longest)]
    assert others[0] == others[1]


@pytest.mark.parametrize(
    ("mean", "waves", "refills", "steps", "row_steps"),
    [  # row_steps: decode steps times the share of the places that are taken, which are the tokens of a place
        (1536, 1, True, 1536, 1536),
        (768, 1, True, 1536, 768),
        (768, 3, True, 2 * 768 + 1536, 3 * 768),  # a row that ends makes room for the next one
        (768, 3, False, 3 * 1536, 3 * 768),  # a wave waits for the one before
        (256, 1, True, 1536, 256),
    ],
)
def test_running_rows_fall_off_so_that_the_mean_is_the_given_one(mean, waves, refills, steps, row_steps):
    parts = roofline.decode_parts(mean, 1536, waves, refills=refills)
    assert sum(part for part, _, _ in parts) == pytest.approx(steps)
    assert sum(part * share for part, share, _ in parts) == pytest.approx(row_steps, rel=0.01)
    assert all(0 < share <= 1 and tokens < 1536 for _, share, tokens in parts)


def test_further_rounds_of_dynamic_sampling_take_the_steps_of_decoding_again_with_half_the_rows():
    """Decoding is bound by launches here: three rounds take three times as long. Prompts: 1 + 1/2 + 1/4."""
    plain, dynamic = (planned(f"rollout.dynamic_rounds={rounds}")[0].phases for rounds in (0, 2))
    assert dynamic["decode"] == pytest.approx(3 * plain["decode"])
    assert dynamic["prefill"] == pytest.approx(1.75 * plain["prefill"])
    assert {k: v for k, v in dynamic.items() if k not in ("decode", "prefill")} == {
        k: v for k, v in plain.items() if k not in ("decode", "prefill")
    }
    assert "each of 2 more rounds samples 50% of the groups" in roofline.assumptions(NPU, 1, 2, 3, 2)
    assert "rounds" not in roofline.assumptions(NPU, 1, 2, 3)
