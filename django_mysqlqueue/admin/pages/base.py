"""What every page of the dashboard is made of."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.permissions import may_operate, may_see_payloads
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.inspection import PAGES, Bounds, StallTimes
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.service.refs import GroupRef
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded

PAGE_ROWS = 50
"""Rows of a list on one page."""


class BadQuery(Exception):
    """A query string that names nothing; its text is shown."""

    status: ClassVar[int] = 400


class Refused(BadQuery):
    """A query string that asks for what the user may not know; its text is shown."""

    status = 403


class Page:
    """One page for one request: ``context`` reads what the template shows.

    A page changes nothing. It is asked again every few seconds while somebody
    looks at it.
    """

    do_not_call_in_templates = True

    name: ClassVar[str]
    """Of the URL, and its path below the dashboard's."""
    title: ClassVar[Any]
    template: ClassVar[str]
    in_menu: ClassVar[bool] = True
    live: ClassVar[bool] = True
    """Whether it refreshes itself."""
    bounds: ClassVar[Bounds] = PAGES
    """How much it reads."""
    stall_times: ClassVar[StallTimes] = StallTimes()
    """From when on something that does not move is a problem."""

    def __init__(self, dashboard: DashboardContext, request: HttpRequest) -> None:
        self.dashboard = dashboard
        self.request = request
        self.using = queue_alias()
        self.lease_ms = int(get_settings().lease_duration * 1000)

    def context(self) -> dict[str, Any]:
        """What the template needs beside what every page has."""
        raise NotImplementedError

    def heading(self) -> str:
        """The page's title, with what it is about."""
        return str(self.title)

    # -- what a page asks for -------------------------------------------------

    def text(self, name: str) -> str | None:
        """A parameter of the query string; None: it is not there or empty."""
        return self.request.GET.get(name) or None

    def number(self, name: str, *, minimum: int = 0) -> int | None:
        """A whole number of the query string; None: it is not there or empty.

        Raises:
            BadQuery: it is something else.
        """
        value = self.text(name)
        if value is None:
            return None
        try:
            found = int(value)
        except ValueError:
            found = minimum - 1
        if not minimum <= found < 2**63:
            raise BadQuery(f"{name}={value!r}: must be a whole number from {minimum}")
        return found

    def ref(self) -> GroupRef | None:
        """The group that the query string names."""
        group, topic = self.text("group"), self.text("topic")
        return GroupRef(group, topic) if group and topic else None

    # -- answering ------------------------------------------------------------

    def respond(self) -> HttpResponse:
        """The page, rendered; else the reason with another status.

        400 where the query string is wrong, 500 for a bad setting, 503 where the database refuses or does not answer.
        """
        try:
            with bounded(self.using):
                # Rendered inside: nothing that a template reads may wait without end either.
                return self._response(self.context()).render()
        except BadQuery as error:
            status, problem = error.status, str(error)
        except ImproperlyConfigured as error:
            status, problem = 500, str(error)
        except Error as error:
            if failures.kind_of(self.using, error) is None:
                raise
            status, problem = 503, failures.explain(self.using, error)
        return self._response({}, status, problem)

    def _response(self, found: dict[str, Any], status: int = 200, problem: str = "") -> TemplateResponse:
        context = {
            **found,
            "title": self.heading(),
            "page": self,
            "problem": problem,
            "may_operate": may_operate(self.request),
            "may_see_payloads": may_see_payloads(self.request),
        }
        return self.dashboard.response(self.request, self.template, context, status)
