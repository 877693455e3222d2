"""Bytes and seconds of the plan beside real runs and values worked out by hand."""

import contextlib
import dataclasses
import math
import warnings
from pathlib import Path
from unittest import mock

import live_bytes
import pytest
import torch
import torch.distributed as dist
import training
import world
from as_if_on import as_if_on
from live_bytes import LiveBytes
from tiers import ci, nightly

import lora_megatron
import parallel_setup
import preflight
from checks import dry_run_device
from engines import factory, vllm_ascend, vllm_colocated, vllm_engine
from facts.architectures import Architecture
from facts.devices import HARDWARE
from inputs import hf_config
from inputs.config import load_config
from knobs import Config, LoraConfig, Merging, OptimConfig, ParallelConfig
from learner import Learner
from model import batches, megatron_model
from model.routing_replay import RouterLoad
from plan import capacity, grid, memory, parameters, roofline, update_kept, utilisation, way
from plan.grid import WHOLE, RankGrid
from plan.memory import step_memory
from runlog.log import RunLog
from runlog.progress import Heartbeat, StepTimer
from weights.policy import Policy

# --------------------------------------------------------------------------------------------------------------- memory
# The planned memory equals Megatron's groups, the instantiated model, and the allocations of a tiny model.
#
# Groups and parameters need one process: torch's fake backend lets it be any rank of any world, on the meta device.
# Activations are measured from the allocator (live_bytes.py), while real ranks run a forward and a backward pass.

KINDS = ("tensor", "data", "expert", "expert_data")
ALL_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")


def tiny(model_type: str, **changes) -> Architecture:
    """Sizes that every layout of tests/support/world.py divides."""
    raw = {
        "model_type": model_type,
        "vocab_size": 400,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "intermediate_size": 96,
        "norm_topk_prob": model_type == "qwen3_moe",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
    }
    if model_type == "qwen2_moe":
        raw["shared_expert_intermediate_size"] = 80
    return hf_config.parse(raw | changes)


def real(name: str) -> Architecture:
    cfg = load_config(f"configs/{name}.yaml")
    return hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0]


@contextlib.contextmanager
def as_rank(rank: int, ranks: int, tensor: int, expert: int):
    """This process as one rank of a world that does not exist."""
    with warnings.catch_warnings():
        world._quiet_third_parties()
        world._import_megatron()
        sizes = ParallelConfig(tensor=tensor, expert=expert)
        with dry_run_device.as_rank(rank, ranks, sizes, torch.device("cpu")) as parallel:
            yield parallel


# ---------------------------------------------------------------------------------------------------------- parameters


def check_parameters(
    arch: Architecture, sizes: tuple, lora: LoraConfig, dtype: torch.dtype, monkeypatch, quantisation: str = "none"
) -> None:
    """The planned bytes of the base and parameters of LoRA equal those of the last rank's model."""
    monkeypatch.setattr(
        lora_megatron, "_initialise_", lambda *args: None
    )  # initial values take time, and the meta device has none
    layout = RankGrid(*sizes, engine_tensor=1, engine_expert=1)
    with as_rank(layout.ranks - 1, *sizes) as parallel, torch.device("meta"):
        parallel = dataclasses.replace(parallel, device=torch.device("meta"))
        model = megatron_model.build(arch, parallel, dtype=dtype, recompute=False, quantisation=quantisation)
        codes = (b for name, b in model.named_buffers() if name.endswith((".codes", ".scales")))
        base = sum(tensor.nbytes for tensor in (*model.parameters(), *codes))
        adapters = lora_megatron.attach(model, lora, parallel, 0)
        factors = lora_megatron.factors(adapters).values()
    assert parameters.base_bytes(arch, layout, dtype.itemsize, quantisation)[0] == base
    assert parameters.lora_parameters(arch, lora, layout) == sum(factor.numel() for factor in factors)


