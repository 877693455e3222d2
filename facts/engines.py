"""Facts about each engine that the program needs before the engine exists. A new engine needs a row here and a module.

The module defines `check` and `open_engine`, which check_engine and open_engine in engines/factory.py call. This file
imports nothing from the project.
"""

from typing import Literal, NamedTuple


class Kind(NamedTuple):
    """The properties of an engine that the plan, the rules and the configuration use."""

    module: str
    keys: tuple[str, ...] = ()  # keys of the section rollout that other engines do not read
    splits: bool = False  # rollout.tensor ranks share a replica; otherwise each rank has one
    reserves: bool = False  # takes rollout.kv_cache_mib, and memory for graphs, at its start; otherwise for each wave
    refills: bool = False  # a waiting row starts as soon as another one ends; otherwise with the next wave
    prefers_factors: bool = False  # in bf16 it keeps LoRA factors apart from the weights
    packs_on: tuple[str, ...] = ()  # devices on which it packs its experts in a form that a trainer cannot use
    packages: str = ""  # the set of packages that launch/setup_cpu.sh installs for it


def whole_experts(device: str, *, routes: bool, adapter: bool) -> bool:
    """Return whether each rank of a vLLM replica stores whole experts. Otherwise it has a part of every expert.

    A rank has parts in three cases. The first is a CPU, where vLLM's expert parallelism crashes. The second is an NPU
    if routes are recorded. With whole experts, the ranks would split the tokens, and vllm-ascend 0.23.0 would record
    the routes of one rank's share only. The third is an NPU with an adapter. With whole experts, vllm-ascend 0.30.0rc2
    would exchange tokens by AlltoAll, which copies counts to the host in each layer. Then no graph can be captured
    (ascend_forward_context.py, select_moe_comm_method).
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
