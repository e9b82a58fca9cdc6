"""The state of the queue in one word, with the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.arguments import checked
from django_mysqlqueue.inspection import causes
from django_mysqlqueue.inspection.causes import Cause
from django_mysqlqueue.inspection.overview import QueueOverview
from django_mysqlqueue.inspection.problem import Kind
from django_mysqlqueue.service.counts import total

State = Literal["ok", "degraded", "stopped"]

STOPPING: frozenset[Kind] = frozenset(
    ("no_subscriber", "outbox", "filter", "paused", "seek_ended_early", "drop_ended_early", "still")
)
"""Kinds of problems for which a group processes nothing."""
NOTE = 2
"""Severity of problems that are only for information."""
NAMES = {
    "ok": gettext_lazy("OK"),
    "degraded": gettext_lazy("Degraded"),
    "stopped": gettext_lazy("Stopped"),
}


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The state of the queue, of one database or of all."""

    state: State
    """``"stopped"``: no group that has messages processes any, or no message leaves the outbox; ``"degraded"``: there
    is another problem that is not only for information; else ``"ok"``."""
    text: str
    """What is wrong, or that nothing is."""
    advice: str = ""
    """The next step; empty if there is none."""
    cause: Cause | None = None
    """The worst cause; None if there is none."""

    @property
    def name(self) -> str:
        """The state in the active language."""
        return str(NAMES[self.state])


@checked()
def status_of(overview: QueueOverview, found: Sequence[Cause]) -> QueueStatus:
    """Return the state of the queue.

    Args:
        overview: the state of its groups.
        found: the causes of its problems, worst first.
    """
    serious = [cause for cause in found if cause.severity < NOTE]
    if not serious:
        return QueueStatus("ok", _fine(overview), cause=found[0] if found else None)
    worst = serious[0]
    # The subscribers of most groups may be restarting while a few others are paused, for example.
    notes = [one for one in found if one.kind == "no_subscriber" and one.messages.value > worst.messages.value]
    if worst.severity and notes:
        worst = notes[0]
    stopped = {
        problem.ref
        for cause in serious
        for problem in cause.problems
        if problem.kind in STOPPING and problem.severity < NOTE
    }
    busy = {group.ref for group in overview.groups if group.has_work}
    # The outbox has no group: as long as nothing leaves it, no group receives a message.
    is_stopped = None in stopped or (bool(busy) and busy <= stopped)
    return QueueStatus("stopped" if is_stopped else "degraded", worst.text, worst.advice, worst)


def unavailable(using: str, reason: str) -> QueueStatus:
    """Return the state of a database that refuses or does not answer.

    Args:
        using: its alias.
        reason: a sentence that names it.
    """
    cause = causes.unavailable(using, reason)
    return QueueStatus("stopped", cause.text, cause.advice, cause)


def _fine(overview: QueueOverview) -> str:
    groups = len(overview.groups)
    values = {"number": f"{groups:,}", "lag": str(total(group.waiting_messages for group in overview.groups))}
    return (
        ngettext(
            "%(number)s consumer group, backlog %(lag)s. No problems found.",
            "%(number)s consumer groups, backlog %(lag)s. No problems found.",
            groups,
        )
        % values
        if groups
        else _("No consumer group is registered yet.")
    )