MODELS = {  # name: architecture, LoRA
    "qwen3_moe": (tiny("qwen3_moe"), LoraConfig(rank=8, expert_rank=3, targets=ALL_TARGETS)),
    "qwen2_moe": (tiny("qwen2_moe"), LoraConfig(rank=8, expert_rank=3, targets=ALL_TARGETS)),
    "a dense layer, tied": (tiny("qwen3_moe", mlp_only_layers=[0], tie_word_embeddings=True), LoraConfig(rank=4)),
    "few heads": (
        tiny("qwen3_moe", head_dim=16, num_key_value_heads=2),
        LoraConfig(rank=4, targets=("linear_qkv",)),
    ),
    "every second layer": (
        tiny("qwen3_moe", num_hidden_layers=3, decoder_sparse_step=2),
        LoraConfig(rank=4, targets=("linear_fc2",)),
    ),
}
BY_DEFAULT = ("TP1", "TP2_EP2_DP2", "TP4_EP16")


@pytest.mark.parametrize("name", [name if name in BY_DEFAULT else ci(name) for name in world.LAYOUTS])
def test_parameters_are_those_of_the_instantiated_model(name, monkeypatch):
    for model, (arch, lora) in MODELS.items():
        if model != "few heads" or world.LAYOUTS[name][1] <= 2:
            check_parameters(arch, world.LAYOUTS[name], lora, torch.float32, monkeypatch)


@pytest.mark.parametrize("name", ["TP1", "TP2_EP2_DP2", "TP4_EP16"])
def test_bytes_of_int4_weights_are_those_of_the_instantiated_model(name, monkeypatch):
    for family in ("qwen2_moe", "qwen3_moe"):
        arch = tiny(family, moe_intermediate_size=96)
        check_parameters(arch, world.LAYOUTS[name], LoraConfig(rank=4), torch.bfloat16, monkeypatch, "int4")


@pytest.mark.parametrize(
    ("model", "sizes"),
    [("qwen3", (16, 4, 16)), ("qwen15_moe", (16, 4, 4)), ci("qwen3", (16, 2, 8))],
)
def test_parameters_are_those_of_the_instantiated_real_model(model, sizes, monkeypatch):
    check_parameters(real(model), sizes, LoraConfig(rank=32), torch.bfloat16, monkeypatch)


def test_the_published_configs_have_the_published_numbers_of_parameters():
    """The model cards say 30.5 and 14.3 billion. LoRA of rank 32 on every expert of the first has 1.258 billion."""
    assert round(parameters.base_parameters(real("qwen3"), WHOLE) / 1e9, 1) == 30.5
    assert round(parameters.base_parameters(real("qwen15_moe"), WHOLE) / 1e9, 1) == 14.3
    # Each layer: qkv 32 (2048 + 5120), proj 32 (4096 + 2048); an expert R 3584 + R 2816.
    for expert_rank, counted in ((4, 4), (0, 32)):
        lora = LoraConfig(rank=32, expert_rank=expert_rank)
        assert parameters.lora_parameters(real("qwen3"), lora, WHOLE) == 20_447_232 + counted * 48 * 128 * 6400


# -------------------------------------------------------------------------------------------------------------- groups


@pytest.mark.parametrize("sizes", [(8, 4, 4), (4, 2, 2), (16, 4, 16), (12, 4, 4)])
def test_groups_are_megatrons(sizes):
    planned = grid.groups(RankGrid(*sizes, engine_tensor=1, engine_expert=1))
    for rank in range(sizes[0]):
        with as_rank(rank, *sizes) as parallel:
            found = {k: dist.get_process_group_ranks(getattr(parallel, f"{k}_group")) for k in KINDS}
        assert found == {kind: next(group for group in planned[kind] if rank in group) for kind in KINDS}


# --------------------------------------------------------------------------------------------------------- activations


def settings(folder: Path, **changes: object) -> Config:
    """Rows of 4 and 60 tokens."""
    changes = {"rollout__max_new_tokens": 60, "optim__tokens_per_micro_batch": 512} | changes
    return training.config(folder, folder, data__max_prompt_tokens=4, rollout__group_size=4, **changes)


def pad_rows(patch: pytest.MonkeyPatch) -> None:
    """Forward passes compute the padded rows of a micro-batch: without masks and copies, their bytes are exact."""
    plan, token_logprobs = batches.plan, megatron_model.token_logprobs
    patch.setattr(batches, "plan", lambda *args, **named: plan(*args, **named | {"group_size": 1, "prompts": None}))
    patch.setattr(megatron_model, "token_logprobs", lambda *args: token_logprobs(*args[:-1]))  # without its packing
    patch.setattr(RouterLoad, "counting", lambda self, micro: contextlib.nullcontext())  # which counts packed tokens


