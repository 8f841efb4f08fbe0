"""Applies manifests with kubectl, twice, to a mock cluster; prints what kubectl said and what there is then.

python -m tests.helm.programs.apply MANIFESTS.yaml CUSTOM_RESOURCES.json     kinds by API version and plural
"""

import asyncio
import json
import sys
from pathlib import Path

from tests.helm.programs.mock_cluster import Cluster, run, serving

KUBECTL = str(Path(sys.executable).with_name("kubectl"))


async def main(manifests: str, custom_resources: str) -> None:
    """See above."""
    cluster = Cluster()
    cluster.add(json.loads(custom_resources))
    async with serving(cluster, Path(manifests).parent) as environment:
        command = (KUBECTL, "apply", "--validate=false", "--filename", manifests)
        said = [(await run(environment, *command)).splitlines() for _ in range(2)]
        print(json.dumps({"first": said[0], "second": said[1], "kept": cluster.kept()}))


asyncio.run(main(sys.argv[1], sys.argv[2]))
