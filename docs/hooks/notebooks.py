"""Notebooks as pages: docs/notebooks/NAME.ipynb becomes notebooks/NAME.md, with the outputs it was
saved with.

A notebook is a JSON file of Markdown, code and outputs, so that nothing of Jupyter is needed to
show one.
"""

from __future__ import annotations

import base64
import json
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

WIDTH = 88
"""Characters of a line of output."""
NOTE = (
    "*This page is a notebook: [download it]({name}.ipynb). Its outputs are those of the models "
    "that ship.*\n"
)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page and its pictures for every notebook; the notebook itself is copied as it is."""
    for source in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = Path(source.src_uri).with_suffix(".md")
        text, pictures = converted(json.loads(source.content_string), page.stem)
        files.append(File.generated(config, page.as_posix(), content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, (page.parent / name).as_posix(), content=picture))
    return files


def converted(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook's Markdown, and its pictures by file name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}_{len(pictures)}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Output]({picture})")
            else:
                written = "".join(output.get("text") or data.get("text/plain") or ()).splitlines()
                lines = [line for long in written for line in textwrap.wrap(long, WIDTH) or [""]]
                parts.append("\n".join(["```text", *lines, "```"]))
    parts.insert(1, NOTE.format(name=name))
    return "\n\n".join(parts) + "\n", pictures
