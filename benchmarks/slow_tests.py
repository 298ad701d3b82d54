"""Which tests the README's test command leaves to CI: those that took long in a recorded run.

    pytest --slow --durations=0 --durations-min=0.5 | tee times.txt
    python benchmarks/slow_tests.py times.txt …      # writes tests/slow_tests.txt

On a machine that does other work, or has arithmetic of another speed, `--limit 8` says what "long"
is there. Tests that no file names keep the line that they have. Where all tests of a file are slow,
`tests/conftest.py` keeps the shortest in the quick suite.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from pathlib import Path

LIMIT_S = 2.5
OUT = Path(__file__).resolve().parent.parent / "tests" / "slow_tests.txt"
LINE = re.compile(r"^([\d.]+)s (?:call|setup) +(\S.*?)\s*$")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("times", nargs="+", type=Path)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds")
    given = parser.parse_args()
    times: dict[str, float] = {}
    for file in given.times:
        here: dict[str, float] = defaultdict(float)
        for line in file.read_text().splitlines():
            if found := LINE.match(line):
                here[found[2]] += float(found[1])
        times |= {test: max(seconds, times.get(test, 0.0)) for test, seconds in here.items()}
    slow = {test: seconds for test, seconds in times.items() if seconds > given.limit}
    for line in OUT.read_text().splitlines():
        before, test = line.split(" ", 1)
        if test not in times:
            slow[test] = float(before)
    OUT.write_text("".join(f"{slow[test]:.0f} {test}\n" for test in sorted(slow)))
    print(f"{len(slow)} tests, {sum(slow.values()):.0f} s")


if __name__ == "__main__":
    main()
