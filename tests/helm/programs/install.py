"""Installs a chart in a mock cluster and upgrades it; prints what helm said, and what there is after each.

python -m tests.helm.programs.install HELM CHART DIRECTORY SETTING     the upgrade's
"""

import asyncio
import json
import sys
from pathlib import Path

from tests.helm.programs.mock_cluster import Cluster, run, serving


async def main(helm: str, chart: str, directory: str, setting: str) -> None:
    """See above."""
    cluster = Cluster()
    async with serving(cluster, Path(directory)) as environment:
        command = ("demo", chart, "--disable-openapi-validation")
        said = [await run(environment, helm, "install", *command)]
        kept = [cluster.kept()]
        said.append(await run(environment, helm, "upgrade", *command, "--set", setting))
        kept.append(cluster.kept())
        print(json.dumps({"said": said, "kept": kept}))


asyncio.run(main(*sys.argv[1:]))
