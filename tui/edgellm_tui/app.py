"""The application: opens the backend, shows the chat, gives the terminal back."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from textual import events, on
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen, Screen
from textual.theme import Theme

from edgellm.contracts import ChatBackend, ChatStore, ModelLibrary
from edgellm_models.errors import EdgeLLMError, Notice, ResourceError, UsageError
from edgellm_tui.commands import COMMANDS
from edgellm_tui.messages import ReplyNotice
from edgellm_tui.screens.chat import ChatScreen
from edgellm_tui.screens.help import keys_of
from edgellm_tui.screens.loading import LoadingScreen
from edgellm_tui.settings import ChatSettings
from edgellm_tui.themes import DARK, LIGHT, save_theme
from edgellm_tui.unsaved import MemoryStore
from edgellm_tui.widgets.prompt import ChatPrompt

CLOSE_GRACE_S = 5.0
"""How long an engine may take to end before another is opened all the same."""

Opened = ChatBackend | tuple[ChatBackend, ChatSettings]
Opener = Callable[[Callable[[Notice], None]], Opened | Coroutine[Any, Any, Opened]]
"""Opens a backend, in a thread of its own; may call its argument with notices meanwhile.

It may also return the settings, where these depend on the model (its own sampling defaults), and a coroutine
that brings both, which is awaited in the screen's loop.
"""


@dataclass(frozen=True)
class WayOut:
    """Another way to open a model that could not be opened."""

    label: str
    """What it does, as the screen offers it."""
    opener: Opener


class EdgeChat(App[int]):
    """A chat with a backend that is there, or that ``opener`` brings.

    ``return_code`` after ``run()``: 0 when left by a key (Ctrl+Q, Ctrl+D, Ctrl+C twice), the exit code of the
    error when the backend could not be opened, 130 when interrupted while opening, 143 after SIGTERM and 129
    after SIGHUP.
    """

    CSS_PATH = "app.tcss"
    TITLE = "edgellm"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (30, "-wide")]  # noqa: RUF012 (declared by Textual)
    VERTICAL_BREAKPOINTS = [(0, "-short"), (18, "-high")]  # noqa: RUF012 (declared by Textual)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+c", "interrupt", "Stop, copy or quit", show=False, priority=True),
    ]

    def __init__(
        self,
        backend: ChatBackend | None = None,
        *,
        opener: Opener | None = None,
        model_name: str = "",
        settings: ChatSettings | None = None,
        notices: tuple[Notice, ...] = (),
        library: ModelLibrary | None = None,
        store: ChatStore | None = None,
        chat_id: str | None = None,
        opener_for: Callable[[str], Opener] | None = None,
        ways_out: Callable[[], Sequence[WayOut]] | None = None,
    ) -> None:
        """``store`` None keeps chats no longer than the screen; ``chat_id`` is opened first. ``opener_for``
        gives the opener of another model by its name, ``ways_out`` what to offer where there is too little
        memory for the first one."""
        if (backend is None) == (opener is None):
            raise ValueError("EdgeChat needs a backend or an opener, and not both")
        super().__init__()
        self._backend = backend
        self._opener = opener
        self._model_name = model_name
        self._settings = settings or ChatSettings()
        self.library = library
        self._store: ChatStore = store if store is not None else MemoryStore()
        self._first_chat = chat_id
        self._opener_for = opener_for
        self._ways_out = ways_out
        self._ways: Sequence[WayOut] = ()
        """Those that are offered by now."""
        self._chat: ChatScreen | None = None
        self._notices = [*notices, *self._store.notices]
        self._failure_code = 0
        self._loading: LoadingScreen | None = None
        self._held: list[events.Key | events.Paste] | None = []
        """What is typed before there is a prompt; None once there is one, or will be none."""
        self.opening = False
        """The opener is still at work; its thread does not keep the process alive."""
        self._next_opener: Opener | None = None
        self._next_name = model_name
        self._before: Opener | None = None

    async def on_mount(self) -> None:
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        if self._settings.keymap:
            self.set_keymap(dict(self._settings.keymap))
        self.theme = self._settings.theme if self._settings.theme in self.available_themes else DARK.name
        self.theme_changed_signal.subscribe(self, self._keep_theme)
        self._handle_signals()
        if self._backend is not None:
            await self.push_screen(self._chat_screen(self._backend))
        else:
            self._loading = LoadingScreen(self._model_name)
            await self.push_screen(self._loading)
            self._open()

    def _keep_theme(self, theme: Theme) -> None:
        if self._settings.theme_file is not None:
            save_theme(self._settings.theme_file, theme.name)

    def _chat_screen(self, backend: ChatBackend) -> ChatScreen:
        self._chat = ChatScreen(backend, self._settings, tuple(self._notices), self._store, self._first_chat)
        self._notices.clear()
        return self._chat

    # --- opening ---

    def _open(self) -> None:
        assert self._opener is not None
        opener, loop = self._opener, asyncio.get_running_loop()
        # Screens that are made in a callback need this app's context variables.
        context = contextvars.copy_context()
        self.opening = True

        def call(function: Callable[..., object], *arguments: object) -> None:
            # The screen may have been left while the model was still loading.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(function, *arguments, context=context)

        def work() -> None:
            try:
                opened = opener(lambda notice: call(self._opening_notice, notice))
                if isinstance(opened, Coroutine):  # a client belongs to the loop that uses it
                    opened = asyncio.run_coroutine_threadsafe(opened, loop).result()
            except EdgeLLMError as error:
                ways = self._find_ways() if isinstance(error, ResourceError) else ()
                call(self._opening_failed, str(error), error.exit_code, ways)
            except Exception as error:  # Whatever it is, it belongs on the screen, not across it.
                call(self._opening_failed, f"{type(error).__name__}: {error}", 1)
            else:
                call(self._opened, opened)

        # A daemon: whoever leaves while a model loads need not wait for it.
        threading.Thread(target=work, name="open-backend", daemon=True).start()

    @property
    def can_open(self) -> bool:
        """The model can be opened again, in a new engine."""
        return self._opener is not None

    def open_model(self, name: str | None) -> None:
        """Opens another model, or with None the same one anew, behind the chat, which stays as it is."""
        if name is not None and self._opener_for is None:
            raise UsageError("other models cannot be opened here")
        if self.opening or self._chat is None:
            return
        if name is not None and self._opener_for is not None:
            self._next_opener, self._next_name = self._opener_for(name), name
        else:
            self._next_opener, self._next_name = self._opener, self._model_name
        self.run_worker(self._reopen(), group="reopen", exit_on_error=False)

    async def _reopen(self) -> None:
        while isinstance(self.screen, ModalScreen):
            self.pop_screen()
        self._loading = LoadingScreen(self._next_name)
        await self.push_screen(self._loading)
        await self._put_by()
        # First, for two models may not fit side by side.
        if self._backend is not None:
            with contextlib.suppress(Exception):  # a killed engine has nothing to close
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._backend.close()
        self._before = self._opener
        self._opener = self._next_opener
        self._open()

    def _opening_notice(self, notice: Notice) -> None:
        if self._loading is not None:
            if notice.kind != "memory_estimate":  # of use before loading only
                self._notices.append(notice)
            self._loading.notice(notice.detail)
        elif self._chat is not None:
            self._chat.post_message(ReplyNotice(notice))

    def _find_ways(self) -> Sequence[WayOut]:
        if self._ways_out is None or self._chat is not None:
            return ()
        try:
            return self._ways_out()
        except EdgeLLMError:
            return ()  # what is wrong has been said

    def _opening_failed(self, message: str, exit_code: int, ways: Sequence[WayOut] = ()) -> None:
        self.opening = False
        if self._chat is not None:
            # The chat stays; without an engine, until one opens.
            self._opener = self._before or self._opener
            self._end_loading()
            line = (
                f"{self._next_name} could not be opened: {message} · /restart opens {self._model_name} again"
            )
            self._chat.call_later(self._chat.show_error, line)
            return
        self._failure_code = exit_code
        self._held = None
        self._ways = ways
        if self._loading is not None:
            others = self.library is not None and self._opener_for is not None
            self._loading.fail(message, [way.label for way in ways], others=others)

    def action_way_out(self, number: int) -> None:
        if self._failure_code and number < len(self._ways):
            self._open_otherwise(self._ways[number].opener, self._model_name)

    def action_other_model(self) -> None:
        if not self._failure_code or self.library is None or self._opener_for is None:
            return
        from edgellm_tui.screens.models import ModelsScreen

        opener_for = self._opener_for

        def picked(name: str | None) -> None:
            if name is None:
                return
            try:
                opener = opener_for(name)
            except EdgeLLMError as error:
                self._opening_failed(str(error), error.exit_code)
            else:
                self._open_otherwise(opener, name)

        self.push_screen(ModelsScreen(self.library, ""), picked)  # none is open

    def _open_otherwise(self, opener: Opener, name: str) -> None:
        """Tries again where there is no chat yet."""
        self._failure_code, self._ways, self._held = 0, (), []
        self._opener, self._model_name = opener, name
        self._loading = LoadingScreen(name)
        self.switch_screen(self._loading)
        self._open()

    def _opened(self, opened: Opened) -> None:
        self.opening = False
        if isinstance(opened, tuple):
            self._backend, settings = opened
            # How the screen looks and is handled is not the model's.
            mine = {name: getattr(self._settings, name) for name in ("theme", "theme_file", "keymap")}
            self._settings = replace(settings, **mine)
        else:
            self._backend = opened
        if self._chat is not None:
            self._model_name = self._next_name
            notices, self._notices = list(self._notices), []
            self._end_loading()
            self._chat.call_later(self._chat.use_backend, self._backend, self._settings, notices)
            return
        self._loading = None
        while self.screen.is_modal:  # the command palette can be open
            self.pop_screen()
        self.switch_screen(self._chat_screen(self._backend))

    def _end_loading(self) -> None:
        self._loading = None
        while self.screen is not self._chat and len(self.screen_stack) > 1:
            self.pop_screen()

    # --- keys before there is a prompt ---

    async def on_event(self, event: events.Event) -> None:
        if self._holds(event):
            assert self._held is not None and isinstance(event, events.Key | events.Paste)
            if isinstance(event, events.Paste) or not await self._check_bindings(event.key, priority=True):
                self._held.append(event)
                if self._loading is not None:
                    self._loading.keeps_typing = True
            return
        await super().on_event(event)

    def _holds(self, event: events.Event) -> bool:
        if self._held is None or not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            return False
        return not (self.screen_stack and self.screen.is_modal)

    @on(ChatScreen.Ready)
    def _hand_over(self, event: ChatScreen.Ready) -> None:
        # In one go, so that no later key can overtake those that were held.
        held, self._held = self._held or [], None
        prompt = event.screen.query_one(ChatPrompt)
        event.screen.set_focus(prompt)
        for key in held:
            prompt._forward_event(key)

    # --- leaving ---

    def _handle_signals(self) -> None:
        """SIGTERM and SIGHUP leave as a key would, so that the terminal is given back."""
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None:
                # Not in a thread other than the main one, nor on Windows.
                with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                    asyncio.get_running_loop().add_signal_handler(
                        number, partial(self._leave_by_signal, number)
                    )

    def _leave_by_signal(self, number: int) -> None:
        self.exit(return_code=128 + number)

    async def action_interrupt(self) -> None:
        if isinstance(self.screen, ChatScreen):
            await self.screen.interrupt()
        elif self.screen.is_modal:
            self.screen.dismiss()
        elif self._chat is not None:
            self.exit(return_code=0)  # another model was being opened
        else:
            self.exit(return_code=self._failure_code or 130)

    async def action_quit(self) -> None:
        self.exit(return_code=self._failure_code)

    async def _put_by(self) -> None:
        """The engine is about to end: it keeps what it computed of the chat that is shown."""
        if self._chat is not None and not self._chat.generating:
            # Whatever goes wrong with it: the next time the chat is computed anew.
            with contextlib.suppress(EdgeLLMError, TimeoutError):
                async with asyncio.timeout(CLOSE_GRACE_S):
                    await self._chat.put_by()

    async def on_unmount(self) -> None:
        await self._put_by()
        if self._backend is not None:
            await self._backend.close()
        self._store.close()

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        if isinstance(screen, ChatScreen):
            for command in COMMANDS:
                if command.name in ("stop_reply", "rename", "set_parameter", "attach"):
                    continue  # these need something typed, or an answer that is being written
                title = command.name.replace("_", " ").capitalize()
                shown = keys_of(command, self._settings.keymap)
                keys = f" ({shown})" if shown else ""
                yield SystemCommand(title, f"{command.does}{keys}", partial(screen.run_command, command))
        else:
            yield SystemCommand("Theme", "Change the colours", self.action_change_theme)
            yield SystemCommand("Quit", "Leave edgellm", self.action_quit)
