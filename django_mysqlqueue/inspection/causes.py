"""The causes of problems, on which an operator can act, and the state of the queue that follows from them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from django.template.defaultfilters import filesizeformat
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.inspection.group_problems import restarting_text
from django_mysqlqueue.inspection.overview import QueueOverview, get_overview
from django_mysqlqueue.inspection.problem import (
    ADVICE,
    FAILURES,
    NONE,
    NOTE,
    OPERATIONS,
    SEVERAL,
    STOPPING,
    UNSERVED,
    Kind,
    Operation,
    Problem,
    age,
    first_names,
    most_frequent,
    waiting,
)
from django_mysqlqueue.inspection.problems import find_problems
from django_mysqlqueue.service.counts import Count, total
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql.session import grouped
from django_mysqlqueue.text.error_texts import error_name, masked
from django_mysqlqueue.text.humanize import duration, since_text

WITH_ERROR = (*FAILURES, "broken")
"""Kinds of problems whose headline ends with the name of the error."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of problems. Every problem belongs to one cause."""

    problems: tuple[Problem, ...]
    """The problems that it explains, the most telling one first."""
    text: str
    """A description in the active language. ``headline`` adds the name of the error."""
    advice: str
    """The next step, in the active language."""
    sample: Problem | None = None
    """A problem with the most frequent error of its messages or subscribers; None if no error is known. The error may
    contain personal data."""
    operation: Operation = ""
    """The operation that is the next step; empty if none is."""

    @property
    def error(self) -> str:
        """The error of the sample; empty if no error is known."""
        return "" if self.sample is None else self.sample.error

    def headline(self, error: str | None = None) -> str:
        """Return the text with the name of the most frequent error, such as ``PartnerTimeout`` or ``HTTP 429``.

        Args:
            error: the error as it may be shown; None for that of the sample.
        """
        name = error_name(self.error if error is None else error) if self.kind in WITH_ERROR else ""
        return f"{self.text.removesuffix('.')}: {name}." if name else self.text

    @property
    def symptoms(self) -> tuple[Problem, ...]:
        """The problems that say more than the text; none if there is only one."""
        several = self.problems if len(self.problems) > 1 else ()
        return tuple(one for one in several if one.text.removesuffix(".") not in self.text)

    @property
    def severity(self) -> int:
        """The severity of the worst of its problems."""
        return min(one.severity for one in self.problems)

    @property
    def kind(self) -> Kind:
        """The kind of the most telling problem."""
        return self.problems[0].kind

    @property
    def refs(self) -> tuple[GroupRef, ...]:
        """The groups that it holds up."""
        return tuple(sorted({one.ref for one in self.problems if one.ref is not None}))

    @property
    def partitions(self) -> int:
        """The number of partitions that wait, if the problems are about partitions."""
        return len({(one.ref, one.key) for one in self.problems if one.key is not None and one.kind != "retrying"})

    @property
    def messages(self) -> Count:
        """The messages that wait, as the problems count them. Those of a partition or group are counted once."""
        return self._sum(lambda problem: problem.messages)

    @property
    def harm(self) -> Count:
        """How many messages it harms."""
        return self._sum(lambda problem: problem.harm)

    @property
    def rank(self) -> tuple[int, int, int]:
        """The worst cause has the lowest: by severity, then by the messages that it harms, then by those that wait."""
        return self.severity, -self.harm.value, -self.messages.value

    def _sum(self, of: Callable[[Problem], Count]) -> Count:
        found: defaultdict[object, dict[object, Count]] = defaultdict(dict)
        # Those in the outbox are part of what waits for their groups.
        problems = [one for one in self.problems if one.ref is not None] or self.problems
        known = {(one.ref, offset) for one in problems for offset in one.offsets}
        for problem in problems:
            if (problem.ref, problem.offset) in known:
                continue
            parts = found[problem.ref, problem.topic, problem.database]
            part = (problem.key, problem.offset)
            parts[part] = _larger(parts.get(part, NONE), of(problem))
        return total(_larger(parts.pop((None, None), NONE), total(parts.values())) for parts in found.values())

    @property
    def since(self) -> int | None:
        """When it began, as far as this is known, in epoch milliseconds.

        The most telling kind of problem says it, if its beginning is known: messages may have failed before.
        """
        known = [(one.kind != self.kind, one.since) for one in self.problems if one.since is not None]
        return min(known)[1] if known else None

    @property
    def oldest_at(self) -> int | None:
        """When the oldest of the messages started to wait, in epoch milliseconds; None if this is not known."""
        return min((one.oldest_at for one in self.problems if one.oldest_at is not None), default=None)

    def facts(self, now: int, *, when: Callable[[int, int], str] = since_text) -> str:
        """Return how much it holds up, what it costs and since when, in the active language.

        Args:
            now: the database's clock, in epoch milliseconds.
            when: returns the text of a time, as ``since_text`` does.
        """
        parts: list[str] = []
        refs, partitions, messages = len(self.refs), self.partitions, self.messages
        # The texts of other kinds have the number.
        is_told = len(self.problems) == 1 and self.kind not in ("failing", "retrying")
        if refs > 1:
            parts.append(ngettext("%(number)s group", "%(number)s groups", refs) % {"number": f"{refs:,}"})
        if partitions > 1:
            text = ngettext("%(number)s partition", "%(number)s partitions", partitions)
            parts.append(text % {"number": f"{partitions:,}"})
        if messages and not is_told:
            text = ngettext("%(number)s waiting message", "%(number)s waiting messages", messages.value)
            parts.append(text % {"number": messages})
        parts += self._costs()
        if self.since is not None:
            parts.append(_("since %(time)s") % {"time": when(self.since, now)})
        elif self.oldest_at is not None:
            parts.append(_("oldest message since %(time)s") % {"time": when(self.oldest_at, now)})
        return " · ".join(parts)

    def _costs(self) -> Iterator[str]:
        """Yield what it costs if nobody does anything, each time the largest number of a group or topic."""
        soon = {
            one.ref: one.dead_lettered_soon for one in sorted(self.problems, key=lambda one: one.dead_lettered_soon)
        }
        if number := sum(soon.values()):
            text = ngettext(
                "up to %(number)s message will be dead-lettered within an hour",
                "up to %(number)s messages will be dead-lettered within an hour",
                number,
            )
            yield text % {"number": f"{number:,}"}
        held = {one.ref and one.ref.topic: one.disk for one in sorted(self.problems, key=lambda one: one.disk.value)}
        if disk := total(held.values()):
            text = _("≈ %(size)s of disk") if disk.exact else _("≈ %(size)s of disk or more")
            yield text % {"size": filesizeformat(disk.value)}


