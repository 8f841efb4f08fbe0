"""The OpenMP library that a worker's threads run on. This module does not import torch: the library is loaded first.

Intel's library (the wheel intel-openmp) is used if it is installed, because it lets a process change at any time how
long idle threads spin. It replaces GNU's, with which torch is built, if its symbols are found first.
"""

import ctypes
import os
import sys
from importlib import metadata
from pathlib import Path

import psutil

_WHEEL, _LIBRARY = "intel-openmp", "libiomp5.so"
_LONGEST_SPIN_MS = 1_000_000
_SHARED_MEMORY = Path("/dev/shm")
_REGISTRATIONS = "__KMP_REGISTERED_LIB_"  # of Intel's and LLVM's libraries; then the process id and the user's


class OpenMP:
    """The calling thread's team."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._set_num_threads = library.omp_set_num_threads
        self._get_max_threads = library.omp_get_max_threads
        self._set_blocktime = getattr(library, "kmp_set_blocktime", None)
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        self._parallel.restype = None
        self._nothing = ctypes.cast(library.omp_get_thread_num, ctypes.c_void_p)

    def set_num_threads(self, count: int) -> None:
        """Sets the threads of the parallel regions that the calling thread starts from now on."""
        self._set_num_threads(count)

    @property
    def num_threads(self) -> int:
        """Returns the threads of the calling thread's next parallel region."""
        return int(self._get_max_threads())

    def run(self, function: int, argument: object) -> None:
        """Calls the C function at this address once on each thread, and returns when all calls have returned.

        Other Python threads run meanwhile.
        """
        self._parallel(function, argument, 0, 0)  # 0 threads: the number that was set

    def spin(self, most_ms: int = _LONGEST_SPIN_MS) -> None:
        """Makes idle threads of the team spin for at most `most_ms`, then sleep, from the next region on. GNU's library
        ignores this.
        """
        if self._set_blocktime is not None:
            self._set_blocktime(most_ms)

    def sleep(self) -> None:
        """Makes idle threads of the team sleep, from now on."""
        if self._set_blocktime is not None:
            self._set_blocktime(0)
            self._parallel(self._nothing, None, 0, 0)  # threads read the setting when a region ends


def load_openmp() -> None:
    """Loads Intel's library if it is installed. Must be called before torch is imported; later it does nothing."""
    if "torch" in sys.modules:
        return
    path = _find()
    if path is not None:
        os.environ["KMP_BLOCKTIME"] = "0"  # the beginning; `OpenMP.spin` and `OpenMP.sleep` change it
        os.environ.pop("OMP_WAIT_POLICY", None)
        remove_registrations(_SHARED_MEMORY)
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def remove_registrations(directory: Path) -> None:
    """Removes what Intel's library leaves of this user's processes that were killed: a file of each."""
    for file in directory.glob(f"{_REGISTRATIONS}*_{os.getuid()}"):
        pid = file.name.removeprefix(_REGISTRATIONS).partition("_")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            file.unlink(missing_ok=True)


def loaded_openmp() -> OpenMP | None:
    """Returns the library that torch runs on, once torch is imported. None: torch runs on another kind, as on a Mac."""
    for name in (None, "libgomp.so.1"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        if hasattr(library, "GOMP_parallel"):
            return OpenMP(library)
    return None


def _find() -> Path | None:
    try:
        files = metadata.files(_WHEEL) or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).resolve() for file in files if file.name == _LIBRARY), None)
