"""What is in the wheel and the sdist, and that the wheel works by itself."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
import run_tests

from tests.support.distribution import ROOT, Built, build, copy_project

ON_EXECUTORS = """
import importlib.util, pyspark_mysqlqueue, sqlite3
assert "site-packages" in pyspark_mysqlqueue.__file__
assert [importlib.util.find_spec(name) for name in ("django", "django_mysqlqueue")] == [None, None]
import pyspark_mysqlqueue.archive.run
from pyspark_mysqlqueue.log_schema import COLUMNS
from pyspark_mysqlqueue.session import session
with sqlite3.connect("log.sqlite3") as database:
    names = ", ".join(f"`{column.name}`" for column in COLUMNS)
    values = ["first" if column.name == "id" else 1 if column.kind in ("number", "time") else "" for column in COLUMNS]
    database.execute(f"CREATE TABLE queue_messages ({names})")
    database.execute(f"INSERT INTO queue_messages VALUES ({', '.join('?' * len(values))})", values)
    database.execute("CREATE TABLE queue_sequencer (id, last_offset)")
    database.execute("CREATE TABLE queue_collected (topic, collected_offset, published_at)")
options = {"sqliteFile": "log.sqlite3", "subscribePattern": ".*"}
reader = session("local[1]").read.format("mysqlqueue").options(**options)
print(*[(row.offset, row.id) for row in reader.load().collect()][0])
try:
    reader.option("pushFilters", "true").load().collect()
except Exception as error:
    print("needs PySpark 4.1" in str(error))
"""
"""Reads a log by Spark where nothing is installed but what executors have."""

BY_NAME = """
from pyspark.sql import SparkSession
from pyspark_mysqlqueue import frames
from pyspark_mysqlqueue.databases import Place
from pyspark_mysqlqueue.errors import PipelineError
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
try:
    print(len(frames.log(spark, Place(sqlite_file="log.sqlite3")).columns), "columns")
except PipelineError as error:
    print(error)
"""
"""Looks for the data source in a session that the user has started."""

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RELEASE = f"{PROJECT['name'].replace('-', '_')}-{PROJECT['version']}"
DATA = ("templates", "static", "locale")
SPARK_DATA = ("py.typed", "log4j2.properties", "report/page.html")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("distribution") / "project")


@pytest.fixture(scope="module")
def built(project: Path) -> Built:
    return build(project, project.parent / "dist")


@pytest.fixture(scope="module")
def built_for_spark(project: Path) -> Built:
    return build(project / "spark", project.parent / "dist-spark")


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    package = ROOT / "django_mysqlqueue"
    expected = {str(file.relative_to(ROOT)) for file in package.rglob("*.py")} | {"django_mysqlqueue/py.typed"}
    expected |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob("django_mysqlqueue/procedures/sql/*.sql")}
    for folder in DATA:
        for file in (package / folder).rglob("*"):
            # Of translations only what Django reads at run time.
            if file.is_file() and not (folder == "locale" and file.suffix != ".mo"):
                expected.add(str(file.relative_to(ROOT)))
    info = {name for name in built.names() if name.startswith(f"{RELEASE}.dist-info/")}
    assert built.names() - info == expected
    assert {name.removeprefix(f"{RELEASE}.dist-info/") for name in info} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "licenses/LICENSE",
        "top_level.txt",
        *(["entry_points.txt"] if "entry-points" in PROJECT else []),
    }
    assert "django_mysqlqueue/migrations/0001_initial.py" in expected
    assert built.read("licenses/LICENSE") == (ROOT / "LICENSE").read_text()


def test_the_wheel_for_spark_holds_its_package_and_nothing_else(built_for_spark: Built) -> None:
    spark = ROOT / "spark"
    package = spark / "pyspark_mysqlqueue"
    files = [*package.rglob("*.py"), *(package / name for name in SPARK_DATA)]
    info = {name for name in built_for_spark.names() if name.startswith(f"{built_for_spark.release}.dist-info/")}
    assert built_for_spark.names() - info == {str(file.relative_to(spark)) for file in files}
    assert built_for_spark.read("licenses/LICENSE") == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize(("which", "folder"), [("built", ROOT), ("built_for_spark", ROOT / "spark")])
def test_the_metadata_is_what_pyproject_says(which: str, folder: Path, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(which)
    project = built.project
    metadata = built.metadata()
    assert built.wheel.name == f"{built.release}-py3-none-any.whl"
    assert metadata["Name"] == project["name"]
    assert metadata["Version"] == project["version"]
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["License-Expression"] == project["license"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.lower() for line in required] == [line.lower() for line in project["dependencies"]]
    assert metadata.get_payload() == (folder / "README.md").read_text()
    for group, entries in project.get("entry-points", {}).items():
        text = built.read("entry_points.txt")
        assert f"[{group}]" in text
        for name, target in entries.items():
            assert f"{name} = {target}" in text


def test_the_versions_agree() -> None:
    import django_mysqlqueue

    assert django_mysqlqueue.__version__ == PROJECT["version"]
    spark = tomllib.loads((ROOT / "spark" / "pyproject.toml").read_text())["project"]
    assert spark["version"] == PROJECT["version"]
    for extra in ("spark", "pipelines"):
        assert [line.partition("==")[2] for line in PROJECT["optional-dependencies"][extra]] == [PROJECT["version"]]


def test_the_sdist_holds_what_the_tests_and_the_documents_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.removeprefix(f"{RELEASE}/") for name in archive.getnames()}
    for needed in (
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "docs/conf.py",
        "example_project/settings.py",
        "spark/pyproject.toml",
        "spark/pyspark_mysqlqueue/source.py",
        "example_project/data/commit_events.jsonl.gz",
        "tests/conftest.py",
        "tests/app/models.py",
        "tools/run_tests.py",
    ):
        assert needed in names, needed
    for name in names:
        assert not name.startswith((".git/", ".test", ".venv", "build", "dist")), name
        assert not name.endswith((".pyc", ".sqlite3")), name


def bare() -> dict[str, str]:
    """The environment, without what leads to this checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("DJANGO_SETTINGS_MODULE", "PYTHONPATH")}


