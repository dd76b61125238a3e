"""Browser tests of images and videos: uploads, several at once, paste, previews, errors."""

import pytest
from PIL import Image

from tests.demos.browsing import CHOSEN_VIDEO, IMAGE, ask, choose, save_screenshot, upload, violations
from tests.demos.serving import write_video

pytestmark = pytest.mark.browser

PASTE = """async url => { const file = new File([await (await fetch(url)).blob()], "pasted.png", {type: "image/png"});
  const data = new DataTransfer(); data.items.add(file);
  document.activeElement.dispatchEvent(new ClipboardEvent("paste", {clipboardData: data, bubbles: true})); }"""


def wait_for_pictures(page, count):
    """Wait until the browser shows this many pictures of the upload."""
    page.wait_for_function(
        """count => { const all = [...document.querySelectorAll(".mm-media img")].filter((one) => one.offsetParent);
        return all.length === count && all.every((one) => one.naturalWidth > 1); }""",
        arg=count,
    )


def test_several_pictures_in_one_question(visit, tmp_path):
    """One picture by upload, one of a format that browsers do not show, one pasted; then one is removed."""
    with Image.open(IMAGE) as image:
        image.save(tmp_path / "scene.tiff")
    page = visit()
    page.get_by_label("Prompt").locator("visible=true").fill("Describe the images.")
    upload(page, [IMAGE, str(tmp_path / "scene.tiff")])
    wait_for_pictures(page, 2)
    page.get_by_label("Prompt").locator("visible=true").focus()
    page.evaluate(PASTE, page.locator(".mm-example img").first.get_attribute("src"))
    wait_for_pictures(page, 3)
    assert violations(page) == []
    save_screenshot(page, "pictures")
    ask(page)
    text = page.locator(".mm-out:visible .mm-text").inner_text()
    assert text.startswith("The first image shows")
    assert "The third image shows" in text
    page.locator(".mm-media [aria-label='Delete image']").last.click()
    page.locator(".mm-out:visible .mm-empty").wait_for()
    wait_for_pictures(page, 2)
    ask(page)
    text = page.locator(".mm-out:visible .mm-text").inner_text()
    assert "The second image shows" in text
    assert "third" not in text
    page.locator(".mm-media [aria-label='Clear']").click()
    page.locator(".mm-out:visible .mm-empty").wait_for()


def test_added_pictures_replace_the_example(visit, tmp_path):
    Image.new("RGB", (64, 48), "navy").save(tmp_path / "lake.png")
    page = visit()
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Add pictures").click()
    assert chooser.value.is_multiple()
    chooser.value.set_files([str(tmp_path / "lake.png")])
    page.locator(".mm-out:visible .mm-empty").wait_for()
    page.locator(".mm-media img[src*='lake.png']").wait_for()
    wait_for_pictures(page, 1)


def test_video_that_browsers_do_not_show_has_a_preview(visit, tmp_path):
    path = write_video(tmp_path / "clip.avi", "mpeg4", (64, 48))
    page = visit()
    page.get_by_role("tab", name="Video").click()
    page.locator("[aria-label*=Clear]:visible, [aria-label*=Remove]:visible").first.click()
    page.locator("input[type=file]:not([accept*=image])").last.set_input_files(path)
    page.locator("video[src*='clip.avi.preview.mp4']:visible").wait_for()
    page.wait_for_function("[...document.querySelectorAll('.mm-media video')].some((one) => one.videoWidth === 64)")


def test_uploaded_image_streams_a_caption(visit):
    page = visit()
    upload(page, IMAGE)
    page.locator("[data-testid=image] img, .mm-media img").first.wait_for()
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


def test_video(visit):
    page = visit(theme="dark")
    page.get_by_role("tab", name="Video").click()
    choose(page)
    page.locator(CHOSEN_VIDEO).first.wait_for()
    ask(page)
    assert "cyan star moves down" in page.locator(".mm-out:visible .mm-text").inner_text()
    save_screenshot(page, "video-dark")
