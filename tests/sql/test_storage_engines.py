"""The engines of tables on servers whose default is not InnoDB."""

from __future__ import annotations

import io

import pytest
from django.core import checks as django_checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections

from django_mysqlqueue import publish
from django_mysqlqueue.models import MODELS, DeliveryState, QueueMessage
from tests.app.models import Effect
from tests.support.handlers import Recorder
from tests.support.harness import Sub, handler
from tests.support.private_servers import alias_of, private_server
from tools import servers

pytestmark = pytest.mark.servers_only

SERVER = "myisam"


def found():
    messages = django_checks.run_checks(tags=[django_checks.Tags.database], databases=[SERVER])
    return [one.id.removeprefix("django_mysqlqueue.") for one in messages if one.id.startswith("django_mysqlqueue.")]


def engines():
    with connections[SERVER].cursor() as cursor:
        cursor.execute("SELECT table_name, engine FROM information_schema.tables WHERE table_schema = DATABASE()")
        return dict(cursor.fetchall())


@pytest.mark.promise("Server settings")
def test_the_queues_tables_use_innodb_whatever_the_default(db, settings):
    settings.MYSQLQUEUE = {"DATABASE": SERVER}
    with private_server("--default-storage-engine=MyISAM") as server, alias_of(server, SERVER):
        of = engines()
        assert {of[model._meta.db_table] for model in MODELS if model._meta.managed} == {"InnoDB"}
        assert of[Effect._meta.db_table] == "MyISAM", "the tables of other apps are the project's"
        assert found() == ["W030"]
        # An attempt that fails leaves nothing.
        ran = Recorder(lambda delivery: delivery.is_last_attempt or 1 / 0)
        publish("t", 1)
        sub = Sub(handler("t", "g", ran, atomic=True, max_attempts=1), using=SERVER)
        assert sub.settle() == 1
        sub.leave()
        assert (QueueMessage.objects.using(SERVER).count(), DeliveryState.objects.using(SERVER).count()) == (1, 0)


def test_a_server_that_is_given_the_sql_creates_them_too(db):
    out = io.StringIO()
    call_command("sqlmigrate", "django_mysqlqueue", "0001", stdout=out, no_color=True)
    created = [line for line in out.getvalue().splitlines() if line.startswith("CREATE TABLE")]
    assert len(created) > 5
    assert all(line.endswith(" ENGINE = InnoDB;") for line in created)


def test_an_engine_that_the_server_enforces_is_reported_before_anything_is_created(db, settings):
    if not connection.mysql_is_mariadb:
        pytest.skip("MySQL has no such variable")
    settings.MYSQLQUEUE = {"DATABASE": SERVER}
    with private_server() as server, alias_of(server, SERVER):
        connections[SERVER].close()
        options = connections[SERVER].settings_dict["OPTIONS"]
        options["init_command"] = "SET enforce_storage_engine = MyISAM"
        server.execute(f"DROP DATABASE {servers.DATABASE}; CREATE DATABASE {servers.DATABASE}")
        assert found() == ["E011"]
        with pytest.raises(SystemCheckError, match=r"creates all tables with MYISAM \(enforce_storage_engine\)"):
            call_command("migrate", database=SERVER, skip_checks=False, verbosity=0)
        assert engines() == {}
