"""Addresses of the dashboard's pages. This module imports nothing of the admin: template tags work without it."""

from __future__ import annotations

from collections.abc import Mapping

from django.urls import reverse


def url(site: str, name: str, **parameters: object) -> str:
    """Return the address of a page of the dashboard.

    ``parameters``: the query string. None and ``""`` are left out.
    """
    return _reverse(site, name, parameters) if name == "changelist" else _reverse(site, "page", parameters, name)


def do_url(site: str, operation: str, **parameters: object) -> str:
    """Return the address of the page of an operation."""
    return _reverse(site, "do", parameters, operation)


def _reverse(site: str, name: str, parameters: Mapping[str, object], *path: str) -> str:
    given = {key: value for key, value in parameters.items() if value not in (None, "")}
    return reverse(f"admin:django_mysqlqueue_dashboard_{name}", args=path, current_app=site, query=given)
