"""Cache rows: how many rows of all requests together the devices of a ring have room for."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from ipaddress import ip_address

from edgespec.config import EIGHT_BITS, MOST_LIVE, CoordinatorConfig
from edgespec.daemon.memory import available_memory, yet_to_take
from edgespec.daemon.planning import planned_needs
from edgespec.planning.architecture import Architecture
from edgespec.planning.memory import SPARE, SPECULATIVE_ROWS, Needs
from edgespec.planning.plan import Plan
from edgespec.ring.assembly import CacheRows
from edgespec.wire.messages import Assign, Join

PLANNED_BYTES = 2
"""Of a value, as the planner counts caches, but those of 8 bits, which it counts as they are."""
BYTES = {"float64": 8, "float32": 4}


def cache_rows(
    config: CoordinatorConfig, context: int, device: str
) -> tuple[CacheRows | None, int]:
    """What gives a device's rows, and the bytes of one in a layer; None and 0 if the planner does
    not know the model or its draft.

    To be called when the coordinator has loaded its models; `device`: "cpu" or "cuda"."""
    what = "caches have room for one request of full length alone"
    needs = planned_needs(config, context, what)
    if needs is None:
        return None, 0
    has = available_memory(device).bytes
    beside = bool(config.with_stage)
    own = needs.coordinator(beside_stage=beside).total
    left = (has - yet_to_take(own, device)) // (1 + beside)
    rows = partial(stage_rows, needs, config.live, _coordinator_rows(needs, config.dtype, left))
    dtype = config.cache_dtype or config.dtype
    return rows, _with_spare(needs.model.costs.kv_bytes, dtype)


def _coordinator_rows(needs: Needs, dtype: str, left: int) -> int | None:
    """Rows beyond those planned for that D0's draft has room for; None: it keeps none."""
    draft = needs.model.draft
    return _rows_in(left // 2, draft.layers * draft.kv_bytes, dtype) if draft.layers else None


def stage_rows(needs: Needs, live: int, d0: int | None, assign: Assign, join: Join) -> int:
    """Rows that a device has room for beside its layers: those of one request of full length
    (`assign.rows`), and more with half of the memory that it reported beyond that.

    No more than `live` requests can use, nor `d0`, which has no states, beyond one. The other half
    is for what else the device does. Stages that reached the coordinator over loopback share its
    machine's memory.
    """
    has = join.memory // (assign.stages + 1 if ip_address(join.host).is_loopback else 1)
    is_last = assign.stage == assign.stages
    dtype = assign.cache_dtype or assign.dtype
    more = _further_rows(needs, has, assign.first, assign.end, is_last, dtype)
    more = min(more, (live - 1) * assign.rows)
    if d0 is not None:
        own = max(1, assign.rows - state_rows(needs.model.of, dtype))
        more = min(more, d0 * assign.rows // own)
    return assign.rows + more


def state_rows(of: Architecture, dtype: str) -> int:
    """As many rows as what a model's layers hold of a request however long it is."""
    row = replace(of, coded=dtype == EIGHT_BITS).kv_bytes
    return -(-of.request_bytes // _with_spare(row, dtype))


def planned_rows(plan: Plan, dtype: str) -> int:
    """Rows of all requests together that a ring will have on the planned devices, if they report
    the memory of their profiles."""
    asked = plan.problem
    needs = Needs(asked.model, asked.context, 1, asked.head_last)
    own, last = plan.nodes[0].need.total, len(plan.split)
    left = plan.nodes[0].device.memory - own
    rows = [_coordinator_rows(needs, dtype, left // (1 + bool(plan.with_stage)))]
    for node in plan.nodes[1:]:
        has = node.device.memory - (own if node.stage == plan.with_stage else 0)
        rows.append(_further_rows(needs, has, node.first, node.end, node.stage == last, dtype))
    whole = asked.context + SPECULATIVE_ROWS
    states = state_rows(asked.model.of, dtype)
    if rows[0] is not None:
        rows[0] = rows[0] * (whole + states) // whole
    return whole + states + min(more for more in rows if more is not None)


def live_requests(rows: int, tokens: int, states: int = 0) -> int:
    """How many requests of so many tokens, of prompt and answer, may be live with these rows, of
    which each takes so many for its states."""
    return min(rows // (tokens + SPECULATIVE_ROWS + states), MOST_LIVE)


def _further_rows(needs: Needs, has: int, first: int, end: int, is_last: bool, dtype: str) -> int:
    """Rows beyond those of one request that a stage with so much memory has room for."""
    need = needs.stage(end - first, is_last).total
    return _rows_in((has - need) // 2, (end - first) * needs.model.costs.kv_bytes, dtype)


def _rows_in(nbytes: int, row: int, dtype: str) -> int:
    """Rows for which so many bytes have room; `row`: bytes of one as planned."""
    return max(nbytes, 0) // _with_spare(row, dtype)


def _with_spare(row: int, dtype: str) -> int:
    """Bytes of a row as it is held, with what caches spare as they grow."""
    return max(1, row * BYTES.get(dtype, PLANNED_BYTES) * (SPARE + 1) // (PLANNED_BYTES * SPARE))
