"""The files of the page: open to all, under a strict policy, and nothing else of the disk."""

import pytest
from server.fake_engine import FakeEngine, make_tokenizer

from specprefill_jax.server import app


@pytest.fixture
def server(tmp_path, monkeypatch, another):
    static = tmp_path / "static"
    static.mkdir()
    (static / "index.html").write_text("<!doctype html><title>boats</title>")
    (static / "app.js").write_text("'use strict'")
    (static / "notes.txt").write_text("not a file of the page")
    monkeypatch.setattr(app, "files", lambda package: tmp_path)
    return another(FakeEngine(make_tokenizer()), api_keys=("key",))


@pytest.mark.parametrize(("path", "kind"), [("/", "text/html; charset=utf-8"), ("/app.js", "text/javascript")])
def test_files_of_the_page(server, path, kind):
    status, headers, data = server.ask("GET", path)
    assert status == 200
    assert headers["Content-Type"].startswith(kind)
    assert headers["X-Content-Type-Options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert data


@pytest.mark.parametrize("path", ["/notes.txt", "/index.html", "/static/app.js", "/../app.py", "/%2e%2e/app.py"])
def test_nothing_else_is_served(server, path):
    assert server.ask("GET", path, None, {"Authorization": "Bearer key"})[0] == 404
