"""The view of the metrics, and who may see it."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import AnonymousUser, Permission, User
from django.db import OperationalError, connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import path

from django_mysqlqueue import metrics, publish
from django_mysqlqueue.inspection import get_overview
from django_mysqlqueue.metrics import queue
from django_mysqlqueue.models import OutboxMessage
from django_mysqlqueue.options import conf
from tests.support.internals import GroupRef, get_settings, groups
from tests.support.metrics import Samples, parsed

TOKEN = "0123456789abcdefghij"  # noqa: S105
urlpatterns = [
    path("metrics/", metrics.view),
    path("elsewhere/", metrics.view, {"using": "queue"}),
]


@pytest.fixture
def site(db, settings):
    settings.ROOT_URLCONF = __name__
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    User.objects.all().delete()
    yield Client(raise_request_exception=True)
    User.objects.all().delete()


def get(client, authorization=None, where="/metrics/", **headers):
    if authorization is not None:
        headers["Authorization"] = authorization
    return client.get(where, headers=headers)


def samples(response):
    assert response.status_code == 200
    return Samples(parsed(response.content.decode()))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_token(site, scheme):
    publish("t", 1)
    response = get(site, f"{scheme} {TOKEN}")
    assert response.status_code == 200
    assert samples(response).value("outbox_waiting") == 1
    assert response["Content-Type"].startswith("text/plain; version=0.0.4")
    assert "no-store" in response["Cache-Control"]


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Bearer {TOKEN.upper()}",
        "Bearer é",
        "Bearer None",
        f"Basic {TOKEN}",
        f"Token {TOKEN}",
        TOKEN,
        "",
        None,
    ],
)
def test_no_token(site, authorization):
    with CaptureQueriesContext(connection) as captured:
        response = get(site, authorization)
    assert response.status_code == 401
    assert response["WWW-Authenticate"].startswith("Bearer")
    assert b"mysqlqueue_" not in response.content
    assert not captured.captured_queries, "strangers cost the queue nothing"


@pytest.mark.parametrize("token", [{}, {"METRICS_TOKEN": None}, {"METRICS_TOKEN": ""}])
@pytest.mark.parametrize("authorization", ["Bearer", "Bearer ", "Bearer None", f"Bearer {TOKEN}", None])
def test_without_the_setting_no_token_is_right(site, settings, token, authorization):
    settings.MYSQLQUEUE = token
    response = get(site, authorization)
    assert response.status_code == 401
    assert "No METRICS_TOKEN is configured" in response.content.decode()
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    assert "No METRICS_TOKEN" not in get(site, "Bearer x").content.decode()


@pytest.mark.parametrize("authorization", ["Bearer", "Bearer short-secret", f"Bearer {TOKEN}", None])
def test_a_bad_token_in_the_settings_opens_no_door(site, settings, authorization):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": "short-secret"}
    response = get(site, authorization)
    assert response.status_code == 500
    assert "MYSQLQUEUE['METRICS_TOKEN'] = … must be at least 20" in response.content.decode()
    assert "short-secret" not in response.content.decode()
    site.force_login(User.objects.create_superuser("ada"))
    assert get(site).status_code == 200, "a login needs no token"


@pytest.mark.parametrize(
    ("options", "permitted", "status"),
    [
        ({"is_staff": True}, True, 200),
        ({"is_staff": True, "is_superuser": True}, False, 200),
        ({"is_staff": True}, False, 403),
        ({"is_staff": False}, True, 403),
        ({"is_staff": False, "is_superuser": True}, False, 403),
    ],
)
def test_users(site, options, permitted, status):
    user = User.objects.create_user("somebody", **options)
    if permitted:
        user.user_permissions.add(Permission.objects.get(codename="view_dashboard"))
    site.force_login(user)
    assert get(site).status_code == status
    assert get(site, "Bearer wrong").status_code == 401, "who shows a token is judged by it"
    user.is_active = False
    user.save()
    assert get(site).status_code == 401


def test_without_the_middleware_for_users(db, settings):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    factory = RequestFactory()
    assert metrics.view(factory.get("/")).status_code == 401
    assert metrics.view(factory.get("/", headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200
    request = factory.get("/")
    request.user = AnonymousUser()
    assert metrics.view(request).status_code == 401


def test_where_all_views_want_a_login(site, settings):
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.contrib.auth.middleware.LoginRequiredMiddleware"]
    assert get(site, f"Bearer {TOKEN}").status_code == 200
    assert get(site).status_code == 401, "no redirect to a page for people"


def test_it_is_only_read(site):
    headers = {"Authorization": f"Bearer {TOKEN}"}
    assert site.post("/metrics/", headers=headers).status_code == 405
    head = site.head("/metrics/", headers=headers)
    assert (head.status_code, head.content) == (200, b"")


def test_open_metrics(site):
    response = get(site, f"Bearer {TOKEN}", accept="application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
    assert response["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert response.content.endswith(b"# EOF\n")


def test_a_queue_on_another_alias(site, queue_db):
    OutboxMessage.objects.using("queue").create(topic="t", payload=b"1")
    assert samples(get(site, f"Bearer {TOKEN}", "/elsewhere/")).value("outbox_waiting", database="queue") == 1
    assert samples(get(site, f"Bearer {TOKEN}")).value("outbox_waiting") == 0


# -- several databases ----------------------------------------------------------

TOPICS = {"orders": {"DATABASE": "queue"}}
BROKEN = {**TOPICS, "lost": {"DATABASE": "other"}}
"""The alias ``other`` has no tables."""


def test_all_databases_of_the_queue(site, queue_db, settings):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN, "TOPICS": TOPICS}
    publish("orders", 1)
    groups.register("queue", GroupRef("g", "orders"), mode="ordered", start="earliest")
    found = samples(get(site, f"Bearer {TOKEN}"))
    assert [found.value("database_up", database=alias) for alias in ("default", "queue")] == [1, 1]
    assert [found.value("outbox_waiting", database=alias) for alias in ("default", "queue")] == [0, 1]
    assert found.value("lag", topic="orders", group="g", database="queue") == 0
    assert not any(dict(labels).get("database") == "default" for name, labels in found if name == "mysqlqueue_lag")
    found = samples(get(site, f"Bearer {TOKEN}", "/elsewhere/"))
    assert {dict(labels)["database"] for _, labels in found} == {"queue"}


def test_a_database_that_cannot_be_read_hides_no_other(site, queue_db, settings):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN, "TOPICS": BROKEN}
    publish("orders", 1)
    found = samples(get(site, f"Bearer {TOKEN}"))
    assert [found.value("database_up", database=alias) for alias in ("default", "queue", "other")] == [1, 1, 0]
    assert found.value("outbox_waiting", database="queue") == 1
    assert [name for name, labels in found if dict(labels)["database"] == "other"] == ["mysqlqueue_database_up"]


def test_without_any_database_it_is_unavailable(site, settings, monkeypatch):
    def overview(using, bounds):
        if using == "other":
            return get_overview(using=using, bounds=bounds)
        # In a thread, which must not open a database in memory: Django does not close connections to those.
        raise OperationalError(2013, "Lost connection")

    monkeypatch.setattr(queue, "get_overview", overview)
    for topics in ({}, TOPICS):
        settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN, "DATABASE": "other", "TOPICS": topics}
        response = get(site, f"Bearer {TOKEN}")
        assert (response.status_code, response["Content-Type"]) == (503, "text/plain")
        said = "The database 'other' lacks a table or column of the queue; run manage.py migrate --database other.\n"
        assert response.content.decode() == said


def test_the_token_is_not_shown(settings):
    settings.MYSQLQUEUE = {"METRICS_TOKEN": TOKEN}
    assert not conf.problems()
    assert get_settings().metrics_token == TOKEN
    assert TOKEN not in repr(get_settings())
