"""Mathematics in reports: TeX between dollar signs, drawn by matplotlib as a picture."""

from __future__ import annotations

import base64
import io
import re
from functools import cache
from typing import TYPE_CHECKING

from mmdgs.tables import MATHEMATICS, plain

if TYPE_CHECKING:
    from markupsafe import Markup

SIZE = 12.5
"""Points: as tall as the 16 pixels of the text around it."""


def typeset(text: str) -> Markup:
    """A text as HTML, with what stands between dollar signs set as mathematics."""
    from markupsafe import Markup, escape

    pieces, end = [], 0
    for match in re.finditer(MATHEMATICS, text):
        pieces += [escape(text[end : match.start()]), Markup(_formula(match.group()))]
        end = match.end()
    return Markup("").join([*pieces, escape(text[end:])])


@cache
def _formula(tex: str) -> str:
    """A formula as an image element that stands on the line."""
    from markupsafe import escape
    from matplotlib.font_manager import FontProperties
    from matplotlib.mathtext import math_to_image

    file = io.BytesIO()
    font = FontProperties(size=SIZE, math_fontfamily="stix")
    depth = math_to_image(tex, file, prop=font, dpi=72, format="svg", color="#1c2330")
    picture = base64.b64encode(file.getvalue()).decode()
    style = f"vertical-align:-{depth:.1f}pt"
    source = f"data:image/svg+xml;base64,{picture}"
    return f'<img class="formula" alt="{escape(plain(tex))}" style="{style}" src="{source}">'
