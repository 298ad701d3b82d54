"""Instruments: each records one kind of fact, and leaves nothing behind when it is taken off."""
