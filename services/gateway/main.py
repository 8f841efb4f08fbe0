"""The gateway process: builds its parts from one configuration and serves until it is told to stop."""

import asyncio
import gc
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import structlog
import uvloop
from prometheus_client import CollectorRegistry

from services.config import WorkerRole
from services.gateway.anthropic_api.routes import messages_routes
from services.gateway.api.dialects.chat_answers import ChatModel
from services.gateway.api.records.tracing import Tracing, TracingError, tracing_from
from services.gateway.api.requests.request_defaults import RequestDefaults
from services.gateway.api.runners import Runners, make_runners
from services.gateway.api.served_models import ServedModels
from services.gateway.cohere_api.routes import cohere_routes
from services.gateway.console.routes import make_console
from services.gateway.console.sources import RedisUsers, Sources
from services.gateway.dispatch.discovery import follow_registry
from services.gateway.dispatch.dispatcher import Dispatcher, WorkerAccess
from services.gateway.dispatch.router import Policy
from services.gateway.draining import EndingGateway
from services.gateway.grpc_api.server import GrpcServer
from services.gateway.grpc_api.servicer import InferenceServicer
from services.gateway.http.http_protocol import plain_http_answer
from services.gateway.http.limits import Limits
from services.gateway.http.serving import serving
from services.gateway.keys.authentication import Keys
from services.gateway.keys.file import KeysFileError
from services.gateway.keys.key_entry import QuotaMaker
from services.gateway.keys.local_quotas import LocalQuotas
from services.gateway.keys.quota import KeyQuota, QuotaStore
from services.gateway.keys.redis_quotas import TIMEOUT_S, RedisQuotas
from services.gateway.keys.reload import FollowedKeys
from services.gateway.listening import ListenError, inherit, listen
from services.gateway.metrics import GatewayMetrics, ProcessMetrics, RefusedWorkers
from services.gateway.openai.app import AppParts, create_admin_app, create_app
from services.gateway.openai.responses.redis_store import RedisResponseStore
from services.gateway.openai.responses.store import MemoryResponseStore, ResponseStore
from services.gateway.text.chat_template import ChatTemplate, load_chat_template
from services.gateway.text.model_output.forms import AnswerForms, find_forms
from services.gateway.text.model_output.template import TemplateSpecError
from services.gateway.text.tokenizer import load_tokenizer, read_tokenizer_info
from services.prefix_index.base import PrefixIndex
from services.prefix_index.breaker import CircuitBreaker
from services.prefix_index.malformed import MalformedEntries
from services.prefix_index.memory import MemoryPrefixIndex
from services.prefix_index.reachability import Reachability
from services.prefix_index.redis_client import Client, connect
from services.prefix_index.redis_index import RedisPrefixIndex
from services.prefix_index.redis_tls import with_certificate
from services.prefix_index.registry import Registry
from services.process.configs import GatewayConfig, ServingSettings
from services.process.gc_watch import GcWatch
from services.process.log_writer import LogWriter
from services.process.logs import configure_logging
from services.process.loop_watch import watch_loop
from services.process.signals import on_ending_signals
from services.process.supervised import supervised
from services.protocol.model_files.base import ModelError, ModelFiles
from services.protocol.model_files.info import model_digest, read_model_info
from services.protocol.model_files.open import open_model
from services.tls.certificate import TlsError
from services.tls.contexts import server_context
from services.tls.files import CertificateFiles, CertificatePaths
from services.tls.grpc_ends import Channels
from services.tls.roles import CertificateRole

_LOOKUP_TIMEOUT_S = 0.25  # what takes longer costs a hit, not the request's time
_REGISTRY_TIMEOUT_S = 1.0
_STORE_TIMEOUT_S = 0.5  # what takes longer is not kept, or not found
# A request leaves no garbage that needs a collector. Looking at those in flight after every 700 new objects, Python's
# default, took 3 to 6 % of the gateway's time.
_OBJECTS_BETWEEN_COLLECTIONS = 10_000

# How long a thread beside the event loop may keep the interpreter lock while the loop wants it. With Python's default
# of 5 ms, each turn of the loop would wait so long while such a thread has work.
_SWITCH_INTERVAL_S = 0.0005

log = structlog.get_logger()


def run(config: GatewayConfig) -> int:
    """Runs a gateway until a signal, which drains it; returns the exit code."""
    log_writer = configure_logging(config.process.log_format)
    gc_watch = GcWatch(config.process.logged_gc_types)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, gc_watch, log_writer))
    except (ModelError, ListenError, TlsError, TracingError, KeysFileError) as error:
        log_writer.flush()  # why the process ends is its last line
        print(f"baton gateway: {error}", file=sys.stderr)
        return 1
    return 0


