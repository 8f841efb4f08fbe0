"""The number of fields in a message's bytes, which is limited before they become objects.

Protobuf makes the objects in one call, which keeps the interpreter lock: 4,000,000 empty messages in 8 MB took it more
than 70 ms, and all that comes after it much longer. Encoding: https://protobuf.dev/programming-guides/encoding
"""

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor

MAX_FIELDS = 1 << 14  # of a message and all messages in it: 2,048 messages of a chat have some 8,000
MAX_NUMBERS = 1 << 20  # in lists of numbers: token ids

_MAX_DEPTH = 100  # protobuf's own
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types; groups are counted as fields


class TooManyFields(ValueError):
    """The message has more fields or numbers than it may have. The error's message is meant for the client."""


def check_size(data: bytes, descriptor: Descriptor) -> None:
    """Raises TooManyFields. Bytes that are no message pass up to where they go wrong: the decoder refuses them."""
    try:
        _Walk(data).walk(0, len(data), descriptor, 0)
    except IndexError:
        return


class _Walk:
    """Counts the fields of one message."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_fields = 0
        self._num_numbers = 0

    def walk(self, at: int, end: int, descriptor: Descriptor, depth: int) -> None:
        """Counts the fields between two offsets. Raises TooManyFields, and IndexError for bytes that break off."""
        while at < end:
            key, at = self._varint(at)
            self._num_fields += 1
            if self._num_fields > MAX_FIELDS:
                raise TooManyFields(f"The message has more than {MAX_FIELDS} fields.")
            wire_type = key & 7
            if wire_type == _VARINT:
                _, at = self._varint(at)
            elif wire_type == _FIXED64:
                at += 8
            elif wire_type == _FIXED32:
                at += 4
            elif wire_type == _BYTES:
                size, at = self._varint(at)
                self._look_into(descriptor.fields_by_number.get(key >> 3), at, min(at + size, end), depth)
                at += size

    def _look_into(self, field: FieldDescriptor | None, at: int, end: int, depth: int) -> None:
        if field is None:
            return
        if field.message_type is not None and depth < _MAX_DEPTH:
            self.walk(at, end, field.message_type, depth + 1)
        elif field.type == FieldDescriptor.TYPE_UINT32:  # a packed list; each number ends with a byte below 128
            self._num_numbers += int(np.count_nonzero(np.frombuffer(self._data, np.uint8, end - at, at) < 0x80))
            if self._num_numbers > MAX_NUMBERS:
                raise TooManyFields(f"The message has more than {MAX_NUMBERS} numbers.")

    def _varint(self, at: int) -> tuple[int, int]:
        """Returns a number and the offset after it."""
        number = shift = 0
        while (byte := self._data[at]) & 0x80:
            number |= (byte & 0x7F) << shift
            shift += 7
            at += 1
            if shift > 63:
                raise IndexError
        return number | byte << shift, at + 1
