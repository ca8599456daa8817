"""The page in Chromium, over the API and a ring of fake stages that take their time."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from threading import Semaphore
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, Route, sync_playwright
from support.apis import api
from support.nodes import QUICK, NodeRing
from support.pages import CHROMIUM, FLAGS, Cluster, require_chromium
from support.rings import submit

from edgespec.daemon.api_keys import ApiKeys
from edgespec.daemon.cluster import ClusterFolder, ClusterSettings
from edgespec.errors import ConfigError
from edgespec.runtime.access_policy import CLIENT
from edgespec.types.record import as_dict
from edgespec.wire.client_messages import LiveRequest, NodeStatus, Status

STAGES = 3
DELAY_S = 0.02
"""What every block takes, so that there is something to be seen."""

TOKENS = 70
MANY = 300
"""Of answers that are not waited for."""

QUESTION = "how many eggs"
ENDLESS, LONG = "Once upon a time", 900
"""What the bundled model answers without end, and as many tokens as its context has room for: some
seconds of any machine's time, of which the test needs the first."""

CALM = replace(QUICK, beat=0.1)
PATIENCE_MS = 120_000


@pytest.fixture(scope="module", autouse=True)
def _chromium() -> None:
    require_chromium()


@pytest.fixture(scope="module")
def ring(_chromium: None) -> Iterator[NodeRing]:
    """A ring that is up."""
    with NodeRing(STAGES, timing=CALM, recovery=60.0, live=2) as ring:
        ring.await_up()
        for block in ring.blocks:
            block.delay = DELAY_S
        yield ring


@pytest.fixture(scope="module")
def url(ring: NodeRing) -> Iterator[str]:
    """Its API, which has the page."""
    with api(ring.address, ring.keys.add("the API", CLIENT), timing=CALM) as base:
        yield base


@pytest.fixture(scope="module")
def playwright(_chromium: None) -> Iterator[Playwright]:
    """What drives the browsers."""
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture
def browser(playwright: Playwright) -> Iterator[Browser]:
    """A Chromium for each test: it starts helpers when it pleases, which no test may leave."""
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    yield browser
    browser.close()


