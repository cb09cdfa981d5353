"""OpenAI's own client against the server: one list, over both kinds of address and a model of real weights.

acceptance/openai_clients.py runs the same list with two major versions of the client and longer answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.openai_cases import CASES, Target
from tests.support.real_models import real_model
from tests.support.served import MODEL, TEMPLATE, loaded_model, serving
from tests.support.tiny_models import make_tiny

CONTEXT = 1024
REAL_TOKENS = 6


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("t") / "m", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def tiny_on_tcp(tiny: Path) -> Iterator[Target]:
    with serving(lambda: loaded_model(tiny, ctx=CONTEXT)) as found:
        yield Target(found.address, MODEL, context=CONTEXT)


@pytest.fixture(scope="module")
def tiny_on_a_socket(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    uds = tmp_path_factory.mktemp("s") / "own" / "s"
    with serving(lambda: loaded_model(tiny, ctx=CONTEXT), uds=uds) as found:
        yield Target(found.address, MODEL, context=CONTEXT)


@pytest.fixture(scope="module")
def real_on_a_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    uds = tmp_path_factory.mktemp("s") / "own" / "s"
    with serving(lambda: loaded_model(real_model("smollm2-135m"), ctx=CONTEXT), uds=uds) as found:
        yield Target(found.address, MODEL, tokens=REAL_TOKENS, context=CONTEXT)


@pytest.mark.parametrize("where", ["tiny_on_tcp", "tiny_on_a_socket", "real_on_a_socket"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_openai_client(
    case: Callable[[Target], None], where: str, request: pytest.FixtureRequest
) -> None:
    case(request.getfixturevalue(where))
