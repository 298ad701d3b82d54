"""The page Frameworks."""
