"""After a test run that failed: run what failed again, one at a time, and say loudly what only failed beside others.

Thousands of tests start real processes and kill them, four at a time on two cores. Up to `AT_MOST` failures are looked
at again on a machine that does nothing else: what fails again fails the run; what passes is named as unsteady, which is
a defect of the test or of the program that is still to be mended, and no reason to throw the other tests' verdict away.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

AT_MOST = 3
FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main() -> int:
    failed = sorted(json.loads(FAILED.read_text())) if FAILED.exists() else []
    if not 0 < len(failed) <= AT_MOST:
        print(f"{len(failed)} failures: up to {AT_MOST} are run again, so the run has failed", file=sys.stderr)
        return 1
    print(f"{len(failed)} failed beside others; each runs again alone", flush=True)
    again = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", "-p", "no:randomly", *failed], check=False)
    if again.returncode == 0:
        print("UNSTEADY: these failed beside others and passed alone:", *failed, sep="\n  ")
    return again.returncode


if __name__ == "__main__":
    sys.exit(main())
