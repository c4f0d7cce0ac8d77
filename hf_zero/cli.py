"""The ``hf-zero`` command: one line per subcommand, each in a module of its own."""

import importlib
import os
import select
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata

from hf_zero.errors import ZeroError
from hf_zero.launcher import failures


# name -> (module with a main(argv) -> exit status, what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "config": ("hf_zero.tools.configuration", "show a configuration: every value, where it comes from, what it does"),
    "plan": ("hf_zero.planning.command", "predict the memory of every stage for a model, and recommend one"),
    "verify": ("hf_zero.verify.command", "train beside plain data parallelism and certify, or name, every difference"),
    "doctor": ("hf_zero.tools.doctor", "check this machine: versions, devices, limits, disk, collectives"),
    "convert": (
        "hf_zero.convert.command",
        "import a checkpoint of DeepSpeed or FSDP, export one for the stock Trainer",
    ),
    "launch": (
        "hf_zero.launcher.start",
        "start a training script on several ranks (takes what accelerate launch takes)",
    ),
}


_STDOUT = 1


def _usage() -> str:
    width = max(len(name) for name in COMMANDS)
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "usage: hf-zero COMMAND ... | --version\n\ncommands:\n" + "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 141  # as of a program that SIGPIPE ended
    finally:
        _nobody_reads()


def _nobody_reads() -> bool:
    """Whether who read what is printed has gone (`| head`): from here on nothing more is said."""
    watch = select.poll()
    watch.register(_STDOUT, 0)
    if gone := bool(watch.poll(0)):
        os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return gone


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(f"hf-zero {metadata.version('hf_zero')}")
        return 0
    if words[0] not in COMMANDS:
        print(f"hf-zero: unknown command {words[0]!r}\n{_usage()}", file=sys.stderr)
        return 2
    module, _ = COMMANDS[words[0]]
    try:
        return importlib.import_module(module).main(words[1:])
    except KeyboardInterrupt:
        print(f"hf-zero {words[0]}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        is_ours = isinstance(error, (ZeroError, OSError)) and not isinstance(error, BrokenPipeError)
        if not is_ours and not failures.is_for_people(error, error.__traceback__):
            raise
        if failures.wants_traceback():
            traceback.print_exc()
        else:
            print(f"hf-zero {words[0]}: {error}", file=sys.stderr)
        return failures.STATUS


if __name__ == "__main__":
    sys.exit(main())
