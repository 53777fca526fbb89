"""Links that work on GitHub and not here: out of docs/, and to notebooks, which are pages of the site."""

from __future__ import annotations

import re
from typing import Any

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
