"""The page in headless Chromium (``make browser``): questions, races, replays, uploads, accessibility, lost servers.

Screenshots are written to the folder in the environment variable MMSPEC_SCREENSHOTS, if it is set.
"""

import itertools
import json
import os
import re
import shutil
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from threading import Event

import pytest
from PIL import Image

import mmspec.demos
from mmspec import plugins
from mmspec.demos import service
from mmspec.demos.page import Tab
from mmspec.demos.racing import StreamedAnswer, Token
from tests.demos.serving import demo_server, free_port, write_video
from tests.testkit.served import SCENE

pytestmark = pytest.mark.browser
PATIENCE = 1000 * int(os.environ.get("MMSPEC_BROWSER_PATIENCE", "120"))  # milliseconds
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
FLAGS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # the page needs no other host
]
HEADLINE = re.compile(r"The same \d+ tokens?, (as fast|\d+\.\dx (faster|slower)) \(median of 3 runs\)")
PASTE = """async url => { const file = new File([await (await fetch(url)).blob()], "pasted.png", {type: "image/png"});
  const data = new DataTransfer(); data.items.add(file);
  document.activeElement.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true})); }"""
PICTURES = """count => { const all = [...document.querySelectorAll(".mm-media img")].filter((one) => one.offsetParent);
  return all.length === count && all.every((one) => one.naturalWidth > 1); }"""
FOCUSED = """() => { const at = document.activeElement, style = getComputedStyle(at);
  const name = at.getAttribute('aria-label') || at.labels?.[0]?.textContent || at.textContent;
  return {name: name.trim(), visible: style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2}; }"""


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
        chromium = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, request):
    """Open the page as a new visitor; fails on JavaScript errors."""
    contexts, errors = [], []

    def opened(size=WIDE, theme="light", query="", motion="reduce", address=None):
        permissions = ["clipboard-read", "clipboard-write"]
        options = {"viewport": size, "has_touch": size == PHONE, "reduced_motion": motion, "permissions": permissions}
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PATIENCE)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address or request.getfixturevalue('address')}?__theme={theme}&{query}")
        page.locator(".mm-ask:visible").wait_for()
        if not query:
            page.locator(".mm-play:visible").wait_for()
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []


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


def replace_media(page, paths):
    page.locator(".mm-media:visible [aria-label='Clear']").first.click()
    page.locator(".mm-media:visible input[type=file]").first.set_input_files(paths)


def choose(page, number=0):
    page.locator(".mm-example:visible").nth(number).click()
    see(page, ".mm-out .mm-empty")


def ask(page, prompt=None, follow_up=False):
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


@pytest.fixture
def tiff(tmp_path):
    """A picture of a format that browsers do not show."""
    with Image.open(SCENE) as image:
        image.save(tmp_path / "scene.tiff")
    return str(tmp_path / "scene.tiff")


def test_each_tab_opens_with_its_race(visit, monkeypatch):
    raced, race_at_once = [], service.Service._race

    def counted(self, chat, methods):
        raced.append(chat.kind)
        return race_at_once(self, chat, methods)

    monkeypatch.setattr(service.Service, "_race", counted)
    page, headlines = visit(), []
    assert page.title() == "mmspec"
    assert "Built with Gradio" not in page.inner_text("footer")
    for name in ("Image", "Video", "Text", "Image", "Video"):
        open_tab(page, name)
        heading = see(page, "h1", HEADLINE)
        see(page, ".mm-play")
        assert heading.count() == 1
        texts = page.locator(".mm-lane .mm-text:visible").all_inner_texts()
        assert texts[0] == texts[1]
        headlines.append((heading.inner_text(), texts[0]))
        page.locator("#mm-live", has_text=texts[0]).wait_for(state="attached")
        save_screenshot(page, f"opening-{name}")
    assert headlines[0][1].startswith("A large purple circle is in the top left corner")
    assert len(set(headlines)) == 3
    assert headlines[3:] == headlines[:2]  # tabs keep their results
    assert set(raced) <= {"video", "text"} | ({"image"} if raced.count("image") <= 2 else set())
    about = page.locator(".mm-about:visible").inner_text()
    assert plugins.limits("tiny-llava").partition(";")[0] in about
    assert "mmspec demo --model" in about
    choose(page)  # an emptied tab is not raced again
    open_tab(page, "Text")
    open_tab(page, "Video")
    see(page, ".mm-out .mm-empty")
    page.wait_for_timeout(500)
    assert page.locator(".mm-out:visible .mm-empty").count() == 1