def virtual_environment(folder: Path, python: str = sys.executable) -> Path:
    """Create one, and return its interpreter."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    return folder / "venv" / "bin" / "python"


def test_the_installed_wheel_imports_without_settings(built: Built, tmp_path: Path) -> None:
    """In a virtual environment that has neither Django nor a settings module."""
    python = virtual_environment(tmp_path)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", built.wheel], env=bare(), check=True)
    code = "import django_mysqlqueue as q; assert 'site-packages' in q.__file__; print(q.__version__, *q.__all__)"
    done = subprocess.run([python, "-W", "error", "-c", code], cwd=tmp_path, env=bare(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == PROJECT["version"]
    assert "publish" in done.stdout.split()


def test_the_wheel_for_spark_works_with_the_oldest_versions_and_without_django(
    built_for_spark: Built, tmp_path: Path
) -> None:
    """In a virtual environment that has nothing but it and what it requires: Spark finds the source by its name."""
    oldest = run_tests.find_python(run_tests.Leg("Python 3.10", (3, 10), (3, 11))) or sys.executable
    python = virtual_environment(tmp_path, oldest)
    project = built_for_spark.project
    lines = project["dependencies"] + project["optional-dependencies"]["spark"]
    required = [line.replace(">=", "==") for line in lines]
    subprocess.run([python, "-m", "pip", "install", "-q", built_for_spark.wheel, *required], env=bare(), check=True)
    done = subprocess.run([python, "-c", ON_EXECUTORS], cwd=tmp_path, env=bare(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", "first", "True"]


def test_spark_finds_the_source_in_an_editable_install_or_says_what_to_do(project: Path, tmp_path: Path) -> None:
    python = virtual_environment(tmp_path)
    install = [python, "-m", "pip", "install", "-q", "-c", project / "constraints.txt", "-e", project / "spark"]
    subprocess.run(install, env=bare(), check=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    # Those of this interpreter, because PySpark takes half a minute to install.
    for name in ("pyspark", "py4j"):
        (packages / name).symlink_to(importlib.import_module(name).__path__[0])
    other = virtual_environment(tmp_path / "other")
    env = {**bare(), "PATH": f"{other.parent}:{os.environ['PATH']}", "SPARK_LOCAL_IP": "127.0.0.1"}
    env.pop("PYSPARK_PYTHON", None)
    for more, says in (({}, f"set PYSPARK_PYTHON={python} before"), ({"PYSPARK_PYTHON": str(python)}, "21 columns")):
        done = subprocess.run(
            [python, "-c", BY_NAME], cwd=tmp_path, env=env | more, capture_output=True, text=True, check=False
        )
        assert says in done.stdout, done.stderr
