"""rollout.sync adapter: vLLM samples the policy from base weights and LoRA factors, after every kind of push.

The references: transformers with the merged weights, and the trainer. On a CPU vLLM runs models that are all dense;
that the factors of MoE models are right is shown by test_one_policy.py. Not covered: adapters on a GPU.
"""

import dataclasses
import re
from pathlib import Path

import adapted
import published
import pytest
import reference
import torch
import training
import world
from refused import refusal
from sampled import DENSE, FREE, Model
from source import ROOT
from vllm_ranks import PROMPTS, SEEDS

import aqn
from engines import vllm_adapter
from engines.interface import Completion
from engines.vllm_engine import VllmEngine
from facts.exits import InputError
from inputs import hf_config
from knobs import LoraConfig
from parallel_setup import Parallel
from weight_sync import Push, way_of
from weights import huggingface
from weights.adapter_weights import adapted_modules
from weights.policy import Policy

pytestmark = pytest.mark.xdist_group("vllm")  # the files that import vLLM share a process
ALL = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
RANK, ALPHA = 4, 6.5  # vLLM makes room for rank 8; alpha / rank is no power of two
NOISE = {"aqn__schedule": "constant", "aqn__sigma_start": 0.05, "aqn__targets": ("attention", "mlp")}
ADAPTER = {"rollout__engine": "vllm", "rollout__sync": "adapter", "lora__targets": ALL}


def config(path: Path, **changes):
    return training.config(path, path, **ADAPTER, lora__rank=RANK, lora__alpha=ALPHA, **changes)


# ------------------------------------------------------------------------------------------------ what vLLM samples


def follow(parallel: Parallel, path: Path) -> dict:
    """The pushes of a run, clean and with noise: the largest log-prob gap to transformers with the intended policy."""
    merged = Model(path)
    model, arch = adapted.load(path, parallel)
    policy = Policy.on(config(path), arch, parallel, model)
    engine = VllmEngine(arch, path, stop_tokens={9}, max_tokens=360, kv_cache_mib=8, adapter=config(path).lora)

    def sampled() -> list[list[Completion]]:
        return engine.sample(PROMPTS, seeds=SEEDS, **FREE)

    def gap(answers: list[list[Completion]], **changed) -> float:
        merged.hf.load_state_dict(dict(huggingface.export(model, arch, parallel)) | changed)
        return merged.gaps(PROMPTS, answers).max().item()

    answer = {}
    for label, changes in (("off", {}), ("noise", NOISE)):
        cfg = config(path, **changes)
        adapted.move(policy.adapters, arch, parallel, step=7)  # as in a resumed run
        push = Push(way_of(adapted.placed(cfg, parallel), policy), engine)
        found = answer[label] = {"resumed": gap(sampled()), "pushes": [], "steps": [], "clean": []}
        seen = {}
        for step in (0, 1, 0):  # the third policy is the first again
            adapted.move(policy.adapters, arch, parallel, step)
            found["stale"] = gap(sampled())
            found["pushes"].append(push(step, PROMPTS[0]))
            noisy = {}
            if changes:
                targets = aqn.norm_targets(arch, cfg.aqn.targets)
                norms = aqn.clean_norms(huggingface.export(model, arch, parallel), targets)
                stream = huggingface.export(model, arch, parallel, only=targets)
                noisy = dict(aqn.perturb(stream, norms, aqn.NoiseReport(0.05), seed=0, step=step))
            answers = sampled()
            found["steps"].append(gap(answers, **noisy))
            push(step, PROMPTS[0])
            assert answers == sampled(), "twice is once"
            assert seen.setdefault(step, answers) == answers, "the first policy again is what it was"
            push.clean()
            found["clean"].append(gap(sampled()))
        engine.ready = False  # the next gets a whole model
    engine.close()
    return answer


@pytest.mark.vllm
@pytest.mark.slow
def test_logp_after_every_push_is_that_of_transformers_with_merged_weights_and_the_noise(
    vllm_imported, tmp_path: Path
) -> None:
    path = reference.save("qwen2_moe", tmp_path, **DENSE)
    assert not any(hf_config.read(path).moe_layers)
    for label, found in world.in_layouts(["TP1"], follow, path)["TP1"][0].items():
        assert max(found["resumed"], *found["steps"], *found["clean"]) <= 1e-5
        assert found["stale"] > 1e-3, "control: before the push the gap is large"
        sums = [push["sync/checksum"] for push in found["pushes"]]
        assert sums[0] == sums[2] != sums[1]
        for push in found["pushes"]:
            assert push.get("aqn/probe_gap", 0) <= 1e-5  # Megatron with unmerged adapters against vLLM
            assert (push.get("aqn/probe_shift", 0) > 1e-3) == (label == "noise")


# ------------------------------------------------------------------------------------------------------ refusals


DENSE_ARCH = dataclasses.replace(hf_config.parse(published.QWEN15_MOE), moe_layers=(False,) * 24)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.targets=[linear_qkv, router]"], "lora.targets: router conflicts with rollout.sync adapter; set merged"),
        (["lora.rank=513", "lora.expert_rank=0"], "lora.rank: 513 is more than vLLM accepts .*set at most 512"),
    ],
)
def test_what_no_device_can_take_is_refused_by_its_key(overrides: list[str], message: str) -> None:
    found = refusal(ROOT / "configs" / "tiny_cpu.yaml", "rollout.engine=vllm", "rollout.sync=adapter", *overrides)
    assert re.search(message, found), found


def test_broken_factors_are_refused_and_those_before_stay() -> None:
    lora = LoraConfig(targets=ALL[1:2], rank=RANK, alpha=ALPHA)
    adapter = vllm_adapter.Adapter(lora, DENSE_ARCH, torch.float32)
    with pytest.raises(InputError, match="sample: there is no adapter"):
        adapter.request()
    (first, *_), factors = adapted_modules(DENSE_ARCH, lora), {}
    for module in adapted_modules(DENSE_ARCH, lora):
        factors |= {name: torch.zeros(shape) for name, shape in module.factor_shapes().items()}
    adapter.take(factors)
    factors[f"{first.name}.A"] += 1  # the trainer's tensor changes, the copy does not
    factors[f"{first.name}.B"].fill_(torch.nan)
    with pytest.raises(InputError, match="load_adapter: .*o_proj.B has NaN or infinity"):
        adapter.take(factors)
    assert all(tensor.sum() == 0 for tensor in adapter.tensors.values())