@checked()
def find_causes(
    overview: QueueOverview | None = None, problems: Collection[Problem] | None = None, *, using: str | None = None
) -> list[Cause]:
    """Return the causes of problems, worst first.

    A group's mode that differs from the code is the cause of its missing subscribers. If no subscriber runs, that is
    the cause of all other groups without subscribers, of lost subscribers, and of messages that stay in the outbox.
    Failures of a group have one cause, with the limits that its repeated attempts reach; so have those of several
    groups with the same error. Other problems of one kind are together, too.

    Args:
        overview: the state to check; if None, it is read.
        problems: the problems that were found in it, worst first; if None, they are searched for.
        using: alias of the database, if there is no overview (default: that of the queue).

    Raises:
        ImproperlyConfigured: the setting ``HEALTH`` is invalid.
    """
    overview = overview or get_overview(using=using)
    rest = list(find_problems(overview) if problems is None else problems)
    found: list[Cause] = []

    def take(wanted: Callable[[Problem], bool]) -> list[Problem]:
        taken = [one for one in rest if wanted(one)]
        rest[:] = [one for one in rest if not wanted(one)]
        return taken

    refused = {one.ref for one in rest if one.kind == "mode"}
    if refused:
        found.append(_several(overview, take(lambda one: one.kind in ("mode", *UNSERVED) and one.ref in refused)))
    # An overview of some groups does not tell whether others have subscribers.
    is_whole = overview.topics is not None
    if is_whole and not overview.live and any(one.kind in ("no_subscriber", "outbox") for one in rest):
        found.append(_nobody(overview, take(_needs_a_subscriber)))
    unserved = {one.ref for one in rest if one.kind == "no_subscriber"}
    if unserved:
        found.append(_several(overview, take(lambda one: one.kind in UNSERVED and one.ref in unserved)))
    # Each has a reason of its own.
    found += [_several(overview, [one]) for one in take(lambda one: one.kind == "refused")]
    # Attempts that fail and are repeated use up the limits of their group.
    failing = {one.ref for one in rest if one.kind in FAILURES[:3] or (one.kind == "stuck" and one.severity < NOTE)}
    failures = _by_failure(take(lambda one: one.kind in FAILURES or (one.kind == "limited" and one.ref in failing)))
    found += [_failure(overview, alike) for alike in failures.values()]
    found += [_several(overview, alike) for alike in grouped((one.kind, one) for one in rest).values()]
    return sorted(found, key=lambda cause: cause.rank)


def _larger(one: Count, other: Count) -> Count:
    return max(one, other, key=lambda count: count.value)


