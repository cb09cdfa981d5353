"""``edgellm history``: lists, shows, searches, exports and removes saved chats."""

from __future__ import annotations

import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgellm.cli.command import CONTEXT_SETTINGS, EdgeCommand, write_examples
from edgellm.cli.options import json_option, option
from edgellm.cli.output import Output, counted, current_output, is_terminal
from edgellm.cli.terminal_text import terminal_text

if TYPE_CHECKING:
    from edgellm.contracts import SearchHit, StoredChat, StoredMessage
    from edgellm.history.store import HistoryStore

EXAMPLES = (
    "edgellm history list",
    'edgellm history search "capital of norway"',
    "edgellm history show 1a2b3c4d",
    "edgellm history export 1a2b3c4d -o chat.md",
)
SHOWN_ID = 8
"""Digits of an id in lists: enough to tell one user's chats apart, and any beginning is taken."""


class HistoryGroup(click.Group):
    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_usage(ctx, formatter)
        write_examples(formatter, EXAMPLES)
        self.format_help_text(ctx, formatter)
        self.format_options(ctx, formatter)


@click.group(name="history", cls=HistoryGroup, context_settings=CONTEXT_SETTINGS)
def command() -> None:
    """Saved chats: list, show, search, export, remove. An ID is the beginning of a chat's id, or `last`."""


@command.command("list", cls=EdgeCommand, examples=("edgellm history list", "edgellm history list --deleted"))
@option("-n", "--limit", metavar="N", type=click.IntRange(1), default=50, show_default=True, help="At most.")
@option("--deleted", is_flag=True, help="Those that were removed in the last 30 days.")
@json_option
def list_command(limit: int, deleted: bool, as_json: bool) -> None:
    """List saved chats, the newest first."""
    output, store = _open(as_json)
    chats = store.list_chats(limit=limit + 1, deleted=deleted)
    if as_json:
        output.json({"chats": [_chat_object(chat) for chat in chats[:limit]], "more": len(chats) > limit})
        return
    for chat in chats[:limit]:
        pin = "* " if chat.pinned else ""
        title = _one_line(pin + (chat.title or "(untitled)"))
        output.data(f"{chat.id[:SHOWN_ID]}  {_when(chat.updated)}  {chat.num_messages:4}  {title}")
    if not chats:
        output.note("no deleted chats" if deleted else "no saved chats; edgellm chat begins one")
    elif len(chats) > limit:
        output.note(f"note: there are more than {limit}; -n N shows more")


@command.command("show", cls=EdgeCommand, short_help="Print a chat.", examples=("edgellm history show last",))
@click.argument("chat_id", metavar="ID")
@json_option
def show_command(chat_id: str, as_json: bool) -> None:
    """Print a chat: the branch that was shown last; with --json all branches."""
    from edgellm.history.export import as_object

    output, store = _open(as_json)
    chat = _find(store, chat_id)
    if as_json:
        output.json(as_object(chat, store.tree(chat.id)))
        return
    branch = store.branch(chat.id)
    output.data(_one_line(f"{chat.title or '(untitled)'} · {chat.id[:SHOWN_ID]} · {_when(chat.created)}"))
    if chat.system:
        output.data(_shown(f"\nsystem:\n{chat.system}"))
    for stored in branch:
        output.data(_shown("\n" + _message_text(stored)))
    hidden = chat.num_messages - len(branch)
    if hidden > 0:
        output.note(f"note: {counted(hidden, 'message')} of other branches are not shown; --json has all")


@command.command(
    "search",
    cls=EdgeCommand,
    short_help="Find words in all chats.",
    examples=('edgellm history search "capital of norway"',),
)
@click.argument("words", nargs=-1, required=True)
@option("-n", "--limit", metavar="N", type=click.IntRange(1), default=20, show_default=True, help="At most.")
@json_option
def search_command(words: tuple[str, ...], limit: int, as_json: bool) -> None:
    """Find the chats that have all WORDS in a message or the title. A word may be the beginning of one;
    a "phrase in quotes" is taken as it is.
    """
    from edgellm.cli.options import check_text

    text = " ".join(words)
    check_text("WORDS", text)
    output, store = _open(as_json)
    hits = store.search(text, limit=limit + 1)
    if as_json:
        output.json({"hits": [_hit_object(hit) for hit in hits[:limit]], "more": len(hits) > limit})
        return
    for hit in hits[:limit]:
        line = f"{hit.chat.id[:SHOWN_ID]}  {_when(hit.chat.updated)}  {hit.role:9}  {hit.excerpt}"
        output.data(_one_line(line))
    if not hits:
        output.note("nothing was found")
    elif len(hits) > limit:
        output.note(f"note: there are more than {limit}; -n N shows more")


