"""Hellos, the first message of either side, and the news that change what a worker's hello said.

On the wire a hello says two of a worker's capabilities a second time, in fields that are older than their names in
`knows`: gateways of older versions read those alone, and older workers write no others. Nothing else knows of them.
"""

from kvtransfer.ids import WorkerId
from protos import worker_pb2
from services.config import WorkerRole
from services.protocol.capabilities import EMBEDDINGS, GRAMMAR
from services.protocol.messages import GatewayHello, WorkerHello, WorkerNews
from services.protocol.wire.errors import WireError
from services.protocol.wire.fields import SharedFields

_ROLES = {WorkerRole.PREFILL: worker_pb2.ROLE_PREFILL, WorkerRole.DECODE: worker_pb2.ROLE_DECODE}
_ROLE_NAMES = {number: role for role, number in _ROLES.items()}

_OF_GATEWAY = SharedFields("protocol_major", "protocol_minor", "gateway", "highest_handle")
_OF_WORKER = SharedFields(
    "protocol_major",
    "protocol_minor",
    "fingerprint",
    "kv_protocol",
    "block_size",
    "num_blocks",
    "max_model_len",
    "max_num_seqs",
    "vocab_size",
    "model",
    "kernels",
    "time_us",
    "embedding_size",
    "kv_token_bytes",
    "weight_bytes",
    "shares_weights",
    "num_ranks",
)


def pack_gateway_hello(hello: GatewayHello) -> worker_pb2.GatewayHello:
    """Packs a gateway's hello."""
    return worker_pb2.GatewayHello(**_OF_GATEWAY.of(hello), without_block_events=not hello.wants_block_events)


def parse_gateway_hello(packed: worker_pb2.GatewayHello) -> GatewayHello:
    """Parses a gateway's hello."""
    return GatewayHello(**_OF_GATEWAY.of(packed), wants_block_events=not packed.without_block_events)


def pack_worker_hello(hello: WorkerHello) -> worker_pb2.WorkerHello:
    """Packs a worker's hello."""
    return worker_pb2.WorkerHello(
        **_OF_WORKER.of(hello),
        incarnation=hello.worker_id,
        role=_ROLES[hello.role],
        transports=hello.transports,
        knows=sorted(hello.knows),
        guides=GRAMMAR in hello.knows,
    )


def parse_worker_hello(packed: worker_pb2.WorkerHello) -> WorkerHello:
    """Parses a worker's hello. Raises WireError."""
    role = _ROLE_NAMES.get(packed.role)
    if role is None or packed.block_size < 1:
        raise WireError(f"a hello with role {packed.role} and block size {packed.block_size}")
    return WorkerHello(
        **_OF_WORKER.of(packed),
        worker_id=WorkerId(packed.incarnation),
        role=role,
        transports=tuple(packed.transports),
        knows=frozenset(packed.knows) | _said_by_older_fields(packed),
    )


def pack_worker_news(news: WorkerNews) -> worker_pb2.WorkerNews:
    """Packs a worker's news."""
    return worker_pb2.WorkerNews(knows=sorted(news.knows), embedding_size=news.embedding_size)


def parse_worker_news(packed: worker_pb2.WorkerNews) -> WorkerNews:
    """Parses a worker's news."""
    return WorkerNews(frozenset(packed.knows), packed.embedding_size)


def _said_by_older_fields(packed: worker_pb2.WorkerHello) -> frozenset[str]:
    said = {GRAMMAR: packed.guides, EMBEDDINGS: packed.embedding_size > 0}
    return frozenset(name for name, known in said.items() if known)