def _needs_a_subscriber(problem: Problem) -> bool:
    return problem.kind in ("no_subscriber", "silent", "outbox", "outbox_behind") or (
        problem.kind == "recurring" and problem.severity == 0
    )


def _nobody(overview: QueueOverview, problems: Sequence[Problem]) -> Cause:
    """Return that no subscriber runs."""
    by_kind = sorted(problems, key=lambda one: (one.kind != "no_subscriber", one.severity))
    restarting = next((text for group in overview.groups if (text := restarting_text(group, overview.now))), "")
    cause = Cause(tuple(by_kind), "", restarting or str(_("Start “manage.py runsubscriber”.")))
    oldest = cause.oldest_at  # A schedule may have been overdue, and a subscriber lost, before.
    text = (
        _("No subscriber is running; %(lag)s.")
        if oldest is None
        else _("No subscriber is running; %(lag)s, the oldest for %(age)s.")
    )
    values = {"lag": waiting(cause.messages), "age": duration(age(overview.now, oldest))}
    return Cause(cause.problems, text % values, cause.advice)


def _by_failure(problems: Iterable[Problem]) -> dict[object, list[Problem]]:
    """Return failures by their cause: an error that several groups have, else the group."""
    found: dict[object, list[Problem]] = {}
    for ref, failures in grouped((one.ref, one) for one in problems).items():
        sample = _sample(failures)
        is_old = all(one.kind == "dead_letters" for one in failures)
        key: object = "dead_letters" if is_old else masked(sample.error) if sample else ref
        found.setdefault(key, []).extend(failures)
    return found


def _sample(problems: Iterable[Problem]) -> Problem | None:
    """Return a problem with the most frequent error, apart from numbers and the like; None if no error is known."""
    failed = [one for one in problems if one.error]
    most = most_frequent(one.error for one in failed)
    return next((one for one in failed if one.error == most), None)


def _failure(overview: QueueOverview, problems: Sequence[Problem]) -> Cause:
    """Return the cause of failures of one group, or of several with the same error or with old dead letters alone."""
    kinds = (*FAILURES, "limited")
    # That a task fails tells more than that there are dead letters.
    ordered = tuple(
        sorted(problems, key=lambda one: (one.kind != "failing" and not one.task, kinds.index(one.kind), one.severity))
    )
    main = ordered[0]
    refs = sorted({one.ref for one in ordered if one.ref is not None})
    stuck = [one for one in ordered if one.kind == "stuck"]
    if len(refs) > 1 and main.kind == "dead_letters":
        return _several(overview, ordered)
    if len(refs) > 1:
        text = _("%(number)s groups fail with the same error (%(names)s).")
        text %= {"number": f"{len(refs):,}", "names": first_names(map(str, refs))}
    elif main.kind == "stuck" and len(stuck) > 1:
        text = _stuck_text(overview, stuck)
    else:
        text = main.text
    return Cause(ordered, text, *_step(ordered))


def _stuck_text(overview: QueueOverview, stuck: Sequence[Problem]) -> str:
    """Return in one sentence that several messages, of one or several groups, have failed."""
    oldest = min((one.oldest_at for one in stuck if one.oldest_at is not None), default=None)
    refs = {one.ref for one in stuck}
    values = {
        "number": f"{len(stuck):,}",
        "age": duration(age(overview.now, oldest)),
        "names": first_names(sorted(map(str, refs))),
    }
    if any(one.messages.value > 1 for one in stuck):
        # Only with on_failure="block" does anything wait for a message that has failed.
        values["lag"] = waiting(total(one.messages for one in stuck))
        text = _(
            "%(number)s partitions of %(names)s wait for messages that have failed; %(lag)s, the oldest for %(age)s."
        )
    else:
        text = _("%(number)s messages of %(names)s have failed and will be retried; the oldest has waited for %(age)s.")
    return text % values


def _several(overview: QueueOverview, problems: Sequence[Problem]) -> Cause:
    """Return the cause of problems of one kind, and of others that these explain."""
    problems = sorted(problems, key=lambda one: one.kind in UNSERVED)
    main = problems[0]
    alike = [one for one in problems if one.kind == main.kind]
    cause = Cause(tuple(problems), main.text, *_step(alike))
    names = sorted({_name(one) for one in alike} - {""})
    if len(names) < 2:
        return cause
    text = str(SEVERAL[main.kind] % {"number": len(names)})
    parts = [f"{text}: {first_names(names)}"]
    if cause.messages:
        parts.append(waiting(cause.messages))
    return replace(cause, text="; ".join(parts) + ".")


