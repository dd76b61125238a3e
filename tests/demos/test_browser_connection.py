"""Browser tests of a server that stops and starts again while a page is open."""

import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from PIL import Image

import mmspec.demos
from mmspec.demos import service
from tests.demos.browsing import IMAGE, PATIENCE, ask, upload
from tests.demos.serving import demo_server, free_port

pytestmark = pytest.mark.browser
SCRIPT = Path(mmspec.demos.__file__).parent / "scripts" / "connection.js"


@pytest.fixture
def server():
    """Start or stop a server, at the same port each time; returns its address."""
    port, running = free_port(), ExitStack()

    def switch(on):
        running.close()
        return running.enter_context(demo_server(server_port=port)) if on else None

    yield switch
    running.close()


@pytest.fixture
def page(browser, server):
    context = browser.new_context(reduced_motion="reduce")
    page, errors = context.new_page(), []
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(server(True))
    page.locator(".mm-play:visible").wait_for()
    yield page
    context.close()
    assert errors == []


def wait_until_said(page):
    page.locator("#mm-lost").wait_for(state="visible")
    assert page.locator("#mm-lost").inner_text().startswith("The server does not answer.")


def test_lost_server_is_noticed_within_two_seconds():
    """The time between checks, and until an answer counts as missing; browser tests on a busy machine take longer."""
    every, patience = re.search(r"EVERY = (\d+), PATIENCE = (\d+);", SCRIPT.read_text()).groups()
    assert int(every) + int(patience) < 2000


def follow_up(page, prompt):
    page.locator(".mm-follow:visible input").check()
    page.get_by_label("Prompt").locator("visible=true").fill(prompt)
    page.locator(".mm-ask:visible").click()


def test_page_goes_on_after_a_restart(page, server, tmp_path):
    """A picture of the visitor's, the conversation about it, and a question asked while the server was gone."""
    with Image.open(IMAGE) as image:
        image.save(tmp_path / "scene.tiff")
    upload(page, str(tmp_path / "scene.tiff"))
    page.locator(".mm-media img[src$='preview.png']").wait_for()
    ask(page)
    page.get_by_role("tab", name="Text").click()
    page.locator(".mm-play:visible").wait_for()
    heading = page.locator("h1:visible").inner_text()
    page.get_by_role("tab", name="Image").click()
    server(False)
    wait_until_said(page)
    page.evaluate("window.kept = true")
    follow_up(page, "How many objects are there?")
    page.wait_for_timeout(500)
    assert page.locator(".mm-out:visible .mm-asked").count() == 1
    server(True)
    page.locator("#mm-lost").wait_for(state="hidden")
    page.locator(".mm-out:visible .mm-asked").nth(1).wait_for()
    page.locator(".mm-play:visible").wait_for()
    assert "three" in page.locator(".mm-out:visible .mm-text").nth(1).inner_text()
    assert page.evaluate("window.kept")  # it was not loaded again
    page.get_by_role("tab", name="Text").click()
    page.wait_for_timeout(500)
    assert page.locator("h1:visible").inner_text() == heading
    follow_up(page, "Work out: 37 + 48")
    page.locator(".mm-out:visible .mm-asked").nth(1).wait_for()


def test_interrupted_answer_is_said_and_can_be_asked_again(page, server, monkeypatch):
    stream = service.stream_answer

    def slow(*given):
        for answer in stream(*given):
            yield answer
            time.sleep(0.5)

    with monkeypatch.context() as patched:
        patched.setattr(service, "stream_answer", slow)
        page.locator(".mm-ask:visible").click()
        page.locator(".mm-out:visible h2", has_text="Answering").wait_for()
        server(False)
    wait_until_said(page)
    server(True)
    page.locator(".mm-note:visible", has_text="The connection to the server was lost before").wait_for()
    assert page.locator(".mm-stop:visible").is_disabled()
    ask(page)
    assert page.locator(".mm-out:visible .mm-text").inner_text().startswith("A large purple circle")
