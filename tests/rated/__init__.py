"""An app with tasks that have a rate. Only the tests of rates install it."""
