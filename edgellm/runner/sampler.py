"""Draws the next token of each sequence from its logits.

The order: repetition, presence and frequency penalties; logit bias; the token mask of a constraint;
temperature; top-k; typical-p; top-p; min-p; then Gumbel-max, argmax(score + noise), which draws from the
softmax of what is left (candidates.py, noise.py). The edges of the filters are in filters.py, those of
penalties and biases in penalties.py. Temperature 0 takes the largest logit after penalties, bias and mask,
of equal ones the lowest id. Arithmetic after the logits is f64. Log-probabilities are those of the raw
softmax, which none of this changes (logprobs.py).

So the mask has the last word on what may be drawn, and the filters count only what it allows. A row whose
logits hold NaN or +inf, or nothing above -inf, is an error of its own sequence only; so is one in which bias
and mask leave nothing.

Drafted tokens are verified by drawing: behind each that was drawn as drafted the next row is drawn from
(speculative/acceptance.py). Penalties count what was drawn before, so nothing has to be taken back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from edgellm.contracts import SequenceStart, TokenLogprob
from edgellm.runner.candidates import Candidates
from edgellm.runner.device_draws import can_draw, draw_many
from edgellm.runner.logprobs import raw_logprobs
from edgellm.runner.noise import row_key, uniform
from edgellm.runner.penalties import LogitAdjuster
from edgellm.runner.token_mask import unpack_masks
from edgellm.speculative.acceptance import COUPLED, REJECTION, verified_run
from edgellm_kernels.batch import sent
from edgellm_kernels.ops import largest


@dataclass(frozen=True)
class Draw:
    """One drawn token, or why none could be drawn."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class SamplerState:
    """What the sampler keeps of one sequence."""

    def __init__(self, start: SequenceStart, vocab_size: int) -> None:
        self.sampling = start.sampling
        self.seed = start.seed
        self.sample = start.sample
        self.logprobs = start.logprobs
        self.prompt_logprobs = start.prompt_logprobs
        self.prompt_token_ids = start.prompt_token_ids if start.prompt_logprobs is not None else ()
        self.adjuster = LogitAdjuster(start.sampling, start.prompt_token_ids, vocab_size)

    @property
    def is_plain_greedy(self) -> bool:
        """The largest logit that is allowed wins: no row of its own needs computing."""
        return self.sampling.temperature == 0 and self.adjuster.is_idle


