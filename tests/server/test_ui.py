"""The page, by HTTP: served, small, and closed to everything that is not of this server."""

from __future__ import annotations

import gzip
import re
import tomllib
from pathlib import Path

import pytest

from foreword.config.options import Config
from foreword.server.routes.ui import CONTENT_SECURITY_POLICY, MEDIA_TYPES, STATIC
from tests.server.conftest import RunningServer, run_server

ROOT = Path(__file__).parents[2]
FILES = sorted(path.name for path in STATIC.iterdir())
PAGES = {"index.html": "/", "docs.html": "/docs"}
MAX_GZIPPED_BYTES = 60_000
KEY = "secret"
# `import ... from "./x.js"`, `import("./x.js")`, `src="ui/x.js"`, `href="ui/x.css"`
REFERENCE = re.compile(r"""(?:from|import\()\s*"\./([\w.-]+)"|(?:src|href)="ui/([\w.-]+)\"""")
# What makes a text markup, or code, or a style that the policy forbids.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser"
    r"|setAttribute\(\"style"
)


def read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def references(name: str) -> set[str]:
    """Files of the page that one file loads."""
    return {a or b for a, b in REFERENCE.findall(read(name))}


def test_files_are_served_with_the_policy(served: RunningServer) -> None:
    for path, name in ({page: name for name, page in PAGES.items()} | {f"/ui/{n}": n for n in FILES}).items():
        reply = served.http.get(path)
        assert reply.status_code == 200
        assert reply.text == read(name)
        assert reply.headers["content-type"] == MEDIA_TYPES[Path(name).suffix]
        assert reply.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert reply.headers["x-content-type-options"] == "nosniff"
        head = served.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == reply.headers["content-length"]
        again = served.http.get(path, headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_policy_allows_nothing_inline_and_no_other_origin() -> None:
    directives = dict(part.split(" ", 1) for part in CONTENT_SECURITY_POLICY.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "*" not in CONTENT_SECURITY_POLICY
    assert directives["require-trusted-types-for"] == "'script'"


def test_page_is_small() -> None:
    sizes = {name: len(gzip.compress((STATIC / name).read_bytes())) for name in FILES}
    assert sum(sizes.values()) <= MAX_GZIPPED_BYTES, sizes


def test_files_are_compressed_on_request(served: RunningServer) -> None:
    plain = served.http.get("/ui/style.css", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    packed = served.http.get("/ui/style.css", headers={"Accept-Encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.content == plain.content
    assert int(packed.headers["content-length"]) < len(plain.content) / 2
    assert packed.headers["etag"] == plain.headers["etag"]


def test_files_name_no_other_origin_and_make_no_markup_of_text() -> None:
    for name in FILES:
        text = read(name).replace("http://www.w3.org/2000/svg", "")  # a namespace is no address
        assert not re.search(r"https?://[\w.-]|[\"'(]//[a-z]", text), name
        assert not FORBIDDEN.search(text), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", text), name


def test_every_file_is_reachable_and_every_reference_exists() -> None:
    reached, open_ = set[str](), set(PAGES)
    while open_:
        name = open_.pop()
        reached.add(name)
        assert name in FILES, f"{name} does not exist"
        open_ |= references(name) - reached
    assert reached == set(FILES)


def test_files_are_installed_with_the_package() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"][
        "foreword"
    ]
    assert "server/static/ui/*" in data


def test_page_needs_no_key_and_data_does() -> None:
    with run_server(Config(api_key=KEY), key=KEY) as server:
        for path in ("/", "/docs", "/ui/app.js", "/ui/style.css"):
            assert server.http.get(path).status_code == 200
        for path in ("/ui", "/ui/none.js", "/ui/../v1/models", "/v1/models", "/admin/keys"):
            assert server.http.get(path).status_code in (401, 404)
        assert server.http.get("/v1/models").status_code == 401


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_page_works_behind_a_prefix(prefix: str) -> None:
    """All its addresses are relative, so a proxy may strip the prefix or pass it on."""
    with run_server(Config(root_path="/llm")) as server:
        assert server.http.get(f"{prefix}/").text == read("index.html")
        assert server.http.get(f"{prefix}/ui/app.js").status_code == 200
        assert server.http.get(f"{prefix}/docs").text == read("docs.html")
    for name in FILES:
        assert not re.search(r"""(?:src|href)="/|fetch\(\s*["'`]/""", read(name))


def test_page_is_turned_off() -> None:
    with run_server(Config(ui=False)) as server:
        for path in ("/", "/docs", "/ui/app.js"):
            assert server.http.get(path).status_code == 404
        assert server.http.get("/openapi.json").status_code == 200


def test_only_files_of_the_page_are_served(served: RunningServer) -> None:
    for name in ("none.js", "..%2Fapp.py", ".", "%2e%2e", "app.js%00", "index.html/x"):
        reply = served.http.get(f"/ui/{name}")
        assert reply.status_code in (200, 404)  # httpx resolves "." to the page itself
        assert reply.status_code == 404 or reply.text == read("index.html")
