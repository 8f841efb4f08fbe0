"""Kernel functions as machine code: compiled by numba, or loaded as an earlier process stored them.

The key of the code names all that the code depends on: the maker of the function and its arguments, the source text of
this package, the processor, the compiler. The code holds nothing that differs from process to process: it calls
functions outside of itself by symbols, which get their addresses when the code is loaded.
"""

import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding, ir
from numba import types
from numba.core import compiler
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from services.engine.kernels.cpu import code_store
from services.engine.kernels.cpu.intrinsics import ISA
from services.engine.kernels.cpu.object_code import undefined_symbols

# Read at import, since the files may change before kernels are made; then they would not be the code of this process.
_PACKAGE = Path(__file__).parent
_SOURCES = [(str(path.relative_to(_PACKAGE)), path.read_bytes()) for path in sorted(_PACKAGE.rglob("*.py"))]


@dataclass(frozen=True, slots=True, eq=False)
class MachineCode:
    """A C function that returns nothing; it exists as long as this object."""

    address: int
    symbol: str  # the name by which other code calls the function
    engine: Any  # LLVM's execution engine, which owns the memory of the code
    made_by: "partial[MachineCode]"

    def origin(self) -> "partial[MachineCode]":
        """Returns the call that makes the same function in any process."""
        return self.made_by


def compiled(*argument_types: Any) -> Callable[[Callable[..., Any]], Callable[..., MachineCode]]:
    """Decorates a maker of Python functions whose arguments have these numba types; it then returns machine code.

    The maker depends on nothing but its own arguments, each a str, int, bool or Enum, and the sources of this package.
    It is also called when stored code of its function is loaded, because it loads the functions that the code calls.
    """

    def decorate(make: Callable[..., Any]) -> Callable[..., MachineCode]:
        assert make.__module__.startswith(f"{__package__}.")

        @wraps(make)
        def made(*args: Any, **kwargs: Any) -> MachineCode:
            symbol, function, store = _symbol(make, *args, **kwargs), make(*args, **kwargs), code_store.the_code_store()
            code = store.find(symbol)
            if code is None or not _can_load(code):
                code = _compile(function, argument_types, symbol)
                store.keep(symbol, code)
            return _load(code, symbol, partial(made, *args, **kwargs))

        return made

    return decorate


def _symbol(make: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Returns a name that only this function has, in any process: a digest of all that its code depends on."""
    bound = inspect.signature(make).bind(*args, **kwargs)
    bound.apply_defaults()
    assert all(isinstance(value, str | int | Enum) for value in bound.arguments.values())
    of_function = (make.__module__, make.__qualname__, sorted(bound.arguments.items()))
    return f"baton_{sha256(repr((of_function, _circumstances())).encode()).hexdigest()}"


@cache
def _circumstances() -> str:
    """Returns a digest of all that the code of every function depends on."""
    config = numba.config
    processor = (ISA.name, config.CPU_NAME, config.CPU_FEATURES)
    compilers = (numba.__version__, llvmlite.__version__, sys.version)
    options = sorted((name, value) for name, value in os.environ.items() if name.startswith("NUMBA_"))
    return sha256(repr((processor, compilers, options, _SOURCES)).encode()).hexdigest()


@global_compiler_lock
def _compile(function: Callable[..., None], argument_types: tuple[Any, ...], symbol: str) -> bytes:
    """Compiles the function to an object file, in which it has this symbol."""
    flags = compiler.Flags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    flags.error_model = "numpy"
    contexts = cpu_target.typing_context, cpu_target.target_context
    result = compiler.compile_extra(*contexts, function, argument_types, types.void, flags, {})
    result.library.add_ir_module(_entry(result.fndesc, symbol))
    return _object_code(result.library)


def _object_code(library: Any) -> bytes:
    """Returns the object code of numba's library, which includes all that the function calls."""
    _name, _kind, (code, _bitcode) = library.serialize_using_object_code()
    return bytes(code)


def _entry(function: Any, symbol: str) -> Any:
    """Makes a module with a C function that calls numba's function.

    Kernels raise nothing; an error in one ends the process.
    """
    context = cpu_target.target_context
    module, convention = context.create_module("entry"), context.call_conv
    callee_type = convention.get_function_type(function.restype, function.argtypes)
    callee = ir.Function(module, callee_type, function.llvm_func_name)
    entry_type = ir.FunctionType(ir.VoidType(), [context.get_value_type(kind) for kind in function.argtypes])
    entry = ir.Function(module, entry_type, symbol)
    builder = ir.IRBuilder(entry.append_basic_block("entry"))
    status, _nothing = convention.call_function(
        builder, callee, function.restype, function.argtypes, entry.args, attrs=("noinline",)
    )
    with builder.if_then(status.is_error, likely=False):
        builder.call(ir.Function(module, ir.FunctionType(ir.VoidType(), []), "llvm.trap"), [])
        builder.unreachable()
    builder.ret_void()
    return module


def _can_load(code: bytes) -> bool:
    """Returns True if all symbols that the code calls exist. LLVM would end the process over a missing one."""
    return all(binding.address_of_symbol(name) is not None for name in undefined_symbols(code))


def _load(code: bytes, symbol: str, made_by: "partial[MachineCode]") -> MachineCode:
    binding.initialize_native_target()
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return MachineCode(engine.get_function_address(symbol), symbol, engine, made_by)
