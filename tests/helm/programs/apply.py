"""Applies manifests with kubectl, twice, to an API server of kmock's; prints what kubectl said and what there is then.

python apply.py MANIFESTS.yaml CUSTOM_RESOURCES.json     kinds of custom resources by API version and plural
"""

import asyncio
import json
import sys
from pathlib import Path

import kmock

KUBECTL = Path(sys.executable).with_name("kubectl")


async def kubectl(url: str, cache: Path, *arguments: str) -> list[str]:
    """The lines that it prints. Exits where it fails."""
    where = ("--server", url, "--cache-dir", str(cache), "--namespace", "default")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        KUBECTL, *where, *arguments, stdout=pipe, stderr=pipe, env={"HOME": str(cache)}
    )
    out, errors = await asyncio.wait_for(process.communicate(), 60)
    if process.returncode:
        sys.exit(f"kubectl {arguments[0]}: {errors.decode()}")
    return out.decode().splitlines()


def serve_core(server: kmock.KubernetesEmulator) -> None:
    """Serves discovery of the core group as Kubernetes does: kmock calls it `/v1`, in which kubectl finds nothing."""
    found = [(each, server.resources[each]) for each in server.resources if each.group == ""]
    described = [
        {"name": each.plural, "kind": info.kind, "namespaced": info.namespaced, "verbs": sorted(info.verbs)}
        for each, info in found
    ]
    server["get /api/v1"] << {"kind": "APIResourceList", "groupVersion": "v1", "resources": described}


async def main(manifests: str, custom_resources: str) -> None:
    """See above."""
    server = kmock.KubernetesEmulator()
    server.resources.load_bundled()
    serve_core(server)
    verbs = {"get", "create", "patch"}
    for name, kind in json.loads(custom_resources).items():
        server.resources[name] = {"kind": kind, "namespaced": True, "verbs": verbs}
    async with server, kmock.Server(server, port=0) as served:
        cache = Path(manifests).parent / "kubectl"
        apply = ("apply", "--validate=false", "--filename", manifests)
        said = [await kubectl(str(served.url), cache, *apply) for _ in range(2)]
        kept = [dict(each.raw) for each in server.objects.values()]
    print(json.dumps({"first": said[0], "second": said[1], "kept": kept}))


asyncio.run(main(sys.argv[1], sys.argv[2]))
