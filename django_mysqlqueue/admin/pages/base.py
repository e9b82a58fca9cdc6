"""What every page of the dashboard is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.core.exceptions import ImproperlyConfigured, PermissionDenied
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.translation import gettext as _

from django_mysqlqueue.addresses import url as url
from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.service import failures
from django_mysqlqueue.service.groups import GroupRef
from django_mysqlqueue.service.publishing import queue_alias
from django_mysqlqueue.service.transactions import bounded

if TYPE_CHECKING:
    from django_mysqlqueue.admin.dashboard import DashboardAdmin

OPERATE = "django_mysqlqueue.operate_dashboard"
SEE_PAYLOADS = "django_mysqlqueue.see_payloads"
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

    def __init__(self, dashboard: DashboardAdmin, request: HttpRequest) -> None:
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
            **self.dashboard.admin_site.each_context(self.request),
            **found,
            "title": self.heading(),
            "opts": self.dashboard.opts,
            "page": self,
            "problem": problem,
            "menu": self.dashboard.menu(),
            "may_operate": may_operate(self.request),
            "may_see_payloads": may_see_payloads(self.request),
        }
        self.request.current_app = self.dashboard.admin_site.name
        response = TemplateResponse(
            self.request, f"admin/django_mysqlqueue/dashboard/{self.template}", context, status=status
        )
        response["Cache-Control"] = "no-store"
        return response


def may_operate(request: HttpRequest) -> bool:
    """Whether the user may change anything."""
    return request.user.has_perm(OPERATE)


def may_see_payloads(request: HttpRequest) -> bool:
    """Whether the user may read payloads and metadata."""
    return request.user.has_perm(SEE_PAYLOADS)


def may_search_errors(request: HttpRequest) -> bool:
    """Whether the user may search error texts.

    They are searched as they are stored: with ``REDACT`` set, text that it hides
    could be guessed, one search after another.
    """
    return get_settings().redact is None or may_see_payloads(request)


def search_refused() -> str:
    """What is said to who may not search error texts."""
    return _(
        "You cannot filter by error text: it is searched as it is stored, and REDACT hides parts of it. That needs the "
        "permission to see payloads. Nothing was changed."
    )


def demand(allowed: bool) -> None:  # noqa: FBT001
    """403 for who may not."""
    if not allowed:
        raise PermissionDenied
