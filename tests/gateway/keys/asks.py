"""What keys ask of a store of quotas, for tests."""

from services.gateway.keys.key_entry import RateLimits
from services.gateway.keys.quota import Ask, QuotaStore


def ask(lease: int, tokens: int = 1, key: int = 0, **limits: int) -> Ask:
    return Ask(f"key-{key}", RateLimits(**limits), f"lease-{lease}", tokens)


async def num_taken(store: QuotaStore, first_lease: int, key: int = 0, **limits: int) -> int:
    """Takes requests until one is refused. Returns how many there were."""
    number = 0
    while (await store.take(ask(first_lease + number, key=key, **limits))).refusal is None:
        number += 1
    return number
