"""The page Zoo."""
