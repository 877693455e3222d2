"""Facts about each engine that the rest of the program needs before it exists. A new engine is a row here and a module.

The module has the check_engine and the open_engine of engines/factory.py, as `check` and `open_engine`. This file
imports nothing of the project.
"""

from typing import Literal, NamedTuple


class Kind(NamedTuple):
    """An engine as plan, rules and configuration see it."""

    module: str
    keys: tuple[str, ...] = ()  # keys of the section rollout that other engines do not read
    splits: bool = False  # rollout.tensor ranks share a replica; otherwise each rank has one
    reserves: bool = False  # takes rollout.kv_cache_mib, and memory for graphs, at its start; otherwise wave by wave
    refills: bool = False  # a waiting row starts as soon as another one ends; otherwise with the next wave
    prefers_factors: bool = False  # in bf16 it keeps LoRA factors apart from the weights
    packs_on: tuple[str, ...] = ()  # devices on which it packs its experts, so that a trainer cannot compute with them
    packages: str = ""  # the set of packages that launch/setup_cpu.sh installs for it


def whole_experts(device: str, *, routes: bool, adapter: bool) -> bool:
    """Return whether each rank of a replica of vLLM has some experts whole; otherwise it has a part of every expert.

    It has parts on a CPU, where vLLM's expert parallelism crashes. It has parts on an NPU while routes are recorded:
    otherwise the ranks would split the tokens, and vllm-ascend 0.23.0 would record the routes of one rank's share. It
    also has parts on an NPU with an adapter. Otherwise vllm-ascend 0.30.0rc2 would exchange tokens by AlltoAll, which
    copies counts to the host in each layer, so that no graph can be captured (ascend_forward_context.py,
    select_moe_comm_method).
    """
    return device != "cpu" and not (device == "npu" and (routes or adapter))


EngineName = Literal["torch", "vllm"]
ENGINES: dict[EngineName, Kind] = {
    "torch": Kind("engines.torch_sampler", prefers_factors=True),
    "vllm": Kind(
        "engines.vllm_setup",
        keys=("tensor", "expert_parallel", "enforce_eager", "kv_cache_mib"),
        splits=True,
        reserves=True,
        refills=True,
        packs_on=("cpu",),
        packages="vllm",
    ),
}
