"""One self-contained HTML page about the posterior of an image: nothing is loaded."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from importlib.resources import files

import numpy
import torch
from torch import Tensor

from mmdgs.data.pictures import png
from mmdgs.uncertainty import pictures
from mmdgs.uncertainty.image import ImagePosterior

STYLE = files("mmdgs.uncertainty").joinpath("page.css").read_text(encoding="utf-8")

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
    tiles = f", {seen.tiles} overlapping tiles of the network's size" if seen.tiles > 1 else ""
    std = _figure("standard deviation", pictures.std_picture(seen.std), "std")
    body = [
        f"<h1>What p(x | noisy x) says: {escape(seen.name)}</h1>",
        f'<p class="soft">Model {escape(seen.model)}. Noise: standard deviation {seen.sigma:.4g}, '
        f"for values in [0, 1]. Image: {seen.mean.shape[2]} x {seen.mean.shape[1]} "
        f"pixels{tiles}.</p>",
        *[f"<p>{escape(remark)}</p>" for remark in seen.remarks],
        "<h2>Mean and uncertainty</h2>",
        "<p>The mean is the best single guess. The standard deviation says, pixel by pixel, how "
        "far off it is likely to be: bright is unsure.</p>",
        _row(pictures.main_pictures(seen).items(), std),
        _scores(seen),
    ]
    if len(seen.draws):
        body += [
            "<h2>Draws</h2>",
            "<p>Images that the noisy one may come from. What all of them share is known; where "
            "they differ, the mean is a compromise, and detail that is in one draw alone was "
            "invented.</p>",
            _row(
                (f"draw {i}", pictures.enlarged(pictures.pixels(draw), 128))
                for i, draw in enumerate(seen.draws, 1)
            ),
        ]
    if len(seen.directions):
        body += _components(seen)
    return _document(f"{seen.name}: posterior", "".join(body))


def index_page(names: list[str], model: str) -> str:
    """Links to the pages of all images, with the picture of each."""
    links = "".join(
        f'<figure><a href="{name}/page.html"><img src="{name}/mean.png" alt="{name}" width="160">'
        f"</a><figcaption>{name}</figcaption></figure>"
        for name in map(escape, names)
    )
    title = f'<h1>Posteriors of {len(names)} images</h1><p class="soft">Model {escape(model)}.</p>'
    return _document("Posteriors", f'{title}<div class="row">{links}</div>')


def _document(title: str, body: str) -> str:
    head = '<meta name="viewport" content="width=device-width,initial-scale=1">'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}<title>{escape(title)}'
        f"</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
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
    parts = [
        f"<h2>Principal components{where}</h2>",
        "<p>The directions in which the image is least certain, largest first. Each row walks "
        "from two standard deviations below the mean to two above: all of these are likely. The "
        "curve is the density along the direction with the skewness and kurtosis of the "
        "posterior, and the dotted one a Gaussian. Two peaks are two explanations. In a large "
        "image a component may move many pixels a little: <code>--region</code> looks at a "
        "part.</p>",
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
            f'<div class="facts">{density_svg(seen.grid, seen.density[i])}<table>{table}</table>'
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
    data = base64.b64encode(png(picture)).decode()
    size = f'width="{picture.shape[1]}" height="{picture.shape[0]}" style="height:auto"'
    return (
        f'<figure class="{kind}"><img alt="{escape(word)}" {size} '
        f'src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(word)}</figcaption></figure>"
    )
