"""What a child process does: the probe loop, and a user's script as it is."""
