"""/debug/requests and Server-Timing, over HTTP."""

import re

import pytest

from services.gateway.api.generation import Unavailable
from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.request_records import KEPT
from tests.gateway.running_api import running_api

SECRET = "a word that nobody else says"


def durations(header: str) -> dict[str, float]:
    """The phases of a Server-Timing header, in milliseconds."""
    parts = [re.fullmatch(r"([a-z]+);dur=([0-9.]+)", part) for part in header.split(", ")]
    return {part[1]: float(part[2]) for part in parts if part}


async def test_an_answer_s_phases_are_in_its_header_and_its_record():
    async with running_api() as api:
        answer = await api.complete(prompt=SECRET)
        shown = durations(answer.headers["server-timing"])
        (listed,) = (await api.admin.get("/debug/requests")).json()["requests"]
        record = (await api.admin.get(f"/debug/requests/{answer.headers['x-request-id']}")).json()
    assert listed["request_id"] == record["request_id"] == answer.headers["x-request-id"]
    assert {"read", "tokenize"} <= shown.keys()
    assert shown["read"] == record["phases_ms"]["read"]
    usage = answer.json()["usage"]
    assert record["prompt_tokens"] == usage["prompt_tokens"]
    assert record["generated_tokens"] == usage["completion_tokens"]
    assert (record["status"], record["error"], record["in_flight"]) == (200, None, False)
    assert 0 < record["ttft_ms"] < record["duration_ms"]
    assert SECRET not in str(record)


async def test_a_request_s_record_is_found_by_the_id_that_its_client_chose():
    async with running_api() as api:
        body = {"model": "m", "prompt": "x"}
        for chosen in ("mine/with/slashes", "twice", "twice"):
            await api.http.post("/v1/completions", json=body, headers={"x-request-id": chosen})
        twice = [each["arrived_at"] for each in (await api.admin.get("/debug/requests")).json()["requests"]][:2]
        assert (await api.admin.get("/debug/requests/mine/with/slashes")).json()["status"] == 200
        assert (await api.admin.get("/debug/requests/twice")).json()["arrived_at"] == max(twice)
        missing = await api.admin.get("/debug/requests/no-such")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_request")


def test_a_record_keeps_few_names_of_ignored_fields():
    record = RequestRecord("x")
    record.note_ignored_fields(["x" * 100_000, *(f"f{number}" for number in range(20_000))])
    assert record.num_ignored_fields == 20_001
    assert record.ignored_fields == tuple(f"f{number}" for number in range(9))
    assert record.shown_ignored_fields == ", ".join([*record.ignored_fields, "..."])


@pytest.mark.parametrize("wrong", [{"max_tokens": "many"}, {}])
async def test_a_request_that_failed_has_the_code_of_its_error(wrong: dict[str, object]):
    async with running_api() as api:
        if not wrong:
            api.generator.error = Unavailable("nobody is there")
        answer = await api.complete(**wrong)
        (listed,) = (await api.admin.get("/debug/requests")).json()["requests"]
    error = answer.json()["error"]
    assert (listed["status"], listed["error"]) == (answer.status_code, error["code"] or error["type"])
    assert listed["ttft_ms"] is None


async def test_requests_that_generate_nothing_are_not_kept_and_old_ones_go():
    async with running_api() as api:
        for number in range(KEPT + 5):
            await api.http.post("/v1/completions", content=b"{}", headers={"x-request-id": f"r{number}"})
        await api.http.get("/v1/models")
        listed = (await api.admin.get("/debug/requests")).json()["requests"]
    assert [each["request_id"] for each in listed] == [f"r{number}" for number in range(KEPT + 4, 4, -1)]
