"""Who answers a plain chat: a model that is loaded here, a server of it that runs already, or any server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgellm_models.errors import EdgeLLMError, Notice

if TYPE_CHECKING:
    from edgellm.cli.opening import Opening
    from edgellm.cli.runtime import OnNotice, Runtime
    from edgellm.client.http_client import HttpClient
    from edgellm.contracts import ChatBackend, SamplingParams

CONNECT_S = 5.0
"""How long a server that is known from its file may take before the model is loaded here instead."""
OF_THE_ENGINE = (
    "device", "threads", "ctx", "kernels", "activations", "kv_dtype", "kv_policy", "kv_window", "kv_budget",
    "spec", "draft", "spec_rule", "gpu_layers",
)  # fmt: skip
"""Settings of which a running server has made its own choice: a flag for one of them gets its own engine."""


class Partner(Protocol):
    """``connect`` is called in the event loop that talks; ``close`` after it."""

    @property
    def load_times(self) -> Mapping[str, float]: ...

    async def connect(self) -> tuple[ChatBackend, SamplingParams]: ...

    async def disconnect(self, backend: ChatBackend) -> None: ...

    def close(self) -> None: ...


@dataclass
class LocalPartner:
    """The engine of this process, loaded before there is an event loop: Ctrl-C ends that at once."""

    runtime: Runtime
    sampling: SamplingParams
    kv_policy: str

    @property
    def load_times(self) -> Mapping[str, float]:
        return {"import_s": self.runtime.times.import_s, "load_s": self.runtime.times.load_s}

    async def connect(self) -> tuple[ChatBackend, SamplingParams]:
        return self.runtime.client(kv_policy=self.kv_policy), self.sampling

    async def disconnect(self, backend: ChatBackend) -> None:
        pass  # close stops the engine

    def close(self) -> None:
        self.runtime.close()


@dataclass
class ServerPartner:
    """A server, ours or another."""

    address: str
    model: str | None
    opening: Opening
    api_key: str | None = None
    sampling: SamplingParams | None = None
    """None follows from the model's name, which the server says."""
    load_times: Mapping[str, float] = field(default_factory=dict)

    async def connect(self) -> tuple[ChatBackend, SamplingParams]:
        client = await self.open()
        return client, self.sampling or self.opening.sampling_of(client.info().name)

    async def open(self) -> HttpClient:
        from edgellm.client.http_client import HttpClient

        return await HttpClient.connect(self.address, api_key=self.api_key, model=self.model)

    async def disconnect(self, backend: ChatBackend) -> None:
        await backend.close()

    def close(self) -> None:
        pass


def partner_of(opening: Opening, on_notice: OnNotice) -> Partner:
    """The server of ``--url``; else one of ours that has this very file open; else the model, loaded here."""
    if opening.url is not None:
        return ServerPartner(opening.url, opening.named_model, opening, opening.api_key(on_notice))
    attached = running_server(opening, on_notice)
    if attached is not None:
        return attached
    runtime, sampling = opening.load(on_notice)
    return LocalPartner(runtime, sampling, opening.kv_policy)


def running_server(opening: Opening, on_notice: OnNotice) -> ServerPartner | None:
    """A server of this user that has this very file open, unless a flag asks for an engine of its own."""
    from edgellm.config import FLAG
    from edgellm.locations import Locations
    from edgellm.server.server_files import read_records

    if any(opening.resolved.origins.get(name) == FLAG for name in OF_THE_ENGINE):
        return None
    assert opening.path is not None
    for record in reversed(read_records(Locations.from_environment())):
        if not _same_file(record.path, opening.path):
            continue
        try:
            key = _first_key(Path(record.api_key_file)) if record.api_key_file else None
            partner = ServerPartner(record.address, record.model, opening, key)
            asyncio.run(_probe(partner))
            partner.sampling = opening.sampling_without_loading()
        except (EdgeLLMError, TimeoutError) as error:
            why = str(error) or f"no answer within {CONNECT_S:.0f} s"
            detail = f"the server of this model at {record.address} is not used: {why}; it is loaded here"
            on_notice(Notice("not_attached", detail))
            continue
        detail = (
            f"the server at {record.address} (process {record.pid}) answers: it has {record.model} loaded"
        )
        on_notice(Notice("attached", detail))
        return partner
    return None


async def _probe(partner: ServerPartner) -> None:
    async with asyncio.timeout(CONNECT_S):
        await (await partner.open()).close()


def _same_file(theirs: str, ours: Path) -> bool:
    try:
        return bool(theirs) and os.path.samefile(theirs, ours)
    except OSError:
        return False


def _first_key(path: Path) -> str:
    from edgellm.server.settings import read_api_keys

    return read_api_keys(path)[0][0]