class Watched:
    """Open pages, and what went wrong in them."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self.url = url
        self.problems: list[str] = []
        self.foreign: list[str] = []
        self.expected: list[str] = []
        self._contexts: list[Any] = []

    def open(self, width: int = 1366, height: int = 860, path: str = "", **options: Any) -> Page:
        """The page in a fresh profile, when its ring is there."""
        context = self._browser.new_context(
            viewport={"width": width, "height": height}, reduced_motion="reduce", **options
        )
        self._contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        context.route("**/*", self._only_here)
        page = context.new_page()
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.problems.append(str(error)))
        page.goto(f"{self.url}/{path}")
        return page

    def _only_here(self, route: Route) -> None:
        if route.request.url.startswith(self.url):
            route.continue_()
        else:
            self.foreign.append(route.request.url)
            route.abort()

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(message.text)

    def close(self) -> None:
        """Close them all, and see that nothing went wrong."""
        for context in self._contexts:
            context.close()
        assert self.foreign == []
        left = [p for p in self.problems if not any(word in p for word in self.expected)]
        assert left == []


@contextmanager
def pages(browser: Browser, url: str) -> Iterator[Watched]:
    """Pages of that server."""
    watched = Watched(browser, url)
    yield watched
    watched.close()


@pytest.fixture
def watched(browser: Browser, url: str, ring: NodeRing) -> Iterator[Watched]:
    """Pages over the ring, of which nothing is left behind."""
    with pages(browser, url) as found:
        yield found
    ring.assert_free()


def until(page: Page, condition: str, argument: object = None) -> None:
    """Wait for something in the page; its own policy lets nobody wait in there."""
    end = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition, argument):
        assert time.monotonic() < end, f"it did not come about: {condition}"
        page.wait_for_timeout(20)


def is_up(page: Page) -> None:
    """Wait until the page says that the ring is."""
    page.wait_for_selector("#health[data-state=up]")


def limit(page: Page, tokens: int) -> None:
    """How long answers may be from now on."""
    page.evaluate(
        "tokens => { const e = document.getElementById('tokens'); e.value = tokens;"
        " e.dispatchEvent(new Event('change')); }",
        str(tokens),
    )


def ask(page: Page, question: str = QUESTION, tokens: int = TOKENS) -> None:
    """Send a question by keyboard."""
    limit(page, tokens)
    page.fill("#prompt", question)
    page.press("#prompt", "Enter")


def text(page: Page, which: int = -1) -> str:
    """An answer so far."""
    return page.locator(".turn.assistant .text").nth(which).inner_text()


def until_text(page: Page, length: int) -> None:
    """Until the newest answer has that many characters."""
    until(
        page,
        "length => [...document.querySelectorAll('.turn.assistant .text')].pop()"
        "?.textContent.length >= length",
        length,
    )


def until_done(page: Page) -> None:
    """Until the newest answer has ended."""
    page.wait_for_selector("#send:not([hidden])")
    page.wait_for_selector(".turn.assistant:last-child .again")


def right(ring: NodeRing, prompt: str = QUESTION, tokens: int = TOKENS) -> str:
    """What plain decoding answers."""
    return ring.expected(submit(prompt=prompt, max_new_tokens=tokens)).text


RECORD = """() => {
  window.states = {};
  window.onTheRing = [];
  const told = document.getElementById('segments');
  new MutationObserver(() => window.onTheRing.push(told.textContent)).observe(told,
    {childList: true});
  const look = () => {
    for (const node of document.querySelectorAll('#tree-picture .node')) {
      const seen = window.states[node.dataset.id] ||= [];
      if (seen.at(-1) !== node.dataset.state) seen.push(node.dataset.state);
    }
  };
  new MutationObserver(look).observe(document.getElementById('tree-picture'),
    {subtree: true, childList: true, attributes: true, attributeFilter: ['data-state']});
}"""


def test_an_answer_streams_and_the_tree_shows_what_happens(
    watched: Watched, ring: NodeRing
) -> None:
    page = watched.open()
    is_up(page)
    page.evaluate(RECORD)
    passes = ring.blocks[0].passes = Semaphore(4)
    ask(page)
    lengths = [0]
    for _ in range(2):
        until_text(page, lengths[-1] + 1)
        lengths.append(len(text(page)))
        passes.release(4)
    assert lengths[1] < lengths[2] < TOKENS, "it did not stream"
    ring.blocks[0].passes = None
    passes.release(TOKENS)
    until_done(page)
    assert text(page) == right(ring)
    states = set(map(tuple, page.evaluate("Object.values(window.states)")))
    seen = {state for states_of_one in states for state in states_of_one}
    assert seen >= {"sent", "accepted", "pruned"}
    steps = {(a, b) for one in states for a, b in pairwise(one)}
    assert ("sent", "accepted") in steps
    assert any(re.search(r"#\d+ \(\d+ row", told) for told in page.evaluate("window.onTheRing"))
    figures = page.inner_text(".turn.assistant .figures")
    plain = r"about [\d.]+ times plain decoding \([\d.]+, estimated\)"
    assert re.search(rf"[\d.]+ tokens a second, {plain} · {TOKENS} tokens, [\d.]+ a trip", figures)
    assert re.search(r"prompt of \d+ tokens, \d+ of them cached", figures), figures
    assert page.locator("#stages .lane").count() == STAGES
    counted = [int(t.split()[0]) for t in page.locator(".lane-text").all_inner_texts()]
    assert all(rows > 0 for rows in counted)
    assert page.locator("#ring .device").count() == STAGES + 1
    page.click("#boards summary")
    assert "Layers 1 to 1" in page.locator("#ring .device").nth(2).inner_text()
    assert page.inner_text("#said").startswith("Answer: ")


@pytest.mark.thorough
def test_stop_regenerate_and_another_turn(watched: Watched, ring: NodeRing) -> None:
    page = watched.open()
    is_up(page)
    ask(page, tokens=MANY)
    until_text(page, 10)
    page.keyboard.press("Escape")
    until_done(page)
    part = text(page)
    assert "stopped" in page.inner_text(".turn.assistant .figures")
    assert 0 < len(part) < MANY
    assert right(ring, tokens=MANY).startswith(part)
    ring.assert_free()

    page.click(".again")
    until_text(page, 10)
    page.click("#stop")
    until_done(page)
    limit(page, TOKENS)
    page.click(".again")
    until_done(page)
    assert page.locator(".turn").count() == 2
    assert text(page) == right(ring)

    ask(page, "and now", tokens=20)
    until_done(page)
    assert page.locator(".turn").count() == 4
    assert text(page) == right(ring, QUESTION + right(ring) + "and now", 20)
    page.click("#clear")
    assert page.locator(".turn").count() == 0


def kept(page: Page) -> list[dict[str, Any]]:
    """The conversations in the browser's storage, the newest first."""
    found = page.evaluate(
        "Object.entries(localStorage).filter(([k]) => k.startsWith('edgespec-chat-'))"
        ".map(([, chat]) => JSON.parse(chat)).sort((a, b) => b.at - a.at)"
    )
    return list(found)


