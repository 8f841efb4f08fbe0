"""The `baton` command: options in, one frozen configuration out, and the process that it is for.

The only place that makes configurations. A process's code is imported when its command runs, so `baton --help` is
quick and `baton gateway` never loads torch.
"""

import ipaddress
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from services import hub, lifeline
from services.config import (
    GC_DEBUG_VARIABLE,
    REDIS_URL_VARIABLE,
    Device,
    EngineConfig,
    GatewayConfig,
    HandoffMode,
    LoadFormat,
    LogFormat,
    TransportName,
    UpConfig,
    WorkerConfig,
    WorkerRole,
)
from services.engine_options import EngineOptions, with_engine_options
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.gguf_file import is_gguf
from services.protocol.model_files.info import SAMPLING_RANGES, sampling_defaults

app = typer.Typer(
    name="baton",
    help="Serves large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Refusal(Exception):
    """A command that cannot be carried out; its text is one line for a person."""


def parse_workers(text: str) -> tuple[str, ...]:
    """Addresses of `host:port,host:port`."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise typer.BadParameter(f"{address!r} is not host:port")
    if not addresses:
        raise typer.BadParameter("name at least one worker as host:port")
    return addresses


def parse_redis_url(text: str) -> str:
    """The URL of a Redis or Valkey server, or of a node of a cluster."""
    from redis.asyncio.connection import parse_url

    try:
        parse_url(text.replace("+cluster://", "://", 1))
    except ValueError:  # its words may hold a part of the password
        schemes = "redis://, rediss:// (TLS), unix://, redis+cluster:// and rediss+cluster://"
        raise typer.BadParameter(f"this is no URL of a Redis server; known are {schemes}") from None
    return text


def parse_generation_config(text: str) -> dict[str, float]:
    """Sampling values of a JSON object, named as in generation_config.json."""
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
    """How many types of objects to log with each garbage collection, from off, on or top=N; None: log nothing."""
    match = re.fullmatch(r"(off|)|(on)|top=([1-9]\d{0,3})", text.strip().lower())
    if match is None:
        raise Refusal(f"{GC_DEBUG_VARIABLE} is {text!r}; it is off, on, or top=N with N from 1 to 9999")
    if match[3] is not None:
        return int(match[3])
    return 0 if match[2] else None


def _logged_gc_types() -> int | None:
    return parse_gc_debug(os.environ.get(GC_DEBUG_VARIABLE, "off"))


_MODEL_HELP = (
    "Directory with a Hugging Face checkpoint (config.json, *.safetensors, tokenizer.json), a GGUF file, or an id on "
    "the Hugging Face hub."
)
_MODEL_METAVAR = "DIR|FILE.gguf|ID"
ModelOption = Annotated[str, typer.Option(metavar=_MODEL_METAVAR, help=_MODEL_HELP)]
DemoModelOption = Annotated[
    str | None, typer.Option("--model", metavar=_MODEL_METAVAR, help=f"{_MODEL_HELP} Default: a small demo model.")
]
RevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model that is given by its id. Default: main.")
]
ServedNameOption = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        help="What clients call the model. Default: its id, or the name of its directory or file.",
    ),
]
TransportOption = Annotated[
    TransportName,
    typer.Option(help="How KV moves. nixl: shared memory, RDMA. grpc: bytes, works anywhere. auto: for each pair of "
                 "workers nixl if one can read the other's memory, else grpc; the decode worker logs which and why."),
]  # fmt: skip
HandoffOption = Annotated[
    HandoffMode,
    typer.Option(help="always: every request is handed from prefill to decode. never: decode does it all. auto: what "
                 "makes requests wait least, as the gateway learns from those before."),
]  # fmt: skip
ThresholdOption = Annotated[
    int | None,
    typer.Option("--handoff-threshold", min=0, help="With auto: more uncached prompt tokens than this are handed off."),
]
TimeoutOption = Annotated[
    float, typer.Option("--request-timeout", min=0.001, help="Seconds after which a request ends in an error.")
]
GenerationOption = Annotated[
    str,
    typer.Option(
        "--override-generation-config",
        metavar="JSON",
        help='How to sample where a request does not say, instead of what the model says: {"temperature": 0.2}. Known '
        f"are {', '.join(SAMPLING_RANGES)}.",
    ),
]
RedisUrlOption = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        parser=parse_redis_url,
        metavar="URL",
        envvar=REDIS_URL_VARIABLE,
        help="Redis or Valkey with the prefix index and the registry of workers: redis://user:password@host:6379. "
        "In the environment a password is safer from other users of the machine.",
    ),
]
LogFormatOption = Annotated[LogFormat, typer.Option(help="Log lines for people, or one JSON object a line.")]
WorkerHostOption = Annotated[str, typer.Option(help="Address to listen on.")]
WorkerPortOption = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
AdvertiseHostOption = Annotated[
    str | None,
    typer.Option(help="Where gateways and other workers reach this one, as Redis tells them. Default: --host."),
]
HttpHostOption = Annotated[
    str, typer.Option(help="Address to listen on for clients. There is no authentication and no TLS yet.")
]
HttpPortOption = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on for clients; 0: a free one.")]
GrpcPortOption = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on for gRPC clients, at --host too; 0: a free one.")
]
AllowPlaintextOption = Annotated[
    bool,
    typer.Option(
        "--allow-plaintext",
        help="Listen on other addresses than loopback, without TLS and authentication: anyone on that network can "
        "then read and write prompts, answers and KV, and control this worker.",
    ),
]


@app.command()
@with_engine_options
def up(
    *,
    engine: EngineOptions,
    model: DemoModelOption = None,
    revision: RevisionOption = None,
    served_model_name: ServedNameOption = None,
    host: HttpHostOption = "127.0.0.1",
    port: HttpPortOption = 8000,
    grpc_port: GrpcPortOption = 9000,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 1,
    handoff: HandoffOption = HandoffMode.AUTO,
    handoff_threshold: ThresholdOption = None,
    redis_url: RedisUrlOption = None,
    transport: TransportOption = TransportName.AUTO,
    override_generation_config: GenerationOption = "{}",
    request_timeout: TimeoutOption = 600.0,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Starts prefill and decode workers and a gateway on this machine. Ctrl-C ends them all."""
    from services.launcher import demo_model
    from services.launcher.main import run

    _logged_gc_types()  # the children read it again
    demo = None
    if model is None:
        _refuse_revision(revision)
        demo = demo_model.find()
        config, name = _checked(engine.config(demo.path)), demo_model.NAME
    else:
        config, name = _find_engine(engine, model, revision)
    up_config = UpConfig(
        engine=config,
        makes_model=demo is not None and demo.is_random,
        model_note="" if demo is None else demo.note,
        served_model_name=served_model_name or name,
        host=host,
        port=port,
        grpc_port=grpc_port,
        num_prefill=prefill,
        num_decode=decode,
        redis_url=redis_url,
        transport=transport,
        handoff=handoff,
        handoff_threshold=handoff_threshold,
        generation_overrides={**(demo.sampling if demo else {}), **parse_generation_config(override_generation_config)},
        request_timeout_s=request_timeout,
        log_format=log_format,
    )
    raise typer.Exit(run(up_config))


@app.command()
def gateway(
    model: ModelOption,
    revision: RevisionOption = None,
    workers: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,...", help="Prefill and decode workers, all of them; without Redis."),
    ] = None,
    redis_url: RedisUrlOption = None,
    served_model_name: ServedNameOption = None,
    host: HttpHostOption = "127.0.0.1",
    port: HttpPortOption = 8000,
    grpc_port: GrpcPortOption = 9000,
    handoff: HandoffOption = HandoffMode.AUTO,
    handoff_threshold: ThresholdOption = None,
    override_generation_config: GenerationOption = "{}",
    request_timeout: TimeoutOption = 600.0,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests in flight before new ones get 503.")] = 4096,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Starts a gateway: the OpenAI API over HTTP, in front of workers that it finds in Redis or is told of."""
    if workers is not None and redis_url == os.environ.get(REDIS_URL_VARIABLE):
        redis_url = None  # what was said here holds, not what holds everywhere
    if (workers is None) == (redis_url is None):
        raise Refusal("a gateway finds its workers through --redis-url, or is given them by --workers: say one of both")
    directory, name = _find_model(model, revision, weights=False)
    config = GatewayConfig(
        model=directory,
        served_model_name=served_model_name or name,
        workers=() if workers is None else parse_workers(workers),
        redis_url=redis_url,
        host=host,
        port=port,
        grpc_port=grpc_port,
        handoff=handoff,
        handoff_threshold=handoff_threshold,
        generation_overrides=parse_generation_config(override_generation_config),
        request_timeout_s=request_timeout,
        max_waiting=max_waiting,
        log_format=log_format,
        logged_gc_types=_logged_gc_types(),
    )
    from services.gateway.main import run

    raise typer.Exit(run(config))


def _worker_command(role: WorkerRole, default_port: int, purpose: str) -> None:
    """Adds the command that starts a worker of this role."""

    @app.command(role.value, help=purpose)
    @with_engine_options
    def worker(
        *,
        engine: EngineOptions,
        model: ModelOption,
        revision: RevisionOption = None,
        host: WorkerHostOption = "127.0.0.1",
        port: WorkerPortOption = default_port,
        allow_plaintext: AllowPlaintextOption = False,
        redis_url: RedisUrlOption = None,
        advertise_host: AdvertiseHostOption = None,
        transport: TransportOption = TransportName.AUTO,
        log_format: LogFormatOption = LogFormat.TEXT,
    ) -> None:
        config = WorkerConfig(
            role=role,
            engine=_find_engine(engine, model, revision)[0],
            host=_worker_host(host, allow_plaintext),
            port=port,
            transport=transport,
            allow_plaintext=allow_plaintext,
            redis_url=redis_url,
            advertised_host=_advertised_host(host, advertise_host, redis_url),
            log_format=log_format,
            logged_gc_types=_logged_gc_types(),
        )
        raise typer.Exit(_run_worker(config))


def _run_worker(config: WorkerConfig) -> int:
    from services.engine.openmp import load_openmp

    load_openmp()
    if config.role is WorkerRole.PREFILL:
        from services.prefill.main import run
    else:
        from services.decode.main import run
    return run(config)


_worker_command(
    WorkerRole.PREFILL, 9100, "Starts a prefill worker: it reads prompts, and hands their KV to decode workers."
)
_worker_command(
    WorkerRole.DECODE, 9200, "Starts a decode worker: it takes KV over from prefill workers and generates tokens."
)


def _find_engine(options: EngineOptions, model: str, revision: str | None) -> tuple[EngineConfig, str]:
    """The engine of a model, and the model's name. What is refused is refused before anything is fetched."""
    config = _checked(options.config(Path(model)))
    directory, name = _find_model(model, revision, weights=config.load_format is not LoadFormat.DUMMY)
    return replace(config, model=directory), name


def _checked(config: EngineConfig) -> EngineConfig:
    from services.engine.kernels.cpu import isa

    try:
        isa.check(os.environ)
    except isa.IsaError as error:
        raise Refusal(str(error)) from error
    if config.device is Device.CPU and config.gpu_options:
        raise Refusal(f"{config.gpu_options[0]} is for GPUs alone: the device is the CPU")
    if config.device is Device.CUDA and config.kernels != "auto":
        raise Refusal(f"--kernels {config.kernels} is for the CPU alone: the device is a GPU")
    if config.kv_memory_bytes is not None and config.gpu_memory_fraction is not None:
        raise Refusal("--kv-memory and --gpu-memory-fraction both say how much memory KV gets: say one of both")
    return config


def _find_model(model: str, revision: str | None, *, weights: bool = True) -> tuple[Path, str]:
    """The path of a model that was given by its path or by its id on the hub, and its name."""
    file = Path(model).expanduser().absolute()  # not resolved: in the hub's cache links lead to files without a name
    if is_gguf(file):
        _refuse_revision(revision)
        if not file.is_file():
            raise Refusal(f"no model at {file}: there is no such file")
        return file, file.stem
    directory = Path(model).expanduser().resolve()
    if directory.is_dir() or not hub.is_id(model):
        _refuse_revision(revision)
        return _checkpoint(directory), directory.name
    sys.stderr.write(f"baton: {model}: fetching what of it is not in the cache\n")
    try:
        return _checkpoint(hub.fetch(model, revision, weights=weights)), model
    except hub.HubError as error:
        raise Refusal(str(error)) from error


def _checkpoint(directory: Path) -> Path:
    if not directory.is_dir():
        raise Refusal(f"no model at {directory}: there is no such directory")
    if not (directory / "config.json").is_file():
        raise Refusal(f"no model at {directory}: it has no config.json")
    return directory


def _refuse_revision(revision: str | None) -> None:
    if revision is not None:
        raise Refusal("--revision is for a model that is given by its id on the hub")


def _worker_host(host: str, allow_plaintext: bool) -> str:
    if allow_plaintext or host == "localhost" or _is_loopback(host):
        return host
    raise Refusal(
        f"--host {host} needs --allow-plaintext: workers speak without TLS and authentication, so anyone on that "
        "network could read and write prompts and KV, and control the worker"
    )


def _advertised_host(host: str, advertise_host: str | None, redis_url: str | None) -> str | None:
    if redis_url is None:
        if advertise_host is not None:
            raise Refusal("--advertise-host is for workers that register in Redis; name it with --redis-url")
        return None
    if advertise_host is None and host in ("0.0.0.0", "::"):
        raise Refusal(f"--host {host} is no address to go to: name one with --advertise-host")
    return advertise_host or host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name: who knows where it leads
        return False


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Until a process has its own way to end: at once."""
    sys.exit(128 + number)


def main() -> None:
    """The console script. A refusal is one line on stderr and exit code 1."""
    lifeline.hold()
    # The kernel keeps a signal without a handler from process 1, which this is in a container.
    signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except Refusal as refusal:
        sys.exit(f"baton: {refusal}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
