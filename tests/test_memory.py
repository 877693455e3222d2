"""The planned memory equals Megatron's groups, the instantiated model, and the allocations of a tiny model.

Groups and parameters need one process: torch's fake backend lets it be any rank of any world, on the meta device.
Activations are counted at torch's dispatcher (live_bytes.py), while real ranks run a forward and a backward pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import training
import world
from live_bytes import LiveBytes

import checkpoint
import hf_config
import lora_megatron
import model_megatron
import parallel_setup
import rollout
from config import load_config
from device import StepTimer
from engines import vllm_colocated, vllm_engine
from hf_config import Architecture
from knobs import LoraConfig, ParallelConfig
from learner import Learner
from plan import dry_run_device, grid, memory
from plan.grid import WHOLE, RankGrid
from rollout import Rollout
from tripwires import Heartbeat

KINDS = ("tensor", "data", "expert_tensor", "expert", "expert_data")
ALL_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2", "router")
REAL_LAYOUTS = [(16, 4, 4, 1), (16, 2, 8, 1), (16, 1, 16, 1), (16, 4, 16, 1)]  # ranks, tensor, expert, expert_tensor


def tiny(model_type: str, **changes) -> Architecture:
    """Sizes that every layout of tests/support/world.py divides."""
    raw = {
        "model_type": model_type, "vocab_size": 400, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "num_experts": 16,
        "num_experts_per_tok": 2, "moe_intermediate_size": 48, "intermediate_size": 96,
        "norm_topk_prob": model_type == "qwen3_moe", "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    }  # fmt: skip
    if model_type == "qwen2_moe":
        raw["shared_expert_intermediate_size"] = 80
    return hf_config.parse(raw | changes)


def real(name: str) -> Architecture:
    return hf_config.planned(load_config(f"configs/{name}.yaml"))[0]


@contextlib.contextmanager
def as_rank(rank: int, ranks: int, tensor: int, expert: int, expert_tensor: int):
    """This process as one rank of a world that does not exist."""
    with warnings.catch_warnings():
        world._quiet_third_parties()
        world._import_megatron()
        sizes = ParallelConfig(tensor=tensor, expert=expert, expert_tensor=expert_tensor)
        with dry_run_device.as_rank(rank, ranks, sizes, torch.device("cpu")) as parallel:
            yield parallel


# ---------------------------------------------------------------------------------------------------------- parameters


def check_parameters(
    arch: Architecture, sizes: tuple, lora: LoraConfig, dtype: torch.dtype, monkeypatch, quantisation: str = "none",
    attention: bool = False,
) -> None:  # fmt: skip
    """The planned bytes of the base and parameters of LoRA equal those of the last rank's model."""
    monkeypatch.setattr(
        lora_megatron, "_initialise_", lambda *args: None
    )  # initial values take time, and the meta device has none
    ranks, tensor, expert, expert_tensor = sizes
    layout = RankGrid(ranks, tensor, expert, expert_tensor, 1, 1)
    with as_rank(ranks - 1, *sizes) as parallel, torch.device("meta"):
        parallel = dataclasses.replace(parallel, device=torch.device("meta"))
        model = model_megatron.build(
            arch, parallel, dtype=dtype, recompute=False, quantisation=quantisation, quantises_attention=attention
        )
        codes = (b for name, b in model.named_buffers() if name.endswith((".codes", ".scales", ".factors")))
        base = sum(tensor.nbytes for tensor in (*model.parameters(), *codes))
        adapters = lora_megatron.attach(model, lora, parallel, 0)
        factors = lora_megatron.factors(adapters).values()
    assert memory.base_bytes(arch, layout, dtype.itemsize, quantisation, attention)[0] == base
    assert memory.lora_parameters(arch, lora, layout) == sum(factor.numel() for factor in factors)


@pytest.mark.parametrize("name", world.LAYOUTS)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe"])
def test_parameters_are_those_of_the_instantiated_tiny_model(model_type, name, monkeypatch):
    lora = LoraConfig(rank=8, expert_rank=3, targets=ALL_TARGETS)
    check_parameters(tiny(model_type), world.LAYOUTS[name], lora, torch.float32, monkeypatch)


