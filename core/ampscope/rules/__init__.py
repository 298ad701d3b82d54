"""One file a root cause, pure: ``check(evidence) -> Verdict``. See :mod:`ampscope.rules.catalog`."""
