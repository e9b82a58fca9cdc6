"""The view that Prometheus scrapes."""

from __future__ import annotations

from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import ImproperlyConfigured
from django.db import Error
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from django_mysqlqueue.metrics.queue import QueueCollector
from django_mysqlqueue.options.conf import get_settings
from django_mysqlqueue.sql import failures
from django_mysqlqueue.sql.connection import bounded

PERMISSION = "django_mysqlqueue.view_dashboard"
"""The permission of the dashboard's pages, which show the same numbers."""


@login_not_required  # The view checks the token or the login itself.
@never_cache
@require_safe
def view(request: HttpRequest, using: str | None = None) -> HttpResponse:
    """Show the queue's state to Prometheus. Route it as ``path("metrics/", django_mysqlqueue.metrics.view)``.

    Requests need the header ``Authorization: Bearer`` with the setting ``METRICS_TOKEN``, or the
    login of a staff user with the permission to view the dashboard. Others get 401 if they send
    no token or a wrong one (if no token is configured, the response names the setting), 403 if they are
    logged in without the permission, and 500 if the setting has a bad value. The answer is 503 if
    the database refuses or does not answer; with several databases, if none of them can be read. Of one that cannot be
    read while others can, ``mysqlqueue_database_up`` is 0.

    Args:
        request: the HTTP request.
        using: alias of the only database to read (default: all of the queue's databases).
    """
    refusal = _refusal(request)
    if refusal is not None:
        return refusal
    collector, registry = QueueCollector(using), CollectorRegistry()
    registry.register(collector)
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    alias = collector.aliases[0]
    try:
        with bounded(alias):  # If there are several, the collector reads each on a connection of its own.
            return HttpResponse(encode(registry), content_type=content_type)
    except Error as error:
        if failures.kind_of(alias, error) is None:
            raise
        return _text(f"{failures.summarize(alias, error)}.", 503)


def _refusal(request: HttpRequest) -> HttpResponse | None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    user = getattr(request, "user", None)  # Without AuthenticationMiddleware, requests have no user.
    bears = scheme.lower() == "bearer"
    if not bears and user is not None and user.is_authenticated:
        if user.is_active and user.is_staff and user.has_perm(PERMISSION):
            return None
        return _text("You do not have permission to view the queue's metrics.", 403)
    try:
        token = get_settings().metrics_token
    except ImproperlyConfigured as error:
        return _text(str(error), 500)  # The error names the rule, never the value.
    if bears and token is not None and constant_time_compare(given.strip(), token):
        return None
    if token is None:
        said = "No METRICS_TOKEN is configured in MYSQLQUEUE: configure one, or log in as staff."
    else:
        said = 'Send "Authorization: Bearer" with the METRICS_TOKEN of the setting MYSQLQUEUE, or log in as staff.'
    response = _text(said, 401)
    response["WWW-Authenticate"] = 'Bearer error="invalid_token"' if bears else "Bearer"
    return response


def _text(text: str, status: int) -> HttpResponse:
    return HttpResponse(f"{text}\n", status=status, content_type="text/plain")