@pytest.mark.parametrize("name", ["TP1", "TP2_EP2_DP2", "TP4_EP16"])
@pytest.mark.parametrize("quantisation", hf_config.FORMATS)
def test_bytes_of_quantised_experts_are_those_of_the_instantiated_model(quantisation, name, monkeypatch):
    lora, arch = LoraConfig(rank=4), tiny("qwen2_moe", hidden_size=64, moe_intermediate_size=96)
    check_parameters(arch, world.LAYOUTS[name], lora, torch.bfloat16, monkeypatch, quantisation)


@pytest.mark.parametrize("name", ["TP1", "TP2_EP2_DP2", "TP4_EP16"])
@pytest.mark.parametrize("quantisation", hf_config.FORMATS)
def test_bytes_of_quantised_attention_are_those_of_the_instantiated_model(quantisation, name, monkeypatch):
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "head_dim": 24, "num_key_value_heads": 4}
    for model_type in ("qwen3_moe", "qwen2_moe"):
        arch = tiny(model_type, **sizes)
        check_parameters(
            arch, world.LAYOUTS[name], LoraConfig(rank=4), torch.bfloat16, monkeypatch, quantisation, attention=True
        )


def test_quantised_attention_of_qwen3_30b_takes_the_bytes_counted_by_hand():
    """A layer: qkv 5120 x 2048 and proj 2048 x 4096; in int4 4 bits a weight and 2 bytes for 32 of them."""
    planned = [memory.base_bytes(real("qwen3"), WHOLE, 2, "int4", attention)[0] for attention in (False, True)]
    weights = 48 * (5120 * 2048 + 2048 * 4096)
    assert planned[0] - planned[1] == weights * 2 - weights * 4.5 / 8


@pytest.mark.parametrize("name", ["TP1", "TP2_EP2_ETP2"])
@pytest.mark.parametrize(
    ("changes", "lora"),
    [
        ({"mlp_only_layers": [0], "tie_word_embeddings": True}, LoraConfig(rank=4)),
        ({"head_dim": 16, "num_key_value_heads": 2}, LoraConfig(rank=4, targets=("linear_qkv",))),
        ({"num_hidden_layers": 3, "decoder_sparse_step": 2}, LoraConfig(rank=4, targets=("linear_fc2",))),
    ],
)
def test_parameters_follow_every_option_of_the_model(changes, lora, name, monkeypatch):
    check_parameters(tiny("qwen3_moe", **changes), world.LAYOUTS[name], lora, torch.bfloat16, monkeypatch)


@pytest.mark.parametrize("sizes", REAL_LAYOUTS)
def test_parameters_are_those_of_the_instantiated_qwen3_30b(sizes, monkeypatch):
    check_parameters(real("qwen3"), sizes, LoraConfig(rank=32), torch.bfloat16, monkeypatch)


def test_parameters_are_those_of_the_instantiated_qwen15_moe(monkeypatch):
    check_parameters(real("qwen15_moe"), (16, 4, 4, 1), LoraConfig(rank=32), torch.bfloat16, monkeypatch)


def test_the_published_configs_have_the_published_numbers_of_parameters():
    """The model cards say 30.5 and 14.3 billion. LoRA of rank 32 on every expert of the first has 1.258 billion."""
    assert round(memory.base_parameters(real("qwen3"), WHOLE) / 1e9, 1) == 30.5
    assert round(memory.base_parameters(real("qwen15_moe"), WHOLE) / 1e9, 1) == 14.3
    experts = LoraConfig(rank=32, targets=("linear_fc1", "linear_fc2"))
    assert memory.lora_parameters(real("qwen3"), experts, WHOLE) == 1_258_291_200
    attention = LoraConfig(rank=32, targets=("linear_qkv", "linear_proj"))
    assert memory.lora_parameters(real("qwen3"), attention, WHOLE) == 20_447_232


def test_lora_parameters_are_those_counted_by_hand() -> None:
    """Qwen3-30B-A3B, each layer: qkv 32 (2048 + 5120), proj 32 (4096 + 2048); an expert R 3584 + R 2816."""
    attention, expert = 48 * (32 * 7168 + 32 * 6144), 48 * 128 * 6400
    for expert_rank, counted in ((4, 4), (0, 32)):
        lora = LoraConfig(rank=32, expert_rank=expert_rank)
        assert memory.lora_parameters(real("qwen3"), lora, WHOLE) == attention + counted * expert


# -------------------------------------------------------------------------------------------------------------- groups


