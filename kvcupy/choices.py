"""The values of options that several calls have, for type checkers."""

from __future__ import annotations

from typing import Literal

Layout = Literal["NHD", "HND"]
LseBase = Literal["e", "2"]
PoolLayout = Literal["layer_first", "page_first", "page_first_direct", "page_head"]
Placement = Literal["device", "pinned", "pageable"]
Method = Literal["auto", "kernel", "copy", "staged"]
RopeMode = Literal["none", "normal", "inline"]
ScaleRule = Literal["absmax", "four_over_six"]
Write = Literal["through", "back"]
StoreWrite = Literal["through", "back", "second_use"]
