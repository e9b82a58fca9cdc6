"""Causes of problems and the state of the queue, as pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.error_texts import ErrorTexts
from django_mysqlqueue.admin.permissions import may
from django_mysqlqueue.inspection import Cause, Problem, QueueStatus
from django_mysqlqueue.options.topics import dlq_topic
from django_mysqlqueue.permissions import OPERATE

CAUSES = 7
"""Maximum number of causes that a page shows without a click."""
SYMPTOMS = 50
"""Maximum number of problems that are listed for a cause."""
BUTTONS = {
    "pause": gettext_lazy("Pause group"),
    "resume": gettext_lazy("Resume group"),
    "resume-task": gettext_lazy("Resume task"),
    "retry": gettext_lazy("Retry now"),
    "redrive": gettext_lazy("Redrive"),
    "requeue-topic": gettext_lazy("Requeue"),
    "drop": gettext_lazy("Drop group"),
}
"""By operation of the dashboard, the text of its button beside a cause."""


@dataclass(frozen=True, slots=True)
class Button:
    """A link to the form of an operation."""

    link: str
    text: str


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
    """With the error in its text, if the user may view it."""
    id: str
    """The same after a refresh, so that what is expanded stays so."""
    link: str
    action: str
    facts: str
    """How much it holds up, and since when."""
    error: str
    """The most frequent error, redacted."""
    symptoms: list[Linked]
    """Those of its problems that say more than its text; at most ``SYMPTOMS``."""
    number: int
    """How many there are."""
    button: Button | None
    """The operation that is the next step; None if none is, or the user may not run it."""
    alias: str = ""
    """The database, on the page of all databases."""

    @property
    def more_symptoms(self) -> int:
        """How many of them are not listed."""
        return self.number - len(self.symptoms)


@dataclass(frozen=True, slots=True)
class Banner:
    """The state of the queue above a page."""

    status: QueueStatus
    link: str = ""
    action: str = ""
    button: Button | None = None


def banner(dashboard: DashboardContext, status: QueueStatus, errors: ErrorTexts) -> Banner:
    """Return the banner for a state, with the next step: a link to the page for it, and the operation."""
    if (cause := status.cause) is None or status.state == "ok":
        return Banner(status)
    status = replace(status, text=status.headline(_error(cause, errors)))
    return Banner(status, *_link(dashboard, cause), _button(dashboard, cause, errors))


def shown(
    dashboard: DashboardContext, causes: Iterable[Cause], now: int, errors: ErrorTexts, *, alias: str = ""
) -> list[ShownCause]:
    """Return causes as a page lists them."""
    return [_shown(dashboard, cause, now, errors, alias) for cause in causes]


def _shown(dashboard: DashboardContext, cause: Cause, now: int, errors: ErrorTexts, alias: str) -> ShownCause:
    first, found = cause.problems[0], cause.symptoms
    name = first.ref or first.topic or first.database or ""
    error = _error(cause, errors)
    return ShownCause(
        replace(cause, text=cause.headline(error)),
        f"mq-cause-{alias}-{cause.kind}-{name}".replace(" ", "-"),
        *_link(dashboard, cause),
        cause.facts(now),
        error,
        [Linked(one, *link_of(dashboard, one)) for one in found[:SYMPTOMS]],
        len(found),
        _button(dashboard, cause, errors),
        alias,
    )


def _error(cause: Cause, errors: ErrorTexts) -> str:
    """Return the most frequent error as the user may see it; empty if none is known."""
    sample = cause.sample
    topic = "" if sample is None else sample.ref.topic if sample.ref else sample.topic
    return errors.whole(cause.error, topic) if topic else ""


def _button(dashboard: DashboardContext, cause: Cause, errors: ErrorTexts) -> Button | None:
    """Return the operation that is the next step, if it is about one group or topic on which the user may run it."""
    first, name = cause.problems[0], str(cause.operation)
    alike = {(one.ref, one.topic, one.task) for one in cause.problems if one.kind == cause.kind}
    topic = first.ref.topic if first.ref else first.topic
    if not name or not topic or len(alike) > 1 or len(cause.refs) > 1 or not may(errors.request, topic, OPERATE):
        return None
    given: dict[str, object] = {"topic": topic, "group": first.ref.group if first.ref else "", "task": first.task}
    if name == "redrive":
        given |= {"topic": dlq_topic(topic), "upto": first.upto}
    elif name == "requeue":
        name, given["upto"] = "requeue-topic", first.upto
    elif name == "resume" and first.task:
        name = "resume-task"
    return Button(dashboard.do(errors.request, name, **given), str(BUTTONS[name]))


def _link(dashboard: DashboardContext, cause: Cause) -> tuple[str, str]:
    """Return the link for a cause: that of its most telling problem, unless others of the kind have other pages."""
    if cause.kind == "no_subscriber" and len(cause.problems) > 1:
        return dashboard.url("inflight"), _("Open in flight")
    if cause.kind == "quarantined" and len(cause.problems) > 1:
        return dashboard.url("quarantine"), _("Open quarantine")
    if len(cause.refs) > 1:
        return "", ""
    first = cause.problems[0]
    if cause.kind == "stuck" and first.ref and len(cause.problems) > 1:
        named = {"group": first.ref.group, "topic": first.ref.topic}
        return dashboard.url("deadletters", state="retrying", **named), _("Open dead letters (retrying)")
    return link_of(dashboard, first)


def link_of(dashboard: DashboardContext, problem: Problem) -> tuple[str, str]:
    """Return the address of the page for a problem, and the text of the link; empty if there is none."""
    ref, to = problem.ref, dashboard.url
    named = {"group": ref.group, "topic": ref.topic} if ref else {}
    match problem.kind:
        case "stuck" | "deaths" | "relay" if problem.offset is not None:
            return to("message", offset=problem.offset), _("Open message")
        case "silent" | "refused" | "slow_database" | "deaths" | "outbox" | "outbox_behind":
            return to("inflight"), _("Open in flight")
        case "dead_letters" | "recent_dead_letters" | "retrying":
            return _dead_letters(dashboard, problem, named)
        case "failing" if not problem.messages:  # Some attempts succeed, or all messages are in the DLQ.
            return _dead_letters(dashboard, problem, named)
        case "quarantined":
            return to("quarantine", topic=problem.topic), _("Open quarantine")
        case "recurring" | "recurring_failed":
            return to("recurring"), _("Open schedules")
        case "groupless" | "route":
            return to("messages", topic=problem.topic), _("Open messages")
        case "disk":
            return to("offsets"), _("Open topics & offsets")
        case "long_transaction" | "relay":
            return "", ""
        case "unavailable":
            return to("changelist", database=problem.database), _("Open database")
        case _:
            return to("group", **named), _("Open group")


def _dead_letters(dashboard: DashboardContext, problem: Problem, named: dict[str, str]) -> tuple[str, str]:
    to = dashboard.url
    if problem.kind != "retrying":
        return to("deadletters", **named), _("Open dead letters")
    if problem.task:  # Jobs that have failed are dead letters.
        return to("deadletters", task=problem.task, **named), _("Open dead letters (task)")
    return to("deadletters", state="retrying", key=problem.key, **named), _("Open dead letters (retrying)")


def split(causes: Sequence[ShownCause]) -> dict[str, Sequence[ShownCause]]:
    """Return the template's context for a list of causes: the first ones, and the others."""
    return {"causes": causes[:CAUSES], "more_causes": causes[CAUSES:]}
