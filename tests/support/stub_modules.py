"""Modules that have every name, for packages that are imported and never called."""

from __future__ import annotations

import importlib.machinery
import types

import torch


class Stub:
    """Stands for any name that a package imports or uses as a decorator, but that a test never calls."""

    def __call__(self, *args, **kwargs):
        if args and isinstance(args[0], torch._ops.OpOverload):  # used as a decorator of a converter of this operation
            return lambda function: function
        return args[0] if args and callable(args[0]) and not isinstance(args[0], Stub) else self

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __getitem__(self, key):
        return 1  # the number of cores

    def __iter__(self):
        return iter(())

    def __mro_entries__(self, bases):
        return (object,)


class StubModule(types.ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__, self.__spec__ = [], importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()


class StubFinder:
    """Finds the modules of ``packages`` that are not in sys.modules. Its place is at the start of sys.meta_path."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path=None, target=None):
        root = name.split(".")[0]
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if root in self.packages else None

    def create_module(self, spec):
        return StubModule(spec.name)

    def exec_module(self, module) -> None:
        pass
