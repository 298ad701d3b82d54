"""What pages about runs share: choosing, starting, following, naming, sharing, taking home."""
