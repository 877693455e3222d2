"""Runs one rank's training step at its real size, without a device or data; counts bytes, operations, collectives.

    python preflight.py CONFIG --dry-run [section.key=value ...] [--ranks N] [--rank R] [--layers L] [--json]

The trainer's code builds rank R of the layout and runs the phases of a step. Its tensors have a shape and no storage,
its collectives do nothing, and the kernels take the branches of the configured device. The micro-batch is the fullest
that the plan allows; each row has one prompt token, and the other tokens are a completion. The update runs twice: once
with the tokens spread evenly over the experts, and once with the planned imbalance.
The figures are compared with those of the plan; the exit code is 1 if one of them differs by more than 10 %. All ranks
need the same memory, so rank 0 shows it for every rank.

A dry run does not show the workspaces of kernels, the buffers of HCCL, fragmentation, numerics, speed, or the engine.
preflight.py starts this file in a separate process, because the file changes torch.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

import lora_megatron
import parallel_setup
import weight_sync
from checks import dry_run_device
from checks.dry_run_meter import Meter
from checks.dry_run_report import IMBALANCES, WITHIN, DryRun, as_json, as_text, compare
from engines.interface import Stack
from facts.architectures import Architecture, layers
from facts.exits import InputError
from hardware import device as devices
from hardware import kernels
from inputs import hf_config
from inputs.config import command, command_line, resolve_config
from inputs.files import MOST_RANKS, shown
from inputs.rules import refuse_first
from knobs import Config
from learner import Learner, Update
from model import routing_replay
from model.batches import Rollout
from parallel_setup import Parallel
from plan import grid, memory
from plan.search import broken_rules
from runlog.progress import StepTimer
from weight_sync import Push
from weights import huggingface
from weights.policy import Policy

# ------------------------------------------------------------------------------------------------ the step


def run(cfg: Config, ranks: int, arch: Architecture, rank: int, kind: str) -> DryRun:
    """Run one step as rank ``rank`` of ``ranks``, with an update for each of IMBALANCES. Return the measurements."""
    layout = grid.of(cfg.parallel, cfg.rollout, ranks)
    room = memory.packed_tokens(cfg.optim, layout, cfg.rollout.group_size, cfg.row_tokens)
    done = DryRun(cfg, arch, layout, kind, *fullest_rows(room, cfg.row_tokens, layout.tensor))
    device = torch.device(dry_run_device.STAND_IN[kind])
    meter = Meter(device.type)
    with contextlib.ExitStack() as stack:
        parallel = stack.enter_context(dry_run_device.as_rank(rank, ranks, cfg.parallel, device))
        meter.groups = _group_names(parallel)
        # The type of a tensor does not show that a GPU is simulated: its tensors have another type or are on the host.
        stack.enter_context(mock.patch.object(kernels, "on_gpu", lambda device: kind == "cuda"))
        stack.enter_context(mock.patch.object(routing_replay, "collect", _routes))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(dry_run_device.Answers(scored=done.rows * (done.length - 1)))
        stack.enter_context(meter)
        kernels._causal_mask.cache_clear()  # may have entries of an earlier run
        kernels._scalar.cache_clear()
        gc.collect()
        gc.freeze()  # later collections look only at the objects of the step
        stack.callback(gc.unfreeze)
        gc.disable()  # automatic collections would run at random moments
        stack.callback(gc.enable)
        _step(done, parallel, meter)
    done.phases = {name.replace("old_logp", "old policy"): phase for name, phase in meter.phases.items()}
    return done


def _step(done: DryRun, parallel: Parallel, meter: Meter) -> None:
    """Load, push, update and save as a training run does, but with one update for each of IMBALANCES."""
    cfg = _of_one_micro_batch(done)
    with meter.phase("load"):
        with (  # as train_grpo.wire does, with tensors that have no data
            mock.patch.object(torch.nn.Module, "to", dry_run_device.moved),
            mock.patch.object(huggingface, "read_model", lambda folder, arch: dry_run_device.tensors_of(arch)),
            mock.patch.object(lora_megatron, "_initialise_", lambda *args: None),  # it would draw numbers on the host
        ):
            policy = Policy.load(cfg, done.arch, parallel)
        learner = _Learner(cfg, policy, pad_token=0)
        learner.tell(meter)
        gc.collect()
    push = _push(policy, _Engine(policy, done.layout, meter))
    with meter.phase("push"), learner.sampling_policy():
        push(0, [])
    for ending, imbalance in IMBALANCES.items():
        meter.ending = ending
        before = meter.now
        for factor in learner.parameters:  # only an update's first micro-batch has no gradients yet
            factor.grad = torch.zeros_like(factor)
        with meter.phase("update"):  # _held casts the factors to the dtype of the passes, as the first micro-batch does
            done.held = _held(learner, meter)
        with dry_run_device.routed(imbalance), meter.phase("update"):
            _update(done, learner, meter)
        gc.collect()
    meter.ending = ""
    done.left = meter.now - before
    with meter.phase("save"):
        learner.state()


def _group_names(parallel: Parallel) -> dict[str, str]:
    """Return a dict that maps torch's name of each process group to the name that this project uses."""
    from megatron.core import parallel_state

    counts = parallel_state.get_expert_tensor_and_model_parallel_group()  # Megatron gathers counts over this group
    names = {counts.group_name: "expert counts"}
    names |= {group.group_name: name for name, group in parallel.groups().items()}
    return names | {dist.group.WORLD.group_name: "all ranks, on the host"}


