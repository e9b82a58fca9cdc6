"""``STRICT_TOPICS``: publishing refuses topics that this project does not name."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from asgiref.sync import async_to_sync
from django.db import connection, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_mysqlqueue import (
    InvalidMessage,
    Message,
    UnknownTopic,
    apublish,
    apublish_many,
    publish,
    publish_many,
    subscriber,
)
from django_mysqlqueue.models import OutboxMessage, QueueMessage
from django_mysqlqueue.operations import redriving
from django_mysqlqueue.runtime.handling import registry
from django_mysqlqueue.service import known_topics
from django_mysqlqueue.service.dead_letters import DeadLetterFilter
from tests.support.harness import USING, Sub, handler, sequence
from tests.test_conformance import Recorder

ROOT = Path(__file__).parent.parent


@pytest.fixture
def strict(db, settings, no_handlers):
    """A project that names orders.placed by a handler and audit by a setting."""
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True, "TOPICS": {"audit": {"GROUPLESS": True}, "old_dlq": {}}}
    subscriber("orders.placed", group="mail")(lambda delivery: None)
    subscriber("other_dlq", group="alarm")(lambda delivery: None)


WAYS = {
    "publish": lambda topic: publish(topic, 1),
    "publish_many": lambda topic: publish_many(topic, range(3)),
    "apublish": lambda topic: async_to_sync(apublish)(topic, 1),
    "apublish_many": lambda topic: async_to_sync(apublish_many)(topic, range(3)),
    "commit_now": lambda topic: publish(topic, 1, on_mismatch="commit_now"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_topic_that_nobody_names_is_refused(strict, way):
    with pytest.raises(UnknownTopic) as caught:
        WAYS[way]("orders.plced")
    assert str(caught.value) == (
        "topic 'orders.plced': STRICT_TOPICS is on, and neither MYSQLQUEUE['TOPICS'] nor a handler of this project "
        "names it. Did you mean 'orders.placed'?"
    )
    assert isinstance(caught.value, InvalidMessage)
    assert not OutboxMessage.objects.exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_topic_that_is_named_is_accepted(strict, way):
    for topic in ("orders.placed", "audit"):
        WAYS[way](topic)
    assert set(OutboxMessage.objects.values_list("topic", flat=True)) == {"orders.placed", "audit"}


@pytest.mark.parametrize("value", [{}, {"STRICT_TOPICS": False}, {"STRICT_TOPICS": False, "TOPICS": {"audit": {}}}])
def test_without_the_setting_every_topic_is_accepted(strict, settings, value):
    settings.MYSQLQUEUE = value
    assert publish("orders.plced", 1)


def test_override_settings_is_followed(strict):
    with override_settings(MYSQLQUEUE={"STRICT_TOPICS": True, "TOPICS": {"orders.plced": {}}}):
        publish("orders.plced", 1)
        with pytest.raises(UnknownTopic):
            publish("audit", 1)
    with pytest.raises(UnknownTopic):
        publish("orders.plced", 1)


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("Orders.Placed", "Did you mean 'orders.placed'?"),
        ("AUDIT", "Did you mean 'audit'?"),
        ("xyz", "Known: audit, orders.placed."),
    ],
)
def test_the_error_names_the_nearest_topic(strict, topic, hint):
    with pytest.raises(UnknownTopic) as caught:
        publish(topic, 1)
    assert str(caught.value).endswith(f" names it. {hint}")


def test_the_error_names_no_more_topics_than_can_be_read(strict, settings):
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True, "TOPICS": {f"t{number:02}": {} for number in range(50)}}
    with pytest.raises(UnknownTopic, match=r"Known: orders\.placed, t00, .*, t08 and 41 more\.$"):
        publish("xyzxyz", 1)


def test_dlq_topics_stay_refused_as_such(strict):
    for topic in ("old_dlq", "other_dlq"):
        with pytest.raises(InvalidMessage, match="kept for dead letters") as caught:
            publish(topic, 1)
        assert not isinstance(caught.value, UnknownTopic)


def test_it_is_refused_before_a_message_is_read(strict):
    def messages():
        raise AssertionError("read")
        yield

    with pytest.raises(UnknownTopic):
        publish_many("orders.plced", messages())


def test_the_callers_transaction_stays_usable(strict):
    with transaction.atomic():
        publish("audit", 1)
        with pytest.raises(UnknownTopic):
            publish("orders.plced", 2)
        publish("audit", 3)
    assert [bytes(one) for one in OutboxMessage.objects.order_by("outbox_id").values_list("payload", flat=True)] == [
        b"1",
        b"3",
    ]


def test_it_costs_no_statement_and_no_discovery_for_what_is_known(strict, monkeypatch):
    monkeypatch.setattr(known_topics, "discover", None)
    with CaptureQueriesContext(connection) as captured:
        publish("orders.placed", 1)
        publish("audit", 1)
    assert [query["sql"].split()[0] for query in captured] == ["INSERT", "INSERT"]


def test_what_comes_otherwise_is_not_asked(strict, settings):
    """Plain SQL and dead letters that go back to their group."""
    settings.MYSQLQUEUE = {}
    publish("orders.plced", 1)
    sub = Sub(handler("orders.plced", function=lambda delivery: delivery.reject("no")))
    sub.settle()
    sub.leave()
    sequence()
    settings.MYSQLQUEUE = {"STRICT_TOPICS": True}
    assert redriving.redrive(USING, DeadLetterFilter("orders.plced_dlq"), actor="test") == 1
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO queue_outbox (topic, payload) VALUES ('orders.plced', '2')")
    got = Recorder()
    Sub(handler("orders.plced", function=got)).settle()
    assert sorted(got.payloads) == [1, 2]
    assert not QueueMessage.objects.filter(topic="orders.plced_dlq").exists()


def test_a_dead_letter_is_filed_under_a_topic_that_nobody_names(strict):
    publish_many("orders.placed", [Message(1, key="k")])
    Sub(handler("orders.placed", "mail", lambda delivery: delivery.reject("no"))).settle()
    sequence()
    assert QueueMessage.objects.filter(topic="orders.placed_dlq").count() == 1


def test_a_nested_discovery_imports_nothing(monkeypatch):
    found = []

    def autodiscover(name):
        found.append(name)
        registry.discover()

    monkeypatch.setattr(registry, "autodiscover_modules", autodiscover)
    registry.discover()
    registry.discover()
    assert found == ["subscribers", "subscribers"]


# -- processes that have not looked for handlers ------------------------------

SETTINGS = """
import os
SECRET_KEY = "shop"
INSTALLED_APPS = ["django_mysqlqueue", "orders", "stock"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["SHOP_DATABASE"], "OPTIONS": {
    "transaction_mode": "IMMEDIATE", "timeout": 30, "init_command": "PRAGMA journal_mode=WAL;"}}}
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
MYSQLQUEUE = {"STRICT_TOPICS": True, "TOPICS": {"audit": {}}}
"""

ORDERS = """
import time
from django_mysqlqueue import subscriber
import imported
imported.names.append(__name__)
time.sleep(0.3)  # other threads come meanwhile
@subscriber("orders", group="mail")
def mail(delivery): pass
"""

PUBLISH_TWICE = """
from django_mysqlqueue import publish
for _ in range(2):
    try:
        publish("stock", 1)
    except Exception as error:
        print(type(error).__name__, error)
