"""Which messages a group gets: its filter, their expiry and their coalesce keys, as the tables have them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

from django_mysqlqueue.filter_policies import FilterPolicy, parse
from tests.support.internals import GroupRef
from tests.support.tables import Group, Logged, Tables, Waiting

EU, US = parse({"region": ["eu"]}), parse({"region": ["us"]})
"""Two filters. A message can match one of them, both or none: metadata may have lists."""
REGIONS = ("eu", "us", ["eu", "us"], "asia")
"""Values of ``region`` in metadata: for the first filter, the second, both, none."""


def filter_of(group: Group) -> FilterPolicy | None:
    """The filter that applies to a group: an override, or else the registered one."""
    policy = group.overridden.get("filter", group.registered_filter)
    return parse(policy) if policy else None


LONG_AGO = 1
"""When messages of tests have expired, in epoch milliseconds."""


def has_expired(message: Logged | Waiting) -> bool:
    """Whether a message expired long ago. Copies of it, such as dead letters, do not expire."""
    return not message.original_id and message.expires_at == LONG_AGO


@lru_cache(maxsize=50_000)
def _metadata(text: str) -> Mapping[str, Any]:
    """What is in metadata. The same rows are looked at again and again."""
    return dict(json.loads(text))


def is_superseded(message: Logged | Waiting, tables: Tables, ref: GroupRef) -> bool:
    """Whether a group does not handle a message because it gets, or has got, a later one with its coalesce key.

    That one is the latest of the log, or the one for which the group has given up others, or will enter the log.
    """
    key = coalesced(message)
    if key is None:
        return False
    offset = getattr(message, "offset", 2**62)
    later = [
        one for one in tables.log.values() if one.offset > offset and not one.target_group and coalesced(one) == key
    ]
    waiting = [
        one
        for one in tables.outbox
        if one.id != message.id and not one.target_group and coalesced(one) == key and _follows(one, message)
    ]
    noted = [one for one in later if is_superseding(one, tables, ref)]
    found: list[Logged | Waiting] = [*later[-1:], *noted, *waiting]
    return any(is_got(one, tables, ref) for one in found)


def is_superseding(message: Logged | Waiting, tables: Tables, ref: GroupRef) -> bool:
    """Whether a group has given up earlier messages of its coalesce key for a message."""
    key = coalesced(message)
    return key is not None and tables.superseding.get((ref, *key[1:])) == getattr(message, "offset", None)


def is_got(message: Logged | Waiting, tables: Tables, ref: GroupRef) -> bool:
    """Whether a group gets a message, or has got it, if it does not expire."""
    place = tables.offsets.get((ref, message.key))
    if isinstance(message, Logged) and place is not None and message.offset <= place.claimed:
        return (ref, message.key, message.offset) in tables.state
    policy = filter_of(tables.groups[ref]) if ref in tables.groups else None
    return policy is None or policy.matches(_metadata(message.metadata)) or is_superseding(message, tables, ref)


def superseded_in(tables: Tables) -> Callable[[Logged | Waiting], bool]:
    """Whether a later message of the log, or one that will enter it, has the coalesce key of a message.

    A message for one group supersedes nothing.
    """
    last: dict[tuple[str, str, str], int] = {}
    waiting: dict[tuple[str, str, str], list[Waiting]] = defaultdict(list)
    for logged in tables.log.values():
        if not logged.target_group and (key := coalesced(logged)) is not None:
            last[key] = max(logged.offset, last.get(key, 0))
    for one in tables.outbox:
        if not one.target_group and (key := coalesced(one)) is not None:
            waiting[key].append(one)

    def is_superseded(message: Logged | Waiting) -> bool:
        key = coalesced(message)
        if key is None:
            return False
        if last.get(key, 0) > getattr(message, "offset", 2**62):
            return True
        return any(one.id != message.id and _follows(one, message) for one in waiting.get(key, ()))

    return is_superseded


def _follows(one: Waiting, other: Logged | Waiting) -> bool:
    """Whether a message of the outbox will enter the log after another one, or replaces it."""
    if isinstance(other, Logged):
        return True
    if one.is_debounced and other.is_debounced:
        return one.outbox_id > other.outbox_id
    return (max(0, one.deliver_at), one.outbox_id) > (max(0, other.deliver_at), other.outbox_id)


def coalesced(message: Logged | Waiting) -> tuple[str, str, str] | None:
    """The coalesce key with its topic and partition. Copies, such as dead letters, have none."""
    if message.original_id or not message.coalesce_key:
        return None
    return message.topic, message.key, message.coalesce_key


def matches(message: Logged | Waiting, policy: FilterPolicy | None) -> bool:
    """Whether a filter and its expiry let a message through; None: no filter. One for a single group bypasses it."""
    passes = bool(message.target_group) or policy is None or policy.matches(_metadata(message.metadata))
    return passes and not has_expired(message)


def is_for(message: Logged | Waiting, ref: GroupRef) -> bool:
    """Whether a group gets a message."""
    return message.topic == ref.topic and message.target_group in ("", ref.group)


def unmatched(
    tables: Tables, filters: Mapping[GroupRef, Collection[FilterPolicy | None]] | None = None
) -> frozenset[tuple[GroupRef, int]]:
    """(group, offset) of the messages in the log that a group need not handle.

    They have expired, are superseded, or a filter of the group does not match them.

    Args:
        tables: the queue as it stands.
        filters: all filters that groups have had; those of other groups are the ones that they have now.
    """
    policies = {ref: (filter_of(group),) for ref, group in tables.groups.items()} | dict(filters or {})
    is_superseded = superseded_in(tables)
    superseded = {message.offset for message in tables.log.values() if is_superseded(message)}
    return frozenset(
        (ref, message.offset)
        for ref in tables.groups
        for message in tables.log.values()
        if is_for(message, ref)
        and (message.offset in superseded or not all(matches(message, policy) for policy in policies[ref] or (None,)))
    )
