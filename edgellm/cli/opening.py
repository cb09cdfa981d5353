"""The model that a chat is to be held with, before and while it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from edgellm.cli.runtime import OnNotice, Runtime
    from edgellm.config import ResolvedConfig
    from edgellm.contracts import ConstraintSpec, SamplingParams
    from edgellm_models.catalog import ResolvedModel

FALLBACK_SAMPLING: dict[str, float | int] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
"""When neither the user nor the catalog nor the model says anything."""


@dataclass(frozen=True)
class Opening:
    """A model that is here, or a server's, and the settings for it; ``load`` does the work of the former."""

    resolved: ResolvedConfig
    model: ResolvedModel | None
    """None with ``url``, as ``path``."""
    path: Path | None
    constraint: ConstraintSpec | None = None
    unnamed: bool = False
    """The command line has a prompt and no model: it is said which one answers."""
    url: str | None = None
    api_key_file: str | None = None
    is_named: bool = False
    """The command line names the model."""

    def load(self, on_notice: OnNotice) -> tuple[Runtime, SamplingParams]:
        """The model and how to choose its tokens."""
        from edgellm.cli.collector import uncollected
        from edgellm.cli.runtime import default_model_notice, load_runtime

        assert self.model is not None and self.path is not None
        if self.unnamed:
            on_notice(default_model_notice(self.model.name))
        with uncollected():
            runtime = load_runtime(self.resolved, self.path, self.model.name, on_notice)
        return runtime, self.sampling(runtime.sampling_defaults)

    @property
    def named_model(self) -> str | None:
        """What a server is asked for; None is whatever it has."""
        return self.resolved.model if self.is_named else None

    @property
    def model_argument(self) -> str:
        """What names this model from any folder; empty for a server's."""
        if self.model is None or self.path is None:
            return ""
        if self.model.entry is not None or self.resolved.model.startswith("hf:"):
            return self.resolved.model
        return str(self.path.absolute())

    @property
    def kv_policy(self) -> str:
        """A chat that is told nothing goes on when its context is full."""
        from edgellm.config import BUILT_IN

        said = self.resolved.origins.get("kv_policy", BUILT_IN) != BUILT_IN
        return self.resolved.kv_policy if said else "trim"

    def sampling(self, model_defaults: Mapping[str, float | int]) -> SamplingParams:
        """What the user said, over the catalog's values, else the model's own, else FALLBACK_SAMPLING."""
        from edgellm.contracts import SamplingParams

        entry = self.model.entry if self.model is not None else None
        catalog = entry.sampling if entry is not None else {}
        base: dict[str, Any] = dict(catalog or model_defaults or FALLBACK_SAMPLING)
        return self.resolved.sampling_params(SamplingParams(**base))

    def sampling_without_loading(self) -> SamplingParams:
        """The same for a model that a running server has loaded; only its metadata is read here."""
        from edgellm_models.checkpoint import open_checkpoint
        from edgellm_models.tokenizer import load_sampling_defaults

        assert self.model is not None and self.path is not None
        if self.model.entry is not None and self.model.entry.sampling:
            return self.sampling({})
        checkpoint = open_checkpoint(self.path)
        return self.sampling(load_sampling_defaults(self.path, checkpoint.file_format, checkpoint.metadata))

    def sampling_of(self, name: str) -> SamplingParams:
        """The same for a server's model, of which only the name is known."""
        from edgellm_models.catalog import load_catalog

        entry = load_catalog().get(name)
        return self.sampling(entry.sampling if entry is not None else {})

    def api_key(self, on_notice: OnNotice) -> str | None:
        """The first key of ``--api-key-file``."""
        if self.api_key_file is None:
            return None
        from pathlib import Path

        from edgellm.server.settings import read_api_keys

        keys, notices = read_api_keys(Path(self.api_key_file))
        for notice in notices:
            on_notice(notice)
        return keys[0]
