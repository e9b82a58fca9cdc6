"""Runs the declarative pipeline on the example's database: ``python -m example_project.declarative.run``.

``spark-pipelines`` takes a specification with the full path of its storage. This writes one, tells Spark where the
database is, and puts the tables into one folder, where each run makes them anew.
"""

from __future__ import annotations

import argparse
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
    """What is run. The folder is made, with the specification in it.

    Args:
        out: where the tables go, below ``warehouse``, which is emptied.
        more: further arguments of ``spark-pipelines run``.

    Raises:
        SystemExit: ``spark-pipelines`` is not installed.
    """
    program = Path(sys.executable).with_name("spark-pipelines")
    if not program.exists():
        raise SystemExit("There is no spark-pipelines: pip install 'django-mysqlqueue[pipelines]'")
    out = out.resolve()
    (out / "storage").mkdir(parents=True, exist_ok=True)
    shutil.copytree(HERE / "transformations", out / "transformations", dirs_exist_ok=True)
    spec = out / "spark-pipeline.yml"
    spec.write_text(SPEC.format(storage=(out / "storage").as_uri()))
    # Spark 4.3 reads a Parquet table that was there before as it was then, without what this run puts into it.
    shutil.rmtree(out / "warehouse", ignore_errors=True)
    given = ["--conf", f"spark.sql.warehouse.dir={(out / 'warehouse').as_uri()}"]
    return [str(program), *given, "run", "--spec", str(spec), *more]


def environment() -> dict[str, str]:
    """With the example's database, for Spark's workers too."""
    import django
    from django.db import DEFAULT_DB_ALIAS

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
    django.setup()
    from django_mysqlqueue.pipeline import project

    project.place(DEFAULT_DB_ALIAS)
    root = str(HERE.parent.parent)
    paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1", **os.environ, "PYTHONPATH": paths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=OUTPUT / "declarative", metavar="DIR", help="(default: %(default)s)"
    )
    options, more = parser.parse_known_args()
    found = environment()
    return subprocess.run(command(options.out, more), cwd=options.out, env=found, check=False).returncode  # noqa: S603


if __name__ == "__main__":
    sys.exit(main())
