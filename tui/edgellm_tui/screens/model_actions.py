"""Actions of the chat on what surrounds it: the model, its values, the looks of the screen."""

from __future__ import annotations

from collections.abc import Sequence

from edgellm.contracts import ChatMessage
from edgellm_models.errors import BadInputError, NotFoundError, Notice
from edgellm_tui.parameters import find_parameter, parse_value, value_text
from edgellm_tui.screens.chat_parts import ChatParts
from edgellm_tui.screens.help import HelpScreen
from edgellm_tui.screens.parameters import Choice, ParametersScreen
from edgellm_tui.unsaved import text_of
from edgellm_tui.widgets.figures import count_text


class ModelActions(ChatParts):
    """What the table of commands names under these keys."""

    def __init__(self) -> None:
        super().__init__()
        self._panel_chosen: bool | None = None

    # --- model and values ---

    def action_models(self, argument: str = "") -> None:
        if self._busy():
            return
        app = self.edge_app
        if argument:
            app.open_model(argument)
            return
        if app.library is None:
            self.show_hint("Other models cannot be opened here")
            return
        from edgellm_tui.screens.models import ModelsScreen

        def picked(name: str | None) -> None:
            if name is not None:
                app.open_model(name)

        app.push_screen(ModelsScreen(app.library, self._model.name), picked)

    def action_restart(self) -> None:
        if self._busy():
            return
        if not self.can_restart:
            self.show_hint("The engine was started elsewhere and cannot be restarted here")
            return
        self.edge_app.open_model(None)

    def action_parameters(self) -> None:
        conversation, settings = self._conversation, self._settings

        def chosen(choice: Choice | None) -> None:
            if choice is not None:
                conversation.set_params(choice.params)
                if choice.system != conversation.system:
                    conversation.set_system(choice.system)

        self.app.push_screen(
            ParametersScreen(
                settings.sampling, settings.sampling_origins, conversation.params, conversation.system
            ),
            chosen,
        )

    def action_set_parameter(self, argument: str = "") -> None:
        name, _, text = argument.partition(" ")
        if not name:
            raise BadInputError("/set needs a name: /set temperature 0.7 (F3 lists them)")
        parameter = find_parameter(name)
        params = dict(self._conversation.params)
        if text.strip():
            params[parameter.name] = parse_value(parameter, text)
        else:
            params.pop(parameter.name, None)
        self._conversation.set_params(params)
        value = value_text(getattr(self._conversation.effective_sampling, parameter.name)) or "not set"
        origin = "" if parameter.name in params else " (as the model was opened)"
        self.show_hint(f"{parameter.label}: {value}{origin}")

    def action_reset_parameters(self) -> None:
        self._conversation.set_params({})
        self.show_hint("Every value is as the model was opened")

    async def action_system(self, argument: str = "") -> None:
        if not argument:
            said = self._conversation.system
            await self._show_notice(
                Notice("system", f"system prompt: {said}" if said else "no system prompt")
            )
            return
        self._conversation.set_system("" if argument == "-" else argument)
        self.show_hint("System prompt removed" if argument == "-" else "System prompt set for this chat")

    # --- view ---

    def action_toggle_panel(self) -> None:
        self._panel_chosen = not self._panel.display
        self._place_panel()

    async def action_show_context(self) -> None:
        """One line: what the next question will be asked with, by kind."""
        conversation, length = self._conversation, self._model.context_length
        system = [ChatMessage("system", conversation.system)] if conversation.system else []
        turns = [m.message for m in conversation.branch if text_of(m.message)]
        whole: Sequence[ChatMessage] = [*system, *turns]
        if not whole:
            self.show_hint("The context is empty")
            return
        total = await self._backend.count_tokens(whole)
        if not total:
            self.show_hint("This server does not count tokens")
            return
        share = f" of {count_text(length)} ({total / length:.0%})" if length else ""
        questions = sum(message.role == "user" for message in turns)
        answers = len(turns) - questions
        parts = [f"{questions} question{'s' * (questions != 1)}, {answers} answer{'s' * (answers != 1)}"]
        if system:
            parts.append(f"a system prompt of {count_text(len(conversation.system))} characters")
        await self._show_notice(
            Notice("context_use", f"context: {count_text(total)}{share} tokens; " + ", ".join(parts))
        )

    def action_change_theme(self, argument: str = "") -> None:
        if not argument:
            self.edge_app.action_change_theme()
            return
        names = {"dark": "edgellm-dark", "light": "edgellm-light"}
        name = names.get(argument, argument)
        if name not in self.app.available_themes:
            raise NotFoundError(f"there is no theme {argument}; /theme alone lists them")
        self.app.theme = name

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen(dict(self._settings.keymap)))
