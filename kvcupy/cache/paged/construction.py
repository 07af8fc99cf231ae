"""The parts of a paged cache, made from its arguments: a plan of its memory, and pools by it.

A cache without `groups` has one, which the other arguments describe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...checks import positive_int
from ..pool import KVPool, Pool
from .arguments import (
    DTYPE,
    Demotion,
    demoted_pool_of,
    pool_of,
    require_rope_mode,
    rope_of,
    rope_positions,
    scales_of,
)
from .groups import (
    AttentionGroup,
    FullAttention,
    Latent,
    Recurrent,
    SlidingWindow,
    check_groups,
    group_of,
    refuse_with_groups,
)
from .memory_plan import MemoryPlan, make_plan, plan_of_pool
from .page_group import PageGroup
from .states import States
from .tables import GroupTables


@dataclass(frozen=True)
class Parts:
    """The parts of a cache: `groups` has the groups of attention layers."""

    plan: MemoryPlan
    groups: list[PageGroup]
    states: States | None


@dataclass(frozen=True)
class _Pools:
    """The pools of a group of attention layers, and the static scales of its layers."""

    group: AttentionGroup
    pool: Pool
    demotion: Demotion | None
    demoted_pool: KVPool | None
    scales: list[tuple[Any, Any]]


def make_parts(
    shared: dict[str, Any], *, groups: Any, max_seq_len: int | None, max_batch_tokens: int,
    attention: Any, **shape: Any,
) -> Parts:  # fmt: skip
    """Return the parts of a cache.

    shared : arguments of all groups
    shape : arguments that describe the one group, or with `groups` the memory of all
    """
    require_rope_mode(shared["rope_mode"])
    if max_seq_len is None and shared["rope_mode"] != "none":
        max_seq_len = rope_positions(shared["rope"])
    if groups is None:
        plan, pools = _one_group(max_seq_len, max_batch_tokens, **shape)
    else:
        plan, pools = _declared(
            groups, max_seq_len, max_batch_tokens, shared["batch_invariant"], attention, **shape
        )
    made: list[PageGroup] = []
    for each in pools:
        made.append(_page_group(each, made, shared, len(plan.groups) > 1))
    return Parts(plan, made, _states_of(plan, made[0]))


def _one_group(
    length: int | None, max_batch_tokens: int, *, k_scale: Any, v_scale: Any,
    demotion: Demotion | None, memory_bytes: Any, num_tokens: Any, **shape: Any,
) -> tuple[MemoryPlan, list[_Pools]]:  # fmt: skip
    """Return the plan and the pools of a cache whose layers are uniform."""
    for name, value in (("memory_bytes", memory_bytes), ("num_tokens", num_tokens)):
        if value is not None:
            raise ValueError(f"{name}: expected None without groups, got {value!r}")
    has_static_scales = k_scale is not None or v_scale is not None
    pool, latent_dim = pool_of(**shape, has_static_scales=has_static_scales)
    demoted_pool = demoted_pool_of(pool, demotion, has_static_scales)
    scales = scales_of(pool, k_scale, v_scale)
    group = group_of(pool, latent_dim, demotion)
    plan = plan_of_pool(group, pool, demoted_pool, length, max_batch_tokens)
    return plan, [_Pools(group, pool, demotion, demoted_pool, scales)]


def _declared(
    groups: Any, max_seq_len: int | None, max_batch_tokens: int, batch_invariant: bool,
    attention: Any, *, page_size: int, dtype: Any, device: Any, memory_bytes: Any, num_tokens: Any,
    **others: Any,
) -> tuple[MemoryPlan, list[_Pools]]:  # fmt: skip
    """Return the plan and the pools of groups; `others` are arguments that belong to a group."""
    refuse_with_groups(**others, dtype=None if dtype is DTYPE else dtype)
    declared = check_groups(groups)
    attending = [group for group in declared if isinstance(group, AttentionGroup)]
    is_own = isinstance(attention, str) and attention == "kvcupy"
    if not is_own and (len(attending) > 1 or isinstance(attending[0], SlidingWindow)):
        raise NotImplementedError(
            f'attention: expected "kvcupy" with groups, whose page tables have gaps that other '
            f"libraries do not know, got {attention!r}"
        )
    plan = make_plan(
        declared, positive_int(page_size, "page_size"), memory_bytes=memory_bytes,
        num_tokens=num_tokens, max_seq_len=max_seq_len, max_batch_tokens=max_batch_tokens,
    )  # fmt: skip
    pools = []
    for part in plan.groups:
        group = part.group
        if not isinstance(group, AttentionGroup):
            continue
        demotion = group.demotion if isinstance(group, FullAttention) else None
        if demotion is not None:
            if batch_invariant:
                raise ValueError("demotion: expected None with batch_invariant, got a Demotion")
            demotion = replace(demotion, num_pages=part.num_demoted_pages)
        pool = group.make_pool(part.num_pages, page_size, device)
        pools.append(_Pools(group, pool, demotion, demoted_pool_of(pool, demotion, False), []))
    return plan, pools


def _page_group(
    pools: _Pools, earlier: Sequence[PageGroup], shared: dict[str, Any], is_named: bool
) -> PageGroup:
    """Return the pages of a group; check what depends on the shape of its layers.

    is_named : whether errors name the group
    """
    group, pool = pools.group, pools.pool
    options = dict(shared)
    num_q_heads, rope = options.pop("num_q_heads"), options.pop("rope")
    mode, interleaved = options.pop("rope_mode"), options.pop("interleaved")
    latent_dim = group.latent_dim if isinstance(group, Latent) else None
    rotary = rope_of(rope, mode, interleaved, pool.device, pool.head_dim, latent_dim)
    if num_q_heads % pool.num_kv_heads:
        heads = f"{pool.num_kv_heads} KV heads"
        raise ValueError(f"num_q_heads: expected a multiple of {heads}, got {num_q_heads}")
    if isinstance(group, SlidingWindow):
        options |= {"window": group.window, "sink_tokens": group.sink_tokens}
    if pools.demotion is not None and pools.demoted_pool is not None:
        options["demotion"] = pools.demoted_pool, pools.demotion.recent, pools.demotion.first
    column = sum(each.tables.num_columns for each in earlier)
    tables = GroupTables(len(earlier), column, 1 if pools.demoted_pool is None else 2)
    return PageGroup(
        pool, num_q_heads, rotary, pools.scales, tables=tables, model_layers=group.layers,
        label=str(group) if is_named else "", **options,
    )  # fmt: skip


def _states_of(plan: MemoryPlan, first: PageGroup) -> States | None:
    """Return the states of the recurrent groups of a plan; None if it has none."""
    parts = [part for part in plan.groups if part.num_slots]
    groups = [part.group for part in parts if isinstance(part.group, Recurrent)]
    if not groups:
        return None
    return States(groups, min(part.num_slots for part in parts), first.pool.device)
