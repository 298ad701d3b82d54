"""Sentences and numbers that the pages and the reports share. Nothing here is markup."""
