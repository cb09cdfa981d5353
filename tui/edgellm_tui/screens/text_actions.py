"""Actions of the chat on texts: what is taken out of it, and what is brought in with a question."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path

from textual.app import SuspendNotSupported

from edgellm.contracts import ChatMessage
from edgellm_models.errors import BadInputError, OutputError
from edgellm_tui.clipboard import copy_text
from edgellm_tui.code_blocks import code_blocks
from edgellm_tui.files import MAX_ATTACHED_BYTES, export_name, read_text_file, with_attachments, write_new
from edgellm_tui.screens.chat_parts import Attachment, ChatParts
from edgellm_tui.unsaved import text_of
from edgellm_tui.widgets.figures import count_text, path_text


class TextActions(ChatParts):
    """What the table of commands names under these keys."""

    def __init__(self) -> None:
        super().__init__()
        self._code_from: tuple[str, int] = ("", 0)
        self._thinking_shown = False

    # --- taking answers away ---

    @property
    def _last_answer(self) -> str:
        if self._reply is not None and self._reply.text:
            return self._reply.text
        answer = self._conversation.answer_back(1)
        return text_of(answer.message) if answer is not None else ""

    async def action_copy_answer(self) -> None:
        if self._last_answer:
            await self.copy(self._last_answer)
        else:
            self.show_hint("There is no answer to copy yet")

    async def action_copy_code(self, argument: str = "") -> None:
        """The last code block of the last answer; pressed again, the one before it."""
        answer = self._last_answer
        blocks = code_blocks(answer)
        if not blocks:
            self.show_hint("There is no code block in the last answer")
            return
        if argument:
            place = self._number(argument, "/code") - 1
            if place >= len(blocks):
                raise BadInputError(f"the last answer has {len(blocks)} code blocks")
        else:
            seen, before = self._code_from
            place = before - 1 if seen == answer and before > 0 else len(blocks) - 1
        self._code_from = (answer, place)
        told = await copy_text(self.edge_app, blocks[place], os.environ)
        self.show_hint(f"Block {place + 1} of {len(blocks)}: {told}")

    def action_save_answer(self, argument: str = "") -> None:
        if not self._last_answer:
            self.show_hint("There is no answer to save yet")
            return
        self._write(argument or f"answer-{time.strftime('%Y%m%d-%H%M%S')}.md", self._last_answer)

    def action_export(self, argument: str = "") -> None:
        if self._conversation.chat_id is None:
            self.show_hint("There is nothing to export yet")
            return
        name = argument or export_name(self._conversation.title)
        form = "json" if name.lower().endswith(".json") else "markdown"
        self._write(name, self._store.export(self._conversation.chat_id, form))

    def _write(self, name: str, text: str) -> None:
        try:
            path = write_new(name, self._settings.save_folder, text)
        except OutputError as error:
            self.show_hint(str(error))
        else:
            self.show_hint(f"Saved to {path_text(path, 60)}")

    async def action_toggle_thinking(self, argument: str = "") -> None:
        """Shows or folds away the thinking of all answers; ``on`` and ``off`` tell the model what to do."""
        if argument in ("on", "off"):
            self._let_think(argument == "on")
            return
        if argument not in ("", "show", "hide"):
            raise BadInputError("/think takes on or off for the model, show or hide for what it thought")
        self._thinking_shown = argument == "show" if argument else not self._thinking_shown
        found = False
        for message in self._transcript.messages():
            if hasattr(message, "show_thinking"):
                found = await message.show_thinking(self._thinking_shown) or found
        if not found:
            self.show_hint("No answer here has thinking to show")

    def _let_think(self, wanted: bool) -> None:
        if self._settings.can_think is False:
            self.show_hint(
                f"{self._model.name} cannot be told whether to think: its chat template has no such switch"
            )
            return
        self._conversation.set_thinks(wanted)
        word = "thinks" if wanted else "does not think"
        unsure = "" if self._settings.can_think else ", if its chat template knows that"
        self.show_hint(f"From the next answer of this chat on the model {word}{unsure}")

    # --- writing ---

    async def action_attach(self, argument: str = "") -> None:
        """Reads a text file and counts its tokens; it goes along with the next question."""
        if not argument:
            raise BadInputError("/attach needs a file: /attach notes.txt")
        name, text = read_text_file(argument)
        tokens = await self._backend.count_tokens([ChatMessage("user", with_attachments("", [(name, text)]))])
        size = f"{count_text(tokens)} tokens" if tokens else f"{count_text(len(text))} characters"
        length = self._model.context_length
        self._attached.append(Attachment(name, text, size))
        self._describe_prompt()
        if tokens and length and tokens > length:
            self.show_hint(
                f"{name} has {size}, more than the context of {count_text(length)}: Esc takes it away",
                seconds=8,
            )
        else:
            self.show_hint(f"{name}: {size} go along with the next question")

    def action_external_editor(self) -> None:
        """Hands the draft to $VISUAL or $EDITOR and takes it back."""
        editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        descriptor, name = tempfile.mkstemp(prefix="edgellm-", suffix=".md")  # 0600
        path = Path(name)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(self._prompt.draft)
            with self.app.suspend():
                code = subprocess.run([*shlex.split(editor), name], check=False).returncode
            if code:
                self.show_hint(f"{editor} ended with {code}; the draft is as it was")
                return
            data = path.read_bytes()[:MAX_ATTACHED_BYTES]
            self._prompt.paste_text(data.decode("utf-8", "replace").rstrip("\n"))
        except SuspendNotSupported:
            self.show_hint("This terminal cannot be handed to an editor")
        except (OSError, ValueError) as error:
            self.show_hint(f"The editor {editor} could not be run: {error}; set EDITOR")
        finally:
            path.unlink(missing_ok=True)
