"""Telemetry of a run: a page of its own, and a part of every measurement."""
