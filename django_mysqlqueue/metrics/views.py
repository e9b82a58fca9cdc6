"""The page that Prometheus scrapes, for those who may see it."""

from __future__ import annotations

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from django_mysqlqueue.conf import get_settings
from django_mysqlqueue.metrics.queue import QueueCollector

PERMISSION = "django_mysqlqueue.view_dashboard"
"""That of the pages that show the same to people."""


@login_not_required  # it asks for itself
@never_cache
@require_safe
def view(request: HttpRequest, using: str | None = None) -> HttpResponse:
    """Show the queue's state to Prometheus. Route it as ``path("metrics/", django_mysqlqueue.metrics.view)``.

    Requests need the header ``Authorization: Bearer`` with the setting ``METRICS_TOKEN``, or the
    login of a staff user with the permission to view the dashboard. Others get 401 if they send
    no token or a wrong one, 403 if they are logged in without the permission.

    Args:
        request: the HTTP request.
        using: alias of the queue's database (default: ``MYSQLQUEUE["DATABASE"]``, else the router's choice).
    """
    refusal = _refusal(request)
    if refusal is not None:
        return refusal
    registry = CollectorRegistry()
    registry.register(QueueCollector(using))
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    return HttpResponse(encode(registry), content_type=content_type)


def _refusal(request: HttpRequest) -> HttpResponse | None:
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        token = get_settings().metrics_token
        if token is not None and constant_time_compare(given.strip(), token):
            return None
        return _unauthorized('Bearer error="invalid_token"')
    user = getattr(request, "user", None)  # there may be no AuthenticationMiddleware
    if user is None or not user.is_authenticated:
        return _unauthorized("Bearer")
    if user.is_active and user.is_staff and user.has_perm(PERMISSION):
        return None
    return HttpResponse("You may not see the queue's metrics.\n", status=403, content_type="text/plain")


def _unauthorized(challenge: str) -> HttpResponse:
    return HttpResponse(
        'Send "Authorization: Bearer" with the METRICS_TOKEN of the setting MYSQLQUEUE, or log in as staff.\n',
        status=401,
        headers={"WWW-Authenticate": challenge},
        content_type="text/plain",
    )
