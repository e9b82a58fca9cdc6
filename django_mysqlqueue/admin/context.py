"""The admin site of the dashboard's pages and operations."""

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
    """The pages in the navigation."""

    def url(self, name: str, **parameters: object) -> str:
        """Return the URL of a page.

        Args:
            name: the page's name.
            parameters: its query string.
        """
        return url(self.site.name, name, **parameters)

    def response(
        self, request: HttpRequest, template: str, context: dict[str, Any], status: int = 200
    ) -> TemplateResponse:
        """Return a page, not rendered yet, that browsers do not cache.

        Args:
            request: the request to answer.
            template: file name of the template.
            context: context of the template.
            status: HTTP status.
        """
        request.current_app = self.site.name
        response = TemplateResponse(
            request,
            f"{FOLDER}/{template}",
            {**self.site.each_context(request), "opts": self.opts, "menu": self.menu, **context},
            status=status,
        )
        response["Cache-Control"] = "no-store"
        return response
