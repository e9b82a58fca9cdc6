"""Publishing with STRICT_TOPICS in a process that has not imported its handlers."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.paths import ROOT

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
        from django_mysqlqueue.subscriptions import registry
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
    discovering = "import imported\nfrom django_mysqlqueue.subscriptions import registry\nregistry.handlers()\n"
    assert project.run(discovering + count) == f"5 {both}\n"
    project.write("orders/subscribers.py", "from django_mysqlqueue import publish\npublish('later', 1)\n" + ORDERS)
    said = project.run(PUBLISH_TWICE)
    assert [line.split(":")[0] for line in said.splitlines()] == ["UnknownTopic topic 'later'"] * 2


@pytest.mark.any_engine
def test_an_error_in_a_module_of_handlers_comes_as_it_is(project):
    project.write("stock/subscribers.py", "1 / 0")
    said = project.run(f"{PUBLISH_TWICE}publish('orders', 1)")
    assert said == "ZeroDivisionError division by zero\n" * 2
