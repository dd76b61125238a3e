"""Browser tests of what a visitor sees first: the race and the replay of each tab."""

import re

import pytest

from mmspec import plugins
from mmspec.demos import service
from tests.demos.browsing import choose, race, save_screenshot

pytestmark = pytest.mark.browser


def test_page_opens_on_a_raced_example(visit):
    page = visit()
    assert page.title() == "mmspec"
    assert re.fullmatch(
        r"The same 40 tokens, (as fast|\d+\.\dx (faster|slower)) \(median of 3 runs\)",
        page.locator("h1:visible").inner_text(),
    )
    lanes = page.locator(".mm-lane .mm-text").all_inner_texts()
    assert lanes[0] == lanes[1]
    assert lanes[0].startswith("A large purple circle is in the top left corner")
    assert plugins.limits("tiny-llava").partition(";")[0] in page.locator(".mm-about:visible").inner_text()
    assert "mmspec demo --model" in page.locator(".mm-about:visible").inner_text()
    assert page.locator("#mm-live").inner_text().startswith("The same 40 tokens")
    assert page.locator(".mm-stop:visible").is_disabled()
    assert "Built with Gradio" not in page.inner_text("footer")
    save_screenshot(page, "start")


HEADLINE = re.compile(r"The same \d+ tokens?, (as fast|\d+\.\dx (faster|slower)) \(median of 3 runs\)")


def test_each_tab_opens_with_its_race(visit, monkeypatch):
    raced, race_at_once = [], service.Service._race

    def counted(self, chat, methods):
        raced.append(chat.kind)
        return race_at_once(self, chat, methods)

    monkeypatch.setattr(service.Service, "_race", counted)
    page, headlines = visit(), []
    for name in ("Image", "Video", "Text", "Image", "Video"):
        page.get_by_role("tab", name=name).click()
        page.locator("h1:visible", has_text=HEADLINE).wait_for()
        page.locator(".mm-play:visible").wait_for()
        assert page.locator("h1:visible").count() == 1
        texts = page.locator(".mm-lane .mm-text:visible").all_inner_texts()
        assert texts[0] == texts[1]
        headlines.append((page.locator("h1:visible").inner_text(), texts[0]))
        save_screenshot(page, f"opening-{name}")
    assert len(set(headlines)) == 3
    assert headlines[3:] == headlines[:2]  # what a tab showed is still there
    assert set(raced) <= {"video", "text"} | ({"image"} if raced.count("image") <= 2 else set())
    choose(page)  # an emptied tab is not raced again
    page.get_by_role("tab", name="Text").click()
    page.get_by_role("tab", name="Video").click()
    page.locator(".mm-out:visible .mm-empty").wait_for()
    page.wait_for_timeout(500)
    assert page.locator(".mm-out:visible .mm-empty").count() == 1


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_opening_replay_plays_by_itself_once(visit, motion):
    page = visit(motion=motion)
    button = page.locator(".mm-play:visible")
    if motion == "reduce":
        page.wait_for_timeout(500)
        assert button.inner_text() == "Replay in slow motion"
        return
    page.locator(".mm-play:visible", has_text="Pause").wait_for()
    page.locator(".mm-lane .mm-later").first.wait_for(state="attached")
    button.click()  # it can be stopped
    assert button.inner_text() == "Play"
    race(page)
    page.wait_for_timeout(500)
    assert button.inner_text() == "Replay in slow motion"  # later ones wait for a click
