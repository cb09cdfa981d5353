"""The static inputs of a decode step: one copy from the host fills them, padding included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from edgellm_kernels.batch import ForwardBatch, GroupTables


@dataclass(frozen=True)
class StepSize:
    """What the buffers hold room for."""

    sequences: int
    queries: int
    """Token rows of a sequence."""
    widths: tuple[int, ...]
    """Per layer group, blocks of a sequence's table."""

    @property
    def rows(self) -> int:
        return self.sequences * self.queries


class _Packed:
    """Named parts of one tensor on the device and of its twin on the host, each part at 16 bytes."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device, parts: Mapping[str, tuple[int, ...]]
    ) -> None:
        step = 16 // dtype.itemsize
        places, total = {}, 0
        for name, shape in parts.items():
            count = int(torch.Size(shape).numel())
            places[name] = (total, count, shape)
            total += -(-count // step) * step
        self._device = torch.zeros(total, dtype=dtype, device=device)
        self.there = {n: self._device[a : a + c].view(shape) for n, (a, c, shape) in places.items()}
        # Two twins in turn: the copy of the step that is in flight need not be over while the next is filled
        # in, that of the step before it is.
        self._hosts = [torch.zeros(total, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(2)]
        self._views = [
            {n: host[a : a + c].view(shape) for n, (a, c, shape) in places.items()} for host in self._hosts
        ]

    @property
    def here(self) -> dict[str, torch.Tensor]:
        """The parts of the twin that is sent next."""
        return self._views[0]

    def send(self) -> None:
        self._device.copy_(self._hosts[0], non_blocking=True)
        self._hosts.reverse()
        self._views.reverse()

    def poison(self) -> None:
        for tensor in (self._device, *self._hosts):
            tensor.fill_(-(1 << 30))


class StepBuffers:
    """A ForwardBatch at fixed addresses, with room for a size."""

    def __init__(self, size: StepSize, block_size: int, device: torch.device) -> None:
        rows, sequences = size.rows, size.sequences
        long: dict[str, tuple[int, ...]] = {"token_ids": (rows,), "positions": (rows,), "pending": (rows,)}
        short: dict[str, tuple[int, ...]] = {"query_starts": (sequences + 1,), "key_lengths": (sequences,)}
        for group, width in enumerate(size.widths):
            long[f"slots {group}"] = (rows,)
            short[f"table {group}"] = short[f"starts {group}"] = (sequences, width)
        self._long = _Packed(torch.int64, device, long)
        self._short = _Packed(torch.int32, device, short)
        self._num_groups = len(size.widths)
        wide, narrow = self._long.there, self._short.there
        self.batch = ForwardBatch(
            token_ids=wide["token_ids"],
            positions=wide["positions"],
            query_starts=narrow["query_starts"],
            logit_rows=torch.arange(rows, device=device),
            max_query=size.queries,
            max_key=max(size.widths) * block_size,
            pending=wide["pending"],
            groups=tuple(
                GroupTables(
                    block_table=narrow[f"table {group}"],
                    block_positions=narrow[f"starts {group}"],
                    slot_mapping=wide[f"slots {group}"],
                    key_lengths=narrow["key_lengths"],
                )
                for group in range(self._num_groups)
            ),
        )

    def fill(self, batch: ForwardBatch) -> None:
        """The step's inputs; rows behind the last store nothing, sequences behind the last have no rows."""
        rows, sequences = batch.token_ids.shape[0], batch.groups[0].key_lengths.shape[0]
        wide, narrow = self._long.here, self._short.here
        for name, values in (("token_ids", batch.token_ids), ("positions", batch.positions)):
            wide[name][:rows] = values
            wide[name][rows:] = 0
        wide["pending"].fill_(-1)
        if batch.pending is not None:
            wide["pending"][:rows] = batch.pending
        narrow["query_starts"][: sequences + 1] = batch.query_starts
        narrow["query_starts"][sequences + 1 :] = rows
        narrow["key_lengths"][:sequences] = batch.groups[0].key_lengths
        narrow["key_lengths"][sequences:] = 0
        for index, group in enumerate(batch.groups):
            slots, width = wide[f"slots {index}"], group.block_table.shape[1]
            slots[:rows] = group.slot_mapping
            slots[rows:] = -1
            for name, values, padding in (
                (f"table {index}", group.block_table, -1),
                (f"starts {index}", group.block_positions, 0),
            ):
                narrow[name].fill_(padding)
                narrow[name][:sequences, :width] = values
        self._long.send()
        self._short.send()

    def poison(self) -> None:
        """Fills everything that ``fill`` has to write with what no step may meet."""
        self._long.poison()
        self._short.poison()
