"""Imports torch, and prints on its last line, after the mark named first, which shared libraries the process then has.

``null`` where there is no torch. Runs in the environment under test (Python 3.10 and later), so it imports nothing that
is neither Python's own nor torch.
"""

import contextlib
import importlib.util
import json
import pathlib
import re
import sys


def main():
    found = None
    if importlib.util.find_spec("torch") is not None:
        import torch

        # cuDNN and NCCL are loaded when they are first asked for something.
        with contextlib.suppress(Exception):
            torch.backends.cudnn.version()
        with contextlib.suppress(Exception):
            torch.cuda.nccl.version()
        maps = pathlib.Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
        found = sorted(set(re.findall(r"(/\S.*\.so\S*)$", maps, re.MULTILINE)))
    print(f"\n{sys.argv[1]}{json.dumps(found)}", flush=True)


main()
