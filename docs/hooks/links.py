"""Links that work on GitHub and not here (out of docs/, to notebooks), and a check of what pages
load.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from mkdocs.exceptions import PluginError

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#]+)\)")
ROW, CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]*`")
NAMED = re.compile(r"\[([\w./-]+\.md)\](?=\(\1[)#])")
NOTEBOOK = re.compile(r"(\]\([^)]+)\.ipynb\)")


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Links as the site needs them.

    A notebook is a page; files of the repository outside docs/ are named, not linked; a link that
    is called by its file gets the title of the page.
    """
    folder = posixpath.dirname(page.file.src_uri)
    if "/" in folder:
        return markdown  # notebooks and the API link within the site

    def place(link: str) -> str:
        return posixpath.normpath(posixpath.join(folder, link))

    def inside(link: re.Match[str]) -> str:
        path = place(link[2])
        if not path.startswith("..") and path != "records":
            return link[0]
        return f"{link[1]} (`{posixpath.normpath(posixpath.join('docs', path))}` in the repository)"

    def titled(link: re.Match[str]) -> str:
        file = files.get_file_from_path(place(link[1]))
        return f"[{file.page.title}]" if file else link[0]

    def row(cells: re.Match[str]) -> str:
        """Intervals are not broken. GitHub needs bars in code escaped in a table; here the escape
        would be shown.
        """
        whole = cells[0].replace(" ± ", "\u00a0±\u00a0")
        return CODE.sub(lambda code: code[0].replace("\\|", "|"), whole)

    markdown = ROW.sub(row, markdown)
    return NOTEBOOK.sub(r"\1.md)", NAMED.sub(titled, LINK.sub(inside, markdown)))


LOADED = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=\"?(https?:)?//[^\s>]*",
    re.IGNORECASE,
)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Refuse a page that would load something from the network."""
    found = LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} would load from the network: {found[0]}")
    return output
