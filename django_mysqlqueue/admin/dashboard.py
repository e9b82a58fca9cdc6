"""The dashboard: pages in the app's section of the admin, registered with one model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.urls import URLPattern, path
from django.views.decorators.http import require_GET

from django_mysqlqueue.admin.context import DashboardContext
from django_mysqlqueue.admin.permissions import databases_to_view, demand

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

OVERVIEW = "changelist"
PAGE_NAMES = (
    OVERVIEW,
    "offsets",
    "group",
    "inflight",
    "deadletters",
    "deadletter",
    "messages",
    "scheduled",
    "quarantine",
    "message",
    "tasks",
    "jobs",
    "recurring",
    "job",
    "operations",
)
"""Names of the pages. Every process of a project with the admin loads its URLs: only a request loads the pages."""


class DashboardAdmin(_ModelAdmin):
    """Serve the pages of ``admin.pages`` and the operations of ``admin.operations``.

    Nothing is added, changed or deleted: editing rows would break the queue's protocol. To use the dashboard on your
    own admin site, register ``django_mysqlqueue.models.Dashboard`` with this class there.
    """

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user may view the dashboard, or at least one topic in it."""
        return super().has_view_permission(request, obj) or bool(databases_to_view(request))

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Return True if the admin's index shows the dashboard."""
        return super().has_module_permission(request) or bool(databases_to_view(request))

    def get_urls(self) -> list[URLPattern]:
        prefix = "django_mysqlqueue_dashboard"
        found = [
            path("" if name == OVERVIEW else f"{name}/", self._page(name), name=f"{prefix}_{name}")
            for name in PAGE_NAMES
        ]
        operate = self.admin_site.admin_view(self.operate)
        return [*found, path("do/<slug:name>/", operate, name=f"{prefix}_do")]

    def _page(self, name: str) -> Callable[..., HttpResponseBase]:
        @require_GET
        def view(request: HttpRequest) -> HttpResponseBase:
            from django_mysqlqueue.admin.pages import PAGES

            (page,) = (one for one in PAGES if one.name == name)
            demand(self.has_view_permission(request) and page.may_open(request))
            return page(self._context(request), request).respond()

        return self.admin_site.admin_view(view)

    def operate(self, request: HttpRequest, name: str) -> HttpResponse:
        """Ask for confirmation of an operation, and run it on a confirmed POST."""
        from django_mysqlqueue.admin import operations

        demand(self.has_view_permission(request))
        return operations.respond(self._context(request), request, name)

    def _context(self, request: HttpRequest) -> DashboardContext:
        from django_mysqlqueue.admin.pages import TABS

        databases = databases_to_view(request)
        menu = [(tab, views) for tab in TABS if (views := tab.views(request))]
        return DashboardContext(self.admin_site, self.opts, menu, databases if len(databases) > 1 else ())
