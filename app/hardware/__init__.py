"""The page Hardware: what the machine is, what it reads now, what it reaches."""
