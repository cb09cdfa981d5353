"""TokenEvents of the engine to ChatEvents for a person."""

from __future__ import annotations

from edgellm.contracts import (
    ChatEvent,
    Delta,
    DraftCounts,
    Finished,
    FinishReason,
    NoticeEvent,
    Prefill,
    RequestTimings,
    TokenEvent,
    Usage,
)


class ChatEventMaker:
    """Turns the events of one request, in order, into chat events; nothing is held back."""

    def __init__(self, prompt_tokens: int, sample: int = 0) -> None:
        """``prompt_tokens`` is the length of the request's prompt, ``sample`` the one of its answers to
        follow."""
        self._prompt_tokens = prompt_tokens
        self._sample = sample
        self._prefilled = -1
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self.finished = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every id of the answer so far, its end token included."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        return "".join(self._text)

    def push(self, event: TokenEvent) -> list[ChatEvent]:
        """What a person is to be told of this event; nothing after the answer has finished."""
        if self.finished or event.sample != self._sample:
            return []
        made: list[ChatEvent] = []
        if event.prefill_done is not None and event.prefill_done != self._prefilled:
            self._prefilled = event.prefill_done
            cached = event.usage.cached_tokens if event.usage is not None else 0
            made.append(Prefill(event.prefill_done, self._prompt_tokens, cached))
        if event.notice is not None:
            made.append(NoticeEvent(event.notice))
        self._token_ids.extend(event.token_ids)
        self._text.append(event.text)
        if event.text or event.token_ids:
            made.append(Delta(text=event.text, token_ids=event.token_ids, logprobs=event.logprobs))
        if event.finish_reason is not None or event.error is not None:
            made.append(self._end(event))
        return made

    def _end(self, event: TokenEvent) -> Finished:
        self.finished = True
        reason = FinishReason.ERROR if event.error is not None else event.finish_reason
        assert reason is not None
        return Finished(
            reason=reason,
            usage=event.usage or Usage(self._prompt_tokens, 0, len(self._token_ids)),
            timings=event.timings or RequestTimings(0.0, 0.0, 0.0),
            draft=event.draft or DraftCounts(),
            seed=event.seed or 0,
            error=event.error,
        )
