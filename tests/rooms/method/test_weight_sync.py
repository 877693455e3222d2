"""The sampler gets the trainer's policy: whole weights by name, this rank's shards, factors, and noise."""

import contextlib
import dataclasses
import json
import math
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import adapted
import pytest
import reference
import torch
import training
import world
from lora_reference import TARGETS
from planted import engine_with, nothing
from planting import instead
from tiers import ci
from torch import Tensor

import aqn
import lora_megatron
from engines import factory, vllm_colocated, vllm_engine, vllm_inside
from engines.interface import Completion, Engine
from engines.probe import Probe
from engines.torch_decoder import Decoder
from engines.torch_sampler import TorchSampler
from engines.vllm_colocated import ColocatedEngine
from engines.vllm_engine import VllmEngine
from facts.architectures import Architecture
from facts.exits import InputError, Tripped
from inputs import hf_config, rules
from knobs import Config
from parallel_setup import Parallel
from weight_sync import Push, way_of
from weights import huggingface
from weights.policy import Policy

# ---------------------------------------------------------------------------------------------------------- weight sync
# After a push the engine has the adapters and the noise, and nothing else has changed, in every layout.
#
# The reference is an engine that is loaded whole, from nothing, with the policy that was to be pushed.

KINDS = ["qwen2_moe", ci("qwen3_moe")]
LAYOUTS = ["TP1", "TP2_EP2"]
PROBE = [5, 6, 7, 8]
SIGMAS = [0.0, 0.01, 0.001]  # of a qerl run of three steps in three stages
NOISES = {
    "off": {},
    "every target": {"aqn__targets": ("attention", "experts")},
    "one target": {"aqn__targets": ("experts",)},
}


def config(model: Path, changes: dict) -> Config:
    noise = "aqn__targets" in changes
    schedule = {"aqn__schedule": "qerl", "aqn__num_stages": 3} if noise else {}
    return training.config(model, model, **{"lora__targets": TARGETS, "train__steps": 3} | schedule | changes)


