"""Nothing reads a replica."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client
from django.urls import path

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.admin.pages import PAGES
from django_mysqlqueue.management.base import require_tables
from django_mysqlqueue.management.commands.queuestatus import read_status
from django_mysqlqueue.models import QueueMessage
from django_mysqlqueue.operations import pausing
from tests.support.harness import Sub, handler
from tests.support.internals import GroupRef, groups, sequencing
from tests.support.queue_alias import command
from tests.support.routers import ReadsFromReplica

urlpatterns = [path("admin/", admin.site.urls)]
QUEUE = "queue"


@pytest.mark.promise("One database")
def test_the_service_layer_never_reads_a_replica(replica):
    publish("t", 1)
    publish_many("t", [2, 3])
    require_tables("default")
    groups.register("default", GroupRef("g", "t"), mode="ordered", start="latest")
    sequencing.sequence("default")
    assert read_status("default").topics[0].in_log == 3
    for name in ("queuesequence", "queuestatus", "queuegc", "migrate"):
        command(name)
    command("queuegroupmode", "g", "t", "shared", "--noinput")
    command("queuedropgroup", "g", "t", "--noinput")
    with pytest.raises(CommandError, match="There is no group"):
        command("queuedropgroup", "g", "t", "--noinput")


def test_housekeeping_never_reads_a_replica(replica):
    publish_many("t", [Message(number, key=f"k{number}") for number in range(10)])
    sub = Sub(handler(), handler(group="shared", mode="shared"))
    sub.settle()
    for _ in sub.poller.maintenance.round():
        pass
    sub.leave()


def test_the_checks_never_read_a_replica(replica):
    command("check")
    command("check", "--database", "default")


class ReadsTheQueueFromReplica(ReadsFromReplica):
    """Sessions, users and the rest of the admin are not what is looked at here."""

    def db_for_read(self, model, **hints):
        return "replica" if model._meta.app_label == "django_mysqlqueue" else None


@pytest.mark.promise("One database")
@pytest.mark.parametrize("using", ["default", QUEUE])
def test_the_admin_shows_the_queue_and_no_replica(queue_db, settings, using):
    settings.ROOT_URLCONF = __name__
    settings.DATABASE_ROUTERS = [ReadsTheQueueFromReplica()]
    settings.MYSQLQUEUE = {"DATABASE": using}
    publish("shown", 1)
    sequencing.sequence(using)
    publish("shown", 2)
    groups.register(using, GroupRef("g", "shown"), mode="ordered", start="latest")
    User.objects.all().delete()
    client = Client()
    client.force_login(User.objects.create_superuser("admin", password="admin"))  # noqa: S106
    dashboard = "/admin/django_mysqlqueue/dashboard/"
    offset = QueueMessage.objects.using(using).get(topic="shown").offset
    for page in PAGES:
        address = dashboard if page.name == "changelist" else f"{dashboard}{page.name}/"
        assert client.get(address, {"group": "g", "topic": "shown", "offset": offset, "id": "x"}).status_code == 200
    (row,) = client.get(dashboard).context["rows"]
    assert (row.group.ref, client.get(dashboard).context["overview"].outbox.waiting.value) == (("g", "shown"), 1)
    pausing.set_paused(using, GroupRef("g", "shown"), actor="admin", paused=True)
    for query in ("", "?group=g", "?state=ended"):
        (row,) = client.get(f"{dashboard}operations/{query}").context["rows"]
        assert row.entry.action == "pause"