def test_chats_are_kept_and_each_has_its_own_answers(watched: Watched, ring: NodeRing) -> None:
    """After a reload the same chat is shown; answers go on in chats that are not shown."""
    page = watched.open()
    is_up(page)
    ask(page, tokens=10)
    until_done(page)
    page.reload()
    is_up(page)
    assert text(page) == right(ring, tokens=10)
    assert page.locator(".turn.user .text").inner_text() == QUESTION
    for block in ring.blocks:
        block.delay = 10 * DELAY_S  # it is to last while others are looked at
    ask(page, "and now", tokens=MANY)
    until_text(page, 10)
    page.click("#clear")
    assert page.locator(".turn").count() == 0
    assert page.is_visible("#empty")
    assert page.is_visible("#send")
    ask(page, "another", tokens=10)
    until_done(page)
    assert text(page) == right(ring, "another", 10)
    page.click("#open-chats")
    assert page.locator("#chat-list li").count() == 2
    page.click("#chat-list .open:not([aria-current=true])")
    assert page.inner_text("#chat-title") == QUESTION
    assert page.is_visible("#stop"), "it is answered while another chat is shown"
    longer = len(text(page)) + 10
    until_text(page, longer)
    page.keyboard.press("Escape")
    for block in ring.blocks:
        block.delay = DELAY_S
    until_done(page)
    whole = right(ring, QUESTION + right(ring, tokens=10) + "and now", MANY)
    assert whole.startswith(text(page))
    page.click("#open-chats")
    delete = page.locator("#chat-list li", has_text="another").get_by_text("Delete")
    delete.click()
    assert len(kept(page)) == 2, "one press deletes nothing"
    page.locator("#chat-list li", has_text="another").get_by_text("Really?").click()
    assert [chat["turns"][0]["content"] for chat in kept(page)] == [QUESTION]


@pytest.mark.thorough
def test_an_answer_that_a_reload_cuts_is_kept_as_far_as_it_came(
    watched: Watched, ring: NodeRing
) -> None:
    page = watched.open()
    is_up(page)
    ask(page, tokens=MANY)
    until_text(page, 20)
    page.reload()
    is_up(page)
    assert "cut" in page.inner_text(".turn.assistant .figures")
    assert len(text(page)) >= 20
    assert right(ring, tokens=MANY).startswith(text(page))
    ring.assert_free()
    limit(page, TOKENS)
    page.click(".again")
    until_done(page)
    assert text(page) == right(ring)


@pytest.mark.thorough
def test_a_full_browser_loses_its_oldest_chats_and_says_so(
    watched: Watched, ring: NodeRing
) -> None:
    page = watched.open()
    is_up(page)
    page.evaluate(
        """() => {
      const chat = {settings: {}, turns: [{role: 'user', content: 'x'.repeat(1 << 20)}]};
      for (let at = 1; at <= 9; at += 1) {
        try { localStorage[`edgespec-chat-${at}`] = JSON.stringify({id: `${at}`, at, ...chat}); }
        catch { break; }
      }
      try { for (let n = 0; ; n += 1) localStorage[`filled-${n}`] = 'x'.repeat(1000); } catch {}
      try { for (let n = 0; ; n += 1) localStorage[`filler-${n}`] = ''; } catch {}
    }"""
    )
    before = [chat["at"] for chat in kept(page)]
    assert len(before) >= 2
    ask(page, tokens=10)
    page.wait_for_selector("#chats-problem:not([hidden])")
    assert "oldest chat was removed" in page.inner_text("#chats-problem")
    until_done(page)
    first, *others = kept(page)
    assert first["turns"][1]["content"] == right(ring, tokens=10)
    assert [chat["at"] for chat in others] == before[:-1]
    page.evaluate("localStorage.clear()")


