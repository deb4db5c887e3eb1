"""The docs site: every page is in it, it builds without a warning, and fetches nothing."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def in_nav(items: object) -> set[str]:
    if isinstance(items, str):
        return {items}
    parts = items.values() if isinstance(items, dict) else items
    return set().union(*map(in_nav, parts))


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages - in_nav(CONFIG["nav"]) == set(), "add these pages to nav in mkdocs.yml"
    assert in_nav(CONFIG["nav"]) - pages == set(), "these are in nav and not in docs/"


def test_links_between_pages_exist():
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


@pytest.mark.slow
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("pip install 'opcast[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in in_nav(CONFIG["nav"]):
        text = (site / page).with_suffix(".html").read_text()
        fetched = re.findall(
            r"<(?:link|script|img)[^>]+(?:href|src)=[\"']?(https?:[^\"' >]+)", text
        )
        assert fetched == [], page
    assert not re.search(r"@import|fonts\.(?:googleapis|gstatic)", "".join(
        path.read_text(errors="replace") for path in site.rglob("*.html")
    ))  # fmt: skip
