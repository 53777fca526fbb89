"""The documentation site, opened from a folder in a real browser."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PATIENCE

pytest.importorskip("material", reason="the site's tests need the extra docs: make test-studio")


def test_search_works_without_a_server(browser, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(words, cwd=Path(__file__).parents[2], env=environment, check=True)
    page = browser.new_page()
    page.goto((tmp_path / "site" / "api" / "models.html").as_uri())
    page.locator("input.md-search__input").click()
    page.keyboard.type("krylov", delay=50)
    result = page.locator(".md-search-result__link").first
    result.wait_for(timeout=PATIENCE)
    assert result.get_attribute("href").startswith((tmp_path / "site").as_uri())
    page.close()
