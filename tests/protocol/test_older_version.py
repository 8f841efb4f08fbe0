"""Bytes of an older version are read as they were meant, and its readers get what they expect from this one.

The bytes were written by the commit that tests/e2e/older.py names (older/examples.py says how), and are here because
its history is not at hand everywhere. Its own .proto files, which are among them, are its readers.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from protos import kv_pb2, sampling_pb2, worker_pb2
from services.config import Pooling
from services.config.option import Refusal
from services.prefix_index.registry import WorkerRecord
from services.process import child_config
from services.protocol import wire
from services.protocol.frames import Frame
from services.protocol.messages import Commands, GatewayHello, Submit, WorkerHello
from services.protocol.outcomes import FinishReason
from services.protocol.versions import Since
from services.worker import kv_wire
from tests.protocol.older import examples
from tests.protocol.test_wire import a_frame, assert_same

VECTORS: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "older/vectors.json").read_text())
MINOR = 1  # of the older version
FILES = (sampling_pb2, worker_pb2, kv_pb2)
SINCE_THEN = {"WorkerMessage": {Since.NEWS.name.lower()}}  # what is sent after a look at the version
KINDS = {"gateway": "GatewayMessage", "worker": "WorkerMessage"}


def _older_pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for raw in VECTORS["protos"].values():
        pool.Add(descriptor_pb2.FileDescriptorProto.FromString(bytes.fromhex(raw)))
    return pool


POOL = _older_pool()


def older(kind: str, raw: bytes) -> Message:
    """The message as the older version reads it: what it does not know is skipped."""
    message = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"baton.v1.{kind}")).FromString(raw)
    message.DiscardUnknownFields()
    return message


def vector(group: str, name: str) -> bytes:
    """What the older version wrote."""
    return bytes.fromhex(VECTORS[group][name])


def as_older(message: Any) -> Any:
    """A hello as the older version says it."""
    return replace(message, protocol_minor=MINOR) if isinstance(message, GatewayHello | WorkerHello) else message


def gateway_bytes(message: Any) -> bytes:
    return wire.serialize_gateway_message(message)


def worker_bytes(message: Any) -> bytes:
    return wire.pack_worker_message(message).SerializeToString()


@pytest.mark.parametrize("name", examples.gateway_messages())
def test_what_an_older_gateway_says_is_read_as_it_was_meant(name: str):
    expected = as_older(examples.gateway_messages()[name])
    parsed = wire.parse_gateway_message(worker_pb2.GatewayMessage.FromString(vector("gateway", name)))
    if isinstance(expected, Commands):
        assert isinstance(parsed, Commands)
        for one, other in zip(parsed.commands, expected.commands, strict=True):
            assert_same(one, other)
    else:
        assert_same(parsed, expected)


@pytest.mark.parametrize("name", examples.worker_messages())
def test_what_an_older_worker_says_is_read_as_it_was_meant(name: str):
    assert_same(wire.deserialize_worker_message(vector("worker", name)), as_older(examples.worker_messages()[name]))


@pytest.mark.parametrize("name", examples.gateway_messages())
def test_an_older_worker_reads_what_a_gateway_says(name: str):
    raw = gateway_bytes(as_older(examples.gateway_messages()[name]))
    assert older("GatewayMessage", raw) == older("GatewayMessage", vector("gateway", name))


@pytest.mark.parametrize("name", examples.worker_messages())
def test_an_older_gateway_reads_what_a_worker_says(name: str):
    raw = worker_bytes(as_older(examples.worker_messages()[name]))
    assert older("WorkerMessage", raw) == older("WorkerMessage", vector("worker", name))


def test_an_older_worker_skips_new_fields_of_a_capsule():
    """Those that it must act on are in `Capsule.needs`: no gateway sends them to a worker that does not know them."""
    submit = examples.gateway_messages()["submit"]
    assert isinstance(submit, Submit)
    sampling = replace(submit.capsule.sampling, grammar="x", allowed_token_ids=(1,), logprob_token_ids=(2,))
    capsule = replace(submit.capsule, sampling=sampling, cache_salt="salt", priority=3, pooling=Pooling.MEAN)
    capsule = replace(capsule, second_text=2)
    raw = gateway_bytes(replace(submit, capsule=capsule))
    assert raw != vector("gateway", "submit")
    assert older("GatewayMessage", raw) == older("GatewayMessage", vector("gateway", "submit"))


def test_an_older_gateway_skips_new_fields_of_hellos_and_frames():
    hello = examples.worker_messages()["worker hello"]
    assert isinstance(hello, WorkerHello)
    newer = replace(as_older(hello), embedding_size=64, knows=frozenset({"cache_salt", "embeddings", "grammar"}))
    assert older("WorkerMessage", worker_bytes(newer)) == older("WorkerMessage", vector("worker", "worker hello"))
    frame: Frame = a_frame()
    assert frame.embeddings is not None
    without = worker_bytes(replace(frame, embeddings=None))
    assert older("WorkerMessage", worker_bytes(frame)) == older("WorkerMessage", without)


@pytest.mark.parametrize("name", examples.kv_messages())
def test_workers_of_both_versions_say_the_same_to_each_other(name: str):
    message = examples.kv_messages()[name]
    assert type(message).FromString(vector("kv", name)) == message
    raw = message.SerializeToString()
    assert older(message.DESCRIPTOR.name, raw) == older(message.DESCRIPTOR.name, vector("kv", name))


@pytest.mark.parametrize("name", ["announcement", "ended", "pulse"])
def test_what_an_older_producer_says_is_read(name: str):
    message = kv_pb2.ProducerMessage.FromString(vector("kv", name))
    assert kv_wire.pack_to_consumer(kv_wire.parse_to_consumer(message)) == message


def test_no_field_of_the_older_version_has_another_number_or_type():
    changed = []
    for file in FILES:
        for before in POOL.FindFileByName(file.DESCRIPTOR.name).message_types_by_name.values():
            after = file.DESCRIPTOR.message_types_by_name.get(before.name)
            for field in before.fields:
                now = None if after is None else after.fields_by_name.get(field.name)
                if now is None or (now.number, now.type, now.is_repeated) != (
                    field.number,
                    field.type,
                    field.is_repeated,
                ):
                    changed.append(f"{before.name}.{field.name}")
    assert changed == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("GatewayMessage", worker_pb2.GatewayMessage),
        ("Command", worker_pb2.Command),
        ("WorkerMessage", worker_pb2.WorkerMessage),
        ("ConsumerMessage", kv_pb2.ConsumerMessage),
        ("ProducerMessage", kv_pb2.ProducerMessage),
    ],
)
def test_there_is_no_message_that_an_older_neighbour_takes_for_an_empty_one(kind: str, message: type[Message]):
    """An older reader ends the stream for it. A new one needs an entry of `Since` and a look at the version."""
    known = set(POOL.FindMessageTypeByName(f"baton.v1.{kind}").fields_by_name)
    assert set(message.DESCRIPTOR.fields_by_name) == known | SINCE_THEN.get(kind, set())


def test_there_is_no_finish_reason_that_an_older_gateway_refuses():
    """As above: it ends the stream for a number that it does not know."""
    assert [reason.value for reason in FinishReason] == [0, 1, 2]


@pytest.mark.parametrize("name", ["fingerprint", "block hashes"])
def test_caches_have_the_names_that_they_had(name: str):
    """Else workers of both versions would not be paired, or would not find each other's prefixes."""
    assert examples.names()[name] == VECTORS["names"][name]


