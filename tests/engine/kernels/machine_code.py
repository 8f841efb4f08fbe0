"""What kernels are compiled to: LLVM's assembly in AT&T's syntax, its loops, and which class has an instruction."""

import re
from collections.abc import Iterator
from typing import Any

_AMX = r"^(tdp|tileload|tilestore|tilezero|tilerelease|ldtilecfg|sttilecfg)"
_VNNI = r"^(\{vex\} )?vpdp"
_BFLOAT16 = r"^(\{vex\} )?v(dpbf16ps|cvtne2?ps2bf16)"
_AVX512 = r"%zmm|%k[0-7]\b|%[xy]mm(1[6-9]|2\d|3[01])\b|\{1to\d+\}"  # the last: an operand that is spread
_ABOVE = {"amx": (), "avx512_bf16": (_AMX,), "avx512": (_AMX, _BFLOAT16), "avx2": (_AMX, _BFLOAT16, _AVX512, _VNNI)}
_MULTIPLY_ADD = re.compile(r"v((fmadd\d+|dpbf16)ps|pdpbusd|pmaddwd) ")
_TILE_PRODUCT = ("tdpbf16ps", "tdpbusd")
_STACK = re.compile(r"\(%rsp")  # a function with its frame in rbp would hide some; those that are looked at have none


_made: dict[str, str] = {}  # of each kernel's symbol, `module.maker`
_assembly: dict[str, str] = {}


def keep_assembly() -> None:
    """Tells this process to compile all kernels itself from now on, and to keep what they are compiled to."""
    from services.engine.kernels.cpu import code_store, compiled

    symbol_of, object_code = compiled._symbol, compiled._object_code

    def named(make: Any, *args: Any, **kwargs: Any) -> str:
        symbol = symbol_of(make, *args, **kwargs)
        module = make.__module__.removeprefix("services.engine.kernels.cpu.")
        _made[symbol] = f"{module}.{make.__qualname__}"
        return symbol

    def listed(library: Any) -> bytes:
        code: bytes = object_code(library)  # which links and optimizes first
        text = library.get_asm_str()
        (symbol,) = re.findall(r"^(baton_\w+):", text, flags=re.MULTILINE)
        _assembly[symbol] = text
        return code

    compiled._symbol, compiled._object_code = named, listed
    code_store.the_code_store = code_store.NoStore  # type: ignore[assignment]


def assembly_of(kernel: Any) -> str:
    """kernel: compiled in this process, after `keep_assembly`."""
    return _assembly[kernel.symbol]


def compile_function(function: Any, *argument_types: Any) -> str:
    """The assembly of a function that is no kernel, in such a process."""
    from services.engine.kernels.cpu import compiled

    symbol = f"baton_{function.__name__}"
    compiled._compile(function, argument_types, symbol)
    return _assembly[symbol]


def name_of(kernel: Any) -> str:
    """`module.maker` of the same."""
    return _made[kernel.symbol]


def instructions(assembly: str) -> Iterator[str]:
    """Without labels, directives and comments; one space after the name."""
    for line in assembly.splitlines():
        words = line.partition("#")[0].split(maxsplit=1)
        if words and not words[0].startswith(".") and not words[0].endswith(":"):
            yield " ".join(words)


def above_class(assembly: str, isa: str) -> list[str]:
    """Instructions that a processor of the class may not have."""
    patterns = [re.compile(pattern) for pattern in _ABOVE[isa]]
    return [line for line in instructions(assembly) if any(pattern.search(line) for pattern in patterns)]


def inner_loops(assembly: str) -> list[list[str]]:
    """The instructions of loops without a branch inside."""
    loops: list[list[str]] = []
    label, block = "", list[str]()
    for line in assembly.splitlines():
        if found := re.match(r"(\.?\w[^\s:]*):", line):
            label, block = found[1], []
            continue
        block += instructions(line)
        if block and block[-1].startswith("j"):
            if block[-1].endswith(f" {label}"):
                loops.append(block)
            label, block = "", []
    return loops


def multiply_adds(loop: list[str]) -> list[str]:
    """Of vectors."""
    return [line for line in loop if _MULTIPLY_ADD.match(line)]


def tile_products(loop: list[str]) -> list[str]:
    """AMX's, of bfloat16 and int8."""
    return [line for line in loop if line.startswith(_TILE_PRODUCT)]


def in_memory(loop: list[str]) -> list[str]:
    """Instructions that read or write memory."""
    return [line for line in loop if "(" in line and not line.startswith(("lea", "prefetch"))]


def on_stack(loop: list[str]) -> list[str]:
    """Those of them that do so on the stack."""
    return [line for line in in_memory(loop) if _STACK.search(line)]
