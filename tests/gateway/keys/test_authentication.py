"""Which key is known, how it may be sent, and what its caller may do."""

import re
from collections.abc import Mapping

import pytest

from services.config import Right
from services.gateway.api.caller import ANYBODY, Caller
from services.gateway.api.errors import ApiError
from services.gateway.keys.authentication import Keys
from services.gateway.keys.file import read_keys
from services.gateway.keys.key_entry import new_key, tenant_salt
from services.protocol.block_hash import root_hash
from services.protocol.capsule import TENANT_SALT
from services.protocol.contents import Namespace
from tests.gateway.keys.key_files import KeySet, bearer


def caller(keys: Keys, headers: Mapping[str, str], right: Right = Right.API) -> Caller:
    return keys.caller(lambda name: headers.get(name, ""), right)


@pytest.mark.parametrize("form", ["Bearer {}", "bearer {}", "BEARER   {} "])
def test_a_bearer_token_is_a_key(key_set: KeySet, form: str) -> None:
    assert caller(key_set.keys(), {"authorization": form.format(key_set.acme)}).tenant == "acme"


def test_so_is_anthropic_s_header_also_beside_what_is_no_key(key_set: KeySet) -> None:
    keys = key_set.keys()
    assert caller(keys, {"x-api-key": key_set.other}).tenant == "other"
    assert caller(keys, {"x-api-key": key_set.other, "authorization": "Basic YTpi"}).tenant == "other"
    assert caller(keys, {"x-api-key": key_set.other, **bearer("none")}).tenant == "other"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer none"},
        {"authorization": f"Bearer {new_key()}"},
        {"authorization": "Bearer plain-ke"},
        {"authorization": "Bearer plain-key2"},
        {"authorization": "Bearer plain-key,plain-key"},
        {"authorization": "plain-key"},
        {"authorization": "Basic plain-key"},
        {"x-api-key": "Bearer plain-key"},
        {"x-api-key": "plain-k\xe9y"},
        {"x-api-key": "x" * 60_000},
        {"api-key": "plain-key"},
    ],
)
def test_anything_else_is_refused(key_set: KeySet, headers: dict[str, str]) -> None:
    with pytest.raises(ApiError) as refused:
        caller(key_set.keys(), headers)
    assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
    assert refused.value.headers == {"www-authenticate": "Bearer"}


def test_the_digest_in_the_file_and_its_secret_are_no_keys(key_set: KeySet) -> None:
    """Who reads a backup of the file has no key."""
    file = read_keys(key_set.path)
    for text in (file.secret.hex(), *(entry.hmac_sha256 for entry in file.entries), *(e.id for e in file.entries)):
        with pytest.raises(ApiError):
            caller(key_set.keys(), bearer(text))
    assert not any(key in key_set.path.read_text() for key in (key_set.acme, key_set.other, key_set.operator))


def test_a_key_without_the_right_is_told_so(key_set: KeySet) -> None:
    keys = key_set.keys()
    assert caller(keys, bearer(key_set.operator), Right.ADMIN).tenant == "staff"
    for key, right in ((key_set.operator, Right.API), (key_set.acme, Right.ADMIN)):
        with pytest.raises(ApiError, match=f"lacks the right '{right}'") as refused:
            caller(keys, bearer(key), right)
        assert refused.value.status == 403


def test_plain_keys_have_all_rights_and_no_bound(key_set: KeySet) -> None:
    for keys in (key_set.keys(), Keys(("first", "plain-key"))):
        for right in Right:
            found = caller(keys, bearer("plain-key"), right)
            assert (found.tenant, found.priority) == ("default", None)


def test_with_no_key_at_all_nobody_is_admitted() -> None:
    with pytest.raises(ApiError):
        caller(Keys(()), bearer(""))


def test_new_keys_have_256_random_bits() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(re.fullmatch(r"baton-[A-Za-z0-9_-]{43}", key) for key in keys)


def test_no_salt_of_one_tenant_is_another_s_whatever_its_client_asks_for(key_set: KeySet) -> None:
    keys = key_set.keys()
    acme, other = (caller(keys, bearer(key)) for key in (key_set.acme, key_set.other))
    assert acme.cache_salt(None) == acme.cache_salt(None) != other.cache_salt(None)
    assert acme.cache_salt("mine") != acme.cache_salt(None)
    stolen = acme.cache_salt("mine")
    assert other.cache_salt(stolen) != stolen
    assert len(acme.salt) == len(other.salt)  # so none begins with another
    assert caller(keys, bearer("plain-key")).salt == tenant_salt(read_keys(key_set.path).secret, "default")


def test_tenants_name_the_same_blocks_differently(key_set: KeySet) -> None:
    """So their workers' caches, and the prefix index, know no block of both."""
    keys = key_set.keys()
    callers = (caller(keys, bearer(key)) for key in (key_set.acme, key_set.other, key_set.patient))
    roots = {root_hash("one model's", Namespace(each.cache_salt(None))) for each in (*callers, ANYBODY)}
    assert len(roots) == 4


def test_gateways_with_one_file_agree_on_salts_and_others_do_not(key_set: KeySet) -> None:
    assert caller(key_set.keys(), bearer(key_set.acme)).salt == caller(key_set.keys(), bearer(key_set.acme)).salt
    assert tenant_salt(b"one file's", "acme") != tenant_salt(b"another's", "acme")
    assert len(tenant_salt(b"one file's", "acme")) == TENANT_SALT, "workers know tenants by that"
    assert ANYBODY.cache_salt(None) == ""


def test_a_key_bounds_the_priority_of_its_requests(key_set: KeySet) -> None:
    keys = key_set.keys()
    patient, plain = (caller(keys, bearer(key)) for key in (key_set.patient, "plain-key"))
    assert [patient.request_priority(asked) for asked in (None, 5, 9)] == [5, 5, 9]
    with pytest.raises(ApiError, match="must be at least 5 with this key"):
        patient.request_priority(4)
    assert [plain.request_priority(asked) for asked in (None, -7, 7)] == [0, -7, 7]
