"""Prints the entries of a lock that an installation needs: python locked_subset.py LOCK < REPORT, where REPORT is what `pip install --dry-run --report -`
prints. Torch has no entry. Ends with 1 if pip would take another version than the lock has, or a package that it does not have.
"""

import json
import re
import sys
from pathlib import Path

OWN = "tandem-rl"


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def main() -> int:
    blocks = re.findall(r"^\S.*?(?=^\S|\Z)", Path(sys.argv[1]).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    entries = {name_of(block.partition("==")[0]): block for block in blocks}
    for each in json.load(sys.stdin)["install"]:
        name, version = name_of(each["metadata"]["name"]), each["metadata"]["version"]
        if name == OWN:
            continue
        if name not in entries or not re.match(rf"\S+=={re.escape(version)}[\s;]", entries[name]):
            print(f"{name} {version} is not in the lock; run 'make lock' after a change of constraints.txt", file=sys.stderr)
            return 1
        print(entries[name], end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
