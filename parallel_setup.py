"""Ranks, process groups and reductions: tensor (TP), expert (EP) and data (DP) parallelism on Megatron's groups.

The rank grid is TP x DP for everything but the experts, and expert_tensor x EP x expert_data for those:
TP x DP = expert_tensor x EP x expert_data = number of ranks. Every collective here is called by every rank, in order.

The world of all ranks is gloo on every device: what crosses it (metrics, barriers, objects) is small and lies on the
host, and an HCCL or NCCL communicator over all ranks would take some 400 MiB of each device. Megatron's groups, over
which activations and gradients go, are the device's own. Reductions are of fp32 or narrower: HCCL has no fp64.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import device as devices
from input_files import MOST_RANKS, InputError, one_line, shown, variable
from knobs import Config


@dataclass(frozen=True)
class Parallel:
    """This rank's place in the grid, its groups, and the reductions over them."""

    rank: int
    world_size: int
    device: torch.device
    tensor: int
    tensor_rank: int
    data: int
    data_rank: int
    expert: int
    expert_rank: int
    expert_tensor: int
    expert_tensor_rank: int
    expert_data: int
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    expert_tensor_group: dist.ProcessGroup
    expert_data_group: dist.ProcessGroup

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """This rank's groups of several ranks that anything is sent over, by name."""
        found = {
            name: getattr(self, f"{name}_group")
            for name in ("tensor", "expert", "expert_tensor", "data", "expert_data")
            if getattr(self, name) > 1
        }
        if self.expert_tensor > 1:  # Megatron gathers the numbers of tokens an expert over this one
            from megatron.core import parallel_state

            found["expert_tensor x expert"] = parallel_state.get_expert_tensor_and_model_parallel_group()
        return found

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum over the data-parallel ranks; a new tensor, the same on every rank."""
        total = values.detach().clone()
        if self.data > 1:
            dist.all_reduce(total, group=self.data_group)
        return total

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum over all ranks; a new tensor on the host, the same on every rank."""
        total = values.detach().cpu().clone()
        dist.all_reduce(total)
        return total

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Every rank's equally shaped ``rows``, in rank order, on the host.  (n, ...) -> (world_size, n, ...)"""
        rows = rows.cpu().contiguous()
        out = rows.new_empty((self.world_size, *rows.shape))
        dist.all_gather_into_tensor(out.flatten(0, 1), rows)
        return out

    def max_over_ranks(self, value: float) -> float:
        """Largest of every rank's ``value``; nan if any rank's is, which a MAX reduction would drop."""
        return self.gather_rows(torch.tensor([value], dtype=torch.float32)).max().item()

    def of_rank_0(self, metrics: dict[str, float]) -> dict[str, float]:
        """Rank 0's values, on every rank: what all decide by must not differ by a rounding. The same keys on all."""
        values = torch.tensor(list(metrics.values()), dtype=torch.float64)
        dist.broadcast(values, src=0)
        return metrics if self.rank == 0 else dict(zip(metrics, values.tolist(), strict=True))

    def largest(self, value: tuple) -> tuple:
        """The largest of every rank's ``value``, as Python compares tuples; () is the smallest."""
        everyones: list[tuple] = [()] * self.world_size
        dist.all_gather_object(everyones, value)
        return max(everyones)

    def refuse_unequal(self, read: dict[str, str]) -> None:
        """InputError, the same on all ranks, that names the first of these texts which is not the same on all ranks."""
        mine = [hashlib.sha256(text.encode()).hexdigest() for text in read.values()]
        everyones: list[list[str]] = [[]] * self.world_size
        dist.all_gather_object(everyones, mine)
        for part, by_rank in zip(read, zip(*everyones, strict=True), strict=True):
            odd = [rank for rank, digest in enumerate(by_rank) if digest != by_rank[0]]
            if odd:
                raise InputError(
                    f"{part}: rank {', '.join(map(str, odd))} did not read what rank 0 read; needed: the same files on "
                    "every node"
                )

    def barrier(self) -> None:
        """Wait for every rank."""
        dist.barrier()

    def sync_gradients_(self, parameters: list[torch.nn.Parameter]) -> None:
        """Make every gradient the whole batch's: sum it over the ranks that hold a share of it, in place.

        ``parameter.partial_over``: None, "tensor" or "expert_tensor": the group whose ranks each saw only a part of
        the tokens or columns behind a factor that they all hold whole. ``parameter.is_expert``: routed experts have
        already met the tokens of all their expert-parallel ranks, so they sum over expert_data, all others over data.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        steps = [
            (self.tensor_group, [p for p in parameters if p.partial_over == "tensor"]),
            (self.expert_tensor_group, [p for p in parameters if p.partial_over == "expert_tensor"]),
            (self.data_group, [p for p in parameters if not p.is_expert]),
            (self.expert_data_group, [p for p in parameters if p.is_expert]),
        ]
        for group, members in steps:
            if members and dist.get_world_size(group) > 1:
                sum_gradients_(members, group)

    def gradient_norm(self, parameters: list[torch.nn.Parameter]) -> Tensor:
        """L2 norm of the gradient of the whole, unsharded parameter set, on the host.  -> ()

        A factor held by c ranks counts 1/c on each, so that the sum over all ranks counts every element once.
        """
        total = torch.zeros((), device=self.device)
        for parameter in parameters:
            total += parameter.grad.float().square().sum() / self.copies(parameter)
        return self.sum_over_ranks(total).sqrt()

    def copies(self, parameter: torch.nn.Parameter) -> int:
        """How many ranks hold this very piece of ``parameter``."""
        if parameter.is_expert:
            return self.expert_data * (1 if parameter.shard_dim is not None else self.expert_tensor)
        return self.data * (1 if parameter.shard_dim is not None else self.tensor)


def sum_gradients_(parameters: list[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the gradients of ``parameters`` over ``group``, in place."""
    # One flat message: the latency of a collective, not its size, is what small adapters pay for.
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, group=group)
    for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(total.view_as(parameter))


