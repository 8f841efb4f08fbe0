"""Applies manifests with kubectl, twice, to a mock cluster; prints what kubectl said and what there is then.

python apply.py MANIFESTS.yaml CUSTOM_RESOURCES.json     kinds of custom resources by API version and plural
"""

import asyncio
import json
import sys
from pathlib import Path

from mock_cluster import Cluster, run, serving  # type: ignore[import-not-found]  # it lies beside the program

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
