"""The reason why a message waits, as its page shows it."""

from __future__ import annotations

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.formatting import moment
from django_mysqlqueue.admin.pages.steps import Step
from django_mysqlqueue.inspection import GroupState
from django_mysqlqueue.inspection.reasons import WaitReason
from django_mysqlqueue.inspection.subscribers import Busy
from django_mysqlqueue.options.delivery_limits import NO_KEY
from django_mysqlqueue.service.leasing import MAX_PENDING
from django_mysqlqueue.text.humanize import duration

UNFINISHED = {
    "seek": (
        gettext_lazy("A seek of this group has not finished. If it was interrupted, run it again."),
        "mq-life-bad",
    ),
    "drop": (
        gettext_lazy("A drop of this group has not finished. If it was interrupted, run it again."),
        "mq-life-bad",
    ),
    "move": (
        gettext_lazy("The group waits until it has settled all messages in the database that its topic leaves."),
        "",
    ),
}
"""Unfinished operations on a group, each with its text and CSS class."""
TEXTS = {
    "paused": gettext_lazy("The group is paused. It claims no messages until you resume it."),
    "paused_task": gettext_lazy("Its task is paused: the group claims no jobs of it until you resume the task."),
    "no_subscriber": gettext_lazy("The group has no live subscribers."),
    "unserved": gettext_lazy(
        "No live subscriber of the group claims this partition: it is in none of their subsets (--partition, --shard)."
    ),
    "in_flight": gettext_lazy("It waits for message %(offset)s of its partition, which is in flight at %(by)s."),
    "blocked": gettext_lazy(
        "It waits for message %(offset)s of its partition, which is not settled: the group blocks on failure."
    ),
    "lost": gettext_lazy(
        "It waits for message %(offset)s of its partition, whose subscriber was lost, to keep the order."
    ),
    "behind": gettext_lazy("It waits for message %(offset)s: the group claims messages of a partition in order."),
    "pending": gettext_lazy(
        "At least %(pending)s messages of its partition wait for another attempt. The group claims no new messages of "
        "the partition until there are fewer."
    ),
    "superseded": gettext_lazy(
        "Message %(offset)s has the same coalesce key: a subscriber will settle this one without calling the handler."
    ),
    "coalesced": gettext_lazy(
        "It waits for message %(offset)s, which has the same coalesce key and is in flight at %(by)s."
    ),
    "expired": gettext_lazy("It has expired: a subscriber will settle or dead-letter it without calling the handler."),
    "may_block": gettext_lazy(
        "If the group blocks on failure, it waits for message %(offset)s of its partition, which is not settled."
    ),
    "unknown": gettext_lazy(
        "The group has too many unsettled messages to search all of them. Others of its partition may hold it up."
    ),
    "none": gettext_lazy("Nothing holds it up: a subscriber claims it when it has room."),
}
"""Texts by kind of reason."""
BAD = ("no_subscriber", "unserved")
"""Reasons that are a problem."""
RESTS = ("rate", "held", "coalesced")
"""Reasons for which a message waits until a time at which a claim only asks again."""


def reason_step(
    dashboard: DashboardContext, reason: WaitReason | None, state: GroupState, now: int, busy: Busy | None = None
) -> Step | None:
    """Return the step that says why a group has not started a message; None if the other steps of the page say it.

    ``reason``: the reason, or None. ``busy``: how busy the group's subscribers are, for a message that nothing else
    holds up; None if it is not known.
    """
    if reason is None or reason.kind in ("filter", "filtered"):
        return None
    if reason.kind == "unfinished":
        unfinished, css = UNFINISHED[state.unfinished]
        return Step(str(unfinished), css=css)
    if reason.kind == "none" and busy is not None and busy.is_full:
        text = ngettext(
            "The subscribers are busy: messages of this group occupy the only handler thread.",
            "The subscribers are busy: messages of this group occupy all %(number)s handler threads.",
            busy.threads,
        ) % {"number": f"{busy.threads:,}"}
        to = dashboard.url("inflight", group=state.ref.group, topic=state.ref.topic)
        return Step(text, link=to, link_text=_("Open messages in flight"))
    if reason.kind in ("rate", "held"):
        return Step(_limit_text(reason, state, now))
    text = str(TEXTS[reason.kind]) % {"offset": reason.offset, "by": reason.by, "pending": f"{MAX_PENDING:,}"}
    css = "mq-life-bad" if reason.kind in BAD else ""
    if reason.kind == "no_subscriber":
        return Step(text, css=css, link=dashboard.url("inflight"), link_text=_("Open in flight"))
    if reason.offset:
        return Step(text, link=dashboard.url("message", offset=reason.offset), link_text=_("Open message"))
    return Step(text, css=css)


def _limit_text(reason: WaitReason, state: GroupState, now: int) -> str:
    limits, per_key = state.limits, reason.limit_key != NO_KEY
    if reason.kind == "held":
        number = limits.max_in_flight_per_key if per_key else limits.max_in_flight
        text = ngettext(
            "A limit holds it up: the group has %(number)s message in flight, the maximum.",
            "A limit holds it up: the group has %(number)s messages in flight, the maximum.",
            number or 0,
        )
        if per_key:
            text = ngettext(
                "A limit holds it up: %(number)s message with the same %(field)s is in flight, the maximum.",
                "A limit holds it up: %(number)s messages with the same %(field)s are in flight, the maximum.",
                number or 0,
            )
        return text % {"number": number, "field": limits.limit_by or _("key")}
    text = _("A rate holds it up: the group starts at most %(rate)s. The next slot is free in %(time)s, at %(at)s.")
    if per_key:
        text = _(
            "A rate holds it up: at most %(rate)s start with the same %(field)s. The next slot is free in %(time)s, "
            "at %(at)s."
        )
    left = duration((reason.until - now) / 1000)
    return text % {
        "rate": limits.rate_of(reason.limit_key),
        "field": limits.limit_by or _("key"),
        "time": left,
        "at": moment(reason.until),
    }
