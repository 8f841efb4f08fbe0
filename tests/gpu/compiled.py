"""Compiles Triton kernels for GPUs that need not be here, and reads their registers, memory and instructions.

`python -m tests.gpu.compiled MODULE...` prints a table. Each module has `variants() -> list[Variant]`; a variant is
easiest had by `of_launch`, from a function that launches kernels and tensors on the meta device.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

_OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
_HOPPER = (90,)
_SHOWN = ("HGMMA", "HMMA", "LDGSTS.128", "LDGSTS.64", "LDG.128", "STG.128")


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with all types and constants that a launch decides."""

    name: str
    kernel: Any  # a function under triton.jit
    types: dict[str, str]  # of arguments: "*bf16", "i32", "fp32"; with ":16", the address or number is a multiple of 16
    constants: dict[str, Any]  # all other arguments, None for tensors that are not there
    options: dict[str, int]  # num_warps, num_stages
    capabilities: tuple[int, ...] = _HOPPER  # 80: A100, 89: L40, 90: H100 and H200


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled variant."""

    name: str
    capability: int
    registers: int  # of a thread
    spilled_bytes: int  # of a thread, to memory
    shared_bytes: int  # of a program
    opcodes: list[str] = field(repr=False)  # of the GPU's instructions, each once, with what follows their dots

    def has(self, opcode: str) -> bool:
        """Tells whether an instruction occurs: "HGMMA" is any of Hopper's matrix products, "LDG.128" loads 16 bytes."""
        wanted = opcode.split(".")
        return any(_in_order(wanted, found.split(".")) for found in self.opcodes)


def of_launch(name: str, launch: Callable[[], object], capabilities: tuple[int, ...] = _HOPPER) -> list[Variant]:
    """Collects the kernels that `launch` starts, as Triton would compile them for its arguments; none of them runs.

    Where there are several, the kernel's name is added. Not in a process with Triton's interpreter.
    """
    from triton.runtime import JITFunction

    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        calls.append((kernel, args, kwargs))

    with patch.object(JITFunction, "run", run):
        launch()
    assert calls, f"{name}: no kernel"
    return [
        _of_call(name if len(calls) == 1 else f"{name} {kernel.__name__}", kernel, args, kwargs, capabilities)
        for kernel, args, kwargs in calls
    ]


def compile_all(modules: Sequence[str], cache: Path) -> list[Compiled]:
    """Compiles all variants of some modules, in a process without Triton's interpreter. cache: Triton's.

    Raises CalledProcessError; what the compiler says is on stderr.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", "tests.gpu.compiled", "--json", *modules]
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [Compiled(**values) for values in json.loads(output)]


def _of_call(
    name: str, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any], capabilities: tuple[int, ...]
) -> Variant:
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    types: dict[str, str] = {}
    for parameter in kernel.params:
        kind = None if parameter.is_constexpr else _type_of(values[parameter.name], not parameter.do_not_specialize)
        if kind is not None:
            types[parameter.name] = kind
    constants = {argument: values[argument] for argument in kernel.arg_names if argument not in types}
    options = {option: value for option, value in values.items() if option not in kernel.arg_names}
    return Variant(name, kernel, types, constants, options, capabilities)


def _type_of(value: Any, specialize: bool) -> str | None:
    """Returns the type of an argument as in `Variant.types`; None for one that Triton takes for a constant."""
    from triton.runtime.jit import mangle_type

    if value is None or (specialize and type(value) is int and value == 1):
        return None
    if hasattr(value, "data_ptr"):
        return f"{mangle_type(value)}:16" if value.data_ptr() % 16 == 0 else mangle_type(value)
    is_multiple = specialize and type(value) is int and value % 16 == 0
    return f"{mangle_type(value)}:16" if is_multiple else mangle_type(value)


def _compile_here(modules: Sequence[str]) -> list[Compiled]:
    variants = [variant for module in modules for variant in import_module(module).variants()]
    with ThreadPoolExecutor(os.cpu_count()) as readers:  # processes of their own, while the next is compiled
        readings = [
            readers.submit(_read, variant.name, capability, _compile(variant, capability))
            for variant in variants
            for capability in variant.capabilities
        ]
    return [reading.result() for reading in readings]


def _compile(variant: Variant, capability: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = variant.kernel.arg_names
    types = {name: variant.types.get(name, "constexpr").split(":") for name in names}
    source = ASTSource(
        variant.kernel,
        signature={name: kind[0] for name, kind in types.items()},
        constexprs=variant.constants,
        attrs={(at,): [["tt.divisibility", 16]] for at, kind in enumerate(types.values()) if kind[1:]},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=variant.options)


def _read(name: str, capability: int, compiled: Any) -> Compiled:
    usage, sass = _dump(compiled.asm["cubin"])
    spilled = sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", usage))
    registers = max(int(found) for found in re.findall(r"REG:(\d+)", usage))
    opcodes = sorted(set(_OPCODE.findall(sass)))
    return Compiled(name, capability, registers, spilled, compiled.metadata.shared, opcodes)


def _dump(cubin: bytes) -> tuple[str, str]:
    """Reads resource usage and instructions with the tools that come with Triton."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    with TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        usage, sass = (
            subprocess.run(
                [tools / "cuobjdump", option, path], env=environment, capture_output=True, text=True, check=True
            ).stdout
            for option in ("-res-usage", "-sass")
        )
    return usage, sass


def _in_order(wanted: list[str], found: list[str]) -> bool:
    """Tells whether an opcode begins with the wanted part, and has the other parts in this order."""
    rest = iter(found[1:])
    return wanted[0] == found[0] and all(part in rest for part in wanted[1:])


def _main(arguments: list[str]) -> None:
    as_json = arguments[:1] == ["--json"]
    results = _compile_here(arguments[as_json:])
    if as_json:
        print(json.dumps([asdict(result) for result in results]))
        return
    print(f"{'kernel':<48} {'sm':>3} {'registers':>9} {'spilled':>8} {'shared':>8}  instructions")
    for result in results:
        shown = [name for name in _SHOWN if result.has(name)]
        numbers = f"{result.capability:>3} {result.registers:>9} {result.spilled_bytes:>8} {result.shared_bytes:>8}"
        print(f"{result.name:<48} {numbers}  {' '.join(shown)}")


if __name__ == "__main__":
    _main(sys.argv[1:])