def megatron_groups(parallel: parallel_setup.Parallel) -> dict[str, list[int]]:
    return {kind: dist.get_process_group_ranks(getattr(parallel, f"{kind}_group")) for kind in KINDS}


@pytest.mark.parametrize("name", ["TP4_EP4_DP2", "TP2_EP2_ETP2", "TP4_EP4_ETP4", "TP4_EP16", "12 ranks"])
def test_groups_are_megatrons(name):
    sizes = (world.LAYOUTS | {"12 ranks": (12, 4, 4, 1)})[name]
    planned = grid.groups(RankGrid(*sizes, engine_tensor=1, engine_expert=1))
    for rank in range(sizes[0]):
        with as_rank(rank, *sizes) as parallel:
            found = megatron_groups(parallel)
        assert found == {kind: next(group for group in planned[kind] if rank in group) for kind in KINDS}


def test_the_plan_knows_the_constants_of_the_files_that_it_may_not_import():
    assert memory.LOGITS_PER_CHUNK == model_megatron.LOGITS_PER_CHUNK
    assert memory.ROWS_PER_CHUNK == model_megatron.ROWS_PER_CHUNK


# --------------------------------------------------------------------------------------------------------- activations

LORA = LoraConfig(rank=8)
ROWS, LENGTH = 8, 64  # of the micro-batch; only the second half of each row is scored
CASES = [
    (model_type, changes, recompute)
    for model_type, changes in (
        ("qwen3_moe", {"num_key_value_heads": 4, "mlp_only_layers": [1], "num_hidden_layers": 3}),
        ("qwen2_moe", {"num_experts_per_tok": 4, "num_hidden_layers": 3}),
    )
    for recompute in (False, True)
]


def allocated(parallel: parallel_setup.Parallel) -> list[dict[str, float]]:
    """For each case: bytes alive after the forward pass, the peak, and the imbalance of this rank's experts."""
    return [_allocated(parallel, tiny(model_type, **changes), recompute) for model_type, changes, recompute in CASES]