def updated(
    parallel: parallel_setup.Parallel, cfg: Config, arch: Architecture, shortest: int | None = None, merges=False
) -> dict[str, int]:
    """Bytes that a Learner holds, and the peak of its update beyond these.

    The rows are padded and of one length, or packed and of ``shortest`` tokens or more.
    """
    policy = live_bytes.policy_of(parallel, cfg, arch, merges)
    with LiveBytes() as making:
        learner = Learner(cfg, policy, pad_token=0)
    batch, heartbeat = live_bytes.rollout_of(cfg, shortest), Heartbeat(0, RunLog(cfg, 0))
    with pytest.MonkeyPatch.context() as patch, LiveBytes() as work:
        if shortest is None:
            pad_rows(patch)
        learner.update(batch, [], torch.randn(len(batch.tokens)), 0, StepTimer(heartbeat, 0, parallel.device))
    heartbeat.stop()
    return {"optimizer": making.now, "update": work.peak}


def updates(parallel: parallel_setup.Parallel, jobs: list[tuple]) -> list[dict[str, int]]:
    return [updated(parallel, *job) for job in jobs]


ARCHITECTURES = (
    tiny("qwen3_moe"),
    tiny("qwen3_moe", num_key_value_heads=4, mlp_only_layers=[1], num_hidden_layers=3),
    tiny("qwen2_moe", num_experts_per_tok=4, num_hidden_layers=3),
)


@pytest.mark.parametrize("recompute", [ci(False), nightly(True)])
def test_an_update_of_the_learner_takes_the_planned_bytes(recompute, tmp_path):
    """Three micro-batches of the trainer's own update on one rank: activations, gradients and AdamW's moments.

    The rows are padded to 512 tokens. Packed rows are of one length, or of many lengths; a forward pass holds more of
    them. Merged weights are large beside activations.
    """
    cfg = settings(tmp_path, model__recompute=recompute)
    short = settings(tmp_path, model__recompute=recompute, rollout__max_new_tokens=12, optim__tokens_per_micro_batch=64)
    wide = tiny("qwen2_moe", hidden_size=256, moe_intermediate_size=128)
    jobs = [(cfg, arch) for arch in ARCHITECTURES] + [(cfg, ARCHITECTURES[0], shortest) for shortest in (60, 5)]
    jobs += [(short, wide), (short, wide, None, True)]
    (found,) = world.in_layouts(["TP1"], updates, jobs)["TP1"]
    layout = grid.of(cfg.parallel, cfg.rollout, 1)
    sizes = cfg.optim, layout, cfg.rollout.group_size, cfg.row_tokens
    assert memory.micro_batch_tokens(*sizes) == 512 and memory.packed_tokens(*sizes) == 512 * 4 // 5
    for (_, arch, *packed), each in zip(jobs[:5], found[:5], strict=True):
        planned = memory.step_memory(cfg, arch, layout, "cpu", 2**33).parts
        work = memory.activations(arch, cfg.lora, layout, element=4, recompute=recompute, tokens=512, scored=512)
        assert each["optimizer"] == pytest.approx(planned["optimizer"], rel=0.01)
        if packed:
            assert 0.5 < each["update"] / (planned["activations"] + planned["gradients"]) < 1.1
        else:
            assert each["update"] == pytest.approx(work.peak + planned["gradients"], rel=0.1), arch
    work = memory.activations(wide, short.lora, layout, element=4, recompute=recompute, tokens=64, scored=64)
    held, at_once = (
        parameters.merged_weights(wide, short.lora, layout, recompute),
        parameters.merged_at_once(wide, short.lora, layout),
    )
    more = max(work.peak + 4 * held, work.recomputed + 8 * at_once) - work.peak  # a sum in fp32, copied to its place
    assert found[6]["update"] - found[5]["update"] == pytest.approx(more, rel=0.15), (found, more)


