"""The chat templates of a model: found, chosen, and rendered as transformers renders them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgellm_models.errors import BadInputError, Notice
from edgellm_models.tokenizer.hf_files import (
    MAX_TEMPLATE_BYTES,
    read_json_object,
    read_text,
    special_token_strings,
)
from edgellm_models.tokenizer.template_messages import TemplateTraits, prepare_messages, probe_traits

_GGUF_KEY = "tokenizer.chat_template"


@dataclass(frozen=True)
class PreparedChat:
    """Messages in the form that the chosen template takes."""

    template: str
    """Its name."""
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    notices: tuple[Notice, ...] = ()


class ChatTemplates:
    """Named jinja templates and the special token strings they may name. Immutable, for any number of
    threads."""

    def __init__(
        self, templates: Mapping[str, str], special_strings: Mapping[str, str] | None = None
    ) -> None:
        """``templates`` by name (``default``, ``tool_use`` ...), ``special_strings`` by name (``bos_token``
        ...)."""
        if not templates:
            raise BadInputError("there is no chat template")
        for name, source in templates.items():
            if not isinstance(source, str):
                raise BadInputError(f"the chat template {name!r} must be text, not {type(source).__name__}")
            if len(source) > MAX_TEMPLATE_BYTES:
                raise BadInputError(
                    f"the chat template {name!r} has {len(source)} characters; at most {MAX_TEMPLATE_BYTES}"
                    f" are read"
                )
        self.templates = dict(templates)
        self.special_strings = dict(special_strings or {})
        self._lock = threading.Lock()
        self._traits: dict[str, TemplateTraits] = {}

    def choose(self, has_tools: bool = False) -> str:
        """The name of the template to use: ``tool_use`` with tools where there is one, else ``default``."""
        if has_tools and "tool_use" in self.templates:
            return "tool_use"
        if "default" in self.templates:
            return "default"
        if len(self.templates) == 1:
            return next(iter(self.templates))
        raise BadInputError(
            "the model has several chat templates and none is called default: "
            + ", ".join(sorted(self.templates))
        )

    def traits(self, name: str) -> TemplateTraits:
        """What the template does with messages; found once."""
        with self._lock:
            if name not in self._traits:
                self._traits[name] = probe_traits(
                    lambda messages: self._render(name, messages, None, False, {}), self.templates[name]
                )
            return self._traits[name]

    def prepare(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> PreparedChat:
        """Chooses the template and fits the messages to it. BadInputError for parts that are no text."""
        name = self.choose(bool(tools))
        prepared, notices = prepare_messages(messages, self.traits(name), self.templates[name])
        return PreparedChat(name, prepared, list(tools) if tools else None, tuple(notices))

    def render_prepared(
        self, chat: PreparedChat, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        return self._render(chat.template, chat.messages, chat.tools, add_generation_prompt, variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. Messages are mappings in OpenAI's form; ``variables`` go to the template as they
        are."""
        return self.render_prepared(self.prepare(messages, tools), add_generation_prompt, **variables)

    def _render(
        self,
        name: str,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        from edgellm_models.tokenizer.template_sandbox import render_template

        values = {
            **self.special_strings,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        return render_template(_compiled(self.templates[name]), values)


@functools.lru_cache(maxsize=32)
def _compiled(source: str) -> Any:
    from edgellm_models.tokenizer.template_sandbox import LimitedEnvironment, compile_template

    return compile_template(LimitedEnvironment(), source)


def _named_list(value: Any, where: str) -> dict[str, str]:
    """One template, or a list of objects with name and template."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, Mapping):
        value = [{"name": name, "template": template} for name, template in value.items()]
    found: dict[str, str] = {}
    for entry in value if isinstance(value, list) else []:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise BadInputError(f"{where}: an entry of chat_template has no name")
        if not isinstance(entry.get("template"), str):
            raise BadInputError(f"{where}: the chat template {entry['name']!r} is no text")
        found[entry["name"]] = entry["template"]
    return found


def chat_templates_from_hf(folder: Path) -> ChatTemplates | None:
    """chat_template.jinja wins over the lists in JSON files; further ones lie in
    additional_chat_templates/."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        value = read_json_object(folder / name).get("chat_template")
        if value is not None:
            found.update(_named_list(value, str(folder / name)))
    more = folder / "additional_chat_templates"
    for path in sorted(more.glob("*.jinja")) if more.is_dir() else ():
        found[path.stem] = read_text(path, MAX_TEMPLATE_BYTES)
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        found["default"] = read_text(alone, MAX_TEMPLATE_BYTES)
    return ChatTemplates(found, special_token_strings(folder)) if found else None


def chat_templates_from_gguf(metadata: Mapping[str, Any]) -> ChatTemplates | None:
    """``tokenizer.chat_template`` and ``tokenizer.chat_template.NAME``."""
    found = {
        key[len(_GGUF_KEY) + 1 :] or "default": value
        for key, value in metadata.items()
        if (key == _GGUF_KEY or key.startswith(_GGUF_KEY + ".")) and value
    }
    if not found:
        return None
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    names = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    strings = {}
    for key, name in names.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            strings[f"{name}_token"] = str(tokens[token_id])
    return ChatTemplates(found, strings)
