"""Sets up ranks and Megatron's process groups for tensor, expert and data parallelism, and reduces values over them.

The rank grid is tensor (TP) x data (DP) for everything but the experts, and expert (EP) x expert_data for the experts:
TP x DP = EP x expert_data = number of ranks. Every rank calls every collective in this file, in the same order.

The group of all ranks uses gloo on every device. Its messages (metrics, barriers, objects) are small and on the host.
An HCCL or NCCL communicator over all ranks would take about 400 MiB of each device. Megatron's groups, which
transfer activations and gradients, use the backend of the device. Reductions are in fp32 or narrower types, because
HCCL has no fp64.

The order of this file is that of a start: torchrun's variables, the device and the world, the layout, and the
reductions over it.
"""

import contextlib
import datetime
import functools
import hashlib
import math
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from facts.exits import InputError
from hardware import device as devices
from inputs.files import MOST_RANKS, one_line, print_every_letter, shown, variable
from knobs import ParallelConfig, TrainConfig

# ------------------------------------------------------------------------------------------------ the process


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets these, and others


def launched_world_size() -> int:
    """Return the number of processes that torchrun started, or 1 without torchrun.

    Raises InputError if WORLD_SIZE is not a valid number of processes.
    """
    return variable("WORLD_SIZE", 1, 1, MOST_RANKS)


def launched_rank() -> int:
    """Return the rank that torchrun gave this process, or 0 without torchrun.

    Raises InputError if RANK is not a valid rank.
    """
    return variable("RANK", 0, 0, launched_world_size() - 1)


def check_launch() -> int:
    """Return the rank of this process. Raises InputError if the environment has values that torchrun never sets.

    Call this before anything waits for the other ranks, because the wait could last parallel.timeout_seconds.
    """
    rank, ranks = launched_rank(), launched_world_size()
    most = ranks if "WORLD_SIZE" in os.environ else MOST_RANKS  # without torchrun, it is another program's variable
    variable("LOCAL_RANK", 0, 0, variable("LOCAL_WORLD_SIZE", ranks, 1, most) - 1)
    variable("MASTER_PORT", 1, 1, 65535)
    variable("OMP_NUM_THREADS", 1, 1, 1024)
    absent = [name for name in TORCHRUN if name not in os.environ]
    if absent and {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & os.environ.keys():
        raise InputError(
            f"the environment's {', '.join(absent)}: not set, but others that torchrun sets are; set all of "
            f"{', '.join(TORCHRUN)}, or none"
        )
    if "RANK" in os.environ and (address := os.environ.get("MASTER_ADDR")):
        try:
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError) as error:
            raise InputError(f"the environment's MASTER_ADDR: {shown(address)}: {one_line(error)}") from None
    return rank


def refuse_one_rank(parallel: ParallelConfig, otherwise: str = "") -> None:
    """Raise InputError if the layout needs several ranks and torchrun has started none.

    ``otherwise`` is another remedy for the message to suggest, with {} for the number of ranks.
    """
    needed = math.lcm(parallel.tensor, parallel.expert)
    if needed > 1 and "WORLD_SIZE" not in os.environ:
        todo = f"start it with torchrun --nproc_per_node={needed}{', or ' * bool(otherwise)}{otherwise.format(needed)}"
        raise InputError(
            f"parallel: tensor {parallel.tensor} and expert {parallel.expert} need {needed} ranks or a multiple, and "
            f"torchrun has started none; {todo}"
        )


