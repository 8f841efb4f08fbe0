"""A reader of object files, as far as kernels need one: 64-bit little-endian ELF (System V ABI, chapter 4)."""

import struct
from collections.abc import Iterator

_HEADER = struct.Struct("<40xQ10xHH2x")  # offset of the sections' headers, bytes of a header, number of headers
_SECTION = struct.Struct("<4xI16xQQI12xQ")  # kind, offset, bytes, section that it refers to, bytes of an entry
_SYMBOL = struct.Struct("<IBxH16x")  # offset of the name, kind and binding, section that defines it
_SYMBOL_TABLE, _UNDEFINED = 2, 0


def undefined_symbols(code: bytes) -> Iterator[str]:
    """Yields the names that an object file refers to and does not define."""
    assert code.startswith(b"\x7fELF\x02\x01")
    at, size, count = _HEADER.unpack_from(code)
    sections = [_SECTION.unpack_from(code, at + number * size) for number in range(count)]
    for kind, offset, num_bytes, names, entry_bytes in sections:
        if kind == _SYMBOL_TABLE:
            for symbol_at in range(offset + entry_bytes, offset + num_bytes, entry_bytes):  # entry 0 is unused
                name, _binding, section = _SYMBOL.unpack_from(code, symbol_at)
                if section == _UNDEFINED:
                    start = sections[names][1] + name
                    yield code[start : code.index(b"\0", start)].decode()
