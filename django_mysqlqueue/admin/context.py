"""The admin site of the dashboard's pages and operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import django
from django.contrib.admin import AdminSite
from django.core.exceptions import BadRequest
from django.http import HttpRequest
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from django_mysqlqueue.admin.permissions import databases_to_view, may_view_in
from django_mysqlqueue.service.databases import queue_alias
from django_mysqlqueue.text.addresses import do_url, url
from django_mysqlqueue.text.escaping import visible

FOLDER = "admin/django_mysqlqueue/dashboard"
BREADCRUMBS_ARE_A_LIST = django.VERSION >= (6, 1)
"""True if the admin's own pages have their breadcrumbs in a list; before, in a ``<div>``."""


class BadQuery(BadRequest):
    """The query string is invalid, or names what does not exist or may not be read. The page shows the text."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class DashboardContext:
    """The dashboard on one admin site."""

    site: AdminSite
    opts: Any
    """The ``_meta`` of ``Dashboard``: the admin's templates take names from it."""
    menu: Sequence[tuple[Any, Sequence[Any]]]
    """The tabs of the navigation, with the pages of each that the user can choose from."""
    databases: Sequence[str] = ()
    """Aliases of the databases that the user can choose from; empty if there is only one."""
    database: str = ""
    """The alias that links and forms name; empty if there is only one database, or on the page of all."""

    def on(self, using: str) -> DashboardContext:
        """Return the dashboard on one of the databases, which links, forms and titles name if there are several."""
        return replace(self, database=using) if self.databases else self

    def titled(self, text: str) -> str:
        """Return a title, with the name of the database if there are several."""
        return f"{text} ({self.database})" if self.database else text

    def url(self, name: str, **parameters: object) -> str:
        """Return the URL of a page on the same database."""
        return url(self.site.name, name, **{"database": self.database, **parameters})

    def do(self, request: HttpRequest, name: str, **parameters: object) -> str:
        """Return the URL of an operation's page on the same database, which returns to the page of the request."""
        return do_url(
            self.site.name, name, **{"database": self.database, **parameters, "next": request.get_full_path()}
        )

    def response(
        self, request: HttpRequest, template: str, context: dict[str, Any], status: int = 200
    ) -> TemplateResponse:
        """Return a page, not rendered yet, that browsers do not cache."""
        request.current_app = self.site.name
        response = TemplateResponse(
            request,
            f"{FOLDER}/{template}",
            {
                **self.site.each_context(request),
                "opts": self.opts,
                "breadcrumbs_are_a_list": BREADCRUMBS_ARE_A_LIST,
                "menu": self.menu,
                "databases": self.databases,
                "database": self.database,
                **context,
                "title": visible(self.titled(context["title"])),
            },
            status=status,
        )
        response["Cache-Control"] = "no-store"
        return response


def choose_database(request: HttpRequest, wanted: str | None, topic: str | None) -> str:
    """Return the database that is wanted, else that of a topic, else the first in which the user may view something.

    Neither the answer nor the error tells anything about databases and topics that the user may not view.
    """
    databases = databases_to_view(request) or [queue_alias()]
    if wanted:
        if wanted not in databases:
            text = _("database=%(alias)r: must be a database of the queue (%(databases)s)")
            raise BadQuery(text % {"alias": wanted, "databases": ", ".join(map(repr, databases))})
        return wanted
    if topic:
        using = queue_alias(topic=topic)
        if may_view_in(request, topic, using):
            return using
    return databases[0]
