"""Template tags of the dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from django import template
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from django_mysqlqueue.names.keys import lane_of
from django_mysqlqueue.text import escaping
from django_mysqlqueue.text.addresses import do_url, url
from django_mysqlqueue.text.humanize import duration, moment, partition_text, shortened, task_name

register = template.Library()
register.filter("moment", moment)
register.filter("duration", duration)
register.filter("task_name", task_name)
register.filter("json", json.dumps)
FOCUSABLE = SafeString(' tabindex="0"')


@register.filter
def partition(name: str) -> str:
    """Return the text for a partition's name."""
    return partition_text(*lane_of(name))


@register.filter
def visible(value: object) -> str:
    """Return a value as text on one line, with invisible characters and those that change the direction escaped."""
    return escaping.visible(str(value))


@register.filter
def visible_lines(value: object) -> str:
    """Return a value as text of several lines, with characters escaped as by ``visible``."""
    return escaping.visible_lines(str(value))


@register.filter
def age(since: int | None, now: int) -> str:
    """Return how long something has lasted, both times in epoch milliseconds; empty if it has not begun."""
    return "" if since is None else duration((now - since) / 1000)


@register.filter
def until(at: int | None, now: int) -> str:
    """Return the time that is left, both times in epoch milliseconds; empty if none is left."""
    return duration((at - now) / 1000) if at and at > now else ""


@register.filter(name="shortened")
def shortened_to(text: str, most: int) -> str:
    """Return a text with at most so many characters."""
    return shortened(text, most=most)


@register.filter
def grouped(number: int) -> str:
    """Return a number with separators between thousands."""
    return f"{number:,}"


@register.simple_tag(takes_context=True)
def queue_error(context: dict[str, Any], text: str, topic: str) -> str:
    """Return a whole error of a topic, as the user may see it."""
    return escaping.visible(context["page"].errors.whole(text, topic))


@register.simple_tag(takes_context=True)
def queue_time(context: dict[str, Any], at: int | None, *, in_link: bool = False) -> str:
    """Return a time, in epoch milliseconds, as the time since it or until it; ``-`` for 0 and None.

    The time itself is for screen readers, the pointer and the focus, which is the link's if it is in one.
    """
    if not at:
        return "-"
    now = context["page"].now
    text = _("in %(time)s") if at > now else _("%(time)s ago")
    return format_html(
        '<bdi class="mq-time"{}>{}<span dir="ltr"> {}</span></bdi>',
        "" if in_link else FOCUSABLE,
        text % {"time": duration(abs(at - now) / 1000)},
        moment(at),
    )


@register.simple_tag
def queue_sparkline(values: Sequence[float | None], label: str) -> str:
    """Return a sparkline; nothing if there is nothing to see."""
    # The system checks import every library of tags, even in a project without the admin.
    from django_mysqlqueue.admin.charts import sparkline

    return sparkline(values, label) if any(values) else ""


@register.simple_tag
def queue_text(name: str, value: str, **attributes: object) -> str:
    """Return an input of a filter whose text may be a key or a name of others.

    A browser removes the ends of lines from it, and changes others in hidden inputs. So it contains the text with
    escapes, and a hidden one the text itself as JSON, for ``Page.text``.
    """
    more = format_html_join("", ' {}="{}"', attributes.items())
    field = format_html('<input type="text" name="{}" value="{}"{}>', name, escaping.visible(value), more)
    return _with_exact(field, name, value)


def _with_exact(field: SafeString, name: str, value: str) -> SafeString:
    if escaping.visible(value) == value:
        return field
    return format_html('{}<input type="hidden" name="exact_{}" value="{}">', field, name, json.dumps(value))


@register.simple_tag
def queue_select(name: str, choices: Iterable[Any], chosen: str) -> str:
    """Return the select of a filter, in which nothing need be chosen, with the value itself as in ``queue_text``.

    ``choices``: the values, or pairs of a value and its label.
    """
    pairs = [one if isinstance(one, tuple) else (one, one) for one in choices]
    if chosen and chosen not in dict(pairs):
        pairs.append((chosen, chosen))
    options = [
        (escaping.visible(value), " selected" if value and value == chosen else "", escaping.visible(str(label)))
        for value, label in [("", _("all")), *pairs]
    ]
    inside = format_html_join("", '<option value="{}"{}>{}</option>', options)
    return _with_exact(format_html('<select name="{}">{}</select>', name, inside), name, chosen)


@register.simple_tag(takes_context=True)
def queue_url(context: dict[str, Any], name: str, **parameters: object) -> str:
    """Return the URL of a page of the dashboard on the same database."""
    return url(context["request"].current_app, name, **{"database": context["database"], **parameters})


@register.simple_tag(takes_context=True)
def queue_database(context: dict[str, Any]) -> str:
    """Return the hidden field with which a form stays on the same database; nothing if there is only one."""
    alias = context["database"]
    return format_html('<input type="hidden" name="database" value="{}">', alias) if alias else ""


@register.simple_tag(takes_context=True)
def queue_do(context: dict[str, Any], name: str, **parameters: object) -> str:
    """Return the attributes of a link to an operation's page on the same database, which returns to this page."""
    request = context["request"]
    named = {"database": context["database"], **parameters, "next": request.get_full_path()}
    return _operation(name, "href", do_url(request.current_app, name, **named))


@register.simple_tag(takes_context=True)
def queue_action(context: dict[str, Any], name: str) -> str:
    """Return the attributes of a button that submits selected rows. The field ``queue_database`` names the database."""
    return _operation(name, "formaction", do_url(context["request"].current_app, name))


def _operation(name: str, attribute: str, address: str) -> SafeString:
    from django_mysqlqueue.admin.operations import OPERATIONS  # As for sparklines.

    mark = SafeString("data-dangerous " if OPERATIONS[name].dangerous else "")
    return format_html('{}{}="{}"', mark, attribute, address)


@register.simple_tag(takes_context=True)
def queue_list(context: dict[str, Any], place: object = "", **changes: object) -> str:
    """Return the URL of the page's list from a position on; of its beginning if there is none."""
    return queue_here(context, **{context["page"].position: place, **changes})


@register.simple_tag(takes_context=True)
def queue_here(context: dict[str, Any], **changes: object) -> str:
    """Return the URL of the current page, on the same database, with other parameters.

    ``changes``: new values of parameters; one that is None or empty is removed.
    """
    request = context["request"]
    query = request.GET.copy()
    for name, value in {"database": context["database"], **changes}.items():
        if value in (None, ""):
            query.pop(name, None)
        else:
            query[name] = str(value)
    return f"{request.path}?{query.urlencode()}" if query else str(request.path)
