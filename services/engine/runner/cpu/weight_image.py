"""A model's weights as an image: their objects as JSON, beside a file that has their numbers.

    [[kind, what the kind needs ...], ...]     an object for each; what it consists of are places in this list

Tensors of floating-point numbers and of codes lie in the shared file, and the image has their places, so that any
number of processes read the same memory; all others (counts that kernels write, for one) are copied into the image, and
each process has its own. Kernels and their scratch memory are not in it: an object that has a method `origin` is made
anew by the call that it returns. Objects are of the engine's classes, and are given their fields as they were; calls
are of functions of its kernels. Whoever reads an image has made sure that it is this user's, as with machine code.
"""

import importlib
import json
from collections.abc import Callable
from enum import Enum
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.cpu.shared_file import Mapping, SharedFile

# Read at import: the files may change before weights are packed, and would not be the code of this process.
_PACKAGE = Path(__file__).parents[2]
_SOURCES = sha256(
    b"".join(
        str(path.relative_to(_PACKAGE)).encode() + b"\0" + path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))
    )
).hexdigest()
_ROOM, _KERNELS = "services.engine.", "services.engine.kernels.cpu."
_LEAST_BYTES = 1024  # of a tensor that is moved to the file
_COLLECTIONS: dict[str, Any] = {kind.__name__: kind for kind in (tuple, list, set, frozenset)}
_PLAIN = (type(None), bool, int, float, str)
_LINEAR = "linear"  # torch's function, which some layers are
Node = list[Any]


class ImageError(Exception):
    """Weights that have no image, or bytes that are none: one line."""


def code_digest() -> str:
    """Returns a digest of the code that packs weights and reads images."""
    return _SOURCES


def image_bytes(weights: object, file: SharedFile) -> bytes:
    """Returns the image of weights, and moves tensors to the file that are not there yet. Raises ImageError."""
    writer = _Writer(file)
    writer.add(weights)
    return json.dumps(writer.nodes).encode()


def weights_of(image: bytes, mapping: Mapping) -> Any:
    """Returns the weights of an image. Those in the file are not copied, and must not be written. Raises ImageError."""
    try:
        objects = _Reader(mapping.array())
        for node in json.loads(image):
            objects.read(node)
        return objects.made[-1]
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, ImportError) as error:
        raise ImageError(f"an image of weights that cannot be read: {error}") from error


class _Writer:
    """Writes objects, each after what it consists of."""

    def __init__(self, file: SharedFile) -> None:
        self.nodes: list[Node] = []
        self._file = file
        self._places: dict[int, int] = {}
        self._kept: list[object] = []  # so that no other object gets the id of one of them

    def add(self, each: Any) -> int:
        """Returns the object's place."""
        if id(each) not in self._places:
            node = self._node(each)
            self.nodes.append(node)
            self._places[id(each)] = len(self.nodes) - 1
            self._kept.append(each)
        return self._places[id(each)]

    def _node(self, each: Any) -> Node:
        kind = type(each)
        if kind in _PLAIN:
            return ["plain", each]
        if isinstance(each, Tensor):
            return ["tensor", *self._tensor(each)]
        if isinstance(each, torch.dtype):
            return ["dtype", _name_of(each)]
        if isinstance(each, Enum):
            return ["enum", *_path(kind), each.name]
        if isinstance(each, range):
            return ["range", each.start, each.stop, each.step]
        if isinstance(each, dict):
            return ["dict", [[self.add(key), self.add(value)] for key, value in each.items()]]
        if isinstance(each, partial):
            return ["partial", self._function(each.func), *self._arguments(each)]
        if hasattr(each, "origin"):
            origin = each.origin()
            return ["origin", self._function(origin.func), *self._arguments(origin)]
        if isinstance(each, tuple) and hasattr(each, "_fields"):
            return ["named", *_path(kind), [self.add(item) for item in each]]
        if kind in _COLLECTIONS.values() or kind is torch.Size:
            return [kind.__name__ if kind is not torch.Size else "tuple", [self.add(item) for item in each]]
        return ["object", *_path(kind), {name: self.add(getattr(each, name)) for name in _fields(each)}]

    def _arguments(self, call: "partial[Any]") -> tuple[list[int], dict[str, int]]:
        return [self.add(each) for each in call.args], {name: self.add(each) for name, each in call.keywords.items()}

    def _function(self, function: Callable[..., Any]) -> list[str]:
        if function is functional.linear:
            return [_LINEAR]
        module, name = _path(function)
        if not module.startswith(_KERNELS):
            raise ImageError(f"these weights cannot be shared: {module}.{name} is called, which is no kernel's")
        return [module, name]

    def _tensor(self, each: Tensor) -> Node:
        if each.layout != torch.strided or each.device.type != "cpu":
            raise ImageError(f"these weights cannot be shared: a tensor of layout {each.layout} on {each.device}")
        kind = [_name_of(each.dtype), list(each.shape)]
        offset = self._file.offset_of(each.data_ptr()) if each.nbytes else None
        if offset is not None:
            return ["there", *kind, offset, list(each.stride())]
        content = each.detach().contiguous()
        is_weight = each.dtype.is_floating_point or each.dtype == torch.uint8
        if not is_weight or each.nbytes < _LEAST_BYTES:
            return ["here", *kind, content.flatten().view(torch.uint8).numpy().tobytes().hex()]
        space = torch.from_numpy(self._file.take(each.nbytes))
        space.view(each.dtype).view(each.shape).copy_(content)
        return ["there", *kind, self._file.offset_of(space.data_ptr()), list(content.stride())]


