"""What a child process does: the probe loop, and a user's unchanged script."""
