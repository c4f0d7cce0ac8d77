"""Lets the literal ``accelerate launch`` start a ZeRO YAML where DeepSpeed is not installed.

torch calls ``install`` (entry point group ``torch.backends``) at the end of ``import torch``, in every process. Inside
``accelerate launch`` it replaces the one function that would only have raised ImportError; hf_zero's launcher then
prints one line. It never raises (torch would turn that into a failed import), stays out where DeepSpeed is installed,
and is switched off by HF_ZERO_LAUNCH_HOOK=0. With HF_ZERO_ADOPT=1 it takes DeepSpeed's and FSDP's YAML in any case.
"""

import importlib.abc
import importlib.metadata
import importlib.util
import os
import sys


_LAUNCH = "accelerate.commands.launch"
_ASKED = ("HF_ZERO_ADOPT", "1")


def install() -> None:
    try:
        if os.environ.get("HF_ZERO_LAUNCH_HOOK") == "0":
            return
        if _is_accelerate_launch():
            when_loaded(_LAUNCH, "deepspeed_launcher", _take_over)
    except Exception:  # a broken hook must not break `import torch`
        return


def _is_accelerate_launch() -> bool:
    if _LAUNCH in sys.modules or not sys.argv:
        return False
    name = os.path.basename(sys.argv[0]).removesuffix(".exe")
    # `trl sft --accelerate_config zero3` calls the launcher in its own process.
    is_launch = name in ("accelerate-launch", "trl") or (name == "accelerate" and sys.argv[1:2] == ["launch"])
    return is_launch and (_is_asked() or not _deepspeed_is_installed())


def _is_asked() -> bool:
    return _ASKED in os.environ.items()


def _deepspeed_is_installed() -> bool:
    """Asks for the distribution, as Accelerate does: a folder of that name on the path is not DeepSpeed."""
    try:
        importlib.metadata.distribution("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _take_over(module):
    module.deepspeed_launcher = _launch
    if _is_asked():
        stock = module.multi_gpu_launcher  # of FSDP's ranks and of plain ones
        module.multi_gpu_launcher = lambda args: (_launch if args.use_fsdp else stock)(args)


def _launch(args):
    from hf_zero.launcher.start import launch_from_accelerate

    launch_from_accelerate(args, "=".join(_ASKED) if _is_asked() else "DeepSpeed is not installed")


# -- acting on a module as soon as it is there ------------------------------------------------------------------------


def when_loaded(name, attribute, act):
    """Call ``act(module)`` when the module called ``name`` has ``attribute``, before anyone gets that from it."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, _Finder(name, act))
    elif attribute in vars(module):
        act(module)
    else:
        _at_first_use(module, attribute, act)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module once, through the ordinary finders, and lets ``_Loader`` load it."""

    def __init__(self, name, act):
        self._name, self._act = name, act

    def find_spec(self, fullname, path=None, target=None):
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, then acts on it."""

    def __init__(self, loader, act):
        self._loader, self._act = loader, act

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        module.__loader__ = module.__spec__.loader = self._loader
        self._act(module)


def _at_first_use(module, attribute, act):
    """For a module that is half loaded, because it is the one that imports torch: no finder will be asked for it."""
    kind = type(module)

    class Watched(kind):
        def __getattribute__(self, name):
            value = super().__getattribute__(name)
            if name != attribute:
                return value
            self.__class__ = kind
            act(self)
            return getattr(self, name)

    module.__class__ = Watched
