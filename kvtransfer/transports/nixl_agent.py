"""One NIXL agent with the UCX backend. The `nixl` package is imported here alone, and its exceptions end here.

NIXL's own progress thread would keep a core busy, so an agent has none: what it works on goes on in calls of it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import numpy as np

from kvtransfer.transports.base import TransportError
from kvtransfer.transports.nixl_lists import HOST, MemoryPlace

# Unless told otherwise, UCX reads by CUDA IPC only between devices that NVLink joins, and else has the producer send,
# even over TCP. Two workers may share one device, so CUDA IPC is allowed there too. The environment overrides this.
_DEVICE_CONFIG = "CUDA_IPC_ENABLE_GET_ZCOPY=on"
_LOCAL_SIDE = "NIXL_INIT_AGENT"


class TransferState(StrEnum):
    """NIXL's words for the state of a transfer."""

    MOVING = "PROC"
    DONE = "DONE"
    FAILED = "ERR"


class NixlAgent:
    """An agent. Memory, prepared lists and transfers are NIXL's own objects, opaque to others."""

    def __init__(self, name: str, *, device: bool) -> None:
        """device: for memory of a device. Raises TransportError."""
        nixl = _import_nixl()
        self._errors = _error_types(nixl)
        with self.translated("cannot set up NIXL"):
            config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
            self._agent = nixl.nixl_agent(name, config)
            if "UCX" not in self._agent.get_plugin_list():
                raise TransportError("this NIXL has no UCX plugin")
            self._agent.create_backend("UCX", {"engine_config": _DEVICE_CONFIG} if device else {})

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Turns NIXL's exceptions into TransportError, which begins with these words."""
        try:
            yield
        except self._errors as error:
            raise TransportError(f"{what}: {error}") from error

    # These raise NIXL's exceptions: callers are inside `translated`.

    def metadata(self) -> bytes:
        """Returns what another agent needs to reach all memory that is registered now."""
        return bytes(self._agent.get_agent_metadata())

    def register(self, address: int, num_bytes: int, place: MemoryPlace = HOST) -> Any:
        """Makes memory usable for transfers, of others too that have this agent's metadata."""
        return self._agent.register_memory([(address, num_bytes, place.device, "")], place.kind.value)

    def deregister(self, registration: Any) -> None:
        """Ends a registration."""
        self._agent.deregister_memory(registration)

    def add_remote(self, metadata: bytes) -> str:
        """Makes another agent reachable; returns its name."""
        return str(self._agent.add_remote_agent(metadata).decode(errors="replace"))

    def remove_remote(self, name: str) -> None:
        """Removes another agent."""
        self._agent.remove_remote_agent(name)

    def prepare(self, rows: np.ndarray, place: MemoryPlace = HOST, of: str = _LOCAL_SIDE) -> Any:
        """Prepares a list of memory of this agent, or of the named one. rows: see `nixl_lists`."""
        return self._agent.prep_xfer_dlist(of, rows, place.kind.value)

    # These raise nothing.

    def progress(self) -> None:
        """Lets transfers of others go on that read this agent's memory."""
        self._agent.get_new_notifs()  # no worker sends one, but this call makes UCX serve other workers' reads

    def make_read(self, local: Any, local_index: np.ndarray, remote: Any, remote_index: np.ndarray) -> Any:
        """Makes a transfer between entries of two prepared lists; None when NIXL refuses, as for a worker that is gone.

        NIXL merges adjacent entries itself.
        """
        try:
            return self._agent.make_prepped_xfer(
                "READ", local, local_index.astype(np.int32), remote, remote_index.astype(np.int32)
            )
        except self._errors:
            return None

    def start(self, transfer: Any) -> TransferState:
        """Starts a transfer, which may have ended on return."""
        try:
            return TransferState(self._agent.transfer(transfer))
        except self._errors:
            return TransferState.FAILED

    def state(self, transfer: Any) -> TransferState:
        """Looks at a transfer, which goes on meanwhile."""
        try:
            return TransferState(self._agent.check_xfer_state(transfer))
        except self._errors:
            return TransferState.FAILED

    def release(self, transfer: Any) -> bool:
        """Releases a transfer. False: NIXL does not, since it still works on it."""
        try:
            transfer.release()
        except self._errors:
            return False
        return True


def _import_nixl() -> Any:
    try:
        import nixl
    except ImportError as error:
        raise TransportError(f"the nixl package is not usable here: {error}") from error
    logging.getLogger("nixl").setLevel(logging.WARNING)  # at INFO, NIXL writes every agent's start to stdout
    return nixl


def _error_types(nixl: Any) -> tuple[type[Exception], ...]:
    """Lists NIXL's exceptions, which have no common base class, and those of its bindings for bad arguments."""
    own = tuple(error for name, error in vars(nixl._bindings).items() if name.endswith("Error"))
    return (*own, RuntimeError, ValueError)
