"""From a model's shape, a machine and a wish to a Plan: what fits, how fast it can be, what pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgellm.cache.kv_sizes import pool_bytes, sequence_kv_bytes
from edgellm.planning import roofline, speculation
from edgellm.planning.shape import ModelShape
from edgellm.planning.workspace import NATIVE, PREFILL_CHUNK, process_bytes, workspace_bytes

BLOCK_SIZE = 16
LARGEST_BATCH = 1 << 20


@dataclass(frozen=True)
class Machine:
    """What is known of the machine; None where it is not."""

    memory_bytes: int | None = None
    """Memory that may be used, already multiplied with the share that is to be used."""
    bandwidth_gb_s: float | None = None
    tflops: float | None = None
    holds_process: bool = False
    """The program itself lives in that memory too: the CPU's."""


@dataclass(frozen=True)
class Wish:
    """What is to be run."""

    context: int
    batch: int = 1
    kv_dtype: str = "f16"
    kept: int | None = None
    """Positions that lossy eviction leaves at most in layers without a window."""
    chunk: int = PREFILL_CHUNK
    """Tokens of a prompt that run at once."""
    lookahead: int = 0
    """Tokens that a sequence may draft: windows keep as many more positions, on both sides."""
    kernels: str = NATIVE
    """native or torch: how much they compute at once. Cards' are counted as native."""
    acceptance: float | None = None
    draft_cost: float | None = None
    draft_tokens: int = 4
    verify_cost: float = 1.0
    prompt_tokens: int = 512


@dataclass(frozen=True)
class SpeculationPlan:
    """What drafting would bring with the costs that were stated."""

    draft_tokens: int
    draft_cost: float
    break_even_acceptance: float | None
    """None: no acceptance pays."""
    acceptance: float | None
    tokens_per_round: float | None
    speed_up: float | None
    best_draft_tokens: int | None
    best_speed_up: float | None


@dataclass(frozen=True)
class Plan:
    """Everything in bytes, tokens and seconds; None where the machine's figure is not known."""

    context: int
    batch: int
    kv_dtype: str
    weight_bytes: int
    """Weights in memory."""
    kv_bytes_per_token: int
    """Of one position that all layers keep."""
    kv_bytes_per_sequence: int
    """At the whole context, in whole blocks, what lies behind windows freed."""
    kv_bytes: int
    """Of the whole cache for the batch, as the engine allocates it: whole blocks, windows with room for a
    chunk of a prompt and for drafts, unquantized tails."""
    workspace_bytes: int
    process_bytes: int
    """Of the program before any model, torch above all, and its tokenizer: beside the three on a CPU."""
    loading_bytes: int
    """The largest tensor twice, as the file has it and packed: a peak that loading may have."""
    memory_bytes: int | None
    largest_context: int | None
    """For the batch; at most the trained one, 0 where nothing fits."""
    largest_batch: int | None
    """At the context."""
    step_weight_bytes: int
    step_kv_bytes: int
    decode_ceiling: float | None
    """Tokens per second of the whole batch, at the whole context."""
    decode_ceiling_empty: float | None
    """The same for the first tokens, before there is KV to read."""
    usual_decode: tuple[float, float] | None
    kv_passes_weights_context: int | None
    """Tokens per sequence from which KV outweighs the weights in a step, at this batch; None: it never does
    within the trained context."""
    kv_passes_weights_batch: int | None
    """Sequences of the whole context from which it does; None: a window bounds it to nothing."""
    compute_bound_batch: float | None
    first_token_floor_s: float | None
    """The prompt's arithmetic, or one reading of the weights, whichever takes longer."""
    prompt_tokens: int
    speculation: SpeculationPlan | None
    lever: str
    holds_process: bool = False
    """``process_bytes`` lie in that memory too."""

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the total, with the program where it lives there too, is at most the memory."""
        return None if self.memory_bytes is None else self.needed_bytes <= self.memory_bytes

    @property
    def needed_bytes(self) -> int:
        """The total, and the program's own bytes where they lie in the same memory."""
        return self.total_bytes + (self.process_bytes if self.holds_process else 0)


