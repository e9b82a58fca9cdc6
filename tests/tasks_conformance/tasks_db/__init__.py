"""What the tests of django-tasks-db need to run with this package: tools/conformance.py copies it beside them."""
