"""Everything a person can do in the chat, in one table: source of keys, slash commands, help and palette."""

from __future__ import annotations

from dataclasses import dataclass

from textual.binding import Binding


@dataclass(frozen=True)
class Command:
    """One thing to do. ``name`` is the action of the chat screen that does it, and its id in a keymap."""

    name: str
    does: str
    """What it does, as help and palette say it."""
    keys: str = ""
    """As Textual names them, separated by commas."""
    shown: str = ""
    """The keys as people write them."""
    slash: tuple[str, ...] = ()
    """Its slash commands, the usual one first."""
    argument: str = ""
    """What may follow the slash command."""
    group: str = "Chat"
    priority: bool = True
    """Goes before what the focused widget would do with the key."""
    waits: bool = False
    """Not while an answer is written."""

    @property
    def bindable(self) -> bool:
        """A key can do it: nothing has to be typed for it."""
        return bool(self.keys) or not self.argument or self.argument.startswith("[")


COMMANDS: tuple[Command, ...] = (
    Command("stop_reply", "stop the answer; what has come stays, your draft too", "escape", "Esc",
            group="Answer", priority=False),
    Command("regenerate", "answer again; the old answer stays beside it", "ctrl+r", "Ctrl+R",
            ("retry", "regen"), group="Answer", waits=True),
    Command("edit_question", "edit a question and ask it anew: the last, or the Nth last", "ctrl+e", "Ctrl+E",
            ("edit",), "[N]", "Answer", waits=True),
    Command("previous_sibling", "show the other version before", "alt+left", "Alt+Left", group="Answer"),
    Command("next_sibling", "show the other version after", "alt+right", "Alt+Right", group="Answer"),
    Command("previous_fork", "choose the fork above", "alt+up", "Alt+Up", group="Answer"),
    Command("next_fork", "choose the fork below", "alt+down", "Alt+Down", group="Answer"),
    Command("branch", "go on from the Nth last answer; what came after it stays beside", slash=("branch",),
            argument="[N]", group="Answer", waits=True),
    Command("copy_answer", "copy the last answer", "ctrl+y", "Ctrl+Y", ("copy",), group="Answer"),
    Command("copy_code", "copy a code block: the last; again: the one before", "alt+c", "Alt+C", ("code",),
            "[N]", "Answer"),
    Command("toggle_thinking", "show or fold away thinking; on, off: whether the model thinks", "ctrl+t",
            "Ctrl+T", ("think",), "[on|off]", "Answer"),
    Command("new_chat", "new chat; this one is kept", "ctrl+n", "Ctrl+N", ("new", "clear"),
            waits=True),
    Command("history", "saved chats: open, rename, delete", "ctrl+s", "Ctrl+S", ("chats", "history"),
            waits=True),
    Command("search_history", "search in all chats", "ctrl+f", "Ctrl+F", ("search",), "[WORDS]",
            waits=True),
    Command("rename", "give this chat another title", slash=("rename",), argument="TITLE"),
    Command("compact", "new chat with the last N questions and answers of this one", slash=("compact",),
            argument="[N]", waits=True),
    Command("save_answer", "write the last answer to a file", slash=("save",), argument="[FILE]"),
    Command("export", "write the chat to a file: Markdown, or JSON if its name ends so", slash=("export",),
            argument="[FILE]"),
    Command("attach", "add a text file to the next question; its tokens are counted", slash=("attach",),
            argument="FILE"),
    Command("external_editor", "write the question in your $EDITOR", "ctrl+g", "Ctrl+G", ("editor",)),
    Command("models", "models: open another, fetch one", "ctrl+o", "Ctrl+O", ("model",), "[NAME]", "Model",
            waits=True),
    Command("parameters", "sampling and system prompt", "f3", "F3", ("parameters",), group="Model"),
    Command("set_parameter", "set one value; without VALUE the model's own", slash=("set",),
            argument="NAME [VALUE]", group="Model"),
    Command("reset_parameters", "take every value of this chat as the model was opened", slash=("reset",),
            group="Model"),
    Command("system", "show or set the system prompt; - removes it", slash=("system",), argument="[TEXT]",
            group="Model"),
    Command("restart", "start the engine again", slash=("restart",), group="Model", waits=True),
    Command("toggle_panel", "live figures: speed, context, cache", "f2", "F2", ("stats",), group="View"),
    Command("show_context", "what fills the context", slash=("context",), group="View"),
    Command("change_theme", "change the colours", slash=("theme",), argument="[NAME]", group="View"),
    Command("help", "this page", "f1", "F1", ("help",), group="View"),
    Command("quit_chat", "quit", "ctrl+q", "Ctrl+Q", ("quit", "exit"), group="View"),
)  # fmt: skip

OTHER_KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "send"),
    ("Ctrl+J", "new line; Shift+Enter too, where the terminal sends it"),
    ("Tab", "complete a slash command"),
    ("Up, Down", "earlier questions"),
    ("PgUp, PgDn", "scroll; Ctrl+Home, Ctrl+End: to the ends"),
    ("Ctrl+C", "copy the selection, else stop; twice: quit"),
    ("Ctrl+P", "all of these to choose from"),
    ("Ctrl+D", "leave, when the prompt is empty"),
)
"""Keys that widgets own, not the table."""

SLASH: dict[str, Command] = {name: command for command in COMMANDS for name in command.slash}


def bindings() -> list[Binding]:
    """The keys of the table as the chat screen binds them; the ids are what a keymap names. A command
    without a key has one that no keyboard sends, for a keymap to put another in its place."""
    return [
        Binding(c.keys or f"no-key-{c.name}", c.name, c.does, show=False, priority=c.priority, id=c.name)
        for c in COMMANDS
        if c.bindable
    ]


def completions(text: str) -> list[str]:
    """The slash commands that ``text`` (``/`` and the beginning of a name) may become, itself first."""
    if not text.startswith("/") or " " in text or "\n" in text:
        return []
    return sorted((name for name in SLASH if name.startswith(text[1:])), key=lambda name: name != text[1:])
