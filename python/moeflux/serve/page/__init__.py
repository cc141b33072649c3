"""The page: its files are read once, when the server starts, and given as they are. No path of a request is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from moeflux import files

__all__ = ["HEADERS", "PATHS", "routes"]

FOLDER = Path(__file__).parent
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SOURCES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    # A browser that knows these two refuses to make markup of text at all.
    "require-trusted-types-for": "'script'",
    "trusted-types": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in SOURCES.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _path_of(file: Path) -> str:
    return "/" if file.name == "index.html" else f"/page/{file.name}"


PATHS = {_path_of(file): file for file in files.listed(FOLDER) if file.suffix in TYPES}
"""What the page is made of. Nothing in it is secret, so it is given without a key: somebody must be able to type it."""


def routes() -> list[Route]:
    return [Route(path, _giving(file), methods=["GET"]) for path, file in PATHS.items()]


def _giving(file: Path) -> Callable[[Request], Awaitable[Response]]:
    data = files.read_bytes(file)
    headers = {**HEADERS, "ETag": f'"{hashlib.sha256(data).hexdigest()[:32]}"'}

    async def give(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(data, media_type=TYPES[file.suffix], headers=headers)

    return give
