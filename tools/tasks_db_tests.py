"""Run django-tasks-db's own tests with this package's backend. ``tools/conformance.py own-tests`` calls it.

The tests are in the source distribution, which is downloaded into a temporary folder. ``SUBSTITUTIONS`` are made in its
text, ``LEFT_OUT`` is not run, and tests/tasks_conformance/tasks_db stands for what the distribution does not have: the
settings, the tasks, the command ``db_worker`` and the model. Nothing else of the tests is changed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = ROOT / "tests" / "tasks_conformance" / "tasks_db"
PRUNING = """from django_tasks_db.management.commands.prune_db_task_results import (
    logger as prune_db_tasks_logger,
)
"""
SUBSTITUTIONS = (
    # What is imported from the package.
    ("from django_tasks_db import DatabaseBackend, compat", "from django_mysqlqueue.tasks import MySQLQueueBackend"),
    ("from django_tasks_db.admin import DBTaskResultAdmin\n", ""),
    (PRUNING, ""),
    ("from django_tasks_db.models import DBTaskResult, get_date_max\n", "from stand_in.results import DBTaskResult\n"),
    ("from django_tasks_db.utils import (\n", "from stand_in.utils import (\n"),
    # The backend.
    ("django_tasks_db.DatabaseBackend", "django_mysqlqueue.tasks.MySQLQueueBackend"),
    ("DatabaseBackend]", "MySQLQueueBackend]"),
    ("(DatabaseBackend, result)", "(MySQLQueueBackend, result)"),
    ('task_backends["default"], DatabaseBackend)', 'task_backends["default"], MySQLQueueBackend)'),
    # The number of its statements: any number will do.
    ("self.assertNumQueries(", "contextlib.nullcontext("),
    # A subscriber takes longer to start and to end.
    ("WORKER_STARTUP_TIME = 1", "WORKER_STARTUP_TIME = 4"),
    ("sleep_for.enqueue(2)", "sleep_for.enqueue(8)"),
    ("process.wait(timeout=", "process.wait(timeout=10 + "),
    # Ids are UUIDs of another version.
    ("uuid.UUID(result.id).version, 4)", "uuid.UUID(result.id).version, 7)"),
)
TABLE, OPTIONS = "about rows, indexes and locks of its table", "about options of the command `db_worker`"
LEFT_OUT: dict[str, str] = {
    "DatabaseBackendTestCase.test_custom_id_function": "about its option `id_function`",
    "DatabaseBackendTestCase.test_unknown_id_function": "about its option `id_function`",
    "DatabaseBackendTestCase.test_postgres_db_id_function": "about its option `id_function`",
    "DatabaseBackendTestCase.test_postgres_id_function_expression": "about its option `id_function`",
    "DatabaseBackendTestCase.test_database_backend_app_missing": "about its check for its app",
    **dict.fromkeys(
        (
            "DatabaseBackendTestCase.test_index_scan_for_ready",
            "DatabaseBackendTestCase.test_invalid_task_path",
            "DatabaseBackendTestCase.test_missing_task_path",
            "DatabaseBackendTestCase.test_priority_range_check",
            "DatabaseBackendTestCase.test_run_after_null_0016_migration",
            "DatabaseBackendTestCase.test_task_name",
            "DatabaseBackendWorkerTestCase.test_invalid_task_path",
            "DatabaseBackendWorkerTestCase.test_missing_task_path",
            "DatabaseBackendWorkerTestCase.test_run_after_priority",
            "DatabaseBackendWorkerTestCase.test_task_import_string",
            "DatabaseBackendWorkerTestCase.test_worker_with_locked_rows",
            "DatabaseTaskResultTestCase",
            "ConnectionExclusiveTranscationTestCase",
            "DBTaskResultOrderingTestCase",
        ),
        TABLE,
    ),
    **dict.fromkeys(
        (
            "DatabaseBackendWorkerTestCase.test_empty_worker_id",
            "DatabaseBackendWorkerTestCase.test_fractional_interval",
            "DatabaseBackendWorkerTestCase.test_incorrect_backend",
            "DatabaseBackendWorkerTestCase.test_infinite_interval",
            "DatabaseBackendWorkerTestCase.test_negative_interval",
            "DatabaseBackendWorkerTestCase.test_negative_max_tasks",
            "DatabaseBackendWorkerTestCase.test_too_long_worker_id",
            "DatabaseBackendWorkerTestCase.test_unknown_backend",
            "DatabaseBackendWorkerTestCase.test_zero_interval",
            "DatabaseBackendWorkerTestCase.test_zero_max_tasks",
            "DatabaseBackendWorkerTestCase.test_verbose_logging",
            "DatabaseWorkerProcessTestCase.test_repeat_ctrl_c",
        ),
        OPTIONS,
    ),
    "DatabaseBackendPruneTaskResultsTestCase": "about its command `prune_db_task_results`",
    "CompatTestCase": "about its module `compat`",
    "AdminTestCase": "about its page in the admin",
}


def run(interpreter: Path, project: Path, engine: str, env: Mapping[str, str]) -> dict[str, Any]:
    """Run the tests on an engine; return their outcomes.

    Args:
        interpreter: of an environment that has what the tests need.
        project: what ``prepare`` has made.
        engine: the title of the engine.
        env: the environment variables, which name the database.
    """
    outcomes = project / f"{engine}.json"
    env = {
        **env,
        "PYTHONPATH": f"{project}:{ROOT}",
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "LEFT_OUT": str(project / "left-out.json"),
        "OUTCOMES": str(outcomes),
    }
    command = [str(interpreter), "-m", "manage", "test", "tests", "--noinput"]
    done = subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, check=False)
    print(f"--- {engine}\n{done.stdout[-5000:]}{done.stderr[-30_000:]}", flush=True)
    if not outcomes.exists():
        raise SystemExit(f"{engine}: the tests could not be run")
    found: dict[str, Any] = json.loads(outcomes.read_text())
    return found | {"engine": engine}


def prepare(interpreter: Path, folder: Path, version: str) -> Path:
    """Make a project of the tests in a folder, and return its folder.

    Raises:
        SystemExit: the tests do not have a text of ``SUBSTITUTIONS``.
    """
    command = [str(interpreter), "-m", "pip", "download", "-q", "--no-binary", ":all:", "--no-deps"]
    subprocess.run([*command, f"django-tasks-db=={version}"], cwd=folder, check=True)
    (archive,) = folder.glob("django_tasks_db-*.tar.gz")
    with tarfile.open(archive) as file:
        member = file.extractfile(f"django_tasks_db-{version}/tests/tests.py")
        assert member is not None
        text = member.read().decode()
    for old, new in SUBSTITUTIONS:
        if old not in text:
            raise SystemExit(f"The tests of django-tasks-db {version} do not have {old!r}")
        text = text.replace(old, new)
    project = folder / "project"
    (project / "tests").mkdir(parents=True)
    (project / "tests" / "__init__.py").touch()
    (project / "tests" / "tests.py").write_text(text)
    for name in ("settings.py", "tasks.py"):
        shutil.copy(STAND_IN / name, project / "tests")
    (project / "tests" / "db_worker_test_settings.py").write_text("from tests.settings import *\n")
    shutil.copytree(STAND_IN / "stand_in", project / "stand_in")
    shutil.copy(ROOT / "manage.py", project)
    (project / "left-out.json").write_text(json.dumps(list(LEFT_OUT)))
    return project


def merged(found: Sequence[Mapping[str, Any]], version: str, django: str) -> dict[str, Any]:
    """Return the outcomes on all engines as they are stored."""
    return {
        "version": version,
        "django": django,
        "count": found[0]["count"],
        "ran": len(found[0]["ran"]),
        "passed": {one["engine"]: len(one["ran"]) - len({*one["failed"], *one["skipped"]}) for one in found},
        "skipped": {one["engine"]: sorted(one["skipped"]) for one in found},
        "failed": {one["engine"]: one["failed"] for one in found},
    }


def section(found: Mapping[str, Any]) -> str:
    """Return the section of the page about these tests."""
    passed = " and ".join(f"{count} on {engine}" for engine, count in found["passed"].items())
    failed = sorted({test for tests in found["failed"].values() for test in tests})
    introduction = (
        f"The source distribution of django-tasks-db {found['version']} has {found['count']} tests. With Django "
        f"{found['django']} and this package, {found['ran']} of them were run, and {passed} passed. The tests import "
        "this backend, `db_worker` runs `runsubscriber`, queries are not counted, ids are UUIDs of version 7, and "
        "processes have more time to start and to end.\n\n"
    )
    lines = ["\n## Tests of django-tasks-db\n\n", introduction]
    lines += [f"- `{test}` fails: {FAILING[test]}.\n" for test in failed]
    lines.append("\nThese were left out:\n\n")
    for reason in dict.fromkeys(LEFT_OUT.values()):
        names = [f"`{name}`" for name, why in LEFT_OUT.items() if why == reason]
        lines.append(f"- {reason}: {', '.join(names)}\n")
    return "".join(lines)


FAILING = {
    "DatabaseBackendWorkerTestCase.test_complex_return_value": "the error is `InvalidResult`, which names the task, "
    "instead of `TypeError`",
}
"""Why tests fail, for the page."""
