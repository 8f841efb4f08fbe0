"""All that the feed reads, of the gateway's parts: nothing of it is changed here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from services.gateway.api.records.request_records import RequestRecords
from services.gateway.metrics import GatewayMetrics
from services.gateway.overview import Overseen


class ServerHealth(Protocol):
    """The last word on whether Redis answers; `Reachability` of the prefix index is one."""

    @property
    def why(self) -> str | None:
        """Why it does not answer; None: it does, or nobody asked yet."""

    @property
    def since(self) -> float | None:
        """Since when that is so, in seconds since 1970; None: nobody asked yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUsers:
    """Redis as the gateway's parts find it. Each of the functions is True while that part does without.

    index: the prefix index; quotas: the limits of keys; None: no key's limits are counted there.
    """

    registry: ServerHealth
    index: Callable[[], bool]
    quotas: Callable[[], bool] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The parts of a gateway that are shown.

    redis: None: there is none. num_gateways: those that this one knows of, itself too; None: nothing tells.
    refused_files_s: by what followed files hold, since how many seconds they are refused; 0.0: they are not.
    take_longest_pause_s: of the event loop since it was last asked.
    ttft_slo_s: the limit of requests that bring none; None: there is none.
    """

    dispatch: Overseen
    records: RequestRecords
    metrics: GatewayMetrics
    model_names: tuple[str, ...]
    redis: RedisUsers | None = None
    num_gateways: Callable[[], int] | None = None
    refused_files_s: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    take_longest_pause_s: Callable[[], float] = lambda: 0.0
    ttft_slo_s: float | None = None
    keeps_text: bool = False
