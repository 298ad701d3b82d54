"""One diagnosis on several surfaces: JSON and terminal."""
