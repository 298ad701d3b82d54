"""Which tests the README's test command leaves to CI: those that took long in a recorded run.

    pytest --slow --durations=0 --durations-min=0.5 | tee times.txt
    python benchmarks/slow_tests.py times.txt …      # writes tests/slow_tests.txt

Where all tests of a file are slow, `tests/conftest.py` keeps the shortest in the quick suite.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

LIMIT_S = 2.5
OUT = Path(__file__).resolve().parent.parent / "tests" / "slow_tests.txt"
LINE = re.compile(r"^([\d.]+)s call +(\S.*?)\s*$")


def main() -> None:
    times: dict[str, float] = defaultdict(float)
    for name in sys.argv[1:]:
        for line in Path(name).read_text().splitlines():
            if found := LINE.match(line):
                times[found[2]] = max(times[found[2]], float(found[1]))
    slow = {test for test, seconds in times.items() if seconds > LIMIT_S}
    OUT.write_text("".join(f"{times[test]:.0f} {test}\n" for test in sorted(slow)))
    print(f"{len(slow)} tests, {sum(times[test] for test in slow):.0f} s")


if __name__ == "__main__":
    main()
