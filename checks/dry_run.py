"""One training step of one rank at its real size, without a device and without data: bytes, operations, collectives.

    python preflight.py CONFIG --dry-run [section.key=value ...] [--ranks N] [--rank R] [--layers L] [--json]

The trainer's own code builds rank R of the layout and runs the phases of a step. Its tensors have a shape and no
storage, its collectives do nothing, and kernels.py takes the branches of the configured device. The micro-batch is the
fullest that the plan allows: rows of one prompt token and completion tokens. The tokens are spread evenly over the
experts, and once more with the planned imbalance. The figures are compared with those of the plan; exit code 1 if one
of them differs by more than 10 %. All ranks hold the same amount, so rank 0 is as full as any.

What stays unknown: workspaces of kernels, buffers of HCCL, fragmentation, numerics, speed, and the engine.
preflight.py starts this file in a process of its own, because it changes torch.
"""

import contextlib
import dataclasses
import gc
import itertools
import json
import resource
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

import checkpoint
import device as devices
import lora_megatron
import model_megatron
import parallel_setup
import routing_replay
import weight_sync
import weights_hf
from architecture import Architecture, layers
from checks import confirmed, dry_run_device
from checks.dry_run_meter import Meter
from checks.dry_run_report import DryRun, as_text, figures
from config import command_line, resolve_config
from engines.interface import Stack
from hardware import kernels
from inputs import hf_config
from inputs.config_rules import OTHER_RULES
from inputs.files import BAD_INPUT, MOST_RANKS, InputError, one_line, refused, shown
from inputs.layout_rules import side_of, sides
from knobs import Config
from learner import Learner, Update
from parallel_setup import Factor, Parallel
from plan import grid, memory, parameters
from plan.search import broken_rules
from rollout import MicroBatch, Rollout
from runlog import StepTimer

IMBALANCES = (1.0, memory.IMBALANCE)  # rows of this rank's experts / the mean

# ------------------------------------------------------------------------------------------------ the step