MARKDOWN = """Here **bold** and `code` of *one* &lt;tag&gt;:

1. first
2. second

```python
print("<b>hello</b>")
```

| a | b |
| --- | ---: |
| 1 | 2 |

<script>window.hit = 1</script><img src=x onerror="window.hit = 1">
[here](https://example.org/x) [there](javascript:window.hit=1) ![far](https://example.org/p.png)
[data](data:text/html,<script>1</script>) <https://example.org/auto>
"""


def test_markdown_is_shown_and_makes_nothing_of_a_models_html(watched: Watched) -> None:
    page = watched.open()
    is_up(page)
    ask(page, tokens=5)
    until_done(page)
    page.evaluate(
        """text => {
      const key = Object.keys(localStorage).find(key => key.startsWith('edgespec-chat-'));
      const chat = JSON.parse(localStorage[key]);
      chat.turns[1].content = text;
      chat.turns[1].thought = 'What does <b>it</b> want?';
      localStorage[key] = JSON.stringify(chat);
    }""",
        MARKDOWN,
    )
    page.reload()
    is_up(page)
    thought = page.locator(".turn.assistant .thought")
    assert thought.evaluate("one => one.open") is False, "it is folded"
    thought.locator("summary").click()
    assert thought.locator("p").inner_text() == "What does <b>it</b> want?"
    told = page.locator(".turn.assistant .text")
    assert told.locator("strong").all_inner_texts() == ["bold"]
    assert told.locator("ol > li").all_inner_texts() == ["first", "second"]
    assert told.locator("pre").inner_text() == 'print("<b>hello</b>")'
    assert told.locator("td").all_inner_texts() == ["1", "2"]
    assert "one <tag>" in told.inner_text()
    links = told.locator("a").evaluate_all("all => all.map(a => [a.href, a.target, a.rel])")
    assert [address for address, *_ in links] == [
        "https://example.org/x",
        "https://example.org/p.png",
        "https://example.org/auto",
    ]
    assert all(more == ["_blank", "noopener noreferrer"] for _, *more in links)
    assert told.locator("script, img, iframe, b, style, form").count() == 0
    assert "<script>window.hit = 1</script>" in told.inner_text()
    assert page.evaluate("window.hit") is None
    # The browser itself would refuse to make HTML of a text.
    refused = "try { document.body.innerHTML = '<b>1</b>'; 'made' } catch (error) { error.name }"
    watched.expected.append("TrustedHTML")
    assert page.evaluate(refused) == "TypeError"


@pytest.mark.thorough
def test_copying_gives_what_the_model_wrote(watched: Watched, ring: NodeRing) -> None:
    page = watched.open(permissions=["clipboard-read", "clipboard-write"])
    is_up(page)
    ask(page, tokens=10)
    until_done(page)
    page.click(".turn.assistant .copy")
    until(page, "document.querySelector('.turn.assistant .copy').textContent.startsWith('Copied')")
    assert page.evaluate("navigator.clipboard.readText()") == right(ring, tokens=10)


@pytest.mark.thorough
def test_a_system_message_and_sampling_belong_to_a_chat(watched: Watched) -> None:
    page = watched.open()
    is_up(page)
    asked: list[dict[str, Any]] = []
    page.on("request", lambda r: asked.append(json.loads(r.post_data)) if r.post_data else None)
    page.click("#open-settings")
    page.fill("#system", "Answer in rhymes.")
    page.fill("#top_p", "0.9")
    page.click("#settings .primary")
    ask(page, tokens=5)
    until_done(page)
    assert asked[0]["messages"][0] == {"role": "system", "content": "Answer in rhymes."}
    assert asked[0]["top_p"] == 0.9
    page.click("#clear")
    page.click("#open-settings")
    assert (page.input_value("#system"), page.input_value("#top_p")) == ("", "0.9")
    page.fill("#top_p", "0.5")
    page.click("#settings .primary")
    page.click("#open-chats")
    page.click("#chat-list .open")
    page.click("#open-settings")
    assert page.input_value("#system") == "Answer in rhymes."
    assert page.input_value("#top_p") == "0.9"


