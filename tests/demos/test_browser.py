"""Browser tests of the page: headless Chromium with Playwright (``make browser``).

Screenshots are written to the folder in the environment variable MMSPEC_SCREENSHOTS, if it is set.
"""

import os
import re
import shutil
import time
from pathlib import Path
from threading import Event

import pytest
from PIL import Image

from demos import service
from demos.streaming import StreamedAnswer, Token
from mmspec import plugins
from tests.demos.serving import demo_server, save_ten_minute_video
from vision.embedded import samples

pytestmark = pytest.mark.browser
PATIENCE = 1000 * int(os.environ.get("MMSPEC_BROWSER_PATIENCE", "300"))  # milliseconds
IMAGE, VIDEO = str(samples() / "scene.png"), str(samples() / "clip.mp4")
CHOSEN_VIDEO = "video:visible:not(.gallery-item video)"  # the thumbnails are videos, too
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def address():
    with demo_server() as url:
        yield url


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium on the path: install the system's package")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, address):
    """Open the page as a new visitor; fails on JavaScript errors."""
    contexts, errors = [], []

    def opened(size=WIDE, theme="light"):
        context = browser.new_context(viewport=size)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}?__theme={theme}")
        page.locator(".mm-ask:visible").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


def save_screenshot(page, name):
    if folder := os.environ.get("MMSPEC_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.mouse.move(0, 0)
        page.wait_for_timeout(600)
        page.screenshot(path=Path(folder, f"{name}.png"), full_page=True)


def upload(page, path):
    page.locator("input[type=file]").first.set_input_files(path)


def ask(page):
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-figures:visible").wait_for()


def race(page):
    page.locator(".mm-go:visible").click()
    page.locator(".mm-verdict:visible", has_text="tokens are equal").wait_for()


def overflow(page):
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def test_start_page(visit):
    page = visit()
    assert page.title() == "mmspec"
    assert page.get_by_role("tab", name="Video").is_visible()
    assert "The answer appears here" in page.locator(".block.mm-answer:visible").inner_text()
    assert "Built with Gradio" not in page.inner_text("footer")
    save_screenshot(page, "start")


def test_uploaded_image_streams_a_caption(visit):
    page = visit()
    upload(page, IMAGE)
    page.locator("[data-testid=image] img, .image-frame img, .image-container img").first.wait_for()
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
            const at = document.querySelector('.mm-answer .mm-text'); if (at) window.seen.push(at.textContent.length);
        }).observe(document.querySelector('.mm-answer'), {childList: true, subtree: true, characterData: true}); }"""
    )
    ask(page)
    text = page.locator(".mm-answer .mm-text").inner_text()
    assert text.startswith('There is a sign at the bottom that reads "HONEY".')
    lengths = page.evaluate("[...new Set(window.seen)]")
    assert len(lengths) >= 3, f"the text came at once: {lengths}"
    # The number of draft tokens depends on verify times measured on this machine.
    assert page.locator(".mm-answer .mm-accepted").count() >= 1
    assert page.locator(".mm-answer .mm-bonus").count() >= 1
    assert "drafted and accepted" in page.locator(".mm-answer .mm-legend").inner_text()
    save_screenshot(page, "answer")


def test_follow_up_question(visit):
    page = visit()
    page.locator("button.gallery-item:visible").first.click()
    page.locator(".image-frame img, .image-container img").first.wait_for()
    ask(page)
    prompt = page.locator(".mm-prompt:visible textarea, .mm-prompt:visible input").first
    prompt.fill("How many objects are there?")
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-answer .mm-asked").nth(1).wait_for()
    page.locator(".mm-figures:visible").wait_for()
    assert page.locator(".mm-answer .mm-asked").all_inner_texts() == [
        "Describe the image.",
        "How many objects are there?",
    ]
    assert "three" in page.locator(".mm-answer .mm-text").nth(1).inner_text()
    page.locator(".mm-clear:visible").click()
    page.locator(".mm-answer .mm-empty").wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_race(visit, theme):
    page = visit(theme=theme)
    page.locator("button.gallery-item:visible").first.click()
    page.locator(".image-frame img, .image-container img").first.wait_for()
    race(page)
    lanes = page.locator(".mm-lane .mm-text").all_inner_texts()
    assert lanes[0] == lanes[1] != ""
    verdict = page.locator(".mm-verdict").inner_text()
    assert re.match(r"\d+\.\d\dx the decoding speed, \d+\.\d\dx end to end\. The \d+ tokens are equal\.", verdict)
    assert "each on its own clock" in page.locator(".block.mm-race:visible").inner_text()
    save_screenshot(page, f"race-{theme}")


def test_slider_selects_the_tree(visit):
    page = visit()
    page.locator("button.gallery-item:visible").first.click()
    page.locator(".image-frame img, .image-container img").first.wait_for()
    ask(page)
    slider = page.locator(".mm-step input[type=range]:visible")
    last = int(slider.get_attribute("max"))
    assert last > 2
    for number in (1, last):
        slider.fill(str(number))
        view = page.locator(f".mm-scroll[aria-label='Draft tree of pass {number}']:visible")
        view.wait_for()
        assert view.locator("g.bonus").count() == 2  # the node and the legend
        assert view.locator("g.root > title").first.text_content()
    slider.fill("1")
    first = page.locator(".mm-scroll[aria-label='Draft tree of pass 1']:visible")
    first.wait_for()
    assert first.locator("path.kept").count() >= 2
    assert "target" in first.locator("g.kept > title").first.text_content()
    assert page.locator(".mm-plot:visible").count() == 2


def test_note_on_limits_of_an_embedded_model(visit, tmp_path):
    Image.new("RGB", (64, 48), "navy").save(tmp_path / "lake.png")
    page = visit()
    upload(page, str(tmp_path / "lake.png"))
    page.locator(".image-frame img, .image-container img").first.wait_for()
    ask(page)
    assert page.locator(".mm-limits:visible").all_inner_texts() == [plugins.limits("tiny-llava")]


def test_broken_file_shows_an_error(visit, tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(Path(IMAGE).read_bytes()[:700])
    page = visit()
    upload(page, str(broken))
    page.locator(".image-frame img, .image-container img").first.wait_for(state="attached")
    page.locator(".mm-ask:visible").click()
    note = page.locator(".mm-note:visible")
    note.wait_for()
    assert note.inner_text().startswith("broken.png: expected a whole image")
    assert "Traceback" not in page.inner_text("body")
    save_screenshot(page, "broken")
    page.locator(".mm-go:visible").click()
    page.locator(".mm-race .mm-note:visible").wait_for()


def test_too_long_video_shows_an_error(visit, tmp_path):
    page, long = visit(), save_ten_minute_video(tmp_path / "long.mp4")
    page.get_by_role("tab", name="Video").click()
    page.locator("input[type=file]:not([accept*=image])").last.set_input_files(long)
    page.locator(CHOSEN_VIDEO).first.wait_for()
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="long.mp4: expected a video of at most 300 s").wait_for()


def test_missing_upload_empty_prompt_and_unknown_model(visit):
    page = visit()
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="no image was uploaded").wait_for()
    page.locator(".mm-prompt:visible textarea, .mm-prompt:visible input").first.fill("")
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="the prompt must not be empty").wait_for()
    page.get_by_role("tab", name="Text").click()
    page.locator(".mm-prompt:visible textarea").fill("Hello")
    page.get_by_text("Settings").locator("visible=true").click()
    model = page.get_by_label("Model").locator("visible=true").first
    model.fill("nobody/nothing")
    model.press("Enter")
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="cannot load model 'nobody/nothing'").wait_for()


def test_text_prompt(visit):
    page = visit()
    page.get_by_role("tab", name="Text").click()
    page.locator(".mm-prompt:visible textarea").fill("Work out: 37 + 48")
    ask(page)
    assert page.locator(".mm-answer:visible .mm-text").inner_text().startswith("37 + 48 = 85")
    assert "tiny-hybrid" in page.locator(".mm-made:visible").first.inner_text()


def test_video(visit):
    page = visit(theme="dark")
    page.get_by_role("tab", name="Video").click()
    page.locator("button.gallery-item:visible, .gallery-item:visible").first.click()
    page.locator(CHOSEN_VIDEO).first.wait_for()
    ask(page)
    assert "cyan star moves down" in page.locator(".mm-answer:visible .mm-text").inner_text()
    save_screenshot(page, "video-dark")


def test_two_concurrent_visitors(visit):
    pages = [visit(), visit()]
    for page in pages:
        page.locator("button.gallery-item:visible").first.click()
        page.locator(".image-frame img, .image-container img").first.wait_for()
    for page in pages:
        page.locator(".mm-ask:visible").click()
    for page in pages:
        page.locator(".mm-figures:visible").wait_for()
    texts = [page.locator(".mm-answer .mm-text").inner_text() for page in pages]
    assert texts[0] == texts[1]
    assert texts[0].startswith("There is a sign")


def test_stop_cancels_the_request(visit, monkeypatch):
    cancelled = Event()

    def endless(*_):
        try:
            while True:
                yield StreamedAnswer("tiny", "none", tokens=[Token("once ", "plain", 0)])
                time.sleep(0.02)
        finally:
            cancelled.set()

    page = visit()
    page.get_by_role("tab", name="Text").click()
    page.locator(".mm-prompt:visible textarea").fill("Tell a long story.")
    with monkeypatch.context() as patched:
        patched.setattr(service, "stream_answer", endless)
        page.locator(".mm-ask:visible").click()
        page.locator(".mm-answer:visible .mm-text", has_text="once").wait_for()
        page.locator(".mm-stop:visible").click()
        assert cancelled.wait(PATIENCE / 1000)
    page.locator(".mm-prompt:visible textarea").fill("Work out: 37 + 48")
    ask(page)  # the next request runs
    assert page.locator(".mm-answer:visible .mm-asked").all_inner_texts() == ["Work out: 37 + 48"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_phone_layout(visit, theme):
    page = visit(PHONE, theme)
    assert overflow(page) <= 0
    page.locator("button.gallery-item:visible").first.click()
    page.locator(".image-frame img, .image-container img").first.wait_for()
    ask(page)
    assert overflow(page) <= 0
    save_screenshot(page, f"phone-{theme}")
    race(page)
    assert overflow(page) <= 0
    boxes = [lane.bounding_box() for lane in page.locator(".mm-lane").all()]
    assert boxes[1]["y"] > boxes[0]["y"] + boxes[0]["height"]  # one below the other
    save_screenshot(page, f"phone-race-{theme}")
