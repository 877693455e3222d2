"""Where trainer and embedded sampler hold an expert once: the same numbers as with two copies, and less memory.

The reference is the same policy with an engine that shares nothing. Not covered: the memory of vLLM, which
tests/machines/test_vllm_ascend.py and tests/rooms/engines/test_vllm.py look at.
"""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import adapted
import planted
import pytest
import reference
import torch
import training
import world
from lora_reference import TARGETS
from tiers import asked, ci, nightly
from torch import Tensor

import lora_megatron
from engines import vllm_inside
from engines.interface import Stack
from engines.torch_sampler import TorchSampler
from facts.exits import Tripped
from hardware.device import DTYPES
from knobs import Config
from model import megatron_model
from parallel_setup import Parallel
from weight_sync import Push, way_of
from weights import huggingface
from weights.policy import Policy

LAYOUTS = ["TP2_EP2", ci("TP1"), nightly("EP2_DP4")]
PROBE = [5, 6, 7, 8]
MERGED = {"model__dtype": "bf16", "rollout__sync": "merged"}
APART = {"model__dtype": "fp32", "rollout__sync": "adapter"}


def connected(parallel: Parallel, path: Path, cfg: Config, shares: bool) -> tuple:
    """Model, adapters and engine after the first push, and the push."""
    model, arch = adapted.load(path, parallel, dtype=DTYPES[cfg.model.dtype])
    policy = Policy.on(cfg, arch, parallel, model)
    engine = TorchSampler(arch, stop_tokens=set(), pad_token=0, dtype=DTYPES[cfg.model.dtype], adapter=cfg.lora)
    if not shares:
        engine.stacks = dict
    return model, arch, policy.adapters, engine, Push(way_of(adapted.placed(cfg, parallel), policy), engine)


def log_probs(model: torch.nn.Module, parallel: Parallel) -> Tensor:
    tokens, mask = adapted.my_rows(reference.tokens(), parallel)
    with torch.no_grad():
        return megatron_model.token_logprobs(model, tokens, mask, parallel)[0]


def stored(tensors) -> dict[int, int]:
    """Address -> bytes of each piece of memory that holds one of ``tensors``."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def trained(parallel: Parallel, path: Path, changes: dict, shares: bool) -> dict:
    """Numbers and gradients over two updates with a push in between, and what was held and merged for them."""
    cfg = training.config(path, path, **{"lora__targets": TARGETS} | changes)
    model, arch, adapters, engine, push = connected(parallel, path, cfg, shares)
    answer: dict = {"log-probs": [], "held": [], "gradients": []}
    with mock.patch.object(lora_megatron, "merge", wraps=lora_megatron.merge) as merges:
        for step in range(2):
            adapted.move(adapters, arch, parallel, step)
            answer["log-probs"].append(log_probs(model, parallel))  # an update after the first one of a rollout
            push(step, PROBE)
            before = merges.call_count
            adapted.backward(model, reference.tokens(), parallel)
            answer["gradients"] += [factor.grad.clone() for factor in lora_megatron.factors(adapters).values()]
            answer["merges of a pass"] = merges.call_count - before
            answer["held"] += [slot.clone() for slot in engine.decoder.slots.values()]
    memory = stored([*model.parameters(), *engine.decoder.slots.values()])
    return answer | {"bytes": sum(memory.values()), "shared": push.shared_bytes, "experts": of_experts(model)}


def of_experts(model: torch.nn.Module) -> int:
    """Bytes of the matrices of this rank's routed experts."""
    names = dict(model.named_parameters())
    return sum(x.nbytes for name, x in names.items() if ".experts." in name and name.endswith("weight"))


def both_ways(parallel: Parallel, path: Path, changes: dict) -> list[dict]:
    return [trained(parallel, path, changes, shares) for shares in (True, False)]


@pytest.mark.parametrize("changes", [MERGED, APART], ids=["merged", "factors apart"])
def test_shared_memory_changes_no_bit_and_saves_a_copy(changes: dict, tmp_path: Path) -> None:
    path = reference.save("qwen2_moe", tmp_path)
    for ranks in world.in_layouts(asked(LAYOUTS), both_ways, path, changes).values():
        for once, twice in ranks:
            for what in ("log-probs", "gradients", "held"):
                assert all(map(torch.equal, once[what], twice[what])), what
            assert once["shared"] == once["experts"] and twice["shared"] == 0
            if changes is MERGED:  # two matrices of experts in each of the two MoE layers of the model
                assert twice["merges of a pass"] - once["merges of a pass"] == 4
            else:
                assert twice["bytes"] - once["bytes"] == once["experts"]


