"""Messages that an older version and this one both know, and their bytes.

As a program it prints what the version that it runs with makes of them, which is how `vectors.json` was written, in a
checkout of the commit that tests/e2e/older.py names:

    PYTHONPATH=CHECKOUT python tests/protocol/older/examples.py > tests/protocol/older/vectors.json
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.ids import AttemptId, GatewayId, WorkerId
from kvtransfer.layout import KvLayout, fingerprint
from kvtransfer.messages import Announcement, Ended, EndReason, FirstToken, Open, Pulse, Release
from kvtransfer.process import ProcessIdentity
from kvtransfer.transports.byte_stream import ByteRequest
from protos import kv_pb2, sampling_pb2, worker_pb2
from services.config import WorkerRole
from services.config.engine import EngineConfig
from services.prefix_index.registry import WorkerRecord
from services.process import child_config
from services.process.configs import GatewayConfig, ProcessSettings, ServingSettings, WorkerConfig, WorkerSettings
from services.protocol import wire
from services.protocol.block_hash import BlockHash, block_hashes, root_hash
from services.protocol.capsule import Capsule
from services.protocol.frames import Failure, Frame, Load, PackedLogprobs, Timing, TokenLogprobs
from services.protocol.messages import (
    Abort,
    BlockEvents,
    Commands,
    GatewayHello,
    GatewayMessage,
    HandTo,
    Submit,
    TakeFrom,
    WorkerHello,
    WorkerMessage,
)
from services.protocol.outcomes import FailureCode
from services.protocol.sampling import SamplingParams
from services.worker import kv_wire

ID = AttemptId(GatewayId(2**64 - 2), 7)
SAMPLING = SamplingParams(
    max_tokens=12, temperature=0.5, top_p=0.75, top_k=40, min_p=0.125, seed=2**64 - 1, min_tokens=3, ignore_eos=True,
    stop_token_ids=(5, 6), num_logprobs=0, num_prompt_logprobs=2, presence_penalty=-0.5, frequency_penalty=1.5,
    repetition_penalty=1.25, logit_bias=((3, -100.0), (7, 0.5)), bad_words=((1,), (2, 3)),
)  # fmt: skip
_CAPSULE = Capsule(np.array([1, 2, 3, 4], np.int32), 3, SAMPLING)


def gateway_messages() -> dict[str, GatewayMessage]:
    """Returns what a gateway says to a worker."""
    producer, consumer = HandTo(WorkerId(2**64 - 3)), TakeFrom("[::1]:9100", WorkerId(5))
    return {
        "gateway hello": GatewayHello(GatewayId(2**64 - 2), 77, wants_block_events=False),
        "abort": Abort(5),
        "submit": Submit(6, _CAPSULE, 1.5, "request"),
        "commands": Commands(
            (Submit(7, _CAPSULE, 1.5, "a", producer), Submit(8, _CAPSULE, 2.5, "b", consumer, (9, 10)), Abort(8))
        ),
    }


def worker_messages() -> dict[str, WorkerMessage]:
    """Returns what a worker says to a gateway."""
    hello = WorkerHello(
        worker_id=WorkerId(2**64 - 3), role=WorkerRole.DECODE, fingerprint="abc", kv_protocol=2,
        transports=("nixl", "grpc"), block_size=16, num_blocks=7, max_model_len=2048, max_num_seqs=5, vocab_size=99,
        model="c0ffee", kernels="avx2",
    )  # fmt: skip
    frame = Frame(
        handles=np.array([7, 9], np.uint32),
        positions=np.array([3, 0], np.uint32),
        counts=np.array([2, 0], np.uint32),
        tokens=np.array([11, 12], np.int32),
        finish=np.array([0, 2], np.uint8),
        cached=np.array([-1, 32], np.int32),
        logprobs=PackedLogprobs(
            widths=np.array([1, -1], np.int32),
            sampled=np.array([-0.5, -1.5], np.float32),
            top_ids=np.array([11, 12], np.int32),
            top=np.array([-0.5, -1.25], np.float32),
        ),
        failures=[Failure(4, FailureCode.DRAINING, "drains"), Failure(5, FailureCode.HANDOFF, "", EndReason.STALE)],
        timings=[Timing(4, None, 0.25, None, 1.5, _moved("nixl"))],
        load=Load(1, 2, 3, 4, 5, (WorkerId(6),), 2**40, 7, 8, True),
    )
    events = BlockEvents(2**40, True, [BlockHash(bytes(range(16)))], [BlockHash(b"y" * 16)])
    return {"worker hello": hello, "frame": frame, "block events": events}


def _moved(transport: str) -> Any:
    """How blocks came; the older version knows the transport's name alone."""
    if importlib.util.find_spec("kvtransfer.moved") is None:
        return transport
    return importlib.import_module("kvtransfer.moved").Moved(transport)


