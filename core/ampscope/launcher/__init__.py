"""Starts child processes and follows them. Imports no torch."""
