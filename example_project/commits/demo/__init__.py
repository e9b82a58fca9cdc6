"""Implementation of ``manage.py demo``. Your own application needs none of it."""
