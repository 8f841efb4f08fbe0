"""The console's files: their kinds, their policy, and what is said where there is none."""

from pathlib import Path

import pytest

from services.gateway.console import pages
from services.gateway.console.static_files import INSTALL, POLICY, plotly_file, static_files
from tests.gateway.keys.key_files import KeySet, bearer
from tests.gateway.running_api import running_api


async def test_every_file_has_its_kind_and_a_strict_policy():
    files = static_files()
    assert "index.html" in files
    async with running_api() as api:
        for name, file in files.items():
            answer = await api.admin.get(f"/console/{name}")
            assert (answer.status_code, answer.content, answer.headers["content-type"]) == (
                200,
                file.content,
                file.kind,
            )
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
        index = await api.admin.get("/console/")
        assert index.content == files["index.html"].content
    assert "unsafe" not in POLICY
    assert "http" not in POLICY
    assert "*" not in POLICY


async def test_a_file_that_the_browser_has_is_not_sent_again():
    async with running_api() as api:
        first = await api.admin.get("/console/")
        again = await api.admin.get("/console/", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["cache-control"] == "no-cache"
        assert (await api.admin.get("/console/", headers={"if-none-match": '"older"'})).status_code == 200


async def test_plotly_comes_out_of_its_own_package(monkeypatch: pytest.MonkeyPatch):
    path = plotly_file()
    assert path is not None, "the tests install the extra `console`"
    async with running_api() as api:
        answer = await api.admin.get("/console/plotly.min.js")
        assert answer.content == path.read_bytes()
        assert (await api.admin.get("/console/about")).json()["has_plotly"] is True
    monkeypatch.setattr(pages, "plotly_file", lambda: None)
    async with running_api() as api:
        refused = await api.admin.get("/console/plotly.min.js")
        assert (refused.status_code, INSTALL in refused.json()["error"]["message"]) == (404, True)
        assert f'INSTALL = "{INSTALL}"' in (await api.admin.get("/console/plotly.js")).text  # what the page says too
        assert (await api.admin.get("/console/about")).json()["has_plotly"] is False


async def test_plotly_is_not_read_for_a_browser_that_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "plotly.min.js"
    path.write_text("draw();")
    monkeypatch.setattr(pages, "plotly_file", lambda: path)
    async with running_api() as api:
        first = await api.admin.get("/console/plotly.min.js")
        assert (first.text, first.headers["content-type"]) == ("draw();", "text/javascript; charset=utf-8")
        assert first.headers["cache-control"] == f"max-age={pages.PLOTLY_S}"
        path.unlink()  # who reads it now fails
        again = await api.admin.get("/console/plotly.min.js", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["../pages.py", "%2e%2e/pages.py", "..%2fpages.py", "/etc/passwd", "static/index.html"]
)
async def test_nothing_but_those_files_is_served(path: str):
    async with running_api() as api:
        assert (await api.admin.get(f"/console/{path}")).status_code == 404


async def test_the_pages_are_below_a_prefix_too_whether_a_proxy_keeps_it_or_not(key_set: KeySet):
    async with running_api(root_path="/models/chat", keys=key_set.keys()) as api:
        for prefix in ("", "/models/chat"):
            assert (await api.http.get(f"{prefix}/console")).headers["location"] == "console/"
            assert (await api.http.get(f"{prefix}/console/")).status_code == 200
            assert (await api.http.get(f"{prefix}/console/about")).status_code == 401
            about = await api.http.get(f"{prefix}/console/about", headers=bearer(key_set.acme))
            assert about.json()["sees"] == "own"
