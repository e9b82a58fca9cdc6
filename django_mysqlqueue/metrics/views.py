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
    """The queue's state for Prometheus: mount it as ``path("metrics/", django_mysqlqueue.metrics.view)``.

    It wants ``Authorization: Bearer`` with the setting ``METRICS_TOKEN``, or a
    logged-in member of staff with the permission to view the dashboard.
    Nobody else: 401 to those who say nothing or a wrong token, 403 to users
    without the permission.

    Args:
        using: the queue's database alias, if not the setting's.
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
