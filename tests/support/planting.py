"""Plant faults for tests: replace functions of the product until a MonkeyPatch is undone."""

from collections.abc import Callable

import torch.distributed as dist
from pytest import MonkeyPatch

Plant = Callable[[MonkeyPatch], None]


def instead(owner: object, name: str, act: Callable, rank: int | None = None) -> Plant:
    """``owner.name`` is ``act(real, *arguments)``, on every rank or on ``rank`` alone.

    The rank is asked for at each call. A process without a process group has no rank, so there a fault of one rank
    changes nothing.
    """

    def plant(patch: MonkeyPatch) -> None:
        real = getattr(owner, name)

        def replaced(*args, **kwargs):
            if rank is None or (dist.is_initialized() and dist.get_rank() == rank):
                return act(real, *args, **kwargs)
            return real(*args, **kwargs)

        patch.setattr(owner, name, replaced)

    return plant


def after(owner: object, name: str, change: Callable, rank: int | None = None) -> Plant:
    """``owner.name`` returns ``change(result, *arguments)``."""
    return instead(owner, name, lambda real, *args, **kwargs: change(real(*args, **kwargs), *args), rank)


def before(owner: object, name: str, act: Callable) -> Plant:
    """``act(*arguments)`` runs before ``owner.name``."""
    return instead(owner, name, lambda real, *args, **kwargs: (act(*args), real(*args, **kwargs))[1])


def both(first: Plant, second: Plant) -> Plant:
    return lambda patch: (first(patch), second(patch))
