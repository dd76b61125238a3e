"""Browser tests of accessibility: axe, the keyboard, phones."""

import re

import pytest

from tests.demos.browsing import PHONE, WIDE, ask, choose, overflow, race, save_screenshot, violations

pytestmark = pytest.mark.browser
FOCUSED = """() => {
    const at = document.activeElement, style = getComputedStyle(at);
    const name = at.getAttribute('aria-label') || at.labels?.[0]?.textContent || at.textContent;
    return {name: name.trim(), visible: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2};
}"""  # name of the focused element, and whether it has an outline


@pytest.mark.parametrize("size", [WIDE, PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(visit, size, theme):
    page = visit(size, theme)
    page.wait_for_timeout(500)
    assert violations(page) == []
    page.get_by_role("button", name=re.compile("^Settings")).locator("visible=true").click()
    page.get_by_role("button", name="Table of probabilities").locator("visible=true").click()
    page.wait_for_timeout(500)
    assert violations(page) == []
    page.locator(".mm-clear:visible").click()
    page.locator(".mm-out:visible .mm-empty").wait_for()
    assert violations(page) == []
    race(page)
    page.wait_for_timeout(500)
    assert violations(page) == []


def test_phone_layout(visit):
    page = visit(PHONE)
    assert overflow(page) <= 0
    choose(page, 1)  # its last pass ends at the last levels
    ask(page)
    assert overflow(page) <= 0
    save_screenshot(page, "phone")
    page.evaluate("scrollTo(0, 0)")
    race(page)
    page.wait_for_function("document.querySelector('.mm-out').getBoundingClientRect().top < 200")
    assert overflow(page) <= 0
    slider = page.get_by_label("Pass", exact=True)
    page.locator(".mm-pager:visible", has_text=re.compile("levels 1 to 3 of")).wait_for()
    while page.get_by_role("button", name="Later levels").is_enabled():
        page.get_by_role("button", name="Later levels").tap()
    page.locator(".mm-tree g.bonus").tap()
    page.locator(".mm-probabilities tr.chosen.bonus").wait_for()
    assert slider.is_visible()
    boxes = [lane.bounding_box() for lane in page.locator(".mm-lane").all()]
    assert boxes[1]["y"] > boxes[0]["y"] + boxes[0]["height"]  # one below the other
    save_screenshot(page, "phone-race")


def test_keyboard_only(visit):
    """From the top of the page to a race, its replay and its tree with Tab, Space and Enter; the focus is visible."""
    page, seen = visit(), []

    def tab_to(name):
        for _ in range(80):
            page.keyboard.press("Tab")
            page.wait_for_timeout(30)
            focused = page.evaluate(FOCUSED)
            seen.append(focused)
            if re.search(name, focused["name"]):
                return focused
        raise AssertionError(f"no {name} among {[one['name'] for one in seen]}")

    tab_to("^Image$")
    for name in ("Prompt", "^Race$", "^Plain$", "^MSD$"):
        tab_to(name)
    page.keyboard.press("Space")
    assert page.get_by_label("MSD", exact=True).locator("visible=true").is_checked()
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if page.evaluate(FOCUSED)["name"] == "Race":
            break
    page.keyboard.press("Enter")
    page.locator(".mm-lane h3", has_text="MSD").wait_for()
    page.locator(".mm-out:visible h2", has_text="equal tokens").wait_for()
    page.locator(".mm-play:visible").wait_for()
    assert page.locator(".mm-lane").count() == 3
    tab_to("^Replay in slow motion$")
    tab_to("^Speed of the replay$")
    tab_to("^Time of the replay$")
    page.keyboard.press("Home")
    assert page.locator(".mm-later").count() > 0
    tab_to("^Lane of the draft tree$")
    tab_to("^Pass$")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator(".mm-tree-head .mm-clock").inner_text().startswith("Pass 2 of")
    tab_to("^Table of probabilities$")
    page.keyboard.press("Enter")
    page.locator(".mm-probabilities tr.bonus").wait_for()
    tab_to("^Copy answer$")
    assert [one["name"] for one in seen if not one["visible"]] == []
