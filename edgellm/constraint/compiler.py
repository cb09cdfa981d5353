"""Compiles constraints for one model: bounded in size and time, never to something weaker than was asked."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from edgellm.constraint.grammar import bad_constraint, to_grammar
from edgellm.constraint.matcher import Constraint
from edgellm.constraint.vocabulary import GrammarVocabulary
from edgellm.contracts import ConstraintSpec
from edgellm_models.errors import EdgeLLMError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

    from edgellm_models.tokenizer.base import Tokenizer

MAX_KEPT = 16
"""Compiled constraints that are kept for the next request with the same text."""
COMPILER_STACK_BYTES = 256 << 20
"""llguidance walks chains of rules by recursion; with 8 MiB it dies at some 900 linked definitions. This is
address space, not memory, and enough for every text that MAX_TEXT_BYTES lets in."""

_Result = TypeVar("_Result")
_stack_size_lock = threading.Lock()


def _limits() -> LLParserLimits:
    """What one constraint may cost: about 0.7 s and 100 MB where the worst grammar takes both."""
    from llguidance import LLParserLimits

    return LLParserLimits(initial_lexer_fuel=250_000, max_lexer_states=50_000, verbose_errors=False)


def check_constraint(spec: ConstraintSpec) -> None:
    """BadInputError when no model could keep to the constraint; needs no model, so it can be told early."""
    from llguidance import LLMatcher

    def check() -> None:
        is_error, messages = LLMatcher.validate_grammar_with_warnings(to_grammar(spec), limits=_limits())
        if is_error:
            raise bad_constraint(spec, messages[0])

    _with_deep_stack(check)


class ConstraintCompiler:
    """Makes constraints for one tokenizer. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size``: the model's number of logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()  # held for moments only: the engine's thread takes it too
        self._build_lock = threading.Lock()
        self._vocabulary: GrammarVocabulary | None = None
        self._kept: OrderedDict[ConstraintSpec, Constraint] = OrderedDict()

    def compile(self, spec: ConstraintSpec) -> Constraint:
        """A constraint at its beginning. BadInputError with the grammar's own words when it cannot be used,
        or when no text of this vocabulary meets it."""
        found = self._find(spec)
        if found is not None:
            return found
        with self._build_lock:
            found = self._find(spec)
            if found is not None:
                return found
            built = _with_deep_stack(lambda: self._build(spec))
            with self._lock:
                self._kept[spec] = built
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
                return built.fork()

    def _find(self, spec: ConstraintSpec) -> Constraint | None:
        with self._lock:
            found = self._kept.get(spec)
            if found is None:
                return None
            self._kept.move_to_end(spec)
            return found.fork()

    def _build(self, spec: ConstraintSpec) -> Constraint:
        from llguidance import LLMatcher

        if self._vocabulary is None:
            self._vocabulary = GrammarVocabulary(self._tokenizer, self._vocab_size)
        matcher = LLMatcher(self._vocabulary.ll_tokenizer, to_grammar(spec), log_level=0, limits=_limits())
        if matcher.is_error():
            raise bad_constraint(spec, matcher.get_error())
        constraint = Constraint(matcher, self._vocabulary)
        try:
            constraint.mask()  # what can never begin is refused here, not in the middle of an answer
        except EdgeLLMError as error:
            raise bad_constraint(spec, f"no answer can meet it: {error}") from None
        return constraint


def _with_deep_stack(work: Callable[[], _Result]) -> _Result:
    """The result of ``work`` in a thread with a stack that no permitted grammar overflows."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append((None, error))

    with _stack_size_lock:
        before = threading.stack_size(COMPILER_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="edgellm-constraint", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    value, error = outcome[0]
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]