def test_opening_replay_plays_by_itself_once(visit):
    page = visit(motion="no-preference")
    see(page, ".mm-play", "Pause").click()  # it can be stopped
    page.locator(".mm-lane .mm-later").first.wait_for(state="attached")
    see(page, ".mm-play", re.compile("^Play$"))
    race(page)
    page.wait_for_timeout(500)
    assert page.locator(".mm-play:visible").inner_text() == "Replay in slow motion"  # later replays wait for a click


def test_replay_tree_and_table(visit):
    page = visit()
    hidden, slider = page.locator(".mm-lane .mm-later"), page.get_by_label("Pass", exact=True)
    tree, scrub = page.locator(".mm-tree li"), page.get_by_label("Time of the replay")
    assert hidden.count() == 0
    last = int(slider.get_attribute("max"))
    assert page.locator(".mm-tree-head .mm-clock").inner_text().endswith(f"of {last}")
    assert f"in {last} passes" in page.locator(".mm-lane").nth(1).inner_text()
    page.get_by_label("Speed of the replay").select_option("100")
    page.locator(".mm-play:visible").click()
    see(page, ".mm-play", "Pause")
    for lane in page.locator(".mm-lane").all():  # the replay begins where all lanes have a token
        assert lane.locator("[data-pass='0']:not(.mm-later)").count() == 1
    for phase in ("Drafting", "Checking", "Kept"):
        see(page, ".mm-phase", phase)
    page.locator(".mm-play:visible").click()
    see(page, ".mm-play", re.compile("^Play$"))
    assert hidden.count() > 0
    slider.fill(str(last))  # the end of the last pass
    assert page.locator(".mm-lane").nth(1).locator(".mm-later").count() == 0
    for number in range(last, 0, -1):
        slider.fill(str(number))
        assert page.locator(".mm-tree").get_attribute("aria-label").startswith(f"Draft tree of pass {number} of")
    assert page.locator(".mm-tree-head .mm-clock").inner_text() == f"Pass 1 of {last}"
    assert page.locator(".mm-lane").nth(1).locator("[data-pass='1'].mm-now").count() >= 1
    assert page.locator(".mm-lane").nth(1).locator("[data-pass='2'].mm-later").count() >= 1
    page.locator(".mm-tree .bonus > span").click()
    assert page.locator(".mm-probabilities tr.chosen").count() == 1
    rows = page.locator(".mm-probabilities tbody tr")
    assert rows.count() == tree.count()
    assert re.search("%\tbonus token$", page.locator(".mm-probabilities tr.bonus").inner_text())
    # Indented tokens follow their parents.
    levels = [int(level) for level in page.locator(".mm-probabilities td:nth-child(2)").all_inner_texts()]
    assert all(later <= earlier + 1 for earlier, later in itertools.pairwise(levels))
    scrub.fill("0")
    see(page, ".mm-phase", "Prefill")
    assert tree.locator("visible=true").count() == 1  # nothing is drafted yet
    scrub.fill("1000")
    assert hidden.count() == 0
    page.get_by_label("Speed of the replay").select_option("1")
    page.locator(".mm-play:visible").click()
    see(page, ".mm-play", "Replay")
    page.locator(".mm-lane:nth-child(2) [data-pass='1']").first.click()
    assert page.locator(".mm-tree-head .mm-clock").inner_text() == f"Pass 1 of {last}"


def test_four_lanes(visit):
    page = visit()
    for name in ("MSD", "FLASH, chain"):
        page.get_by_label(name, exact=True).locator("visible=true").check()
    race(page)
    assert page.locator(".mm-lane h3").all_inner_texts() == ["Plain", "FLASH", "MSD", "FLASH, chain"]
    assert len(set(page.locator(".mm-lane .mm-text").all_inner_texts())) == 1
    assert page.locator(".mm-race:visible tbody tr").count() == 4
    assert page.locator(".mm-plot:visible").count() == 2
    assert page.locator(".mm-asked").count() == 1  # a new conversation
    page.get_by_label("Lane of the draft tree").select_option(label="FLASH, chain")
    heights = [node.bounding_box()["y"] for node in page.locator(".mm-tree li:not(.bonus) > span").all()]
    assert max(heights) - min(heights) < 8
    save_screenshot(page, "lanes")
    page.get_by_label("n-gram", exact=True).locator("visible=true").check()
    page.locator(".mm-go:visible").click()
    see(page, ".mm-note", "expected 2 to 4 different ones")


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
    query = query.replace("flash", "msd").replace("temperature=0", "temperature=0.5").replace("seed=0", "seed=5")
    linked = visit(query=query)
    see(linked, ".mm-note", "those of the link")
    race(linked)
    assert linked.locator(".mm-lane h3").all_inner_texts() == ["Plain", "MSD"]
    message = "Invalid link: temperature must be a number: got 'hot'."
    visit(query="kind=image&temperature=hot").get_by_role("alert").get_by_text(message).wait_for()


