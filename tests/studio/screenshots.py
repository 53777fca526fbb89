"""Screenshots of every room for docs/studio.md: `python tests/studio/screenshots.py ADDRESS docs/images`.

ADDRESS is that of a running studio. Pictures keep all their colours: with fewer, the knobs of sliders vanish.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from conftest import CHROMIUM
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

LOOKS = {
    "light": {"viewport": {"width": 1100, "height": 900}},
    "dark": {"viewport": {"width": 1100, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
PATIENCE = 180_000


def plane(page: Page) -> None:
    box = page.locator("#plane-picture img").bounding_box()
    page.locator("#plane-picture img").click(position={"x": 0.56 * box["width"], "y": 0.42 * box["height"]})
    page.wait_for_timeout(4000)


def image(page: Page) -> None:
    page.locator("#image-go").click()
    expect(page.locator("#image-status")).to_contain_text("Done", timeout=PATIENCE)
    field = page.locator("#image-walk-1 input[type=number]")
    field.fill("2")
    field.press("Enter")
    page.wait_for_timeout(1500)


def restore(page: Page) -> None:
    page.locator("#restore-model input").click()
    page.get_by_role("option", name="celeba").click()
    expect(page.locator("#restore-example input")).to_have_value("celeba-1", timeout=PATIENCE)
    page.locator("#restore-go").click()
    expect(page.locator("#restore-status")).to_contain_text("Done", timeout=PATIENCE)


def sampler(page: Page) -> None:
    page.locator("#sampler-count input[type=number]").fill("2")
    page.locator("#sampler-count input[type=number]").press("Enter")
    page.locator("#sampler-go").click()
    expect(page.locator("#sampler-status")).to_contain_text("Done", timeout=PATIENCE)


def main(address: str, out: Path) -> None:
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for look, options in LOOKS.items():
            context = browser.new_context(**options)
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            page.goto(address)
            page.wait_for_selector("#plane-picture img")
            for name, act in (("Plane", plane), ("Image", image), ("Restore", restore), ("Sampler", sampler)):
                page.get_by_role("tab", name=name, exact=True).click()
                act(page)
                page.wait_for_timeout(500)
                shot = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
                shot.save(out / f"studio_{name.lower()}_{look}.png", optimize=True)
            context.close()
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
