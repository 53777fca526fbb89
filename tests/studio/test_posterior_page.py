"""The page of a posterior, opened from a file in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import mmdgs

SIDES = (80, 100)


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three draws and the components of a region of pure noise."""
    own = mmdgs.clean_denoiser(lambda x_t, level: x_t / (1 + level.sigma**2))
    settings = mmdgs.PosteriorSettings(0.5, draws=3, components=1, region=(60, 40, 20, 20))
    noisy = torch.rand(1, *SIDES, generator=torch.Generator().manual_seed(0))
    seen = mmdgs.image_posterior(own, noisy, settings)
    return seen.save_page(tmp_path_factory.mktemp("page") / "page.html")


def test_draws_play_stop_and_are_chosen(browser, page_file: Path) -> None:
    page = browser.new_page()
    broken: list[str] = []
    page.on("pageerror", lambda error: broken.append(str(error)))
    page.goto(page_file.as_uri())
    shown = "[...document.querySelectorAll('.draw')].map(img => +getComputedStyle(img).opacity)"
    page.wait_for_function(f"({shown})[1] === 1")
    page.get_by_role("button", name="Pause").click()
    before = page.evaluate(shown)
    page.wait_for_timeout(1500)
    assert page.evaluate(shown) == before
    page.locator("#draw").fill("3")
    assert page.evaluate(shown) == [0, 0, 1]
    assert page.locator("#number").inner_text() == "3"
    page.get_by_role("button", name="Play").click()
    page.wait_for_function(f"({shown})[0] === 1")
    assert broken == []
    page.close()


def test_the_overlay_fades_in_and_a_click_names_a_region(browser, page_file: Path) -> None:
    page = browser.new_page()
    page.goto(page_file.as_uri())
    opacity = "+getComputedStyle(document.getElementById('overlay')).opacity"
    assert page.evaluate(opacity) == 0
    page.locator("#fade").fill("60")
    assert page.evaluate(opacity) == 0.6
    mean = page.locator("#mean")
    frame = mean.bounding_box()
    unit = frame["width"] / SIDES[1]
    mean.click(position={"x": 5 * unit, "y": 75 * unit})
    command = page.locator("#where code").inner_text()
    assert command.endswith("--components 3 --region 0,16,64,64 --out part")
    mean.click(position={"x": 70 * unit, "y": 50 * unit})
    assert page.locator("#where").is_hidden()
    page.close()


def test_nothing_moves_for_those_who_ask_for_less_motion(browser, page_file: Path) -> None:
    page = browser.new_page(reduced_motion="reduce")
    page.goto(page_file.as_uri())
    moving = "document.querySelector('.sway img').src + document.getElementById('draw').value"
    before = page.evaluate(moving)
    page.wait_for_timeout(1500)
    assert page.evaluate(moving) == before
    page.locator(".sway input").first.fill("4")
    assert page.evaluate(moving) != before
    page.close()