@command.command(
    "export",
    cls=EdgeCommand,
    short_help="Write a chat as Markdown or JSON.",
    examples=("edgellm history export last -o chat.md",),
)
@click.argument("chat_id", metavar="ID")
@option("-o", "--output", "target", metavar="FILE", help="Write there instead of to standard output.")
@option("--markdown", is_flag=True, help="Markdown of the branch shown last (the default).")
@json_option
def export_command(chat_id: str, target: str | None, markdown: bool, as_json: bool) -> None:
    """Write a chat as Markdown, or with --json as JSON with all branches and figures."""
    from edgellm_models.errors import UsageError

    if markdown and as_json:
        raise UsageError("--markdown and --json are two forms; give one")
    output, store = _open(as_json)
    form = (
        "json"
        if as_json or (target is not None and target.endswith(".json") and not markdown)
        else "markdown"
    )
    text = store.export(_find(store, chat_id).id, form)
    if target is None:
        # As it is into a file or program; on a terminal no control character of a message acts.
        output.data(_shown(text).rstrip("\n"))
        return
    _write(Path(target), text)
    output.note(f"wrote {target} ({form})")


@command.command(
    "rm",
    cls=EdgeCommand,
    short_help="Remove chats, or bring them back.",
    examples=("edgellm history rm 1a2b3c4d", "edgellm history rm --restore 1a2b3c4d"),
)
@click.argument("chat_ids", metavar="ID...", nargs=-1, required=True)
@option("--purge", is_flag=True, help="For good, at once; also of chats that were removed before.")
@option("--restore", is_flag=True, help="Bring removed chats back.")
@option("-y", "--yes", is_flag=True, help="Do not ask before --purge.")
@json_option
def remove_command(chat_ids: tuple[str, ...], purge: bool, restore: bool, yes: bool, as_json: bool) -> None:
    """Remove chats. They can be brought back for 30 days, unless --purge."""
    from edgellm.cli.saved_chats import kv_files
    from edgellm_models.errors import UsageError

    if purge and restore:
        raise UsageError("--purge and --restore do not go together")
    output, store = _open(as_json)
    chats = {}
    for chat_id in chat_ids:
        chat = _find(store, chat_id, deleted=restore, either=purge)
        chats[chat.id] = chat
    if purge and not yes and not _confirmed(list(chats.values())):
        output.note("nothing was removed")
        return
    files = kv_files()
    for chat in chats.values():
        if restore:
            store.restore_chat(chat.id)
        elif purge:
            files.remove(chat.id)
            store.purge_chat(chat.id)
        else:
            files.remove(chat.id)  # computed anew when the chat comes back
            store.delete_chat(chat.id)
    done = "restored" if restore else "purged" if purge else "removed"
    if as_json:
        output.json({done: list(chats)})
        return
    for chat in chats.values():
        output.data(_one_line(f"{done} {chat.id[:SHOWN_ID]}  {chat.title}"))
    if done == "removed":
        output.note("note: --restore brings a chat back for 30 days; --purge removes it for good")


# --- what they share ---


def _open(as_json: bool) -> tuple[Output, HistoryStore]:
    from edgellm.cli.saved_chats import open_history

    output = current_output()
    store = open_history(output.notice)
    click.get_current_context().call_on_close(store.close)
    return output, store


def _find(store: HistoryStore, chat_id: str, *, deleted: bool = False, either: bool = False) -> StoredChat:
    from edgellm_models.errors import NotFoundError

    if chat_id == "last":
        chats = store.list_chats(limit=1000, deleted=deleted)
        if not chats:
            raise NotFoundError("there are no deleted chats" if deleted else "there are no saved chats")
        return max(chats, key=lambda chat: chat.updated)
    try:
        return store.find_chat(chat_id, deleted=deleted)
    except NotFoundError:
        if not either:
            raise
        return store.find_chat(chat_id, deleted=True)


def _confirmed(chats: list[StoredChat]) -> bool:
    from edgellm_models.errors import UsageError

    if not is_terminal(sys.stdin):
        raise UsageError("--purge asks before it removes chats for good; add -y where nobody can answer")
    what = _one_line(chats[0].title or chats[0].id[:SHOWN_ID]) if len(chats) == 1 else f"{len(chats)} chats"
    return click.confirm(f"Remove {what} for good?", err=True)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, readable by its owner only. OutputError."""
    import contextlib
    import os
    import tempfile

    from edgellm_models.errors import OutputError

    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _message_text(stored: StoredMessage) -> str:
    from edgellm.history.export import ending, text_of

    place = f" {stored.sibling}/{stored.num_siblings}" if stored.num_siblings > 1 else ""
    who = stored.message.role + (f" ({stored.model})" if stored.model else "") + place
    end = ending(stored)
    return f"{who}:\n{text_of(stored)}" + (f"\n[{end}]" if end else "")


def _shown(text: str) -> str:
    return terminal_text(text) if is_terminal(sys.stdout) else text


def _one_line(text: str) -> str:
    """A line of a list: titles and excerpts come from models and files."""
    return terminal_text(" ".join(text.split("\n")))


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")


def _chat_object(chat: StoredChat) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(chat)


def _hit_object(hit: SearchHit) -> dict[str, Any]:
    return {
        "chat_id": hit.chat.id,
        "title": hit.chat.title,
        "message_id": hit.message_id,
        "role": hit.role,
        "excerpt": hit.excerpt,
        "marks": hit.marks,
    }