def _needed_role(config: GatewayConfig) -> WorkerRole:
    """Returns the role of the workers without which nothing can be served."""
    return WorkerRole.DECODE if read_model_info(open_model(config.model)).generates else WorkerRole.PREFILL


async def _serve(config: GatewayConfig, gc_watch: GcWatch, log_writer: LogWriter) -> None:
    metrics = GatewayMetrics(CollectorRegistry())
    malformed = MalformedEntries()
    process_metrics = ProcessMetrics(metrics.registry, gc_watch, malformed, log_writer)
    policy = Policy(config.serving.handoff, config.serving.handoff_threshold)
    tls, mtls = _client_tls(config.serving), _mtls(config)
    redis_url = with_certificate(config.process.redis_url, config.process.mtls)
    redis = None if redis_url is None else connect(redis_url, _REGISTRY_TIMEOUT_S)
    model, index = model_digest(open_model(config.model)), _index(redis, malformed)
    dispatcher = Dispatcher(
        config.worker_addresses,
        policy,
        config.max_waiting,
        index,
        metrics,
        WorkerAccess(model, config.serving.no_worker_wait_s, Channels(mtls), _needed_role(config)),
    )
    metrics.registry.register(RefusedWorkers(dispatcher.refused))
    tracing = tracing_from()
    runners = _runners(config, dispatcher, metrics, tracing)
    limits = _limits(config.serving)
    quotas = None if config.serving.keys_file is None else _shared_quotas(redis, metrics)
    followed, keys = _keys(config.serving, _quota_maker(quotas or LocalQuotas(), metrics))
    refused_files_s = _refused_files_s({"keys": followed, "tls": tls, "mtls": mtls})
    process_metrics.show_followed(refused_files_s)
    reachability = Reachability()
    sources = replace(
        _sources(config, runners, dispatcher, metrics),
        redis=None if redis is None else _redis_users(reachability, index, quotas),
        num_gateways=None if quotas is None else lambda: quotas.num_gateways,
        refused_files_s=refused_files_s,
        take_longest_pause_s=process_metrics.take_longest_pause_s,
    )
    console = make_console(sources, keys, admin_has_successor=config.admin_fd is not None)
    parts = _parts(config, runners, dispatcher, metrics, redis)
    parts = replace(parts, keys=keys, console=console.at_api, admin_console=console.at_admin)
    servicer = InferenceServicer(
        runners, metrics, limits.request_timeout_s, limits.ttft_slo_s, limits.strict_fields, keys
    )
    shares_port = config.http_fd is not None
    grpc_server = GrpcServer(servicer, dispatcher, runners.side, limits.max_body_bytes, shares_port, keys, tls)
    context = None if tls is None else server_context(tls, plain_http_answer())
    members = _members(dispatcher, grpc_server, process_metrics, followed, quotas)
    members["the console's feed"] = console.feed.run
    members["forms and templates"] = partial(runners.processes.run, at_once=True)
    if parts.response_store is not None:
        members["kept responses"] = parts.response_store.follow
    if redis is not None:
        following = (Registry(redis, malformed), model, dispatcher.set_addresses, reachability)
        members["the registry"] = partial(follow_registry, *following)
    ending = EndingGateway((dispatcher, console.feed), runners.in_progress)
    await _serve_until_told(config, parts, grpc_server, members, ending, context)
    if redis is not None:
        await redis.aclose()
    if tracing is not None:
        await asyncio.to_thread(tracing.close)


async def _serve_until_told(
    config: GatewayConfig,
    parts: AppParts,
    grpc_server: GrpcServer,
    members: "_Members",
    ending: EndingGateway,
    context: ssl.SSLContext | None,
) -> None:
    """Listens and serves until a signal has ended everything. members: run meanwhile."""
    on_ending_signals(ending.drain, ending.end)
    with _listening(config) as listeners:
        await grpc_server.start(config.serving.host, config.serving.grpc_port)
        _spare_collections()
        parts = replace(parts, port=listeners.port, admin_port=listeners.admin_port)
        log.info("gateway listening", **listeners.addresses(), workers=_known_workers(config))
        async with (
            serving(create_admin_app(parts), listeners.admin, context) as admin,
            serving(create_app(parts), listeners.http, context) as http,
            asyncio.TaskGroup() as group,
        ):
            background = [group.create_task(supervised(name, run)) for name, run in members.items()]
            # What asks at the admin port is to reach the successor, if there is one.
            doors = (http, grpc_server, *(() if config.admin_fd is None else (admin,)))
            await ending.run(doors, config.process.drain_timeout_s)
            for task in background:
                task.cancel()


