"""The state of the queue in one word, with the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.inspection import causes
from django_mysqlqueue.inspection.causes import Cause, find_causes
from django_mysqlqueue.inspection.overview import QueueOverview
from django_mysqlqueue.inspection.problem import NOTE, STOPPING, Problem
from django_mysqlqueue.service.counts import total

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
    """``"stopped"``: no group that has messages, without those that are paused or move, processes any, or no message
    leaves the outbox; ``"degraded"``: there is another problem that is not only for information; else ``"ok"``."""
    text: str
    """What is wrong: the worst cause of the state; or that nothing is."""
    advice: str = ""
    """The next step; empty if there is none."""
    cause: Cause | None = None
    """The worst cause; None if there is none."""

    @property
    def name(self) -> str:
        """The state in the active language."""
        return str(NAMES[self.state])


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


@checked()
def status_of(overview: QueueOverview, found: Sequence[Cause]) -> QueueStatus:
    """Return the state of the queue. Its text is that of the worst cause of the state.

    Args:
        overview: the state of its groups.
        found: the causes of its problems, worst first.
    """
    serious = [cause for cause in found if cause.severity < NOTE]
    if not serious:
        return QueueStatus("ok", _fine(overview, found), cause=found[0] if found else None)
    stopping = [(one, cause) for cause in serious for one in cause.problems if _stops(one)]
    stopped = {one.ref for one, _ in stopping}
    # A group that is paused or moves is to process nothing.
    held = {one.ref for cause in found for one in cause.problems if one.kind in ("paused", "moves")}
    busy = {group.ref for group in overview.groups if group.has_work} - held
    # The outbox has no group: as long as nothing leaves it, no group receives a message.
    is_stopped = None in stopped or (bool(busy) and busy <= stopped)
    worst = next(cause for one, cause in stopping if one.ref is None or one.ref in busy) if is_stopped else serious[0]
    return QueueStatus("stopped" if is_stopped else "degraded", worst.text, worst.advice, worst)


def _stops(problem: Problem) -> bool:
    return problem.kind in STOPPING and problem.severity < NOTE


def unavailable(using: str, reason: str) -> QueueStatus:
    """Return the state of a database that refuses or does not answer."""
    cause = causes.unavailable(using, reason)
    return QueueStatus("stopped", cause.text, cause.advice, cause)


def _fine(overview: QueueOverview, notes: Sequence[Cause]) -> str:
    groups = len(overview.groups)
    if not groups:
        text = _("No consumer group is registered yet.")
        return with_notes(text, notes) if notes else text
    values = {"number": f"{groups:,}", "lag": str(total(group.waiting_messages for group in overview.groups))}
    text = ngettext(
        "%(number)s consumer group, backlog %(lag)s.", "%(number)s consumer groups, backlog %(lag)s.", groups
    )
    return with_notes(text % values, notes)


def with_notes(text: str, notes: Sequence[Cause]) -> str:
    """Return the text of a state in which nothing is wrong, with the first of what is only for information.

    ``notes``: the causes that are only for information.
    """
    more = _("For information: %(text)s") % {"text": notes[0].text} if notes else _("No problems found.")
    return f"{text} {more}"
