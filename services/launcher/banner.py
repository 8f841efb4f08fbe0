"""The banner of `baton up` once everything is ready: the way in, on stdout."""

import json
import shlex
import sys
from urllib.parse import unquote, urlsplit

from services.config import API_KEY_VARIABLE, HandoffMode, TransportName
from services.launcher import readiness
from services.launcher.certificates import ca_file
from services.launcher.commands import admin_url, api_url, local_address
from services.process.configs import UpConfig


def ready_lines(config: UpConfig, max_model_len: int | None = None) -> str:
    """The facts that a user needs next, one a line, with a command to paste.

    max_model_len: tokens of the longest sequence, as the gateway has it; None: it did not say.
    """
    serving = config.serving
    url = api_url(serving)
    note = f" ({config.model_note})" if config.model_note else ""
    rows = {
        "Baton is ready": f"{url}/v1",
        "gRPC": f"{local_address(serving.host, serving.grpc_port)} (baton.v1.Inference)",
        "console": f"{admin_url(serving)}/console/{_for_a_key(config)}",
        "admin": f"{admin_url(serving)}/metrics, /debug/ledger",
        "model": f"{serving.served_model_name}{note}",
        **_context(config, max_model_len),
        "workers": f"{config.num_prefill} prefill, {config.num_decode} decode",
        "handoff": _handoff(config),
        "prefix index": _prefix_index(config),
        "transport": _transport(config),
        **_tls(config),
        "keys": _keys(config),
        "try": _example(config),
        "end it": "Ctrl-C",
    }
    return "\n".join(f"{name:<15} {text}" for name, text in rows.items())


def _context(config: UpConfig, max_model_len: int | None) -> dict[str, str]:
    if max_model_len is None:
        return {}
    wanted = config.workers.engine.max_model_len or config.max_positions
    if wanted is None or max_model_len >= wanted:
        return {"context": f"{max_model_len} tokens"}
    return {"context": f"{max_model_len} tokens, lowered from {wanted}: KV has no more room; see --kv-memory"}


def _example(config: UpConfig) -> str:
    """A request that the model can answer: a chat, without a chat template a completion, or one for embeddings."""
    body: dict[str, object] = {"model": config.serving.served_model_name.partition(",")[0]}
    if not config.generates:
        path, body["input"] = "embeddings", ["What is the capital of France?"]
    elif config.chats:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "What is the capital of France?"}]
        body["max_tokens"] = 32
    else:
        path, body["prompt"], body["max_tokens"] = "completions", "The capital of France is", 32
    return (
        f"{_curl(config)} {api_url(config.serving)}/v1/{path} {_key_header(config)}"
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def _tls(config: UpConfig) -> dict[str, str]:
    if config.certificates is None:
        return {}
    file = ca_file(config.certificates)
    return {"TLS": f"everywhere, by an authority of this run; clients trust it by SSL_CERT_FILE={file}"}


def _curl(config: UpConfig) -> str:
    return "curl" if config.certificates is None else f"curl --cacert {ca_file(config.certificates)}"


def _asks_for_keys(config: UpConfig) -> bool:
    return bool(config.serving.api_keys) or config.serving.keys_file is not None


def _keys(config: UpConfig) -> str:
    if not _asks_for_keys(config):
        return "none: who reaches the port may use it"
    return f"those of {config.serving.keys_file}" if config.serving.keys_file else f"those of {API_KEY_VARIABLE}"


def _for_a_key(config: UpConfig) -> str:
    return ", with a key that has the right admin" if _asks_for_keys(config) else ""


def _key_header(config: UpConfig) -> str:
    return "-H 'Authorization: Bearer KEY' " if _asks_for_keys(config) else ""


def _prefix_index(config: UpConfig) -> str:
    url = config.process.redis_url
    if url is None:
        return "in the gateway's memory"
    parts = urlsplit(url)
    return f"redis at {parts.netloc.rpartition('@')[2] or unquote(parts.path)}"


def _transport(config: UpConfig) -> str:
    transport = config.workers.transport
    if transport is TransportName.AUTO:
        return "auto: nixl or grpc, by pair; a decode worker says at its first read which, and why"
    return transport.value


def _handoff(config: UpConfig) -> str:
    if not config.generates:
        return "none: the model makes embeddings, and generates nothing"
    if config.num_prefill == 0:
        return "none: there is no prefill worker"
    serving = config.serving
    if serving.handoff is HandoffMode.AUTO and serving.handoff_threshold is not None:
        return f"auto, above {serving.handoff_threshold} uncached prompt tokens"
    return serving.handoff.value


async def print_ready(config: UpConfig) -> None:
    """Prints the ready lines, at once even into a pipe."""
    lines = ready_lines(config, await readiness.max_model_len(admin_url(config.serving)))
    sys.stdout.write(f"\n{lines}\n\n")
    sys.stdout.flush()
