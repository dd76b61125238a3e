"""Browser tests of the replay: player, draft trees, lanes, links and files."""

import itertools
import json
import re
from pathlib import Path

import pytest

from tests.demos.browsing import race, save_screenshot

pytestmark = pytest.mark.browser

# Left and right edge of the elements together.
EDGES = """nodes => { const all = nodes.map((node) => node.getBoundingClientRect());
  return [Math.min(...all.map((one) => one.left)), Math.max(...all.map((one) => one.right))]; }"""


def test_replay(visit):
    page = visit()
    hidden, slider = page.locator(".mm-lane .mm-later"), page.get_by_label("Pass", exact=True)
    assert hidden.count() == 0
    last = int(slider.get_attribute("max"))
    assert page.locator(".mm-tree-head .mm-clock").inner_text().endswith(f"of {last}")
    assert f"in {last} passes" in page.locator(".mm-lane").nth(1).inner_text()
    page.get_by_label("Speed of the replay").select_option("100")
    page.locator(".mm-play:visible").click()
    assert page.locator(".mm-play").inner_text() == "Pause"
    for lane in page.locator(".mm-lane").all():  # the replay begins where all lanes have a token
        assert lane.locator("[data-pass='0']:not(.mm-later)").count() == 1
    for phase in ("Drafting", "Checking", "Kept"):
        page.locator(".mm-phase", has_text=phase).wait_for()
    page.locator(".mm-play:visible").click()
    assert page.locator(".mm-play").inner_text() == "Play"
    assert hidden.count() > 0
    slider.fill(str(last))  # the end of the last pass
    assert page.locator(".mm-lane").nth(1).locator(".mm-later").count() == 0
    slider.fill("1")
    assert page.locator(".mm-tree-head .mm-clock").inner_text() == f"Pass 1 of {last}"
    assert page.locator(".mm-tree g.bonus").count() == 1
    assert page.locator(".mm-lane").nth(1).locator("[data-pass='1'].mm-now").count() >= 1
    assert page.locator(".mm-lane").nth(1).locator("[data-pass='2'].mm-later").count() >= 1
    page.get_by_label("Time of the replay").fill("0")
    page.locator(".mm-phase", has_text="Prefill").wait_for()
    page.get_by_label("Time of the replay").fill("1000")
    assert hidden.count() == 0
    page.get_by_label("Speed of the replay").select_option("1")
    page.locator(".mm-play:visible").click()
    page.locator(".mm-play", has_text="Replay").wait_for()


@pytest.mark.parametrize("opening", ["click", "key"])
def test_tree_fits_and_opens_as_a_table(visit, opening):
    page = visit()
    slider = page.get_by_label("Pass", exact=True)
    for number in range(1, 1 + int(slider.get_attribute("max"))):
        slider.fill(str(number))
        outer, edges = page.locator(".mm-scroll:visible").bounding_box(), page.locator(".mm-tree g").evaluate_all(EDGES)
        assert outer["x"] <= edges[0] <= edges[1] <= outer["x"] + outer["width"]
        assert page.locator(".mm-tree > title").text_content().startswith(f"Draft tree of pass {number} of")
    slider.fill("1")
    if opening == "click":
        page.locator(".mm-tree g.bonus").click()
        assert page.locator(".mm-probabilities tr.chosen").count() == 1
    else:
        page.get_by_role("button", name="Table of probabilities").focus()
        page.keyboard.press("Enter")
    rows = page.locator(".mm-probabilities tbody tr")
    assert rows.count() == page.locator(".mm-tree g").count()
    assert re.search("%\tbonus token$", page.locator(".mm-probabilities tr.bonus").inner_text())
    # Indented tokens follow their parents.
    levels = [int(level) for level in page.locator(".mm-probabilities td:nth-child(2)").all_inner_texts()]
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))


def test_four_lanes(visit):
    page = visit()
    for name in ("MSD", "FLASH, chain"):
        page.get_by_label(name, exact=True).locator("visible=true").check()
    race(page)
    assert page.locator(".mm-lane h3").all_inner_texts() == ["Plain", "FLASH", "MSD", "FLASH, chain"]
    assert len(set(page.locator(".mm-lane .mm-text").all_inner_texts())) == 1
    assert page.locator(".mm-table:visible tbody tr").count() == 4
    assert page.locator(".mm-asked").count() == 1  # a new conversation
    page.get_by_label("Lane of the draft tree").select_option(label="FLASH, chain")
    heights = [node.bounding_box()["y"] for node in page.locator(".mm-tree g:not(.bonus)").all()]
    assert max(heights) - min(heights) < 8
    save_screenshot(page, "lanes")
    page.get_by_label("n-gram", exact=True).locator("visible=true").check()
    page.locator(".mm-go:visible").click()
    page.locator(".mm-note:visible", has_text="expected 2 to 4 different ones").wait_for()


def test_copy_link_and_file(visit):
    page = visit()
    page.get_by_role("button", name="Copy answer").click()
    page.get_by_text("Answer copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("A large purple circle")
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("Link copied.").wait_for()
    query = page.evaluate("navigator.clipboard.readText()").partition("?")[2]
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save as file").click()
    assert [lane["method"] for lane in json.loads(Path(saved.value.path()).read_text())["lanes"]] == ["none", "flash"]
    query = query.replace("flash", "msd").replace("temperature=0", "temperature=0.5")
    linked = visit(query=query.replace("seed=0", "seed=5"))
    linked.locator(".mm-note", has_text="those of the link").wait_for()
    race(linked)
    assert linked.locator(".mm-lane h3").all_inner_texts() == ["Plain", "MSD"]
    visit(query="kind=image&temperature=hot").get_by_role("alert").get_by_text(
        "temperature in the link must be a number"
    ).wait_for()
