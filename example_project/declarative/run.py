"""Run the declarative pipeline on the example's database: ``python -m example_project.declarative.run``.

``spark-pipelines`` needs a specification with the absolute path of its storage. This program writes the specification,
passes the database to Spark through the environment, and stores the tables in one folder. Each run creates the tables
from scratch.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from example_project.paths import OUTPUT

HERE = Path(__file__).resolve().parent
SPEC = """name: commits
storage: {storage}
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.session.timeZone: UTC
"""


def command(out: Path, more: list[str]) -> list[str]:
    """Create the folder with the specification, and return the command to run.

    Args:
        out: The folder. Its subfolder ``warehouse`` receives the tables and is deleted first.
        more: Further arguments for ``spark-pipelines run``.

    Raises:
        SystemExit: The extra ``pipelines`` is not installed.
    """
    if importlib.util.find_spec("grpc") is None:  # PySpark itself has the program, but not what it imports.
        raise SystemExit("spark-pipelines needs further packages: pip install 'django-mysqlqueue[pipelines]'")
    program = Path(sys.executable).with_name("spark-pipelines")
    out = out.resolve()
    (out / "storage").mkdir(parents=True, exist_ok=True)
    shutil.copytree(HERE / "transformations", out / "transformations", dirs_exist_ok=True)
    spec = out / "spark-pipeline.yml"
    spec.write_text(SPEC.format(storage=(out / "storage").as_uri()))
    # Spark 4.3 reads a Parquet table that existed before the run in its old state, without the rows of this run.
    shutil.rmtree(out / "warehouse", ignore_errors=True)
    given = ["--conf", f"spark.sql.warehouse.dir={(out / 'warehouse').as_uri()}"]
    return [str(program), *given, "run", "--spec", str(spec), *more]


def environment() -> dict[str, str]:
    """Return the environment, which tells Spark's workers where the example's database is."""
    import django
    from django.db import DEFAULT_DB_ALIAS

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    from django_mysqlqueue.management.spark import project_place

    project_place(DEFAULT_DB_ALIAS)
    root = str(HERE.parent.parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **os.environ, "PYTHONPATH": paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=OUTPUT / "declarative", metavar="DIR",
        help="folder for the specification and the tables (default: %(default)s)",
    )  # fmt: skip
    options, more = parser.parse_known_args()
    found = environment()
    return subprocess.run(command(options.out, more), cwd=options.out, env=found, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
