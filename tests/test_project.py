"""What the suite and the project say of themselves is true."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.management import call_command
from django.db import connection

from django_mysqlqueue import Message, publish, publish_many
from django_mysqlqueue.models import (
    CollectedTopic,
    JobResult,
    JobStage,
    LogMark,
    OutboxMessage,
    QuarantinedMessage,
    QueueMessage,
    Reader,
    Schedule,
)
from django_mysqlqueue.operations import pausing
from django_mysqlqueue.options.delivery_limits import parse_rate
from tests.conftest import QUEUE_MODELS
from tests.support.documents import DOCS
from tests.support.harness import USING, Sub, handler, sequence
from tests.support.internals import GroupRef, relay
from tests.support.paths import ROOT

TESTS = Path(__file__).parent


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_page_of_tests_for_each_guarantee_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "tools/guarantee_tests.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr or "run make reference"


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_page_of_task_backends_is_up_to_date():
    """It is of the results that are stored, and these are of the tests that the suite has."""
    done = subprocess.run(
        [sys.executable, "tools/conformance.py", "page", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr or "run tools/conformance.py page"


@pytest.mark.any_engine
@pytest.mark.any_version
def test_every_test_that_the_documents_name_exists():
    text = (DOCS / "contributing" / "edge-case-tests.md").read_text()
    names = set(re.findall(r"`(test_\w+)`", text))
    defined = {
        node.name
        for file in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert len(names) > 15
    assert names <= defined, names - defined


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_page_of_tests_for_each_edge_case_names_rows_of_the_edge_cases():
    pages = (DOCS / "reference" / "edge-cases.md", DOCS / "contributing" / "edge-case-tests.md")
    rows, tested = (
        [line.split(" | ")[0] for line in page.read_text().splitlines() if line[:2] == "| "] for page in pages
    )
    assert set(tested) <= set(rows), set(tested) - set(rows)
    assert len(tested) > 80


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_marker_of_tests_with_processes_is_written_where_they_are():
    """``tools/run_tests.py`` looks for it in the text of the files."""
    others = [file for file in TESTS.rglob("*.py") if not file.name.startswith("test_")]
    assert [file.name for file in others if "mark.processes" in file.read_text()] == []


def test_no_migration_is_missing(db):
    call_command("makemigrations", "--check", "--dry-run", verbosity=0)


def test_migrations_go_back_and_forth(db):
    """With rows in every table; afterwards the queue works."""

    def fill():
        publish_many("t", [Message(number, key="k", coalesce=str(number)) for number in range(5)])
        sub = Sub(handler(function=lambda delivery: delivery.nack(delay=60), rate=parse_rate("10/s")))
        sub.step()
        sub.work(2)
        sub.flush()
        sub.poller.write_rollups()
        pausing.set_paused(USING, GroupRef("g", "t"), actor="test", paused=True)
        publish("t", 1, coalesce="c", delay=60)
        pausing.set_paused(USING, GroupRef("g", "t"), actor="test", paused=False)
        CollectedTopic.objects.create(topic="t", collected_offset=1, published_at=1)
        LogMark.objects.create(marked_offset=1, mark=1)
        publish("far", 1)
        OutboxMessage.objects.filter(topic="far").update(topic=f"far@{USING}")
        sequence()
        assert relay(USING, USING).messages == 1
        JobResult.objects.create(id="j", backend="default", queue_name="q", task_path="t", arguments="{}")
        JobStage.objects.create(id="s", remaining=1, kept=1, size=1)
        Schedule.objects.create(name="s", definition="{}")
        QuarantinedMessage.objects.create(topic="t", payload=b"1", deliver_at=0, created_at=1, reason="an error")
        Reader.objects.create(name="archive", read_offset=2)
        return {model.__name__ for model in QUEUE_MODELS if model.objects.exists()}

    everything = {model.__name__ for model in QUEUE_MODELS}
    for _ in range(2):
        assert fill() == everything
        call_command("migrate", "django_mysqlqueue", "zero", verbosity=0)
        left = {name for name in connection.introspection.table_names() if name.startswith("queue_")}
        assert not left
        call_command("migrate", "django_mysqlqueue", verbosity=0)
        assert not QueueMessage.objects.exists()


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_pipeline_needs_no_django():
    """Spark's executors have none, nor the app."""
    spark = ROOT / "spark"
    modules = [
        ".".join(file.relative_to(spark).with_suffix("").parts)
        for file in (spark / "pyspark_mysqlqueue").rglob("*.py")
        if file.name != "__main__.py"
    ]
    code = (
        "import sys, importlib; sys.modules['django'] = sys.modules['django_mysqlqueue'] = None; "
        f"[importlib.import_module(name) for name in {modules!r}]"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=spark, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(modules) > 10


@pytest.mark.any_engine
@pytest.mark.any_version
def test_what_both_packages_have_is_the_same():
    done = subprocess.run(
        [sys.executable, "tools/shared_modules.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout or done.stderr


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_runtime_holds_no_sql():
    for file in (ROOT / "django_mysqlqueue" / "runtime").rglob("*.py"):
        statements = re.findall(r'"\s*(?:SELECT (?!1")|INSERT|UPDATE|DELETE)', file.read_text())
        assert not statements, (file.name, statements)


@pytest.mark.any_engine
@pytest.mark.any_version
def test_texts_can_be_extracted_and_translated():
    """What is passed to gettext is a literal, and its parts have names: other languages order them otherwise."""
    names = {"_", "gettext", "gettext_lazy", "ngettext", "ngettext_lazy"}
    seen = 0
    for file in (ROOT / "django_mysqlqueue").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in names:
                continue
            texts = node.args[:2] if node.func.id.startswith("ngettext") else node.args[:1]
            for text in texts:
                where = f"{file.name}:{node.lineno}"
                assert isinstance(text, ast.Constant), where
                assert isinstance(text.value, str), where
                assert len(re.findall(r"%[sd]", text.value)) == 0, where
                seen += 1
    assert seen > 200


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_benchmark_of_rivals_says_which_python_it_needs(monkeypatch, tmp_path):
    from benchmarks import rivals

    monkeypatch.setattr(rivals, "VENV", tmp_path / "venv")
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(SystemExit, match=r"needs Python 3\.12 or later, which Django 6\.1 requires"):
        rivals.enter_venv()
    assert not list(tmp_path.iterdir()), "before anything is built"


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_benchmark_of_rivals_ends_without_a_traceback_where_pip_does(monkeypatch, tmp_path):
    from benchmarks import rivals

    (tmp_path / "requirements.txt").write_text("./nowhere\n")
    monkeypatch.setattr(rivals, "NEEDS", (3, 11))
    monkeypatch.setattr(rivals, "VENV", tmp_path / "venv")
    monkeypatch.setattr(rivals, "PROJECTS", tmp_path)
    with pytest.raises(SystemExit, match="pip could not install"):
        rivals.enter_venv()
    assert not (tmp_path / "venv" / "requirements.txt").exists(), "the next run begins again"


@pytest.mark.any_engine
@pytest.mark.any_version
def test_the_report_of_rivals_says_how_many_times_better_the_package_was():
    from benchmarks import rivals

    found = {
        rivals.JOBS.name: rivals.Figures("", 1, alone=[400.0, 900.0, 500.0], bulk=[5.0], cpu=[1.0, 1.0, 2.0]),
        "dj-queue": rivals.Figures("", 1, alone=[100.0, 300.0, 100.0], cpu=[3.0, 2.0, 8.0]),
    }
    head, _, *lines = rivals.ratios(found).splitlines()
    assert head == "| times better | dj-queue 0.14 |"
    assert "| enqueued per second, one by one outside of a transaction | 4.0 (3.0 to 5.0) |" in lines
    assert "| CPU time of a default job | 3.0 (2.0 to 4.0) |" in lines, "less is better"
    assert "| enqueued per second, in bulk | - |" in lines, "the other one has no bulk call"


@pytest.mark.any_engine
@pytest.mark.any_version
@pytest.mark.parametrize("runs", [b"\1\1\0", b"\1\2\1"], ids=["lost", "twice"])
def test_the_benchmark_of_rivals_ends_if_a_job_has_not_run_once(monkeypatch, tmp_path, runs):
    from benchmarks import rivals

    monkeypatch.setenv("RIVALS_RECORD", "")
    record = rivals.Record(tmp_path)
    record.expect(3)
    record.log.touch()
    (tmp_path / "runs").write_bytes(b"\1\1\1")
    who = dataclasses.replace(rivals.RIVALS[0], ended="")
    rivals.check(None, who, record, 3)
    (tmp_path / "runs").write_bytes(runs)
    with pytest.raises(SystemExit, match="of 3 jobs"):
        rivals.check(None, who, record, 3)
