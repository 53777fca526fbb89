"""One self-contained HTML page about the posterior of an image: nothing is loaded.

The mean under its uncertainty, draws in turn, components; a click gives the command for those of
another part (page.js).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from importlib.resources import files

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import jpeg, png
from mmdgs.uncertainty import pictures
from mmdgs.uncertainty.image import ImagePosterior
from mmdgs.uncertainty.regions import SIDE

STYLE, SCRIPT = (
    files("mmdgs.uncertainty").joinpath(name).read_text(encoding="utf-8")
    for name in ("page.css", "page.js")
)
EXACT, MOST_SIDE = 160 * 160, 1024
"""Pixels up to which pictures are PNG, and the largest side of others."""
LEAST_WIDTH = 256
"""Pixels of the screen, about, that small images are shown in."""

WORDS = {
    "psnr_noisy": "PSNR of the noisy image (dB)",
    "psnr_mean": "PSNR of the mean (dB)",
    "z_variance": "mean square of (truth - mean) / std (right: 1)",
    "coverage_90": "pixels within their 90% intervals (right: 0.9)",
    "component_coverage_90": "components within their 90% intervals (right: 0.9)",
    "explained": "share of the squared error along the components",
}


def page(seen: ImagePosterior) -> str:
    """The page of one image."""
    tiles = f", in {seen.tiles} overlapping tiles" if seen.tiles > 1 else ""
    height, width = seen.mean.shape[1:]
    reduced = " Its pictures are smaller on this page." if max(height, width) > MOST_SIDE else ""
    truth = [] if seen.truth is None else [("truth", pictures.pixels(seen.truth))]
    beside = [*truth, ("noisy", pictures.pixels(seen.noisy))]
    body = [
        f"<h1>What p(x | noisy x) says: {escape(seen.name)}</h1>",
        f'<p class="soft">Model {escape(seen.model)}. Noise: standard deviation {seen.sigma:.4g}, '
        f"for values in [0, 1]. Image: {width} x {height} pixels{tiles}."
        f"{reduced}</p>",
        *[f"<p>{escape(remark)}</p>" for remark in seen.remarks],
        _summary(seen),
        '<div class="stages">',
        _mean_stage(seen),
        _draws_stage(seen) if len(seen.draws) else "",
        "</div>",
        _clicked(seen),
        "<h2>The image, and the scale of the uncertainty</h2>",
        _row(beside, _figure("standard deviation", pictures.std_picture(seen.std), "std")),
        _scores(seen),
    ]
    if len(seen.directions):
        body += _components(seen)
    return _document(f"{seen.name}: posterior", "".join(body), SCRIPT)


def _summary(seen: ImagePosterior) -> str:
    """How good the mean and the intervals are, in one line."""
    if not seen.scores:
        return ""
    noisy, mean, share = (seen.scores[n] for n in ("psnr_noisy", "psnr_mean", "coverage_90"))
    return (
        f"<p><b>PSNR {mean:.2f} dB</b> (the noisy image: {noisy:.2f}). <b>{100 * share:.1f}%</b> "
        "of the pixels lie within their 90% intervals.</p>"
    )


def _mean_stage(seen: ImagePosterior) -> str:
    """The mean with the uncertainty over it, and the region."""
    values = pictures.pooled(seen.std)
    top = pictures.top_of(values)
    height, width = values.shape
    region = "" if seen.region is None else f' data-region="[{",".join(map(str, seen.region))}]"'
    over = image_tag("standard deviation", pictures.in_colours(values, top), 'id="overlay"')
    return (
        "<section><h2>Mean and uncertainty</h2><p>The mean is the best single guess; the colours "
        "say how far off it is likely to be, pixel by pixel: bright is unsure. Click on a place to "
        f'see its components.</p><div class="stage" id="mean" style="{_wide(width)}" data-width='
        f'"{width}" data-height="{height}" data-side="{SIDE}"{region}>'
        f'{image_tag("mean", pictures.pixels(seen.mean))}{over}<div id="box" hidden></div></div>'
        '<label class="control">uncertainty <input type="range" id="fade" min="0" max="100" '
        f'value="0"> 0 to {top:.2g}</label></section>'
    )


def _draws_stage(seen: ImagePosterior) -> str:
    """The draws in one frame, one after the other."""
    count, width = len(seen.draws), seen.mean.shape[2]
    frames = "".join(
        image_tag(f"draw {i}", pictures.pixels(draw), 'class="draw"')
        for i, draw in enumerate(seen.draws, 1)
    )
    return (
        "<section><h2>Draws</h2><p>Images that the noisy one may come from, in turn. What stays is "
        "known; what moves is not, and detail that is in one draw alone was invented.</p>"
        f'<div class="stage" id="draws" style="{_wide(width)}">{frames}</div>'
        '<div class="control"><button id="play">Play</button><label>draw <input type="range" '
        f'id="draw" min="1" max="{count}" value="1"></label><span id="number">1</span> of {count}'
        "</div></section>"
    )


def _clicked(seen: ImagePosterior) -> str:
    """The command for the components of a place that was clicked on."""
    command = f"{seen.command or 'mmdgs posterior MODEL IMAGE'} --components 3 --region "
    return (
        '<p id="where" hidden aria-live="polite">The components of this region are not on the '
        f'page. They are made by <code class="line">{escape(command)}<span id="region"></span> '
        "--out part</code></p>"
    )


def index_page(names: list[str], model: str) -> str:
    """Links to the pages of all images, with the picture of each."""
    links = "".join(
        f'<figure style="width:160px"><a href="{name}/page.html">'
        f'<img src="{name}/mean.png" alt="{name}">'
        f"</a><figcaption>{name}</figcaption></figure>"
        for name in map(escape, names)
    )
    title = f'<h1>Posteriors of {len(names)} images</h1><p class="soft">Model {escape(model)}.</p>'
    return _document("Posteriors", f'{title}<div class="row">{links}</div>')


def _document(title: str, body: str, script: str = "") -> str:
    script = f"<script>{script}</script>" if script else ""
    head = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}<title>{escape(title)}'
        f"</title><style>{STYLE}</style></head><body>{body}{script}</body></html>\n"
    )


def _scores(seen: ImagePosterior) -> str:
    if not seen.scores:
        return ""
    rows = "".join(
        f"<tr><td>{WORDS[name]}</td><td>{value:.4g}</td></tr>"
        for name, value in seen.scores.items()
    )
    return f"<h2>Against the truth</h2><table>{rows}</table>"


def _components(seen: ImagePosterior) -> list[str]:
    total = seen.std.square().sum().item()
    corners = ",".join(map(str, seen.region or ()))
    where = f" of the region {corners} (x, y, width, height)" if seen.region else ""
    own = "" if seen.region_given else " This region was chosen as the most uncertain one."
    parts = [
        f'<h2 id="components">Principal components{where}</h2>',
        "<p>The directions in which the image is least certain, largest first. Each row walks "
        "from two standard deviations below the mean to two above, and the picture below it moves "
        "that way: all of these are likely. The "
        "curve is the density along the direction with the skewness and kurtosis of the "
        "posterior, and the dotted one a Gaussian. Two peaks are two explanations. In a large "
        f"image a component may move many pixels a little: those of a part say more.{own}</p>",
    ]
    for i, row in enumerate(pictures.walk_pictures(seen)):
        walk = "".join(
            _figure("mean" if step == 0 else f"{step:+g} std", picture)
            for step, picture in zip(pictures.STEPS, row, strict=True)
        )
        share = seen.variances[i].item() / total
        facts = [("standard deviation", f"{seen.stds[i].item():.3g}")]
        facts += [] if seen.region else [("share of all variance", f"{100 * share:.3g}%")]
        facts += [
            ("skewness", f"{seen.skewness[i].item():+z.2f}"),
            ("excess kurtosis", f"{seen.excess_kurtosis[i].item():+z.2f}"),
            ("90% interval", f"mean ± {seen.reach[i].item():.3g}"),
            ("residual", f"{seen.residuals[i].item():.1e}"),
        ]
        table = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts)
        parts.append(
            f'<div class="card"><h3>Component {i + 1}</h3><div class="walk">{walk}'
            f"{_figure('what changes', pictures.direction_picture(seen, i))}</div>"
            f'<div class="facts"><div class="sway"><img alt="component {i + 1} in motion">'
            f'<input type="range" min="0" max="4" value="2" aria-label="step of component {i + 1}">'
            f"</div>{density_svg(seen.grid, seen.density[i])}<table>{table}</table>"
            "</div></div>"
        )
    return parts


def density_svg(grid: Tensor, density: Tensor) -> str:
    """A density over standard deviations, with a Gaussian, as a small drawing."""
    kept = grid.abs() <= 3.5
    z, p = grid[kept], density[kept]
    if not torch.isfinite(p).all():
        return '<p class="soft">no density: the variance along this direction is not positive</p>'
    normal = torch.exp(-(z**2) / 2) / (2 * torch.pi) ** 0.5
    top = 1.05 * max(p.max().item(), normal.max().item())

    def path(values: Tensor) -> str:
        points = zip(
            (20 + (z + 3.5) / 7 * 200).tolist(), (100 - values / top * 95).tolist(), strict=True
        )
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)

    marks = "".join(
        f'<text x="{20 + (z + 3.5) / 7 * 200:.0f}" y="114" font-size="10" text-anchor="middle" '
        f'fill="currentColor">{label}</text>'
        for z, label in ((-2, "-2"), (0, "0"), (2, "+2"))
    )
    return (
        '<svg viewBox="0 0 240 118" role="img" aria-label="density along the component, in '
        'standard deviations">'
        f'<path d="M20 100H220" stroke="currentColor" opacity=".4"/>{marks}'
        f'<path d="{path(normal)}" fill="none" stroke="currentColor" stroke-dasharray="2 3" '
        'opacity=".7"/>'
        f'<path d="{path(p)}" fill="none" stroke="var(--accent)" stroke-width="2"/></svg>'
    )


def _row(named: Iterable[tuple[str, numpy.ndarray]], last: str = "") -> str:
    figures = "".join(_figure(word, picture) for word, picture in named)
    return f'<div class="row">{figures}{last}</div>'


def _figure(word: str, picture: numpy.ndarray, kind: str = "") -> str:
    caption = f"<figcaption>{escape(word)}</figcaption>"
    style = "" if kind else f' style="{_wide(picture.shape[1])}"'
    return f'<figure class="{kind}"{style}>{image_tag(word, picture)}{caption}</figure>'


def image_tag(word: str, picture: numpy.ndarray, more: str = "") -> str:
    """A picture inside a page: exact where it is small or has transparent parts, else JPEG of at
    most MOST_SIDE pixels.
    """
    height, width = picture.shape[:2]
    small = height * width <= EXACT or picture.shape[2:] == (4,)
    kind, content = ("png", png(picture)) if small else ("jpeg", jpeg(picture, MOST_SIDE))
    crisp = ' style="image-rendering:pixelated"' if small else ""
    return (
        f'<img {more}{crisp} alt="{escape(word)}" width="{width}" height="{height}" '
        f'src="data:image/{kind};base64,{base64.b64encode(content).decode()}">'
    )


def _wide(width: int) -> str:
    """How wide a picture is shown: small ones enlarged, by whole numbers."""
    return f"width:{width * max(1, round(LEAST_WIDTH / width))}px"
