"""Register in one TensorRT and print what happened as JSON: `python -m twellc.plugins.registration_worker HOST`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

from twellc.plugins.registration import check_one


def main() -> None:
    """Answer on a copy of standard output: a TensorRT may write to the original."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        found = check_one(sys.argv[1])
        answer.write(json.dumps(found and dataclasses.asdict(found)) + "\n")
    # A lean TensorRT without a GPU may not survive its own end, after all has been said.
    os._exit(0)


if __name__ == "__main__":
    main()