def save_checkpoint(parallel, path: Path, folder: Path) -> dict[str, int]:
    """Bytes that a device holds beside its own tensors while a checkpoint is gathered, and sizes of the saved tensors.

    What is copied to the host does not count: it goes to the meta device here.
    """
    arch, cfg = hf_config.read(path), training.config(path, folder)
    model = megatron_model.build(arch, parallel, dtype=torch.float32, recompute=False)
    learner = Learner(cfg, Policy.on(cfg, arch, parallel, model), pad_token=0)
    with mock.patch.object(torch.Tensor, "cpu", lambda tensor: tensor.to("meta")), LiveBytes() as live:
        tensors, _ = learner.state()
    sizes = [4 * math.prod(lora_megatron.whole_shape(factor, parallel)) for factor in learner.parameters]
    return {
        "held": live.peak,
        "now": live.now,
        "largest": max(sizes),
        "all": 3 * sum(sizes),
        "on the host": sum(tensor.nbytes for named in tensors.values() for tensor in named.values()),
        "planned": parameters.gathered_by_a_save(arch, cfg.lora, "npu"),
        "checkpoint": parameters.checkpoint_bytes(arch, cfg.lora, cfg.rollout.staleness),
    }


def test_no_device_holds_more_than_one_gathered_tensor_while_a_checkpoint_is_written(tmp_path: Path):
    """A backend that copies nothing itself stands for the backend of a device. The host of rank 0 gets all tensors."""
    path = training.make_model(tmp_path / "model")
    for rank in (0, 15):
        with as_rank(rank, 16, 4, 16) as parallel:
            found = save_checkpoint(parallel, path, tmp_path)
        assert found["held"] <= found["largest"] + 2048 and found["now"] <= 2048, (rank, found)
        assert found["largest"] == found["planned"] and found["all"] > 20 * found["largest"], found
        assert found["all"] == found["checkpoint"] and found["on the host"] == found["all"] * (rank == 0), found


@pytest.mark.parametrize(
    ("ranks", "changes", "in_a_step", "at_once"),
    [  # ranks, other settings, rows of a replica in a step, rows that are decoded at once; all by hand
        (8, ["rollout.expert_parallel=false"], 48 * 8, 252),  # 9,472 MiB of 24,576 bytes hold 252 rows of 64 + 1,536
        (8, ["rollout.expert_parallel=false", "rollout.kv_cache_mib=40000", "rollout.prompts_per_step=144"], 576, 512),
        (16, ["rollout.kv_cache_mib=20000", "eval.batch_size=60", "eval.samples=4"], 192, 240),  # an evaluation: more
        (16, ["rollout.kv_cache_mib=51"], 192, 1),
        (16, ["rollout.tensor=1", "rollout.expert_parallel=false"], 6 * 8, 63),  # 4 heads: a quarter; eval has 192
        (
            10,
            ["rollout.tensor=2", "rollout.expert_parallel=false", "rollout.kv_cache_mib=40000"],
            20 * 8,
            192,
        ),  # 96/5; eval
    ],
)
def test_the_plan_counts_the_rows_that_the_engine_takes_at_once(ranks, changes, in_a_step, at_once, monkeypatch):
    """1.5 waves of the plan's rows are two waves of the engine, whose ``max_num_seqs`` is the same number."""
    assert at_once <= capacity.MOST_SEQUENCES <= 512  # what MC2 sends from a rank
    cfg, arch = load_config("configs/qwen3.yaml", changes), real("qwen3")
    planned = memory.step_memory(cfg, arch, grid.of(cfg.parallel, cfg.rollout, ranks), "npu", 61 * 2**30)
    assert (planned.wanted_rows, planned.cached_rows) == (in_a_step, min(in_a_step, at_once))
    given: dict = {}
    for kind in (vllm_engine.VllmEngine, vllm_colocated.ColocatedEngine):
        monkeypatch.setattr(kind, "__init__", lambda self, *args, **options: given.update(options))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    factory.open_engine(cfg, arch, torch.device("cpu"), {1}, 0)
    assert given["max_sequences"] == at_once


@pytest.mark.parametrize(
    ("device", "ranks", "expected"),
    [
        (
            "npu",
            16,
            2 * (64 + 128 + 50) + 4 * 2 * 200,
        ),  # TP4 x DP4 = EP16, and the engine's tensor, expert, MC2 and data
        ("npu", 32, 2 * (64 + 128 + 50 + 50) + 4 * 2 * 200),  # each expert twice
        ("cpu", 16, 0),
    ],
)
def test_the_plan_counts_the_buffers_of_the_groups_that_carry_traffic(device, ranks, expected):
    """In MiB; test_npu.py has the buffers of the groups that a run makes. Over all ranks numbers go on the host."""
    cfg, arch = load_config("configs/qwen3.yaml"), real("qwen3")
    parts = memory.step_memory(cfg, arch, grid.of(cfg.parallel, cfg.rollout, ranks), device, 61 * 2**30).parts
    assert parts["communication buffers"] == expected * 2**20


