"""The admin's lists: readable, and read-only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import path

from django_mysqlqueue import publish
from django_mysqlqueue.models import QueueMessage
from tests.factories import ConsumerGroupFactory, OutboxMessageFactory, QueueMessageFactory
from tests.harness import sequence

urlpatterns = [path("admin/", admin.site.urls)]
HOSTILE = "<script>alert(1)</script>"


@pytest.fixture
def client(db, settings):
    settings.ROOT_URLCONF = __name__
    User.objects.all().delete()
    user = User.objects.create_superuser("admin", password="admin")  # noqa: S106
    client = Client()
    client.force_login(user)
    return client


@pytest.mark.parametrize("model", ["queuemessage", "outboxmessage", "consumergroup", "sequencer"])
def test_every_list_and_row_can_be_read(client, model):
    QueueMessageFactory(topic="t_dlq", payload=HOSTILE.encode(), last_error=HOSTILE, partition_key=HOSTILE)
    OutboxMessageFactory(payload=b"\xff\x00 binary", deliver_at=4_000_000_000_000)
    ConsumerGroupFactory()
    publish("t", "x" * 5000)
    sequence()
    publish("t", 1)
    listed = client.get(f"/admin/django_mysqlqueue/{model}/")
    assert listed.status_code == 200
    assert HOSTILE not in listed.content.decode()
    rows = list(listed.context["cl"].result_list)
    assert rows
    for row in rows:
        page = client.get(f"/admin/django_mysqlqueue/{model}/{row.pk}/change/")
        assert page.status_code == 200
        assert HOSTILE not in page.content.decode()


def test_nothing_can_be_changed(client):
    row = QueueMessageFactory()
    base = "/admin/django_mysqlqueue/queuemessage"
    assert client.get(f"{base}/add/").status_code == 403
    assert client.post(f"{base}/{row.pk}/change/", {"topic": "other"}).status_code == 403
    assert client.post(f"{base}/{row.pk}/delete/", {"post": "yes"}).status_code == 403
    listed = client.post(f"{base}/", {"action": "delete_selected", "_selected_action": [row.pk]})
    assert listed.status_code in (200, 302, 403)
    assert QueueMessage.objects.get().topic == "t"


def test_the_app_works_without_the_admin(tmp_path):
    """Nothing of the package imports contrib.admin by itself."""
    code = (
        "import django, sys; from django.conf import settings; "
        "settings.configure(INSTALLED_APPS=['django_mysqlqueue'], DATABASES={'default': "
        "{'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:', 'OPTIONS': {'transaction_mode': 'IMMEDIATE', "
        "'timeout': 30, 'init_command': 'PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;'}}}); "
        "django.setup(); from django.core.management import call_command; call_command('check'); "
        "call_command('migrate', verbosity=0); from django_mysqlqueue import publish; publish('t', 1); "
        "call_command('queuestatus'); assert 'django.contrib.admin' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout


def test_importing_the_package_needs_no_settings():
    code = (
        "import sys, django_mysqlqueue; assert 'django' not in sys.modules; assert 'publish' in dir(django_mysqlqueue)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=Path(__file__).parent.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
