"""The admin port: what is there, and at no other port."""

import re
from pathlib import Path

from services.gateway.http.application import Application
from services.gateway.http.routes import described
from tests.gateway.running_api import running_api

API = Path(__file__).parents[3] / "docs/api.md"


async def test_metrics_and_debug_pages_are_not_at_the_port_of_clients():
    async with running_api() as api:
        answer = await api.complete(max_tokens=2)
        request_id = answer.headers["x-request-id"]
        for path in ("/metrics", "/debug/ledger", "/debug/requests", f"/debug/requests/{request_id}"):
            refused = await api.http.get(path)
            assert refused.status_code == 404
            port = api.admin.base_url.port
            said = f"There is nothing at this path. Paths like it are at the admin port, {port}: see --admin-port."
            assert refused.json()["error"]["message"] == said
            assert (await api.admin.get(path)).status_code == 200


async def test_what_clients_ask_for_is_not_at_the_admin_port():
    async with running_api() as api:
        for path in ("/v1/models", "/version", "/load", "/docs", "/openapi.json"):
            refused = await api.admin.get(path)
            assert refused.status_code == 404
            said = f"There is nothing at this path. Paths like it are at the port for clients, {api.port}: see --port."
            assert path in ("/version", "/load") or refused.json()["error"]["message"] == said
            assert (await api.http.get(path)).status_code == 200
        assert (await api.admin.get("/ready")).json()["status"] == "ready"


async def test_the_table_for_people_has_every_page():
    async with running_api() as api:
        _, admin = api.applications
        assert isinstance(admin, Application)
        names = {"{request_id:path}": "ID", "{file:path}": "FILE"}
        pages = {re.sub(r"{.*}", lambda found: names[found[0]], each.path) for each in described(admin.router.routes)}
    section = API.read_text().partition("At the admin port")[2].partition("\n`/debug/ledger` is JSON")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    assert {path for cell in cells for path in re.findall(r"`([^`]+)`", cell)} == pages
