"""Fixtures of the browser tests."""

import shutil

import pytest

FLAGS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",  # the page needs no other host
]


def pytest_pycollect_makemodule():
    """Skip this folder if a package of the demo is missing."""
    import tests.demos.serving  # noqa: F401


@pytest.fixture(scope="module")
def address():
    from tests.demos.serving import demo_server

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
    from tests.demos.browsing import PATIENCE, PHONE, WIDE

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
