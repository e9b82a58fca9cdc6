"""Where the dashboard's pages are. It imports nothing of the admin: template tags are loaded without it, too."""

from __future__ import annotations

from django.urls import reverse


def url(site: str, name: str, **parameters: object) -> str:
    """The address of a page of the dashboard; None and '' are left out of its query string."""
    given = {key: value for key, value in parameters.items() if value not in (None, "")}
    return reverse(f"admin:django_mysqlqueue_dashboard_{name}", current_app=site, query=given)