def launched_world_size() -> int:
    """Number of processes torchrun started; 1 without torchrun. InputError where the environment holds no number."""
    return variable("WORLD_SIZE", 1, 1, MOST_RANKS)


def launched_rank() -> int:
    """This process's rank as torchrun numbered it; 0 without torchrun. InputError as above."""
    return variable("RANK", 0, 0, launched_world_size() - 1)


def check_launch() -> int:
    """This process's rank; InputError for what the environment gives a start and no torchrun writes.

    Before anything waits for the other ranks: that would take parallel.timeout_seconds.
    """
    rank, ranks = launched_rank(), launched_world_size()
    most = ranks if "WORLD_SIZE" in os.environ else MOST_RANKS  # without torchrun, another program's
    variable("LOCAL_RANK", 0, 0, variable("LOCAL_WORLD_SIZE", ranks, 1, most) - 1)
    variable("MASTER_PORT", 1, 1, 65535)
    variable("OMP_NUM_THREADS", 1, 1, 1024)
    if "RANK" in os.environ and (address := os.environ.get("MASTER_ADDR")):
        try:
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError) as error:
            raise InputError(f"the environment's MASTER_ADDR: {shown(address)}: {one_line(error)}") from None
    return rank


def report(rank: int, message: str, late: bool = False) -> None:
    """Print why this rank ends. What all ranks find is said once: the others give rank 0 time to say it first."""
    if rank or late:
        time.sleep(2)
    print(message if rank == 0 else f"rank {rank}: {message}", file=sys.stderr, flush=True)