@pytest.mark.thorough
@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_axe_finds_no_serious_fault(watched: Watched, look: str) -> None:
    """With a chat, in each dialog, and in both views of a phone."""
    from axe_playwright_python.sync_playwright import Axe

    wide = {"color_scheme": look} if look != "phone" else {"has_touch": True, "is_mobile": True}
    page = watched.open(*((390, 780) if look == "phone" else (1366, 860)), **wide)
    is_up(page)

    def looked_at(what: str) -> None:
        found = Axe().run(page).response["violations"]
        assert not [
            (what, fault["id"], fault["nodes"][0]["html"])
            for fault in found
            if fault["impact"] in ("serious", "critical")
        ]

    looked_at("an empty chat")
    ask(page, tokens=20)
    until_done(page)
    page.evaluate(
        "text => { const [key] = Object.keys(localStorage).filter(k => k.startsWith("
        "'edgespec-chat-')); const chat = JSON.parse(localStorage[key]);"
        " chat.turns[1].content = text; localStorage[key] = JSON.stringify(chat); }",
        MARKDOWN,
    )
    page.reload()
    is_up(page)
    looked_at("an answer")
    page.click(".turn.user .edit")
    looked_at("a question that is changed")
    for button in ("#open-chats", "#open-settings"):
        page.click(button)
        looked_at(button)
        page.keyboard.press("Escape")
    if look == "phone":
        page.click("#show-ring")
    for about in page.locator(".about summary").all():
        about.click()
    looked_at("the ring, with all that is told of it")


@pytest.mark.thorough
def test_a_stage_that_is_down_is_named_and_the_answer_goes_on(
    watched: Watched, ring: NodeRing
) -> None:
    page = watched.open()
    is_up(page)
    ask(page)
    until_text(page, 10)
    ring.threads[2].vanish()
    ring.outwait(2)
    page.wait_for_selector("#health[data-state=partial]")
    until(page, "document.querySelector('#banner-text').textContent.includes('since')")
    banner = page.inner_text("#banner")
    assert "Stage 2 (toybox) is down since" in banner
    assert "The answer is paused" in banner
    assert "goes on when it is back or a spare has its place" in banner
    assert page.inner_text("#alarm") != ""
    assert page.locator(".device[data-state=missing]").count() == 1
    assert page.locator(".board[data-state=missing]").count() == 1
    assert page.locator(".link[data-whole=false]").count() == 2
    before = text(page)
    assert right(ring).startswith(before)
    assert page.is_visible("#stop")
    ring.start_stage(2)
    is_up(page)
    page.wait_for_selector("#banner", state="hidden")
    until_done(page)
    assert text(page) == right(ring)
    assert page.inner_text("#alarm") == "The ring is up again."


WIDE_OR_SMALL = """() => [...document.querySelectorAll('button, input, select, textarea')]
  .filter(e => e.offsetParent !== null)
  .map(e => [e.id, e.getBoundingClientRect()])
  .filter(([, r]) => r.left < 0 || r.right > innerWidth || r.height < 24)
  .map(([id, r]) => `${id} ${r.left} ${r.right} ${r.height}`)"""