@pytest.mark.parametrize(("group", "rows"), [(8, 512), (2048, 2048)])  # 64 prompts x 8; one prompt
def test_a_wave_of_the_embedded_sampler_has_all_samples_of_a_prompt(group, rows):
    prompts = 1024 // min(group, 512)
    changes = [f"rollout.group_size={group}", f"rollout.prompts_per_step={prompts}", "optim.prompts_per_update=1"]
    cfg, arch = load_config("configs/tiny_cpu.yaml", changes), real("qwen3")
    planned = memory.step_memory(cfg, arch, grid.of(cfg.parallel, cfg.rollout, 1), "cpu", 2**40)
    assert (planned.wanted_rows, planned.cached_rows) == (prompts * group, rows)


@pytest.mark.parametrize(("prompts", "tokens"), [(96, 48), (192, 96), (768, 128)])  # of 4 replicas: 4 ranks split them
def test_a_run_checks_the_kernel_for_the_tokens_that_a_rank_will_send(prompts, tokens, monkeypatch):
    cfg = load_config("configs/qwen3.yaml", [f"rollout.prompts_per_step={prompts}", "rollout.kv_cache_mib=40000"])
    seen = []
    as_if_on(monkeypatch, "npu", "0.23.0+empty")
    monkeypatch.setattr(vllm_ascend, "check_window", lambda arch, ranks, tokens: seen.append((ranks, tokens)))
    factory.check_engine(cfg, real("qwen3"), 16)
    assert seen == [(16, tokens)]


# ------------------------------------------------------------------------------------------------------------- roofline

# 376 TFLOP/s, 1.6 TB/s, 196 GB/s; at 20 % in training. A decode step takes 20 ms with graphs, 34 ms without.
NPU = dataclasses.replace(
    HARDWARE["npu"], training_share=0.2, graph_layer_seconds=0.020 / 48, eager_layer_seconds=0.034 / 48
)
QWEN3 = real("qwen3")


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
    context = prompt + completion / 2
    step, slow = (
        roofline.decode_step(QWEN3, hardware, ranks=16, tensor=1, expert=16, sequences=768, context=context, element=2)
        for hardware in (NPU, dataclasses.replace(NPU, flops=3.76e12))  # 376 TFLOP/s, and a hundredth of it
    )
    assert sum(step.values()) * 1e3 == pytest.approx(step_ms, rel=0.02)
    assert sum(step.values()) * completion == pytest.approx(rollout_seconds, abs=0.05)
    milliseconds = {name: round(seconds * 1e3, 2) for name, seconds in step.items()}
    assert milliseconds | {"cache": 0} == {"weights": 3.80, "cache": 0, "exchange": 0.77}
    assert {name: round(seconds * 1e3) for name, seconds in slow.items()} == {"arithmetic": 78, "exchange": 1}


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


# ---------------------------------------------------------------------------------------------------------- utilisation

APART = ["rollout.sync=adapter", "rollout.expert_parallel=false"]  # no weights are merged
CONFIG = ("configs/qwen3.yaml", ["optim.prompts_per_update=96", *APART])
CFG = load_config(*CONFIG)
ROWS = [(0, 100, 50), (0, 100, 350), (1, 60, 20), (1, 60, 180)]  # group, prompt, completion
NEW = 600  # tokens of the completions of ROWS
TIMING = {"timing/generate_s": 4.0, "timing/update_s": 5.0, "timing/step_s": 10.0}


def by_hand(rows: list[tuple[int, int, int]], layers: float, attention: float, heads: float, low_rank: float) -> float:
    """Operations in so many passes of each part. 3.04e9 parameters are active, with the head's 151,936 x 2,048; a token
    meets 99 M numbers of the factors. A prompt counts once a group, and only completions reach the head."""
    prompts = dict((group, prompt) for group, prompt, _ in rows)
    tokens, completions = sum(prompts.values()) + sum(c for *_, c in rows), sum(c for *_, c in rows)
    pairs = sum(prompt**2 / 2 for prompt in prompts.values()) + sum(c * (p + c) for _, p, c in rows)
    head, factors = 151_936 * 2048, 48 * (32 * (7168 + 6144) + 8 * 32 * 6400)
    parts = (layers * (3.0406e9 - head) * tokens, heads * head * completions, low_rank * factors * tokens)
    return 2 * sum(parts) + attention * 48 * 4 * 32 * 128 * pairs


