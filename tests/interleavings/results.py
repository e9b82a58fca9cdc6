"""What operations return and raise, by meaning: the one place that knows the fields of results and the errors' classes.

The recorded outcomes have the words of this module, so that a field can be renamed, and an error reworded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from django.core.management import CommandError

from django_mysqlqueue.exceptions import OperationRefused, StaleDelivery, SubscriberError
from django_mysqlqueue.operations.jobs import Cancelled
from django_mysqlqueue.operations.steps import Stopped
from tests.interleavings.pictures import FIRST_OFFSET, Names
from tests.support.internals import (
    Acquired,
    Action,
    Claim,
    Claimed,
    Flushed,
    Later,
    Left,
    Registered,
    Released,
    Rest,
    Seen,
    Sequenced,
    Settlement,
)

ACTIONS = {
    Action.ACK: "ack",
    Action.NACK: "nack",
    Action.SNOOZE: "snooze",
    Action.REJECT: "reject",
    Action.RELEASE: "release",
    Action.DELETED: "deleted",
    Action.EXPIRED: "expired",
    Action.SUPERSEDED: "superseded",
    Action.STALE: "stale",
}
KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (Stopped, "stopped by another operation"),
    (OperationRefused, "impossible"),
    (SubscriberError, "another registration"),
    (StaleDelivery, "stale"),
    (CommandError, "by the command"),
)
"""Class of error → what it says. The first that fits counts."""


def error(raised: BaseException, names: Names) -> str:
    """The kind of an error (of a command: that of its cause), and the messages whose offsets it names."""
    cause = raised.__cause__ if isinstance(raised, CommandError) and raised.__cause__ else raised
    kind = next((kind for of, kind in KINDS if isinstance(cause, of)), type(cause).__name__)
    digits = "".join(one if one.isdecimal() else " " for one in str(raised))
    about = sorted({names.at(int(number)) for number in digits.split() if int(number) in names.places})
    return f"refused: {kind}{', about ' if about else ''}{'+'.join(about)}"


def result(value: Any, names: Names) -> Any:
    """What an operation has returned."""
    if type(value) in _MEANINGS:
        return _MEANINGS[type(value)](value, names)
    if isinstance(value, Mapping | set | frozenset):
        return sorted(str(result(one, names)) for one in value)
    if isinstance(value, list | tuple):
        return [result(one, names) for one in value]
    if isinstance(value, int) and value >= FIRST_OFFSET:
        return names.at(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"What does {value!r} mean? Add a function for {type(value).__name__} to {__name__}.")


def has_looked(value: Any) -> bool:
    """Whether it is a claim that has looked at messages above a position."""
    return isinstance(value, Claim) and bool(_looked_at(value))


def _looked_at(done: Claim) -> list[str]:
    return sorted(key for key, seen in done.partitions.items() if seen not in (Seen.LOST, Seen.MISSING))


def _seen(done: Claim, what: Seen) -> list[str]:
    return sorted(key for key, seen in done.partitions.items() if seen is what)


def _left(done: Claim, why: Left) -> list[tuple[str, int]]:
    return [place for place, left in done.left.items() if left is why]


def _claim(done: Claim, names: Names) -> dict[str, Any]:
    later = {place: left for place, left in done.left.items() if isinstance(left, Later)}
    return _what_is(
        {
            "flushed": _flushed(replace(done.flushed, held=None), names),
            "claimed": [_claimed(one, names) for one in done.deliveries],
            "dead": [_claimed(one, names) for one, _ in done.dead],
            "lease lost": _seen(done, Seen.LOST),
            "no position": _seen(done, Seen.MISSING),
            "looked at": _looked_at(done),
            "nothing above": _seen(done, Seen.DRAINED),
            "settled already": _places(_left(done, Left.SETTLED), names),
            "locked": sorted({key for key, _ in _left(done, Left.LOCKED)}),
            "later": _places(later, names),
            "lost": _places([place for place, left in later.items() if left.is_lost], names),
            "no slot": sorted(key for key, seen in done.partitions.items() if isinstance(seen, Rest)),
            "suspects left": sorted({key for key, _ in _left(done, Left.SUSPECT)}),
            "more due": bool(_left(done, Left.NEEDS_SLOT)),
            "no slot of the group": done.rest and _rest(done.rest, names),
            "slots": sorted(done.flushed.held or ()),
            "passed": {str(reason): number for reason, number in sorted(done.passed.items()) if number},
            "other options": done.refused == "options",
            "dropped": done.refused == "dropped",
            "paused": done.refused == "paused",
            "other mode": done.fence.mode if done.fence is not None and done.refused == "mode" else "",
        }
    )


def _flushed(done: Flushed, names: Names) -> dict[str, Any]:
    return _what_is(
        {
            "stale": [_settlement(one, names) for one in done.stale],
            "locked": [_settlement(one, names) for one in done.locked],
            "dead": [_claimed(one, names) for one, _ in done.dead],
            "wait": _places(done.waiting, names),
            "unfinished": sorted(done.unfinished),
            "slots": sorted(done.held or ()),
            "position locked": sorted(done.skipped),
        }
    )


def _acquired(done: Acquired, names: Names) -> dict[str, Any]:
    return _what_is(
        {
            "leases": sorted(done.held),
            "elsewhere": sorted(done.elsewhere),
            "paused": done.paused,
            "dropped": done.dropped,
            "other mode": done.other_mode,
        }
    )


def _claimed(one: Claimed, names: Names) -> str:
    return f"{names.at(one.offset)}#{one.attempt}{' suspect' if one.suspect else ''}"


def _settlement(one: Settlement, names: Names) -> str:
    return f"{ACTIONS[one.action]} {names.at(one.delivery.offset)}"


def _rest(rest: Rest, names: Names) -> str:
    return f"{rest.key}: {'in flight' if rest.in_flight else 'rate'}"


def _sequenced(done: Sequenced, names: Names) -> dict[str, Any]:
    return _what_is(
        {
            "moved": done.moved,
            "more": done.more,
            "busy": done.busy,
            "replaced": done.replaced,
            "quarantined": done.quarantined,
        }
    )


def _registered(group: Registered, names: Names) -> str:
    return f"{group.mode} from {names.at(group.start_offset) or 'the beginning'}{', paused' if group.paused else ''}"


def _places(places: Iterable[tuple[str, int]], names: Names) -> list[str]:
    return sorted(names.at(offset) for _, offset in places)


def _what_is(found: dict[str, Any]) -> dict[str, Any]:
    """Without what is empty, zero or not so."""
    return {name: one for name, one in found.items() if one}


_MEANINGS: dict[type, Callable[[Any, Names], Any]] = {
    Claim: _claim,
    Flushed: _flushed,
    Acquired: _acquired,
    Claimed: _claimed,
    Settlement: _settlement,
    Rest: _rest,
    Sequenced: _sequenced,
    Registered: _registered,
    Released: lambda done, names: f"{done.leases} leases, {done.deliveries} deliveries",
    Cancelled: lambda done, names: f"{done.ended} ended, {done.asked} asked to stop",
}
