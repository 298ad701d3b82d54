"""A class on one machine: its queue, what a session asks of it, the teacher's page."""
