"""An API server of kmock's, as kubectl and helm need it."""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kmock

VERBS = {"get", "create", "patch"}


class Cluster(kmock.KubernetesEmulator):  # type: ignore[misc]  # kmock is in an environment of its own
    """Knows all kinds of Kubernetes. It keeps what it is given, and does nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.resources.load_bundled()
        core = [(each, self.resources[each]) for each in self.resources if each.group == ""]
        described = [
            {"name": each.plural, "kind": info.kind, "namespaced": info.namespaced, "verbs": sorted(info.verbs)}
            for each, info in core
        ]
        # kmock calls the core group's version `/v1`, in which kubectl finds nothing.
        self["get /api/v1"] << {"kind": "APIResourceList", "groupVersion": "v1", "resources": described}
        self["put"] << self._replace  # which kmock leaves out

    def add(self, custom_resources: dict[str, str]) -> None:
        """Adds kinds by their API version and plural."""
        for name, kind in custom_resources.items():
            self.resources[name] = {"kind": kind, "namespaced": True, "verbs": VERBS}

    def kept(self) -> list[dict[str, Any]]:
        """All that there is."""
        return [dict(each.raw) for each in self.objects.values()]

    async def _replace(self, request: kmock.Request) -> Any:
        self.objects[request.resource, request.namespace, request.name] = request.data
        return request.data

    async def _render_error(self, exc: Exception) -> Any:
        """Gives what is not there Kubernetes' reason, by which helm knows it."""
        missing = isinstance(exc, kmock.KubernetesObjectNotFoundError)
        return await super()._render_error(kmock.KubernetesError(404, "NotFound", "not found") if missing else exc)


@contextlib.asynccontextmanager
async def serving(cluster: kmock.KubernetesScaffold, directory: Path) -> AsyncIterator[dict[str, str]]:
    """An environment in which kubectl and helm find the cluster, until the context ends."""
    async with cluster, kmock.Server(cluster, port=0) as server:
        file = directory / "kubeconfig"
        file.touch(mode=0o600)
        named = {"name": "mock", "cluster": {"server": str(server.url)}, "user": {}}
        named["context"] = {"cluster": "mock", "user": "mock", "namespace": "default"}
        parts = {"clusters": [named], "users": [named], "contexts": [named], "current-context": "mock"}
        file.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **parts}))
        # Releases are ConfigMaps, since the chart has none by default: kmock's lists know no selectors.
        yield {"HOME": str(directory), "KUBECONFIG": str(file), "HELM_DRIVER": "configmap"}


async def run(environment: dict[str, str], *command: str) -> str:
    """What the command prints. Exits where it fails."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=environment)
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    if process.returncode:
        sys.exit(f"{command}: {errors.decode()}")
    return out.decode()
