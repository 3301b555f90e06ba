"""The files of the chat page are served with a policy that allows no foreign code."""

from pathlib import Path

import pytest

from redline.serving import site
from serving.conftest import make_server
from serving.plain_http import send


def test_the_page_needs_no_key_but_the_api_does(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page"
    page.mkdir()
    for name in ("index.html", "app.js", "style.css", "icon.svg", "__init__.py"):
        (page / name).write_text(f"/* {name} */")
    monkeypatch.setattr(site, "files", lambda package: tmp_path)
    with make_server(folder, {"key": "a-long-enough-key"}) as server:
        kinds = {"/": "text/html", "/app.js": "text/javascript", "/style.css": "text/css", "/icon.svg": "image/svg+xml"}
        for path, kind in kinds.items():
            answer = send(f"{server.url}{path}")
            assert answer.status == 200 and answer.headers["content-type"].startswith(kind)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert send(f"{server.url}/__init__.py").status == 401
        assert send(f"{server.url}/v1/models").status == 401


def test_without_a_page_the_root_is_not_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "files", lambda package: tmp_path)
    with make_server(folder) as server:
        assert send(f"{server.url}/").code == "not_found"
