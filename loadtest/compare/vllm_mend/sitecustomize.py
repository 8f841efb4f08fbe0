"""Mends vLLM 0.32's NixlConnector for machines with few cores. Not imported here: the pair's servers find it on their
PYTHONPATH, and Python runs it first in each of their processes.

The connector moves the worker's main thread to the last core, to keep its reads away from the model's cores. That
thread computes, too, so two servers share that core for half of their work. Here, threads stay where they are; OpenMP,
which binds threads through the C library, is not concerned.

NIXL's agent starts a thread that polls without a pause, a whole core for each server, busy or not. Here it starts none;
vLLM polls its transfers in every step of the engine.
"""

import functools
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_AGENT_MODULES = ("nixl_cu12._api", "nixl_cu13._api")


class _WithoutProgressThread(Loader):
    """Loads NIXL's module, and changes one default in it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        config = module.nixl_agent_config
        config.__init__ = functools.partialmethod(config.__init__, enable_prog_thread=False)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _AGENT_MODULES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _WithoutProgressThread(spec.loader)
        return spec


def _stay(pid: int, mask: object) -> None:
    """Replaces os.sched_setaffinity: threads stay where they are."""


os.sched_setaffinity = _stay
sys.meta_path.insert(0, _Finder())
