"""Create a Spark session with the settings that the pipeline needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
QUIET = Path(__file__).with_name("log4j2.properties").as_uri()
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    PUSHDOWN: "true",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
}


def session(
    master: str | None = None, *, name: str = "mysqlqueue", settings: Mapping[str, str] | None = None
) -> SparkSession:
    """Return the running session with the pipeline's settings, or start one.

    Args:
        master: Spark's master URL (None: the one given to ``spark-submit``, else all cores of this machine).
        name: The name of the application.
        settings: Further Spark settings.
    """
    from pyspark.sql import SparkSession

    # Workers use the interpreter of this program.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ or "SPARK_ENV_LOADED" in os.environ
    if master or not submitted:
        master = master or "local[*]"
        builder = builder.master(master)
        if master.startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # the host name of a laptop may not resolve
            builder = builder.config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={QUIET}")
    for key, value in {**SETTINGS, **(settings or {})}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
