"""Causes of problems and the state of the queue, as pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.utils.translation import gettext as _

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.error_texts import ErrorTexts
from django_mysqlqueue.inspection import Cause, Problem, QueueStatus

CAUSES = 7
"""Maximum number of causes that a page shows without a click."""
SYMPTOMS = 50
"""Maximum number of problems that are listed for a cause."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A problem with a link to the page for it."""

    problem: Problem
    link: str
    action: str


@dataclass(frozen=True, slots=True)
class ShownCause:
    """A cause in a list."""

    cause: Cause
    id: str
    """The same after a refresh, so that what is expanded stays so."""
    link: str
    action: str
    facts: str
    """How much it holds up, and since when."""
    error: str
    """The most frequent error, redacted."""
    symptoms: list[Linked]
    """The problems that it explains, if there are several; at most ``SYMPTOMS``."""
    alias: str = ""
    """The database, on the page of all databases."""

    @property
    def more_symptoms(self) -> int:
        """How many of its problems are not listed."""
        return len(self.cause.problems) - len(self.symptoms) if self.symptoms else 0


@dataclass(frozen=True, slots=True)
class Banner:
    """The state of the queue above a page."""

    status: QueueStatus
    link: str = ""
    action: str = ""


def banner(dashboard: DashboardContext, status: QueueStatus) -> Banner:
    """Return the banner for a state, with a link to the page for the next step."""
    if status.cause is None or status.state == "ok":
        return Banner(status)
    return Banner(status, *_link(dashboard, status.cause))


def shown(
    dashboard: DashboardContext, causes: Iterable[Cause], now: int, errors: ErrorTexts, *, alias: str = ""
) -> list[ShownCause]:
    """Return causes as a page lists them."""
    return [_shown(dashboard, cause, now, errors, alias) for cause in causes]


def _shown(dashboard: DashboardContext, cause: Cause, now: int, errors: ErrorTexts, alias: str) -> ShownCause:
    first = cause.problems[0]
    name = first.ref or first.topic or first.database or ""
    error, sample = "", cause.sample
    if sample is not None and (topic := sample.ref.topic if sample.ref else sample.topic):
        error = errors.whole(sample.error, topic)
    several = len(cause.problems) > 1
    symptoms = [Linked(one, *link_of(dashboard, one)) for one in cause.problems[:SYMPTOMS]] if several else []
    place = f"mq-cause-{alias}-{cause.kind}-{name}".replace(" ", "-")
    return ShownCause(cause, place, *_link(dashboard, cause), cause.facts(now), error, symptoms, alias)


def _link(dashboard: DashboardContext, cause: Cause) -> tuple[str, str]:
    """Return the link for a cause: that of its most telling problem, unless others of the kind have other pages."""
    if cause.kind == "no_subscriber" and len(cause.problems) > 1:
        return dashboard.url("inflight"), _("Open subscribers")
    if cause.kind == "quarantined" and len(cause.problems) > 1:
        return dashboard.url("quarantine"), _("Open quarantine")
    if len(cause.refs) > 1:
        return "", ""
    first = cause.problems[0]
    if cause.kind == "stuck" and first.ref and len(cause.problems) > 1:
        named = {"group": first.ref.group, "topic": first.ref.topic}
        return dashboard.url("deadletters", state="retrying", **named), _("Open errors")
    return link_of(dashboard, first)


def link_of(dashboard: DashboardContext, problem: Problem) -> tuple[str, str]:
    """Return the address of the page for a problem, and the text of the link; empty if there is none."""
    ref, to = problem.ref, dashboard.url
    named = {"group": ref.group, "topic": ref.topic} if ref else {}
    match problem.kind:
        case "stuck" | "deaths" | "relay" if problem.offset is not None:
            return to("message", offset=problem.offset), _("Open message")
        case "silent" | "refused" | "slow_database" | "deaths" | "outbox" | "outbox_behind":
            return to("inflight"), _("Open subscribers")
        case "dead_letters" | "recent_dead_letters":
            return to("deadletters", **named), _("Open dead letters")
        case "quarantined":
            return to("quarantine", topic=problem.topic), _("Open quarantine")
        case "retrying":
            # Jobs that have failed are dead letters.
            narrowed = {"task": problem.task} if problem.task else {"state": "retrying"}
            return to("deadletters", **narrowed, **named), _("Open errors")
        case "recurring" | "recurring_failed":
            return to("recurring"), _("Open schedules")
        case "groupless" | "route":
            return to("messages", topic=problem.topic), _("Open messages")
        case "long_transaction" | "relay":
            return "", ""
        case "unavailable":
            return to("changelist", database=problem.database), _("Open database")
        case _:
            return to("group", **named), _("Open group")


def split(causes: Sequence[ShownCause]) -> dict[str, Sequence[ShownCause]]:
    """Return the template's context for a list of causes: the first ones, and the others."""
    return {"causes": causes[:CAUSES], "more_causes": causes[CAUSES:]}
