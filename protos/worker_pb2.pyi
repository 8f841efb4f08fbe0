from protos import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("done", "moved")
    DONE_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    done: bool
    moved: int
    def __init__(self, done: _Optional[bool] = ..., moved: _Optional[int] = ...) -> None: ...

class GatewayMessage(_message.Message):
    __slots__ = ("hello", "submit", "abort", "commands")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    hello: GatewayHello
    submit: Submit
    abort: Abort
    commands: Commands
    def __init__(self, hello: _Optional[_Union[GatewayHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., commands: _Optional[_Union[Commands, _Mapping]] = ...) -> None: ...

class Commands(_message.Message):
    __slots__ = ("commands",)
    COMMANDS_FIELD_NUMBER: _ClassVar[int]
    commands: _containers.RepeatedCompositeFieldContainer[Command]
    def __init__(self, commands: _Optional[_Iterable[_Union[Command, _Mapping]]] = ...) -> None: ...

class Command(_message.Message):
    __slots__ = ("submit", "abort")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "gateway", "highest_handle", "without_block_events")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_HANDLE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_BLOCK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    gateway: int
    highest_handle: int
    without_block_events: bool
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., gateway: _Optional[int] = ..., highest_handle: _Optional[int] = ..., without_block_events: _Optional[bool] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("handle", "capsule", "timeout_s", "request_id", "hand_to", "take_from", "seeds")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CAPSULE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    HAND_TO_FIELD_NUMBER: _ClassVar[int]
    TAKE_FROM_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    capsule: _sampling_pb2.Capsule
    timeout_s: float
    request_id: str
    hand_to: HandTo
    take_from: TakeFrom
    seeds: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[int] = ..., capsule: _Optional[_Union[_sampling_pb2.Capsule, _Mapping]] = ..., timeout_s: _Optional[float] = ..., request_id: _Optional[str] = ..., hand_to: _Optional[_Union[HandTo, _Mapping]] = ..., take_from: _Optional[_Union[TakeFrom, _Mapping]] = ..., seeds: _Optional[_Iterable[int]] = ...) -> None: ...

