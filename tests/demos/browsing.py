"""Helpers of the browser tests: sizes, steps of a visitor, screenshots, axe."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

from mmspec.vision.embedded import samples

PATIENCE = 1000 * int(os.environ.get("MMSPEC_BROWSER_PATIENCE", "120"))  # milliseconds
IMAGE, VIDEO = str(samples() / "scene.png"), str(samples() / "clip.mp4")
CHOSEN_VIDEO = "video:visible:not(.gallery-item video)"  # the thumbnails are videos, too
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def save_screenshot(page, name):
    if folder := os.environ.get("MMSPEC_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.mouse.move(0, 0)
        page.wait_for_timeout(600)
        page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)


def upload(page, path):
    if page.get_by_label("Clear").locator("visible=true").count():
        page.locator("[aria-label='Clear']:visible").first.click()
    page.locator("input[type=file]").first.set_input_files(path)


def choose(page, number=0):
    """Select an example."""
    page.locator(".mm-example:visible").nth(number).click()
    page.locator(".mm-out:visible .mm-empty").wait_for()


def ask(page):
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-out:visible h2", has_text=re.compile("^Answer$")).wait_for()
    page.locator(".mm-play:visible").wait_for()


def race(page):
    page.evaluate("document.querySelectorAll('.mm-result').forEach((one) => one.classList.add('earlier'))")
    page.locator(".mm-go:visible").click()
    page.locator(".earlier:visible").wait_for(state="detached")
    page.locator(".mm-out:visible h2", has_text="equal tokens").wait_for()
    page.locator(".mm-play:visible").wait_for()


def violations(page):
    """Rules of WCAG 2 AA that axe finds violated, with the elements."""
    page.evaluate((Path(find_spec("axe_playwright_python").origin).parent / "axe.min.js").read_text())
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    rules = {"region": {"enabled": False}, "landmark-one-main": {"enabled": False}}
    found = page.evaluate("given => axe.run(document, given)", {"runOnly": tags, "rules": rules})
    return [(rule["id"], [node["html"][:160] for node in rule["nodes"]]) for rule in found["violations"]]


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