# ------------------------------------------------------------------------------------------------ the push


class _Engine:
    """An engine that accepts every push. The meter does not count its memory.

    It keeps the tensors of a fused group until the group is complete, as vLLM does. If each rank pushes its shards
    (rollout.expert_parallel), it keeps one tensor at a time.
    """

    def __init__(self, policy: Policy, layout: grid.RankGrid, meter: Meter) -> None:
        self.policy, self.layout, self.meter = policy, layout, meter
        self.own_stacks: dict[str, Stack] = {}

    def stacks(self) -> dict[str, Stack]:
        """Create memory for the routed experts, and return it as Engine.stacks does."""
        arch, parallel = self.policy.arch, self.policy.parallel
        whole = self.layout.engine_expert == 1
        experts = range(arch.num_experts) if whole else huggingface.own_experts(arch, parallel)
        for layer, module in layers(arch):
            if module.kind == "experts":
                shape = (len(experts), module.in_size, module.out_size)
                memory = torch.empty(shape, dtype=devices.DTYPES[self.policy.cfg.model.dtype], device=parallel.device)
                self.meter.forget(memory)
                self.own_stacks[layer + module.fused] = Stack(memory, experts)
        return self.own_stacks

    def load_stacks(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            memory = self.own_stacks[name].memory
            if tensor is not memory:
                memory.copy_(tensor)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        group_of = str if self.policy.cfg.rollout.expert_parallel else huggingface.fused_group
        for _, tensors in itertools.groupby(named_tensors, key=lambda named: group_of(named[0])):
            list(tensors)  # all tensors of a group exist at once

    def load_adapter(self, factors: Mapping[str, Tensor]) -> None: ...


def _push(policy: Policy, engine: Any) -> Push:
    """Return a Push to ``engine`` that skips the slow first push. Its next push is like one after an update."""
    with (
        mock.patch.object(Push, "tensors", lambda push: ()),
        mock.patch.object(Parallel, "gather_objects", lambda parallel, value: [value]),
        mock.patch.object(Parallel, "max_over_ranks", lambda parallel, value: value),
    ):
        push = Push(weight_sync.way_of(policy.cfg, policy), engine)
    for adapter in policy.adapters.values():
        adapter.buffer_changes = None
    return push


# ------------------------------------------------------------------------------------------------ the update


class _Learner(Learner):
    """A learner in the state after its first steps. It packs real rows, and tells the meter when a pass begins."""

    def tell(self, meter: Meter) -> None:
        """Tell ``meter`` about the passes from now on, and create the tensors that exist after the first steps."""
        self.meter = meter
        self.reference_gap = 0.0  # only the first update compares the reference with the policy
        if self.cfg.loss.teacher:
            self.teacher = self.policy.copied_factors()
        self.stale_factors.extend(self.policy.copied_factors() for _ in range(self.cfg.rollout.staleness))

    def _loss(self, *args):
        self.meter.enter("forward")
        result = super()._loss(*args)
        self.meter.enter("backward")
        return result

    def _prepare(self, *args) -> Update:
        """Pack real rows on the host, because packing reads values.

        Then replace them with device tensors that have no data.
        """
        fake = torch._guards.detect_fake_mode()
        device = self.parallel.device
        on_host = dataclasses.replace(self.parallel, device=torch.device("cpu"))
        with _disable_current_modes(), mock.patch.object(self, "parallel", on_host):
            update = super()._prepare(*args)
        (micro,) = update.micro_batches
        for owner in (micro, micro.packing):
            on_device = tree_map_only(Tensor, lambda tensor: fake.from_tensor(tensor).to(device), vars(owner))
            vars(owner).update(on_device)
        return update


def _held(learner: _Learner, meter: Meter) -> dict[str, int]:
    """Return the bytes that this rank stores during an update, for each kind of tensor except activations."""
    adapters = meter.size_of(learner.parameters)
    tensors = [*learner.policy.model.parameters(), *learner.policy.model.buffers()]
    working = [
        factor
        for adapter in learner.policy.adapters.values()
        for factor in adapter.working_factors(devices.DTYPES[learner.cfg.model.dtype])
    ]
    moments = [moment for each in learner.moments.values() for moment in each.values()]
    return {
        "weights": meter.size_of(tensors) - adapters,
        "adapters": adapters,
        "working factors": meter.size_of(working),
        "moments": meter.size_of(moments),
        "older": sum(meter.size_of(factors.values()) for factors in learner.stale_factors),
        "teacher": meter.size_of(learner.teacher.values()),
        "gradients": meter.size_of(factor.grad for factor in learner.parameters),
    }


def _update(done: DryRun, learner: Learner, meter: Meter) -> None:
    """Run the passes over one micro-batch, and the optimizer step."""
    with _disable_current_modes():
        batch = _rollout(done.rows * done.layout.data, done.length - 1)
        advantages = torch.zeros(len(batch.lengths))
    # With its one update, this step needs no pass of the old policy. The configured step needs one if it has several.
    if done.cfg.earlier_passes and done.cfg.replay.mode != "r2":  # with r2, update makes this pass
        (micro,) = learner._prepare(batch, [], list(range(len(batch.lengths))), advantages).micro_batches
        with meter.phase("old_logp"):
            learner._logp(micro)
        del micro
    learner.update(batch, [], advantages, 0, cast(StepTimer, meter))  # it uses only `phase` of the timer


def _routes(batch: Rollout, own: object, shares: object, arch: Architecture, *unused) -> dict[int, Tensor]:
    """Return zeros in place of the routes that routing_replay.collect gets from an engine.

    The result maps the index of each sequence to its routes. L is the number of MoE layers, and K of experts per token.

    -> for each sequence, (row length - 1, L, K)
    """
    shape = (sum(arch.moe_layers), arch.experts_per_token)
    return {s: torch.zeros(n, *shape, dtype=torch.uint8) for s, n in enumerate(batch.lengths)}


def fullest_rows(room: int, row_tokens: int, tensor: int) -> tuple[int, int]:
    """Return the number of rows that each data rank has in a full micro-batch, and their length in tokens.

    The length includes one prompt token. ``room`` is the result of memory.packed_tokens, and ``tensor`` is the number
    of ranks that split a row.
    """
    rows = max(1, room // row_tokens)
    return rows, room // rows // tensor * tensor


def _rollout(sequences: int, new: int) -> Rollout:
    """Return a rollout with one prompt, which has one token, and ``sequences`` completions of ``new`` tokens each."""
    return Rollout(
        prompts=[[1]],
        tokens=torch.ones(sequences, new, dtype=torch.int64),
        logp=torch.zeros(sequences, new),
        lengths=[new] * sequences,
        truncated=torch.zeros(sequences, dtype=torch.bool),
        rewards=torch.zeros(1, sequences),
        parsable=torch.ones(1, sequences),
        correct=torch.ones(1, sequences),
    )


def _of_one_micro_batch(done: DryRun) -> Config:
    """Return the configuration, changed so that a step has one update with one micro-batch, and no noise."""
    group_size, row_tokens = done.cfg.rollout.group_size, done.cfg.row_tokens
    tokens = memory.micro_batch_tokens(done.cfg.optim, done.layout, group_size, row_tokens)
    return done.cfg.changed(
        rollout={"prompts_per_step": 1, "group_size": done.rows * done.layout.data},
        loss={"skip_equal_groups": False},  # a group of one row would be skipped
        optim={"prompts_per_update": 1, "tokens_per_micro_batch": tokens},
        aqn={"schedule": "off"},
    )


# ------------------------------------------------------------------------------------------------ the command


@command
def main(arguments: list[str]) -> int:
    """Run the command. Exit code 0: the plan is confirmed. 1: a figure differs, or a step fails. 2: unusable input."""
    parser = command_line("preflight.py --dry-run", __doc__)
    parser.add_argument("--ranks", type=int, help="default: one node, or on a CPU the fewest that the layout allows")
    parser.add_argument("--rank", type=int, default=0, help="the rank to run; all of them need the same memory")
    parser.add_argument("--layers", type=int, help="use only this many layers of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_intermixed_args(arguments)
    cfg, _ = resolve_config(args.config, args.overrides, layout=False)
    arch, source = hf_config.planned(cfg.model.path, cfg.tiny_model, cfg.row_tokens)
    kind = grid.device_of(cfg.device)
    ranks = grid.default_ranks(cfg.parallel, cfg.rollout, kind, 16) if args.ranks is None else args.ranks
    num_layers = arch.num_layers if args.layers is None else args.layers
    for name, value, least, most in (
        ("--ranks", ranks, 1, MOST_RANKS),
        ("--rank", args.rank, 0, ranks - 1),
        ("--layers", num_layers, 1, arch.num_layers),
    ):
        if not least <= value <= most:
            raise InputError(f"{name}: {shown(value)} is out of range; give {least} to {most}")
    if kind == "cuda" and cfg.model.dtype == "fp32":
        raise InputError("model.dtype: fp32 on cuda needs the numbers of a router, but there are none; set it to bf16")
    refuse_first(broken_rules(cfg, arch, ranks))
    arch = dataclasses.replace(arch, num_layers=num_layers, moe_layers=arch.moe_layers[:num_layers])
    dry_run_device.open_device(kind)
    done = run(cfg, ranks, arch, args.rank, kind)
    rows = compare(done)
    agree = all(row.agrees for row in rows)
    if args.json:
        print(json.dumps(as_json(done, rows)))
        return 0 if agree else 1
    print(f"{cfg.name}: dry run of rank {args.rank} of {ranks}, {arch.num_layers} layers, model from {source}")
    print(as_text(done, rows))
    print(f"\nall figures within {WITHIN:.0%}, weights exact" if agree else "\nthe plan is wrong where it says DIFFERS")
    return 0 if agree else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    torch.set_num_threads(1)
    sys.exit(parallel_setup.run_command(main, sys.argv[1:]))
