"""Tables of captured steps: memory that stays where it is, filled anew before each launch.

    host               pack            launch | pack                              launch
    copy stream        | copy, event          | wait for the readers, copy, event
    launching stream     wait | graph | event                        wait | graph | event

A graph is launched in a step, whose tables then take the place of those that were captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from weakref import ref

from ...errors import KvcupyError
from .staging import DeviceSide, Layout, PinnedSide

if TYPE_CHECKING:
    from ...devices.protocol import Stream
    from .staging import Room
    from .tables import StepTables, TableRing


class CapturedTables:
    """The tables that graphs captured in one step share.

    Parameters
    ----------
    room : shape and format of each; what a later step has must fit

    Attributes
    ----------
    views : the tables, by name, at full size
    """

    def __init__(self, ring: TableRing, room: Room) -> None:
        self._ring = ring
        self._layout = Layout(room)
        self._target = DeviceSide(ring.device)
        self.views = self._layout.views(self._target.grow(self._layout.num_bytes))
        # Two, so that one is packed while the other is still on its way.
        self._pinned = [PinnedSide(ring.device) for _ in range(2)]
        self._fills = 0
        self._step: Any = lambda: None  # whose tables they are

    def before(self, stream: Stream) -> None:
        """Bring the tables of the open step in place, once a step, before a launch on `stream`.

        Raises
        ------
        KvcupyError : no step is open
        ValueError : the step does not fit; nothing has been launched
        """
        step = self._ring.current
        if step is None:
            raise KvcupyError("a graph that attends over the cache is launched outside of a step")
        if self._step() is not step or self._copied.error() is not None:
            self._fill(step)
        stream.wait(self._copied)
        step.enter(stream)
        step.source.launching(stream)

    def after(self, stream: Stream) -> None:
        """Note that a launch on `stream` reads the tables."""
        self._target.read_by(stream)

    def _fill(self, step: StepTables) -> None:
        arrays = step.source.fixed(self._layout.room)
        pinned = self._pinned[self._fills % len(self._pinned)]
        self._ring.courier.send(arrays, self._layout, pinned, self._target)
        self._fills += 1
        self._step = ref(step)

    @property
    def _copied(self) -> Any:
        return self._pinned[(self._fills - 1) % len(self._pinned)].copied