def test_follow_up_question_in_a_streamed_conversation(visit):
    page = visit()
    choose(page, 1)
    page.evaluate(
        """() => { window.seen = new Set(); new MutationObserver(() => {
            const at = document.querySelector('.mm-out .mm-text'); if (at) window.seen.add(at.textContent.length);
        }).observe(document.querySelector('.mm-out'), {childList: true, subtree: true, characterData: true}); }"""
    )
    assert ask(page).startswith('There is a sign at the bottom that reads "HONEY".')
    lengths = page.evaluate("[...window.seen]")
    assert len(lengths) >= 3, f"the text came at once: {lengths}"
    # The number of draft tokens depends on verify times measured on this machine.
    assert page.locator(".mm-out:visible .mm-text .mm-accepted").count() >= 1
    assert page.locator(".mm-out:visible .mm-text .mm-bonus").count() >= 1
    assert "drafted and accepted" in page.locator(".mm-out:visible .mm-legend").inner_text()
    save_screenshot(page, "answer")
    assert "three" in ask(page, "How many objects are there?", follow_up=True)
    asked = ["Describe the image.", "How many objects are there?"]
    assert page.locator(".mm-out:visible .mm-asked").all_inner_texts() == asked
    page.locator(".mm-clear:visible").click()
    see(page, ".mm-out .mm-empty")
    assert page.locator(".mm-follow:visible input").is_disabled()


@pytest.mark.parametrize("name", ["Image", "Text"])
def test_enter_sends_and_shift_enter_breaks_the_line(visit, name):
    page = visit()
    open_tab(page, name)
    see(page, ".mm-play")
    prompt, asked = page.locator(".mm-prompt:visible textarea"), page.locator(".mm-out:visible .mm-asked")
    prompt.fill("Work out:")
    prompt.press("Shift+Enter")
    prompt.press_sequentially("3 + 4")
    assert prompt.input_value() == "Work out:\n3 + 4"
    page.wait_for_timeout(300)
    assert "Work out" not in asked.inner_text()
    prompt.press("Enter")
    see(page, ".mm-out .mm-asked", "Work out:")
    assert (asked.inner_text(), prompt.input_value()) == ("Work out:\n3 + 4",) * 2
    assert name == "Image" or prompt.bounding_box()["height"] > 80


def test_stop_cancels_the_request(visit, monkeypatch):
    cancelled = Event()
    token = {"text": "once", "token_ids": [1], "tokens": [Token("once ", "plain", 0)], "pass_ends": [1.0]}

    def endless(*_):
        try:
            while True:
                yield StreamedAnswer("tiny", "none", **token)
                time.sleep(0.02)
        finally:
            cancelled.set()

    page = visit()
    open_tab(page, "Text")
    page.locator(".mm-prompt:visible textarea").fill("Tell a long story.")
    with monkeypatch.context() as patched:
        patched.setattr(service, "stream_answer", endless)
        page.locator(".mm-ask:visible").click()
        see(page, ".mm-out .mm-text", "once")
        page.locator(".mm-stop:visible").click()
        assert cancelled.wait(PATIENCE / 1000)
    see(page, ".mm-mark")
    assert page.locator(".mm-stop:visible").is_disabled()
    # The next request runs, and the stopped one is a turn.
    assert ask(page, "Work out: 37 + 48", follow_up=True).startswith("37 + 48 = 85")
    assert page.locator(".mm-out:visible .mm-asked").all_inner_texts() == ["Tell a long story.", "Work out: 37 + 48"]
    assert page.locator(".mm-out:visible .mm-talk .mm-mark").count() == 1
    assert "tiny-hybrid" in page.locator(".mm-made:visible").first.inner_text()


