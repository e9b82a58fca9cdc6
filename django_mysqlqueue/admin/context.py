"""What the dashboard's pages and operations need of the admin site that they are on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.admin import AdminSite
from django.http import HttpRequest
from django.template.response import TemplateResponse

from django_mysqlqueue.addresses import url

FOLDER = "admin/django_mysqlqueue/dashboard"


@dataclass(frozen=True, slots=True)
class DashboardContext:
    """The dashboard on one admin site."""

    site: AdminSite
    opts: Any
    """The ``_meta`` of ``Dashboard``: the admin's templates take names from it."""
    menu: Sequence[Any]
    """The pages that the navigation lists."""

    def url(self, name: str, **parameters: object) -> str:
        """The address of a page, with a query string."""
        return url(self.site.name, name, **parameters)

    def response(
        self, request: HttpRequest, template: str, context: dict[str, Any], status: int = 200
    ) -> TemplateResponse:
        """A page that is never cached, not rendered yet."""
        request.current_app = self.site.name
        response = TemplateResponse(
            request,
            f"{FOLDER}/{template}",
            {**self.site.each_context(request), "opts": self.opts, "menu": self.menu, **context},
            status=status,
        )
        response["Cache-Control"] = "no-store"
        return response
