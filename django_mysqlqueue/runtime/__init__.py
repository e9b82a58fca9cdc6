"""The subscriber: handlers, polling, and processes."""
