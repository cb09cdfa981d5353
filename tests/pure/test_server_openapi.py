"""The OpenAPI document, tried out: whatever fits it or nearly does gets an answer of the documented form."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from edgellm.server.openapi import GETS, POSTS, document
from tests.support.openapi_cases import OPERATIONS, try_operation
from tests.support.served import Running, http, scripted_model, serving

EXAMPLES = int(os.environ.get("EDGELLM_TEST_OPENAPI_EXAMPLES", "6"))
"""Of each operation, well and badly formed; acceptance/server_openapi.py sends more, to a model."""


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


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_request_is_a_server_error(running: Running, operation: str) -> None:
    """No 5xx, and errors of the documented form."""
    assert try_operation(running.address, operation, EXAMPLES)
