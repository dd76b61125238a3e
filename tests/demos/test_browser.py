"""Browser tests of questions: headless Chromium with Playwright (``make browser``).

Screenshots are written to the folder in the environment variable MMSPEC_SCREENSHOTS, if it is set.
"""

import re
import time
from threading import Event

import pytest

from mmspec.demos import service
from mmspec.demos.racing import StreamedAnswer, Token
from tests.demos.browsing import PATIENCE, ask, choose

pytestmark = pytest.mark.browser


def test_follow_up_question(visit):
    page = visit()
    choose(page)
    ask(page)
    prompt = page.locator(".mm-prompt:visible textarea, .mm-prompt:visible input").first
    prompt.fill("How many objects are there?")
    page.locator(".mm-follow:visible input").check()
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-out:visible .mm-asked").nth(1).wait_for()
    page.locator(".mm-play:visible").wait_for()
    assert page.locator(".mm-out:visible .mm-asked").all_inner_texts() == [
        "Describe the image.",
        "How many objects are there?",
    ]
    assert "three" in page.locator(".mm-out:visible .mm-text").nth(1).inner_text()
    page.locator(".mm-clear:visible").click()
    page.locator(".mm-out:visible .mm-empty").wait_for()
    assert page.locator(".mm-follow:visible input").is_disabled()


def test_missing_upload_empty_prompt_and_unknown_model(visit):
    page = visit()
    page.locator("[aria-label*=Clear]:visible, [aria-label*=Remove]:visible").first.click()
    page.locator(".mm-out:visible .mm-empty").wait_for()
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="no image was uploaded").wait_for()
    page.locator(".mm-prompt:visible textarea, .mm-prompt:visible input").first.fill("")
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="the prompt must not be empty").wait_for()
    page.get_by_role("tab", name="Text").click()
    page.locator(".mm-prompt:visible textarea").fill("Hello")
    page.get_by_role("button", name=re.compile("^Settings")).locator("visible=true").click()
    model = page.get_by_label("Model").locator("visible=true").first
    model.fill("nobody/nothing")
    model.press("Enter")
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="cannot load model 'nobody/nothing'").wait_for()


@pytest.mark.parametrize("name", ["Image", "Text"])
def test_enter_sends_and_shift_enter_breaks_the_line(visit, name):
    page = visit()
    page.get_by_role("tab", name=name).click()
    page.locator(".mm-play:visible").wait_for()
    prompt, asked = page.locator(".mm-prompt:visible textarea"), page.locator(".mm-out:visible .mm-asked")
    prompt.fill("Work out:")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("3 + 4")
    assert prompt.input_value() == "Work out:\n3 + 4"
    page.wait_for_timeout(300)
    assert "Work out" not in asked.inner_text()
    prompt.press("Enter")
    page.locator(".mm-out:visible .mm-asked", has_text="Work out:").wait_for()
    assert (asked.inner_text(), prompt.input_value()) == ("Work out:\n3 + 4",) * 2
    assert page.locator(".mm-tall textarea").count() == 0 or prompt.bounding_box()["height"] > 80


def test_stop_cancels_the_request(visit, monkeypatch):
    cancelled = Event()

    def endless(*_):
        try:
            while True:
                yield StreamedAnswer(
                    "tiny", "none", text="once", token_ids=[1], tokens=[Token("once ", "plain", 0)], pass_ends=[1.0]
                )
                time.sleep(0.02)
        finally:
            cancelled.set()

    page = visit()
    page.get_by_role("tab", name="Text").click()
    page.locator(".mm-prompt:visible textarea").fill("Tell a long story.")
    with monkeypatch.context() as patched:
        patched.setattr(service, "stream_answer", endless)
        page.locator(".mm-ask:visible").click()
        page.locator(".mm-out:visible .mm-text", has_text="once").wait_for()
        page.locator(".mm-stop:visible").click()
        assert cancelled.wait(PATIENCE / 1000)
    page.locator(".mm-mark:visible").wait_for()
    assert page.locator(".mm-stop:visible").is_disabled()
    page.locator(".mm-prompt:visible textarea").fill("Work out: 37 + 48")
    page.locator(".mm-follow:visible input").check()
    ask(page)  # the next request runs, and the stopped one is a turn
    assert page.locator(".mm-out:visible .mm-asked").all_inner_texts() == ["Tell a long story.", "Work out: 37 + 48"]
    assert page.locator(".mm-out:visible .mm-talk .mm-mark").count() == 1
    assert page.locator(".mm-out:visible .mm-text").last.inner_text().startswith("37 + 48 = 85")
    assert "tiny-hybrid" in page.locator(".mm-made:visible").first.inner_text()
