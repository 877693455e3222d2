"""The engines of engines/ in the real vLLM and vllm-ascend, on cann_stub.py; run by the Python that has these packages.

    python tests/support/vllm_ascend_engine.py configurations FOLDER     FOLDER/asked.json -> FOLDER/answer.json
    python tests/support/vllm_ascend_engine.py sample FOLDER             one rank, a whole engine
    python tests/support/vllm_ascend_engine.py push FOLDER               four ranks, one engine over all of them

`configurations` stops where vllm.LLM would be made, and makes vLLM's configuration from the arguments. The others
make the engine of the tiny model in FOLDER/model, without loading weights from files.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import cann_stub

from architecture import tensor_shapes

cann_stub.install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import vllm  # noqa: E402
import world  # noqa: E402

import config  # noqa: E402
import rollout  # noqa: E402
from engines import vllm_colocated, vllm_inside  # noqa: E402
from inputs import hf_config  # noqa: E402

END = {0}  # vLLM 0.30 refuses an id that is not in the vocabulary


class Captured(Exception):
    """The arguments of vllm.LLM, and no engine."""


def arguments(cfg: config.Config, ranks: int) -> dict:
    """What the engine of ``cfg`` passes to vllm.LLM on ``ranks`` ranks."""

    def capture(**given) -> None:
        raise Captured(given)

    with (
        mock.patch.object(vllm, "LLM", capture),
        mock.patch.object(dist, "get_world_size", lambda *args: ranks),
        mock.patch.object(dist, "broadcast_object_list"),
        contextlib.suppress(AssertionError),
    ):
        try:
            rollout.open_engine(cfg, hf_config.read(cfg.model.path), torch.device("npu"), END, 0)
        except Captured as found:
            return found.args[0]


def described(vllm_config) -> dict:
    """What vLLM and vllm-ascend have made of the arguments."""
    from vllm_ascend.ascend_config import get_ascend_config

    parallel, graphs = vllm_config.parallel_config, vllm_config.compilation_config
    return {
        "tensor": parallel.tensor_parallel_size,
        "data": parallel.data_parallel_size,
        "data rank": parallel.data_parallel_rank,
        "world": parallel.world_size,
        "expert parallel": parallel.enable_expert_parallel,
        "worker": parallel.worker_cls,
        "cache bytes": vllm_config.cache_config.kv_cache_memory_bytes,
        "block": vllm_config.cache_config.block_size,
        "prefix caching": vllm_config.cache_config.enable_prefix_caching,
        "chunked prefill": vllm_config.scheduler_config.enable_chunked_prefill,
        "async": vllm_config.scheduler_config.async_scheduling,
        "graphs": graphs.cudagraph_mode.name,
        "sizes": sorted(graphs.cudagraph_capture_sizes),
        "quantization": vllm_config.model_config.quantization,
        "tied head": vllm_config.model_config.hf_config.tie_word_embeddings,
        "tiled weights": get_ascend_config().weight_nz_mode,
        "binds CPUs": get_ascend_config().enable_cpu_binding,
    }


def configurations(folder: Path) -> None:
    """For each case of asked.json what vLLM has made of it, or its error."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm_ascend.utils import get_ascend_device_type

    answers = {"platform": type(current_platform).__name__, "device": get_ascend_device_type().name, "cases": []}
    for case in json.loads((folder / "asked.json").read_text()):
        place = {"RANK": case["rank"], "LOCAL_RANK": case["rank"], "WORLD_SIZE": case["ranks"]}
        variables = {name: str(value) for name, value in place.items()} | case.get("variables", {})
        with mock.patch.dict(os.environ, variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}):
            try:
                cfg = config.load_config(case["config"], case["overrides"])
                given = arguments(cfg, case["ranks"]) | case.get("changes", {})
                made = EngineArgs(**given).create_engine_config()
                answers["cases"].append({"config": described(made)})
            except Exception as error:
                answers["cases"].append({"error": f"{type(error).__name__}: {error}"})
    (folder / "answer.json").write_text(json.dumps(answers))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[tuple[vllm_colocated.ColocatedEngine, config.Config]]:
    """The engine of FOLDER/config.yaml on this rank, in a world of gloo as the trainer makes it."""
    import vllm_ascend.worker.block_table as block_table

    block_table._compute_slot_mapping_kernel = cann_stub.SlotMapping()
    cfg = config.load_config(folder / "config.yaml")
    local = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo")
    with cann_stub.mode():
        torch.npu.set_device(local)
        yield rollout.open_engine(cfg, hf_config.read(cfg.model.path), torch.device("npu", local), END, 0), cfg


def shapes(engine) -> dict[str, list]:
    (found,) = engine.llm.collective_rpc(vllm_inside.parameters)
    return {name: [*parameter.shape, str(parameter.dtype), parameter.device.type] for name, parameter in found.items()}


