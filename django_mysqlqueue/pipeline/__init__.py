"""The queue's log in PySpark: data source, sink, archive, analytics, report and replay.

Importing the package needs neither Django nor its settings.
"""
