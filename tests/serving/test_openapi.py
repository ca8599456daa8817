"""The OpenAPI document: whatever it allows is answered without a server error, and as it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.nodes import NodeRing
from support.tiers import examples, thorough

from edgespec.serving.openapi import openapi
from edgespec.serving.request_bodies import ChatRequest, TextRequest
from edgespec.sim.toy import VOCABULARY


@pytest.fixture(scope="module")
def toy_ring() -> Iterator[NodeRing]:
    """One whose answers end by themselves after some tokens: most requests give no limit."""
    with NodeRing(2, eos_ids=range(0, VOCABULARY, 8)) as ring:
        ring.await_up()
        yield ring


OPERATIONS = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
    ("GET", "/api/tags"),
    ("GET", "/api/ps"),
    ("GET", "/api/version"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/apply-template"),
    ("POST", "/api/show"),
    ("POST", "/api/generate"),
    ("POST", "/api/chat"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
)


OF_QUESTIONS = 7


RARE = (
    *("/v1/messages/count_tokens", "/api/generate", "/api/show", "/api/ps", "/api/version"),
    *("/tokenize", "/apply-template"),
)
"""Asked in `make test-all` alone; so are bad bodies that are read as a chat's in the end."""


def case(method: str, path: str, mode: GenerationMode) -> Any:
    """One to ask, and its tier."""
    is_bad = mode is GenerationMode.NEGATIVE
    is_rare = path in RARE or (is_bad and path in ("/v1/messages", "/api/chat"))
    return thorough(method, path, mode) if is_rare else (method, path, mode)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        *(case(*of, GenerationMode.POSITIVE) for of in OPERATIONS),
        *(case(*of, GenerationMode.NEGATIVE) for of in OPERATIONS[-OF_QUESTIONS:]),
    ],
)
def test_no_request_makes_a_server_error(
    url: str, method: str, path: str, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_dict(openapi())
    schema.config.update(base_url=url)
    operation = schema[path][method]

    @examples(25 if method == "POST" else 4, suppress_health_check=list(HealthCheck), database=None)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        reply = case.call(timeout=120)
        assert reply.status_code < 500, reply.text
        case.validate_response(
            reply,
            checks=[
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    ask()


def test_the_document_describes_every_parameter_that_is_read() -> None:
    schemas = openapi()["components"]["schemas"]
    for request in (ChatRequest, TextRequest):
        properties = schemas[request.__name__]["properties"]
        assert set(request.__struct_fields__) == set(properties)
        assert all(one["description"] for one in properties.values())
    assert {path for _, path in OPERATIONS} == set(openapi()["paths"])