# ------------------------------------------------------------------------------------------------ other layouts


def in_another_layout(parallel: Parallel, path: Path) -> tuple[int, bool, bool]:
    """The last rank's engine has its experts in another order: bytes shared, stacks left, whether a push arrives."""
    cfg = training.config(path, path, **{"lora__targets": TARGETS} | MERGED)
    model, arch = adapted.load(path, parallel, dtype=torch.bfloat16)
    policy = Policy.on(cfg, arch, parallel, model)
    engine = TorchSampler(arch, stop_tokens=set(), pad_token=0, dtype=torch.bfloat16)
    if parallel.rank == parallel.world_size - 1:
        real = engine.stacks
        engine.stacks = lambda: {name: Stack(one.memory.roll(1, 0), one.experts) for name, one in real().items()}
    push = Push(way_of(adapted.placed(cfg, parallel), policy), engine)
    adapted.move(policy.adapters, arch, parallel, 0)
    push(0, PROBE)
    pushed = huggingface.export(model, arch, parallel)
    return push.shared_bytes, bool(push.stacks), all(torch.equal(engine.decoder.slots[name], x) for name, x in pushed)


def test_memory_that_is_not_what_was_pushed_on_one_rank_is_shared_on_none(tmp_path: Path) -> None:
    path = reference.save("qwen3_moe", tmp_path)
    for found in world.in_layouts(["TP2_EP2"], in_another_layout, path)["TP2_EP2"]:
        assert found == (0, False, True)


@pytest.mark.parametrize("kernels", ["NPU", "Triton"])
def test_stacks_of_vllm_are_its_own_memory_in_the_order_of_the_trainer(kernels: str) -> None:
    """8 hidden, 3 wide; two experts on this rank. Kernels of an NPU read (E, in, out), those of Triton (E, out, in)."""
    w13, w2 = torch.randn(2, 8, 6), torch.randn(2, 3, 8)
    module = torch.nn.Module()
    module._expert_map = torch.tensor([-1, -1, 0, 1])
    for name, value in (("w13_weight", w13), ("w2_weight", w2)):
        held = value.clone() if kernels == "NPU" else value.mT.contiguous()
        module.register_parameter(name, torch.nn.Parameter(held, requires_grad=False))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Identity(), module])})
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    found = vllm_inside.stacks(worker, {"gate_up_proj": 8, "down_proj": 3})
    assert {name.rpartition(".")[0] for name in found} == {"model.layers.1.mlp.experts"}
    for (memory, experts), value, own in zip(found.values(), (w13, w2), module.parameters(), strict=True):
        assert torch.equal(memory, value) and experts == range(2, 4)
        memory.zero_()
        assert not own.any()
    module._expert_map = torch.tensor([0, -1, -1, 1])  # not neighbours in the model
    assert vllm_inside.stacks(worker, {"gate_up_proj": 8, "down_proj": 3}) == {}


# ------------------------------------------------------------------------------------------------ wrong merges


WRONG = {  # fault: the step that finds it
    "the merge into shared memory has another scale": "step 2",
    "the merge into shared memory is that of the push": "step 2",
    "experts have the update of their neighbour": "step 2",
    "noise stays in shared memory": "step 1",
}


@pytest.mark.parametrize("layout", ["TP1", nightly("TP2_EP2")])
@pytest.mark.parametrize("fault", [*list(WRONG)[:2], *map(ci, list(WRONG)[2:])])
def test_a_wrong_merge_in_the_shared_memory_stops_the_run(fault: str, layout: str, tmp_path: Path) -> None:
    """No difference of log-probs shows it, because trainer and sampler have the same wrong experts."""
    model = training.make_model(tmp_path / "model")
    cfg = training.config(model, tmp_path, **MERGED, optim__lr=1e-3)
    start = f"checks.adapters: {WRONG[fault]}: "
    for kind, message in training.raised(planted.FAULTS[fault], cfg, layout):
        assert kind is Tripped and message.startswith(start) and "are not W + " in message
    assert training.raised(planted.nothing, cfg, layout)[0][1] == "", "control"
