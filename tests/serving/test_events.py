"""The page's files and its stream of events, over a client that a test plays."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace
from starlette.applications import Starlette

from edgespec.errors import PeerLost
from edgespec.serving.events import HEADERS, MOST_UNREAD, MOST_VIEWERS, Theatre, Viewer, routes
from edgespec.serving.problems import ApiProblem
from edgespec.wire.client_messages import NodeStatus, Status
from edgespec.wire.snapshots import Snapshot, SnapshotNode, SnapshotSegment, StageRun

STATUS = Status(True, ("x",), (NodeStatus(1, 0, 4, name="<b>v1</b>"),), 1, 3, 9.5, 1, 2, "m", 99)
NODE = SnapshotNode(7, 6, "</script>\n", "sent", 0.33333333, "expansion", True)
SCENE = Snapshot(
    "answering", 4, "adaptive", 5, 2.5, 6, (NODE,), (SnapshotSegment(9, 8, 3),),
    (StageRun(2, 4, 9, 0.125, 0.25, 8, 3),),
)  # fmt: skip


class Played:
    """A client of the coordinator as a test wants it."""

    def __init__(self) -> None:
        self.problem: PeerLost | None = None
        self.asked = 0
        self.watches: list[float] = []
        self.chosen: list[tuple[int, ...]] = []
        self.see: Callable[[Snapshot], None] = lambda scene: None

    async def status(self, age: float = 0.0) -> Status:
        self.asked += 1
        if self.problem is not None:
            raise self.problem
        return STATUS

    def subscribe(
        self,
        seconds: float,
        on_snapshot: Callable[[Snapshot], None],
        requests: tuple[int, ...] = (),
    ) -> None:
        if self.problem is not None:
            raise self.problem
        self.watches.append(seconds)
        self.chosen.append(requests)
        self.see = on_snapshot


@pytest.fixture
def played() -> Played:
    """One that can be asked."""
    return Played()


def asking_for(request: str) -> Any:
    """The page's request for its stream."""
    return SimpleNamespace(query_params={"request": request})


@asynccontextmanager
async def viewing(theatre: Theatre, request: str = "0") -> AsyncIterator[Callable[[], Any]]:
    """An open page, of which that request was chosen: what gives its next events."""
    response = await theatre.events(asking_for(request))
    body = response.body_iterator  # type: ignore[attr-defined]

    async def read() -> list[tuple[str, Any]]:
        text = (await asyncio.wait_for(body.__anext__(), 60.0)).decode()
        found = []
        for block in text.strip("\n").split("\n\n"):
            name, data = block.split("\n")
            found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return found

    try:
        yield read
    finally:
        await body.aclose()


def test_status_then_scenes_as_they_come(played: Played) -> None:
    async def play() -> None:
        async with viewing(Theatre(played)) as read:
            ((name, status),) = await read()
            assert (name, status["ready"], status["reachable"]) == ("status", True, True)
            assert status["nodes"][0]["name"] == "<b>v1</b>"
            await asyncio.sleep(0)
            played.see(SCENE)
            ((name, scene),) = await read()
            assert name == "scene"
            assert scene["nodes"] == [[7, 6, "</script>\n", "sent", 0.3333, "expansion", True]]
            assert scene["segments"] == [[9, 8, 3]]
            assert scene["runs"] == [[2, 4, 9, 0.125, 0.25, 8, 3]]
            assert (scene["state"], scene["tokens"], scene["root"]) == ("answering", 5, 6)

    asyncio.run(play())


def test_each_page_is_shown_the_oldest_request_and_the_one_that_it_has_chosen(
    played: Played,
) -> None:
    async def look() -> None:
        theatre = Theatre(played)
        async with viewing(theatre) as plain, viewing(theatre, "7") as choosing:
            await plain()
            await choosing()
            assert played.chosen == [(7,)], "one subscription for both"
            for number, place in ((4, 0), (7, 1), (9, 2)):
                played.see(replace(SCENE, request=number, place=place))
            shown = [[s["request"] for _, s in await page()] for page in (plain, choosing)]
            assert shown == [[4], [4, 7]]
            async with viewing(theatre, "9"):
                while played.chosen[-1] != (7, 9):
                    await choosing()

    asyncio.run(look())