def test_several_pictures_in_one_question(visit, tiff):
    """One picture by upload, one of a format that browsers do not show, one pasted; then one is removed."""
    page = visit()
    page.locator(".mm-prompt:visible textarea").fill("Describe the images.")
    replace_media(page, [str(SCENE), tiff])
    page.wait_for_function(PICTURES, arg=2)
    page.locator(".mm-prompt:visible textarea").focus()
    page.evaluate(PASTE, page.locator(".mm-example img").first.get_attribute("src"))
    page.wait_for_function(PICTURES, arg=3)
    assert violations(page) == []
    save_screenshot(page, "pictures")
    text = ask(page)
    assert text.startswith("The first image shows")
    assert "The third image shows" in text
    page.locator(".mm-media [aria-label='Delete image']").last.click()
    see(page, ".mm-out .mm-empty")
    page.wait_for_function(PICTURES, arg=2)
    text = ask(page)
    assert "The second image shows" in text
    assert "third" not in text
    page.locator(".mm-media [aria-label='Clear']").click()
    see(page, ".mm-out .mm-empty")


@pytest.mark.parametrize(("owner", "name"), [(Tab, "clear"), (service.Service, "preview")])
def test_added_pictures_replace_the_example(visit, tmp_path, tiff, monkeypatch, owner, name):
    """The example's removal and the preview of a picture end in any order."""
    work = getattr(owner, name)

    def late(*given):
        time.sleep(1.0)
        return work(*given)

    Image.new("RGB", (64, 48), "navy").save(tmp_path / "lake.png")
    page = visit()
    monkeypatch.setattr(owner, name, late)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add pictures").click()
    assert chooser.value.is_multiple()
    chooser.value.set_files([tiff, str(tmp_path / "lake.png")])
    see(page, ".mm-out .mm-empty")
    see(page, ".mm-media img[src$='scene.tiff.preview.png']")
    see(page, ".mm-media img[src*='lake.png']")
    page.wait_for_function(PICTURES, arg=2)


def test_video_and_its_preview(visit, tmp_path):
    path = write_video(tmp_path / "clip.avi", "mpeg4", (64, 48))
    page = visit(theme="dark")
    open_tab(page, "Video")
    choose(page)
    see(page, ".mm-media video")
    assert "cyan star moves down" in ask(page)
    save_screenshot(page, "video-dark")
    replace_media(page, path)
    see(page, "video[src*='clip.avi.preview.mp4']")
    page.wait_for_function("[...document.querySelectorAll('.mm-media video')].some((one) => one.videoWidth === 64)")


@pytest.mark.parametrize("size", [WIDE, PHONE])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_accessibility(visit, size, theme):
    page = visit(size, theme)
    page.wait_for_timeout(500)
    assert violations(page) == []
    page.get_by_role("button", name=re.compile("^Settings")).locator("visible=true").click()
    see(page, "summary").click()
    page.wait_for_timeout(500)
    assert violations(page) == []
    page.locator(".mm-clear:visible").click()
    see(page, ".mm-out .mm-empty")
    assert violations(page) == []
    race(page)
    page.wait_for_timeout(500)
    assert violations(page) == []


def test_phone_layout(visit):
    page = visit(PHONE)
    assert overflow(page) <= 0
    choose(page, 1)
    ask(page)
    assert overflow(page) <= 0
    save_screenshot(page, "phone")
    page.evaluate("scrollTo(0, 0)")
    race(page)
    page.wait_for_function("document.querySelector('.mm-out').getBoundingClientRect().top < 200")
    assert overflow(page) <= 0
    slider = page.get_by_label("Pass", exact=True)
    slider.fill("1")
    edges = [page.locator(place).bounding_box() for place in (".mm-scroll", ".mm-tree .bonus > span")]
    assert edges[1]["x"] + edges[1]["width"] <= edges[0]["x"] + edges[0]["width"]  # scrolled to the verdict
    page.locator(".mm-tree .bonus > span").tap()
    page.locator(".mm-probabilities tr.chosen.bonus").wait_for()
    boxes = [lane.bounding_box() for lane in page.locator(".mm-lane").all()]
    assert boxes[1]["y"] > boxes[0]["y"] + boxes[0]["height"]  # one below the other
    save_screenshot(page, "phone-race")
    page.locator(".mm-jump:visible").click()
    page.wait_for_function("Math.abs(document.querySelector('.mm-side').getBoundingClientRect().top) < 200")


