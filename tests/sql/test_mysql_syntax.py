"""MySQL 8.0.19 understands the SQL of the package, for which there is no server here to try it on."""

from __future__ import annotations

import io

import pytest
from django.core.management import call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader

from tests.support.mysql_syntax import NEWER, OLDEST, newer, texts
from tests.support.paths import ROOT

PACKAGES = (ROOT / "django_mysqlqueue", ROOT / "spark" / "pyspark_mysqlqueue")


@pytest.mark.any_engine
@pytest.mark.any_version
@pytest.mark.parametrize("feature", NEWER, ids=lambda feature: feature.name)
def test_each_newer_feature_is_found_in_its_example(feature):
    assert feature in newer(feature.example)
    assert feature.since > OLDEST


@pytest.mark.any_engine
@pytest.mark.any_version
@pytest.mark.parametrize(
    "sql",
    [
        "SELECT outbox_id FROM queue_outbox WHERE outbox_id IN (1) FOR UPDATE SKIP LOCKED",  # 8.0.1
        "SELECT GREATEST((SELECT MAX(a) FROM t), COALESCE((SELECT b FROM u), 0))",
        "(SELECT a FROM t ORDER BY a LIMIT 1) UNION ALL (SELECT a FROM u ORDER BY a LIMIT 1) ORDER BY a LIMIT 2",
        "SELECT * FROM t JOIN LATERAL (SELECT a FROM u WHERE u.b = t.b) v",  # 8.0.14
        "INSERT INTO t (a) VALUES ROW(1) AS new ON DUPLICATE KEY UPDATE a = new.a",  # 8.0.19
        "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('replica_parallel_workers', 'slave_parallel_workers')",
    ],
)
def test_what_the_oldest_server_understands_is_not_found(sql):
    assert newer(sql) == []


@pytest.mark.any_engine
@pytest.mark.any_version
def test_no_text_of_the_packages_has_newer_sql():
    """Their literals, so those of code that no test runs too."""
    modules = sorted(module for package in PACKAGES for module in package.rglob("*.py"))
    statements = 0
    found = []
    for module in modules:
        for line, text in texts(module):
            statements += "SELECT " in text
            found += [f"{module.relative_to(ROOT)}:{line}: {one.name}" for one in newer(text)]
    assert found == []
    assert statements > 150, "the statements are not where this looks for them"


@pytest.mark.servers_only
@pytest.mark.timeout(300)
def test_no_statement_that_is_sent_has_newer_sql(db, sent):
    """Put together at run time, and by Django's ORM."""
    if connection.mysql_is_mariadb:
        pytest.skip("about MySQL's versions")
    assert {(sql, one.name) for sql in sent.texts for one in newer(sql)} == set()
    assert len(sent.texts) > 200


@pytest.mark.servers_only
def test_no_migration_has_newer_sql(db):
    loader = MigrationLoader(connection)
    names = [name for app, name in loader.disk_migrations if app == "django_mysqlqueue"]
    written = []
    for name in names:
        output = io.StringIO()
        call_command("sqlmigrate", "django_mysqlqueue", name, stdout=output, no_color=True)
        written.append(output.getvalue())
    assert [(name, one.name) for name, sql in zip(names, written, strict=True) for one in newer(sql)] == []
    assert "CREATE TABLE `queue_messages`" in "".join(written)
