"""F3: the sampling values of this chat beside those that hold without it, and its system prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static, TextArea

from edgellm.contracts import SamplingParams
from edgellm_models.errors import BadInputError
from edgellm_tui.parameters import PARAMETERS, Parameter, parse_value, value_text
from edgellm_tui.terminal_text import safe_line


@dataclass(frozen=True)
class Choice:
    """What was entered."""

    params: Mapping[str, Any]
    system: str


def default_text(parameter: Parameter, base: SamplingParams, origins: Mapping[str, str]) -> str:
    """The value that holds when the field stays empty, and where it comes from."""
    value = value_text(getattr(base, parameter.name)) or "none"
    origin = origins.get(parameter.name, "")
    return f"{value} ({origin})" if origin else value


class ParametersScreen(ModalScreen[Choice | None]):
    """Ends with what was entered, or None. A field that is left empty follows the model."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close", show=False, priority=True),
        Binding("f3,ctrl+s", "apply", "Apply", show=False, priority=True),
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("ctrl+r", "reset", "Reset", show=False, priority=True),
    ]

    def __init__(
        self, base: SamplingParams, origins: Mapping[str, str], params: Mapping[str, Any], system: str
    ) -> None:
        super().__init__()
        self._base = base
        self._origins = origins
        self._params = dict(params)
        self._system = system

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="sheet", can_focus=False) as column:
            column.border_title = "Parameters of this chat"
            column.border_subtitle = "Enter apply · Ctrl+R reset · Esc"
            yield Static("", markup=False, classes="picker-line")
            for parameter in PARAMETERS:
                with Horizontal(classes="field"):
                    yield Static(parameter.label, classes="field-name")
                    yield Input(
                        value_text(self._params[parameter.name]) if parameter.name in self._params else "",
                        placeholder=default_text(parameter, self._base, self._origins),
                        id=parameter.name,
                        compact=True,
                    )
                    yield Static(parameter.does, classes="field-help")
            yield Static("System prompt", classes="field-name")
            yield TextArea(self._system, id="system", tab_behavior="focus", compact=True)

    def on_mount(self) -> None:
        self.query(Input).first().focus()

    def _say(self, text: str) -> None:
        self.query_one(".picker-line", Static).update(safe_line(text))

    def on_input_submitted(self) -> None:
        self.action_apply()

    def action_apply(self) -> None:
        """Ends with the values; one that cannot be stays in its field with the rule it breaks."""
        params: dict[str, Any] = {}
        for parameter in PARAMETERS:
            field = self.query_one(f"#{parameter.name}", Input)
            if not field.value.strip():
                continue
            try:
                params[parameter.name] = parse_value(parameter, field.value)
            except BadInputError as error:
                self._say(f"✗ {error}")
                field.focus()
                return
        others = {name: value for name, value in self._params.items() if name not in _SHOWN}
        self.dismiss(Choice({**others, **params}, self.query_one(TextArea).text.strip()))

    def action_reset(self) -> None:
        for field in self.query(Input):
            field.value = ""
        self._say("Everything as the model was opened; Enter applies it")

    def action_leave(self) -> None:
        self.dismiss(None)


_SHOWN = {parameter.name for parameter in PARAMETERS}
