"""A real Chromium, Debian's, driven by Playwright."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
LIMIT_MS = 60_000


@dataclass
class Tab:
    """A page in a browser of its own profile. ``page``: Playwright's. ``problems``: what scripts threw and what the page's policy forbade;
    ``addresses``: of all requests."""

    page: Any
    problems: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(LIMIT_MS)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda message: self.problems.append(message.text) if message.type == "error" else None)
        self.page.on("request", lambda request: self.addresses.append(request.url))

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]")

    def say(self, text: str, *, waits: bool = True) -> None:
        """Sends a message, and waits for the end of its answer."""
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        if waits:
            self.wait_end()

    def wait_end(self) -> None:
        self.page.wait_for_function(
            "() => document.querySelector('.answer') && document.querySelector('#stop').hidden && !document.querySelector('[aria-busy=true]')"
        )

    def texts(self, selector: str) -> list[str]:
        """Returns what is seen. Answers that come onto the page have no text before the next frame, which finds out which of them are on the screen."""
        self.page.evaluate("() => new Promise((seen) => requestAnimationFrame(() => requestAnimationFrame(seen)))")
        return list(self.page.locator(selector).all_inner_texts())

    def violations(self) -> list[str]:
        """Returns what axe-core finds, all of its rules."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [f"{each['id']}: {each['help']}: {[node['html'] for node in each['nodes']][:3]}" for each in found]


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    """Yields Playwright's browser; skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install 'tandem-rl[test]'")
    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium-headless-shell")
    with sync_api.sync_playwright() as playwright:
        # Chromium's own sandbox does not work for root or in a container.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield started
        finally:
            started.close()


@contextlib.contextmanager
def tab(started: Any, **options: Any) -> Iterator[Tab]:
    context = started.new_context(**options)
    try:
        yield Tab(context.new_page())
    finally:
        context.close()
