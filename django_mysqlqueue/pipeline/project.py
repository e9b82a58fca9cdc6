"""Tell the pipeline, which does not read Django's settings, where a project's queue is."""

from __future__ import annotations

import json
import os
from pathlib import Path

from django.db import connections

from django_mysqlqueue.pipeline.databases import URL_VARIABLE, Place
from django_mysqlqueue.pipeline.errors import PipelineError

PASSED_ON = (
    "host",
    "port",
    "user",
    "passwd",
    "password",
    "db",
    "database",
    "unix_socket",
    "ssl",
    "ssl_mode",
    "read_default_file",
    "read_default_group",
)
"""The driver's arguments that locate the database. The others configure Django's own connection."""


def place(using: str) -> Place:
    """Return the queue's database of this project, and pass it to Spark's workers through the environment.

    Call it before the Spark session starts: the workers inherit the environment of that moment.

    Args:
        using: The alias of the queue's database.

    Raises:
        PipelineError: A Spark session is running whose workers have another database.
    """
    connection = connections[using]
    parameters = connection.get_connection_params()
    if connection.vendor == "sqlite":
        # Workers may run in another folder.
        details = {"sqlite_file": str(Path(parameters["database"]).absolute())}
    else:
        details = {name: parameters[name] for name in PASSED_ON if name in parameters}
    text = json.dumps(details, sort_keys=True)
    if os.environ.get(URL_VARIABLE) != text:
        from pyspark import SparkContext

        if SparkContext._gateway is not None:
            raise PipelineError(
                f"the workers of the running Spark session do not know the database {using!r}: stop the session "
                f"first, or start it with {URL_VARIABLE} set"
            )
        os.environ[URL_VARIABLE] = text
    return Place()