class Sampler:
    """Sampling states by sequence id, and the drawing."""

    def __init__(
        self,
        vocab_size: int,
        *,
        f16_kv: bool = False,
        spec_rule: str = COUPLED,
        on_device: bool | None = None,
    ) -> None:
        """``spec_rule``: how drafted tokens are accepted (speculative/acceptance.py). ``on_device``: rows
        that it suits are drawn together, where the logits lie; None does that on a GPU."""
        self._on_device = on_device
        self._f16_kv = f16_kv
        self._vocab_size = vocab_size
        self._spec_rule = spec_rule
        self._states: dict[int, SamplerState] = {}
        self._widened: torch.Tensor | None = None
        """[vocab] f64: the row that is drawn from, overwritten by every step of that."""

    def start(self, start: SequenceStart) -> None:
        """Makes the state of a sequence. BadInputError when its settings do not fit the vocabulary."""
        self._states[start.sequence_id] = SamplerState(start, self._vocab_size)

    def end(self, sequence_id: int) -> None:
        """Forgets a sequence."""
        self._states.pop(sequence_id, None)

    def takes_largest(self, sequence_id: int) -> bool:
        """Whether a draw from a row without a mask is its largest logit, and nothing more is told of it."""
        state = self._states[sequence_id]
        return state.logprobs is None and state.is_plain_greedy

    def sample(
        self,
        logits: torch.Tensor,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        masks: Sequence[bytes | None] = (),
    ) -> list[Draw]:
        """One draw per row of ``logits`` [rows, vocab] f32.

        ``positions`` are the absolute positions of the drawn tokens, which the penalties count from then on;
        ``masks``, none or one per row, say which ids may be drawn (PlannedSequence.token_masks).
        """
        drafts: list[Sequence[int]] = [()] * len(sequence_ids)
        return [run[0] for run in self.verify(logits, sequence_ids, positions, drafts, masks)]

    def verify(
        self,
        logits: torch.Tensor,
        sequence_ids: Sequence[int],
        positions: Sequence[int],
        drafts: Sequence[Sequence[int]],
        masks: Sequence[bytes | None] = (),
    ) -> list[list[Draw]]:
        """The draws of each sequence: 1 to len(draft) + 1, all but the last as drafted, or a lone error.

        ``logits`` [rows, vocab] f32 hold one row for each sequence's next token and one behind each of its
        drafted tokens, in order, as ``masks`` do; ``positions`` are those of the next tokens. A row that
        cannot be drawn from is an error only where nothing was drawn before it: else the step ends there.
        """
        best, best_ids = largest(logits)  # of equal logits the first; NaN when there is one
        usable = [math.isfinite(value) for value in best.tolist()]
        greedy_ids: list[int | None] = best_ids.tolist()
        allowed, mask_rows = self._allowed(masks)
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        owners = [state for state, draft in zip(states, drafts, strict=True) for _ in range(len(draft) + 1)]
        masked_greedy = [row for row in mask_rows if owners[row].is_plain_greedy]
        if masked_greedy:
            # One argmax for all of them, as for the rows without a mask above.
            keep = allowed[[mask_rows[row] for row in masked_greedy]].to(logits.device)
            permitted = torch.where(keep, logits[masked_greedy], float("-inf"))
            best, best_ids = permitted.max(dim=-1)
            found = zip(masked_greedy, best.tolist(), best_ids.tolist(), strict=True)
            for row, value, token_id in found:
                greedy_ids[row] = token_id if value > float("-inf") else None
        draws: list[Draw | None] = [None] * len(owners)
        row_positions = [
            at + i for at, draft in zip(positions, drafts, strict=True) for i in range(len(draft) + 1)
        ]
        there = {}
        if self._draws_there(logits) and (self._spec_rule == COUPLED or not any(drafts)):
            rows = [row for row, fine in enumerate(usable) if fine and row not in mask_rows]
            rows = [row for row in rows if can_draw(owners[row])]
            ids = draw_many(logits, rows, [owners[row] for row in rows], [row_positions[row] for row in rows])
            there = dict(zip(rows, ids.tolist(), strict=True))

        def draw(state: SamplerState, row: int, position: int, drafted: int | None) -> int | None:
            """The token of a row; None, and the reason in ``draws``, where there is none."""
            if not usable[row]:
                draws[row] = Draw(error=_describe_bad(logits[row], position, self._f16_kv))
                return None
            if state.is_plain_greedy:
                token_id = greedy_ids[row]
            elif row in there:
                token_id = there[row]
            else:
                mask = allowed[mask_rows[row]] if row in mask_rows else None
                token_id = self._draw(logits[row], state, position, mask, drafted)
            if token_id is None:
                what = "logit_bias" if row not in mask_rows else "logit_bias and the constraint"
                error = f"no token is left to draw at position {position}: {what} removed all"
                draws[row] = Draw(error=error)
                return None
            state.adjuster.observe(token_id)
            draws[row] = Draw(token_id)
            return token_id

        first, spans = 0, []
        for state, position, draft in zip(states, positions, drafts, strict=True):

            def draw_at(
                index: int,
                state: SamplerState = state,
                position: int = position,
                draft: Sequence[int] = draft,
                first: int = first,
            ) -> int | None:
                drafted = draft[index] if index < len(draft) else None
                return draw(state, first + index, position + index, drafted)

            count = len(verified_run(draft, draw_at))
            spans.append((first, max(1, count)))
            first += len(draft) + 1
        self._add_logprobs(draws, logits, owners)
        return [[one for one in draws[begin : begin + count] if one is not None] for begin, count in spans]

    def draws_late(self, sequence_id: int) -> bool:
        """Whether ``draw_late`` can draw for a sequence, from rows without a mask or a draft."""
        state = self._states[sequence_id]
        return state.logprobs is None and (state.is_plain_greedy or can_draw(state))

    def draw_late(
        self, logits: torch.Tensor, sequence_ids: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``sample`` draws, without a wait for the device: ids int64 [rows] and the largest logits f32
        [rows], both where the logits lie. A row whose largest logit is not finite has no id: see ``late``."""
        best, ids = largest(logits)
        states = [self._states[sequence_id] for sequence_id in sequence_ids]
        rows = [row for row, state in enumerate(states) if not state.is_plain_greedy]
        if rows:
            drawn = draw_many(logits, rows, [states[row] for row in rows], [positions[row] for row in rows])
            places = sent(torch.tensor(rows), logits.device)
            ids = drawn if len(rows) == len(states) else ids.index_copy(0, places, drawn)
        # The step behind one that went wrong runs before that is known.
        return ids.clamp(0, self._vocab_size - 1), best

    def late(self, token_id: int, largest_logit: float, position: int) -> Draw:
        """The draw of a row of ``draw_late``, once its id and largest logit are known."""
        if math.isfinite(largest_logit):
            return Draw(token_id)
        what = {"nan": "NaN", "inf": "infinite values"}.get(f"{largest_logit}", "nothing but -inf")
        return Draw(error=_bad(f"{what} in {self._vocab_size} logits", position, self._f16_kv))

    def guess(
        self, logits: torch.Tensor, sequence_ids: Sequence[int], positions: Sequence[int]
    ) -> list[int | None]:
        """What each row [rows, vocab] of a drafting model would draw, with the noise of the position; None
        where it is of no use. Nothing is counted. Under the rejection rule the likeliest token: drafts are
        taken as certain there, and drawn ones would not be independent of the noise that judges them."""
        best, best_ids = largest(logits)
        found: list[int | None] = []
        for row, (sequence_id, position) in enumerate(zip(sequence_ids, positions, strict=True)):
            state = self._states[sequence_id]
            if not math.isfinite(float(best[row])):
                found.append(None)
            elif state.is_plain_greedy or self._spec_rule == REJECTION:
                found.append(int(best_ids[row]))
            else:
                found.append(self._draw(logits[row], state, position, None, None))
        return found

    def confidences(
        self, logits: torch.Tensor, sequence_ids: Sequence[int], token_ids: Sequence[int | None]
    ) -> list[float]:
        """The probability that a drafting model gives each token that ``guess`` found, at its sequence's
        temperature (1 where that is 0); 0 where it found none."""
        found = []
        for row, (sequence_id, token_id) in enumerate(zip(sequence_ids, token_ids, strict=True)):
            temperature = self._states[sequence_id].sampling.temperature or 1.0
            if token_id is None:
                found.append(0.0)
                continue
            scores = logits[row] - logits[row, token_id]
            found.append(1.0 / max(1.0, float(scores.div_(temperature).exp_().sum())))
        return found

    def score_prompt(
        self, logits: torch.Tensor, sequence_id: int, start_position: int
    ) -> tuple[tuple[TokenLogprob, ...], str | None]:
        """Logprobs of the prompt's tokens behind those at ``start_position`` and on, whose rows ``logits``
        are, and what is wrong with the rows, if anything. A row behind which the prompt ends scores
        nothing.
        """
        state = self._states[sequence_id]
        token_ids = state.prompt_token_ids[start_position + 1 : start_position + 1 + logits.shape[0]]
        rows = logits[: len(token_ids)]
        if state.prompt_logprobs is None or not token_ids:
            return (), None
        usable = torch.isfinite(rows.max(dim=-1).values)
        if not bool(usable.all()):
            row = int(torch.argmin(usable.to(torch.uint8)))
            return (), _describe_bad(rows[row], start_position + 1 + row, self._f16_kv)
        return tuple(raw_logprobs(rows, token_ids, state.prompt_logprobs)), None

    def _draws_there(self, logits: torch.Tensor) -> bool:
        return logits.device.type != "cpu" if self._on_device is None else self._on_device

    def _allowed(self, masks: Sequence[bytes | None]) -> tuple[torch.Tensor, dict[int, int]]:
        """[masked rows, vocab] bool of what may be drawn, and by row of the logits its place there."""
        given = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
        if not given:
            return torch.empty((0, self._vocab_size), dtype=torch.bool), {}
        unpacked = unpack_masks([mask for _, mask in given], self._vocab_size)
        return unpacked, {row: index for index, (row, _) in enumerate(given)}

    def _draw(
        self,
        logits: torch.Tensor,
        state: SamplerState,
        position: int,
        allowed: torch.Tensor | None,
        drafted: int | None,
    ) -> int | None:
        if self._widened is None:
            with torch.inference_mode(False):
                self._widened = torch.empty(self._vocab_size, dtype=torch.float64)
        adjusted = state.adjuster.apply(self._widened.copy_(logits))
        if allowed is not None:
            adjusted.masked_fill_(~allowed, float("-inf"))
        if not bool(torch.isfinite(adjusted.max())):
            return None
        if state.sampling.temperature == 0:
            return int(torch.argmax(adjusted))
        left = Candidates(adjusted, state.sampling)
        key = row_key(state.seed, state.sample, position)
        if drafted is not None and self._spec_rule == REJECTION:
            # Drafts are fixed tokens, q = 1: kept with probability p, and the residual is p without it.
            kept = left.probability(drafted)
            if kept > 0 and (uniform(key, drafted) < kept or not left.remove(drafted)):
                return drafted
        return left.draw(key)

    def _add_logprobs(
        self, draws: list[Draw | None], logits: torch.Tensor, owners: Sequence[SamplerState]
    ) -> None:
        """Fills in the logprobs of the drawn rows that ask for them, those that ask for as many together."""
        rows_by_top: dict[int, list[int]] = {}
        drawn = {row: one for row, one in enumerate(draws) if one is not None and one.error is None}
        for row in drawn:
            top = owners[row].logprobs
            if top is not None:
                rows_by_top.setdefault(top, []).append(row)
        for top, rows in rows_by_top.items():
            ids = [drawn[row].token_id for row in rows]
            for row, logprob in zip(rows, raw_logprobs(logits[rows], ids, top), strict=True):
                draws[row] = replace(drawn[row], logprob=logprob)


def _describe_bad(row: torch.Tensor, position: int, f16_kv: bool = False) -> str:
    nans, infinite = int(torch.isnan(row).sum()), int(torch.isposinf(row).sum())
    what = f"{nans} NaN and {infinite} infinite values" if nans or infinite else "nothing but -inf"
    return _bad(f"{what} in {row.numel()} logits", position, f16_kv)


def _bad(what: str, position: int, f16_kv: bool) -> str:
    why = "damaged weights?"
    if f16_kv:
        why = "the KV cache is f16, which ends at 65504: try --kv-dtype bf16 or f32; else damaged weights?"
    return f"the model computed {what} at position {position}; {why}"
