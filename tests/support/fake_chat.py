"""The real ``edgellm`` command with a scripted model: ``python -m tests.support.fake_chat chat ...``.

FAKE_SCRIPTS is a JSON list of answers, each with fields of Script; FAKE_MODEL_NAME names the model. No torch.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from edgellm.contracts import FinishReason
from edgellm_models.errors import BadInputError, Notice
from tests.support.fake_backend import FakeBackend, Script


def scripts() -> list[Script]:
    """The answers that the environment asks for."""
    found = []
    for fields in json.loads(os.environ.get("FAKE_SCRIPTS", "[{}]")):
        if "notices" in fields:
            fields["notices"] = [Notice(*pair) for pair in fields["notices"]]
        if "reason" in fields:
            fields["reason"] = FinishReason(fields["reason"])
        # A long answer, which would be too long for an environment variable.
        fields["pieces"] = fields.get("pieces", Script().pieces) * fields.pop("repeat", 1)
        found.append(Script(**fields))
    return found


class FakeRuntime:
    """What ``load_runtime`` returns, as far as ``edgellm chat`` uses it."""

    def __init__(self) -> None:
        self.sampling_defaults = json.loads(os.environ.get("FAKE_DEFAULTS", "{}"))
        self.times = SimpleNamespace(import_s=0.0, load_s=0.0)
        self.closed = False

    def client(self, *, plain_fallback: bool = False, kv_policy: str = "stop") -> FakeBackend:
        if os.environ.get("FAKE_BASE_MODEL"):
            raise BadInputError("it has no chat template; use `edgellm complete`")
        backend = RecordingBackend(*scripts())
        return backend

    def close(self) -> None:
        self.closed = True


class RecordingBackend(FakeBackend):
    """Writes what it was asked to FAKE_RECORD, one JSON object per request."""

    def stream_chat(
        self,
        conversation_id: str,
        messages: Any,
        sampling: Any,
        tools: Any = (),
        constraint: Any = None,
        template_variables: Any = None,
    ) -> Any:
        path = os.environ.get("FAKE_RECORD")
        if path:
            asked = {
                "messages": [[m.role, m.content] for m in messages],
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p,
                "seed": sampling.seed,
                "stop": list(sampling.stop),
                "max_new_tokens": sampling.max_new_tokens,
                "constraint": None if constraint is None else [constraint.kind.value, constraint.text],
            }
            with open(path, "a", encoding="utf-8") as file:
                file.write(json.dumps(asked) + "\n")
        return super().stream_chat(conversation_id, messages, sampling, tools, constraint, template_variables)


def main() -> None:
    import edgellm.cli.model_access as model_access
    import edgellm.cli.runtime as runtime
    import edgellm.cli.screen_chat as screen_chat
    from edgellm.cli.main import main as edgellm_main
    from edgellm_models.catalog import resolve_model

    def fake_load(resolved: Any, path: Path, name: str, on_notice: Any = None) -> FakeRuntime:
        time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
        if on_notice is not None:
            on_notice(Notice("context", "the context is 8192 tokens"))
        return FakeRuntime()

    def fake_local_model(argument: str, output: Any) -> Any:
        found = resolve_model(argument, Path("/nonexistent"))
        return found, found.path or Path("/nonexistent/model.gguf")

    def fake_engine(opening: Any, system: str, on_notice: Any) -> Any:
        """In the place of the engine's process, which would not know the script."""
        loaded, sampling = opening.load(on_notice)
        backend = loaded.client(kv_policy=opening.kv_policy)

        async def connect() -> Any:
            return backend, screen_chat.chat_settings(opening, system, sampling)

        return connect()

    screen_chat.own_engine = fake_engine
    runtime.load_runtime = fake_load  # type: ignore[assignment]
    model_access.local_model = fake_local_model
    edgellm_main()


if __name__ == "__main__":
    main()