def run(
    cfg: Config,
    arch: Architecture,
    ranks: int,
    rank: int,
    kind: str,
    imbalances: Iterable[float] = IMBALANCES,
    adapt: Callable[[torch.nn.Module], None] = lambda model: None,
) -> DryRun:
    """One step of ``rank``, with an update for each imbalance. ``adapt`` may change the model before the step."""
    from megatron.core import parallel_state

    side = side_of(cfg, ranks, rank)
    cfg, ranks, rank = side.cfg, side.ranks, rank - side.first
    device, layout = torch.device(dry_run_device.STAND_IN[kind]), grid.of(cfg, ranks, role=side.name)
    pushed = 0
    batch, length = fullest_batch(cfg, layout)
    one = _of_one_micro_batch(cfg, layout, len(batch.lengths))
    advantages = torch.zeros(len(batch.lengths))
    meter = Meter(device.type, answers=True)
    with contextlib.ExitStack() as stack:
        parallel = stack.enter_context(dry_run_device.as_rank(rank, ranks, cfg.parallel, device))
        counts = parallel_state.get_expert_tensor_and_model_parallel_group()  # Megatron gathers counts over it
        meter.groups = {counts.group_name: "expert_tensor x expert"}
        meter.groups |= {group.group_name: name for name, group in parallel.groups().items()}
        meter.groups[dist.group.WORLD.group_name] = "all ranks, on the host"
        # The stand-in of a GPU has another type, and rows are packed on the host.
        stack.enter_context(mock.patch.object(kernels, "on_gpu", lambda device: kind == "cuda"))
        stack.enter_context(mock.patch.object(routing_replay, "collect", _routes))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(meter)
        kernels._causal_mask.cache_clear()  # of an earlier run
        kernels._scalar.cache_clear()
        gc.collect()
        gc.disable()  # it runs at random moments
        stack.callback(gc.enable)
        with meter.phase("load"):
            model, adapters = _load(one, arch, parallel)
            adapt(model)
            factors = lora_megatron.factors(adapters).values()
            if side.name != "samplers":
                learner = Learner(one, arch, parallel, model, adapters, pad_token=0)
                learner.reference_gap = 0.0  # an update later than the first one, which compares the reference
                learner.behind.extend(learner.copied_factors() for _ in range(one.rollout.staleness))
            gc.collect()
        if side.name != "trainers":
            with meter.phase("start"):
                engine = _Engine(one, arch, parallel, layout, meter)
                sync = _weight_sync(one, arch, parallel, model, engine)
        meter.mark(itertools.chain(model.parameters(), model.buffers()), "weights")
        meter.mark(factors, "adapters")
        if side.name == "samplers":
            with meter.phase("push"):
                sync.push(0, [])
            return DryRun(cfg, arch, layout, kind, meter, 0, engine.calls, 0, length)
        meter.mark((moment for each in learner.moments.values() for moment in each.values()), "moments")
        meter.mark((factor for each in learner.behind for factor in each.values()), "older")
        if side.name != "trainers":
            with meter.phase("push"), learner.sampling_policy():
                sync.push(0, [])
            pushed = engine.calls
        before = meter.held()
        _watch(learner, meter)
        for imbalance in imbalances:
            meter.suffix = confirmed.suffix(imbalance)
            with dry_run_device.routed(imbalance, meter.wait), meter.phase("update"):
                for factor in learner.parameters:  # the fullest micro-batch is not the first one of its update
                    factor.grad = torch.zeros_like(factor)
                meter.mark((factor.grad for factor in learner.parameters), "gradients")
                if cfg.earlier_passes and cfg.replay.mode != "r2":  # under r2, update makes this pass
                    for micro in learner._pack(batch, [], list(range(len(batch.lengths))), advantages).micro_batches:
                        learner._old_logp(micro)
                    del micro
                learner.update(batch, [], advantages, 0, _Timer())
            gc.collect()
        meter.suffix = ""
        left = meter.held() - before
        with meter.phase("save"):
            tensors, counts = learner.state()
            checkpoint.save(Path(), 1, tensors, counts, one, writes=False)
        del tensors
    return DryRun(cfg, arch, layout, kind, meter, left, pushed, len(batch.lengths) // layout.data * length, length)


def _load(cfg: Config, arch: Architecture, parallel: Parallel) -> tuple[torch.nn.Module, dict]:
    """Model and adapters, as startup.open_run makes them."""
    with (
        mock.patch.object(torch.nn.Module, "to", dry_run_device.moved),
        mock.patch.object(weights_hf, "read_model", lambda folder, arch: dry_run_device.tensors_of(arch)),
        mock.patch.object(lora_megatron, "_initialise_", lambda *args: None),  # draws numbers on the host
    ):
        model = model_megatron.build_for(cfg.model, arch, parallel)
        weights_hf.load(model, arch, parallel, cfg.model.path)
        adapters = lora_megatron.attach(model, cfg.lora, parallel, cfg.train.seed, merges=cfg.trains_merged)
    return model, adapters


class _Engine:
    """Takes what is pushed. Its memory does not count.

    Unless each rank pushes its own shards, it holds the tensors of a fused group until it is complete, as vLLM does.
    """

    def __init__(
        self, cfg: Config, arch: Architecture, parallel: Parallel, layout: grid.RankGrid, meter: Meter
    ) -> None:
        self.fuses, self.calls, self.held = not cfg.rollout.expert_parallel, 0, {}
        if not parameters.has_stacks(cfg, layout, parallel.device.type):
            return
        experts = range(arch.num_experts) if layout.engine_expert == 1 else weights_hf.own_experts(arch, parallel)
        dtype = devices.DTYPES[cfg.model.dtype]
        for layer, module in layers(arch):
            if module.kind == "experts":
                shape = (len(experts), module.in_size, module.out_size)
                stack = Stack(torch.empty(shape, dtype=dtype, device=parallel.device), experts)
                self.held[layer + module.fused] = stack
                meter.forget(stack.memory)

    def stacks(self) -> dict[str, Stack]:
        return self.held

    def load_stacks(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named_tensors:
            self.calls += 1
            if tensor is not self.held[name].memory:
                self.held[name].memory.copy_(tensor)

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        group, held = "", []
        for name, tensor in named_tensors:
            if not self.fuses or weights_hf.fused_group(name) != group:
                group, held = weights_hf.fused_group(name), []
            held.append(tensor)
            self.calls += 1

    def load_adapter(self, factors: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.calls += len(factors)


def _weight_sync(
    cfg: Config, arch: Architecture, parallel: Parallel, model: torch.nn.Module, engine: Any
) -> weight_sync.WeightSync:
    """What pushes to ``engine``, without noise. The next push follows an update."""
    sync = object.__new__(weight_sync.WeightSync)  # its constructor pushes the whole model
    vars(sync).update(
        engine=engine, model=model, arch=arch, parallel=parallel, cfg=cfg,
        noise={}, clean_norms={}, touched=set(), rounded=set(), stacks=engine.stacks(),
    )  # fmt: skip
    with mock.patch.object(Parallel, "max_over_ranks", lambda parallel, value: value):
        sync._share_experts()
    for adapter in lora_megatron.attached(model).values():
        adapter.placed = None
    return sync


class _Timer(StepTimer):
    """Measures nothing."""

    def __init__(self) -> None: ...

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        yield  # without a profiler's range, which would be counted as an operation


def _routes(batch: Rollout, own: object, shares: object, arch: Architecture, *unused) -> dict[int, Tensor]:
    """routing_replay.collect without an engine: sequence -> (row length - 1, L, K)."""
    shape = (sum(arch.moe_layers), arch.experts_per_token)
    return {s: torch.zeros(n, *shape, dtype=torch.uint8) for s, n in enumerate(batch.lengths)}


def _watch(learner: Learner, meter: Meter) -> None:
    """Tell the meter where the phases of an update begin."""

    def watched(name: str, phase: str, after: str = "") -> None:
        method = getattr(learner, name)

        def call(*args, **kwargs):
            before = meter.enter(phase)
            try:
                return method(*args, **kwargs)
            finally:
                meter.enter(after or before)

        setattr(learner, name, call)

    pack_really = learner._pack

    def pack(*args) -> Update:
        """The real packing, of real tensors on the host; then the device gets tensors of these shapes."""
        parallel, fake = learner.parallel, torch._guards.detect_fake_mode()
        learner.parallel = dataclasses.replace(parallel, device=torch.device("cpu"))
        with unset_fake_temporarily(), _disable_current_modes():
            update = pack_really(*args)
            (micro,) = update.micro_batches
            meter.scored = int(micro.mask.sum())
        learner.parallel = parallel
        _change_tensors(micro, lambda tensor: fake.from_tensor(tensor).to(parallel.device))
        return update

    vars(learner)["_pack"] = pack
    watched("_reference_logp", "reference")
    watched("_old_logp", "old policy")
    watched("_sampled_logp", "old policy")
    watched("_loss", "forward", after="backward")
    watched("_step", "update")
    sync = learner.parallel.sync_gradients_

    def sync_gradients_(parameters: list[Factor]) -> None:
        meter.enter("update")
        sync(parameters)

    object.__setattr__(learner.parallel, "sync_gradients_", sync_gradients_)  # Parallel is frozen


def _change_tensors(micro: MicroBatch, change: Callable[[Tensor], Tensor]) -> None:
    for owner in (micro, micro.packing):
        for name, value in vars(owner).items() if owner is not None else ():
            if isinstance(value, Tensor):
                setattr(owner, name, change(value))
            elif isinstance(value, kernels.Sequences):
                query_ends, key_ends = change(value.query_ends), change(value.key_ends)
                setattr(owner, name, value._replace(query_ends=query_ends, key_ends=key_ends))


def fullest_batch(cfg: Config, layout: grid.RankGrid) -> tuple[Rollout, int]:
    """A rollout that is one full micro-batch on every data rank, and the length of its rows, of one prompt token."""
    room = memory.line_tokens(cfg, layout)
    rows = max(1, room // cfg.row_tokens)
    length = room // rows // layout.tensor * layout.tensor
    sequences, new = rows * layout.data, length - 1
    batch = Rollout(
        prompts=[[1]],
        tokens=torch.ones(sequences, new, dtype=torch.int64),
        logp=torch.zeros(sequences, new),
        lengths=[new] * sequences,
        truncated=torch.zeros(sequences, dtype=torch.bool),
        rewards=torch.zeros(1, sequences),
        parsable=torch.ones(1, sequences),
        correct=torch.ones(1, sequences),
    )
    return batch, length


def _of_one_micro_batch(cfg: Config, layout: grid.RankGrid, sequences: int) -> Config:
    """``cfg`` with a step of one update of one micro-batch."""
    changes = {
        "rollout": {"prompts_per_step": 1, "group_size": sequences},
        "loss": {"skip_equal_groups": False},  # a group of one row would be skipped
        "optim": {"prompts_per_update": 1, "tokens_per_micro_batch": memory.micro_batch_tokens(cfg, layout)},
    }
    return cfg.model_copy(update={name: getattr(cfg, name).model_copy(update=new) for name, new in changes.items()})


# ------------------------------------------------------------------------------------------------ the command


def main(arguments: list[str]) -> int:
    """Exit code 0: the plan's figures are confirmed. 1: one differs, or a rule is broken. 2: unusable input."""
    start = time.perf_counter()
    parser = command_line("preflight.py --dry-run", __doc__)
    parser.add_argument("--ranks", type=int, help="default: one node, or on a CPU the fewest that the layout takes")
    parser.add_argument("--rank", type=int, default=0, help="which rank; all of them hold the same amount")
    parser.add_argument("--layers", type=int, default=0, help="only so many layers of the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_intermixed_args(arguments)
    try:
        cfg, _ = resolve_config(args.config, args.overrides, rules=OTHER_RULES)
        arch, source = hf_config.planned(cfg)
        kind = grid.device_of(cfg)
        ranks = grid.default_ranks(cfg, kind, 16) if args.ranks is None else args.ranks
        for name, value, least, most in (
            ("--ranks", ranks, 1, MOST_RANKS), ("--rank", args.rank, 0, ranks - 1),
            ("--layers", args.layers or arch.num_layers, 1, arch.num_layers),
        ):  # fmt: skip
            if not least <= value <= most:
                raise InputError(f"{name}: found {shown(value)}; needed: {least} to {most}")
        if kind == "cuda" and cfg.model.dtype == "fp32":
            raise InputError("model.dtype: found fp32, which on cuda multiplies by numbers of a router; needed: bf16")
        if broken := [why for side in sides(cfg, ranks) for why in broken_rules(side, arch)]:
            raise InputError("; ".join(broken))
    except BAD_INPUT as error:
        return refused(error)
    if args.layers:
        arch = dataclasses.replace(arch, num_layers=args.layers, moe_layers=arch.moe_layers[: args.layers])
    dry_run_device.open_device(kind)
    try:
        done = run(cfg, arch, ranks, args.rank, kind)
    except Exception as error:
        traceback.print_exc()
        print(f"the step does not run: {one_line(error)}", file=sys.stderr)
        return 1
    counted = figures(done, args.rank, IMBALANCES)
    rows = confirmed.compare(done.cfg, arch, done.layout, kind, counted)
    agree = all(row.agrees for row in rows)
    seconds, peak = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if args.json:
        beside = [row._asdict() for row in rows]
        print(json.dumps(counted | {"compared": beside, "seconds": round(seconds, 1), "rss_gib": round(peak, 2)}))
        return 0 if agree else 1
    title = (
        f"{cfg.name}: dry run of rank {args.rank} of {ranks}, {arch.num_layers} layers, model from {source}; a "
        f"micro-batch of {done.tokens:,} tokens; nothing was computed; device {counted['device']}"
    )
    print(as_text(counted, rows, title))
    verdict = (
        f"all within {confirmed.WITHIN:.0%}, weights exact" if agree else "the plan is wrong where it says DIFFERS"
    )
    print(f"\n{verdict}; took {seconds:.0f} s and {peak:.2f} GiB")
    return 0 if agree else 1


if __name__ == "__main__":
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    torch.set_num_threads(1)
    sys.exit(parallel_setup.run_command(main, sys.argv[1:]))