def kv_messages() -> dict[str, Any]:
    """Returns what workers say to each other, as protobuf, hellos and bytes included."""
    logprobs = TokenLogprobs(-0.5, ((11, -0.5),))
    announcement = Announcement(ID, 3, (4, 5), (2**40, 2**41), (FirstToken(7, 11, logprobs), FirstToken(8, 12, None)))
    process = kv_wire.pack_process(ProcessIdentity("boot", 4, 77, 99))
    offer = kv_pb2.Offer(transport="grpc", descriptor=b"key")
    words = np.array([2**40], np.uint64)
    return {
        "open": kv_wire.pack_to_producer(Open(ID, WorkerId(5))),
        "release": kv_wire.pack_to_producer(Release(ID)),
        "announcement": kv_wire.pack_to_consumer(announcement),
        "ended": kv_wire.pack_to_consumer(Ended(ID, EndReason.STALLED)),
        "pulse": kv_wire.pack_to_consumer(Pulse()),
        "read": kv_wire.pack_read(ByteRequest(b"key", np.array([4], np.uint32), words)),
        "words": kv_wire.pack_words(words),
        "consumer hello": kv_pb2.ConsumerMessage(
            hello=kv_pb2.ConsumerHello(
                kv_protocol=2, fingerprint="abc", incarnation=5, transports=["nixl", "grpc"], hears_pulses=True
            )
        ),
        "producer hello": kv_pb2.ProducerMessage(
            hello=kv_pb2.ProducerHello(
                kv_protocol=2, fingerprint="abc", incarnation=5, offers=[offer], process=process, sends_pulses=True
            )
        ),
    }


def configs() -> dict[str, GatewayConfig | WorkerConfig]:
    """Returns what `baton up` hands to its children."""
    process = ProcessSettings(redis_url="redis://127.0.0.1:1", drain_timeout_s=7.0)
    serving = ServingSettings(served_model_name="name", port=1, grpc_port=2, handoff_threshold=9)
    workers = WorkerSettings(engine=EngineConfig(model=Path("m"), max_num_seqs=3, worker_index=1, num_workers=2))
    return {
        "gateway": GatewayConfig(model=Path("m"), serving=serving, process=process, http_fd=5),
        "prefill": WorkerConfig(role=WorkerRole.PREFILL, port=9, workers=workers, process=process),
    }


def names() -> dict[str, str]:
    """Returns what two workers must compute alike for their caches to be shared, and a record of the registry."""
    layout = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    hashes = block_hashes(root_hash("abc"), np.arange(9, dtype=np.int32), 4)
    record = WorkerRecord("127.0.0.1:9100", "decode", WorkerId(2**64 - 3), "c0ffee", "abc", 16, 7)
    return {
        "fingerprint": fingerprint(layout, "weights", {"theta": 1e4}),
        "block hashes": b"".join(hashes).hex(),
        "record": record.to_json().decode(),
    }


def _vectors() -> dict[str, dict[str, str]]:
    files = (sampling_pb2, worker_pb2, kv_pb2)  # each after those that it imports
    return {
        "protos": {file.DESCRIPTOR.name: file.DESCRIPTOR.serialized_pb.hex() for file in files},
        "gateway": {name: wire.serialize_gateway_message(each).hex() for name, each in gateway_messages().items()},
        "worker": {
            name: wire.pack_worker_message(each).SerializeToString().hex() for name, each in worker_messages().items()
        },
        "kv": {name: each.SerializeToString().hex() for name, each in kv_messages().items()},
        "configs": {name: next(iter(child_config.environment(each).values())) for name, each in configs().items()},
        "names": names(),
    }


if __name__ == "__main__":
    json.dump(_vectors(), sys.stdout, indent=1)
    sys.stdout.write("\n")