def operations(cfg: Config, sampled: list[tuple[int, int, int]], trained: list[tuple[int, int, int]]) -> float:
    return utilisation.step_flops(
        QWEN3,
        cfg.lora,
        sampled,
        trained,
        merged=cfg.merging >= Merging.PASSES,
        earlier_passes=cfg.earlier_passes,
        reference=cfg.loss.kl != "none",
    )


def test_operations_of_a_step_without_recompute_and_of_the_rows_that_trained() -> None:
    """Sampling is a pass, and so is the reference; an update has 1 + 1 of the layers, 1 + 2.5 of attention, 1 + 2 of
    the head, and 1 + 2 of the factors. Of two updates the old policy scores the rows of the second one."""
    once = by_hand(ROWS, 1, 1, 1, 0)
    assert operations(CFG, ROWS, ROWS) == pytest.approx(once + by_hand(ROWS, 3, 4.5, 4, 3), rel=2e-3)
    some = once + by_hand(ROWS[1:], 3, 4.5, 4, 3)
    assert operations(CFG, ROWS, ROWS[1:]) == pytest.approx(some, rel=2e-3)
    assert operations(CFG, ROWS, []) == pytest.approx(once, rel=2e-3)
    two = load_config(CONFIG[0], ["optim.prompts_per_update=48", *APART, "loss.kl=none"])
    found = operations(two, ROWS, ROWS)
    assert found == pytest.approx(once + by_hand(ROWS, 2.5, 4, 3.5, 3.5), rel=2e-3)


def test_tokens_a_second_are_of_one_device_and_the_mfu_of_its_peak() -> None:
    found = utilisation.speed(CFG, QWEN3, ROWS, ROWS[2:], TIMING, 4, 1e12, NEW)
    assert found["perf/generate_tokens_per_s_device"] == 600 / 4.0 / 4
    assert found["perf/train_tokens_per_s_device"] == (80 + 240) / 5.0 / 4
    flops = operations(CFG, ROWS, ROWS[2:])
    assert found["perf/mfu"] == pytest.approx(flops / (10.0 * 1e12 * 4), rel=1e-3)
    assert "perf/mfu" not in utilisation.speed(CFG, QWEN3, ROWS, [], TIMING, 4, None, NEW)


def test_a_teacher_adds_a_pass_of_the_policy_to_the_operations() -> None:
    taught = CFG.changed(loss={"teacher": "out/run"})
    shares = [utilisation.speed(cfg, QWEN3, ROWS, ROWS, TIMING, 4, 1e12, NEW)["perf/mfu"] for cfg in (CFG, taught)]
    assert (shares[1] - shares[0]) * 10.0 * 1e12 * 4 == pytest.approx(by_hand(ROWS, 1, 1, 1, 1), rel=2e-3)


def test_passes_with_merged_weights_save_a_product_of_the_factors_and_half_a_product_backwards() -> None:
    """With staleness, a pass computes the older log-probs, and the engine does not share the merged weights."""
    apart, merged = (
        load_config(CONFIG[0], [*CONFIG[1], "rollout.staleness=1", f"rollout.sync={sync}"])
        for sync in ("adapter", "merged")
    )
    assert merged.merging is Merging.PASSES
    shares = [utilisation.speed(cfg, QWEN3, ROWS, ROWS, TIMING, 4, 1e12, NEW)["perf/mfu"] for cfg in (apart, merged)]
    assert (shares[0] - shares[1]) * 10.0 * 1e12 * 4 == pytest.approx(by_hand(ROWS, 0, 0, 0, 1.5), rel=0.02)


