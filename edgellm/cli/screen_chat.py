"""Composes the chat screen: history, models, settings, and an engine in a process of its own."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgellm_models.errors import Notice

if TYPE_CHECKING:
    from edgellm.cli.chat_session import ChatSession
    from edgellm.cli.opening import Opening
    from edgellm.cli.runtime import OnNotice
    from edgellm.contracts import ChatBackend, SamplingParams
    from edgellm_tui.app import WayOut
    from edgellm_tui.settings import ChatSettings

INT8_SHARE = 0.6
"""Bytes of an int8 cache, scales included, as a share of those of a 16-bit one, rounded up."""

ATTACH_S = 20.0
"""How long a server that is ready may take to answer the first time."""


def run_screen(opening: Opening, session: ChatSession, system: str) -> int:
    """The Textual screen; the model is opened behind it. Returns the exit code."""
    import gc

    from edgellm.cli.model_library import LocalLibrary
    from edgellm.locations import Locations
    from edgellm_tui.app import EdgeChat
    from edgellm_tui.keymap import read_keymap
    from edgellm_tui.settings import ChatSettings
    from edgellm_tui.themes import load_theme

    locations = Locations.from_environment()
    theme_file = locations.state / "theme"
    looks = ChatSettings(
        theme=load_theme(theme_file),
        theme_file=theme_file,
        keymap=read_keymap(locations.config / "keys.toml"),
    )
    session.shows_notices = False  # the screen does
    store = session.open_store()
    continued = session.continued.id if session.continued is not None and store is not None else None
    app = EdgeChat(
        opener=_opener(opening, system),
        opener_for=lambda name: _opener(_other(opening, name), system),
        ways_out=lambda: _ways_out(opening, system),
        model_name=opening.model.name if opening.model is not None else opening.resolved.model,
        notices=tuple(n for n in session.notices if store is None or n not in store.notices),
        library=LocalLibrary(ctx=opening.resolved.ctx),
        store=store,
        chat_id=continued,
        settings=looks,
    )
    # A screen makes many small objects, and each full collection looks at all that the libraries hold too: a
    # visible pause. What lives now lives until the end.
    gc.freeze()
    gc.set_threshold(5_000, 10, 100)
    app.run()
    code = app.return_code or 0
    if app.opening:
        # The model is still being opened in a thread that cannot be interrupted; nothing of it is worth
        # waiting for, and the engine's process ends with this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _other(opening: Opening, name: str) -> Opening:
    """The same settings for another model; NotFoundError when there is none of that name."""
    from edgellm.cli.options import models_folder
    from edgellm_models.catalog import resolve_model
    from edgellm_models.errors import NotFoundError

    found = resolve_model(name, models_folder())
    if found.path is None:
        raise NotFoundError(f"{name} is not here yet: Ctrl+O fetches it")
    resolved = replace(opening.resolved, model=name)
    return replace(opening, resolved=resolved, model=found, path=found.path, url=None, unnamed=False)


Opened = Coroutine[Any, Any, tuple["ChatBackend", "ChatSettings"]]


def _opener(opening: Opening, system: str) -> Callable[[OnNotice], Opened]:
    """Called in a thread: brings the server up. What it returns is awaited where the screen runs."""

    def opener(on_notice: OnNotice) -> Opened:
        if opening.url is not None:
            return _connect(opening, system, opening.url, opening.api_key(on_notice), opening.named_model)
        from edgellm.cli.chat_partner import running_server

        running = running_server(opening, on_notice)
        if running is not None:
            return _connect(opening, system, running.address, running.api_key, running.model)
        return own_engine(opening, system, on_notice)

    return opener


async def _connect(opening: Opening, system: str, address: str, key: str | None, model: str | None) -> Any:
    from edgellm.client.http_client import HttpClient

    client = await HttpClient.connect(address, api_key=key, model=model)
    sampling = (
        opening.sampling_of(client.info().name)
        if opening.url is not None
        else opening.sampling_without_loading()
    )
    return client, chat_settings(opening, system, sampling)


def own_engine(opening: Opening, system: str, on_notice: OnNotice) -> Opened:
    """Starts the engine's process and waits until its model is loaded."""
    from edgellm.cli.engine_process import EngineProcess, OwnedEngine
    from edgellm.cli.runtime import default_model_notice
    from edgellm.client.http_client import HttpClient
    from edgellm.locations import Locations

    assert opening.model is not None
    if opening.unnamed:
        on_notice(default_model_notice(opening.model.name))
    _check_template(opening)
    _tell_estimate(opening, on_notice)
    folder = Locations.from_environment().ensure_runtime()
    socket = folder / f"chat-{os.getpid()}-{uuid.uuid4().hex[:6]}" / "socket"
    process = EngineProcess(serve_arguments(opening), socket, on_notice)
    try:
        process.wait_ready()
        sampling = opening.sampling_without_loading()
    except BaseException:
        process.stop()
        raise

    async def connect() -> tuple[ChatBackend, ChatSettings]:
        try:
            client = await HttpClient.connect(f"unix:{socket}", ready_within_s=ATTACH_S)
        except BaseException:
            process.stop()
            raise
        return OwnedEngine(client, process), chat_settings(opening, system, sampling)

    return connect()


