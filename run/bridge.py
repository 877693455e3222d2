"""Where the ranks that train and those that sample meet: messages between the two sides, and the policy's factors.

The sides are worlds of their own, each with its layout. There is no queue and no clock: each message has its order.
"""

import datetime
import hashlib
import pickle
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lora_megatron
from facts.exits import InputError, Tripped
from inputs.rules import Side
from knobs import ParallelConfig, TrainConfig
from parallel_setup import launched_rank
from runlog.progress import Heartbeat
from weights import adapter_weights
from weights.policy import Policy

LOOK_SECONDS = 1.0  # between two looks at the progress of the other side, and between two notes of one's own


class Bridge:
    """The connection of the two ranks 0. The others of a side wait for their rank 0."""

    heartbeat: Heartbeat  # from `open` on

    def __init__(self, side: Side, train: TrainConfig, parallel: ParallelConfig) -> None:
        """``side``: that of this rank."""
        self.side, self.samples, self.rank = side, side.name == "samplers", launched_rank() - side.first
        # A side may work for longer than a collective may last. The heartbeat ends a wait without progress.
        limit = {"days": 365} if train.stall_seconds else {"seconds": parallel.timeout_seconds}
        self.limit = datetime.timedelta(**limit)
        self.pair: Any = None  # the group of the two ranks 0
        self.within: Any = None  # the group of this side
        self.waiting, self.noted = False, 0.0

    def open(self, heartbeat: Heartbeat) -> None:
        """Connect the ranks, after each side has its world. ``heartbeat`` calls note_progress with every beat."""
        self.heartbeat = heartbeat
        store = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):  # below the name of the side
            store = store.underlying_store
        self.store = store
        self.within = self._group(f"within the {self.side.name}", self.rank, self.side.ranks)
        if self.rank == 0:
            self.pair = self._group("both sides", int(self.samples), 2)

    def _group(self, name: str, rank: int, size: int) -> Any:
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self.store), rank, size, self.limit)

    def note_progress(self) -> None:
        """Tell the other side that this one works: the beats of a rank that waits there say nothing."""
        if self.pair and not self.waiting and time.monotonic() - self.noted > LOOK_SECONDS:
            self.noted = time.monotonic()
            self.store.add(f"progress of samplers: {self.samples}", 1)

    def broadcast(self, group: Any, tensor: Tensor, root: int, what: str) -> None:
        """Send ``tensor`` (on the host) from the member ``root`` to the others of ``group``, in place.

        A side waits while the other one makes progress; else its heartbeat ends the run and says for ``what``.
        """
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work = group.broadcast([tensor], options)
        self.heartbeat.beat(f"the other side was asked for {what}")
        self.waiting, seen, looked = True, -1, 0.0
        while not work.is_completed():
            time.sleep(0.002)
            if time.monotonic() - looked > LOOK_SECONDS:
                looked, progress = time.monotonic(), self.store.add(f"progress of samplers: {not self.samples}", 0)
                if progress != seen:
                    seen = progress
                    self.heartbeat.beat()
        self.waiting = False
        work.wait()

    def wait_for_first(self, what: str) -> None:
        """Wait until rank 0 of this side has waited for ``what``, as patiently as it. Collective over the side.

        Without this, the other ranks would wait in a collective of the side, in which they make no progress themselves.
        """
        if self.side.ranks > 1:
            self.broadcast(self.within, torch.zeros(1), 0, what)

    def send(self, value: object, what: str) -> None:
        """Send ``value`` to rank 0 of the other side; on rank 0."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.broadcast(self.pair, torch.tensor([data.numel()]), int(self.samples), what)
        self.broadcast(self.pair, data, int(self.samples), what)

    def receive(self, what: str) -> Any:
        """What rank 0 of the other side sends; on rank 0."""
        size = torch.zeros(1, dtype=torch.int64)
        self.broadcast(self.pair, size, int(not self.samples), what)
        data = torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(self.pair, data, int(not self.samples), what)
        return pickle.loads(data.numpy().tobytes())

    def receive_for_all(self, what: str) -> Any:
        """The same, on every rank of this side. Collective."""
        box = [self.receive(what) if self.rank == 0 else None]
        self.wait_for_first(what)
        dist.broadcast_object_list(box, src=0)
        return box[0]

    # -------------------------------------------------------------------------------- the start, and the policy

    def agreed_start(self, read: dict[str, str]) -> int:
        """The first step, which the trainers know. InputError for another checksum of what the samplers ``read``."""
        first_step, theirs = self.receive_for_all("the start of the other side")
        if other := [name for name, checksum in read.items() if theirs.get(name) != checksum]:
            raise InputError(
                f"{other[0]}: the samplers did not read what the trainers read; needed: the same files and packages on "
                "every node"
            )
        return first_step

    def send_policy(self, policy: Policy, version: int) -> None:
        """Send the factors as the adapters have them now, whole and in fp32. Collective over the trainers."""
        digest, what = hashlib.sha256(), "the policy to be taken"
        if self.rank == 0:
            self.broadcast(self.pair, torch.zeros(1), 0, what)
        self.wait_for_first(what)
        for _, whole in policy.gathered():
            if whole is not None:
                digest.update(memoryview(whole.flatten().view(torch.uint8).numpy()))
                self.broadcast(self.pair, whole, 0, what)
        if self.rank == 0:
            self.send((version, digest.hexdigest()), what)

    def receive_policy(self, policy: Policy, version: int) -> None:
        """Put the next factors into ``policy``. Tripped unless it is that ``version``, and what was sent. Collective.

        Rank 0 receives a factor and passes it on to the other samplers, so the trainers send it once.
        """
        digest, what = hashlib.sha256(), f"the policy after {version} steps"
        if self.rank == 0:
            self.broadcast(self.pair, torch.zeros(1), 0, what)
        for name, factor in policy.factors.items():
            whole = torch.empty(lora_megatron.whole_shape(factor, policy.parallel))
            if self.rank == 0:
                self.broadcast(self.pair, whole, 0, what)
            self.broadcast(self.within, whole, 0, what)
            digest.update(memoryview(whole.flatten().view(torch.uint8).numpy()))
            with torch.no_grad():
                factor.copy_(adapter_weights.piece(name, factor, whole, policy.arch, policy.parallel))
        found, needed = self.receive_for_all(what), (version, digest.hexdigest())
        if found != needed:
            raise Tripped(
                f"rollout.ranks: sampler {self.rank} needs the policy after {version} steps and got {needed[1][:8]} "
                f"(sha256); the trainers sent {found[1][:8]}, after {found[0]} steps\n"
                "  look at: Bridge.send_policy and receive_policy, and whether both sides count the same steps"
            )
