"""Make dry runs in a separate process, because a dry run changes torch, and print one line of JSON for each.

python tests/support/dry_runs.py KIND < cases        KIND of device; one line of JSON per case: the input of `case`
python tests/support/dry_runs.py torch_npu < cases    an NPU, with the real package
"""

import dataclasses
import json
import sys
import warnings
from unittest import mock

import torch

from checks import dry_run, dry_run_device, dry_run_report
from inputs import hf_config
from inputs.config import resolve_config
from weights.policy import Policy


def kept_alive(model: torch.nn.Module) -> None:
    """Every MoE layer's output outlives the step."""
    model.kept = []
    for layer in model.decoder.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: model.kept.append(output[0]))


def wrong_group(model: torch.nn.Module) -> None:
    """The attention's output is summed over the data ranks."""
    from megatron.core import parallel_state

    for layer in model.decoder.layers:
        linear = layer.self_attention.linear_proj
        getattr(linear, "base", linear).tp_group = parallel_state.get_data_parallel_group()


def fp32(model: torch.nn.Module) -> None:
    """The experts' input is cast to fp32 and back."""

    def cast(module: torch.nn.Module, args: tuple) -> tuple:
        return args[0].float().mul(1).to(args[0].dtype), *args[1:]

    for layer in model.decoder.layers:
        layer.mlp.experts.register_forward_pre_hook(cast)


FAULTS = {each.__name__: each for each in (kept_alive, wrong_group, fp32)}


def case(kind: str, config: str, overrides: list[str], ranks: int, rank: int, layers: int, fault: str = "") -> dict:
    """What the command prints with --json."""
    cfg, _ = resolve_config(config, overrides, layout=False)
    arch = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)[0]
    arch = dataclasses.replace(arch, num_layers=layers, moe_layers=arch.moe_layers[:layers])
    load = Policy.load

    def with_fault(cfg, arch, parallel) -> Policy:
        policy = load(cfg, arch, parallel)
        if fault:
            FAULTS[fault](policy.model)
        return policy

    with mock.patch.object(Policy, "load", with_fault):
        done = dry_run.run(cfg, ranks, arch, rank, kind)
    return dry_run_report.as_json(done, dry_run_report.compare(done))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    kind = sys.argv[1]
    if kind == "torch_npu":
        kind = "npu"
        import torch_npu.op_plugin.meta._meta_registrations as registrations

        registrations._npu_fusion_attention_warning_printed = True  # it would ask the chip for its version
    else:
        dry_run_device.open_device(kind)
    for line in sys.stdin:
        print(json.dumps(case(kind, **json.loads(line))), flush=True)