@pytest.mark.thorough
def test_phone_width(watched: Watched) -> None:
    page = watched.open(360, 640, has_touch=True, is_mobile=True)
    is_up(page)
    assert not page.is_visible("#keys"), "there are no keys to press"
    ask(page, tokens=60)
    until_done(page)
    for view in ("#show-ring", "#show-chat"):
        page.click(view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        assert page.evaluate(WIDE_OR_SMALL) == []
        assert page.get_attribute(view, "aria-pressed") == "true"
    page.click("#open-settings")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(WIDE_OR_SMALL) == []


FOCUS = """() => {
  const e = document.activeElement, s = getComputedStyle(e);
  return [e.id || e.className, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2];
}"""


@pytest.mark.thorough
def test_keyboard_alone(watched: Watched, ring: NodeRing) -> None:
    page = watched.open()
    is_up(page)
    assert page.is_visible("#keys")
    page.keyboard.press("Tab")
    assert page.evaluate(FOCUS) == ["skip", True]
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.type("first line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    limit(page, MANY)
    assert page.input_value("#prompt") == "first line\nsecond"
    page.keyboard.press("Enter")
    until_text(page, 5)
    page.keyboard.press("Escape")
    until_done(page)
    reached = []
    page.focus(".skip")
    for _ in range(12):
        page.keyboard.press("Tab")
        name, visible = page.evaluate(FOCUS)
        if not name:
            break  # behind the last one
        assert visible, f"nobody sees that {name} has the focus"
        reached.append(name)
    for wanted in ("theme", "open-settings", "clear", "turns", "quiet again", "prompt", "send"):
        assert wanted in reached, reached
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.closest('dialog').id") == "settings"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "open-settings"


CONTRAST = """() => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.checkVisibility() || e.closest('svg, .hidden, :disabled')) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(behind(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${e.tagName} ${e.className} ${e.textContent}: ${ratio}`);
  }
  return found;
}"""


@pytest.mark.thorough
def test_light_and_dark_by_system_and_by_switch(watched: Watched) -> None:
    page = watched.open(color_scheme="dark")
    is_up(page)
    ask(page, tokens=30)
    until_done(page)
    shades = {}
    for theme in ("auto", "light", "dark"):
        assert theme in page.inner_text("#theme")
        assert page.evaluate(CONTRAST) == []
        shades[theme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
    assert shades["auto"] == shades["dark"] != shades["light"]
    page.click("#theme")  # light
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == shades["light"]
    page.emulate_media(color_scheme="light")
    page.evaluate("localStorage.clear()")
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == shades["light"]


@pytest.mark.thorough
def test_settings_are_kept_and_count(watched: Watched) -> None:
    page = watched.open()
    is_up(page)
    page.click("#open-settings")
    for field, value in (("temperature", "0.7"), ("seed", "42"), ("tokens", "7")):
        page.fill(f"#{field}", value)
    page.select_option("#policy", "flowspec")
    page.click("#settings .primary")
    page.reload()
    is_up(page)
    with page.expect_request("**/v1/chat/completions") as asked:
        page.fill("#prompt", QUESTION)
        page.press("#prompt", "Enter")
    body = json.loads(asked.value.post_data or "")
    until_done(page)
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.7, 42, 7)
    assert body["policy"] == "flowspec"
    assert "cut at the limit" in page.inner_text(".figures")
    page.click("#open-settings")
    page.click("#defaults")
    assert page.input_value("#temperature") == ""
    assert str(page.get_attribute("#temperature", "placeholder")).startswith("0, the model")


@pytest.mark.thorough
def test_a_model_without_a_chat_template(
    watched: Watched, ring: NodeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(codec: object, *_: object) -> None:
        raise ConfigError("the model has no chat template; send a prompt instead of messages")

    monkeypatch.setattr(type(ring.codec), "encode_chat", refuse)
    watched.expected.append("400")
    page = watched.open()
    is_up(page)
    ask(page, tokens=20)
    until_done(page)
    assert text(page) == right(ring, tokens=20)


def test_what_a_person_or_a_device_says_is_text(watched: Watched) -> None:
    page = watched.open()
    is_up(page)
    ask(page, "<img src=x onerror=alert(1)><b>bold</b>", tokens=5)
    until_done(page)
    assert page.locator(".turn img, .turn b").count() == 0
    assert page.locator(".turn.user .text").inner_text().startswith("<img src=x")
    evil = json.dumps({"error": {"message": "<script>alert(1)</script><img src=x>"}})
    watched.expected.append("403")
    page.route("**/events", lambda route: route.fulfill(status=403, body=evil))
    page.reload()
    until(page, "document.querySelector('#banner-text').textContent.includes('alert')")
    assert page.locator("#banner script, #banner img").count() == 0


def test_several_answers_are_listed_with_their_speeds(watched: Watched) -> None:
    """And which of them the tree shows, as soon as there are several."""
    live = [LiveRequest(1, "adaptive", 9, 12, 3.2), LiveRequest(2, "<b>x</b>", 9, 1, 0.0)]

    def play(route: Route) -> None:
        nodes = (NodeStatus(1, 0, 4),)
        status = Status(True, (), nodes, 1, 1, 9.0, len(live), 0, "m", 99, tuple(live))
        body = json.dumps({**as_dict(status), "reachable": True, "lines": None})
        headers = {"content-type": "text/event-stream"}
        route.fulfill(status=200, headers=headers, body=f"event: status\ndata: {body}\n\n")

    page = watched.open()
    is_up(page)
    page.route("**/events", play)
    page.reload()
    until(page, "document.querySelectorAll('.answers li').length === 2")
    assert page.locator(".answers li").all_inner_texts() == [
        "adaptive: 12 tokens, 3.2 a second (shown below)",
        "<b>x</b>: 1 token",
    ]
    live.pop()
    until(page, "document.querySelectorAll('.answers li').length === 1")
    assert page.locator(".answers li").all_inner_texts() == ["adaptive: 12 tokens, 3.2 a second"]


def test_a_user_chooses_which_answer_the_tree_shows(watched: Watched) -> None:
    """By click and by keyboard, and it stays chosen until it is over."""
    live = [LiveRequest(n, "adaptive", 9, 12, 3.2) for n in (1, 2, 3)]
    asked: list[str] = []

    def play(route: Route) -> None:
        asked.append(route.request.url.partition("/events")[2])
        nodes = (NodeStatus(1, 0, 4),)
        status = Status(True, (), nodes, 1, 1, 9.0, len(live), 0, "m", 99, tuple(live))
        told = [("status", {**as_dict(status), "reachable": True, "lines": None})]
        for place, one in enumerate(live):
            root = [5, 4, f"root{one.number}", "accepted", 1.0, "model", True]
            scene = {"state": "answering", "request": one.number, "place": place, "root": 5}
            figures = {"policy": f"policy{one.number}", "tokens": 12, "trips": 6.0}
            told.append(
                ("scene", {**scene, **figures, "nodes": [root], "segments": [], "runs": []})
            )
        body = "".join(f"event: {name}\ndata: {json.dumps(what)}\n\n" for name, what in told)
        route.fulfill(status=200, headers={"content-type": "text/event-stream"}, body=body)

    page = watched.open()
    is_up(page)
    page.route("**/events*", play)
    page.reload()
    pressed = "[...document.querySelectorAll('.answers [aria-pressed=true]')].map(b => b.id).join()"

    def shows(number: int) -> None:
        until(page, f"{pressed} === 'watch-{number}'")
        until(
            page, f"document.querySelector('#tree-note').textContent.startsWith('policy{number}')"
        )
        assert f"root{number}" in (page.locator("#tree-picture").text_content() or "")

    shows(1)
    page.click("#watch-3")
    shows(3)
    until(page, "document.activeElement.id === 'watch-3'")  # the list is drawn anew each second
    page.focus("#watch-2")
    page.keyboard.press("Enter")
    shows(2)
    assert {"", "?request=3", "?request=2"} == set(asked)
    live.pop(1)
    shows(1)
    assert asked[-1] == ""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_real_processes(browser: Browser, tmp_path: Path) -> None:
    """The bundled pair, a process each; one is killed as by a power cut."""
    with Cluster(tmp_path, 2) as cluster, pages(browser, cluster.url) as watched:
        page = watched.open()
        is_up(page)
        ask(page, ENDLESS, tokens=LONG)
        until_text(page, 30)
        cluster.kill(2)
        page.wait_for_selector("#health[data-state=partial]")
        assert "Stage 2" in page.inner_text("#banner")
        assert page.is_visible("#stop"), "the answer was over before the stage was killed"
        before = text(page)
        cluster.join(2)
        is_up(page)
        until_done(page)
        assert text(page).startswith(before)
        assert "the ring was lost" in page.inner_text(".figures")
        page.click("#open-settings")
        page.click("#defaults")
        page.keyboard.press("Escape")
        limit(page, LONG)
        after = text(page)
        page.click(".again")
        until_done(page)
        assert text(page) == after


def test_the_ring_is_a_picture_in_which_an_answer_moves(
    watched: Watched, ring: NodeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in ring.blocks:  # a slow answer is drawn seldom, and is as long as it is looked at
        monkeypatch.setattr(block, "delay", 0.1)
    page = watched.open()
    is_up(page)
    drawn = page.locator("#ring-picture")
    assert page.locator("#ring-picture .board").count() == STAGES + 1
    assert page.locator(".link[data-whole=true]").count() == STAGES + 1
    told = drawn.get_attribute("aria-label") or ""
    assert told.startswith("The ring: D0, the coordinator")
    assert "V2 toybox, layers 1 to 1, ready" in told
    assert "idle" in (drawn.text_content() or "")
    ask(page, tokens=MANY)
    until(page, "document.querySelectorAll('.link[data-live=true]').length > 0")
    until(page, "document.querySelector('#ring-picture .speed')?.textContent > 0")
    until(
        page, "/\\d+ tokens, [\\d.]+ a second/.test(document.querySelector('.doing')?.textContent)"
    )
    page.keyboard.press("Escape")
    until_done(page)
    assert page.is_hidden("#no-draft")
    page.click("#open-settings")
    assert "guesses by fake" in page.inner_text("#own-settings")


@pytest.mark.thorough
def test_without_a_draft_the_page_says_how_to_get_one(
    watched: Watched, ring: NodeRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "draft", "")
    page = watched.open()
    is_up(page)
    page.wait_for_selector("#no-draft:not([hidden])")
    assert "edgespec init --draft ngram" in page.inner_text("#no-draft")
    page.click("#open-settings")
    assert "no draft" in page.inner_text("#own-settings")


@pytest.mark.thorough
def test_a_question_is_changed_in_another_chat_and_chats_are_searched(watched: Watched) -> None:
    page = watched.open()
    is_up(page)
    for question in ("the first hen", "the second goose"):
        ask(page, question, tokens=5)
        until_done(page)
    page.locator(".turn.user .edit").nth(1).click()
    page.locator(".editing textarea").fill("the second duck")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    until_done(page)
    asked = page.locator(".turn.user .text").all_inner_texts()
    assert asked == ["the first hen", "the second duck"]
    page.locator(".turn.assistant .branch").first.click()
    assert page.locator(".turn").count() == 2
    page.click("#open-chats")
    assert page.locator("#chat-list li").count() == 3
    for words, found in (("GOOSE", 1), ("hen", 3), ("swan", 0)):
        page.fill("#search", words)
        assert page.locator("#chat-list li").count() == found
    assert page.inner_text("#no-chats") == "None has these words."
    page.fill("#search", "goose")
    assert "the second goose" in page.inner_text("#chat-list .note")
    page.click("#chat-list .open")
    asked = page.locator(".turn.user .text").all_inner_texts()
    assert asked == ["the first hen", "the second goose"]


@pytest.mark.thorough
def test_a_link_with_a_key_is_used_once_and_its_device_is_remembered(
    browser: Browser, ring: NodeRing, tmp_path: Path
) -> None:
    keys = ApiKeys(ClusterFolder.create(tmp_path / "cluster", ClusterSettings()).path)
    identity, once = ring.keys.add("the API of phones", CLIENT), keys.new("phone", once=True)
    door = {"accepts": keys.accepts, "exchanged": keys.exchanged}
    with api(ring.address, identity, timing=CALM, **door) as url, pages(browser, url) as watched:
        watched.expected.append("401")
        phone = watched.open(390, 780, has_touch=True, is_mobile=True, path=f"#key={once}")
        is_up(phone)
        assert once not in phone.url
        kept = phone.evaluate("localStorage.getItem('edgespec-key')")
        assert keys.accepts(kept)
        assert not keys.accepts(once)
        phone.evaluate("sessionStorage.clear()")
        phone.reload()
        is_up(phone)
        other = watched.open(path=f"#key={once}")
        other.wait_for_selector("#key[open]")
        assert "this link was used before" in other.inner_text("#key-note")
        phone.click("#open-settings")
        phone.click("#forget-key")
        phone.wait_for_selector("#key[open]")
        assert phone.is_checked("#key-kept"), "a phone is one person's"


@pytest.mark.thorough
def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, ring: NodeRing) -> None:
    identity = ring.keys.add("the API with keys", CLIENT)
    accepts: Callable[[str], bool] = lambda key: key == "right"  # noqa: E731
    with (
        api(ring.address, identity, timing=CALM, accepts=accepts) as url,
        pages(browser, url) as watched,
    ):
        watched.expected.append("401")
        page = watched.open()
        page.wait_for_selector("#key[open]")
        for key in ("wrong", "right"):
            page.fill("#key-text", key)
            page.press("#key-text", "Enter")
            if key == "wrong":
                until(page, "document.querySelector('#key-text').value === ''")
                page.wait_for_selector("#key[open]")
        is_up(page)
        ask(page, tokens=5)
        until_done(page)
        page.reload()
        is_up(page)
        assert page.evaluate("sessionStorage.getItem('edgespec-key')") == "right"
        assert page.evaluate("JSON.stringify(localStorage)").count("right") == 0
