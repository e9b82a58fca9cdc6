"""A template tag for pages of the admin that are not the dashboard's."""

from __future__ import annotations

from typing import Any

from django import template
from django.urls import NoReverseMatch

from django_mysqlqueue.text.addresses import url

register = template.Library()


@register.inclusion_tag("admin/django_mysqlqueue/dashboard/index_status.html", takes_context=True)
def queue_status(context: dict[str, Any]) -> dict[str, Any]:
    """Show the state of the queue in one line, to users who may view the whole dashboard on this admin site.

    The browser requests it after the page: a database that is slow must not delay others' pages.
    """
    # The system checks import every library of tags, even in a project without the admin.
    from django_mysqlqueue.permissions import VIEW, has_permission

    request = context.get("request")
    if request is None:  # TEMPLATES has no context processor for it.
        return {}
    try:
        link = url(getattr(request, "current_app", "") or "admin", "changelist")
    except NoReverseMatch:
        return {}
    return {"link": link} if has_permission(request.user, VIEW, None) else {}