def _step(problems: Sequence[Problem]) -> tuple[str, Problem | None, Operation]:
    """Return the next step for the most telling kind of problem, the sample of the errors, and the step's operation."""
    kind = problems[0].kind
    alike = {(one.advice, one.operation) for one in problems if one.kind == kind}
    advice, operation = alike.pop() if len(alike) == 1 else ("", "")
    if not advice:
        advice, operation = str(ADVICE[kind]), operation or OPERATIONS.get(kind, "")
    return advice, _sample(problems), operation


def _name(problem: Problem) -> str:
    """Return the name of what has a problem."""
    names = (problem.subscriber, problem.ref, problem.database, problem.topic)
    return next((str(name) for name in names if name is not None), "")


# -- the state of the queue ------------------------------------------------------------


State = Literal["ok", "degraded", "stopped"]

NAMES = {
    "ok": gettext_lazy("OK"),
    "degraded": gettext_lazy("Degraded"),
    "stopped": gettext_lazy("Stopped"),
}


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The state of the queue, of one database or of all."""

    state: State
    """``"stopped"``: messages wait, and no group can process messages (those that are paused or move do not count), or
    no message leaves the outbox; ``"degraded"``: there is another problem that is not only for information; else
    ``"ok"``."""
    text: str
    """What is wrong: the worst cause of the state; or that nothing is. ``headline`` adds the name of the error."""
    advice: str = ""
    """The next step; empty if there is none."""
    cause: Cause | None = None
    """The worst cause; None if there is none."""

    @property
    def name(self) -> str:
        """The state in the active language."""
        return str(NAMES[self.state])

    def headline(self, error: str | None = None) -> str:
        """Return the text with the name of the error.

        Args:
            error: the error of the cause as it may be shown; None for that of its sample.
        """
        if self.cause is None or self.state == "ok":
            return self.text
        return replace(self.cause, text=self.text).headline(error)


@dataclass(frozen=True, slots=True)
class QueueState:
    """What pages and commands say of a queue or a group: its state and its causes follow from the same problems."""

    overview: QueueOverview
    problems: Sequence[Problem]
    """Worst first."""
    causes: Sequence[Cause]
    """Worst first."""
    status: QueueStatus


def state_of(overview: QueueOverview, problems: Sequence[Problem]) -> QueueState:
    """Return what is said of a queue or a group."""
    found = find_causes(overview, problems)
    return QueueState(overview, problems, found, status_of(overview, found))


def status_of(overview: QueueOverview, found: Sequence[Cause]) -> QueueStatus:
    """Return the state of a queue with some causes, worst first. Its text is that of the worst cause of the state."""
    serious = [cause for cause in found if cause.severity < NOTE]
    if not serious:
        return QueueStatus("ok", _fine(overview, found), cause=found[0] if found else None)
    stopping = [(one, cause) for cause in serious for one in cause.problems if _stops(one)]
    stopped = {one.ref for one, _ in stopping}
    # A group that is paused or moves is to process nothing.
    held = {one.ref for cause in found for one in cause.problems if one.kind in ("paused", "moves")}
    busy = {group.ref for group in overview.groups if group.has_work} - held
    # A group that has nothing to do at this moment would process the next message.
    able = {group.ref for group in overview.groups if group.live} - held - stopped
    # The outbox has no group: as long as nothing leaves it, no group receives a message.
    is_stopped = None in stopped or (bool(busy) and busy <= stopped and not able)
    worst = next(cause for one, cause in stopping if one.ref is None or one.ref in busy) if is_stopped else serious[0]
    return QueueStatus("stopped" if is_stopped else "degraded", worst.text, worst.advice, worst)


def _stops(problem: Problem) -> bool:
    return problem.kind in STOPPING and problem.severity < NOTE


def unavailable(using: str, reason: str) -> QueueStatus:
    """Return the state of a database that refuses or does not answer."""
    cause = Cause((Problem(0, "unavailable", reason, database=using),), reason, str(ADVICE["unavailable"]))
    return QueueStatus("stopped", cause.text, cause.advice, cause)


def _fine(overview: QueueOverview, notes: Sequence[Cause]) -> str:
    groups = len(overview.groups)
    if not groups:
        text = _("No consumer group is registered yet.")
        return with_notes(text, notes) if notes else text
    values = {"number": f"{groups:,}", "lag": str(overview.lag)}
    text = ngettext(
        "%(number)s consumer group, backlog %(lag)s.", "%(number)s consumer groups, backlog %(lag)s.", groups
    )
    return with_notes(text % values, notes)


def with_notes(text: str, notes: Sequence[Cause]) -> str:
    """Return the text of a state in which nothing is wrong, with the first of the causes that are for information."""
    more = _("For information: %(text)s") % {"text": notes[0].text} if notes else _("No problems found.")
    return f"{text} {more}"
