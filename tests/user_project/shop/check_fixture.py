"""The pytest fixture, as a project's tests use it."""

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
