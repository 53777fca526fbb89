"""The studio in a real browser: one server and one Chromium for all tests (make test-studio)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mmdgs.models import load
from mmdgs.models.fits import FitStore
from mmdgs.noise import LevelTable

pytest.importorskip("gradio", reason="the studio's tests need its extra: make test-studio")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="the studio's tests need Playwright: make test-studio"
)

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
PATIENCE = int(os.environ.get("STUDIO_PATIENCE", "60")) * 1000
"""Milliseconds: the machine that tests run on may be busy."""
playwright.expect.set_options(timeout=PATIENCE)


class Studio:
    """A studio that was started as a person starts it, and its folder for temporary files."""

    def __init__(
        self, folder: Path, *options: str, program: tuple[str, ...] = ("-m", "mmdgs", "studio")
    ) -> None:
        self.log, self.scratch = folder / "log", folder / "scratch"
        self.scratch.mkdir()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment["TMPDIR"] = str(self.scratch)
        with self.log.open("w") as stream:
            words = [sys.executable, *program, "--port", "0", *options]
            self.process = subprocess.Popen(words, stdout=stream, stderr=stream, env=environment)

    @property
    def address(self) -> str:
        """What it prints, once it listens."""
        for _ in range(1200):
            if printed := re.search(r"http://\S+", self.log.read_text()):
                return printed.group()
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise AssertionError(self.log.read_text())

    def end(self) -> float:
        """Ask it to end; the seconds that took. It leaves no folder and no traceback behind."""
        begun = time.monotonic()
        self.process.terminate()
        try:
            self.process.wait(20)
        finally:
            self.process.kill()
        assert self.process.returncode == 0
        assert list(self.scratch.glob("mmdgs-studio-*")) == []
        assert "Traceback" not in self.log.read_text(), self.log.read_text()
        return time.monotonic() - begun


WITHOUT_PHOTO = """
import sys
from mmdgs.models import shipped
del shipped.SHIPPED["photo"]
from mmdgs.__main__ import main
sys.argv[1:1] = ["studio"]
main()
"""
WITH_PHOTO = """
import sys
from pathlib import Path
from mmdgs.models import shipped
from mmdgs.studio import sources
roots, folder = shipped.shipped_roots(), Path({folder!r})
shipped.shipped_roots = lambda: [folder, *roots]
sources.EXAMPLES = folder
from mmdgs.__main__ import main
sys.argv[1:1] = ["studio"]
main()
"""


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Studio]:
    """The studio of most tests, as it is where `photo` is not installed."""
    program = ("-c", WITHOUT_PHOTO)
    running = Studio(tmp_path_factory.mktemp("studio"), program=program)
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="session")
def address(studio: Studio) -> str:
    return studio.address


@pytest.fixture(scope="session")
def photo_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A studio with a tiny model of any size under the name of the one of photographs, and no
    examples."""
    from toy_models import any_size_model  # which screenshots.py does not see

    folder = tmp_path_factory.mktemp("photo-studio")
    any_size_model().save_pretrained(folder / "photo")
    model = load(folder / "photo")
    spectrum = LevelTable.of({level: torch.ones(3, 8, 8) for level in model.levels})
    file = folder / "photo" / "spectral.safetensors"
    FitStore(model, "spectral").write(file, {"images": 2}, spectrum)
    running = Studio(folder, program=("-c", WITH_PHOTO.format(folder=str(folder))))
    try:
        yield running.address
    finally:
        running.end()


@pytest.fixture(scope="session")
def browser() -> Iterator[playwright.Browser]:
    if CHROMIUM is None:
        pytest.fail("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        arguments = ["--no-sandbox", "--disable-gpu"]
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield chromium
        chromium.close()


class Visitor:
    """A person at the page: what it asked of other hosts, and errors of its scripts."""

    def __init__(self, browser: playwright.Browser, address: str, **options: object) -> None:
        options = {"viewport": {"width": 1200, "height": 900}, **options}
        self.context = browser.new_context(**options)
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.address, self.elsewhere, self.broken = address, [], []
        self.page.on("request", self._asked)
        self.page.on("pageerror", lambda error: self.broken.append(str(error)))
        self.page.goto(address)
        self.page.wait_for_selector("#plane-picture img")

    def _asked(self, request: playwright.Request) -> None:
        if not request.url.startswith((self.address, "data:", "blob:")):
            self.elsewhere.append(request.url)

    def room(self, name: str) -> None:
        self.page.get_by_role("tab", name=name, exact=True).click()

    def click(self, element: str) -> None:
        """Click a button, or open a section."""
        locator = self.page.locator(f"button#{element}, #{element} button")
        locator.first.click()

    def expect(self, element: str, words: str) -> str:
        """Wait for words; all that is said there."""
        locator = self.page.locator(f"#{element}")
        playwright.expect(locator).to_contain_text(words)
        return locator.inner_text()

    def settle(self) -> None:
        """A section that opens for the first time gets its values once more, a frame later."""
        self.page.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )

    def set(self, element: str, value: float) -> None:
        field = self.page.locator(f"#{element} input[type=number]")
        field.wait_for()
        self.settle()
        field.fill(str(value))
        field.press("Enter")
        self.settle()
        playwright.expect(field).to_have_value(str(value))

    def choose(self, element: str, words: str, *, exact: bool = False) -> None:
        self.page.locator(f"#{element} input").click()
        self.page.get_by_role("option", name=words, exact=exact).click()

    def error(self) -> str:
        """What the page says went wrong; it vanishes by itself."""
        said = self.page.locator("[data-testid=toast-text]").first
        said.wait_for()
        return said.inner_text()

    def download(self, room: str, to: Path) -> Path:
        button = self.page.locator(f"#{room}-download")
        playwright.expect(button).to_be_enabled()
        with self.page.expect_download() as waiting:
            button.click()
        waiting.value.save_as(to)
        return to


@pytest.fixture
def visit(browser: playwright.Browser, address: str) -> Iterator[object]:
    """Opens the page; at the end nothing was asked of another host, and no script broke."""
    people: list[Visitor] = []

    def come(at: str = address, **options: object) -> Visitor:
        people.append(Visitor(browser, at, **options))
        return people[-1]

    yield come
    for person in people:
        person.context.close()
        assert person.elsewhere == person.broken == []