def _allocated(parallel: parallel_setup.Parallel, arch: Architecture, recompute: bool) -> dict[str, float]:
    model = model_megatron.build(arch, parallel, dtype=torch.float32, recompute=recompute)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator) * 0.05
            weight.copy_(drawn if weight.dim() > 1 else torch.ones_like(weight))
    adapters = lora_megatron.attach(model, LORA, parallel, 0)
    rows: list[int] = []
    experts = [layer.mlp.experts for layer in model.decoder.layers if hasattr(layer.mlp, "experts")]
    hooks = [e.register_forward_hook(lambda module, args, out: rows.append(int(args[1].sum()))) for e in experts]
    tokens = torch.randint(3, 400, (ROWS, LENGTH), generator=torch.Generator().manual_seed(parallel.data_rank + 2))
    mask = torch.ones(ROWS, LENGTH)
    mask[:, : LENGTH // 2] = 0
    with LiveBytes() as live:
        logp, *_ = model_megatron.token_logprobs(model, tokens, mask, parallel)
        live.mark()
        logp.sum().backward()
    (kept,) = live.marks
    for hook in hooks:
        hook.remove()
    mean = tokens.numel() / parallel.tensor * arch.experts_per_token * parallel.expert_tensor
    fullest = max(rows) if recompute else sum(rows) / len(rows)  # one layer exists at a time, or all of them
    gradients = sum(factor.grad.nbytes for factor in lora_megatron.factors(adapters).values())
    return {"kept": kept, "peak": live.peak, "imbalance": fullest / mean, "gradients": gradients}


@pytest.mark.slow
def test_activations_are_within_15_percent_of_what_a_tiny_model_allocates():
    """Both architectures, a dense layer among the MoE layers, with and without recompute. The test has one rank:
    on several ranks the allocations varied from run to run for an unknown reason. The peak includes between none and
    all of the gradients.
    """
    for name, by_rank in world.in_layouts(["TP1"], allocated).items():
        layout = RankGrid(*world.LAYOUTS[name], engine_tensor=1, engine_expert=1)
        for rank, answers in enumerate(by_rank):
            for (model_type, changes, recompute), found in zip(CASES, answers, strict=True):
                planned = memory.activations(
                    tiny(model_type, **changes), LORA, layout, element=4, recompute=recompute,
                    tokens=ROWS * LENGTH, scored=ROWS * LENGTH // 2, imbalance=found["imbalance"],
                )  # fmt: skip
                where = (name, rank, model_type, recompute)
                assert planned.kept == pytest.approx(found["kept"], rel=0.1), where
                most = planned.peak + found["gradients"]
                assert planned.peak * 0.85 <= found["peak"] <= most * 1.15, (*where, planned.peak, found["peak"])


@pytest.mark.parametrize("recompute", [False, True])
def test_an_update_of_the_learner_takes_the_planned_bytes(recompute, tmp_path):
    """Three micro-batches of the trainer's own update on one rank: activations, gradients and AdamW's moments.

    The rows are padded to 512 tokens. A line of packed rows has fewer: see the next test.
    """
    cfg = training.config(
        tmp_path, tmp_path, model__recompute=recompute, data__max_prompt_tokens=4, rollout__max_new_tokens=60,
        rollout__group_size=4, optim__tokens_per_micro_batch=512,
    )  # fmt: skip
    arch = tiny("qwen3_moe")
    by_rank = world.in_layouts(["TP1"], updated, cfg, arch)["TP1"]
    layout = grid.of(cfg, 1)
    planned = memory.step_memory(cfg, arch, layout, "cpu", 2**33).parts
    assert memory.micro_batch_tokens(cfg, layout) == 512 and memory.line_tokens(cfg, layout) == 512 * 4 // 5
    (found,) = by_rank
    work = memory.activations(arch, cfg.lora, layout, element=4, recompute=recompute, tokens=512, scored=512)
    assert found["optimizer"] == pytest.approx(planned["optimizer"], rel=0.01)
    assert found["update"] == pytest.approx(work.peak + planned["gradients"], rel=0.1)


@pytest.mark.parametrize("shortest", [60, 5])
def test_an_update_of_packed_rows_takes_no_more_than_planned(shortest, tmp_path):
    """Rows of one length, and rows of many lengths: a forward pass holds more packed rows than padded ones."""
    cfg = training.config(
        tmp_path, tmp_path, data__max_prompt_tokens=4, rollout__max_new_tokens=60, rollout__group_size=4,
        optim__tokens_per_micro_batch=512,
    )  # fmt: skip
    arch = tiny("qwen3_moe")
    (found,) = world.in_layouts(["TP1"], updated, cfg, arch, shortest)["TP1"]
    planned = memory.step_memory(cfg, arch, grid.of(cfg, 1), "cpu", 2**33).parts
    assert 0.5 < found["update"] / (planned["activations"] + planned["gradients"]) < 1.1


@pytest.mark.parametrize("recompute", [False, True])
def test_passes_with_merged_weights_hold_the_planned_bytes_more(recompute, tmp_path):
    cfg = training.config(
        tmp_path, tmp_path, model__recompute=recompute, data__max_prompt_tokens=4, rollout__max_new_tokens=12,
        rollout__group_size=4, optim__tokens_per_micro_batch=64,
    )  # fmt: skip
    arch = tiny("qwen2_moe", hidden_size=256, moe_intermediate_size=128)  # weights that are large beside activations
    (apart,) = world.in_layouts(["TP1"], updated, cfg, arch)["TP1"]
    (merged,) = world.in_layouts(["TP1"], updated, cfg, arch, None, True)["TP1"]
    planned = 4 * memory.merged_weights(arch, cfg.lora, grid.of(cfg, 1), recompute)
    assert merged["update"] - apart["update"] == pytest.approx(planned, rel=0.15), (merged, apart, planned)


def updated(
    parallel: parallel_setup.Parallel, cfg, arch: Architecture, packed_from: int | None = None, merges: bool = False
) -> dict[str, int]:
    """Bytes that a Learner holds, and the peak of its update beyond these.

    The rows are padded and of one length, or packed and of ``packed_from`` tokens or more.
    """
    model = model_megatron.build(arch, parallel, dtype=torch.float32, recompute=cfg.model.recompute)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.05)
    adapters = lora_megatron.attach(model, cfg.lora, parallel, 0, merges=merges)
    with LiveBytes() as making:
        learner = Learner(cfg, arch, parallel, model, adapters, pad_token=0)
    learner.packs = packed_from is not None
    prompts, group = cfg.rollout.prompts_per_step, cfg.rollout.group_size
    sequences, new = prompts * group, cfg.rollout.max_new_tokens
    tokens = torch.randint(3, 400, (sequences, new), generator=torch.Generator().manual_seed(0))
    lengths = [new if packed_from is None else new - i % (new - packed_from + 1) for i in range(sequences)]
    batch = Rollout(
        prompts=[[5, 6, 7, 8]] * prompts, tokens=tokens, logp=torch.full((sequences, new), -6.0),
        lengths=lengths, truncated=torch.zeros(sequences, dtype=torch.bool),
        rewards=torch.rand(prompts, group), parsable=torch.ones(prompts, group),
    )  # fmt: skip
    heartbeat = Heartbeat(0, 0)
    with LiveBytes() as work:
        learner.update(batch, [], torch.randn(sequences), 0, StepTimer(heartbeat, 0, parallel.device))
    heartbeat.stop()
    return {"optimizer": making.now, "update": work.peak}


