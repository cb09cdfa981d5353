"""A few tokens of one sequence through the native step program; what the call reads is kept in place."""

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
    """``NativeStep.run`` for a row of one sequence, or a few behind each other, whose logits are all wanted:
    the same call again and again. A step writes a handful of integers instead of making a batch of tensors
    and structs.

    One call at a time.
    """

    def __init__(self, step: NativeStep, kv: Sequence[KVStorage], max_rows: int = 1) -> None:
        """``max_rows``: of one call."""
        assert len(kv) == step.num_groups
        self._step, self._kv = step, tuple(kv)
        self._block_size, self._max_rows = kv[0].block_size, max_rows
        self._pages = (Pages * len(step.spec.places))()
        for (group, index, _, _), into in zip(step.spec.places, self._pages, strict=True):
            fill_pages(into, self._kv[group], index)
        # token ids, positions, rows of the logits, then the slots of each group
        self._integers = (ctypes.c_int64 * ((3 + len(kv)) * max_rows))()
        self._integers[2 * max_rows : 3 * max_rows] = list(range(max_rows))
        # first row, number of rows, keys
        self._shorts = (ctypes.c_int32 * 3)()
        self._blocks = [(ctypes.c_int32 * pages.num_blocks)() for pages in kv]
        self._starts = [(ctypes.c_int32 * pages.num_blocks)() for pages in kv]
        self._known: BlockTables = ()
        integers, shorts = ctypes.addressof(self._integers), ctypes.addressof(self._shorts)
        self._tables = (Tables * len(kv))()
        for group, into in enumerate(self._tables):
            into.block_table = ctypes.addressof(self._blocks[group])
            into.block_positions = ctypes.addressof(self._starts[group])
            into.slot_mapping = integers + 8 * (3 + group) * max_rows
            into.key_lengths = shorts + 8
        self._call = StepCall(
            token_ids=integers,
            pages=ctypes.addressof(self._pages),
            groups=ctypes.addressof(self._tables),
            logit_rows=integers + 16 * max_rows,
        )
        self._call.rows.positions, self._call.rows.query_starts = integers + 8 * max_rows, shorts
        self._call.rows.sequences = 1
        self._address = ctypes.addressof(self._call)
        self._buffer = torch.empty((0, step.vocab_size), dtype=torch.float32)
        self._take(1)

    def run(
        self,
        token_ids: Sequence[int],
        position: int,
        tables: BlockTables,
        embedded: torch.Tensor | None = None,
        skipped: ctypes.Array[ctypes.c_char] | None = None,
    ) -> None:
        """The tokens from ``position`` on of a sequence in these blocks; K and V go into the storage.
        ``embedded``: their rows [n, hidden], for a program that does not embed ids itself. ``skipped``: see
        NativeStep.run."""
        if embedded is not None:
            assert embedded.dtype == torch.float32 and embedded.is_contiguous()
            self._call.embedded = embedded.data_ptr()
        self._call.skipped = None if skipped is None else ctypes.addressof(skipped)
        if tables is not self._known:
            self._show(tables)
        if len(token_ids) != self._call.num_logit_rows:
            self._take(len(token_ids))
        integers, most, size = self._integers, self._max_rows, self._block_size
        for row, token_id in enumerate(token_ids):
            at = position + row
            index, offset = divmod(at, size)
            integers[row], integers[most + row] = token_id, at
            for group in range(len(self._kv)):
                block = tables[group][index]
                assert block >= 0, f"position {at} has no block"
                integers[(3 + group) * most + row] = block * size + offset
        self._shorts[2] = position + len(token_ids)
        self._step.call(self._address)

    def largest(self, row: int = 0) -> tuple[float, int]:
        """The largest logit of a row of the last call and its first place; NaN and its place where there is
        one."""
        values = self._values[row]
        place = int(values.argmax())
        return float(values[place]), place

    def _take(self, rows: int) -> None:
        assert rows <= self._max_rows, f"{rows} rows where {self._max_rows} are the most"
        if rows > self._buffer.shape[0]:
            self._buffer = torch.empty((rows, self._step.vocab_size), dtype=torch.float32)
        self.logits = self._buffer[:rows]
        """[rows, vocab]: those of the last call."""
        self._values = self.logits.numpy()
        self._call.logits = self._buffer.data_ptr()
        self._call.rows.tokens = self._call.num_logit_rows = self._shorts[1] = rows

    def _show(self, tables: BlockTables) -> None:
        for group in range(len(self._kv)):
            table = tables[group]
            live = [index for index, block in enumerate(table) if block >= 0]
            self._blocks[group][: len(live)] = [table[index] for index in live]
            self._starts[group][: len(live)] = [index * self._block_size for index in live]
            self._tables[group].max_blocks = len(live)
        self._known = tables
