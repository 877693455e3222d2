"""The trainer's shards equal vLLM's, on all 16 ranks of tensor 4 x data 4 with the experts over 16 ranks.

vLLM 0.30's group arithmetic, model classes and weight loaders run here as each rank in turn, over groups that only know
their members; Megatron's over torch's fake backend. What vllm-ascend does after loading is restated: it transposes the
experts. Not covered: collectives, kernels, and vLLM 0.23, whose loaders the NPU will run.
"""

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import adapted
import published
import pytest
import reference
import torch
import torch.distributed as dist
import world
from safetensors.torch import load_file
from tiers import asked, nightly
from torch import Tensor

import parallel_setup
from engines import vllm_ascend, vllm_colocated, vllm_inside
from facts import variables
from facts.exits import InputError
from inputs import hf_config

pytestmark = pytest.mark.xdist_group("vllm")  # the files that import vLLM share a process
RANKS, TENSOR, DATA = 16, 4, 4
# Qwen3-30B-A3B's heads and experts, everything else small; a dense layer in the middle.
QWEN3 = dict(
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=32,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=16,
    vocab_size=1024,
)
# Biases, two key/value groups a rank, a shared expert, one table for both ends.
QWEN2 = dict(
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=8,
    num_experts=32,
    vocab_size=256,
    mlp_only_layers=[],
    tie_word_embeddings=True,
)
MODELS = {"qwen3_moe": (QWEN3, asked([1, 6, 15, *map(nightly, range(2, 5))])), "qwen2_moe": (QWEN2, (0, 6, 15))}


class Group:
    """The part of a process group that vLLM's modules use while they are built and loaded."""

    def __init__(self, ranks: list[int], rank: int) -> None:
        self.ranks, self.rank, self.local_rank = ranks, rank, rank
        self.world_size, self.rank_in_group = len(ranks), ranks.index(rank)
        self.is_first_rank, self.is_last_rank = rank == ranks[0], rank == ranks[-1]
        self.device_group = self.cpu_group = self

    def size(self) -> int:
        return self.world_size


def trainer(rank: int, path: Path) -> tuple[dict, dict[str, Tensor]]:
    """Megatron's groups and this rank's shards as they are pushed, under the names of vLLM."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    try:
        parallel = world.open_layout("TP4_EP16")
        model, arch = adapted.load(path, parallel)
        pushed = list(vllm_colocated.shards(model, arch, parallel))
        local = arch.num_experts // parallel.expert
        groups = {
            "tensor": dist.get_process_group_ranks(parallel.tensor_group),
            "data": dist.get_process_group_ranks(parallel.data_group),
            "expert": dist.get_process_group_ranks(parallel.expert_group),
            "experts": list(range(parallel.expert_rank * local, (parallel.expert_rank + 1) * local)),
        }
        parallel_setup.close_layout()
    finally:
        dist.destroy_process_group()
    names = [name for name, _ in pushed]
    assert len(names) == len(set(names))
    return groups, dict(pushed)


def vllm(rank: int, path: Path, patch: pytest.MonkeyPatch) -> tuple[dict, dict[str, Tensor]]:
    """vLLM's groups and experts on this rank, and the shards that its loaders cut, in the layout of an NPU."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.models.qwen2_moe import Qwen2MoeForCausalLM
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    for key, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS}.items():
        patch.setenv(key, str(value))
    patch.setattr(parallel_state, "_WORLD", Group(list(range(RANKS)), rank))
    for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP", "_EP", "_EPLB", "_ENGRAM_DP"):
        patch.setattr(parallel_state, name, None)

    def members(group_ranks, local_rank, backend, **options) -> Group:
        (mine,) = [ranks for ranks in group_ranks if rank in ranks]
        return Group(mine, rank)

    patch.setattr(parallel_state, "init_model_parallel_group", members)
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    try:
        config = VllmConfig(
            model_config=ModelConfig(
                str(path),
                dtype="float32",
                skip_tokenizer_init=True,
                max_model_len=64,
                hf_overrides={"tie_word_embeddings": False},
            ),
            parallel_config=ParallelConfig(
                tensor_parallel_size=TENSOR,
                data_parallel_size=DATA,
                enable_expert_parallel=True,
                distributed_executor_backend="external_launcher",
            ),
        )
        assert config.parallel_config.data_parallel_rank == rank // TENSOR
        with set_current_vllm_config(config):
            parallel_state.initialize_model_parallel(TENSOR, backend="gloo")
            qwen3 = hf_config.read(path).model_type == "qwen3_moe"
            model = (Qwen3MoeForCausalLM if qwen3 else Qwen2MoeForCausalLM)(vllm_config=config)
            tensors = load_file(path / "model.safetensors")
            tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
            model.load_weights(iter(tensors.items()))
    finally:
        dist.destroy_process_group()
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    loaded = {
        name: value.detach().transpose(1, 2) if name.endswith(("w13_weight", "w2_weight")) else value.detach()
        for name, value in vllm_inside.parameters(worker).items()
    }
    groups = {
        "tensor": parallel_state.get_tp_group().ranks,
        "data": parallel_state.get_dp_group().ranks,
        "expert": parallel_state.get_ep_group().ranks,
    }
    experts = {f"layer {layer} experts": owned for layer, _, owned in vllm_inside._moe_layers(worker)}
    return groups | experts, loaded


