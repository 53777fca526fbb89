"""Screenshots of every room for docs/studio.md: `python tests/studio/screenshots.py docs/images`.

Pictures keep all their colours: with fewer, the knobs of sliders vanish.
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path

from conftest import CHROMIUM, PATIENCE, Studio, Visitor
from PIL import Image
from playwright.sync_api import expect, sync_playwright

WIDE = {"width": 1100, "height": 900}
LOOKS = {
    "light": {"viewport": WIDE},
    "dark": {"viewport": WIDE, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


def plane(visitor: Visitor) -> None:
    picture = visitor.page.locator("#plane-picture img")
    box = picture.bounding_box()
    picture.click(position={"x": 0.56 * box["width"], "y": 0.42 * box["height"]})
    expect(visitor.page.locator("#plane-download")).to_be_enabled(timeout=PATIENCE)


def image(visitor: Visitor) -> None:
    visitor.click("image-go")
    visitor.expect("image-status", "Done")
    visitor.set("image-walk-1", 2)
    visitor.page.wait_for_timeout(1500)


def restore(visitor: Visitor) -> None:
    visitor.choose("restore-model", "celeba")
    expect(visitor.page.locator("#restore-example input")).to_have_value("celeba-1")
    visitor.click("restore-go")
    visitor.expect("restore-status", "Done")


def sampler(visitor: Visitor) -> None:
    visitor.set("sampler-count", 2)
    visitor.click("sampler-go")
    visitor.expect("sampler-status", "Done")


def main(out: Path, looks: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        studio = Studio(Path(folder))
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            for look in looks or LOOKS:
                visitor = Visitor(browser, studio.address, **LOOKS[look])
                for act in (plane, image, restore, sampler):
                    visitor.room(act.__name__.capitalize())
                    act(visitor)
                    visitor.page.wait_for_timeout(500)
                    shot = Image.open(io.BytesIO(visitor.page.screenshot(full_page=True)))
                    path = out / f"studio_{act.__name__}_{look}.png"
                    shot.convert("RGB").save(path, optimize=True)
                visitor.context.close()
        finally:
            browser.close()
            studio.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