def save_checkpoint(parallel, path: Path, folder: Path) -> dict[str, int]:
    """Bytes that a rank holds beside its own tensors while a checkpoint is written, and sizes of the saved tensors."""
    arch, cfg = hf_config.read(path), training.config(path, folder)
    model = model_megatron.build(arch, parallel, dtype=torch.float32, recompute=False)
    learner = Learner(cfg, arch, parallel, model, lora_megatron.attach(model, cfg.lora, parallel, 0), pad_token=0)
    run_dir = folder / f"{parallel.tensor}_{parallel.expert}_{parallel.expert_tensor}"
    run_dir.mkdir(exist_ok=True)
    with LiveBytes() as live:
        tensors, counts = learner.state()
        checkpoint.save(run_dir, 1, tensors, counts | {"optimizer_steps": 1}, cfg, writes=parallel.rank == 0)
    sizes = [math.prod(tensor.shape) * 4 for kind in tensors.values() for tensor in kind.values()]
    layout = RankGrid(parallel.world_size, parallel.tensor, parallel.expert, parallel.expert_tensor, 1, 1)
    planned = {device: memory.gathered_by_a_save(arch, cfg.lora, layout, device) for device in ("cpu", "npu")}
    return {"held": live.peak, "largest": max(sizes), "all": sum(sizes), "planned": planned, "now": live.now}


def test_no_rank_holds_more_than_one_gathered_tensor_while_a_checkpoint_is_written(tmp_path: Path):
    """A backend that copies nothing itself stands for the backend of a device. Rank 0 writes, the others gather."""
    path = training.make_model(tmp_path / "model")
    for ranks, tensor, expert in [(2, 1, 2), (4, 4, 4), (16, 4, 16)]:
        for rank in (0, ranks - 1):
            with as_rank(rank, ranks, tensor, expert, 1) as parallel:
                found = save_checkpoint(parallel, path, tmp_path)
            assert found["held"] <= found["largest"] + 2048 and found["now"] <= 2048, (ranks, rank, found)
            assert found["largest"] == found["planned"]["npu"] and found["all"] > 20 * found["largest"], found
    layouts = ["EP2", "TP2_EP2_DP2", "TP2_EP2_ETP2"]  # gloo copies on its own threads, at unpredictable times
    for name, by_rank in world.in_layouts(layouts, save_checkpoint, path, tmp_path).items():
        assert all(found["held"] < found["all"] / 3 for found in by_rank), (name, by_rank)
    with as_rank(0, 4, 2, 2, 2) as parallel:  # gathered over experts, then over expert_tensor, then joined on the host
        found = save_checkpoint(parallel, path, tmp_path)
    assert found["planned"]["npu"] == 1.5 * found["largest"] and found["held"] <= 2.5 * found["largest"] + 2048, found


def test_a_cache_holds_the_rows_that_its_bytes_are_for():
    """48 layers x 2 x 1 head x 128 x 2 bytes = 24,576 a token. A group of 8 shares those of its prompt."""
    cfg, arch = load_config("configs/qwen3.yaml", ["rollout.kv_cache_mib=2048"]), real("qwen3")
    layout = grid.of(cfg, 16)
    planned = memory.step_memory(cfg, arch, layout, "npu", 61 * 2**30)
    assert hf_config.cache_bytes_per_token(arch, 4, 2) == 24_576
    assert planned.wanted_rows == 96 // 4 * 8
    assert planned.cached_rows == 2048 * 2**20 // (24_576 * (512 // 8 + 1536))
    roomy = dataclasses.replace(layout, engine_tensor=8)
    assert hf_config.cache_bytes_per_token(arch, 8, 2) == 24_576  # 4 heads over 8 ranks: two ranks hold each head
    assert (
        memory.step_memory(cfg, arch, roomy, "npu", 61 * 2**30).parts["engine weights"]
        < planned.parts["engine weights"]
    )