def _check_template(opening: Opening) -> None:
    """BadInputError for a base model, before it is loaded: a server says it at the first question only."""
    from edgellm_models.checkpoint.headers import read_header
    from edgellm_models.errors import BadInputError
    from edgellm_models.tokenizer import load_chat_templates

    assert opening.model is not None and opening.path is not None
    header = read_header(opening.path)
    if load_chat_templates(opening.path, header.file_format, header.metadata) is None:
        raise BadInputError(
            f"{opening.model.name} is a base model: it has no chat template, so it cannot chat; use `edgellm"
            f" complete` or another model"
        )


def _tell_estimate(opening: Opening, on_notice: OnNotice) -> None:
    """What the model will need, before it is loaded."""
    from edgellm.cli.model_library import LocalLibrary
    from edgellm_models.errors import EdgeLLMError
    from edgellm_tui.screens.models import plan_lines, ways_out

    try:
        plan = LocalLibrary(ctx=opening.resolved.ctx).plan(opening.model_argument)
    except EdgeLLMError:
        return  # the engine says it better
    if plan.available_bytes:
        on_notice(Notice("memory_estimate", plan_lines(plan)[0]))
        if not plan.fits:
            on_notice(Notice("memory_short", f"that does not fit: {ways_out(plan)}"))


def _ways_out(opening: Opening, system: str) -> list[WayOut]:
    """With which settings a model fits that does not with those that were asked for."""
    from edgellm.cli.model_library import LocalLibrary
    from edgellm.config import FLAG
    from edgellm_tui.app import WayOut

    if opening.url is not None:
        return []
    plan = LocalLibrary(ctx=opening.resolved.ctx).plan(opening.model_argument)
    room = plan.available_bytes - plan.weight_bytes - plan.workspace_bytes
    ways = []

    def way(label: str, **settings: object) -> None:
        origins = dict(opening.resolved.origins) | dict.fromkeys(settings, FLAG)
        resolved = replace(opening.resolved, origins=origins, **settings)  # type: ignore[arg-type]
        ways.append(WayOut(label, _opener(replace(opening, resolved=resolved), system)))

    # Half of what there is: other programs need memory too.
    context = room // 2 // plan.kv_bytes_per_token // 256 * 256 if plan.kv_bytes_per_token > 0 else 0
    if 256 <= context < plan.context:
        way(f"take a context of {context:,} tokens instead of {plan.context:,}", ctx=context)
    if opening.resolved.kv_dtype in ("auto", "f32", "f16") and plan.kv_bytes * INT8_SHARE < room:
        way(f"keep the context of {plan.context:,} tokens, in 8 bits", kv_dtype="int8", ctx=plan.context)
    return ways


def serve_arguments(opening: Opening) -> list[str]:
    """The engine settings that flags gave; those of files and variables the process reads itself."""
    from edgellm.cli.chat_partner import OF_THE_ENGINE
    from edgellm.config import FLAG

    arguments = ["-m", opening.model_argument, "--kv-policy", opening.kv_policy]
    for name in OF_THE_ENGINE:
        value = getattr(opening.resolved, name)
        if name != "kv_policy" and opening.resolved.origins.get(name) == FLAG and value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


def _can_think(opening: Opening) -> bool | None:
    """The model's chat template asks whether to think; None where its files are not here."""
    from edgellm_models.checkpoint.headers import read_header
    from edgellm_models.errors import EdgeLLMError
    from edgellm_models.tokenizer import load_chat_templates

    if opening.path is None or opening.url is not None:
        return None
    try:
        header = read_header(opening.path)
        templates = load_chat_templates(opening.path, header.file_format, header.metadata)
    except EdgeLLMError:
        return None
    return templates is not None and "enable_thinking" in templates.templates.get("default", "")


def chat_settings(opening: Opening, system: str, sampling: SamplingParams) -> ChatSettings:
    from edgellm.locations import Locations
    from edgellm_tui.settings import ChatSettings

    said = opening.resolved.sampling
    names = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    origins = {name: "you" if name in said else "model" for name in names | set(said)}
    return ChatSettings(
        sampling=sampling,
        system_prompt=system,
        constraint=opening.constraint,
        can_think=_can_think(opening),
        sampling_origins=origins,
        chat_extra={"model_argument": opening.model_argument} if opening.model_argument else {},
        prompts_file=Locations.from_environment().state / "prompts.jsonl",
    )