def run_command(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run the main of a command that torchrun starts; a non-zero exit code ends the process here."""
    # Megatron and torch warn about options of GPUs and about each other's deprecations.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    code = main(arguments)
    sys.stdout.flush()
    if code:
        os._exit(code)  # no tear-down: it would wait for ranks that are not coming
    return code


def start_device(cfg: Config) -> torch.device:
    """This process's device, with its libraries imported and adapted; before the first import of transformers.

    InputError if it cannot be used.
    """
    devices.set_environment(cfg.device, cfg.train.deterministic)
    device = devices.resolve(cfg.device)
    devices.adapt(device)
    return device


@contextlib.contextmanager
def open_world(cfg: Config) -> Iterator[torch.device]:
    """This process's device, with all ranks met and seeded; closed in order on the way out.

    The one place that selects a device; the order is device.py's, init_model_parallel comes next. After an exception
    the groups are left as they are: taking them down would wait for ranks that never come. The caller ends the process,
    and torchrun ends the others.
    """
    torch.set_num_threads(variable("OMP_NUM_THREADS", 1, 1, 1024))
    device = start_device(cfg)
    devices.select(device)
    if cfg.train.deterministic:
        devices.make_deterministic(device)
    init_process_group(cfg.parallel.timeout_seconds)
    seed_everything(cfg.train.seed)
    yield device
    close_model_parallel()
    dist.destroy_process_group()


def init_process_group(timeout_seconds: int) -> None:
    """Join the ranks that torchrun started, or be a world of one without it."""
    if "RANK" in os.environ:
        options = {"init_method": "env://"}
    else:
        options = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_seconds), **options)
    except (RuntimeError, ValueError) as error:  # DistStoreError is one, and what gloo says of GLOO_SOCKET_IFNAME
        found = str(error).splitlines()[0]  # of C++, whose stack follows
        raise InputError(f"torch.distributed: the ranks did not find each other: {found}") from None


def open_layout(cfg: Config, device: torch.device) -> Parallel:
    """Megatron's groups as cfg.parallel says, over the current world."""
    keys = ("tensor", "expert", "expert_tensor", "timeout_seconds")
    return init_model_parallel(device, **{key: getattr(cfg.parallel, key) for key in keys})


def init_model_parallel(
    device: torch.device, *, tensor: int, expert: int, expert_tensor: int, timeout_seconds: int = 600
) -> Parallel:
    """Megatron's groups for the given sizes over the current world. config.check_layout has checked the sizes."""
    devices.import_megatron(device)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with _groups_of(device):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_seconds / 60,
        )
    if device.type == "npu" and expert_tensor == 1:
        # Megatron gathers the numbers of tokens an expert over this group: the expert group's ranks by another name,
        # and another communicator.
        parallel_state._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = parallel_state.get_expert_model_parallel_group()
    model_parallel_cuda_manual_seed(0)  # Megatron's tracker must exist for activation recompute; we draw from seeds
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tensor=tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        data=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert=expert,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=expert_tensor,
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_data=dist.get_world_size(parallel_state.get_expert_data_parallel_group()),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        expert_group=parallel_state.get_expert_model_parallel_group(),
        expert_tensor_group=parallel_state.get_expert_tensor_parallel_group(),
        expert_data_group=parallel_state.get_expert_data_parallel_group(),
    )


@contextlib.contextmanager
def _groups_of(device: torch.device) -> Iterator[None]:
    """Inside, Megatron makes its groups on the device's backend, not the world's, and with device.py's options."""
    if device.type == "cpu":  # the world's is its own
        yield
        return
    from megatron.core import parallel_state

    create, options = parallel_state.create_group, parallel_state.get_nccl_options

    def create_group(*args, backend: str | None = None, **kwargs):
        return create(*args, backend=backend or devices.backend(device), **kwargs)

    parallel_state.create_group = create_group
    parallel_state.get_nccl_options = lambda name, configs: devices.group_options(device, name)
    try:
        yield
    finally:
        parallel_state.create_group, parallel_state.get_nccl_options = create, options


def close_model_parallel() -> None:
    """Destroy Megatron's groups, so that another layout can be opened in the same world. Collective.

    Megatron only forgets them, and a group that is not destroyed keeps its threads and connections.
    """
    from megatron.core import parallel_state

    dist.barrier()  # a peer may still be receiving
    made: dict[dist.ProcessGroup, None] = {}  # in one order on all ranks; some have several names
    for name, value in list(vars(parallel_state).items()):
        groups = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, dist.ProcessGroup)]
        if groups:
            made |= dict.fromkeys(groups)
            setattr(parallel_state, name, None)  # destroy_model_parallel leaves one name out
    for group in made:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def seed_dropout(seed: int) -> None:
    """Seed what dropout draws from: the global generator, and Megatron's own under tensor parallelism."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(seed % 2**31)  # Megatron adds the rank to it
    torch.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed the global generators. The method itself draws only from explicit ones, keyed by (seed, step, name)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


if __name__ == "__main__":
    sys.exit("parallel_setup.py --check is now: torchrun --nproc_per_node=N preflight.py --groups CONFIG")
