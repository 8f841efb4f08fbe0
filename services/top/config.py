"""The configurations of `baton top`, `baton ls` and `baton requests`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from services.config import API_KEY_VARIABLE, MTLS_VARIABLE
from services.config.option import Option
from services.doctor.config import parse_gateway
from services.process.configs import parse_api_keys

DEFAULT_GATEWAY = "http://127.0.0.1:9001"


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayChoice:
    """The gateway that is asked, and by what right."""

    url: Annotated[
        str,
        Option(
            flag="--gateway",
            parse=parse_gateway,
            metavar="URL",
            default=DEFAULT_GATEWAY,
            help="A gateway's admin port; or the port for clients, where it asks for keys. Every gateway tells of all "
            "workers.",
        ),
    ] = DEFAULT_GATEWAY
    # Not shown where a configuration is printed.
    api_keys: Annotated[
        tuple[str, ...],
        Option(
            flag="--api-key",
            parse=parse_api_keys,
            metavar="KEY",
            default="",
            variable=API_KEY_VARIABLE,
            help="A key, where the gateway asks for one; the first, where there are several. Without the right admin, "
            "its own requests are all that is seen.",
        ),
    ] = field(default=(), repr=False)
    ca: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="Authorities that check the certificate of an https:// gateway. Default: the system's, or those of "
            "SSL_CERT_FILE.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TopConfig:
    """The gateway that `baton top` watches."""

    gateway: GatewayChoice = GatewayChoice()
    mtls: Annotated[
        Path | None,
        Option(
            metavar="DIR",
            variable=MTLS_VARIABLE,
            help="Directory with tls.crt, tls.key and ca.crt of an operator, to drain workers that have --mtls.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ListConfig:
    """The gateway that `baton ls` asks, and how much it prints."""

    gateway: GatewayChoice = GatewayChoice()
    limit: Annotated[int, Option(min=1, max=100_000, metavar="N", help="The most requests, newest first.")] = 20
    as_json: Annotated[bool, Option(flag="--json", help="JSON instead of tables.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestConfig:
    """The gateway that `baton requests` asks."""

    gateway: GatewayChoice = GatewayChoice()
    as_json: Annotated[bool, Option(flag="--json", help="The record as JSON, as /debug/requests/ID has it.")] = False