"""

STOCK = ORDERS.replace('"orders"', '"stock"')


class Project:
    """A project on disk, with SQLite, whose code runs in processes of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._env = {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "shop_settings",
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            "SHOP_DATABASE": str(folder / "shop.sqlite3"),
        }
        self.write("shop_settings.py", SETTINGS)
        self.write("imported.py", "names = []")
        for app in ("orders", "stock"):
            (folder / app).mkdir()
            self.write(f"{app}/__init__.py", "")
        self.run("from django.core.management import call_command; call_command('migrate', verbosity=0)")
        self.write("orders/subscribers.py", ORDERS)
        self.write("stock/subscribers.py", STOCK)

    def write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)

    def run(self, code: str) -> str:
        """What the code prints in a fresh process."""
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"import django; django.setup()\n{textwrap.dedent(code)}"],
            cwd=self._folder,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path)


@pytest.mark.any_engine
def test_handlers_are_looked_for_at_the_first_publish_that_needs_it(project):
    said = project.run("""
        import imported
        from django_mysqlqueue import publish
        publish("audit", 1)
        print(imported.names)
        publish("stock", 1)
        print(imported.names)
        publish("orders", 1)
        try:
            publish("ordrs", 1)
        except ValueError as error:
            print(error)
        print(imported.names)
    """)
    both = "['orders.subscribers', 'stock.subscribers']"
    lines = said.splitlines()
    assert (lines[0], lines[1], lines[3]) == ("[]", both, both)
    assert lines[2].endswith("Did you mean 'orders'?")


@pytest.mark.any_engine
def test_threads_that_publish_at_once_find_every_handler(project):
    said = project.run("""
        import threading
        import imported
        from django.db import connection
        from django_mysqlqueue import publish
        from django_mysqlqueue.models import OutboxMessage
        from django_mysqlqueue.runtime.handling import registry
        barrier = threading.Barrier(9)
        failed = []
        def send(topic):
            barrier.wait()
            try:
                publish(topic, 1)
            except Exception as error:
                failed.append(repr(error))
            finally:
                connection.close()
        threads = [threading.Thread(target=send, args=(topic,)) for topic in ("orders", "stock") * 4]
        for thread in threads:
            thread.start()
        barrier.wait()
        registry.handlers()  # as a subscriber does when it starts in the same process
        for thread in threads:
            thread.join(30)
        print(failed, imported.names, OutboxMessage.objects.count())
    """)
    assert said == "[] ['orders.subscribers', 'stock.subscribers'] 8\n"


@pytest.mark.any_engine
def test_a_module_of_handlers_that_publishes_while_it_is_imported(project):
    """What is named before it in the file, or by the setting, is known; what comes later is not, and that is said."""
    project.write(
        "orders/subscribers.py",
        ORDERS + "from django_mysqlqueue import publish\nfor topic in ('audit', 'orders'): publish(topic, 1)\n",
    )
    count = "from django_mysqlqueue.models import OutboxMessage; print(OutboxMessage.objects.count(), imported.names)"
    both = "['orders.subscribers', 'stock.subscribers']"
    publishing = "import imported\nfrom django_mysqlqueue import publish\npublish('stock', 1)\n"
    assert project.run(publishing + count) == f"3 {both}\n"
    discovering = "import imported\nfrom django_mysqlqueue.runtime.handling import registry\nregistry.handlers()\n"
    assert project.run(discovering + count) == f"5 {both}\n"
    project.write("orders/subscribers.py", "from django_mysqlqueue import publish\npublish('later', 1)\n" + ORDERS)
    said = project.run(PUBLISH_TWICE)
    assert [line.split(":")[0] for line in said.splitlines()] == ["UnknownTopic topic 'later'"] * 2


@pytest.mark.any_engine
def test_an_error_in_a_module_of_handlers_comes_as_it_is(project):
    project.write("stock/subscribers.py", "1 / 0")
    said = project.run(f"{PUBLISH_TWICE}publish('orders', 1)")
    assert said == "ZeroDivisionError division by zero\n" * 2