@pytest.fixture(scope="module", params=MODELS)
def ranks(request, tmp_path_factory) -> Iterator[tuple[str, dict[int, tuple]]]:
    """The model's kind, and by rank the groups and shards of the trainer and of vLLM."""
    kind = request.param
    sizes, chosen = MODELS[kind]
    path = reference.save(kind, tmp_path_factory.mktemp(kind), **sizes)
    world._import_megatron()
    found = {}
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's and Megatron's own deprecations
        patch.setenv("LOCAL_WORLD_SIZE", "1")  # vLLM writes into it, and this test's end restores it
        for variable in variables.VLLM:
            patch.setenv(variable.name, os.environ.get(variable.name, variable.value))
        set_num_threads = torch.set_num_threads
        for rank in chosen:
            with pytest.MonkeyPatch.context() as of_rank:
                found[rank] = (trainer(rank, path), vllm(rank, path, of_rank))
        torch.set_num_threads = set_num_threads
    yield kind, found


@pytest.mark.ci
@pytest.mark.vllm
@pytest.mark.slow
class TestAgainstVllm:
    def test_every_rank_has_one_place_in_both(self, ranks) -> None:
        """The place follows vLLM's source: ranks are reshaped to (data, tensor), and experts are assigned in order."""
        kind, found = ranks
        for rank, ((groups, _), (placement, _)) in found.items():
            local = 8 if kind == "qwen3_moe" else 2
            experts = list(range(local * rank, local * (rank + 1)))
            first = rank // TENSOR * TENSOR
            assert groups["tensor"] == placement["tensor"] == list(range(first, first + TENSOR))
            assert groups["data"] == placement["data"] == list(range(rank % TENSOR, RANKS, TENSOR))
            assert groups["expert"] == placement["expert"] == list(range(RANKS))
            layers = {name: ids for name, ids in placement.items() if name.endswith(" experts")}
            assert list(layers) == [f"layer {i} experts" for i in ((0, 2) if kind == "qwen3_moe" else (0, 1, 2))]
            assert groups["experts"] == experts and all(ids == experts for ids in layers.values())

    def test_every_shard_is_to_the_bit_what_vllm_loads(self, ranks) -> None:
        kind, found = ranks
        for (_, pushed), (_, loaded) in found.values():
            if kind == "qwen2_moe":
                pushed = pushed | {"lm_head.weight": pushed["model.embed_tokens.weight"]}
            assert pushed.keys() == loaded.keys()
            for name, value in loaded.items():
                assert torch.equal(pushed[name], value), name


