"""Links that work on GitHub and not here (out of docs/, to notebooks), and a check of what pages load."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.exceptions import PluginError

OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+|records)\)")
NOTEBOOK = re.compile(r"(\]\([^)]+)\.ipynb\)")
README, HOME = "../README.md", "index.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The README is the site's first page, a notebook its own; other files of the repository are named, not linked."""
    if "/" in page.file.src_uri:
        return markdown  # notebooks and the API link within the site

    def inside(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        return f"[{text}]({HOME})" if path == README else f"{text} (`{path.removeprefix('../')}` in the repository)"

    return NOTEBOOK.sub(r"\1.md)", OUTSIDE.sub(inside, markdown))


LOADED = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?(https?:)?//[^\s>]*", re.IGNORECASE)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load something from the network."""
    found = LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} would load from the network: {found[0]}")
    return output
