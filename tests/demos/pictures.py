"""Pictures of the demo for the documentation: ``python -m tests.demos.pictures docs`` writes demo.png and demo.webp."""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.demos.serving import demo_server

_FRAMES, _MILLISECONDS = 70, 150


def main(folder: Path) -> None:
    """Write a picture of the page after its first race, and a moving one of the replay."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    with demo_server() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.goto(f"{address}?__theme=light")
        page.locator(".mm-play").wait_for()
        page.wait_for_timeout(1000)
        page.screenshot(path=folder / "demo.png", full_page=True)
        box = page.locator(".mm-result").bounding_box()
        tree = page.locator(".mm-scroll").bounding_box()
        clip = {**box, "height": tree["y"] + tree["height"] - box["y"] + 8}
        scrub, frames = page.get_by_label("Time of the replay"), []
        for number in range(_FRAMES + 1):
            scrub.fill(str(1000 * number // _FRAMES))
            shot = page.screenshot(clip=clip, full_page=True)
            frames.append(Image.open(io.BytesIO(shot)).convert("RGB"))
        browser.close()
    options = {"duration": _MILLISECONDS, "loop": 0, "quality": 60, "method": 4}
    frames[0].save(folder / "demo.webp", save_all=True, append_images=frames[1:], **options)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