ROWS_AT_ONCE = [  # ranks, other settings, rows of a replica in a step, rows that are decoded at once; all by hand
    (16, [], 24 * 8, 192),
    (8, ["rollout.expert_parallel=false"], 48 * 8, 252),  # 9,472 MiB of 24,576 bytes hold 252 rows of 64 + 1,536 tokens
    (8, ["rollout.expert_parallel=false", "rollout.kv_cache_mib=20000"], 48 * 8, 384),
    (8, ["rollout.expert_parallel=false", "rollout.kv_cache_mib=40000", "rollout.prompts_per_step=144"], 72 * 8, 512),
    (16, ["rollout.kv_cache_mib=20000", "eval.batch_size=60", "eval.samples=4"], 192, 240),  # an evaluation has more
    (16, ["rollout.kv_cache_mib=51"], 192, 1),
    (
        16,
        ["rollout.tensor=1", "rollout.expert_parallel=false"],
        6 * 8,
        63,
    ),  # 4 heads: a quarter of the rows; eval has 96
    (10, ["rollout.tensor=2", "rollout.expert_parallel=false", "rollout.kv_cache_mib=40000"], 20 * 8, 160),  # 96 / 5
]


@pytest.mark.parametrize(("ranks", "changes", "in_a_step", "at_once"), ROWS_AT_ONCE)
def test_the_plan_counts_the_rows_that_the_engine_takes_at_once(ranks, changes, in_a_step, at_once, monkeypatch):
    """1.5 waves of the plan's rows are two waves of the engine, whose ``max_num_seqs`` is the same number."""
    cfg, arch = load_config("configs/qwen3.yaml", changes), real("qwen3")
    planned = memory.step_memory(cfg, arch, grid.of(cfg, ranks), "npu", 61 * 2**30)
    assert (planned.wanted_rows, planned.cached_rows) == (in_a_step, min(in_a_step, at_once))
    given: dict = {}
    for kind in (vllm_engine.VllmEngine, vllm_colocated.ColocatedEngine):
        monkeypatch.setattr(kind, "__init__", lambda self, *args, **options: given.update(options))
    monkeypatch.setattr(rollout.dist, "get_world_size", lambda: ranks)
    rollout.open_engine(cfg, arch, torch.device("cpu"), {1}, 0)
    assert given["max_sequences"] == at_once


def test_the_embedded_sampler_takes_the_rows_of_the_plan_in_a_wave():
    cfg = load_config("configs/tiny_cpu.yaml", ["rollout.prompts_per_step=96", "optim.prompts_per_update=96"])
    arch = hf_config.planned(cfg)[0]
    engine = rollout.open_engine(cfg, arch, torch.device("cpu"), {1}, 0)
    planned = memory.step_memory(cfg, arch, grid.of(cfg, 1), "cpu", 2**40)
    assert planned.wanted_rows == 96 * cfg.rollout.group_size > 512
    assert planned.cached_rows == engine.max_sequences == 512


@pytest.mark.parametrize(("prompts", "tokens"), [(96, 48), (192, 96), (768, 128)])  # of 4 replicas: 4 ranks split them
def test_a_run_checks_the_kernel_for_the_tokens_that_a_rank_will_send(prompts, tokens, monkeypatch):
    cfg = load_config("configs/qwen3.yaml", [f"rollout.prompts_per_step={prompts}", "rollout.kv_cache_mib=40000"])
    seen = []
    monkeypatch.setattr(rollout.devices, "resolve", lambda name: torch.device("meta"))
    monkeypatch.setattr(vllm_engine, "check", lambda *args, **more: None)
    monkeypatch.setattr(vllm_colocated, "check", lambda *args, **more: seen.append((more["ranks"], more["tokens"])))
    rollout.check_engine(cfg, real("qwen3"), 16)
    assert seen == [(16, tokens)]
