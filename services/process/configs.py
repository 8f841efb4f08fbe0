"""One frozen configuration per process, with its options.

Settings that several processes have are parts, each written once:

    UpConfig        serving + workers            + process
    GatewayConfig   serving                      + process
    WorkerConfig              workers            + process
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from services.config import (
    API_KEY_VARIABLE,
    GC_DEBUG_VARIABLE,
    KEYS_VARIABLE,
    MTLS_VARIABLE,
    REDIS_URL_VARIABLE,
    HandoffMode,
    LogFormat,
    Pooling,
    ReasoningParser,
    ToolParser,
    TransportName,
    WorkerRole,
)
from services.config.engine import EngineConfig
from services.config.group import GroupSettings
from services.config.hosts import AddressError, split_address
from services.config.option import Option, OptionError, Refusal, Variable
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.info import SAMPLING_RANGES, sampling_defaults

MAX_API_KEY = 512  # characters
OWN_PATHS = ("/v1", "/v2", "/docs", "/inference", "/console")  # beginnings of the API's paths with several parts

# Panels of the help text.
_MODEL, _ADDRESSES, _SECURITY = "Model", "Addresses and ports", "Keys, TLS and who may connect"
_ROUTING, _ANSWERS, _LIMITS, _PROCESSES = "Handoffs", "Requests and answers", "Limits of requests", "Processes"


def parse_workers(text: str) -> tuple[str, ...]:
    """The addresses of `host:port,host:port`. Raises OptionError."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        try:
            split_address(address)
        except AddressError as error:
            raise OptionError(str(error)) from error
    if not addresses:
        raise OptionError("name at least one worker as host:port")
    return addresses


def parse_origins(text: str) -> tuple[str, ...]:
    """The origins of `https://a,https://b`, or `*`. Raises OptionError."""
    origins = tuple(part.strip() for part in text.split(",") if part.strip())
    for origin in origins:
        if origin != "*" and re.fullmatch(r"https?://[^/\s]+", origin) is None:
            raise OptionError(f"{origin!r} is not an origin, such as https://chat.example.com")
    return origins


def parse_root_path(text: str) -> str:
    """The prefix of paths of `/a/b`, without a slash at its end. Raises OptionError."""
    prefix = text.rstrip("/")
    if re.fullmatch(r"(/[\w.~-]+)*", prefix, re.ASCII) is None:
        raise OptionError(f"{text!r} is not the beginning of a path, such as /models/chat")
    if prefix.startswith(tuple(f"{own}/" for own in OWN_PATHS)) or prefix in OWN_PATHS:
        raise OptionError(f"{text!r} is the beginning of the API's own paths")
    return prefix


def parse_model_names(text: str) -> str:
    """The names of `name,name`, without spaces around them. Raises OptionError."""
    names = [part.strip() for part in text.split(",")]
    if not all(names) or len(set(names)) < len(names):
        raise OptionError(f"{text!r} has an empty name, or one name twice")
    return ",".join(names)


def parse_model_aliases(text: str) -> tuple[str, ...]:
    """The aliases of `pattern=name,pattern=name`. Raises OptionError."""
    aliases = tuple(part.strip() for part in text.split(",") if part.strip())
    for alias in aliases:
        if not all(alias.rpartition("=")):
            raise OptionError(f"{alias!r} is not PATTERN=NAME, such as 'claude-*=NAME'")
    return aliases


def parse_api_keys(text: str) -> tuple[str, ...]:
    """The keys of `key,key`. Raises OptionError, whose words have nothing of a key."""
    keys = tuple(part.strip() for part in text.split(",") if part.strip())
    for key in keys:
        if len(key) > MAX_API_KEY or not key.isascii() or not key.isprintable() or " " in key:
            raise OptionError(f"a key has at most {MAX_API_KEY} printable characters of ASCII, and no spaces")
    return keys


def parse_redis_url(text: str) -> str:
    """The URL of a Redis or Valkey server, or of a node of a cluster. Raises OptionError."""
    from redis.asyncio.connection import parse_url

    try:
        options = parse_url(text.replace("+cluster://", "://", 1))
    except ValueError:  # its words may hold a part of the password
        schemes = "redis://, rediss:// (TLS), unix://, redis+cluster:// and rediss+cluster://"
        raise OptionError(f"this is no URL of a Redis server; known are {schemes}") from None
    if "ssl_min_version" in options:
        raise OptionError("TLS to Redis is 1.3: leave ssl_min_version out")
    return text


