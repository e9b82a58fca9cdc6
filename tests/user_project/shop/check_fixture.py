"""The pytest fixture, as a project's tests use it."""

import pytest

from django_mysqlqueue import publish
from tests.user_project.shop.models import Mail


def test_it_delivers(mysqlqueue):
    publish("reminders", 7)
    assert [message.payload for message in mysqlqueue.published("reminders")] == [7]
    assert [one.outcome for one in mysqlqueue.deliver_all()] == ["acked"]
    assert Mail.objects.get().text == "reminder 7"


def test_and_is_rolled_back(mysqlqueue):
    assert mysqlqueue.published() == []
    assert not Mail.objects.exists()


def test_with_real_transactions(mysqlqueue, transactional_db):
    publish("reminders", 8)
    mysqlqueue.deliver_all()
    assert Mail.objects.get().text == "reminder 8"


@pytest.mark.django_db(databases=["default", "second"])
def test_with_several_databases(mysqlqueue, settings):
    settings.MYSQLQUEUE = {"TOPICS": {"reminders": {"DATABASE": "second"}}}
    publish("reminders", 9)
    assert [message.payload for message in mysqlqueue.published()] == [9]
    assert [one.topic for one in mysqlqueue.deliver_all()] == ["reminders"]
