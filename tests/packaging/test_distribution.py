"""What is in the wheel and the sdist, and that the wheel works by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.support.distribution import ROOT, copy_project

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(600)]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = PROJECT["name"].replace("-", "_")
RELEASE = f"{NAME}-{PROJECT['version']}"
DATA = ("templates", "static", "locale")


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path

    def names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return set(archive.namelist())

    def read(self, name: str) -> str:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.read(f"{RELEASE}.dist-info/{name}").decode()

    def metadata(self) -> Message:
        return Parser().parsestr(self.read("METADATA"))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("distribution")
    project = copy_project(folder / "project")
    done = subprocess.run(
        [sys.executable, "-m", "build", "-o", folder / "dist", project], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (folder / "dist").glob("*.whl")
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    return Built(wheel, sdist)


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    package = ROOT / "django_mysqlqueue"
    expected = {str(file.relative_to(ROOT)) for file in package.rglob("*.py")} | {"django_mysqlqueue/py.typed"}
    # Spark looks for its data sources in packages of such names.
    expected |= {"pyspark_mysqlqueue/__init__.py"}
    expected |= {f"django_mysqlqueue/pipeline/{name}" for name in ("log4j2.properties", "report/page.html")}
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


def test_the_metadata_is_what_pyproject_says(built: Built) -> None:
    metadata = built.metadata()
    assert built.wheel.name == f"{RELEASE}-py3-none-any.whl"
    assert metadata["Name"] == PROJECT["name"]
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["License-Expression"] == PROJECT["license"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [line.lower() for line in required] == [line.lower() for line in PROJECT["dependencies"]]
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    for group, entries in PROJECT.get("entry-points", {}).items():
        text = built.read("entry_points.txt")
        assert f"[{group}]" in text
        for name, target in entries.items():
            assert f"{name} = {target}" in text


def test_the_versions_agree() -> None:
    import django_mysqlqueue

    assert django_mysqlqueue.__version__ == PROJECT["version"]


def test_the_sdist_holds_what_the_tests_and_the_documents_need(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.removeprefix(f"{RELEASE}/") for name in archive.getnames()}
    for needed in (
        "LICENSE",
        "Makefile",
        "constraints.txt",
        "docs/conf.py",
        "example_project/settings.py",
        "example_project/data/commit_events.jsonl.gz",
        "tests/conftest.py",
        "tests/app/models.py",
        "tools/run_tests.py",
    ):
        assert needed in names, needed
    for name in names:
        assert not name.startswith((".git/", ".test", ".venv", "build", "dist")), name
        assert not name.endswith((".pyc", ".sqlite3")), name


def test_the_installed_wheel_imports_without_settings(built: Built, tmp_path: Path) -> None:
    """In a virtual environment that has neither Django nor a settings module."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", built.wheel], check=True)
    env = {name: value for name, value in os.environ.items() if name not in ("DJANGO_SETTINGS_MODULE", "PYTHONPATH")}
    code = "import django_mysqlqueue as q; assert 'site-packages' in q.__file__; print(q.__version__, *q.__all__)"
    done = subprocess.run([python, "-W", "error", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == PROJECT["version"]
    assert "publish" in done.stdout.split()
