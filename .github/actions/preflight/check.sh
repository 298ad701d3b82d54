#!/usr/bin/env bash
# The action's check: SARIF to a file, findings as lines of the log, the status as an output.
set -u
read -ra paths <<< "$PATHS"
ampscope preflight "${paths[@]}" --format sarif --out "$SARIF"
status=$?
if [ "$status" -gt 1 ]; then exit "$status"; fi
ampscope preflight "${paths[@]}"
echo "status=$status" >> "$GITHUB_OUTPUT"
if [ "$FAIL" = true ]; then exit "$status"; fi
exit 0
