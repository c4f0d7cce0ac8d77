"""Lets the literal ``accelerate launch`` start a ZeRO YAML where DeepSpeed is not installed.

torch calls ``install`` (entry point group ``torch.backends``) at the end of ``import torch``, in every process.
Everywhere but inside ``accelerate launch`` it looks at the command's name and returns. There it waits for the module
``accelerate.commands.launch`` and replaces the one function that would only have raised ImportError. It never raises
(torch would turn that into a failed import), prints one line when it takes over, stays out where DeepSpeed is
installed, and is switched off by HF_ZERO_LAUNCH_HOOK=0.
"""

import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys


_TARGET = "accelerate.commands.launch"


def install() -> None:
    try:
        if _wanted():
            sys.meta_path.insert(0, _LaunchFinder())
    except Exception:  # a broken hook must not break `import torch`
        return


def _wanted() -> bool:
    if os.environ.get("HF_ZERO_LAUNCH_HOOK") == "0" or _TARGET in sys.modules or not sys.argv:
        return False
    name = os.path.basename(sys.argv[0]).removesuffix(".exe")
    is_launch = name == "accelerate-launch" or (name == "accelerate" and sys.argv[1:2] == ["launch"])
    return is_launch and not _deepspeed_is_installed()


def _deepspeed_is_installed() -> bool:
    """Asks for the distribution, as Accelerate does: a folder of that name on the path is not DeepSpeed."""
    try:
        importlib.metadata.distribution("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class _LaunchFinder(importlib.abc.MetaPathFinder):
    """Finds the launch module once, through the ordinary finders, and lets ``_LaunchLoader`` load it."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LaunchLoader(spec.loader)
        return spec


class _LaunchLoader(importlib.abc.Loader):
    """Loads the module as its own loader does, then replaces the DeepSpeed launcher."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self._loader
        if hasattr(module, "deepspeed_launcher"):
            module.deepspeed_launcher = _deepspeed_launcher


def _deepspeed_launcher(args):
    from hf_zero.launcher.start import launch_from_accelerate

    launch_from_accelerate(args)
