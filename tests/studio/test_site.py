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
    site = tmp_path / "site"
    options = ["--strict", "--quiet", "--site-dir", str(site)]
    command = [sys.executable, "-m", "mkdocs", "build", *options]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment, check=True)
    page = browser.new_page()
    page.goto((site / "use" / "api" / "models.html").as_uri())
    page.locator("input.md-search__input").click()
    page.keyboard.type("krylov", delay=50)
    result = page.locator(".md-search-result__link").first
    result.wait_for(timeout=PATIENCE)
    assert result.get_attribute("href").startswith(site.as_uri())
    page.close()