_Members = dict[str, Callable[[], Awaitable[None]]]  # by their names in the log


def _members(
    dispatcher: Dispatcher,
    grpc_server: GrpcServer,
    metrics: ProcessMetrics,
    followed: FollowedKeys | None,
    quotas: RedisQuotas | None,
) -> _Members:
    """All that runs beside the servers, by its name in the log. Each fails alone."""
    members: _Members = {
        "the links to workers": dispatcher.run,
        "health over gRPC": grpc_server.report_health,
        "the watch on the event loop": partial(watch_loop, metrics.note_loop_pause),
    }
    if followed is not None:
        members["the keys file"] = followed.follow
    if quotas is not None:
        members["the limits of keys"] = quotas.follow
    return members


def _refused_files_s(
    files: Mapping[str, FollowedKeys | CertificateFiles | None],
) -> dict[str, Callable[[], float]]:
    return {name: each.refused_s for name, each in files.items() if each is not None}


def _redis_users(reachability: Reachability, index: PrefixIndex, quotas: RedisQuotas | None) -> RedisUsers:
    return RedisUsers(
        registry=reachability,
        index=(lambda: index.broken) if isinstance(index, RedisPrefixIndex) else (lambda: False),
        quotas=None if quotas is None else lambda: quotas.alone,
    )


def _parts(
    config: GatewayConfig, runners: Runners, dispatcher: Dispatcher, metrics: GatewayMetrics, redis: Client | None
) -> AppParts:
    limits = _limits(config.serving)
    return AppParts(
        runners=runners,
        generator=dispatcher,
        metrics=metrics,
        describe_ledger=dispatcher.describe,
        limits=limits,
        allowed_origins=config.serving.allowed_origins,
        response_store=_response_store(redis, config.serving.response_lifetime_s),
        other_apis=[*messages_routes(runners, limits), *cohere_routes(runners, limits)],
        tokenizer_info=_tokenizer_info(config),
        root_path=config.serving.root_path or "",
    )


def _sources(config: GatewayConfig, runners: Runners, dispatcher: Dispatcher, metrics: GatewayMetrics) -> Sources:
    return Sources(
        dispatch=dispatcher.overseen,
        records=runners.records,
        metrics=metrics,
        model_names=tuple(runners.models.by_name),
        ttft_slo_s=config.serving.ttft_slo_s,
        keeps_text=config.serving.console_text,
    )


def _client_tls(serving: ServingSettings) -> CertificateFiles | None:
    if serving.tls_cert is None or serving.tls_key is None:
        return None
    return CertificateFiles(CertificatePaths(serving.tls_cert, serving.tls_key))


def _mtls(config: GatewayConfig) -> CertificateFiles | None:
    """The certificate that workers see."""
    if config.process.mtls is None:
        return None
    return CertificateFiles(CertificatePaths.in_directory(config.process.mtls), [CertificateRole.GATEWAY])


def _shared_quotas(redis: Client | None, metrics: GatewayMetrics) -> RedisQuotas | None:
    if redis is None:
        return None
    quotas = RedisQuotas(Client(redis.redis, TIMEOUT_S), CircuitBreaker(time.monotonic))
    metrics.show_limits(lambda: quotas.num_gateways, lambda: quotas.alone)
    return quotas


def _quota_maker(store: QuotaStore, metrics: GatewayMetrics) -> QuotaMaker:
    return lambda key_id, limits: KeyQuota(key_id, limits, store, metrics.refused)


def _keys(serving: ServingSettings, quota: QuotaMaker) -> tuple[FollowedKeys | None, Keys | None]:
    """Returns what follows the keys file, if there is one, and the keys, if any are asked for. Raises KeysFileError."""
    if serving.keys_file is not None:
        followed = FollowedKeys(serving.keys_file, serving.api_keys, quota)
        return followed, followed.keys
    return None, Keys(serving.api_keys) if serving.api_keys else None


def _spare_collections() -> None:
    gc.collect()
    gc.freeze()  # what is there now stays; no collection needs to look at it again
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)


