"""The parts of a paged cache, made from its arguments.

without groups   one PageGroup, of all layers
with groups      a plan of the memory, a PageGroup for each group of attention layers, States
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...checks import positive_int
from ...devices.protocol import Device
from ..pool import KVPool, Pool
from .arguments import DTYPE, Demotion, past_pool_of, pool_of, rope_of, rope_positions, scales_of
from .groups import (
    AttentionGroup,
    FullAttention,
    Latent,
    LayerGroup,
    Recurrent,
    SlidingWindow,
    check_groups,
    refuse_with_groups,
)
from .memory_plan import MemoryPlan, make_plan
from .page_group import PageGroup
from .states import States
from .tables import GroupTables


@dataclass(frozen=True)
class Parts:
    """The parts of a cache; the fields behind the first are of one with groups.

    Attributes
    ----------
    groups : of attention layers, or all layers
    plan : how the memory is divided
    declared : the groups that the user has passed
    layers : of each attention layer of the model, the number of its group and its number there
    """

    groups: list[PageGroup]
    plan: MemoryPlan | None = None
    declared: Sequence[LayerGroup] | None = None
    layers: dict[int, tuple[int, int]] = field(default_factory=dict)
    states: States | None = None


def alike_parts(
    shared: dict[str, Any], *, k_scale: Any, v_scale: Any, demotion: Demotion | None,
    memory_bytes: Any, num_tokens: Any, **shape: Any,
) -> Parts:  # fmt: skip
    """Return the parts of a cache without groups.

    shared : arguments of all groups
    shape : arguments of its pool
    """
    for name, value in (("memory_bytes", memory_bytes), ("num_tokens", num_tokens)):
        if value is not None:
            raise ValueError(f"{name}: expected None without groups, got {value!r}")
    has_static_scales = k_scale is not None or v_scale is not None
    pool, latent_dim = pool_of(**shape, has_static_scales=has_static_scales)
    past_pool = past_pool_of(pool, demotion, has_static_scales)
    scales = scales_of(pool, k_scale, v_scale)
    return Parts([_make_group(pool, latent_dim, scales, demotion, past_pool, **shared)])


def mixed_parts(
    groups: Any, shared: dict[str, Any], *, page_size: int, dtype: Any, device: Any,
    memory_bytes: Any, num_tokens: Any, max_seq_len: int | None, max_batch_tokens: int,
    **others: Any,
) -> Parts:  # fmt: skip
    """Return the parts of a cache with groups.

    others : arguments that say what the groups say
    """
    refuse_with_groups(**others, dtype=None if dtype is DTYPE else dtype)
    declared = check_groups(groups)
    plan = make_plan(
        declared, positive_int(page_size, "page_size"), memory_bytes=memory_bytes,
        num_tokens=num_tokens, max_seq_len=max_seq_len or rope_positions(shared["rope"]),
        max_batch_tokens=max_batch_tokens,
    )  # fmt: skip
    page_groups, layers = _make_groups(plan, page_size, device, shared)
    states = _states_of(plan, page_groups[0].pool.device)
    return Parts(page_groups, plan, declared, layers, states)


def _make_group(
    pool: Pool, latent_dim: int | None, scales: list[tuple[Any, Any]], demotion: Demotion | None,
    past_pool: KVPool | None, *, num_q_heads: int, rope: Any, rope_mode: Any, interleaved: Any,
    **options: Any,
) -> PageGroup:  # fmt: skip
    """Return the pages of a group; check what depends on the shape of its layers."""
    rotary = rope_of(rope, rope_mode, interleaved, pool.device, pool.head_dim, latent_dim)
    if num_q_heads % pool.num_kv_heads:
        heads = f"{pool.num_kv_heads} KV heads"
        raise ValueError(f"num_q_heads: expected a multiple of {heads}, got {num_q_heads}")
    demoted = None
    if demotion is not None and past_pool is not None:
        demoted = past_pool, demotion.recent, demotion.first
    return PageGroup(pool, num_q_heads, rotary, scales, demoted=demoted, **options)


def _make_groups(
    plan: MemoryPlan, page_size: int, device: Any, shared: dict[str, Any]
) -> tuple[list[PageGroup], dict[int, tuple[int, int]]]:
    """Return the groups of attention layers of a plan, and where each layer of the model is.

    A layer is found by the number of its group, and its number in the group.
    """
    groups: list[PageGroup] = []
    layers: dict[int, tuple[int, int]] = {}
    column = 0
    for part in plan.groups:
        declared = part.group
        if not isinstance(declared, AttentionGroup):
            continue
        options = dict(shared)
        demotion = declared.demotion if isinstance(declared, FullAttention) else None
        if demotion is not None:
            if shared["batch_invariant"]:
                raise ValueError("demotion: expected None with batch_invariant, got a Demotion")
            demotion = replace(demotion, num_pages=part.num_past_pages)
        if isinstance(declared, SlidingWindow):
            options |= {"window": declared.window, "sink_tokens": declared.sink_tokens}
        pool = declared.make_pool(part.num_pages, page_size, device)
        past_pool = past_pool_of(pool, demotion, False)
        num_columns = 1 if past_pool is None else 2
        tables = GroupTables(len(groups), column, num_columns)
        column += num_columns
        latent_dim = declared.latent_dim if isinstance(declared, Latent) else None
        layers |= {layer: (len(groups), i) for i, layer in enumerate(declared.layers)}
        groups.append(_make_group(
            pool, latent_dim, [], demotion, past_pool, tables=tables, label=str(declared),
            model_layers=declared.layers, **options
        ))  # fmt: skip
    return groups, layers


def _states_of(plan: MemoryPlan, device: Device) -> States | None:
    """Return the states of the recurrent groups of a plan; None if it has none."""
    parts = [part for part in plan.groups if part.num_slots]
    groups = [part.group for part in parts if isinstance(part.group, Recurrent)]
    return States(groups, min(part.num_slots for part in parts), device) if groups else None
