"""Faults by family; each module registers its own."""
