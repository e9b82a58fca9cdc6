"""The poller, which moves work between database and inbox."""