def test_the_peak_is_known_for_the_devices_of_the_data_sheets_in_bf16_alone() -> None:
    for kind, name, peak in (
        ("npu", "Ascend910_9392", 376e12),
        ("npu", "Ascend910B1", None),
        ("cuda", "NVIDIA H100 80GB HBM3", 989e12),
        ("cuda", "NVIDIA H100 PCIe", None),
        ("cuda", "NVIDIA H200", 989e12),
        ("cuda", "NVIDIA H200 NVL", None),
        ("cpu", "cpu", None),
    ):
        assert utilisation.peak_flops(kind, name, "bf16") == peak
        assert utilisation.peak_flops(kind, name, "fp32") is None


# ---------------------------------------------------------------------------------------------------------- update kept
# What merged bf16 weights hold of the update, beside a simulation: torch's AdamW, torch's rounding.


def simulated(rates: list[float], signal: float, alpha: float, rank: int, rows: int, columns: int) -> float:
    """The share that one matrix holds after these updates, whose gradients of B are drawn."""
    generator = torch.Generator().manual_seed(0)
    weight = (update_kept.WEIGHTS * torch.randn(rows, columns, generator=generator)).bfloat16().float()
    a = (torch.rand(rank, columns, generator=generator) * 2 - 1) / math.sqrt(columns)
    b = torch.nn.Parameter(torch.zeros(rows, rank))
    optimizer = torch.optim.AdamW([b], betas=(0.9, 0.95), weight_decay=0.0)
    mean = signal * (torch.randint(0, 2, b.shape, generator=generator) * 2 - 1)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        b.grad = mean + torch.randn(b.shape, generator=generator)
        optimizer.step()
    update = alpha / rank * b.detach() @ a
    change = (weight + update).bfloat16().float() - weight
    return float((change * update).sum() / update.square().sum())


@pytest.mark.parametrize("signal", [0.0, update_kept.SIGNAL])
@pytest.mark.parametrize(("updates", "rate"), [(1, 1e-5), (20, 1e-5), (80, 1e-5), (5, 1e-4), (20, 1e-3)])
def test_the_share_of_the_update_is_that_of_a_simulation(updates: int, rate: float, signal: float) -> None:
    rates = [rate * min(1, (n + 1) / 5) for n in range(updates)]
    size = 64 * update_kept.size_of_b(rates, signal) / math.sqrt(3 * 512 * 32)
    expected = simulated(rates, signal, 64, 32, 512, 512)
    assert update_kept.kept_of(size) == pytest.approx(expected, rel=0.06, abs=2e-3)


@pytest.mark.parametrize(("target", "columns", "rank"), [("linear_qkv", 512, 32), ("linear_fc2", 128, 8)])
def test_the_shares_of_a_run_are_those_of_the_matrices_that_it_trains(target: str, columns: int, rank: int) -> None:
    """The update is larger in a matrix that reads fewer inputs, and so is what is kept of it."""
    optim = OptimConfig(lr=1e-5, warmup_steps=5, prompts_per_update=24)
    arch = tiny("qwen3_moe", hidden_size=512, head_dim=64, moe_intermediate_size=128)
    lora = LoraConfig(targets=(target,), rank=32, expert_rank=8, alpha=64.0)
    found = update_kept.shares(optim, lora, arch, 96, 10)
    assert found.keys() == {"the first update", "step 5"}
    rates = [1e-5 * (step + 1) / 5 for step in range(5) for _ in range(4)]
    for at, signal in enumerate((0.0, update_kept.SIGNAL)):
        assert found["step 5"][at] == pytest.approx(simulated(rates, signal, 64, rank, 512, columns), rel=0.06)


# ------------------------------------------------------------------------------------------- one copy of the experts


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        (["rollout.sync=adapter"], True),  # the engine gets the base's experts unchanged
        (["rollout.sync=adapter", "model.quantisation=int4"], False),  # the trainer's are codes
        (["rollout.sync=merged"], True),
        (["rollout.sync=merged", "rollout.staleness=1", "loss.importance=token"], False),  # another policy samples
        (["rollout.sync=merged", "model.dtype=fp32"], False),  # the trainer does not merge
    ],
)
def test_trainer_and_engine_share_experts_only_if_both_compute_with_the_same_numbers(changes, shared: bool) -> None:
    cfg = load_config("configs/tiny_cpu.yaml", ["parallel.expert=1", "model.dtype=bf16", *changes])
    assert way.Way(cfg, grid.of(cfg.parallel, cfg.rollout, 1), "cpu").shares(adapted=True) is shared