class HandTo(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class TakeFrom(_message.Message):
    __slots__ = ("address", "incarnation")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: int
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: int
    def __init__(self, handle: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "frame", "blocks", "news")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    FRAME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NEWS_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    frame: Frame
    blocks: BlockEvents
    news: WorkerNews
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., frame: _Optional[_Union[Frame, _Mapping]] = ..., blocks: _Optional[_Union[BlockEvents, _Mapping]] = ..., news: _Optional[_Union[WorkerNews, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "incarnation", "role", "fingerprint", "kv_protocol", "transports", "block_size", "num_blocks", "max_model_len", "max_num_seqs", "vocab_size", "model", "kernels", "guides", "time_us", "embedding_size", "kv_token_bytes", "weight_bytes", "shares_weights", "num_ranks", "knows")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    GUIDES_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARES_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    KNOWS_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    incarnation: int
    role: Role
    fingerprint: str
    kv_protocol: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    model: str
    kernels: str
    guides: bool
    time_us: int
    embedding_size: int
    kv_token_bytes: int
    weight_bytes: int
    shares_weights: bool
    num_ranks: int
    knows: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., incarnation: _Optional[int] = ..., role: _Optional[_Union[Role, str]] = ..., fingerprint: _Optional[str] = ..., kv_protocol: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., vocab_size: _Optional[int] = ..., model: _Optional[str] = ..., kernels: _Optional[str] = ..., guides: _Optional[bool] = ..., time_us: _Optional[int] = ..., embedding_size: _Optional[int] = ..., kv_token_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ..., shares_weights: _Optional[bool] = ..., num_ranks: _Optional[int] = ..., knows: _Optional[_Iterable[str]] = ...) -> None: ...

class WorkerNews(_message.Message):
    __slots__ = ("knows", "embedding_size")
    KNOWS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_SIZE_FIELD_NUMBER: _ClassVar[int]
    knows: _containers.RepeatedScalarFieldContainer[str]
    embedding_size: int
    def __init__(self, knows: _Optional[_Iterable[str]] = ..., embedding_size: _Optional[int] = ...) -> None: ...

class Frame(_message.Message):
    __slots__ = ("handles", "positions", "counts", "tokens", "finish", "cached", "logprobs", "failures", "load", "timings", "embeddings")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    positions: bytes
    counts: bytes
    tokens: bytes
    finish: bytes
    cached: bytes
    logprobs: Logprobs
    failures: _containers.RepeatedCompositeFieldContainer[Failure]
    load: Load
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    embeddings: Embeddings
    def __init__(self, handles: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., counts: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., finish: _Optional[bytes] = ..., cached: _Optional[bytes] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., failures: _Optional[_Iterable[_Union[Failure, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., embeddings: _Optional[_Union[Embeddings, _Mapping]] = ...) -> None: ...

class Embeddings(_message.Message):
    __slots__ = ("handles", "cached", "values")
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    handles: bytes
    cached: bytes
    values: bytes
    def __init__(self, handles: _Optional[bytes] = ..., cached: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("handle", "announced_us", "admitted_us", "ready_us", "sent_us", "transport", "why", "kv_bytes", "reading_us")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_US_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_US_FIELD_NUMBER: _ClassVar[int]
    READY_US_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    READING_US_FIELD_NUMBER: _ClassVar[int]
    handle: int
    announced_us: int
    admitted_us: int
    ready_us: int
    sent_us: int
    transport: str
    why: str
    kv_bytes: int
    reading_us: int
    def __init__(self, handle: _Optional[int] = ..., announced_us: _Optional[int] = ..., admitted_us: _Optional[int] = ..., ready_us: _Optional[int] = ..., sent_us: _Optional[int] = ..., transport: _Optional[str] = ..., why: _Optional[str] = ..., kv_bytes: _Optional[int] = ..., reading_us: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("widths", "sampled", "top_ids", "top", "ranks")
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    widths: bytes
    sampled: bytes
    top_ids: bytes
    top: bytes
    ranks: bytes
    def __init__(self, widths: _Optional[bytes] = ..., sampled: _Optional[bytes] = ..., top_ids: _Optional[bytes] = ..., top: _Optional[bytes] = ..., ranks: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("handle", "code", "detail", "end_reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    END_REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: int
    detail: str
    end_reason: int
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[int] = ..., detail: _Optional[str] = ..., end_reason: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "available_blocks", "quarantined_blocks", "avoid", "bytes_moved", "gc_collections", "gc_pause_us", "draining", "computed_tokens", "not_finite", "evicted_blocks", "worst_expert_imbalance", "mean_expert_imbalance", "worst_rank_imbalance", "mean_rank_imbalance", "slowest_rank", "waited_for_slowest_rank")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AVOID_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    GC_COLLECTIONS_FIELD_NUMBER: _ClassVar[int]
    GC_PAUSE_US_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    WORST_EXPERT_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    MEAN_EXPERT_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    WORST_RANK_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    MEAN_RANK_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    SLOWEST_RANK_FIELD_NUMBER: _ClassVar[int]
    WAITED_FOR_SLOWEST_RANK_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    available_blocks: int
    quarantined_blocks: int
    avoid: _containers.RepeatedScalarFieldContainer[int]
    bytes_moved: int
    gc_collections: int
    gc_pause_us: int
    draining: bool
    computed_tokens: int
    not_finite: int
    evicted_blocks: int
    worst_expert_imbalance: float
    mean_expert_imbalance: float
    worst_rank_imbalance: float
    mean_rank_imbalance: float
    slowest_rank: int
    waited_for_slowest_rank: float
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., available_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., avoid: _Optional[_Iterable[int]] = ..., bytes_moved: _Optional[int] = ..., gc_collections: _Optional[int] = ..., gc_pause_us: _Optional[int] = ..., draining: _Optional[bool] = ..., computed_tokens: _Optional[int] = ..., not_finite: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., worst_expert_imbalance: _Optional[float] = ..., mean_expert_imbalance: _Optional[float] = ..., worst_rank_imbalance: _Optional[float] = ..., mean_rank_imbalance: _Optional[float] = ..., slowest_rank: _Optional[int] = ..., waited_for_slowest_rank: _Optional[float] = ...) -> None: ...

class BlockEvents(_message.Message):
    __slots__ = ("sequence", "snapshot", "added", "evicted")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    snapshot: bool
    added: bytes
    evicted: bytes
    def __init__(self, sequence: _Optional[int] = ..., snapshot: _Optional[bool] = ..., added: _Optional[bytes] = ..., evicted: _Optional[bytes] = ...) -> None: ...