class _Reader:
    """Makes the objects of an image, one after the other."""

    def __init__(self, content: np.ndarray) -> None:
        self.made: list[Any] = []
        self._content = content

    def read(self, node: Node) -> None:
        """Makes the next object. Raises one of several errors for what is none."""
        kind, *rest = node
        self.made.append(self._made(kind, rest))

    def _made(self, kind: str, rest: Node) -> Any:
        match kind, rest:
            case "plain", [value]:
                return value
            case "tensor", [where, *of_tensor]:
                return self._here(*of_tensor) if where == "here" else self._there(*of_tensor)
            case "dtype", [name]:
                return _dtype(name)
            case "enum", [module, name, member]:
                return _class(module, name)[member]
            case "range", borders:
                return range(*borders)
            case "dict", [items]:
                return {self.made[key]: self.made[value] for key, value in items}
            case "partial", [function, places, named]:
                return partial(_function(function), *self._all(places), **self._named(named))
            case "origin", [function, places, named]:
                return _function(function)(*self._all(places), **self._named(named))
            case "named", [module, name, places]:
                return _class(module, name)(*self._all(places))
            case "object", [module, name, fields]:
                found = _class(module, name)
                made = found.__new__(found)
                for field, value in self._named(fields).items():
                    object.__setattr__(made, field, value)
                return made
            case _, [places]:
                return _COLLECTIONS[kind](self._all(places))
        raise ValueError(f"{kind!r} is no kind of object")

    def _all(self, places: list[int]) -> list[Any]:
        return [self.made[place] for place in places]

    def _named(self, places: dict[str, int]) -> dict[str, Any]:
        return {name: self.made[place] for name, place in places.items()}

    def _here(self, name: str, shape: list[int], content: str) -> Tensor:
        copied = bytearray.fromhex(content)
        return (
            torch.frombuffer(copied, dtype=_dtype(name)).view(shape)
            if copied
            else torch.empty(shape, dtype=_dtype(name))
        )

    def _there(self, name: str, shape: list[int], offset: int, strides: list[int]) -> Tensor:
        dtype = _dtype(name)
        last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        end = offset + (last + 1) * dtype.itemsize
        if not 0 <= offset < end <= len(self._content):
            raise ValueError("a tensor that lies outside of the file")
        return torch.from_numpy(self._content[offset:end]).view(dtype).as_strided(shape, strides)


def _fields(each: object) -> list[str]:
    """Returns the names of all that an object consists of."""
    slots = [name for kind in type(each).__mro__ for name in kind.__dict__.get("__slots__", ())]
    return [*(name for name in slots if hasattr(each, name)), *getattr(each, "__dict__", ())]


def _path(each: Any) -> tuple[str, str]:
    module, name = getattr(each, "__module__", ""), getattr(each, "__qualname__", "")
    if not str(module).startswith(_ROOM):
        raise ImageError(f"these weights cannot be shared: {type(each).__name__} {module}.{name} is in them")
    return module, name


def _class(module: str, name: str) -> Any:
    found = _found(module, name, _ROOM)
    if not isinstance(found, type):
        raise ValueError(f"{module}.{name} is no class")
    return found


def _function(path: list[str]) -> Callable[..., Any]:
    if path == [_LINEAR]:
        return functional.linear
    module, name = path
    found: Callable[..., Any] = _found(module, name, _KERNELS)
    return found


def _found(module: str, name: str, room: str) -> Any:
    if not module.startswith(room):
        raise ValueError(f"{module}.{name} is no part of weights")
    return getattr(importlib.import_module(module), name)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found