def _limits(serving: ServingSettings) -> Limits:
    return Limits(
        request_timeout_s=serving.request_timeout_s,
        ttft_slo_s=serving.ttft_slo_s,
        strict_fields=serving.strict_fields,
        defaults=RequestDefaults(
            clamps_tokens=serving.clamp_max_tokens,
            include_usage=serving.enable_force_include_usage,
            tokens_as_ids=serving.return_tokens_as_token_ids,
        ),
    )


def _tokenizer_info(config: GatewayConfig) -> Mapping[str, object] | None:
    return read_tokenizer_info(open_model(config.model)) if config.serving.enable_tokenizer_info_endpoint else None


@dataclass(frozen=True, slots=True)
class _Listeners:
    """The listening sockets for HTTP."""

    http: socket.socket
    admin: socket.socket

    @property
    def port(self) -> int:
        """The port for clients."""
        port: int = self.http.getsockname()[1]
        return port

    @property
    def admin_port(self) -> int:
        """The port for those who run the gateway."""
        port: int = self.admin.getsockname()[1]
        return port

    def addresses(self) -> dict[str, object]:
        """The fields of a log line that say where they listen."""
        (host, port), (admin_host, admin_port) = (each.getsockname()[:2] for each in (self.http, self.admin))
        return {"host": host, "port": port, "admin_host": admin_host, "admin_port": admin_port}


@contextmanager
def _listening(config: GatewayConfig) -> Iterator[_Listeners]:
    """Closes the sockets with the context. Raises ListenError."""
    serving = config.serving
    with (
        _listener(config.http_fd, serving.host, serving.port, "--port") as http,
        _listener(config.admin_fd, serving.admin_host, serving.admin_port, "--admin-port") as admin,
    ):
        yield _Listeners(http, admin)


def _listener(fd: int | None, host: str, port: int, flag: str) -> socket.socket:
    return listen(host, port, flag) if fd is None else inherit(fd)


def _known_workers(config: GatewayConfig) -> object:
    return list(config.worker_addresses) or "as the registry says"


def _index(redis: Client | None, malformed: MalformedEntries) -> PrefixIndex:
    if redis is None:
        return MemoryPrefixIndex()
    return RedisPrefixIndex(Client(redis.redis, _LOOKUP_TIMEOUT_S), CircuitBreaker(time.monotonic), malformed)


def _response_store(redis: Client | None, lifetime_s: float) -> ResponseStore | None:
    if not lifetime_s:
        return None
    if redis is None:
        return MemoryResponseStore(lifetime_s, time.monotonic)
    return RedisResponseStore(Client(redis.redis, _STORE_TIMEOUT_S), CircuitBreaker(time.monotonic), lifetime_s)


def _runners(
    config: GatewayConfig, dispatcher: Dispatcher, metrics: GatewayMetrics, tracing: Tracing | None
) -> Runners:
    files = open_model(config.model)
    model = read_model_info(files, dict(config.serving.generation_overrides))
    pooling = config.serving.pooling or model.pooling
    if model.cross_encoder is not None and pooling is not model.pooling:
        raise ModelError(f"--pooling {pooling}: this model's head reads what its config.json says, {model.pooling}")
    model = replace(model, pooling=pooling, max_logprobs=config.serving.max_logprobs)
    if model.generation.not_applied:
        log.warning("settings of generation_config.json are not applied", names=model.generation.not_applied)
    tokenizer = load_tokenizer(files)
    if model.cross_encoder is not None and model.cross_encoder.token_types:
        tokenizer.check_token_types()
    serving = config.serving
    chat_template = load_chat_template(
        files,
        tokenizer.special_tokens,
        serving.chat_template,
        replaceable=serving.trust_request_chat_template,
    )
    chat_model = ChatModel(chat_template, _forms(serving, files, chat_template))
    models = ServedModels.of(model, serving.served_model_name, serving.model_aliases)
    return make_runners(models, tokenizer, chat_model, dispatcher, metrics, tracing, keeps_text=serving.console_text)


def _forms(serving: ServingSettings, files: ModelFiles, chat_template: ChatTemplate | None) -> AnswerForms:
    source, with_tools = None, None
    if chat_template is not None:
        source, with_tools = chat_template.source, chat_template.with_tools.source
    spec, parsers = files.response_template(), (serving.tool_parser, serving.reasoning_parser)
    try:
        return find_forms(spec, source, *parsers, tool_template=with_tools)
    except TemplateSpecError as error:
        raise ModelError(f"{files.path}: the response_template cannot be followed: {error}") from error
