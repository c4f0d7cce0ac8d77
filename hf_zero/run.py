"""Runs a training script unmodified, as ``torchrun -m hf_zero.run script.py --its --arguments`` or with ``-m module``.

hf_zero's launcher puts this module in front of every script that it starts.
"""

import os
import runpy
import sys

from hf_zero import adopt


def main() -> None:
    words = sys.argv[1:]
    as_module = words[:1] == ["-m"]
    words = words[as_module:]
    if not words:
        print("usage: python -m hf_zero.run [-m] SCRIPT [ARGUMENTS]", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = words
    adopt.watch()
    if as_module:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))  # as Python does for a script
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
