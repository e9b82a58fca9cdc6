"""Columns, fields, sizes, and the queries of the log that Spark has too."""
