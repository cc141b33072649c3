"""What is written in a picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

__all__ = ["texts_of"]


def texts_of(picture: Path) -> set[str]:
    """The texts of an SVG, as they are."""
    return {"".join(text.itertext()) for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")}
