"""Who asks: what one API key, or one machine, has asked is of no use to others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest
from msgspec.structs import replace
from support.apis import api
from support.nodes import PATIENCE_S, NodeRing
from support.rings import submit

from edgespec.net.keys import Identity
from edgespec.runtime.access_policy import CLIENT
from edgespec.runtime.async_client import AsyncClient
from edgespec.wire.client_messages import Finished, Submit

PROMPT = "a question of some length, which nobody else is to find out"
KEYS = {"anna", "bert"}


@pytest.fixture
def ring() -> Iterator[NodeRing]:
    """A ring that keeps what it has answered."""
    with NodeRing(1, kept_rows=2000) as ring:
        ring.await_up()
        yield ring


def cached(url: str, key: str = "") -> int:
    """How much of PROMPT was kept for that asker."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_what_one_api_key_asked_does_not_show_to_another(ring: NodeRing) -> None:
    who = ring.keys.add("the API", CLIENT)
    with api(ring.address, who, accepts=KEYS.__contains__, timing=ring.timing) as url:
        assert cached(url, "anna") == 0
        assert cached(url, "bert") == 0
        assert cached(url, "anna") > 0
        assert cached(url, "bert") > 0


def test_without_keys_all_users_of_this_machine_are_one(ring: NodeRing) -> None:
    who = ring.keys.add("the API", CLIENT)
    with api(ring.address, who, timing=ring.timing) as url:
        assert cached(url) == 0
        assert cached(url) > 0


def test_no_client_gets_what_another_one_asked_by_its_scope(ring: NodeRing) -> None:
    ask = replace(submit(prompt=PROMPT, max_new_tokens=3), scope="anna")
    mine, other = (ring.keys.add(name, CLIENT) for name in ("mine", "other"))
    assert [asked(ring, who, ask) for who in (mine, other)] == [0, 0]
    assert all(asked(ring, who, ask) for who in (mine, other))


def asked(ring: NodeRing, who: Identity, ask: Submit) -> int:
    """How much of the prompt was kept, for a client of its own."""

    async def work() -> Finished:
        async with AsyncClient(ring.address, who, 10.0, ring.timing) as client:
            messages = [message async for message in client.ask(ask)]
        assert isinstance(messages[-1], Finished)
        return messages[-1]

    return asyncio.run(work()).cached_tokens
