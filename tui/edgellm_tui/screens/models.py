"""The model picker: what is here, what can be fetched, whether it fits, with the pull inside the screen."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import replace
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.fuzzy import Matcher
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from edgellm.contracts import MemoryPlan, ModelInfo, ModelLibrary, PullProgress
from edgellm_models.errors import EdgeLLMError
from edgellm_tui.live import bytes_text
from edgellm_tui.terminal_text import safe_line
from edgellm_tui.widgets.figures import count_text, meter, parameters_text, rate_text

OTHER_CELLS = 40
"""Of a line of the list beside the name and the quantization, with the gaps between."""
MAX_NAME_CELLS = 40
"""A name that is longer moves its own figures only."""

TWO_LINES_CELLS = 44
"""Under so many cells these say its size only, not its form."""


def fits_text(plan: MemoryPlan | None) -> tuple[str, str]:
    """Whether a model fits, in a word, and the style for it; the figures stand below the list."""
    if plan is None or not plan.available_bytes:
        return "?", "dim"
    return ("fits", "$success") if plan.fits else ("too big", "$error")


def plan_lines(plan: MemoryPlan) -> list[str]:
    """The estimate before loading."""
    return [
        f"weights {bytes_text(plan.weight_bytes)} + cache {bytes_text(plan.kv_bytes)} for "
        f"{count_text(plan.context)} tokens + rest {bytes_text(plan.workspace_bytes)} = "
        f"{bytes_text(plan.total_bytes)} of {bytes_text(plan.available_bytes)}"
    ]


def ways_out(plan: MemoryPlan) -> str:
    """What would make a model fit that does not."""
    room = plan.available_bytes - plan.weight_bytes - plan.workspace_bytes
    context = room // plan.kv_bytes_per_token if plan.kv_bytes_per_token > 0 else 0
    if context >= 256:
        return f"--ctx {context // 256 * 256} fits, --kv-dtype int8 holds about twice as much"
    return "a smaller quantization is needed: the weights alone take the memory"


def progress_text(progress: PullProgress, rate: float | None) -> str:
    """A pull in one line."""
    done, total = progress.done_bytes, progress.total_bytes
    if not total:
        return f"{progress.phase} {bytes_text(done) if done else ''}".strip()
    speed = f" · {bytes_text(int(rate))}/s" if rate else ""
    left = (total - done) / rate if rate else 0.0
    eta = f" · {rate_text(left)} s left" if rate and progress.phase == "fetching" else ""
    return (
        f"{progress.phase} {meter(done / total, 16)} {done / total:.0%} "
        f"{bytes_text(done)} / {bytes_text(total)}{speed}{eta}"
    )


class ModelsScreen(ModalScreen[str | None]):
    """Ends with the name of the model to open, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "leave", "Close", show=False, priority=True),
        Binding("down", "move(1)", "Down", show=False, priority=True),
        Binding("up", "move(-1)", "Up", show=False, priority=True),
        Binding("ctrl+d", "delete", "Delete", show=False, priority=True),
    ]
    KEYS_LINE = "Enter opens or fetches · Ctrl+D deletes · type to filter · Esc"

    def __init__(self, library: ModelLibrary, current: str) -> None:
        super().__init__()
        self._library = library
        self._current = current
        self._models: list[ModelInfo] = []
        self._shown: list[ModelInfo] = []
        self._plans: dict[str, MemoryPlan | None] = {}
        self._pulling: str | None = None
        self._stop_pull = False
        self._sure: str | None = None

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet picker") as sheet:
            sheet.border_title = "Models"
            yield Input(placeholder="Filter, or hf:owner/repo", compact=True)
            yield OptionList(compact=True)
            yield Static("", markup=False, id="estimate", classes="picker-line")
            yield Static("", markup=False, id="line", classes="picker-line")

    def on_mount(self) -> None:
        self._say(self.KEYS_LINE)
        self.query_one(Input).focus()
        self.run_worker(self._read(), group="read", exclusive=True, exit_on_error=False)

    def _say(self, text: str) -> None:
        self.query_one("#line", Static).update(safe_line(text))

    async def _read(self) -> None:
        def plan_all() -> None:
            for model in self._models:
                try:
                    self._plans[model.name] = self._library.plan(model.name)
                except EdgeLLMError:
                    self._plans[model.name] = None

        try:
            self._models = await asyncio.to_thread(lambda: list(self._library.list()))
            self._fill()  # whether they fit takes longer
            await asyncio.to_thread(plan_all)
        except EdgeLLMError as error:
            self._say(str(error))
        self._fill()

    @on(Input.Changed)
    def _typed(self) -> None:
        self._fill()

    def _fill(self) -> None:
        words = self.query_one(Input).value.strip()
        if words:
            matcher = Matcher(words)
            scored = [(matcher.match(model.name), model) for model in self._models]
            self._shown = [m for score, m in sorted(scored, key=lambda pair: -pair[0]) if score > 0]
        else:
            self._shown = sorted(self._models, key=lambda m: (m.name != self._current, not m.path, m.name))
        options = self.query_one(OptionList)
        at = options.highlighted or 0
        options.clear_options()
        options.add_options([Option(self._row(model)) for model in self._shown])
        if self._shown:
            options.highlighted = min(at, len(self._shown) - 1)
        self._estimate()

    def _row(self, model: ModelInfo) -> Content:
        mark = "● " if model.name == self._current else "  "
        names = max((len(m.name) for m in self._shown if len(m.name) <= MAX_NAME_CELLS), default=0)
        types = max((len(m.quantization) for m in self._shown), default=0)
        facts = [
            f"{parameters_text(model.parameters):>5}",
            f"{safe_line(model.quantization):<{types}}",
            f"{bytes_text(model.file_bytes) if model.file_bytes else '':>8}",
            f"{'open' if model.name == self._current else 'here' if model.path else 'to fetch':<8}",
        ]
        fits, style = fits_text(self._plans.get(model.name))
        if model.architecture and not model.has_chat_template:  # in the catalog, which knows
            fits, style = "no chat", "$warning"
        name = safe_line(model.name)
        cells = self.query_one(OptionList).content_size.width
        wide = cells >= OTHER_CELLS + names + types
        if not wide:
            facts = [fact.strip() for fact in facts[0 if cells >= TWO_LINES_CELLS else 2 :] if fact.strip()]
        return Content.assemble(
            (mark, "$primary"),
            (f"{name:<{names}}  " if wide else f"{name}\n    ", "bold"),
            ("  ".join(facts) if wide else " · ".join(facts), "dim"),
            "  ",
            (fits, style),
        )

    def on_resize(self) -> None:
        self.call_after_refresh(self._fill)

    @on(OptionList.OptionHighlighted)
    def _estimate(self) -> None:
        model = self._chosen()
        plan = self._plans.get(model.name) if model is not None else None
        text = ""
        if plan is not None:
            text = plan_lines(plan)[0] + ("" if plan.fits else f"; {ways_out(plan)}")
        self.query_one("#estimate", Static).update(text)

    def _chosen(self) -> ModelInfo | None:
        at = self.query_one(OptionList).highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    def action_move(self, by: int) -> None:
        options = self.query_one(OptionList)
        if self._shown:
            options.highlighted = max(0, min(len(self._shown) - 1, (options.highlighted or 0) + by))

    @on(Input.Submitted)
    def _entered(self, event: Input.Submitted) -> None:
        self._take(event.value.strip())

    @on(OptionList.OptionSelected)
    def _clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._take("")

    def _take(self, typed: str) -> None:
        # What was just fetched is opened by its name, which still stands there.
        named = next((m for m in self._models if m.name == typed), None)
        if typed.startswith("hf:") and named is None:
            self._pull(typed)
            return
        model = named or self._chosen()
        if model is None:
            return
        if model.name == self._current:
            self.dismiss(None)
            return
        if not model.path:
            self._pull(model.name)
            return
        if model.architecture and not model.has_chat_template:
            self._say(
                f"{model.name} is a base model: it goes on with a text (edgellm complete), it cannot chat"
            )
            return
        plan = self._plans.get(model.name)
        if plan is not None and plan.available_bytes and not plan.fits and self._sure != model.name:
            self._sure = model.name
            self._say(f"It does not fit: {ways_out(plan)}. Enter again tries all the same")
            return
        self.dismiss(model.name)

    # --- fetching ---

    def _pull(self, name: str) -> None:
        if self._pulling is not None:
            self._say(f"{self._pulling} is being fetched; Esc stops that")
            return
        self._pulling, self._stop_pull = name, False
        self.run_worker(self._pull_in_thread(name), group="pull", exit_on_error=False)

    async def _pull_in_thread(self, name: str) -> None:
        """Fetches in a thread; the newest progress is looked at four times a second."""
        newest: list[PullProgress] = []

        def work() -> None:
            pull = self._library.pull(name)
            with contextlib.closing(pull) if hasattr(pull, "close") else contextlib.nullcontext():  # type: ignore[type-var]
                for progress in pull:
                    newest[:] = [progress]
                    if self._stop_pull:
                        return

        task = asyncio.create_task(asyncio.to_thread(work))
        began, first = time.monotonic(), -1
        while not task.done():
            await asyncio.wait({task}, timeout=0.25)
            if newest and self.is_mounted:
                if first < 0:
                    began, first = time.monotonic(), newest[0].done_bytes
                elapsed = time.monotonic() - began
                rate = (newest[0].done_bytes - first) / elapsed if elapsed > 0.5 else None
                self._say(f"{name}: {progress_text(newest[0], rate)} · Esc stops, what has come is kept")
        self._pulling = None
        if not self.is_mounted:
            return
        error = task.exception()
        if error is not None:
            kind = "" if isinstance(error, EdgeLLMError) else f"{type(error).__name__}: "
            self._say(f"✗ {kind}{error} · Enter goes on where it stopped")
        elif self._stop_pull:
            self._say(f"{name}: stopped; Enter goes on where it stopped")
        else:
            await self._read()
            self._say(f"{name} is here: Enter opens it")

    def action_leave(self) -> None:
        if self._pulling is not None:
            self._stop_pull = True
            self._say(f"{self._pulling}: stopping …")
        else:
            self.dismiss(None)

    def on_unmount(self) -> None:
        self._stop_pull = True

    def action_delete(self) -> None:
        model = self._chosen()
        if model is None or not model.path:
            return
        if model.name == self._current:
            self._say("This model is open")
            return
        if self._sure != f"delete {model.name}":
            self._sure = f"delete {model.name}"
            self._say(f"Ctrl+D again deletes {model.name} ({bytes_text(model.file_bytes)})")
            return
        try:
            freed = self._library.remove(model.name)
        except EdgeLLMError as error:
            self._say(str(error))
            return
        self._say(f"Deleted {model.name}: {bytes_text(freed)} are free")
        self._models = [replace(m, path="") if m is model else m for m in self._models]
        self._fill()
        self.run_worker(self._after_delete(), group="read", exclusive=True, exit_on_error=False)

    async def _after_delete(self) -> None:
        await self._read()
