"""The command line of the pipeline: ``python -m django_mysqlqueue.pipeline``, or a program for ``spark-submit``."""

from __future__ import annotations

import sys

from django_mysqlqueue.pipeline.cli import main

if __name__ == "__main__":
    sys.exit(main())