def test_keyboard_only(visit):
    """From the top of the page to a race, its replay and its tree with Tab, Space and Enter; the focus is visible."""
    page, seen = visit(), []

    def tab_to(*names, key="Tab"):
        for name in names:
            for _ in range(80):
                page.keyboard.press(key)
                page.wait_for_timeout(30)
                seen.append(page.evaluate(FOCUSED))
                if re.search(name, seen[-1]["name"]):
                    break
            else:
                raise AssertionError(f"no {name} among {[one['name'] for one in seen]}")

    tab_to("^Image$", "Prompt", "^Race$", "^Plain$", "^MSD$")
    page.keyboard.press("Space")
    assert page.get_by_label("MSD", exact=True).locator("visible=true").is_checked()
    tab_to("^Race$", key="Shift+Tab")
    page.keyboard.press("Enter")
    page.locator(".mm-lane h3", has_text="MSD").wait_for()
    see(page, ".mm-out h2", "equal tokens")
    see(page, ".mm-play")
    assert page.locator(".mm-lane").count() == 3
    tab_to("^Replay in slow motion$", "^Speed of the replay$", "^Time of the replay$")
    page.keyboard.press("Home")
    assert page.locator(".mm-later").count() > 0
    tab_to("^Lane of the draft tree$", "^Pass$")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert page.locator(".mm-tree-head .mm-clock").inner_text().startswith("Pass 2 of")
    tab_to("^Table of probabilities$")
    page.keyboard.press("Enter")
    see(page, ".mm-probabilities tr.bonus")
    tab_to("^Copy answer$")
    assert [one["name"] for one in seen if not one["visible"]] == []


@pytest.fixture
def server():
    """Start or stop a server, at the same port each time; returns its address."""
    port, running = free_port(), ExitStack()

    def switch(on):
        running.close()
        return running.enter_context(demo_server(port=port)) if on else None

    yield switch
    running.close()


def wait_until_said(page):
    assert see(page, "#mm-lost").inner_text().startswith("The server does not answer.")


def test_page_goes_on_after_a_restart(visit, server, tiff):
    """A picture of the visitor's, the conversation about it, and a question asked while the server was gone."""
    page = visit(address=server(True))
    replace_media(page, tiff)
    see(page, ".mm-media img[src$='preview.png']")
    ask(page)
    open_tab(page, "Text")
    see(page, ".mm-play")
    heading = page.locator("h1:visible").inner_text()
    open_tab(page, "Image")
    server(False)
    wait_until_said(page)
    page.evaluate("window.kept = true")
    page.locator(".mm-follow:visible input").check()
    page.locator(".mm-prompt:visible textarea").fill("How many objects are there?")
    page.locator(".mm-ask:visible").click()
    page.wait_for_timeout(500)
    assert page.locator(".mm-out:visible .mm-asked").count() == 1
    server(True)
    page.locator("#mm-lost").wait_for(state="hidden")
    page.locator(".mm-out:visible .mm-asked").nth(1).wait_for()
    see(page, ".mm-play")
    assert "three" in page.locator(".mm-out:visible .mm-text").nth(1).inner_text()
    assert page.evaluate("window.kept")  # it was not loaded again
    open_tab(page, "Text")
    page.wait_for_timeout(500)
    assert page.locator("h1:visible").inner_text() == heading


def test_interrupted_answer_is_said_and_can_be_asked_again(visit, server, monkeypatch):
    stream, page = service.stream_answer, visit(address=server(True))

    def slow(*given):
        for answer in stream(*given):
            yield answer
            time.sleep(0.5)

    with monkeypatch.context() as patched:
        patched.setattr(service, "stream_answer", slow)
        page.locator(".mm-ask:visible").click()
        see(page, ".mm-out h2", "Answering")
        server(False)
    wait_until_said(page)
    server(True)
    see(page, ".mm-note", "The connection to the server was lost before")
    assert page.locator(".mm-stop:visible").is_disabled()
    assert ask(page).startswith("A large purple circle")


def test_lost_server_is_noticed_within_two_seconds():
    """The time between checks, and until an answer counts as missing; browser tests on a busy machine take longer."""
    script = Path(mmspec.demos.__file__).parent / "scripts" / "connection.js"
    every, patience = re.search(r"EVERY = (\d+), PATIENCE = (\d+);", script.read_text()).groups()
    assert int(every) + int(patience) < 2000
