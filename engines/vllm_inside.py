"""Inside vLLM: what is corrected in it, and what its workers run for rollout_vllm.

The worker functions go through the model runner: NPU workers have no reload_weights of their own before 0.25.
"""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

LAYER = r"model\.layers\.\d+"  # a decoder layer's name in its models


@contextlib.contextmanager
def surroundings_kept(device: torch.device) -> Iterator[None]:
    """vLLM seeds and draws from the global generators, even where each request has its seed, and replaces
    torch.set_num_threads on a CPU: after this block both are as before.
    """
    set_num_threads, python_state, numpy_state = torch.set_num_threads, random.getstate(), np.random.get_state()
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def correct_cpu_defects(job: str) -> None:
    """Two defects of vLLM 0.30.0 on a CPU, corrected in its classes; done once. ``job`` is the same on all ranks only.

    1. A reload leaves the experts in the checkpoint's layout, while the kernel reads the prepacked one: the packing is
       done at the first load only. Nothing fails; log-probabilities are off by 0.2.
    2. Tensor-parallel ranks meet in shared memory whose name is a constant under torchrun: two jobs on a machine
       collide, and so does a job with what a killed one left behind (errno 17). Unlinked at once, it leaves nothing.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    _CPUSHMDistributed.job = job
    set_up, meet = UnquantizedFusedMoEMethod._setup_kernel, _CPUSHMDistributed._init_cpu_shm
    if hasattr(set_up, "__wrapped__"):
        return

    @functools.wraps(set_up)
    def set_up_and_pack(self, layer, w13: Tensor, w2: Tensor) -> None:
        is_reload = self.moe_kernel is not None
        set_up(self, layer, w13, w2)
        if is_reload:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    @functools.wraps(meet)
    def meet_in_own_memory(self) -> int:
        self.group_name = f"{_CPUSHMDistributed.job}-{self.group_name.lstrip('/')}"
        handle = meet(self)
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)  # all have it mapped
        return handle

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack
    _CPUSHMDistributed._init_cpu_shm = meet_in_own_memory


def reload(worker, named_tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Take tensors under their Hugging Face names, in whole fused groups."""
    from vllm.config import set_current_vllm_config

    with torch.no_grad(), set_current_vllm_config(worker.vllm_config), torch.device(worker.device):
        worker.model_runner.reload_weights(weights_iterator=named_tensors)


def parameters(worker) -> dict[str, Tensor]:
    """The loaded model's own parameters by name, in the layout of its kernels."""
    found = worker.model_runner.get_model().named_parameters()  # without the wrapper that captures graphs
    return {name.replace(".routed_experts.", "."): parameter for name, parameter in found}  # a level of newer versions


def placement(worker) -> dict[str, list[int]]:
    """The ranks of this rank's groups, in order, and by MoE layer its experts' ids, in the order of its weights."""
    from vllm.distributed import parallel_state

    names = {"tensor": "tp", "data": "dp", "expert": "ep"}
    found = {name: list(getattr(parallel_state, f"get_{short}_group")().ranks) for name, short in names.items()}
    for name, module in worker.model_runner.get_model().named_modules():
        if hasattr(module, "w13_weight"):
            places = module._expert_map  # expert -> local place, -1: on another rank; None: all are here, in order
            places = list(range(len(module.w13_weight))) if places is None else places.tolist()
            owned = sorted((local, expert) for expert, local in enumerate(places) if local >= 0)
            layer = re.search(r"layers\.(\d+)", name).group(1)
            found[f"layer {layer} experts"] = [expert for _, expert in owned]
    return found


def layer_outputs(worker, run: Callable[[], object]) -> list[Tensor]:
    """The residual stream after each layer while ``run()`` runs one forward pass; none of a compiled model."""
    outputs: list[Tensor] = []
    layers = [module for name, module in worker.model_runner.model.named_modules() if re.fullmatch(LAYER, name)]
    hooks = [
        layer.register_forward_hook(lambda module, args, output: outputs.append(output[0] + output[1]))
        for layer in layers
    ]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def clear_caches(worker) -> None:
    for cache in worker.model_runner.kv_caches:
        for part in [cache] if isinstance(cache, Tensor) else cache:  # npu: keys and values apart
            part.zero_()