def run_command(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run the ``main`` of a command that torchrun starts. A non-zero exit code ends the process here."""
    print_every_letter()
    # Megatron and torch warn about options of GPUs, and about each other's deprecations.
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")
    code = main(arguments)
    sys.stdout.flush()
    if code:
        os._exit(code)  # without destroying the process groups: that would wait for ranks that have ended
    return code


# ------------------------------------------------------------------------------------------------ device and world


def start_device(name: str, train: TrainConfig) -> torch.device:
    """Import and adapt the libraries of the device that ``name`` means on this machine, and return the device.

    Call this before the first import of transformers. Raises InputError if the device cannot be used.
    """
    devices.set_environment(name, train.deterministic)
    device = devices.resolve(name)
    devices.adapt(device)
    return device


@contextlib.contextmanager
def open_world(
    name: str,
    train: TrainConfig,
    parallel: ParallelConfig,
    waiting: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Iterator[torch.device]:
    """Make a world of all ranks in this block, on the device that ``name`` means on this machine.

    The context ``waiting()`` is active while this rank waits for the other ranks.

    Only this function selects a device; hardware/device.py explains the order. Call open_layout next. After an
    exception the groups stay, because destroying them would wait for ranks that have ended. The caller must then end
    the process.
    """
    with waiting():
        torch.set_num_threads(variable("OMP_NUM_THREADS", 1, 1, 1024))
        device = start_device(name, train)
        devices.select(device)
        if train.deterministic:
            devices.make_deterministic(device)
        limit = datetime.timedelta(seconds=parallel.timeout_seconds)
        alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        where = {"init_method": "env://"} if "RANK" in os.environ else alone
        try:
            dist.init_process_group("gloo", timeout=limit, **where)
        except (RuntimeError, ValueError) as error:  # for example DistStoreError, or a wrong GLOO_SOCKET_IFNAME
            raise InputError(  # the other lines are a C++ stack
                f"torch.distributed: the ranks did not find each other: {str(error).splitlines()[0]}"
            ) from None
        # Do this before these values decide which groups a rank creates.
        refuse_unequal({"the section parallel of the configuration": parallel.model_dump_json()})
        torch.manual_seed(train.seed)  # the method draws from separate generators; this is for everything else
    yield device
    close_layout()
    dist.destroy_process_group()


def refuse_unequal(texts: dict[str, str]) -> dict[str, str]:
    """Return the sha256 (hex) of each of ``texts`` by name. All ranks call this together.

    If a text differs between ranks, every rank raises the same InputError for the first such text.
    """
    own = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    digests: list = [None] * dist.get_world_size()
    dist.all_gather_object(digests, [*own.values()])
    for name, by_rank in zip(own, zip(*digests, strict=True), strict=True):
        if odd := [rank for rank, digest in enumerate(by_rank) if digest != by_rank[0]]:
            raise InputError(
                f"{name}: rank {', '.join(map(str, odd))} did not read what rank 0 read; use the same files and "
                "packages on every node"
            )
    return own


# ------------------------------------------------------------------------------------------------ the layout


def open_layout(sizes: ParallelConfig, device: torch.device) -> "Parallel":
    """Create Megatron's groups of these sizes over the current world, and return this rank's position in them.

    Check the sizes with rules.trainer_problems first.
    """
    devices.import_megatron(device)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    with _groups_on(device):
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes.tensor,
            expert_model_parallel_size=sizes.expert,
            expert_tensor_parallel_size=1,  # a rank has its experts whole
            create_gloo_process_groups=False,
            distributed_timeout_minutes=sizes.timeout_seconds / 60,
        )
    if device.type == "npu":
        # Megatron gathers the numbers of tokens per expert over this group. It has the same ranks as the expert group,
        # and would create a second communicator.
        parallel_state._EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP = parallel_state.get_expert_model_parallel_group()
    model_parallel_cuda_manual_seed(0)  # activation recompute needs Megatron's tracker of random states
    return Parallel(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        tensor=sizes.tensor,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        data=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        expert=sizes.expert,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_data=dist.get_world_size(parallel_state.get_expert_data_parallel_group()),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        expert_group=parallel_state.get_expert_model_parallel_group(),
        expert_data_group=parallel_state.get_expert_data_parallel_group(),
    )


@contextlib.contextmanager
def _groups_on(device: torch.device) -> Iterator[None]:
    """Make Megatron create its groups with the backend and the options of ``device`` in this block.

    With gloo on a CPU, each set of ranks gets only one group. For some sets Megatron would create several, and each
    group has threads that poll. The dry run keeps these groups separate, because it counts the bytes that each group
    sends.
    """
    from megatron.core import parallel_state

    create, options = parallel_state.create_group, parallel_state.get_nccl_options

    def create_group(*args, backend: str | None = None, **kwargs):
        return create(*args, backend=backend or devices.BACKENDS[device.type], **kwargs)

    if device.type != "cpu":
        parallel_state.create_group = create_group
        parallel_state.get_nccl_options = lambda name, configs: devices.group_options(device, name)
    elif dist.get_backend() == "gloo":
        group_of = functools.cache(lambda ranks, timeout: create(list(ranks), timeout=timeout))
        parallel_state.create_group = lambda ranks, timeout=None, **options: group_of(tuple(ranks), timeout)
    try:
        yield
    finally:
        parallel_state.create_group, parallel_state.get_nccl_options = create, options


def close_layout() -> None:
    """Destroy Megatron's groups, so that another layout can be opened in the same world.

    All ranks call this together. Megatron itself only drops its references to the groups, and a group that is not
    destroyed keeps its threads and connections.
    """
    from megatron.core import parallel_state

    dist.barrier()  # another rank may still be receiving
    made: dict[dist.ProcessGroup, None] = {}  # in one order on all ranks; a group may have several names
    for name, value in list(vars(parallel_state).items()):
        groups = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, dist.ProcessGroup)]
        if groups:
            made |= dict.fromkeys(groups)
            setattr(parallel_state, name, None)  # destroy_model_parallel misses one of the names
    for group in made:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


class Factor(torch.nn.Parameter):
    """A LoRA factor in fp32, with its position in the layout."""

    is_expert: bool  # whether it belongs to the routed experts, with one factor per local expert
    shard_dim: int | None  # the dimension that tensor ranks split; None: each of them has the whole factor
    is_partial: bool  # whether each tensor rank has the whole factor but only a part of its gradient

    @staticmethod
    def zeros(
        device: torch.device, shape: tuple[int, ...], shard_dim: int | None = None, is_partial: bool = False
    ) -> "Factor":
        """Create a factor of zeros on its final device, because Module.to may replace a parameter."""
        factor = Factor(torch.zeros(shape, dtype=torch.float32, device=device))
        factor.is_expert, factor.shard_dim = len(shape) == 3, shard_dim
        factor.is_partial = is_partial and shard_dim is None
        return factor


@dataclass(frozen=True)
class Parallel:
    """The position of this rank in the grid, its groups, and the reductions over them."""

    rank: int
    world_size: int
    device: torch.device
    tensor: int
    tensor_rank: int
    data: int
    data_rank: int
    expert: int
    expert_rank: int
    expert_data: int
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    expert_data_group: dist.ProcessGroup

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Return, by name, this rank's groups that transfer data. A group of one rank transfers none."""
        kinds = ("tensor", "expert", "data", "expert_data")
        return {name: getattr(self, f"{name}_group") for name in kinds if getattr(self, name) > 1}

    # -------------------------------------------------------------------------------- small values, over all ranks

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Gather rows of equal shape from every rank, in rank order, on the host.  (n, ...) -> (world_size, n, ...)"""
        rows = rows.cpu().contiguous()
        out = rows.new_empty((self.world_size, *rows.shape))
        dist.all_gather_into_tensor(out.flatten(0, 1), rows)
        return out

    def gather_objects(self, value: object) -> list:
        """Gather the ``value`` of every rank, in rank order."""
        by_rank: list = [None] * self.world_size
        dist.all_gather_object(by_rank, value)
        return by_rank

    def join_on_first(self, values: list) -> list:
        """Return on rank 0 one list with the ``values`` of all ranks, in rank order, and [] on the other ranks."""
        by_rank: list = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(values, by_rank or None)
        return sum(by_rank, [])

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all ranks into a new tensor on the host, which is equal on every rank."""
        total = values.detach().cpu().clone()
        dist.all_reduce(total)
        return total

    def max_over_ranks(self, value: float) -> float:
        """Return the largest ``value`` of all ranks, or nan if one of them is nan. A MAX reduction would drop a nan."""
        return self.gather_rows(torch.tensor([value], dtype=torch.float32)).max().item()

    # -------------------------------------------------------------------------------- gradients

    def sum_over_data(self, values: Tensor) -> Tensor:
        """Sum ``values`` over the data-parallel ranks into a new tensor, which is equal on all of them."""
        total = values.detach().clone()
        if self.data > 1:
            dist.all_reduce(total, group=self.data_group)
        return total

    def sync_gradients_(self, parameters: list[Factor]) -> None:
        """Sum every gradient, in place, over the ranks that each have a share of it.

        The gradients of routed experts are summed over expert_data, because each expert has already processed the
        tokens of all its expert-parallel ranks. All other gradients are summed over data. Those of ``is_partial``
        factors are also summed over the tensor ranks. Each of these ranks has the whole factor but processed
        only some of the tokens.
        """
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for group, members in (
            (self.tensor_group, [p for p in parameters if p.is_partial]),
            (self.data_group, [p for p in parameters if not p.is_expert]),
            (self.expert_data_group, [p for p in parameters if p.is_expert]),
        ):
            if members and dist.get_world_size(group) > 1:
                sum_gradients_(members, group)

    def gradient_norm(self, parameters: list[Factor]) -> Tensor:
        """Return the L2 norm of the gradient of the whole, unsharded parameter set, on the host.  -> ()

        If c ranks store the same factor, each of them counts 1/c of it. So the sum over all ranks counts every element
        once.
        """
        squares = (p.grad.float().square().sum() / self.copies(p) for p in parameters)
        return self.sum_over_ranks(sum(squares, torch.zeros((), device=self.device))).sqrt()

    def copies(self, parameter: Any) -> int:
        """Return the number of ranks that have the same piece of ``parameter``, a Factor or huggingface.WeightShard."""
        if parameter.is_expert:
            return self.expert_data
        return self.data if parameter.shard_dim is not None else self.data * self.tensor


def gather(value: Tensor, size: int, group) -> Tensor:
    """Gather ``value`` from every rank of ``group``, in rank order. With a single rank, return a view.

    ``size`` is the number of these ranks. They all call this together.  (...) -> (size, ...)
    """
    if size == 1:
        return value[None]
    out = value.new_empty((size, *value.shape))
    dist.all_gather_into_tensor(out.flatten(0, 1), value.contiguous(), group=group)
    return out


def sum_gradients_(parameters: list[Factor], group: dist.ProcessGroup) -> None:
    """Sum the gradients of ``parameters`` over ``group``, in place."""
    # One flat message: for small adapters the latency of a collective costs more than its size.
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, group=group)
    for parameter, total in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad.copy_(total.view_as(parameter))
