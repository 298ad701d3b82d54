"""Instruments: each records one kind of fact and is one context manager that leaves nothing behind."""
