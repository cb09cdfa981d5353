"""The OpenAPI document, tried out: whatever fits it or nearly does gets an answer of the documented form."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from edgellm.server.openapi import GETS, POSTS, document
from tests.support.served import Running, http, scripted_model, serving

EXAMPLES = int(os.environ.get("EDGELLM_TEST_OPENAPI_EXAMPLES", "6"))
"""Of each operation, well and badly formed; a long run by hand sets more."""


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    # Answers end quickly whatever is asked for, and a timeout keeps the longest short.
    with serving(lambda: scripted_model(context=512), queue=1000, request_timeout_s=2.0) as found:
        yield found


def test_the_document_names_every_route(running: Running) -> None:
    with http(running.address) as client:
        assert client.get("/openapi.json").json() == document("scripted")
        for path in POSTS:
            assert client.get(path.replace("{answer_id}", "x")).status_code == 405
        for path in GETS:
            assert client.post(path.replace("{model}", "x"), json={}).status_code == 405


@pytest.mark.parametrize("operation", [f"POST {path}" for path in POSTS] + [f"GET {path}" for path in GETS])
def test_no_request_is_a_server_error(running: Running, operation: str) -> None:
    """No 5xx (501 of a model without hidden states excepted), and errors of the documented form."""
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    method, path = operation.split(" ")
    schema = schemathesis.openapi.from_dict(document("scripted"))
    schema.config.update(base_url=running.address)
    checks = [content_type_conformance, response_schema_conformance, not_a_server_error]
    seen: list[int] = []
    # A path without parameters has nothing that could be wrong.
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 2 if method == "POST" else 1]
    for mode in modes:

        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES if method == "POST" else 2,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def tried(case: Any) -> None:
            response = case.call()
            seen.append(response.status_code)
            if response.status_code == 501 and path == "/v1/embeddings":
                return
            case.validate_response(response, checks=checks)
            assert response.status_code != 422

        tried()
    assert seen
