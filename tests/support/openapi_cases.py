"""Requests that schemathesis makes of our OpenAPI document, well and badly formed, sent to a server."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, given, settings

from edgellm.server.openapi import GETS, POSTS, document

OPERATIONS = [f"POST {path}" for path in POSTS] + [f"GET {path}" for path in GETS]


def try_operation(address: str, operation: str, examples: int) -> list[tuple[int, float]]:
    """Sends ``examples`` requests of each form; status and seconds of every answer.

    Raises what schemathesis finds: a 5xx, or an answer of another form than the document's.
    """
    import schemathesis
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

    method, path = operation.split(" ")
    schema = schemathesis.openapi.from_dict(document("scripted"))
    schema.config.update(base_url=address)
    checks = [content_type_conformance, response_schema_conformance, not_a_server_error]
    seen: list[tuple[int, float]] = []
    # A path without parameters has nothing that could be wrong.
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)[: 2 if method == "POST" else 1]
    for mode in modes:

        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        @settings(
            max_examples=examples if method == "POST" else min(examples, 2),
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def tried(case: Any) -> None:
            response = case.call()
            seen.append((response.status_code, response.elapsed))
            case.validate_response(response, checks=checks)
            assert response.status_code != 422

        tried()
    return seen