def test_a_push_brings_only_biases_that_the_model_has() -> None:
    """vLLM's Qwen2-MoE always has them; load_weights clears those that no push brings."""
    engine = object.__new__(vllm_colocated.ColocatedEngine)
    bias, weight = "model.layers.0.self_attn.qkv_proj.bias", "model.layers.0.self_attn.qkv_proj.weight"
    engine.parameters = {bias: torch.empty(6), weight: torch.empty(6, 4)}
    for has_biases, expected in ((True, {bias: (6,), weight: (6, 4)}), (False, {weight: (6, 4)})):
        engine.arch = dataclasses.replace(hf_config.parse(published.QWEN15_MOE), qkv_bias=has_biases)
        engine.take_parameters_as_they_are()
        assert engine.shapes == expected


# ------------------------------------------------------------------------------------------------ around vllm-ascend


@pytest.mark.parametrize(
    ("name", "value", "device", "refused"),
    [
        ("VLLM_DP_SIZE", "4", "npu", True),
        ("VLLM_ASCEND_ENABLE_NZ", "1", "npu", True),
        ("VLLM_ASCEND_ENABLE_NZ", "1", "cpu", False),
        ("DYNAMIC_EPLB", "true", "npu", True),
        ("DYNAMIC_EPLB", "false", "npu", False),
    ],
)
def test_a_variable_that_would_move_or_tile_weights_is_refused(monkeypatch, name, value, device, refused) -> None:
    off = [variable.name for variable in variables.MUST_BE_OFF]
    for variable in off + variables.from_a_launcher(os.environ):
        monkeypatch.delenv(variable, raising=False)
    vllm_ascend.check_environment(device)
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"the environment's {name} ") if refused else contextlib.nullcontext():
        vllm_ascend.check_environment(device)


@pytest.mark.parametrize(
    ("tokens", "window", "enough"),
    [
        (128, None, True),
        (256, None, False),
        (48, "58", True),
        (48, "56", False),
        (512, "609", True),
        (512, "607", False),
        (48, "", False),
    ],
)
def test_a_window_that_is_too_small_for_the_tokens_of_a_step_is_refused(
    monkeypatch, tokens: int, window: str | None, enough: bool
) -> None:
    """8 experts on each of 16 ranks, hidden size 2,048, 8 experts a token: CANN's formula gives, by hand, 57 MiB for 48
    tokens, 152 for 128, 304 for 256 and 608 for 512. CANN's own default is 200 MiB.
    """
    monkeypatch.delenv("HCCL_BUFFSIZE", raising=False)
    if window is not None:
        monkeypatch.setenv("HCCL_BUFFSIZE", window)
    arch = hf_config.parse(published.QWEN3_30B_A3B)
    message = "HCCL_BUFFSIZE is .*; set it to "
    with contextlib.nullcontext() if enough else pytest.raises(InputError, match=message):
        vllm_ascend.check_window(arch, 16, tokens)


def test_graphs_are_captured_for_few_sizes_with_torchs_own_compile(monkeypatch) -> None:
    assert vllm_ascend.arguments(True, 256).keys() == {"additional_config"}
    graphs = vllm_ascend.arguments(False, 192)["compilation_config"]
    assert graphs == {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [16, 64, 128, 192]}
    torchs, other = torch.compile, lambda model=None, **options: model
    monkeypatch.setattr(torch, "compile", other)
    for enforce_eager, inside in ((False, torchs), (True, other)):
        with vllm_ascend.original_compile(enforce_eager=enforce_eager):
            assert torch.compile is inside
        assert torch.compile is other
    monkeypatch.setattr(vllm_ascend, "TORCH_COMPILE", lambda model: model)
    with pytest.raises(InputError, match="enforce_eager"), vllm_ascend.original_compile(enforce_eager=False):
        pass
