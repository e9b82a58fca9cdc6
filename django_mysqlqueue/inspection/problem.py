"""A problem of the queue, and what is known of each kind of problem."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext, ngettext_lazy

from django_mysqlqueue.service.counts import Count
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import grouped
from django_mysqlqueue.text.error_texts import masked
from django_mysqlqueue.text.humanize import duration

NONE = Count(0)
NOTE = 2
"""Severity of problems that are only for information."""
NAMED = 3
"""Maximum number of names in a text."""

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
    "paused_task",
    "seek_ended_early",
    "drop_ended_early",
    "unserved",
    "still",
    "behind",
    "catching_up",
    "limited",
    "dead_letters",
    "long_transaction",
    "slow_database",
    "disk",
    "groupless",
    "relay",
    "moves",
    "route",
    "reader",
    "recurring",
    "recurring_failed",
    "missing_task",
    "unavailable",
    "mode",
    "refused",
]

DELIBERATE: frozenset[Kind] = frozenset(("paused", "paused_task", "limited", "moves"))
"""Kinds of problems for which messages wait because somebody wants it."""
STOPPING: frozenset[Kind] = frozenset(
    ("no_subscriber", "outbox", "filter", "seek_ended_early", "drop_ended_early", "still")
)
"""Kinds of problems for which a group processes nothing, though nobody wants that."""
FAILURES: tuple[Kind, ...] = ("failing", "retrying", "recent_dead_letters", "stuck", "dead_letters")
"""Kinds of problems that failing handlers cause, the most telling one first."""
UNSERVED: tuple[Kind, ...] = ("no_subscriber", "silent")
"""Kinds of problems of a group without subscribers."""
STATES = {
    "drop_ended_early": gettext_lazy("drop unfinished"),
    "seek_ended_early": gettext_lazy("seek unfinished"),
    "no_subscriber": gettext_lazy("no subscribers"),
    "filter": gettext_lazy("filter cannot be parsed"),
    "broken": gettext_lazy("subscriber broken"),
    "failing": gettext_lazy("failing"),
    "unserved": gettext_lazy("partition without subscriber"),
    "recent_dead_letters": gettext_lazy("too many dead letters"),
    "missing_task": gettext_lazy("task missing"),
    "still": gettext_lazy("stalled"),
    "retrying": gettext_lazy("some keys or tasks fail"),
    "stuck": gettext_lazy("message stuck"),
    "paused": gettext_lazy("paused"),
    "moves": gettext_lazy("moving"),
    "paused_task": gettext_lazy("task paused"),
    "limited": gettext_lazy("limited"),
}
"""By kind of problem, the state of a group that has it, in the order in which they are shown."""
ADVICE = {
    "unavailable": gettext_lazy("Check the database server, and the network between it and this process."),
    "no_subscriber": gettext_lazy("Start a subscriber."),
    "filter": gettext_lazy("Upgrade the subscribers, or set another filter with queueset."),
    "stuck": gettext_lazy("Fix the cause, then retry the messages now."),
    "silent": gettext_lazy("Check its host and its log: was it killed, out of memory or cut off?"),
    "deaths": gettext_lazy(
        "Check the log of these processes, and the kernel's for the out-of-memory killer. To end it at once, "
        "dead-letter the message."
    ),
    "broken": gettext_lazy("Report the traceback in its log. It retries; if the error repeats, restart the process."),
    "outbox": gettext_lazy(
        "Check the log of the subscribers for “sequencer.blocked” and “poller.failed”. “manage.py queuesequence” moves "
        "the messages meanwhile."
    ),
    "outbox_behind": gettext_lazy("Wait until they have been moved."),
    "quarantined": gettext_lazy("Fix the cause, then requeue the messages with queuequarantine, or delete them."),
    "failing": gettext_lazy("Pause the group, so that no more attempts are used up. Fix the handler, then resume."),
    "recent_dead_letters": gettext_lazy("Fix the cause, or roll the handler back, then redrive the dead letters."),
    "retrying": gettext_lazy("Find out why these messages fail, and fix it before their attempts are used up."),
    "dead_letters": gettext_lazy("Fix the cause, then redrive the dead letters; or discard them."),
    "paused": gettext_lazy("Resume the group as soon as it may continue."),
    "paused_task": gettext_lazy("Resume the task as soon as it may continue."),
    "seek_ended_early": gettext_lazy("If it was interrupted, run it again."),
    "drop_ended_early": gettext_lazy("If it was interrupted, run it again."),
    "unserved": gettext_lazy("Start the missing shard, or a subscriber without a subset."),
    "still": gettext_lazy("Check which messages are in flight, and the log of their subscribers."),
    "behind": gettext_lazy("Start more subscribers, or find out why the handler has become slow."),
    "catching_up": gettext_lazy("Wait; more subscribers make it faster."),
    "limited": gettext_lazy("Raise the limit with queueset if it is not the one that you want."),
    "long_transaction": gettext_lazy("End the program that left it open, or KILL the connection."),
    "slow_database": gettext_lazy("Check the load of the database server, its storage, and the network to it."),
    "disk": gettext_lazy("Set a shorter RETENTION for the topic, or raise HEALTH['MAX_LOG_SIZE']."),
    "groupless": gettext_lazy("Correct the topic where it is published, or deploy the handler."),
    "relay": gettext_lazy("Make that database available; the messages wait here until then."),
    "moves": gettext_lazy("Finish the move, or cancel it."),
    "route": gettext_lazy("Correct the settings, or move the topic with queuemove."),
    "reader": gettext_lazy("Start its stream, or drop the reader with queuedropreader if it is not needed any more."),
    "mode": gettext_lazy("Stop the group's subscribers and run queuegroupmode, or deploy the registered mode."),
    "refused": gettext_lazy("Correct what the reason names, then start it again."),
    "recurring": gettext_lazy("Check the log of the subscribers for “recurring.failed”."),
    "missing_task": gettext_lazy(
        "Deploy the code that has the task, or cancel the jobs. An hour after their first claim, they fail."
    ),
    "recurring_failed": gettext_lazy("Fix the cause, then run the schedule now, or redrive the job's dead letter."),
}
"""By kind of problem, the next step."""
Operation = Literal["", "pause", "resume", "retry", "redrive", "requeue", "drop"]
OPERATIONS: dict[Kind, Operation] = {
    "failing": "pause",
    "paused": "resume",
    "paused_task": "resume",
    "stuck": "retry",
    "recent_dead_letters": "redrive",
    "dead_letters": "redrive",
    "quarantined": "requeue",
}
"""By kind of problem, the operation that is the next step, if one is."""

SEVERAL = {
    "no_subscriber": ngettext_lazy(
        "%(number)s group has no live subscribers", "%(number)s groups have no live subscribers", "number"
    ),
    "filter": ngettext_lazy(
        "The filter of %(number)s group cannot be parsed by subscribers of this release",
        "The filters of %(number)s groups cannot be parsed by subscribers of this release",
        "number",
    ),
    "silent": ngettext_lazy(
        "%(number)s subscriber is lost: no heartbeat", "%(number)s subscribers are lost: no heartbeat", "number"
    ),
    "deaths": ngettext_lazy(
        "%(number)s message was being handled when several processes died",
        "%(number)s messages were being handled when several processes died",
        "number",
    ),
    "broken": ngettext_lazy(
        "%(number)s subscriber cannot work for a group because of a bug in the queue",
        "%(number)s subscribers cannot work for a group because of a bug in the queue",
        "number",
    ),
    "paused": ngettext_lazy("%(number)s group is paused", "%(number)s groups are paused", "number"),
    "paused_task": ngettext_lazy("%(number)s task is paused", "%(number)s tasks are paused", "number"),
    "seek_ended_early": ngettext_lazy(
        "The seek of %(number)s group has not finished", "The seeks of %(number)s groups have not finished", "number"
    ),
    "drop_ended_early": ngettext_lazy(
        "The drop of %(number)s group has not finished", "The drops of %(number)s groups have not finished", "number"
    ),
    "unserved": ngettext_lazy(
        "No live subscriber claims some partitions of %(number)s group",
        "No live subscriber claims some partitions of %(number)s groups",
        "number",
    ),
    "still": ngettext_lazy(
        "%(number)s group is stalled: it has live subscribers, but no delivery ends",
        "%(number)s groups are stalled: they have live subscribers, but no delivery ends",
        "number",
    ),
    "behind": ngettext_lazy("%(number)s group falls behind", "%(number)s groups fall behind", "number"),
    "catching_up": ngettext_lazy("%(number)s group catches up", "%(number)s groups catch up", "number"),
    "limited": ngettext_lazy("%(number)s group is at its limits", "%(number)s groups are at their limits", "number"),
    "dead_letters": ngettext_lazy(
        "%(number)s group has dead-lettered messages", "%(number)s groups have dead-lettered messages", "number"
    ),
    "quarantined": ngettext_lazy(
        "The log has refused messages of %(number)s topic",
        "The log has refused messages of %(number)s topics",
        "number",
    ),
    "groupless": ngettext_lazy(
        "%(number)s topic has messages but no consumer group",
        "%(number)s topics have messages but no consumer group",
        "number",
    ),
    "relay": ngettext_lazy(
        "%(number)s database does not receive its messages",
        "%(number)s databases do not receive their messages",
        "number",
    ),
    "moves": ngettext_lazy(
        "%(number)s group waits for the end of a move", "%(number)s groups wait for the end of a move", "number"
    ),
    "route": ngettext_lazy(
        "%(number)s topic was moved to another database than MYSQLQUEUE['TOPICS'] names",
        "%(number)s topics were moved to other databases than MYSQLQUEUE['TOPICS'] names",
        "number",
    ),
    "reader": ngettext_lazy(
        "%(number)s registered reader has not read for long",
        "%(number)s registered readers have not read for long",
        "number",
    ),
    "mode": ngettext_lazy(
        "%(number)s group is registered with another mode than the code declares",
        "%(number)s groups are registered with other modes than the code declares",
        "number",
    ),
    "recurring": ngettext_lazy(
        "%(number)s recurring schedule has a problem", "%(number)s recurring schedules have problems", "number"
    ),
    "missing_task": ngettext_lazy(
        "Subscribers of %(number)s queue cannot run tasks of its jobs",
        "Subscribers of %(number)s queues cannot run tasks of their jobs",
        "number",
    ),
    "recurring_failed": ngettext_lazy(
        "The last job of %(number)s recurring schedule has failed",
        "The last jobs of %(number)s recurring schedules have failed",
        "number",
    ),
    "long_transaction": ngettext_lazy(
        "%(number)s transaction has been open for long", "%(number)s transactions have been open for long", "number"
    ),
}
"""By kind of problem, the text for several of them."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of the queue, or the sign of one."""

    severity: int
    """0: messages are stalled or handlers fail; 1: this will happen if nothing changes; 2: for information."""
    kind: Kind
    """The kind of problem. The how-to guide *Troubleshoot* says what each means, and what to do about it."""
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
    operation: Operation = ""
    """The operation that is this next step; empty if none is."""
    upto: int = 0
    """The newest row that the operation changes: the offset of a dead letter, or the row of a quarantined message."""
    messages: Count = NONE
    """The messages that wait because of it."""
    offsets: frozenset[int] = frozenset()
    """The offsets of these messages in the log, if they are of some keys or tasks."""
    dead_lettered_soon: int = 0
    """Up to how many messages will be dead-lettered within an hour: if each attempt fails as soon as it is due."""
    disk: Count = NONE
    """About how many bytes of disk the messages hold that GC keeps for a group without live subscribers."""
    error: str = ""
    """The last error of the message or of the subscriber that has the problem: the last line of the traceback. For
    messages that the log has refused, the error of the database."""
    failed: Count = NONE
    """The messages that failed lately and fail still, or are dead letters."""
    task: str | None = None
    """Dotted path of the task, or of the first of the tasks, whose jobs have the problem."""
    is_private: bool = False
    """Whether the text names a host, a database user or a subscriber, or contains an error."""

    @property
    def began_at(self) -> int | None:
        """When it began or, if this is not known, since when the oldest message has waited."""
        return self.oldest_at if self.since is None else self.since

    @property
    def harm(self) -> Count:
        """How many messages fail or wait because of it, by which problems of one severity are ranked."""
        return self.failed or (NONE if self.kind in DELIBERATE else self.messages)


def most_frequent(lines: Iterable[str]) -> str:
    """Return one of the most frequent lines of errors, apart from numbers and the like; empty if there is none."""
    alike = grouped((masked(line), line) for line in lines if line)
    return max(alike.values(), key=len, default=[""])[0]


def first_names(names: Iterable[str]) -> str:
    """Return the text for some names, of which ``NAMED`` are named."""
    every = list(names)
    first = ", ".join(every[:NAMED])
    more = len(every) - NAMED
    return _("%(names)s and %(number)s more") % {"names": first, "number": f"{more:,}"} if more > 0 else first


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
