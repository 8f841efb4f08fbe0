"""The lines above all tables: what the gateway does, and what is wrong."""

from collections.abc import Iterator

from services.top import figures
from services.top.told import Sample, Tick
from services.top.view import View

MAX_UNHEALTHY = 4


def summary(view: View) -> str:
    """Returns one line about the gateway and its work."""
    tick = view.tick
    if tick is None:
        return "waiting for the gateway"
    if (gateway := tick.gateway) is None:
        return "this key sees its own requests alone"
    parts = [f"gateway {gateway.id} {gateway.version}", f"up {figures.age(gateway.uptime_s)}"]
    parts.append(f"{figures.count(gateway.in_flight)} in flight, {figures.count(gateway.waiting)} waiting")
    parts += _rates(view.sample)
    parts += _roles(tick)
    if tick.redis.state != "none":
        parts.append(f"Redis {tick.redis.state}")
    if gateway.draining:
        parts.append("draining")
    return figures.printable("  ".join(parts))


def unhealthy(view: View) -> Iterator[str]:
    """Yields a line for each thing that is wrong, the worst first; how many more there are, where they are many."""
    tick = view.tick
    if tick is None:
        return
    for each in tick.unhealthy[:MAX_UNHEALTHY]:
        since = "" if each.since is None else f" for {figures.age(tick.now - each.since)}"
        yield figures.printable(f"{each.what} {each.name}{since}" + (f": {each.why}" if each.why else ""))
    if (more := len(tick.unhealthy) - MAX_UNHEALTHY) > 0:
        yield f"and {more} more"


def _rates(sample: Sample | None) -> Iterator[str]:
    if sample is not None:
        yield f"{figures.rate(sample.per_second(sample.generated_tokens))} tok/s"
        wrong = sample.requests.get("failed", 0) + sample.requests.get("refused", 0)
        if wrong:
            yield f"{figures.rate(sample.per_second(wrong))} failed or refused/s"


def _roles(tick: Tick) -> Iterator[str]:
    serving = [worker.role for worker in tick.workers if worker.state == "ok"]
    for role in ("prefill", "decode"):
        yield f"{serving.count(role)} {role}"
