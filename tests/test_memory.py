"""The planned memory equals Megatron's groups, the instantiated model, and the allocations of a tiny model.

Groups and parameters need one process: torch's fake backend lets it be any rank of any world, on the meta device.
Activations are measured from the allocator (live_bytes.py), while real ranks run a forward and a backward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import live_bytes
import pytest
import torch
import torch.distributed as dist
import training
import world
from live_bytes import LiveBytes
from tiers import ci, nightly

import lora_megatron
import parallel_setup
from checks import dry_run_device
from engines import opening, vllm_adapter, vllm_ascend, vllm_colocated, vllm_engine
from facts.architectures import Architecture
from hardware import device as devices
from inputs import hf_config
from inputs.config import load_config
from knobs import Config, LoraConfig, ParallelConfig
from learner import Learner
from model import megatron_model
from plan import grid, memory, parameters
from plan.grid import WHOLE, RankGrid
from runlog.log import RunLog
from runlog.progress import Heartbeat, StepTimer
from weights.policy import Policy

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
            training.pad_rows(patch)
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


@pytest.mark.parametrize("recompute", [False, nightly(True)])
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
    assert memory.micro_batch_tokens(*sizes) == 512 and memory.line_tokens(*sizes) == 512 * 4 // 5
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
    learner = Learner(cfg, Policy(cfg, arch, parallel, model), pad_token=0)
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
        (16, ["rollout.tensor=1", "rollout.expert_parallel=false"], 6 * 8, 63),  # 4 heads: a quarter; eval has 96
        (10, ["rollout.tensor=2", "rollout.expert_parallel=false", "rollout.kv_cache_mib=40000"], 20 * 8, 160),  # 96/5
    ],
)
def test_the_plan_counts_the_rows_that_the_engine_takes_at_once(ranks, changes, in_a_step, at_once, monkeypatch):
    """1.5 waves of the plan's rows are two waves of the engine, whose ``max_num_seqs`` is the same number."""
    cfg, arch = load_config("configs/qwen3.yaml", changes), real("qwen3")
    planned = memory.step_memory(cfg, arch, grid.of(cfg.parallel, cfg.rollout, ranks), "npu", 61 * 2**30)
    assert (planned.wanted_rows, planned.cached_rows) == (in_a_step, min(in_a_step, at_once))
    given: dict = {}
    for kind in (vllm_engine.VllmEngine, vllm_colocated.ColocatedEngine):
        monkeypatch.setattr(kind, "__init__", lambda self, *args, **options: given.update(options))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    opening.open_engine(cfg, arch, torch.device("cpu"), {1}, 0)
    assert given["max_sequences"] == at_once


@pytest.mark.parametrize(("prompts", "tokens"), [(96, 48), (192, 96), (768, 128)])  # of 4 replicas: 4 ranks split them
def test_a_run_checks_the_kernel_for_the_tokens_that_a_rank_will_send(prompts, tokens, monkeypatch):
    cfg = load_config("configs/qwen3.yaml", [f"rollout.prompts_per_step={prompts}", "rollout.kv_cache_mib=40000"])
    seen = []
    monkeypatch.setattr(devices, "resolve", lambda name: SimpleNamespace(type="npu"))
    monkeypatch.setattr(vllm_engine, "check_installed", lambda device: None)
    monkeypatch.setattr(vllm_adapter, "is_old", lambda: True)
    monkeypatch.setattr(vllm_ascend, "check_dispatch", lambda arch, ranks, tokens: seen.append((ranks, tokens)))
    opening.check_engine(cfg, real("qwen3"), 16)
    assert seen == [(16, tokens)]
