"""The queue's log in PySpark: a source, a sink, the archive, analytics and replay.

Importing it needs neither Django's settings nor Django.
"""
