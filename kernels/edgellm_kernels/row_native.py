"""One token of one sequence through the native step program, with all that the call reads kept in place."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from edgellm_kernels.batch import KVStorage
from edgellm_kernels.native_structs import Pages, StepCall, Tables, fill_pages
from edgellm_kernels.step_native import NativeStep

BlockTables = tuple[tuple[int, ...], ...]
"""Per layer group, block ids by block index; -1 is a block that is not there any more."""


class NativeRow:
    """``NativeStep.run`` for a batch of one row whose logits are wanted, the same call again and again: a
    step writes a handful of integers instead of making a batch of tensors and structs.

    One call at a time.
    """

    def __init__(self, step: NativeStep, kv: Sequence[KVStorage]) -> None:
        assert len(kv) == step.num_groups
        self._step, self._kv = step, tuple(kv)
        self._block_size = kv[0].block_size
        self.logits = torch.empty((1, step.vocab_size), dtype=torch.float32)
        """[1, vocab]: those of the last call."""
        self._values = self.logits.numpy()[0]
        self._pages = (Pages * len(step.spec.places))()
        for (group, index, _, _), into in zip(step.spec.places, self._pages, strict=True):
            fill_pages(into, self._kv[group], index)
        # token id, position, row of the logits, then a slot for each group
        self._integers = (ctypes.c_int64 * (3 + len(kv)))()
        # first and last row, keys
        self._shorts = (ctypes.c_int32 * 3)(0, 1, 0)
        self._blocks = [(ctypes.c_int32 * pages.num_blocks)() for pages in kv]
        self._starts = [(ctypes.c_int32 * pages.num_blocks)() for pages in kv]
        self._known: BlockTables = ()
        integers, shorts = ctypes.addressof(self._integers), ctypes.addressof(self._shorts)
        self._tables = (Tables * len(kv))()
        for group, into in enumerate(self._tables):
            into.block_table = ctypes.addressof(self._blocks[group])
            into.block_positions = ctypes.addressof(self._starts[group])
            into.slot_mapping = integers + 8 * (3 + group)
            into.key_lengths = shorts + 8
        self._call = StepCall(
            token_ids=integers,
            pages=ctypes.addressof(self._pages),
            groups=ctypes.addressof(self._tables),
            logit_rows=integers + 16,
            logits=self.logits.data_ptr(),
            num_logit_rows=1,
        )
        self._call.rows.positions, self._call.rows.query_starts = integers + 8, shorts
        self._call.rows.sequences = self._call.rows.tokens = 1
        self._address = ctypes.addressof(self._call)

    def run(
        self, token_id: int, position: int, tables: BlockTables, embedded: torch.Tensor | None = None
    ) -> None:
        """The token at ``position`` of a sequence in these blocks; K and V go into the storage. ``embedded``:
        its row [1, hidden], for a program that does not embed ids itself."""
        if embedded is not None:
            assert embedded.dtype == torch.float32 and embedded.is_contiguous()
            self._call.embedded = embedded.data_ptr()
        if tables is not self._known:
            self._show(tables)
        index, offset = divmod(position, self._block_size)
        integers = self._integers
        integers[0], integers[1] = token_id, position
        for group in range(len(self._kv)):
            block = tables[group][index]
            assert block >= 0, f"position {position} has no block"
            integers[3 + group] = block * self._block_size + offset
        self._shorts[2] = position + 1
        self._step.call(self._address)

    def largest(self) -> tuple[float, int]:
        """The largest logit of the last call and its first place; NaN and its place where there is one."""
        place = int(self._values.argmax())
        return float(self._values[place]), place

    def _show(self, tables: BlockTables) -> None:
        for group in range(len(self._kv)):
            table = tables[group]
            live = [index for index, block in enumerate(table) if block >= 0]
            self._blocks[group][: len(live)] = [table[index] for index in live]
            self._starts[group][: len(live)] = [index * self._block_size for index in live]
            self._tables[group].max_blocks = len(live)
        self._known = tables
