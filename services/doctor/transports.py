"""The ways in which KV can move from here: NIXL and its plugins, ports for RDMA."""

import importlib.metadata
import re
from collections.abc import Mapping, Sequence

from kvtransfer.transports.one_sided import Means, usable_means
from services.doctor.finding import Finding, note, ok, warning

_DISTRIBUTIONS = ("nixl-cu12", "nixl-cu13", "nixl")
_NEEDED = "UCX"


def check_transports(environ: Mapping[str, str]) -> list[Finding]:
    """Looks at NIXL's installation, which it does not load, and at ports."""
    return [check_plugins(installed_plugins()), describe_rdma(usable_means(environ))]


def installed_plugins() -> Mapping[str, Sequence[str]]:
    """Returns the names of the plugins by the distribution that brings them."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            files = importlib.metadata.files(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        plugins = {match[1] for file in files if (match := re.fullmatch(r"libplugin_(\w+)\.so", file.name))}
        if plugins:
            found[f"{name} {importlib.metadata.version(name)}"] = sorted(plugins)
    return found


def check_plugins(installed: Mapping[str, Sequence[str]]) -> Finding:
    """Tells whether NIXL can move KV. installed: names of plugins by distribution."""
    if not installed:
        return note("nixl", "it is not installed: KV moves over grpc")
    found = "; ".join(f"{name} with {', '.join(plugins)}" for name, plugins in installed.items())
    if not any(_NEEDED in plugins for plugins in installed.values()):
        return warning("nixl", found, f"its plugin {_NEEDED} is missing, so KV moves over grpc: install nixl again")
    return ok("nixl", found)


def has_rdma(means: Means) -> bool:
    """Tells whether a port for RDMA is active, and UCX may use it."""
    return bool(means & (Means.INFINIBAND | Means.ROCE))


def describe_rdma(means: Means) -> Finding:
    """Tells by which means one worker could read another's memory."""
    if has_rdma(means):
        return ok("rdma", f"active: {'InfiniBand' if means & Means.INFINIBAND else 'RoCE'}")
    same_host = "workers on this host read each other's memory" if means & Means.CMA else "UCX_TLS excludes CMA"
    return note("rdma", f"no active port that UCX may use: KV moves over grpc between hosts; {same_host}")