@pytest.mark.parametrize("number", ["-1", "x", "1e3", "9" * 40, ""])
def test_what_is_no_number_of_a_request_is_refused(played: Played, number: str) -> None:
    with pytest.raises(ApiProblem, match="no number of a request"):
        asyncio.run(Theatre(played).events(asking_for(number)))


def test_nobody_looks_nobody_watches(played: Played) -> None:
    """Many viewers share one watch, which ends with the last of them."""

    async def play() -> None:
        theatre = Theatre(played)
        assert played.asked == 0
        async with viewing(theatre) as first, viewing(theatre) as second:
            await asyncio.gather(first(), second())
            await asyncio.sleep(0)
            assert played.asked == 1
            assert [seconds > 0 for seconds in played.watches] == [True]
        await asyncio.sleep(0.01)
        assert played.watches[1:] == [0.0]
        asked = played.asked
        await asyncio.sleep(0.1)
        assert played.asked == asked
        async with viewing(theatre) as again:
            assert (await again())[0][0] == "status"

    asyncio.run(play())


def test_a_coordinator_that_is_gone_is_said_and_watched_again(
    played: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.serving.events.STATUS_S", 0.05)

    async def play() -> None:
        played.problem = PeerLost("the coordinator at d0:7464 has been silent")
        async with viewing(Theatre(played)) as read:
            ((_, status),) = await read()
            assert status == {"reachable": False, "text": str(played.problem)}
            assert not played.watches
            played.problem = None
            while not (await read())[-1][1]["reachable"]:
                continue
            await asyncio.sleep(0)
            assert len(played.watches) == 1

    asyncio.run(play())


def test_a_slow_viewer_loses_old_events_not_memory() -> None:
    async def play() -> None:
        viewer = Viewer()
        for number in range(1000):
            viewer.put(b"%d," % number)
        assert await viewer.take() == b"".join(b"%d," % n for n in range(1000 - MOST_UNREAD, 1000))

    asyncio.run(play())


def test_one_viewer_too_many_is_refused(played: Played) -> None:
    async def play() -> None:
        theatre = Theatre(played)
        theatre._viewers = {Viewer() for _ in range(MOST_VIEWERS)}
        with pytest.raises(ApiProblem) as refused:
            await theatre.events(asking_for("0"))
        assert refused.value.status == 503

    asyncio.run(play())


# --- files ----------------------------------------------------------------------------------------


def fetched(path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    """One GET of the application."""

    handlers = {ApiProblem: lambda _, problem: problem.response()}

    async def get() -> httpx.Response:
        app = Starlette(routes=routes(Played()), exception_handlers=handlers)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/static/app.js", "text/javascript; charset=utf-8"),
        ("/static/style.css", "text/css; charset=utf-8"),
        ("/static/icon.svg", "image/svg+xml; charset=utf-8"),
    ],
)
def test_files_come_with_their_type_and_a_strict_policy(path: str, kind: str) -> None:
    answer = fetched(path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, kind)
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "unsafe" not in answer.headers["content-security-policy"]
    again = fetched(path, {"if-none-match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["/static/nothing.js", "/static/..%2Fevents.py", "/static/%2Fetc%2Fpasswd", "/static/"]
)
def test_there_is_no_other_file(path: str) -> None:
    assert fetched(path).status_code == 404


def test_the_page_names_no_other_host_and_has_no_script_or_style_in_it() -> None:
    page = fetched("/").text
    assert "http:" not in page
    assert "https:" not in page
    assert " style=" not in page
    assert "<style" not in page
    assert page.count("<script") == 1
    for name in ("app", "chat", "ring", "settings", "stream", "timeline", "tree"):
        script = fetched(f"/static/{name}.js").text
        assert "https://" not in script
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in script, f"{name}.js puts text in as HTML"


def test_viewers_are_counted_when_they_are_admitted(played: Played) -> None:
    """Not when their streams begin, which is later."""

    async def play() -> None:
        theatre = Theatre(played)
        streams = [await theatre.events(asking_for("0")) for _ in range(MOST_VIEWERS)]
        with pytest.raises(ApiProblem, match=str(MOST_VIEWERS)):
            await theatre.events(asking_for("0"))

        async def gone() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise OSError("the connection broke before the first event")

        for stream in streams:  # each gives its place back, also if it never began
            with contextlib.suppress(BaseException):
                await stream({"type": "http", "asgi": {"spec_version": "2.4"}}, gone, send)
        assert not theatre._viewers
        assert theatre._work is None

    asyncio.run(play())
