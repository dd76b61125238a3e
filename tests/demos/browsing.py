"""Steps of a visitor, screenshots and checks for the browser tests."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path

PATIENCE = 1000 * int(os.environ.get("MMSPEC_BROWSER_PATIENCE", "120"))  # milliseconds
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


def see(page, selector, text=None):
    """The visible elements of a selector with a text; waits for the first."""
    found = page.locator(f"{selector}:visible", has_text=text)
    found.first.wait_for()
    return found


def open_tab(page, name):
    page.get_by_role("tab", name=name).click()


def save_screenshot(page, name):
    if folder := os.environ.get("MMSPEC_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.mouse.move(0, 0)
        page.wait_for_timeout(600)
        page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)


def upload(page, paths):
    page.locator(".mm-media:visible [aria-label='Clear']").first.click()
    page.locator(".mm-media:visible input[type=file]").first.set_input_files(paths)


def choose(page, number=0):
    """Select an example."""
    page.locator(".mm-example:visible").nth(number).click()
    see(page, ".mm-out .mm-empty")


def ask(page, prompt=None, follow_up=False):
    """Ask, wait for the answer, and return its text."""
    if prompt is not None:
        page.locator(".mm-prompt:visible textarea").fill(prompt)
    if follow_up:
        page.locator(".mm-follow:visible input").check()
    _press(page, ".mm-ask", re.compile("^Answer$"))
    return page.locator(".mm-out:visible .mm-text").last.inner_text()


def race(page):
    _press(page, ".mm-go", "equal tokens")


def _press(page, button, heading):
    page.evaluate("document.querySelectorAll('.mm-result').forEach((one) => one.classList.add('earlier'))")
    page.locator(f"{button}:visible").click()
    page.locator(".earlier:visible").wait_for(state="detached")
    see(page, ".mm-out h2", heading)
    see(page, ".mm-play")


def violations(page):
    """Rules of WCAG 2 AA that axe finds violated, with the elements."""
    page.evaluate((Path(find_spec("axe_playwright_python").origin).parent / "axe.min.js").read_text())
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    rules = {"region": {"enabled": False}, "landmark-one-main": {"enabled": False}}
    found = page.evaluate("given => axe.run(document, given)", {"runOnly": tags, "rules": rules})
    return [(rule["id"], [node["html"][:160] for node in rule["nodes"]]) for rule in found["violations"]]


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
