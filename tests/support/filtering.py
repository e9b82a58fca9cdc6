"""Which messages a group gets: its filter, as the tables have it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from django_mysqlqueue.filter_policies import FilterPolicy, parse
from django_mysqlqueue.service.refs import GroupRef
from tests.support.tables import Group, Logged, Tables, Waiting

EU, US = parse({"region": ["eu"]}), parse({"region": ["us"]})
"""Two filters. A message can match one of them, both or none: metadata may have lists."""
REGIONS = ("eu", "us", ["eu", "us"], "asia")
"""Values of ``region`` in metadata: for the first filter, the second, both, none."""


def filter_of(group: Group) -> FilterPolicy | None:
    """The filter that applies to a group: an override, or else the registered one."""
    overrides = json.loads(group.overrides)
    policy = overrides["filter"]["value"] if "filter" in overrides else json.loads(group.filter)
    return parse(policy) if policy else None


def matches(message: Logged | Waiting, policy: FilterPolicy | None) -> bool:
    """Whether a filter lets a message through; None: there is none. A message for one group bypasses it."""
    return policy is None or bool(message.target_group) or policy.matches(json.loads(message.metadata))


def is_for(message: Logged | Waiting, ref: GroupRef) -> bool:
    """Whether a group gets a message."""
    return message.topic == ref.topic and message.target_group in ("", ref.group)


def unmatched(
    tables: Tables, filters: Mapping[GroupRef, Collection[FilterPolicy | None]] | None = None
) -> frozenset[tuple[GroupRef, int]]:
    """(group, offset) of the messages in the log that a filter of their group does not match.

    Args:
        tables: the queue as it stands.
        filters: all filters that groups have had; those of other groups are the ones that they have now.
    """
    policies = {ref: (filter_of(group),) for ref, group in tables.groups.items()} | dict(filters or {})
    return frozenset(
        (ref, message.offset)
        for ref in tables.groups
        if any(policies[ref])
        for message in tables.log.values()
        if is_for(message, ref) and not all(matches(message, policy) for policy in policies[ref])
    )
