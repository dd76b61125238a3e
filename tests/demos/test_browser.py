"""Browser tests of the page: headless Chromium with Playwright (``make browser``).

Screenshots are written to the folder in the environment variable MMSPEC_SCREENSHOTS, if it is set.
"""

import itertools
import json
import re
import time
from pathlib import Path
from threading import Event

import pytest
from PIL import Image

from mmspec import plugins
from mmspec.demos import service
from mmspec.demos.streaming import StreamedAnswer, Token
from tests.demos.browsing import CHOSEN_VIDEO, IMAGE, PATIENCE, ask, choose, race, save_screenshot, upload
from tests.demos.serving import save_ten_minute_video

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
    for phase in ("Prefill", "Drafting", "Checking", "Kept"):
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
    assert len({round(node.bounding_box()["y"] / 4) for node in page.locator(".mm-tree g:not(.bonus)").all()}) == 1
    save_screenshot(page, "lanes")
    page.get_by_label("n-gram", exact=True).locator("visible=true").check()
    page.locator(".mm-go:visible").click()
    page.locator(".mm-note:visible", has_text="expected 2 to 4 different ones").wait_for()


def test_copy_link_and_file(visit):
    page = visit()
    page.get_by_role("button", name="Copy answer").click()
    page.get_by_text("Answer copied.").wait_for()
    assert page.evaluate("navigator.clipboard.readText()").startswith("There is a sign")
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


def test_places_in_the_queue(visit, monkeypatch):
    """Five visitors race at once: each gets the race, and some see their place meanwhile."""
    pages, race_at_once = [visit() for _ in range(5)], service.race

    def slow(*given):
        time.sleep(1)
        yield from race_at_once(*given)

    monkeypatch.setattr(service, "race", slow)
    for page in pages:
        page.evaluate(
            """() => { window.seen = new Set(); const out = [...document.querySelectorAll('.mm-out')].find(one =>
            one.offsetParent); new MutationObserver(() => { const at = out.querySelector('.mm-wait');
            if (at) window.seen.add(at.textContent); }).observe(out, {childList: true, subtree: true,
            characterData: true}); }"""
        )
        choose(page)
        page.get_by_label("Prompt").locator("visible=true").fill("How many objects are there? Describe them.")
    for page in pages:
        page.locator(".mm-go:visible").click(no_wait_after=True)
    for page in pages:
        page.locator(".mm-out:visible h2", has_text="equal tokens").wait_for()
    seen = [text for page in pages for text in page.evaluate("[...window.seen]")]
    assert any(re.fullmatch(r"Waiting: \d requests? ahead of yours…", text) for text in seen), seen


def test_uploaded_image_streams_a_caption(visit):
    page = visit()
    upload(page, IMAGE)
    page.locator("[data-testid=image] img, .image-frame img, .image-container img").first.wait_for()
    page.evaluate(
        """() => { window.seen = []; new MutationObserver(() => {
            const at = document.querySelector('.mm-out .mm-text'); if (at) window.seen.push(at.textContent.length);
        }).observe(document.querySelector('.mm-out'), {childList: true, subtree: true, characterData: true}); }"""
    )
    ask(page)
    text = page.locator(".mm-out:visible .mm-text").inner_text()
    assert text.startswith('There is a sign at the bottom that reads "HONEY".')
    lengths = page.evaluate("[...new Set(window.seen)]")
    assert len(lengths) >= 3, f"the text came at once: {lengths}"
    # The number of draft tokens depends on verify times measured on this machine.
    assert page.locator(".mm-out:visible .mm-accepted").count() >= 1
    assert page.locator(".mm-out:visible .mm-bonus").count() >= 1
    assert "drafted and accepted" in page.locator(".mm-out:visible .mm-legend").inner_text()
    save_screenshot(page, "answer")


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
    page.locator(".mm-out .mm-note:visible").wait_for()


def test_too_long_video_shows_an_error(visit, tmp_path):
    page, long = visit(), save_ten_minute_video(tmp_path / "long.mp4")
    page.get_by_role("tab", name="Video").click()
    page.locator("[aria-label*=Clear]:visible, [aria-label*=Remove]:visible").first.click()
    page.locator("input[type=file]:not([accept*=image])").last.set_input_files(long)
    page.locator(CHOSEN_VIDEO).first.wait_for()
    page.locator(".mm-ask:visible").click()
    page.locator(".mm-note:visible", has_text="long.mp4: expected a video of at most 300 s").wait_for()


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


def test_text_prompt(visit):
    page = visit()
    page.get_by_role("tab", name="Text").click()
    page.locator(".mm-prompt:visible textarea").fill("Work out: 37 + 48")
    ask(page)
    assert page.locator(".mm-out:visible .mm-text").inner_text().startswith("37 + 48 = 85")
    assert "tiny-hybrid" in page.locator(".mm-made:visible").first.inner_text()


def test_video(visit):
    page = visit(theme="dark")
    page.get_by_role("tab", name="Video").click()
    choose(page)
    page.locator(CHOSEN_VIDEO).first.wait_for()
    ask(page)
    assert "cyan star moves down" in page.locator(".mm-out:visible .mm-text").inner_text()
    save_screenshot(page, "video-dark")


def test_two_concurrent_visitors(visit):
    pages = [visit(), visit()]
    for page in pages:
        choose(page)
    for page in pages:
        page.locator(".mm-ask:visible").click()
    for page in pages:
        page.locator(".mm-play:visible").wait_for()
    texts = [page.locator(".mm-out:visible .mm-text").inner_text() for page in pages]
    assert texts[0] == texts[1]
    assert texts[0].startswith("There is a sign")


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
