"""Links of the pages that point out of docs/: they work on GitHub, and here they become the site's own, or text."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)#]+|records)(#[^)]*)?\)")
README = "../README.md"
HOME = "index.md"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The README becomes the first page of the site; other files of the repository are named, and not linked."""

    def inside(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        return f"[{text}]({HOME})" if path == README else f"{text} (`{path.removeprefix('../')}` in the repository)"

    return OUTSIDE.sub(inside, markdown)