def parse_generation_config(text: str) -> dict[str, float]:
    """The sampling values of a JSON object, named as in generation_config.json. Raises Refusal."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise Refusal('--override-generation-config is a JSON object, such as {"temperature": 0.2}')
    if unknown := sorted(values.keys() - SAMPLING_RANGES.keys()):
        raise Refusal(f"--override-generation-config: {unknown[0]} is not known ({', '.join(SAMPLING_RANGES)} are)")
    try:
        return sampling_defaults(values, "--override-generation-config")
    except ModelError as error:
        raise Refusal(str(error)) from error


def parse_gc_debug(text: str) -> int | None:
    """The number of types to log with each garbage collection, from off, on or top=N; None: log nothing.

    Raises Refusal.
    """
    match = re.fullmatch(r"(off|)|(on)|top=([1-9]\d{0,3})", text.strip().lower())
    if match is None:
        raise Refusal(f"{GC_DEBUG_VARIABLE} is {text!r}; it is off, on, or top=N with N from 1 to 9999")
    if match[3] is not None:
        return int(match[3])
    return 0 if match[2] else None


MTLS_HELP = (
    "Directory with tls.crt, tls.key and ca.crt, as a Secret of cert-manager has them: mutual TLS between gateways and "
    "workers, and to Redis where its URL is rediss://. New connections use what the files have then."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """The settings of every process."""

    redis_url: Annotated[
        str | None,
        Option(
            panel=_PROCESSES,
            parse=parse_redis_url,
            metavar="URL",
            variable=REDIS_URL_VARIABLE,
            help="Redis or Valkey with the prefix index and the registry of workers: redis://user:password@host:6379. "
            "In the environment a password is safer from other users of the machine.",
        ),
    ] = None
    mtls: Annotated[Path | None, Option(panel=_SECURITY, metavar="DIR", variable=MTLS_VARIABLE, help=MTLS_HELP)] = None
    log_format: Annotated[
        LogFormat, Option(panel=_PROCESSES, help="Log lines for people, or one JSON object a line.")
    ] = LogFormat.TEXT
    drain_timeout_s: Annotated[
        float,
        Option(
            flag="--drain-timeout",
            min=0,
            metavar="SECONDS",
            help="How long requests may go on after SIGTERM, SIGINT or SIGHUP, while no new ones are taken. A worker's "
            "that do not end continue on other workers, a gateway's get an error. A second signal ends the process at "
            "once.",
        ),
    ] = 30.0
    # Each garbage collection is logged, with so many of the types that it looked at. None: it is not.
    logged_gc_types: Annotated[int | None, Variable(GC_DEBUG_VARIABLE, parse_gc_debug)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSettings:
    """The way in which a gateway serves its clients."""

    served_model_name: Annotated[
        str,
        Option(
            panel=_MODEL,
            parse=parse_model_names,
            metavar="NAME,...",
            help="What clients call the model; answers carry the first name. Default: its id, or the name of its "
            "directory or file.",
        ),
    ]
    model_aliases: Annotated[
        tuple[str, ...],
        Option(
            flag="--model-alias",
            parse=parse_model_aliases,
            repeats=True,
            metavar="PATTERN=NAME",
            help="Another name that clients may ask for, and the served one that it stands for: 'claude-*=NAME'. The "
            "pattern is a shell's: *, ? and [...]. May be given several times.",
        ),
    ] = ()
    host: Annotated[
        str,
        Option(panel=_ADDRESSES, help="Address to listen on for clients. Another than loopback needs keys, and TLS."),
    ] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on for clients; 0: a free one.")] = 8000
    grpc_port: Annotated[
        int, Option(min=0, max=65535, help="Port to listen on for gRPC clients, at --host too; 0: a free one.")
    ] = 9000
    tls_cert: Annotated[
        Path | None,
        Option(
            panel=_SECURITY,
            metavar="FILE",
            help="Certificate, with those between it and its root, for TLS with clients and at the admin port: 1.3 "
            "over HTTP, 1.2 or 1.3 over gRPC. New connections get what the file has then.",
        ),
    ] = None
    tls_key: Annotated[Path | None, Option(metavar="FILE", help="The key of --tls-cert.")] = None
    allow_plaintext: Annotated[
        bool,
        Option(
            help="Listen on other addresses than loopback without TLS: anyone on that network can then read and change "
            "prompts and answers, and read keys."
        ),
    ] = False
    # Not shown where a configuration is printed.
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            flag="--api-key",
            parse=parse_api_keys,
            metavar="KEY,...",
            default="",
            variable=API_KEY_VARIABLE,
            help="Keys that open everything; clients send one of them. Safer in the environment, since other users of "
            "the machine can read command lines.",
        ),
    ] = field(default=(), repr=False)
    keys_file: Annotated[
        Path | None,
        Option(
            flag="--keys",
            parse=Path,
            metavar="FILE",
            variable=KEYS_VARIABLE,
            help="The file with the clients' keys, which `baton keys` writes. Read again when it changes.",
        ),
    ] = None
    allow_anonymous: Annotated[
        bool, Option(help="Listen on other addresses than loopback though no key is asked for.")
    ] = False
    admin_host: Annotated[
        str,
        Option(
            panel=_ADDRESSES,
            help="Address to listen on for those who run the gateway: /console, /metrics, /debug, /health, /ready.",
        ),
    ] = "127.0.0.1"
    admin_port: Annotated[int, Option(min=0, max=65535, help="Port for those who run it; 0: a free one.")] = 9001
    console_text: Annotated[
        bool,
        Option(
            panel=_SECURITY,
            help="Keep the text of the last requests, some KiB each, for the console: who may see a request there can "
            "then read its prompt and its answer. Else no text is kept.",
        ),
    ] = False
    handoff: Annotated[
        HandoffMode,
        Option(
            panel=_ROUTING,
            help="always: every request is handed from prefill to decode. never: decode does it all. auto: what "
            "makes requests wait least, as the gateway learns from those before.",
        ),
    ] = HandoffMode.AUTO
    handoff_threshold: Annotated[
        int | None, Option(min=0, help="With auto: more uncached prompt tokens than this are handed off.")
    ] = None
    generation_overrides: Annotated[
        Mapping[str, float],
        Option(
            panel=_ANSWERS,
            flag="--override-generation-config",
            parse=parse_generation_config,
            default="{}",
            metavar="JSON",
            help="How to sample where a request does not say, instead of what the model says: "
            f'{{"temperature": 0.2}}. Known are {", ".join(SAMPLING_RANGES)}.',
        ),
    ] = field(default_factory=dict)
    pooling: Annotated[
        Pooling | None,
        Option(
            help="Which hidden states of a text become its embedding, where a request does not say: of its last token, "
            "the mean of all, of its first token (cls). Default: as the model's 1_Pooling says, else last."
        ),
    ] = None
    request_timeout_s: Annotated[
        float,
        Option(
            panel=_LIMITS, flag="--request-timeout", min=0.001, help="Seconds after which a request ends in an error."
        ),
    ] = 600.0
    ttft_slo_s: Annotated[
        float | None,
        Option(
            flag="--ttft-slo",
            metavar="SECONDS",
            min=0.001,
            help="A request whose first token is expected later than this gets 429 at once. A client may ask for less "
            "or more, by the header x-slo-ttft-ms.",
        ),
    ] = None
    strict_fields: Annotated[
        bool,
        Option(
            panel=_ANSWERS,
            help="Refuse requests with fields that nobody knows. Else these are ignored, and the answer names them.",
        ),
    ] = False
    clamp_max_tokens: Annotated[
        bool,
        Option(
            help="Cut max_tokens of chats and completions to what the context has left. Else a request for more is "
            "refused."
        ),
    ] = False
    enable_force_include_usage: Annotated[
        bool, Option(help="Streams of chats and completions end with their usage, whether they ask for it or not.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Option(help="Logprobs name tokens by their ids, token_id:7, where a request does not say otherwise.")
    ] = False
    max_logprobs: Annotated[
        int,
        Option(
            min=-1,
            help="The most alternatives with logprobs that a request may ask for, for each token; -1: the whole "
            "vocabulary.",
        ),
    ] = 20
    enable_tokenizer_info_endpoint: Annotated[
        bool, Option(help="Serve /tokenizer_info: the model's tokenizer_config.json and its chat template.")
    ] = False
    tool_parser: Annotated[
        ToolParser,
        Option(help="How the model writes calls of tools. auto: found from the model's files. none: not told apart."),
    ] = ToolParser.AUTO
    reasoning_parser: Annotated[
        ReasoningParser,
        Option(help="How the model writes its reasoning. auto: found from the model's files. none: not told apart."),
    ] = ReasoningParser.AUTO
    chat_template: Annotated[
        str | None,
        Option(metavar="FILE", help="A chat template in Jinja's notation, instead of the model's own."),
    ] = None
    trust_request_chat_template: Annotated[
        bool,
        Option(
            help="Take a chat template from the request that brings one. It is rendered in a process that has limits: "
            "1 s, 256 MiB."
        ),
    ] = False
    allowed_origins: Annotated[
        tuple[str, ...],
        Option(
            panel=_SECURITY,
            flag="--allow-origin",
            parse=parse_origins,
            metavar="ORIGIN,...",
            default="",
            help="Pages whose scripts may use the API from a browser, as https://chat.example.com; *: all pages.",
        ),
    ] = ()
    root_path: Annotated[
        str | None,
        Option(
            panel=_ADDRESSES,
            parse=parse_root_path,
            metavar="PREFIX",
            help="The beginning of all paths, for a proxy that routes by it, as /models/chat: the API is there too, "
            "whether the proxy strips it or keeps it.",
        ),
    ] = None
    response_lifetime_s: Annotated[
        float,
        Option(
            panel=_LIMITS,
            flag="--response-lifetime",
            metavar="SECONDS",
            min=0,
            help="How long responses of /v1/responses are kept for later turns: in Redis, or without it in the "
            "gateway's memory. 0: no response is kept.",
        ),
    ] = 3600.0
    no_worker_wait_s: Annotated[
        float,
        Option(
            flag="--no-worker-wait",
            min=0,
            help="Seconds for which a request waits where workers are known and none is connected, before it gets 503.",
        ),
    ] = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings that a worker shares with all workers of one `baton up`."""

    engine: EngineConfig
    transport: Annotated[
        TransportName,
        Option(
            panel=_ROUTING,
            help="How KV moves. nixl: shared memory, RDMA. grpc: bytes, works anywhere. auto: for each pair of "
            "workers nixl if one can read the other's memory, else grpc; the decode worker logs which and why.",
        ),
    ] = TransportName.AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One prefill or decode worker process."""

    role: WorkerRole
    host: Annotated[str, Option(panel=_ADDRESSES, help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, Option(min=1, max=65535, help="Port to listen on.")]  # by default that of WORKER_PORTS
    allow_plaintext: Annotated[
        bool,
        Option(
            panel=_SECURITY,
            help="Listen on other addresses than loopback, without TLS and authentication: anyone on that network can "
            "then read and write prompts, answers and KV, and control this worker.",
        ),
    ] = False
    health_port: Annotated[
        int | None,
        Option(
            panel=_ADDRESSES,
            min=1,
            max=65535,
            help="Port for gRPC health alone, at --host, as plain text: for probes that know no TLS, as a kubelet's. "
            "Default: none.",
        ),
    ] = None
    advertised_host: Annotated[
        str | None,
        Option(
            flag="--advertise-host",
            help="Where gateways and other workers reach this one, as Redis tells them. Default: --host.",
        ),
    ] = None
    hosts: GroupSettings = field(default_factory=GroupSettings)
    workers: WorkerSettings
    process: ProcessSettings = field(default_factory=ProcessSettings)


WORKER_PORTS = {WorkerRole.PREFILL: 9100, WorkerRole.DECODE: 9200}


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """One gateway process."""

    model: Path  # its tokenizer, chat template and generation defaults; weights are not read
    worker_addresses: Annotated[
        tuple[str, ...],
        Option(
            panel=_ADDRESSES,
            flag="--workers",
            parse=parse_workers,
            metavar="HOST:PORT,...",
            help="Prefill and decode workers, all of them; without Redis.",
        ),
    ] = ()
    max_waiting: Annotated[int, Option(panel=_LIMITS, min=1, help="Choices in flight before requests get 429.")] = 4096
    # Sockets bound to the port for HTTP and to the admin port, of a launcher that also starts this gateway's successor
    # at the same ports.
    http_fd: int | None = None
    admin_fd: int | None = None
    serving: ServingSettings
    process: ProcessSettings = field(default_factory=ProcessSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpConfig:
    """`baton up`: workers and a gateway on this machine."""

    model_note: str = ""  # for a person, beside the model's name
    chats: bool = True  # there is a chat template
    generates: bool = True  # False: the model makes embeddings alone, and there are prefill workers alone
    max_positions: int | None = None  # that the model was made for; None: it is not made yet
    certificates: Path | None = None  # a directory that has one for each role, made for this run
    makes_model: bool = False  # the engine's model is the random model, to be made where it is not there yet
    serving: ServingSettings  # of the gateway; workers stay on loopback
    tls: Annotated[
        bool,
        Option(
            panel=_SECURITY,
            help="Make an authority for this run alone, and use TLS everywhere with its certificates: for clients, and "
            "between all processes.",
        ),
    ] = False
    num_prefill: Annotated[int, Option(panel=_PROCESSES, flag="--prefill", min=0, help="Prefill workers.")] = 1
    num_decode: Annotated[int, Option(flag="--decode", min=1, help="Decode workers.")] = 1
    prefill_tp: Annotated[
        int | None, Option(min=1, metavar="N", help="Ranks of each prefill worker. Default: --tensor-parallel-size.")
    ] = None
    decode_tp: Annotated[
        int | None, Option(min=1, metavar="N", help="Ranks of each decode worker. Default: --tensor-parallel-size.")
    ] = None
    prefill_pp: Annotated[
        int, Option(min=1, metavar="N", help="Stages of each prefill worker: see `baton prefill --help`.")
    ] = 1
    start_timeout_s: Annotated[
        float,
        Option(
            flag="--start-timeout",
            min=1,
            metavar="SECONDS",
            help="How long a worker or the gateway may take until it serves, at the start, in a restart and where "
            "`baton scale` starts it.",
        ),
    ] = 1800.0
    workers: WorkerSettings  # of every worker
    # Without a Redis URL `baton up` starts a server of its own, where the wheel with one is installed.
    process: ProcessSettings = field(default_factory=ProcessSettings)  # of every process

    def tensor_parallel_size(self, role: WorkerRole) -> int:
        """Returns how many ranks each worker of this role has."""
        own = self.prefill_tp if role is WorkerRole.PREFILL else self.decode_tp
        return self.workers.engine.tensor_parallel_size if own is None else own

    def pipeline_parallel_size(self, role: WorkerRole) -> int:
        """Returns how many stages each worker of this role has."""
        return self.prefill_pp if role is WorkerRole.PREFILL else 1

    def expert_parallel(self, role: WorkerRole) -> bool:
        """Returns True if each rank of a worker of this role has some whole experts."""
        return self.workers.engine.expert_parallel and self.tensor_parallel_size(role) > 1


_MODEL_METAVAR = "DIR|FILE.gguf|ID"
_MODEL_HELP = (
    "Directory with a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json), a GGUF file, or an id on "
    "the Hugging Face hub."
)
_Revision = Annotated[
    str | None, Option(help="Branch, tag or commit of a model that is given by its id. Default: main.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """A model as a user names it. The command looks it up, and configurations have its path."""

    model: Annotated[str, Option(panel=_MODEL, metavar=_MODEL_METAVAR, help=_MODEL_HELP)]
    revision: _Revision = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UpModelChoice:
    """A model as a user names it for `baton up`, which has one of its own."""

    model: Annotated[
        str | None, Option(panel=_MODEL, metavar=_MODEL_METAVAR, help=f"{_MODEL_HELP} Default: a small demo model.")
    ] = None
    revision: _Revision = None
