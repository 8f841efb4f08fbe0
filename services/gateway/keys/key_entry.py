"""One key of the keys file, and what is made with the file's secret: the digests of keys, the salts of tenants.

The secret is 256 random bits. Both are HMAC-SHA256 with it, over different beginnings, so that neither says anything
of the other or of the secret.
"""

import hmac
import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from services.config import Right
from services.gateway.api.caller import DEFAULT_TENANT, Caller, Quota

_KEY_BYTES = 32
_ID_BYTES = 4
_TENANT = r"[A-Za-z0-9][A-Za-z0-9._@/+=~-]{0,127}"  # no colon, which ends a tenant's name in keys in Redis
_HEX_32_BYTES = r"^[0-9a-f]{64}$"

_Limit = Annotated[int, Field(ge=1, lt=2**53)]


def _tenant(name: str) -> str:
    if re.fullmatch(_TENANT, name) is None:
        raise ValueError("a tenant has 1 to 128 letters, digits or ._@/+=~-, and begins with a letter or a digit")
    return name


class _Strict(BaseModel):
    """The base of the file's parts: no further fields, no other types, no change once they are made."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class RateLimits(_Strict):
    """The limits of one key. None: there is none."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None  # of prompts and answers together
    max_concurrent: _Limit | None = None  # requests


class KeyEntry(_Strict):
    """One key, as the file has it. hmac_sha256: the key itself is nowhere."""

    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    tenant: Annotated[str, AfterValidator(_tenant)] = DEFAULT_TENANT
    hmac_sha256: Annotated[str, Field(pattern=_HEX_32_BYTES)]
    rights: Annotated[frozenset[Right], Field(min_length=1)] = frozenset({Right.API})
    limits: RateLimits = RateLimits()
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = 0
    created: AwareDatetime

    def caller(self, secret: bytes, quota: "QuotaMaker") -> Caller:
        """Returns who brings this key. quota: makes what counts its requests, where it has limits."""
        return Caller(
            tenant=self.tenant,
            key_id=self.id,
            rights=self.rights,
            priority=self.priority,
            salt=tenant_salt(secret, self.tenant),
            quota=None if self.limits == RateLimits() else quota(self.id, self.limits),
        )


QuotaMaker = Callable[[str, RateLimits], Quota | None]  # of a key's id and its limits


def new_secret() -> bytes:
    """Returns the secret of a new file."""
    return secrets.token_bytes(_KEY_BYTES)


def new_key() -> str:
    """Returns a key of 256 random bits."""
    return f"baton-{secrets.token_urlsafe(_KEY_BYTES)}"


def new_id() -> str:
    """Returns the id of a new key, which has nothing of the key in it."""
    return secrets.token_hex(_ID_BYTES)


def now() -> datetime:
    """Returns the time, in whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def key_digest(secret: bytes, key: str) -> bytes:
    """Returns the 32 bytes by which a key is known."""
    return hmac.digest(secret, b"key\0" + key.encode(), "sha256")


def tenant_salt(secret: bytes, tenant: str) -> str:
    """Returns the beginning of the salts of a tenant's cached blocks: as many digits as TENANT_SALT says."""
    return hmac.digest(secret, b"salt\0" + tenant.encode(), "sha256").hex()
