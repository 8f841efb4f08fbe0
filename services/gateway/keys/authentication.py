"""The keys that a gateway knows, and the caller of each request by the key that it brings.

A key is looked up by the first bytes of its digest, which is keyed by a secret: nobody can choose keys whose digests
begin alike, so the time of the lookup says nothing of the keys that there are. The whole digests are then compared in
constant time. The cost does not depend on the number of keys.
"""

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from services.config import Right
from services.gateway.api.caller import Caller, Quota
from services.gateway.api.errors import ApiError
from services.gateway.keys.file import KeysFile
from services.gateway.keys.key_entry import QuotaMaker, RateLimits, key_digest, new_secret, tenant_salt
from services.process.configs import MAX_API_KEY

AUTHORIZATION, API_KEY = "authorization", "x-api-key"  # headers, and names in gRPC's metadata
_BEGINNING = 8  # bytes of a digest
_BEARER = "bearer "


def no_quota(key_id: str, limits: RateLimits) -> Quota | None:
    """Makes no quota: a QuotaMaker of programs that admit no requests."""
    return None


@dataclass(frozen=True, slots=True)
class _Table:
    """The keys that open. known: whole digests and callers, by the first bytes of digests with the secret."""

    secret: bytes
    known: Mapping[bytes, tuple[bytes, Caller]]


class Keys:
    """An Authenticator over a keys file, which may be replaced by a newer one, and over keys with all rights."""

    def __init__(
        self,
        plain: Sequence[str] = (),
        file: KeysFile | None = None,
        quota: QuotaMaker = no_quota,
    ) -> None:
        """plain: the keys of --api-key, which are those of the default tenant. quota: makes the quota of a key."""
        self._plain = tuple(plain)
        self._quota = quota
        self.use(file)

    def use(self, file: KeysFile | None) -> None:
        """Takes over the keys of this file, beside the plain ones: no others are known from now on. On any thread."""
        secret = new_secret() if file is None else file.secret
        # Of plain keys alone there is one tenant, which needs no salt of its own.
        owner = Caller() if file is None else Caller(salt=tenant_salt(secret, Caller().tenant))
        callers = {key_digest(secret, key): owner for key in self._plain}
        for entry in () if file is None else file.entries:
            callers[bytes.fromhex(entry.hmac_sha256)] = entry.caller(secret, self._quota)
        known = {digest[:_BEGINNING]: (digest, caller) for digest, caller in callers.items()}
        self._table = _Table(secret, known)  # at once, for requests of this moment

    def __len__(self) -> int:
        return len(self._table.known)

    def caller(self, header: Callable[[str], str], right: Right | None) -> Caller:
        """Returns the caller of a request by the key in its headers. Raises ApiError, as Authenticator says."""
        brought = _keys_of(header)
        for key in brought:
            if (caller := self._find(key)) is not None:
                if right is not None and right not in caller.rights:
                    raise ApiError(403, f"This key lacks the right '{right}'.", code="insufficient_permissions")
                return caller
        message = "Incorrect API key provided." if brought else "No API key was provided."
        how = f"{message} Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
        raise ApiError(401, how, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    def _find(self, key: str) -> Caller | None:
        if len(key) > MAX_API_KEY or not key.isascii():
            return None
        table = self._table
        digest = key_digest(table.secret, key)
        expected, caller = table.known.get(digest[:_BEGINNING], (b"", None))
        return caller if hmac.compare_digest(digest, expected) else None


def _keys_of(header: Callable[[str], str]) -> list[str]:
    """Returns the keys that a request brings, as a client sends them: by one header, or by both."""
    authorization = header(AUTHORIZATION)
    bearer = authorization[len(_BEARER) :].strip() if authorization[: len(_BEARER)].lower() == _BEARER else ""
    return [key for key in (bearer, header(API_KEY)) if key]
