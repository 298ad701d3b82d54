"""One file a root cause, pure: ``check(evidence) -> Verdict``; see ``rules.catalog``."""
