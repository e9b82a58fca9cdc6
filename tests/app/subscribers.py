"""Handlers of the test project; tests set what they do through ``tests.app.state``."""
