"""The dashboard as a person uses it: a real browser, real subscriber processes, a real database."""
