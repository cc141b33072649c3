"""What the site needs beside docs/: README.md and CONTRIBUTING.md as pages, and text for links to other files."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
"""Their places in the checkout and in the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    source = {page: source for source, page in PAGES.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        there = PAGES.get(place) or place.removeprefix("docs/")
        if not (ROOT / place).exists():
            raise PluginError(f"{source}: expected a file, found none: {target}")
        if there == place or files.get_file_from_path(there) is None:  # of the checkout, and no page
            return text
        start = posixpath.dirname(page.file.src_uri)
        return f"{picture}[{text}]({posixpath.relpath(there, start)}{anchor})"

    return LINK.sub(led, markdown)
