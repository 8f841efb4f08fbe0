"""Processes whose kernels are of a class of processors: numba compiles for one class in a process."""

import os
import traceback
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

from services.config import CPU_ISA_VARIABLE
from services.engine.kernels.cpu.isa import ISAS, Isa, host_features, may_use_amx
from tests.engine.kernels.machine_code import keep_assembly
from tests.forkserver import FORKSERVER


def runnable() -> list[Isa]:
    """Classes that this processor can be, the highest first."""
    features = host_features()
    able = [isa for isa in ISAS if all(features.get(name) for name in isa.features)]
    return [isa for isa in able if not isa.has_amx or may_use_amx(os.environ)]


def run_as(isa: str, function: str, *arguments: Any) -> Any:
    """What a function, `module:name`, returns in a process in which kernels are of this class."""
    return _in_process(_choose, isa, function, arguments)


def run_lacking(feature: str, isa: str, function: str, *arguments: Any) -> Any:
    """The same on a processor without a feature that not all of the class have."""
    return _in_process(partial(_hide, feature), isa, function, arguments)


def run_emulated(isa: str, function: str, *arguments: Any) -> Any:
    """The same for a class that this processor may not be: `emulation` does what it lacks."""
    return _in_process(_emulate, isa, function, arguments)


def compile_for(isa: str, function: str, *arguments: Any) -> Any:
    """The same where kernels are compiled for an early processor of the class, whatever this one is, and never run."""
    return _in_process(_pretend, isa, function, arguments)


def _in_process(prepare: Any, isa: str, function: str, arguments: tuple[Any, ...]) -> Any:
    ours, theirs = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_run, args=(theirs, prepare, isa, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        result, error = ours.recv()
    except EOFError:
        result, error = None, "it ended without an answer"
    process.join()
    assert error is None, f"{function} in a process of {isa}, exit code {process.exitcode}: {error}"
    return result


def _run(pipe: Connection, prepare: Any, isa: str, function: str, arguments: tuple[Any, ...]) -> None:
    module, _, name = function.partition(":")
    try:
        prepare(isa)
        pipe.send((getattr(import_module(module), name)(*arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))


def _choose(isa: str) -> None:
    os.environ[CPU_ISA_VARIABLE] = isa
    keep_assembly()


def _hide(feature: str, name: str) -> None:
    from services.engine.kernels.cpu import isa

    found = {**isa.host_features(), feature: False}
    isa.host_features = lambda: found  # type: ignore[assignment]
    _choose(name)


def _emulate(isa: str) -> None:
    """Without optimizations, since kernels take longer to compile than to run."""
    os.environ["NUMBA_OPT"] = "0"  # numba reads it when it is imported
    from tests.engine.kernels.emulation import emulate

    emulate(isa)


def _pretend(name: str) -> None:
    """Detection finds the least that a processor of the class has."""
    from llvmlite import binding

    from services.engine.kernels.cpu import isa

    (found,) = [each for each in isa.ISAS if each.name == name]
    isa.host_features = lambda: dict.fromkeys(found.features, True)  # type: ignore[assignment]
    binding.get_host_cpu_name = lambda: found.processor
    os.environ[CPU_ISA_VARIABLE] = name
    keep_assembly()