def held(engine: TorchSampler) -> dict[str, Tensor]:
    """A copy of every tensor in the engine."""
    return {name: slot.clone() for name, slot in engine.decoder.slots.items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def loaded(arch, stream) -> dict[str, Tensor]:
    """The tensors of a new engine that got only this stream."""
    engine = TorchSampler(arch, stop_tokens=set(), pad_token=0)
    engine.load_weights(stream)
    return held(engine)


def follow(parallel: Parallel, path: Path, noises: dict[str, dict]) -> dict[str, dict]:
    """Push after each of three updates. By kind of noise: which properties hold, and the tensors of each step."""
    answers = {}
    for label, noise in noises.items():
        cfg = config(path, noise)
        model, arch = adapted.load(path, parallel)
        policy = Policy.on(cfg, arch, parallel, model)
        engine = TorchSampler(arch, stop_tokens=set(), pad_token=0)
        push = Push(way_of(adapted.placed(cfg, parallel), policy), engine)
        trained = {id(factor) for factor in policy.factors.values()}
        base = [tensor for tensor in model.parameters() if id(tensor) not in trained]
        before = [tensor.clone() for tensor in base]
        answer = {"first": same(held(engine), loaded(arch, huggingface.export(model, arch, parallel)))}
        for step in range(3):
            adapted.move(policy.adapters, arch, parallel, step)
            clean = loaded(arch, huggingface.export(model, arch, parallel))
            expected, pushed = clean, push(step, PROBE)
            if noise:
                stream = huggingface.export(model, arch, parallel)
                targets = aqn.norm_targets(arch, cfg.aqn.targets)
                norms = aqn.clean_norms(huggingface.export(model, arch, parallel), targets)
                report = aqn.NoiseReport(SIGMAS[step])
                expected = loaded(arch, aqn.perturb(stream, norms, report, seed=0, step=step))
            first = held(engine)
            again = push(step, PROBE)
            twice = held(engine)
            push.clean()
            answer[step] = {
                "equals a full push": same(first, expected),
                "no drift": same(first, twice) and again == pushed,
                "clean again": same(held(engine), clean),
                "noisy": not same(first, clean),
                "sigma": pushed.get("aqn/sigma"),
                "shift": pushed.get("aqn/probe_shift"),
                "gap": pushed.get("aqn/probe_gap") or 0,
                "norms": {name: tensor for name, tensor in first.items() if "norm" in name},
                "held": first,
            }
        answers[label] = answer | {"trainer unmoved": len(base) > 20 and all(map(torch.equal, base, before))}
    return answers


@pytest.fixture(scope="module", params=KINDS)
def answers(request, tmp_path_factory) -> dict[str, list[dict]]:
    path = reference.save(request.param, tmp_path_factory.mktemp(request.param))
    return world.in_layouts(LAYOUTS, follow, path, NOISES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("noise", NOISES)
def test_a_push_equals_a_full_one_and_a_clean_one_leaves_nothing(noise: str, layout: str, answers) -> None:
    for answer in (answer[noise] for answer in answers[layout]):
        assert answer["first"] and answer["trainer unmoved"]
        for step, sigma in enumerate(SIGMAS):
            found, noisy = answer[step], noise != "off" and sigma > 0
            assert found["equals a full push"] and found["no drift"] and found["clean again"]
            assert found["noisy"] == noisy
            assert found["sigma"] == (None if noise == "off" else sigma)
            assert bool(found["shift"]) == noisy
            assert found["gap"] < 1e-5, "engine and trainer, before the noise"


@pytest.mark.parametrize("noise", NOISES)
def test_every_rank_of_a_layout_holds_the_same_and_every_layout_the_same_noise(noise: str, answers) -> None:
    one, other = answers["TP2_EP2"]
    for step in range(3):
        assert same(one[noise][step]["held"], other[noise][step]["held"])
        assert same(one[noise][step]["norms"], answers["TP1"][0][noise][step]["norms"])
        if noise != "off" and step:
            assert not same(one[noise][step]["held"], one["off"][step]["held"])


# ------------------------------------------------------------------------------------------------ whole runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """Runs whose policy does not change, evaluated after every step: with noise, and without."""
    model = training.make_model(tmp_path_factory.mktemp("models") / "tiny")
    out = tmp_path_factory.mktemp("runs")
    still = {"optim__lr": 1e-30, "checks__off": ("adapters",), "eval__every": 1, "loss__kl": "none"}
    noise = {"aqn__schedule": "constant", "aqn__sigma_start": 0.1}
    changes = {"clean": still, "noisy": still | noise}
    cfgs = {label: training.config(model, out / label, **changes[label]) for label in changes}
    return training.run_all({label: ("TP1", cfg) for label, cfg in cfgs.items()})


def test_evaluation_is_the_same_to_the_last_bit_with_and_without_noise(runs: dict[str, Path]) -> None:
    for name in ("eval.jsonl", "eval_outcomes.jsonl"):
        assert (runs["noisy"] / name).read_bytes() == (runs["clean"] / name).read_bytes()
    evaluations = (runs["clean"] / "eval.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in evaluations] == [0, 1, 2, 3]
    sampled = [training.completions(runs[label]) for label in ("noisy", "clean")]
    assert sampled[0] != sampled[1], "control: the noise changes what is sampled for training"


def test_the_check_of_the_gap_uses_the_clean_policy(runs: dict[str, Path]) -> None:
    """The gap of the noisy one is far above the bound of 1e-3."""
    for row in training.metrics(runs["noisy"]):
        assert row["aqn/probe_gap"] < 1e-5 and row["rollout/logp_gap_mean"] > 2e-3
    assert all("aqn/probe_gap" not in row for row in training.metrics(runs["clean"]))


# --------------------------------------------------------------------------------------------------- this rank's shards
# The push of a rank's own shards: what arrives, what is refused, and what the check at the start finds.
#
# The reference is the push of whole tensors, cut as those of a model without adapters. Engines are stand-ins that keep
# what they get; that the cut is vLLM's is test_colocated.py's matter.

LAYOUT, TENSOR, EXPERT = "TP2_EP4", 2, 4  # 4 ranks: tensor 2 x data 2, experts over all
LOCAL_NOISES = {
    "off": {},
    "noise": {"aqn__targets": ("attention", "experts")},
}


def local_config(path: Path, noise: dict, local: bool) -> Config:
    schedule = {"aqn__schedule": "constant", "aqn__sigma_start": 0.01} if noise else {}
    return training.config(
        path,
        path,
        lora__targets=TARGETS,
        train__steps=3,
        rollout__engine="vllm",
        rollout__tensor=TENSOR,
        rollout__expert_parallel=local,
        parallel__tensor=TENSOR,
        parallel__expert=EXPERT,
        **schedule,
        **noise,
    )


class Keeper(Engine):
    """An engine that keeps the tensors that it gets."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.pushes: list[set[str]] = []

    def load_weights(self, named_tensors) -> None:
        arrived = {name: tensor.clone() for name, tensor in named_tensors}
        self.held |= arrived
        self.pushes.append(set(arrived))

    def sample(self, prompts, **how) -> list[list[Completion]]:
        mass = sum(tensor.double().sum().item() for name, tensor in self.held.items() if "norm" in name)
        return [[Completion([1], [mass], "length")] for _ in prompts]


def cut(whole: dict[str, Tensor], arch: Architecture, parallel: Parallel, path: Path) -> dict[str, Tensor]:
    """This rank's shards of a model without adapters that has the tensors ``whole``."""
    with tempfile.TemporaryDirectory() as folder:
        huggingface.save_model(iter(whole.items()), Path(folder))
        shutil.copy(path / "config.json", folder)
        return dict(vllm_colocated.shards(adapted.load(Path(folder), parallel)[0], arch, parallel))


def both_ways(parallel: Parallel, path: Path) -> dict[str, list]:
    """By kind of noise, after the first push and three updates: differences on this rank, checksums, and names."""
    local_answers = {}
    for label, noise in LOCAL_NOISES.items():
        model, arch = adapted.load(path, parallel)
        policy = Policy.on(local_config(path, noise, True), arch, parallel, model)
        keepers = {local: Keeper() for local in (False, True)}
        syncs = {
            local: Push(way_of(local_config(path, noise, local), policy), keeper) for local, keeper in keepers.items()
        }
        wrong, checksums, names = [], [], []
        for step in range(-1, 3):
            if step >= 0:
                adapted.move(policy.adapters, arch, parallel, step)
                pushed = {local: sync(step, PROBE) for local, sync in syncs.items()}
                if noise:
                    keys = [key for key in pushed[True] if key not in ("sync/checksum", "aqn/probe_shift")]
                    wrong += [key for key in keys if pushed[True][key] != pushed[False][key]]
                checksums.append(pushed[True]["sync/checksum"])
            needed, held = cut(keepers[False].held, arch, parallel, path), keepers[True].held
            wrong += sorted(needed.keys() ^ held.keys())
            wrong += [name for name in needed if name in held and not torch.equal(needed[name], held[name])]
            names.append(keepers[True].pushes[-2 if noise and step >= 0 else -1])
        local_answers[label] = (wrong, checksums, names)
    return local_answers


def on_a_rank(parallel: Parallel, path: Path) -> dict[str, object]:
    """What the tests below compare, on one rank."""
    model, arch = adapted.load(path, parallel)
    found = {
        "shards": {name: tensor.clone() for name, tensor in vllm_colocated.shards(model, arch, parallel)},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Probe, "gap", lambda self, prompt: 0.0)  # a Keeper cannot compute log-probs
        return found | {"both ways": both_ways(parallel, path)}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    return reference.save("qwen3_moe", tmp_path_factory.mktemp("qwen3_moe"))


@pytest.fixture(scope="module")
def local_answers(path: Path) -> list[dict]:
    return world.in_layouts([LAYOUT], on_a_rank, path)[LAYOUT]


@pytest.mark.parametrize("noise", LOCAL_NOISES)
def test_a_local_push_is_the_streamed_one_cut(noise: str, local_answers) -> None:
    for answer in local_answers:
        wrong, checksums, names = answer["both ways"][noise]
        assert not wrong
        assert len(set(checksums)) == 3 and all(math.isfinite(checksum) for checksum in checksums)
        first, *later = names
        assert "lm_head.weight" in first and all(brought == later[0] < first for brought in later)
        touched = {name for name in later[0] if "layernorm" in name}
        assert bool(touched) == (noise != "off") and "model.norm.weight" not in later[0]


def without_collectives(parallel: Parallel, path: Path) -> None:
    """The local push works where every collective raises; the streamed one does not."""
    model, arch = adapted.load(path, parallel)
    lora_megatron.attach(model, local_config(path, {}, True).lora, parallel, 0)
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "all_gather_into_tensor",
            "all_gather",
            "all_gather_object",
            "all_reduce",
            "broadcast",
            "barrier",
            "all_to_all_single",
            "reduce_scatter_tensor",
            "send",
            "recv",
        ):
            patch.setattr(torch.distributed, name, mock.Mock(side_effect=RuntimeError("a collective")))
        assert len(dict(vllm_colocated.shards(model, arch, parallel))) > 20
        with pytest.raises(RuntimeError, match="a collective"):
            dict(huggingface.export(model, arch, parallel))


def test_nothing_travels_in_a_local_push(path: Path) -> None:
    world.in_layouts([LAYOUT], without_collectives, path)


# ------------------------------------------------------------------------------------------------ into vLLM's memory


@pytest.fixture(scope="module")
def shards(local_answers) -> dict[str, Tensor]:
    """The shards of rank 1, as a push brings them."""
    return local_answers[1]["shards"]


@pytest.fixture
def engine(path: Path, shards: dict[str, Tensor]) -> ColocatedEngine:
    """An engine without vLLM: only the memory that a push writes to, filled with zeros."""
    made = object.__new__(ColocatedEngine)
    made.arch, made.device, made.dtype = hf_config.read(path), torch.device("cpu"), torch.float32
    made.ready = False
    model = torch.nn.Module()
    model.named_parameters = lambda: [
        (name.replace(".experts.", ".experts.routed_experts."), torch.nn.Parameter(torch.zeros_like(shard)))
        for name, shard in shards.items()
    ]
    worker = SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model))
    made.llm = SimpleNamespace(reset_prefix_cache=lambda: True, collective_rpc=lambda call: [call(worker)])
    made.parameters = vllm_inside.parameters(worker)
    made.take_parameters_as_they_are()
    return made


