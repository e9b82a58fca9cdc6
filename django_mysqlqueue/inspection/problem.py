"""A problem of the queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from django.utils.translation import ngettext

from django_mysqlqueue.humanize import duration
from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef

NONE = Count(0)
NOTE = 2
"""Severity of problems that are only for information."""

Kind = Literal[
    "no_subscriber",
    "filter",
    "stuck",
    "silent",
    "broken",
    "deaths",
    "outbox",
    "outbox_behind",
    "quarantined",
    "failing",
    "recent_dead_letters",
    "retrying",
    "paused",
    "seek_ended_early",
    "drop_ended_early",
    "unserved",
    "still",
    "limited",
    "dead_letters",
    "long_transaction",
    "slow_database",
    "groupless",
    "relay",
    "moves",
    "route",
    "recurring",
    "recurring_failed",
    "missing_task",
    "unavailable",
    "mode",
    "refused",
]

DELIBERATE: frozenset[Kind] = frozenset(("paused", "limited", "moves"))
"""Kinds of problems for which messages wait because somebody wants it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the queue, or the sign of one."""

    severity: int
    """0: messages are stalled or handlers fail; 1: this will happen if nothing changes; 2: for information."""
    kind: Kind
    """The kind of problem. The how-to guide *Troubleshoot* says what to do about each.

    - ``no_subscriber``: a group has a backlog and no live subscribers.
    - ``filter``: this release cannot parse a group's filter, so that its subscribers claim nothing for the group.
    - ``stuck``: the first unsettled message of a partition has failed.
    - ``silent``: a subscriber is lost.
    - ``deaths``: several processes have died, perhaps while they handled the same message.
    - ``broken``: a subscriber cannot work for a group because of a bug in the queue.
    - ``outbox``: messages are due in the outbox, and no subscriber moves them into the log.
    - ``outbox_behind``: messages have been due in the outbox for long, but are being moved.
    - ``quarantined``: the log has refused messages, for example because of a trigger.
    - ``failing``: too many attempts of a group fail.
    - ``recent_dead_letters``: a group has too many dead letters within the window.
    - ``retrying``: every attempt of a group at the messages of a key fails.
    - ``paused``: a group is paused.
    - ``seek_ended_early``, ``drop_ended_early``: a seek or drop has not finished.
    - ``moves``: a group waits for the end of its topic's move.
    - ``route``: messages of a topic go to another database than the settings name.
    - ``unserved``: no live subscriber takes a partition.
    - ``still``: a group with live subscribers is stalled.
    - ``limited``: messages of a group wait because its limits are reached.
    - ``dead_letters``: a group has dead letters.
    - ``long_transaction``: a transaction has been open for long.
    - ``slow_database``: the database answers subscribers slowly.
    - ``groupless``: a topic has messages and no consumer group.
    - ``recurring``: a recurring schedule has not run when it was due.
    - ``recurring_failed``: the last job of a recurring schedule has failed.
    - ``missing_task``: jobs wait for a task that live subscribers cannot run.
    - ``relay``: messages wait to be relayed to another database, which does not answer or refuses the first of them.
    - ``mode``: a group is registered with another mode than this project's code declares.
    - ``refused``: subscribers have refused to start, and none of their groups has started since.
    - ``unavailable``: the database refuses or does not answer. ``find_problems`` raises an error then.
    """
    text: str
    """A description in the active language."""
    ref: GroupRef | None = None
    """The group that has the problem, and its topic."""
    key: str | None = None
    """Key of the partition, or the first key of the messages, that have the problem."""
    offset: int | None = None
    """Offset of the message that has the problem."""
    subscriber: str | None = None
    """Name of the subscriber that has the problem."""
    topic: str | None = None
    """The topic that has the problem, if it has no group."""
    message_id: str | None = None
    """Id of the message that has the problem, if the text contains it."""
    database: str | None = None
    """Alias of the database to which messages are not relayed, or which is unavailable."""
    since: int | None = None
    """When it began, as far as this is known, in epoch milliseconds."""
    oldest_at: int | None = None
    """When the oldest of the messages started to wait, in epoch milliseconds; None if this is not known."""
    advice: str = ""
    """The next step, if it is not that of the kind."""
    messages: Count = NONE
    """The messages that wait because of it."""
    error: str = ""
    """The last error of the message or of the subscriber that has the problem: the last line of the traceback. For
    messages that the log has refused, the error of the database."""
    failed: Count = NONE
    """The messages that failed lately and fail still, or are dead letters."""
    is_private: bool = False
    """Whether the text names a host, a database user or a subscriber, or contains an error."""

    @property
    def harm(self) -> Count:
        """How many messages fail or wait because of it, by which problems of one severity are ranked."""
        return self.failed or (NONE if self.kind in DELIBERATE else self.messages)


def waiting(count: Count) -> str:
    """Return the text for messages that wait: ``2 messages are waiting``."""
    if count.age:
        text = ngettext(
            "%(number)s message was waiting %(age)s ago", "%(number)s messages were waiting %(age)s ago", count.value
        )
        return text % {"number": f"{count.value:,}", "age": duration(count.age)}
    return ngettext("%(count)s message is waiting", "%(count)s messages are waiting", count.value) % {"count": count}


def age(now: int, since: int | None) -> float:
    """Return the seconds since a time in epoch milliseconds; 0 for None and for a time in the future."""
    return 0.0 if since is None else max(0.0, (now - since) / 1000)
