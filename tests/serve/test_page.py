"""The page's files: what is served, with which headers, and what they may not contain. make page-test uses the page."""

from __future__ import annotations

import http.client
import re
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest

from moeflux.model import Model
from moeflux.serve import page
from moeflux.serve.guard import Rules
from support.live_server import Live, live

LONGEST = 500  # lines, as of every other file
MARKUP = """
    innerHTML outerHTML insertAdjacentHTML document.write DOMParser createContextualFragment setHTML srcdoc
    eval( Function( javascript:
""".split()


def get(
    server: Live, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, bytes, Message]:
    """(status, body, headers)"""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    connection.request(method, path, headers=headers or {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers


def sources() -> dict[str, str]:
    return {path: file.read_text() for path, file in page.PATHS.items()}


class Elements(HTMLParser):
    """Tags with their attributes, and the text in scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style") and text.strip():
            self.inside.append(text)


# ---- What is served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", page.PATHS)
def test_every_file_is_served_as_it_is(server: Live, path: str) -> None:
    status, body, headers = get(server, path)
    assert (status, body) == (200, page.PATHS[path].read_bytes())
    kind = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
    assert headers.get_content_type() == kind[page.PATHS[path].suffix]
    again, nothing, same = get(server, path, {"If-None-Match": headers["ETag"]})
    assert (again, nothing) == (304, b"")
    for name, value in page.HEADERS.items():
        assert headers[name] == same[name] == value
    assert get(server, path, method="POST")[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/__init__.py",
        "/page/index.html",
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page//etc/passwd",
        "/page/..\\app.py",
        "/page/main.js%00.css",
        "//page/main.js",
    ],
)
def test_no_path_leads_elsewhere(server: Live, path: str) -> None:
    assert get(server, path)[0] == 404


def test_the_policy_allows_this_server_alone() -> None:
    policy = dict(part.split(" ", 1) for part in page.HEADERS["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'"
    assert {policy[name] for name in policy if name.endswith("-src")} == {"'none'", "'self'"}
    assert "unsafe" not in page.HEADERS["Content-Security-Policy"]


def test_the_page_needs_no_key_and_everything_else_does(model: Model) -> None:
    with live(model, rules=Rules(keys=("a long key",))) as server:
        assert [get(server, path)[0] for path in page.PATHS] == [200] * len(page.PATHS)
        assert get(server, "/plan")[0] == get(server, "/metrics")[0] == get(server, "/page/x.js")[0] == 401
        assert get(server, "/plan", {"Authorization": "Bearer a long key"})[0] == 200
        for path in page.PATHS:
            assert get(server, path, {"Host": "evil.example"})[0] == 403
            assert get(server, path, {"Origin": "https://evil.example"})[0] == 403


# ---- What the files may not contain -----------------------------------------------------------------------------


def test_there_is_no_script_or_style_in_the_markup() -> None:
    elements = Elements(sources()["/"])
    assert elements.inside == []
    for tag, attributes in elements.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
    assert [attributes["type"] for tag, attributes in elements.found if tag == "script"] == ["module"]


def test_whatever_a_file_asks_for_is_served() -> None:
    served, wanted = sources(), set[str]()
    for path, text in served.items():
        names = re.findall(r'(?:from|import) "([^"]+)"|url\("?([^)"]+)', text) if path != "/" else []
        wanted |= {urljoin(path, name) for pair in names for name in pair if name}
    for tag, attributes in Elements(served["/"]).found:
        if tag in ("link", "script", "img"):
            wanted.add(attributes.get("href") or attributes["src"] or "")
    assert wanted == served.keys() - {"/"}


def test_no_file_leads_away_or_makes_markup_of_text() -> None:
    for path, text in sources().items():
        addresses = [each for each in re.findall(r"https?://[\w.-]+", text) if each != "http://www.w3.org"]
        assert addresses == [], path
        assert [word for word in MARKUP if word in text] == [], path
        assert text.count("\n") <= LONGEST, path


def test_every_name_that_the_scripts_look_for_is_in_the_markup() -> None:
    ids = {attributes["id"] for _, attributes in Elements(sources()["/"]).found if "id" in attributes}
    used = {name for text in sources().values() for name in re.findall(r'byId\("([^"]+)"\)', text)}
    assert used <= ids


def test_the_files_are_part_of_the_package() -> None:
    assert {file.name for file in page.PATHS.values()} >= {"index.html", "main.js", "page.css", "mark.svg"}
    assert {Path(file).parent for file in page.PATHS.values()} == {Path(page.__file__).parent}
