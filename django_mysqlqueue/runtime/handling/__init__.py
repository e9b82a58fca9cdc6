"""A handler's call, and everything on the way to it."""
