"""The command line of the pipeline: ``python -m pyspark_mysqlqueue``, or a program for ``spark-submit``."""

from __future__ import annotations

import sys

from pyspark_mysqlqueue.cli import main

if __name__ == "__main__":
    sys.exit(main())
