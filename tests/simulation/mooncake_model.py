"""A model of the part of Mooncake's client library that a shared store uses.

Calls block. A call whose transfer has failed may still write to its buffers until the client is
closed, and so may a call whose caller no longer waits.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from support.world import Simulated

_TRANSFER_FAILED, _NO_SPACE = -800, -200


class MooncakeModel:
    """The objects and the faults of a store.

    Attributes
    ----------
    objects : bytes by name
    kind : "", "failed transfers", "slow" or "lost": no answer for a minute
    """

    def __init__(self, world: Simulated) -> None:
        self.world = world
        self.objects = {}
        self.kind = ""
        self.capacity_bytes = 1 << 30
        self.late_landings = 0

    def client(self) -> _Client:
        return _Client(self)


class _Client:
    """`mooncake.store.MooncakeDistributedStore`."""

    def __init__(self, model: MooncakeModel) -> None:
        self._model, self._world = model, model.world
        self._is_closed = False
        self._process = self._world.task.process

    def setup(self, *arguments: Any) -> int:
        self._begin()
        return 0

    def register_buffer(self, pointer: int, num_bytes: int) -> int:
        return 0

    def close(self) -> None:
        self._world.pause()
        self._is_closed = True

    def batch_is_exist(self, names: list[str]) -> list[int]:
        self._begin()
        return [int(name in self._model.objects) for name in names]

    def batch_put_from_multi_buffers(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._begin()
        codes = []
        for name, starts, lengths in zip(names, pointers, sizes, strict=True):
            if self._fails():
                codes.append(_TRANSFER_FAILED)
                continue
            data = b"".join(map(ctypes.string_at, starts, lengths))
            used = sum(map(len, self._model.objects.values()))
            if used + len(data) > self._model.capacity_bytes:
                codes.append(_NO_SPACE)
                continue
            self._model.objects.setdefault(name, data)
            codes.append(0)
            self._world.pause()
        return codes

    def batch_get_into_multi_buffers(
        self, names: list[str], pointers: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        self._begin()
        codes = []
        for name, starts, lengths in zip(names, pointers, sizes, strict=True):
            data = self._model.objects.get(name)
            if data is None:
                codes.append(-704)
                continue
            pieces = np.split(np.frombuffer(data, np.uint8), np.cumsum(lengths)[:-1])
            if self._fails():
                delay_s = self._world.random.choice([0.001, 0.01, 1.0])
                for start, piece in zip(starts, pieces, strict=True):
                    self._world.after(delay_s, lambda s=start, p=piece: self._land(s, p))
                codes.append(_TRANSFER_FAILED)
                continue
            for start, piece in zip(starts, pieces, strict=True):
                self._world.pause()
                self._land(start, piece, is_late=False)
            codes.append(len(data))
        return codes

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        self._begin()
        return [0 if self._model.objects.pop(name, None) is not None else -704 for name in names]

    def _begin(self) -> None:
        """Take the time of a call."""
        seconds = {"slow": 1.0, "lost": 60.0}.get(self._model.kind, 1e-4)
        self._world.time.sleep(seconds)

    def _fails(self) -> bool:
        return self._model.kind == "failed transfers" and self._world.random.random() < 0.5

    def _land(self, start: int, piece: Any, is_late: bool = True) -> None:
        if self._is_closed or not self._process.is_alive or self._world.is_over:
            return
        self._model.late_landings += is_late
        ctypes.memmove(start, piece.ctypes.data, piece.nbytes)
