"""The pictures of docs/page.md, of a real ring; with EDGESPEC_IMAGES=docs/images they are kept."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from support.apis import api
from support.boards_in_threads import PATIENT, TorchNodeRing
from support.pages import CHROMIUM, FLAGS, require_chromium

from edgespec.runtime.access_policy import CLIENT

QUESTION = (
    "Question: A farmer has 12 hens. Each hen lays 5 eggs a week. He eats 10 eggs and sells the "
    "rest for 2 dollars each. How many dollars does he make in a week?"
)
PATIENCE_MS = 120_000

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def ring() -> Iterator[TorchNodeRing]:
    """Three stages of the bundled pair that take the time of boards."""
    require_chromium()
    with TorchNodeRing(3) as ring:
        ring.await_up()
        yield ring


@pytest.fixture(scope="module")
def url(ring: TorchNodeRing) -> Iterator[str]:
    """Its page."""
    with api(ring.address, ring.keys.add("the API", CLIENT), timing=PATIENT) as base:
        yield base


@pytest.fixture
def browser(ring: TorchNodeRing) -> Iterator[Browser]:
    """One Chromium for all pictures."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pictures go."""
    kept = os.environ.get("EDGESPEC_IMAGES")
    return Path(kept).absolute() if kept else tmp_path_factory.mktemp("images")


def until(page: Page, condition: str) -> None:
    """Wait for something in the page; its own policy lets nobody wait in there."""
    limit = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < limit, f"it did not come about: {condition}"
        page.wait_for_timeout(20)


def answering(browser: Browser, url: str, width: int, height: int, scheme: str) -> Page:
    """A page in mid-answer."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
    )
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("#health[data-state=up]")
    page.fill("#prompt", QUESTION)
    page.press("#prompt", "Enter")
    until(page, "document.querySelector('.turn.assistant .text').textContent.length > 50")
    until(page, "document.querySelectorAll('.node[data-state=sent]').length > 0")
    return page


def test_pictures(ring: TorchNodeRing, url: str, browser: Browser, images: Path) -> None:
    for name, width, height, scheme, view in (
        ("page-wide", 1366, 860, "light", ""),
        ("page-dark", 1366, 860, "dark", ""),
        ("page-phone", 360, 740, "light", ""),
        ("page-phone-ring", 360, 1500, "light", "#show-ring"),
    ):
        page = answering(browser, url, width, height, scheme)
        if view:
            page.click(view)
            time.sleep(1.0)  # until the timeline has something to show
        page.screenshot(path=images / f"{name}.png")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send:not([hidden])" if not view else "#send", state="attached")
        page.context.close()

    page = answering(browser, url, 1366, 860, "light")
    ring.threads[2].vanish()
    ring.outwait(2)
    page.wait_for_selector("#banner:not([hidden])")
    until(page, "document.querySelector('#banner-text').textContent.includes('since')")
    page.screenshot(path=images / "page-stage-down.png")
    ring.start_stage(2)
    page.wait_for_selector("#health[data-state=up]")
    page.wait_for_selector("#send:not([hidden])")
    assert "The answer failed" not in page.inner_text("#turns")
    assert "the ring was lost once" in page.inner_text(".figures")
    page.context.close()
    assert sorted(p.name for p in images.glob("page-*.png")) == [
        "page-dark.png",
        "page-phone-ring.png",
        "page-phone.png",
        "page-stage-down.png",
        "page-wide.png",
    ]