def make_plan(shape: ModelShape, wish: Wish, machine: Machine, held_bytes: int | None = None) -> Plan:
    """The plan for ``wish.batch`` sequences of ``wish.context`` tokens.

    ``held_bytes`` are the weights in memory where they are not held as in the file.
    """
    context = min(wish.context, shape.context_length)
    weights = shape.weight_bytes if held_bytes is None else held_bytes
    workspace = _workspace(shape, wish, context, wish.batch)
    process = process_bytes(shape, shape.has_merges, kernels=wish.kernels)
    per_sequence = _kv(shape, context, wish.kv_dtype)
    step_kv = wish.batch * per_sequence
    step = shape.step_bytes + step_kv
    ceiling = empty = usual = compute = None
    if machine.bandwidth_gb_s is not None:
        ceiling = roofline.decode_ceiling(step, machine.bandwidth_gb_s, wish.batch)
        empty = roofline.decode_ceiling(shape.step_bytes, machine.bandwidth_gb_s, wish.batch)
        usual = (ceiling * roofline.USUAL_SHARES[0], ceiling * roofline.USUAL_SHARES[1])
        if machine.tflops is not None:
            bits = 8 * shape.step_bytes / shape.step_parameters
            compute = roofline.compute_bound_batch(bits, machine.tflops, machine.bandwidth_gb_s)
    largest_context = largest_batch = None
    if machine.memory_bytes is not None:
        room = machine.memory_bytes - weights - (process if machine.holds_process else 0)

        def fits(context: int, batch: int) -> bool:
            kv = _pool(shape, wish, context, batch)
            return kv + _workspace(shape, wish, context, batch) <= room

        largest_context = _largest(shape.context_length, lambda tokens: fits(tokens, wish.batch))
        largest_batch = _largest(LARGEST_BATCH, lambda batch: fits(context, batch))
    plan = Plan(
        context=context,
        batch=wish.batch,
        kv_dtype=wish.kv_dtype,
        weight_bytes=weights,
        kv_bytes_per_token=sequence_kv_bytes(
            [None] * shape.num_layers, shape.num_kv_heads, shape.head_dim, 1, wish.kv_dtype
        ),
        kv_bytes_per_sequence=per_sequence,
        kv_bytes=_pool(shape, wish, context, wish.batch),
        workspace_bytes=workspace,
        process_bytes=process,
        loading_bytes=2 * shape.largest_bytes,
        memory_bytes=machine.memory_bytes,
        largest_context=largest_context,
        largest_batch=largest_batch,
        step_weight_bytes=shape.step_bytes,
        step_kv_bytes=step_kv,
        decode_ceiling=ceiling,
        decode_ceiling_empty=empty,
        usual_decode=usual,
        kv_passes_weights_context=_passing_context(shape, wish),
        kv_passes_weights_batch=-(-shape.step_bytes // per_sequence) if per_sequence else None,
        compute_bound_batch=compute,
        first_token_floor_s=_first_token_floor(shape, wish, machine),
        prompt_tokens=wish.prompt_tokens,
        speculation=_speculation(wish),
        lever="",
        holds_process=machine.holds_process,
    )
    return _with_lever(plan)


def _kv(shape: ModelShape, tokens: int, kv_dtype: str) -> int:
    return sequence_kv_bytes(shape.windows, shape.num_kv_heads, shape.head_dim, tokens, kv_dtype, BLOCK_SIZE)


def _pool(shape: ModelShape, wish: Wish, context: int, batch: int) -> int:
    """Bytes of the cache that the engine allocates for ``batch`` sequences of ``context`` tokens."""
    return pool_bytes(
        shape.windows,
        shape.num_kv_heads,
        shape.head_dim,
        context,
        wish.kv_dtype,
        wish.chunk,
        BLOCK_SIZE,
        kept=wish.kept,
        num_sequences=batch,
        lookahead=wish.lookahead,
        num_contexts=batch,
    )


def _workspace(shape: ModelShape, wish: Wish, context: int, batch: int) -> int:
    return workspace_bytes(
        shape,
        batch,
        context,
        wish.chunk,
        kernels=wish.kernels,
        drafted=wish.lookahead,
        kv_dtype=wish.kv_dtype,
    )


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to ``most`` that fits, where all smaller ones do; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _passing_context(shape: ModelShape, wish: Wish) -> int | None:
    """The least context, in whole blocks, at which the batch's KV is more than the weights of a step."""
    if wish.batch * _kv(shape, shape.context_length, wish.kv_dtype) <= shape.step_bytes:
        return None
    low, high = 1, shape.context_length
    while low < high:
        middle = (low + high) // 2
        if wish.batch * _kv(shape, middle, wish.kv_dtype) > shape.step_bytes:
            high = middle
        else:
            low = middle + 1
    return low


def _first_token_floor(shape: ModelShape, wish: Wish, machine: Machine) -> float | None:
    floors = []
    if machine.bandwidth_gb_s is not None:
        floors.append(roofline.step_seconds(shape.step_bytes, machine.bandwidth_gb_s))
    if machine.tflops is not None:
        floors.append(roofline.prefill_seconds(shape.step_parameters, wish.prompt_tokens, machine.tflops))
    return max(floors, default=None)


def _speculation(wish: Wish) -> SpeculationPlan | None:
    if wish.draft_cost is None and wish.acceptance is None:
        return None
    cost = 0.0 if wish.draft_cost is None else wish.draft_cost
    tokens = gain = best = best_gain = None
    if wish.acceptance is not None:
        tokens = speculation.expected_tokens(wish.acceptance, wish.draft_tokens)
        gain = speculation.speed_up(wish.acceptance, wish.draft_tokens, cost, wish.verify_cost)
        best, best_gain = speculation.best_draft_tokens(wish.acceptance, cost, wish.verify_cost)
    return SpeculationPlan(
        draft_tokens=wish.draft_tokens,
        draft_cost=cost,
        break_even_acceptance=speculation.break_even_acceptance(wish.draft_tokens, cost, wish.verify_cost),
        acceptance=wish.acceptance,
        tokens_per_round=tokens,
        speed_up=gain,
        best_draft_tokens=best,
        best_speed_up=best_gain,
    )


def _with_lever(plan: Plan) -> Plan:
    return replace(plan, lever=_lever(plan))


def _lever(plan: Plan) -> str:
    """One line: what to change first. What does not fit comes before what could be faster."""
    if plan.memory_bytes is not None and not plan.fits:
        over = (plan.needed_bytes - plan.memory_bytes) / 1e9
        if plan.needed_bytes - plan.kv_bytes > plan.memory_bytes:
            return f"weight bits: {over:.2f} GB too much, and the weights alone do not fit"
        return f"KV type: {over:.2f} GB too much; int8 KV or a smaller context makes room"
    if plan.compute_bound_batch is not None and plan.batch >= plan.compute_bound_batch:
        return f"none of them: from batch {plan.compute_bound_batch:.0f} on arithmetic takes the time"
    if plan.step_kv_bytes > plan.step_weight_bytes:
        return "KV type: a step reads more KV than weights; int8 KV or a window speeds it up most"
    if plan.speculation is not None and (plan.speculation.speed_up or 0.0) >= 1.05:
        return f"speculation: {plan.speculation.speed_up:.2f} times with the stated acceptance and costs"
    if plan.batch == 1:
        return (
            "weight bits, or batch: a step reads mostly weights, so fewer bits speed one sequence up and "
            "more sequences share the reading"
        )
    share = plan.step_weight_bytes / (plan.step_weight_bytes + plan.step_kv_bytes)
    return f"batch: {share:.0%} of what a step reads are weights, which more sequences would share"
