"""Faults for tests: functions of the product that do something else until a MonkeyPatch is undone."""

from __future__ import annotations

from collections.abc import Callable

from pytest import MonkeyPatch

Plant = Callable[[MonkeyPatch], None]


def instead(owner: object, name: str, act: Callable) -> Plant:
    """``owner.name`` is ``act(real, *arguments)``."""

    def plant(patch: MonkeyPatch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **kwargs: act(real, *args, **kwargs))

    return plant


def after(owner: object, name: str, change: Callable) -> Plant:
    """``owner.name`` returns ``change(result, *arguments)``."""
    return instead(owner, name, lambda real, *args, **kwargs: change(real(*args, **kwargs), *args))


def before(owner: object, name: str, act: Callable) -> Plant:
    """``act(*arguments)`` runs before ``owner.name``."""
    return instead(owner, name, lambda real, *args, **kwargs: (act(*args), real(*args, **kwargs))[1])
