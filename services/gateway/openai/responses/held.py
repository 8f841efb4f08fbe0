"""Answers of background responses that a store does not take now, held in memory until it does."""

MAX_HELD = 1000
MAX_HELD_BYTES = 64 << 20


class HeldAnswers:
    """Packed answers by tenant and response id, a bounded number of bounded size."""

    def __init__(self, max_number: int = MAX_HELD, max_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_number = max_number
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: dict[tuple[str, str], bytes] = {}

    def hold(self, tenant: str, response_id: str, packed: bytes) -> bool:
        """Holds an answer until `remove`. False: there is no room, and it is not held."""
        if len(self._held) >= self._max_number or self._num_bytes + len(packed) > self._max_bytes:
            return False
        self._held[tenant, response_id] = packed
        self._num_bytes += len(packed)
        return True

    def get(self, tenant: str, response_id: str) -> bytes | None:
        """Returns an answer; None: it is not held."""
        return self._held.get((tenant, response_id))

    def remove(self, tenant: str, response_id: str) -> None:
        """Removes an answer that is held."""
        self._num_bytes -= len(self._held.pop((tenant, response_id)))
