"""An API over a ring of fake stages, which all tests of a file share."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from support.apis import api
from support.nodes import NodeRing

from edgespec.runtime.access_policy import CLIENT


@pytest.fixture(scope="module", autouse=True)
def _no_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every server here speaks plain HTTP: a client would read the system's certificates for
    longer than most requests take."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SSL_CERT_FILE", raising=False)
        patch.setenv("SSL_CERT_DIR", str(tmp_path_factory.mktemp("certificates")))
        yield


@pytest.fixture(scope="module")
def toy_ring() -> Iterator[NodeRing]:
    """A ring of two fake stages, which is up."""
    with NodeRing(2) as ring:
        ring.await_up()
        yield ring


@pytest.fixture(scope="module")
def url(toy_ring: NodeRing) -> Iterator[str]:
    """The API of that ring."""
    identity = toy_ring.keys.add("the API", CLIENT)
    with api(toy_ring.address, identity, timing=toy_ring.timing) as base:
        yield base


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    """A plain HTTP client of it."""
    with httpx.Client(base_url=url, timeout=120.0) as client:
        yield client
