"""``edgellm serve``: the OpenAI-compatible server on a port or a unix socket."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import EdgeCommand
from edgellm.cli.options import engine_options, json_option, model_argument, option

if TYPE_CHECKING:
    from edgellm.cli.output import Output
    from edgellm.config import ResolvedConfig
    from edgellm.server.model_host import ServedModel
    from edgellm_models.catalog import ResolvedModel


@click.command(
    "serve",
    cls=EdgeCommand,
    examples=(
        "edgellm serve",
        "edgellm serve gemma3-270m --port 9000",
        "edgellm serve --uds ~/.edgellm-server/socket",
        "edgellm serve --host 0.0.0.0 --api-key-file keys.txt",
    ),
)
@model_argument()
@option("--host", default="127.0.0.1", show_default=True, metavar="HOST", help="Where to listen.")
@option("--port", type=int, default=8080, show_default=True, metavar="N", help="0 takes a free port.")
@option("--uds", metavar="PATH", help="Listen on a unix socket (0600, in a 0700 folder) instead.")
@option("--api-key-file", metavar="FILE", help="Keys of which clients must send one, a line each.")
@option("--cors-origin", multiple=True, metavar="ORIGIN", help="Let pages of this origin in (or *).")
@option("--allowed-host", multiple=True, metavar="NAME", help="A further name of this server.")
@option("--insecure", is_flag=True, help="Listen to other machines without a key.")
@option("--max-batch", type=click.IntRange(1, 1024), metavar="N", help="Answers that run at once.")
@option("--queue", type=int, default=64, show_default=True, metavar="N", help="Answers that may wait.")
@option("--request-timeout", type=float, metavar="S", help="Seconds after which an answer is cut.")
@option("--grace", type=float, default=10.0, show_default=True, metavar="S", help="For answers on SIGTERM.")
@option("--idle-unload", type=float, metavar="S", help="Free the model after S seconds without a request.")
@option("--strict", is_flag=True, help="Refuse requests with fields that are not known.")
@option("--parent-pid", type=int, metavar="PID", help="End when this process does.")
@option("--access-log", is_flag=True, help="A line of JSON on standard error for every request.")
@engine_options
@json_option
def command(
    model_name: str | None,
    host: str,
    port: int,
    uds: str | None,
    api_key_file: str | None,
    cors_origin: tuple[str, ...],
    allowed_host: tuple[str, ...],
    insecure: bool,
    max_batch: int | None,
    queue: int,
    request_timeout: float | None,
    grace: float,
    idle_unload: float | None,
    strict: bool,
    parent_pid: int | None,
    access_log: bool,
    as_json: bool,
    **settings: Any,
) -> int:
    """Serve a model to any program that speaks OpenAI's API.

    Binds this machine's own address unless told otherwise. The address is taken before the model is loaded;
    until it is, /health says 503. One line says when it is ready; with --json it is an object with the
    address. SIGTERM lets open answers end for --grace seconds.
    """
    from edgellm.cli.options import models_folder, resolve_settings
    from edgellm.cli.output import current_output
    from edgellm.log import log_notice
    from edgellm_models.catalog import resolve_model

    ctx = click.get_current_context()
    output = current_output()
    if uds and ctx.get_parameter_source("port") is click.core.ParameterSource.COMMANDLINE:
        from edgellm_models.errors import UsageError

        raise UsageError("--uds and --port were both given; give one of them")
    resolved = resolve_settings(settings, model=model_name)

    from edgellm.cli.model_access import named_by
    from edgellm.cli.saved_chats import kv_files
    from edgellm.server.lifecycle import Server
    from edgellm.server.server_files import new_record
    from edgellm.server.settings import ServerSettings, read_api_keys

    keys: tuple[str, ...] = ()
    if api_key_file:
        keys, notices = read_api_keys(Path(api_key_file))
        for notice in notices:
            log_notice(notice)
            output.notice(notice)
    server_settings = ServerSettings(
        host=host,
        port=port,
        uds=Path(os.path.expanduser(uds)) if uds else None,
        api_keys=keys,
        cors_origins=cors_origin,
        allowed_hosts=allowed_host,
        insecure=insecure,
        queue=queue,
        request_timeout_s=request_timeout,
        grace_s=grace,
        idle_unload_s=idle_unload,
        strict=strict,
        parent_pid=parent_pid,
        chat_file=kv_files().prepare if parent_pid is not None and uds else None,
        access_log=access_log,
    )
    with named_by(resolved):
        found = resolve_model(resolved.model, models_folder())
    loader = ModelLoader(found, resolved, output, max_batch)

    def on_ready(address: str) -> None:
        if as_json:
            output.json({"event": "ready", "address": address, "model": found.name, "pid": os.getpid()})
        else:
            output.note(f"ready: {found.name} at {address}")

    from edgellm.cli.main import version

    key_path = os.path.abspath(api_key_file) if api_key_file else ""
    server = Server(
        server_settings,
        found.name,
        loader,
        record=lambda address: new_record(address, found.name, str(found.path or ""), key_path, version()),
        on_ready=on_ready,
        on_access=_write_access if access_log else None,
    )
    server.claim()
    code = server.run()
    if loader.is_loading:
        # It cannot be interrupted, and nothing of it is worth waiting for.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


class ModelLoader:
    """Loads the model of a server, again after a pause or a fault; fetches it when it is not here yet."""

    def __init__(
        self, found: ResolvedModel, resolved: ResolvedConfig, output: Output, max_batch: int | None
    ) -> None:
        self._found = found
        self._resolved = resolved
        self._output = output
        self._max_batch = max_batch
        self._loads = 0
        self.is_loading = False

    def __call__(self) -> ServedModel:
        self.is_loading = True
        try:
            return self._load()
        finally:
            self.is_loading = False

    def _load(self) -> ServedModel:
        from dataclasses import replace

        from edgellm.cli.model_access import fetch
        from edgellm.cli.runtime import load_runtime
        from edgellm.contracts import SamplingParams
        from edgellm.server.model_host import ServedModel
        from edgellm_models.errors import BadInputError

        path = self._found.path
        if path is None:
            assert self._found.entry is not None
            path = fetch(self._found.entry, self._output)
        told = self._output.notice if not self._loads else None
        self._loads += 1
        runtime = load_runtime(
            self._resolved, path, self._found.name, told, full_contexts=1, max_running=self._max_batch
        )
        templates, problem = None, None
        try:
            templates = runtime.load_templates()
        except BadInputError as error:  # raw completions go on without it
            problem = str(error)
        # The API's temperature of 1 unless the model states its own.
        base = self._found.entry.sampling if self._found.entry is not None else {}
        defaults: dict[str, Any] = dict(base or runtime.sampling_defaults)
        return ServedModel(
            info=replace(runtime.info, has_chat_template=templates is not None),
            engine=runtime.engine,
            tokenizer=runtime.tokenizer,
            templates=templates,
            sampling=self._resolved.sampling_params(SamplingParams(**defaults)),
            max_running=runtime.core.max_running,
            kv_policy=self._resolved.kv_policy,
            vocab_size=runtime.vocab_size,
            template_error=problem,
            close=runtime.close,
        )


def _write_access(entry: Any) -> None:
    import json

    from edgellm.cli.errors import tell

    tell(json.dumps(entry) + "\n")