def test_records_of_the_registry_are_read_by_either_version():
    now, then = examples.names()["record"], VECTORS["names"]["record"]
    assert WorkerRecord.from_json(then.encode()) == WorkerRecord.from_json(now.encode())
    assert json.loads(then).items() <= json.loads(now).items()


@pytest.mark.parametrize("name", examples.configs())
def test_a_child_takes_the_configuration_of_an_older_baton_up(name: str, monkeypatch: pytest.MonkeyPatch):
    """As `baton restart` has it after an upgrade. Settings that are new have their defaults."""
    config = examples.configs()[name]
    (variable,) = child_config.environment(config)
    monkeypatch.setenv(variable, VECTORS["configs"][name])
    assert repr(child_config.take(type(config))) == repr(config)


def test_a_child_refuses_a_setting_that_its_version_does_not_have(monkeypatch: pytest.MonkeyPatch):
    config = examples.configs()["gateway"]
    (variable,) = child_config.environment(config)
    for spoiled in ({"gone": 1}, {"model": None}):
        values = json.loads(VECTORS["configs"]["gateway"]) | spoiled
        if values["model"] is None:
            del values["model"]
        monkeypatch.setenv(variable, json.dumps(values))
        with pytest.raises(Refusal, match=f"differs in the setting {next(iter(spoiled))}: end it"):
            child_config.take(type(config))
