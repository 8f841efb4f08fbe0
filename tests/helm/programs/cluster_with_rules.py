"""Serves a mock cluster that answers access reviews, until stdin ends; prints the path of its kubeconfig.

python -m tests.helm.programs.cluster_with_rules DIRECTORY RULES.json

The rules: `version`; `groups` of custom resources; `refused`, texts VERB/GROUP/RESOURCE; `labels` of the namespace
`chat`; `nodes`, the allocatable resources of each.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import kmock

from tests.helm.programs.mock_cluster import serving

BUILD = {
    "major": "1",
    "minor": "31",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2026-01-01T00:00:00Z",
    "goVersion": "go1.25",
    "compiler": "gc",
    "platform": "linux/amd64",
}


def review(request: kmock.Request, refused: set[str]) -> dict[str, Any]:
    """The answer to a SelfSubjectAccessReview."""
    asked = request.data["spec"]["resourceAttributes"]
    name = f"{asked['verb']}/{asked.get('group', '')}/{asked['resource']}"
    allowed = asked["namespace"] == "chat" and name not in refused
    return {**request.data, "status": {"allowed": allowed}}


async def main(directory: str, rules: str) -> None:
    """See above."""
    told = json.loads(rules)
    cluster = kmock.KubernetesScaffold()
    names = [
        {"name": group, "versions": [{"groupVersion": f"{group}/v1", "version": "v1"}]} for group in told["groups"]
    ]
    cluster["get /version/"] << {**BUILD, "gitVersion": told["version"]}
    cluster["get /apis/"] << {"kind": "APIGroupList", "apiVersion": "v1", "groups": names}
    refused = set(told["refused"])
    cluster["post /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"] << (lambda request: review(request, refused))
    nodes = [
        {"metadata": {"name": str(number)}, "status": {"allocatable": each}}
        for number, each in enumerate(told["nodes"])
    ]
    cluster["get /api/v1/nodes"] << {"kind": "NodeList", "apiVersion": "v1", "metadata": {}, "items": nodes}
    namespace = {"kind": "Namespace", "apiVersion": "v1", "metadata": {"name": "chat", "labels": told["labels"]}}
    cluster["get /api/v1/namespaces/chat"] << namespace
    async with serving(cluster, Path(directory)) as environment:
        print(environment["KUBECONFIG"], flush=True)
        await asyncio.to_thread(sys.stdin.read)


asyncio.run(main(sys.argv[1], sys.argv[2]))
