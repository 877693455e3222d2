"""Run the engines of engines/ in the real vLLM and vllm-ascend, on cann_stub.py; use a Python that has these packages.

    python tests/support/vllm_ascend_engine.py configurations FOLDER     FOLDER/asked.json -> FOLDER/answer.json
    python tests/support/vllm_ascend_engine.py whole FOLDER [MINDSPEED_DIR]     one rank, a push of whole weights
    python tests/support/vllm_ascend_engine.py shards FOLDER [MINDSPEED_DIR]    four ranks, a push of trainer's shards

`configurations` stops before vllm.LLM is created, and makes vLLM's configuration from the arguments. The others create
the engine of FOLDER/config.yaml for the tiny model in FOLDER/model, and write what they found to FOLDER/answer-RANK.pt.
With the checkout of a MindSpeed, the process starts as a training run with MindSpeed does, before it imports vLLM.
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

cann_stub.install()

import torch  # noqa: E402


def start_with(mindspeed: str) -> None:
    """Adapt the device by the MindSpeed of this checkout and import Megatron, in the order of a training.

    MindSpeed imports triton and torchair. Both have stand-ins whose names nothing calls, until Megatron is imported;
    vLLM then finds no triton, as in the tests without MindSpeed. torch would take the stand-in for a real triton, so
    its modules that look for one are imported before.
    """
    import torch._inductor.compile_fx
    import torch.utils.flop_counter  # noqa: F401

    from hardware import device as devices

    packages = "triton", "torchair"
    sys.meta_path.insert(0, cann_stub.StubFinder(*packages))
    cann_stub.describe_triton()
    sys.path.insert(1, mindspeed)
    npu = devices.resolve("npu")
    devices.adapt(npu)
    devices.import_megatron(npu)
    cann_stub.remove_stand_ins(*packages)


if len(sys.argv) > 3:
    start_with(sys.argv[3])

import torch.distributed as dist  # noqa: E402
import vllm  # noqa: E402
import world  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from engines import factory, vllm_colocated, vllm_inside  # noqa: E402
from engines.vllm_engine import VllmEngine  # noqa: E402
from inputs import config, hf_config  # noqa: E402

END = {0}  # vLLM 0.30 refuses an id that is not in the vocabulary


class Captured(Exception):
    """Raised in place of making an engine."""


def arguments(cfg: config.Config, ranks: int) -> dict:
    """What the engine of ``cfg`` passes to vllm.LLM on ``ranks`` ranks."""
    llm = mock.Mock(side_effect=Captured)
    with (
        mock.patch.object(vllm, "LLM", llm),
        mock.patch.object(dist, "get_world_size", lambda *args: ranks),
        mock.patch.object(dist, "broadcast_object_list"),
        contextlib.suppress(Captured),
    ):
        factory.open_engine(cfg, hf_config.read(cfg.model.path), torch.device("npu"), END, 0)
    return llm.call_args.kwargs


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
        "rows": vllm_config.scheduler_config.max_num_seqs,
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
                answer = described(EngineArgs(**given).create_engine_config())
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
        answers["cases"].append(answer)
    (folder / "answer.json").write_text(json.dumps(answers))


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[VllmEngine]:
    """The engine of FOLDER/config.yaml on this rank, in a world of gloo as the trainer makes it."""
    cfg = config.load_config(folder / "config.yaml")
    device = torch.device("npu", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    make = vllm.LLM
    with cann_stub.mode(), contextlib.ExitStack() as kernels:

        def without_kernels(**arguments: object) -> vllm.LLM:
            """Replace the two calls of kernels in a start. The import is as late as vLLM's: it has a side effect."""
            from vllm_ascend.worker.worker import NPUModelRunner, NPUWorker

            kernels.enter_context(mock.patch.object(NPUModelRunner, "profile_run"))
            kernels.enter_context(mock.patch.object(NPUWorker, "_warm_up_atb"))
            return make(**arguments)

        kernels.enter_context(mock.patch.object(vllm, "LLM", without_kernels))
        torch.npu.set_device(device)
        yield factory.open_engine(cfg, hf_config.read(cfg.model.path), device, END, 0)


def held(engine: VllmEngine) -> dict[str, torch.Tensor]:
    """Copies of vLLM's parameters, which must be on the NPU."""
    (parameters,) = engine.llm.collective_rpc(vllm_inside.parameters)
    assert {parameter.device.type for parameter in parameters.values()} == {"npu"}
    return {name: cann_stub.on_host(parameter).clone() for name, parameter in parameters.items()}


def may_tile() -> bool:
    """Whether torch_npu may store tensors in its internal formats."""
    import torch_npu

    return torch_npu._C._npu_getOption("ALLOW_INTERNAL_FORMAT") == b"enable"


def whole(folder: Path) -> None:
    """Push whole weights as a replica takes them, and look at a setting of the process before and after the start."""
    weights, tiles = load_file(folder / "model" / "model.safetensors"), [may_tile()]
    with opened(folder) as engine:
        tiles.append(may_tile())
        engine.load_weights(weights.items())
        torch.save({"parameters": held(engine), "may tile": tiles}, folder / "answer-0.pt")


def shards(folder: Path) -> None:
    """Push the trainer's shards; then set all parameters to 0 and load the whole weights by vLLM's own loader."""
    import adapted
    from vllm.distributed import parallel_state

    weights = load_file(folder / "model" / "model.safetensors")
    with opened(folder) as engine:
        parallel = world.open_layout("TP2_EP4")
        model, arch = adapted.load(folder / "model", parallel, dtype=torch.bfloat16)
        groups = {
            "tensor": list(parallel_state.get_tp_group().ranks),
            "data": list(parallel_state.get_dp_group().ranks),
            "expert": list(parallel_state.get_ep_group().ranks),
        }
        found = {"groups": groups, "stacks": {}, "trainer's stacks": {}}
        engine.load_weights(vllm_colocated.shards(model, arch, parallel))
        found["pushed"] = held(engine)
        for name, stack in engine.stacks().items():
            found["stacks"][name] = cann_stub.on_host(stack.memory).clone(), list(stack.experts)
        for number, layer in enumerate(model.decoder.layers):
            experts, name = layer.mlp.experts, f"model.layers.{number}.mlp.experts"
            found["trainer's stacks"][f"{name}.gate_up_proj"] = experts.linear_fc1.weight.detach()
            found["trainer's stacks"][f"{name}.down_proj"] = experts.linear_fc2.weight.detach()
        for parameter in engine.parameters.values():
            parameter.data.zero_()
        engine.llm.collective_rpc(vllm_inside.reload, args=(iter(weights.items()),))
        found["loaded"] = held(engine)
        torch.save(found, folder / f"answer-{parallel.rank}.pt")


def main(what: str, folder: str, mindspeed: str = "") -> int:
    path = Path(folder)
    if what == "configurations":
        configurations(path)
        return 0
    ranks, function = {"whole": (1, whole), "shards": (4, shards)}[what]
    return int(any(world.as_torchrun(ranks, function, path)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