def test_a_push_leaves_every_address_as_it_was(engine, shards) -> None:
    before = {name: (id(parameter), parameter.data_ptr()) for name, parameter in engine.parameters.items()}
    engine.load_weights(shards.items())
    some = {name: shard + 1 for name, shard in shards.items() if "layers.2.mlp.experts" in name or "q_norm" in name}
    some[GATE] = shards[GATE].bfloat16()  # it fits into fp32 without loss
    engine.load_weights(some.items())
    assert before == {name: (id(parameter), parameter.data_ptr()) for name, parameter in engine.parameters.items()}
    assert len(some) == 6 and all(torch.equal(engine.parameters[n], x) for n, x in (shards | some).items())


W13, W2, GATE = (f"model.layers.2.mlp.{name}" for name in ("experts.w13_weight", "experts.w2_weight", "gate.weight"))
BROKEN = {
    "an expert too few": (W13, lambda x: x[1:], rf"{W13} is torch.float32 \(3, 64, 64\); push"),
    "not transposed": (W2, lambda x: x.transpose(1, 2), rf"{W2} is torch.float32 \(4, 64, 32\); push"),
    "surplus": (f"{W2}_scale", lambda _: torch.ones(1), f"{W2}_scale is not a tensor of this"),
    "NaN": (W13, lambda x: x / 0 * 0, f"{W13} has NaN or infinity"),
    "would lose digits": (GATE, lambda x: x.double(), f"{GATE} is torch.float64; push torch.float32"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("first", [True, False])
def test_a_broken_push_is_refused_by_name(engine, shards, case: str, first: bool) -> None:
    name, change, message = BROKEN[case]
    brought = shards if first else {n: x for n, x in shards.items() if "layers.2." in n}
    if not first:
        engine.load_weights(shards.items())
    with pytest.raises(InputError, match=message):
        engine.load_weights((brought | {name: change(brought.get(name))}).items())
    assert not engine.ready
    with pytest.raises(InputError, match=f"{W2} is missing"):
        engine.load_weights((n, x) for n, x in shards.items() if n != W2)
    engine.load_weights(shards.items())
    assert engine.ready and all(torch.equal(engine.parameters[n], shard) for n, shard in shards.items())


def test_on_other_devices_it_is_refused_by_name(path: Path) -> None:
    cfg = local_config(path, {}, True)
    for device in ("cpu", "cuda"):
        (problem,) = rules.engine_shards(cfg.rollout, cfg.parallel, device)
        assert problem.startswith(f"rollout.expert_parallel: vLLM packs its weights on device {device}; use npu")
    for routed_experts in (False, True):
        assert arguments(ColocatedEngine, "npu", routed_experts) == {
            "data_parallel_size": 4,
            "enable_expert_parallel": True,
            "additional_config": {"weight_nz_mode": 0, "enable_cpu_binding": False},
        }


def arguments(kind: type, device: str, routed_experts: bool, adapter: object = None) -> dict:
    """What an engine of 4 of 16 ranks adds for its device."""
    engine = object.__new__(kind)
    engine.device, engine.routed_experts, engine.adapter = SimpleNamespace(type=device), routed_experts, adapter
    return engine._more_arguments(4, 16, enforce_eager=True, max_sequences=192)


def test_a_replica_on_an_npu_splits_each_expert_where_routes_are_recorded_or_an_adapter_is_used() -> None:
    """With whole experts a rank sees a part of the tokens, and vllm-ascend records this part.

    With an adapter it would exchange them in a way that cannot be captured in a graph.
    """
    cases = {"neither": (False, None), "routes": (True, None), "adapter": (False, object())}
    kept = {
        (device, name): arguments(VllmEngine, device, *options)["enable_expert_parallel"]
        for device in ("npu", "cuda", "cpu")
        for name, options in cases.items()
    }
    assert kept == {
        ("npu", "neither"): True,
        ("npu", "routes"): False,
        ("npu", "adapter"): False,
        ("cuda", "neither"): True,
        ("cuda", "routes"): True,
        ("cuda", "adapter"): True,
        ("cpu", "neither"): False,
        ("cpu", "routes"): False,
        ("cpu", "adapter"): False,
    }


# ------------------------------------------------------------------------------------------------ the start of a run


def other_experts(real, engine: TorchSampler, stream) -> None:
    """The engine takes the experts of each layer in reverse order."""
    last = engine.arch.num_experts - 1
    real(engine, [(re.sub(r"(?<=experts\.)\d+", lambda i: str(last - int(i[0])), name), x) for name, x in stream])


STARTS = {  # what the engine takes, and the push after which it differs from the trainer
    "as it is": ("", nothing),
    "another matrix": ("the first push", engine_with("0.self_attn.o_proj", lambda *found: found[-1].flip(1))),
    "experts in another order": ("the first push", instead(Decoder, "load_weights", other_experts)),
    "another matrix later": (
        "a second push of the same policy",
        engine_with("0.self_attn.o_proj", lambda engine, _, tensor: tensor.flip(1) if engine.ready else tensor),
    ),
}


def refusals(parallel: Parallel, path: Path) -> None:
    """On every rank, the sound start is accepted and each fault is refused."""
    cfg, (model, arch) = training.config(path, path), adapted.load(path, parallel)
    policy = Policy.on(cfg, arch, parallel, model)
    for when, plant in STARTS.values():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            engine = TorchSampler(arch, stop_tokens=set(), pad_token=0)
            push = Push(way_of(cfg, policy), engine)
            differ = f"after {when}, the log-probs of sampler and trainer on the probe differ by"
            with pytest.raises(Tripped, match=differ) if when else contextlib.nullcontext():
                push.check_start(PROBE)


def test_a_run_starts_only_in_the_trainers_place_and_while_sampler_and_trainer_agree(path: Path) -> None:
    world.in_layouts([LAYOUT], refusals, path)


def test_the_engine_is_the_one_that_the_configuration_asks_for(path: Path, monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ColocatedEngine, "__init__", lambda self, *a, **k: asked.append("colocated"))
    monkeypatch.setattr(vllm_engine, "check_installed", lambda device: asked.append("checked"))
    arch = hf_config.read(path)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    factory.open_engine(local_config(path, {}, True), arch, torch.device("cpu"), {1}, 0)
    with pytest.raises(InputError, match="vLLM packs its weights on device cpu"):
        factory.check_engine(local_config(path, {}, True), arch, 4)
    factory.check_engine(local_config(path, {}, False), dataclasses.replace(arch, head_dim=32), 4)
    assert asked == ["colocated", "checked", "checked"]
