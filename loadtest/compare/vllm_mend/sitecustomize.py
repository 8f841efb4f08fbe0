"""Changes in vLLM 0.32, named by the words in VLLM_MEND. Not imported here: servers find this file on their PYTHONPATH,
and Python runs it first in each of their processes.

`pair`: mends NixlConnector for machines with few cores. The connector moves the worker's main thread to the last core,
to keep its reads away from the model's cores. That thread computes, too, so two servers share that core for half of
their work. Here, threads stay where they are; OpenMP, which binds threads through the C library, is not concerned.
NIXL's agent starts a thread that polls without a pause, a whole core for each server, busy or not. Here it starts none;
vLLM polls its transfers in every step of the engine.

`without_amx`: vLLM's own kernels find no AMX, as on a processor that has none. oneDNN's, which compute its products, go
by ONEDNN_MAX_CPU_ISA.
"""

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Change = Callable[[ModuleType], None]


class _Changed(Loader):
    """Loads a module, and changes it."""

    def __init__(self, loader: Loader, change: Change) -> None:
        self._loader = loader
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


class _Finder(MetaPathFinder):
    def __init__(self, changes: Mapping[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.get(fullname)
        spec = None if change is None else PathFinder.find_spec(fullname, path, target)
        if change is not None and spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader, change)
        return spec


def _without_progress_thread(module: ModuleType) -> None:
    config = module.nixl_agent_config
    config.__init__ = functools.partialmethod(config.__init__, enable_prog_thread=False)


def _without_amx(module: ModuleType) -> None:
    vars(module)["_is_amx_tile_supported"] = lambda: False


def _stay(pid: int, mask: object) -> None:
    """Replaces os.sched_setaffinity: threads stay where they are."""


_words = os.environ.get("VLLM_MEND", "").split()
_found: dict[str, Change] = {}
if "pair" in _words:
    os.sched_setaffinity = _stay
    _found |= dict.fromkeys(("nixl_cu12._api", "nixl_cu13._api"), _without_progress_thread)
if "without_amx" in _words:
    _found["torch.cpu"] = _without_amx
sys.meta_path.insert(0, _Finder(_found))
