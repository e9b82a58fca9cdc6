"""The dashboard: pages in the app's section of the admin, registered with one model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.contrib.auth.models import AnonymousUser
from django.contrib.sessions.backends.base import SessionBase
from django.db import DEFAULT_DB_ALIAS, Error, connections, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.views.decorators.http import require_GET

from django_mysqlqueue.admin.context import FOLDER, DashboardContext
from django_mysqlqueue.admin.permissions import databases_to_view, demand
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded
from django_mysqlqueue.sql.several import ANSWER_SECONDS

UNTIL_IT_ANSWERS = {"Retry-After": "10", "Refresh": "10", "Cache-Control": "no-store"}
"""The headers of a page without the database: the browser requests it again."""
OVERVIEW = "changelist"
"""The name of the overview, by which the admin links to it."""

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin


class DashboardAdmin(_ModelAdmin):
    """Serve the pages of ``admin.pages`` and the operations of ``admin.operations``.

    Nothing is added, changed or deleted: editing rows would break the queue's protocol. To use the dashboard on your
    own admin site, register ``django_mysqlqueue.models.Dashboard`` with this class there.
    """

    def has_add_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_change_permission = has_delete_permission = has_add_permission

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user may view the dashboard, or at least one topic in it."""
        return super().has_view_permission(request, obj) or bool(databases_to_view(request))

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return True if the admin's index shows the dashboard."""
        return super().has_module_permission(request) or bool(databases_to_view(request))

    def get_urls(self) -> list[URLPattern]:
        prefix, show = "django_mysqlqueue_dashboard", self._bounded(require_GET(self.show))
        return [
            path("", show, name=f"{prefix}_changelist"),
            path("<slug:name>/", show, name=f"{prefix}_page"),
            path("do/<slug:name>/", self._bounded(self.operate), name=f"{prefix}_do"),
        ]

    def show(self, request: HttpRequest, name: str = "") -> HttpResponseBase:
        """Show a page: without a name, the overview, which has no other address."""
        # Every process of a project with the admin loads its URLs: only a request loads the pages.
        from django_mysqlqueue.admin.pages import PAGES

        page = next((page for page in PAGES if page.name == (name or OVERVIEW)), None)
        if page is None or name == OVERVIEW:
            raise Http404(name)
        demand(self.has_view_permission(request) and page.may_open(request))
        return page(self._context(request), request).respond()

    def _bounded(self, view: Callable[..., HttpResponseBase]) -> Callable[..., HttpResponseBase]:
        """Return a view of the admin that waits for no database without a time limit, and has no transaction.

        The limits apply to session, user and permissions too, in whichever database they are.
        """
        inner = self.admin_site.admin_view(view)

        @functools.wraps(inner)
        def respond(request: HttpRequest, **parameters: Any) -> HttpResponseBase:
            try:
                with contextlib.ExitStack() as limits:
                    for alias in connections:
                        limits.enter_context(bounded(alias, connect=ANSWER_SECONDS))
                    response = inner(request, **parameters)
                    return response.render() if hasattr(response, "render") else response
            except Error as error:
                alias = failures.alias_of(error) or DEFAULT_DB_ALIAS
                if failures.kind_of(alias, error) is None:
                    raise
                return _unavailable(request, alias, error)

        for alias in connections:
            transaction.non_atomic_requests(alias)(respond)
        return respond

    def operate(self, request: HttpRequest, name: str) -> HttpResponse:
        """Ask for confirmation of an operation, and run it on a confirmed POST."""
        from django_mysqlqueue.admin.operations import OPERATIONS, respond

        demand(self.has_view_permission(request))
        if name not in OPERATIONS:
            raise Http404(name)
        return respond(self._context(request), request, OPERATIONS[name])

    def _context(self, request: HttpRequest) -> DashboardContext:
        from django_mysqlqueue.admin.pages import TABS

        databases = databases_to_view(request)
        menu = [(tab, views) for tab in TABS if (views := tab.views(request))]
        return DashboardContext(self.admin_site, self.opts, menu, databases if len(databases) > 1 else ())


class _UnreadSession(SessionBase):
    """In place of a session that could not be read: no middleware waits for it again, and its cookie stays."""

    def load(self) -> dict[str, Any]:
        """Return no data."""
        return {}


def _unavailable(request: HttpRequest, alias: str, error: Error) -> HttpResponse:
    """Return a page without anything that needs a database: not even the user is known.

    So it has no text of the driver, which may contain users and hosts.
    """
    from django_mysqlqueue.admin.causes import Banner
    from django_mysqlqueue.inspection.causes import unavailable

    # Middleware, and the mails of the log to ADMINS, may read both afterwards.
    request.user = AnonymousUser()
    request.session = _UnreadSession(request.session.session_key)
    banner = Banner(unavailable(alias, f"{failures.summarize(alias, error)}."))
    html = render_to_string(f"{FOLDER}/unavailable.html", {"banner": banner})
    return HttpResponse(html, status=503, headers=UNTIL_IT_ANSWERS)
