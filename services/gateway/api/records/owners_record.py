"""The record of a request as the owner of its key may see it: nothing of workers, and nothing of others' requests."""

from collections.abc import Mapping
from typing import Any

from services.gateway.api.records.request_record import RequestRecord
from services.gateway.api.records.request_records import describe_request
from services.protocol.outcomes import FailureCode

_OF_ATTEMPT = ("number", "choices", "num_tokens", "at_ms", "ends")
_OF_WORKER = ("role", "cached_tokens", "at_ms", "wire_ms", "kv_bytes", "reading_ms")

_WORDS = {
    FailureCode.TOO_LARGE: "it is too large for the worker that it was sent to",
    FailureCode.NOT_NOW: "the worker had no room for it",
    FailureCode.HANDOFF: "the handoff between two workers ended early",
    FailureCode.DEADLINE: "its time was over",
    FailureCode.OVER: "the worker had ended it before",
    FailureCode.UNSUPPORTED: "workers cannot do what it asks for",
    FailureCode.DRAINING: "the worker was about to end",
    FailureCode.NOT_FINITE: "the model computed numbers for it that are not finite",
}


def describe_to_owner(record: RequestRecord) -> dict[str, Any]:
    """All that the owner of a request's key may know of it, as JSON values. number: among the requests of that key."""
    described = describe_request(record)
    del described["workers"]
    attempts = [_attempt(each) for each in described["attempts"]]
    return {**described, "number": record.number_of_key, "attempts": attempts}


def _attempt(described: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: described[name] for name in _OF_ATTEMPT}
    workers = [{name: worker[name] for name in _OF_WORKER} for worker in described["workers"]]
    failure = described["failure"]
    return {**kept, "workers": workers, "failure": None if failure is None else _in_words(failure)}


def _in_words(failure: str) -> str:
    """Says why an attempt failed, without the words of the worker, which may name another one."""
    code = failure.partition(":")[0]
    return next((words for each, words in _WORDS.items() if each.name == code), "a worker failed it")
