"""Checkpoints, read without loading them: what they hold, and whether they are poisoned."""
