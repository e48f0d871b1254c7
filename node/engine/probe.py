"""Prints what the installed llama.cpp can do, as JSON. A process of its own, for `ingle doctor`."""

from __future__ import annotations

import json
import sys


def main() -> int:
    try:
        from node.engine.llama import build_info

        print(json.dumps(build_info()))
    except (ImportError, OSError, RuntimeError) as error:
        print(json.dumps({"error": f"llama.cpp does not load: {error}"}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
