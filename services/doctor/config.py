"""The configuration of `baton doctor`, which looks at what others would use."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from services.config import API_KEY_VARIABLE, KEYS_VARIABLE, MTLS_VARIABLE, REDIS_URL_VARIABLE
from services.config.option import Option, OptionError
from services.process.configs import parse_api_keys, parse_redis_url, parse_workers


def parse_gateway(text: str) -> str:
    """The URL of a gateway's admin port. Raises OptionError."""
    try:
        parts = urlsplit(text)
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine or "@" in text or any(each.isspace() for each in text):
        raise OptionError("name an admin port, as http://127.0.0.1:9001")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorConfig:
    """The things that `baton doctor` looks at, beside this machine."""

    redis_url: Annotated[
        str | None,
        Option(
            parse=parse_redis_url,
            metavar="URL",
            variable=REDIS_URL_VARIABLE,
            help="A Redis: its version, latency, memory and clock, and what the URL's user may do there.",
        ),
    ] = None
    worker_addresses: Annotated[
        tuple[str, ...],
        Option(
            flag="--workers",
            parse=parse_workers,
            metavar="HOST:PORT,...",
            help="Workers, to be asked whether they serve.",
        ),
    ] = ()
    measure: Annotated[
        bool,
        Option(
            help="Has each pair of --workers hand over some prompts, and measures that. It costs the workers some "
            "seconds; with --mtls the certificate is a gateway's."
        ),
    ] = False
    gateway_url: Annotated[
        str | None,
        Option(
            flag="--gateway",
            parse=parse_gateway,
            metavar="URL",
            help="A gateway by its admin port, as http://127.0.0.1:9001: its workers, how KV moved between each pair, "
            "and its clock.",
        ),
    ] = None
    # Not shown where a configuration is printed.
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            flag="--api-key",
            parse=parse_api_keys,
            metavar="KEY",
            default="",
            variable=API_KEY_VARIABLE,
            help="A key with the right admin, for --gateway; the first, where there are several.",
        ),
    ] = field(default=(), repr=False)
    mtls: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            variable=MTLS_VARIABLE,
            help="Certificates between processes, to be looked at; --workers are asked with them, and Redis where its "
            "URL is rediss://.",
        ),
    ] = None
    tls_cert: Annotated[Path | None, Option(metavar="FILE", help="A gateway's certificate for clients.")] = None
    tls_key: Annotated[Path | None, Option(metavar="FILE", help="The key of --tls-cert.")] = None
    keys_file: Annotated[
        Path | None,
        Option(flag="--keys", parse=Path, metavar="FILE", variable=KEYS_VARIABLE, help="A gateway's keys file."),
    ] = None
    namespace: Annotated[
        str | None,
        Option(
            flag="--kubernetes",
            metavar="NAMESPACE",
            help="The cluster that kubectl would use: whether this user may install the chart in this namespace, and "
            "what the cluster has of what the chart uses.",
        ),
    ] = None
    strict: Annotated[bool, Option(help="Exit code 1 where there are warnings and no errors.")] = False
    as_json: Annotated[bool, Option(flag="--json", help="JSON instead of words.")] = False
