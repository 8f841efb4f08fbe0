from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConsumerMessage(_message.Message):
    __slots__ = ("hello", "open", "release")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    hello: ConsumerHello
    open: Open
    release: Release
    def __init__(self, hello: _Optional[_Union[ConsumerHello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...

class ProducerMessage(_message.Message):
    __slots__ = ("hello", "announcement", "ended", "pulse")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCEMENT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    PULSE_FIELD_NUMBER: _ClassVar[int]
    hello: ProducerHello
    announcement: Announcement
    ended: Ended
    pulse: Pulse
    def __init__(self, hello: _Optional[_Union[ProducerHello, _Mapping]] = ..., announcement: _Optional[_Union[Announcement, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ..., pulse: _Optional[_Union[Pulse, _Mapping]] = ...) -> None: ...

class ConsumerHello(_message.Message):
    __slots__ = ("kv_protocol", "fingerprint", "incarnation", "transports", "hears_pulses", "reads_regions", "reads_parts")
    KV_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HEARS_PULSES_FIELD_NUMBER: _ClassVar[int]
    READS_REGIONS_FIELD_NUMBER: _ClassVar[int]
    READS_PARTS_FIELD_NUMBER: _ClassVar[int]
    kv_protocol: int
    fingerprint: str
    incarnation: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    hears_pulses: bool
    reads_regions: bool
    reads_parts: bool
    def __init__(self, kv_protocol: _Optional[int] = ..., fingerprint: _Optional[str] = ..., incarnation: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., hears_pulses: _Optional[bool] = ..., reads_regions: _Optional[bool] = ..., reads_parts: _Optional[bool] = ...) -> None: ...

class ProducerHello(_message.Message):
    __slots__ = ("kv_protocol", "fingerprint", "incarnation", "offers", "process", "sends_pulses", "serves_ranges")
    KV_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    SENDS_PULSES_FIELD_NUMBER: _ClassVar[int]
    SERVES_RANGES_FIELD_NUMBER: _ClassVar[int]
    kv_protocol: int
    fingerprint: str
    incarnation: int
    offers: _containers.RepeatedCompositeFieldContainer[Offer]
    process: Process
    sends_pulses: bool
    serves_ranges: bool
    def __init__(self, kv_protocol: _Optional[int] = ..., fingerprint: _Optional[str] = ..., incarnation: _Optional[int] = ..., offers: _Optional[_Iterable[_Union[Offer, _Mapping]]] = ..., process: _Optional[_Union[Process, _Mapping]] = ..., sends_pulses: _Optional[bool] = ..., serves_ranges: _Optional[bool] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("boot_id", "pid_namespace", "pid", "start_ticks")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    START_TICKS_FIELD_NUMBER: _ClassVar[int]
    boot_id: str
    pid_namespace: int
    pid: int
    start_ticks: int
    def __init__(self, boot_id: _Optional[str] = ..., pid_namespace: _Optional[int] = ..., pid: _Optional[int] = ..., start_ticks: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("transport", "descriptor")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    transport: str
    descriptor: bytes
    def __init__(self, transport: _Optional[str] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class HandoffId(_message.Message):
    __slots__ = ("gateway", "handle")
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    gateway: int
    handle: int
    def __init__(self, gateway: _Optional[int] = ..., handle: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("id", "producer")
    ID_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    producer: int
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., producer: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ...) -> None: ...

class Announcement(_message.Message):
    __slots__ = ("id", "first_index", "blocks", "generations", "first_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    first_index: int
    blocks: bytes
    generations: bytes
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., first_index: _Optional[int] = ..., blocks: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token", "logprobs", "handle")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    token: int
    logprobs: _worker_pb2.Logprobs
    handle: int
    def __init__(self, token: _Optional[int] = ..., logprobs: _Optional[_Union[_worker_pb2.Logprobs, _Mapping]] = ..., handle: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("id", "reason")
    ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    id: HandoffId
    reason: int
    def __init__(self, id: _Optional[_Union[HandoffId, _Mapping]] = ..., reason: _Optional[int] = ...) -> None: ...

class Pulse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("key", "blocks", "generations", "ranges", "no_data", "no_words")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    NO_DATA_FIELD_NUMBER: _ClassVar[int]
    NO_WORDS_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    blocks: bytes
    generations: bytes
    ranges: bytes
    no_data: bool
    no_words: bool
    def __init__(self, key: _Optional[bytes] = ..., blocks: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., ranges: _Optional[bytes] = ..., no_data: _Optional[bool] = ..., no_words: _Optional[bool] = ...) -> None: ...

class ReadPiece(_message.Message):
    __slots__ = ("data", "generations", "over")
    DATA_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    generations: bytes
    over: bool
    def __init__(self, data: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., over: _Optional[bool] = ...) -> None: ...