def sampled(one) -> list:
    routes = None if one.routed_experts is None else one.routed_experts.shape
    return [one.tokens, routes, sorted(set(one.logp))]


def sample(folder: Path) -> int:
    """Make the engine, push whole weights, and sample with recorded routes."""

    with opened(folder) as (engine, _):
        generator = torch.Generator().manual_seed(0)
        whole = {
            name: torch.randn(shape, generator=generator) * 0.02 for name, shape in tensor_shapes(engine.arch).items()
        }
        engine.load_weights(whole.items())
        (kept,) = engine.llm.collective_rpc(vllm_inside.parameters)
        answers = engine.sample(
            [[5, 6, 7], [8, 9]], seeds=[1, 2], num_samples=2, max_new_tokens=4, temperature=1.0,
            return_routed_experts=engine.routed_experts,
        )  # fmt: skip
        found = {
            "shapes": shapes(engine),
            "placement": engine.llm.collective_rpc(vllm_inside.placement)[0],
            "whole": {name: whole[name].tolist() for name in whole if name.startswith("model.layers.1.mlp.experts.")},
            "w13": cann_stub.on_host(kept["model.layers.1.mlp.experts.w13_weight"]).float().tolist(),
            "w2": cann_stub.on_host(kept["model.layers.1.mlp.experts.w2_weight"]).float().tolist(),
            "routers": sorted(name for name in kept if ".mlp.gate." in name),
            "stale routers": [
                name
                for name, value in kept.items()
                if ".mlp.gate." in name
                and not torch.equal(
                    cann_stub.on_host(value).float(), whole[f"{name.removesuffix('_fp32')}"].bfloat16().float()
                )
            ],
            "samples": [[sampled(one) for one in group] for group in answers],
            "calls": dict(cann_stub.calls),
            "config": described(engine.llm.llm_engine.vllm_config),
        }
    (folder / "answer.json").write_text(json.dumps(found))
    return 0


def push(folder: Path) -> int:
    """Push the trainer's shards, then load the same weights by vLLM's own loader; say which parameters differ."""
    import adapted
    from safetensors.torch import load_file
    from vllm_ascend.worker.worker import NPUModelRunner

    # The collectives do nothing here, and a forward pass checks the numbers of tokens that these bring.
    with (
        mock.patch.object(NPUModelRunner, "profile_run", lambda self: None),
        opened(folder) as (engine, cfg),
    ):
        parallel = world.open_layout("TP2_EP4")
        model, arch = adapted.load(folder / "model", parallel, dtype=torch.bfloat16)
        placement = engine.placement()
        vllm_colocated.check_placement(placement, arch, parallel)
        engine.load_weights(vllm_colocated.shards(model, arch, parallel))
        pushed = {name: cann_stub.on_host(parameter).clone() for name, parameter in engine.parameters.items()}
        not_the_trainers = [
            f"{i} {part}"
            for i, layer in enumerate(model.decoder.layers)
            for part, own in (
                ("gate_up_proj", layer.mlp.experts.linear_fc1), ("down_proj", layer.mlp.experts.linear_fc2),
            )
            for memory, experts in [engine.stacks()[f"model.layers.{i}.mlp.experts.{part}"]]
            if experts != range(2 * parallel.rank, 2 * parallel.rank + 2)
            or not torch.equal(cann_stub.on_host(memory), own.weight)
        ]  # fmt: skip
        for parameter in engine.parameters.values():
            parameter.data.zero_()
        whole = load_file(folder / "model" / "model.safetensors")
        engine.llm.collective_rpc(vllm_inside.reload, args=(iter(whole.items()),))
        (loaded,) = engine.llm.collective_rpc(vllm_inside.parameters)
        expected = {name: cann_stub.on_host(parameter).clone() for name, parameter in loaded.items()}
        wrong = (  # up before gate
            (name, value.roll(value.shape[-1] // 2, -1) if name.endswith("w13_weight") else value)
            for name, value in vllm_colocated.shards(model, arch, parallel)
        )
        engine.load_weights(wrong)
        swapped = {name: cann_stub.on_host(parameter) for name, parameter in engine.parameters.items()}
        found = {
            "placement": placement,
            "stacks": len(engine.stacks()),
            "stacks that are not the trainer's": not_the_trainers,
            "shapes": shapes(engine),
            "different": [name for name in expected if not torch.equal(expected[name], pushed[name])],
            "different when swapped": [name for name in expected if not torch.equal(expected[name], swapped[name])],
            "zero": [name for name, value in pushed.items() if not value.any()],
            "config": described(engine.llm.llm_engine.vllm_config),
        }
    (folder / f"answer-{parallel.rank}.json").write_text(json.dumps(found))
    return 0


def main(what: str, folder: str) -> int:
    path = Path(folder)
    if what == "configurations":
        configurations(path)
        return 0
    codes = world.as_torchrun({"sample": 1, "push": 4}[what], globals()[what], path)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
