"""Adoption: in ranks that were started for ZeRO, the stock classes of unmodified scripts come into being as ours.

No name of any module is replaced, so imports that were made before, `isinstance` and subclasses of the user go on as
they were. Each change, and what it rests on:

* `Accelerator` and `Trainer` answer a call with an instance of a class made on the fly. Ours stands right before the
  library's class, so what a subclass of the user overrides comes first, and its `super()` leads to us.
* `TrainingArguments` stay what they are (checkpoints hold them as a pickle); their `__post_init__` runs inside ours.
* `from_pretrained` and `from_config` of a model run inside `zero_init` where `zero3_init_flag` says so.
* Plugins for DeepSpeed and FSDP note which of their fields were given, and these configure hf_zero.
* `accelerate.utils` gets `DummyOptim` and `DummyScheduler`, which it exports only where DeepSpeed is installed. All
  questions for DeepSpeed are answered with no, so that scripts take the branch of plain data parallelism.

HF_ZERO_ADOPT=0 switches it off. The stock classes are refused then, as they would train with nothing sharded.
"""

import functools
import os
import sys
import types

from hf_zero.launcher.hook import when_loaded


SWITCH = "HF_ZERO_ADOPT"
_CONFIGURED = ("HF_ZERO_CONFIG", "HF_ZERO_CONFIG_FILE")
_LIBRARIES = ("accelerate", "transformers", "trl")
_STAND_INS = ("DummyOptim", "DummyScheduler")

_arguments_plugin = None  # what the newest training arguments of the script say
_said = False


def install() -> None:
    """torch calls this at the end of its import, in every process; it acts where a configuration is for ZeRO."""
    try:
        if any(os.environ.get(name) for name in _CONFIGURED):
            watch()
    except Exception:  # a broken hook must not break `import torch`
        return


@functools.cache
def watch() -> None:
    """Change each class as soon as its module is there, before the script gets it."""
    from hf_zero.launcher import failures, stock

    failures.install()
    if os.environ.get(SWITCH) == "0":
        when_loaded("transformers.trainer", "Trainer", stock.refuse_trainers)
        when_loaded("accelerate.accelerator", "Accelerator", stock.refuse_accelerators)
        return
    when_loaded("accelerate.accelerator", "Accelerator", _adopt_accelerators)
    when_loaded("transformers.modeling_utils", "PreTrainedModel", _load_in_slices)
    when_loaded("transformers.training_args", "TrainingArguments", _configure_arguments)
    when_loaded("transformers.trainer", "Trainer", _adopt_trainers)


def _is_wanted() -> bool:
    """Whether this is a rank of a run that shares anything out. Launchers of notebooks make it one after imports."""
    if not _is_rank() or _arguments_plugin is not None:
        return _is_rank()
    config = _plugin().config
    return config.zero_stage > 0 or max(config.sp_size, config.cp_size, config.tp_size) > 1


def _is_rank() -> bool:
    return "WORLD_SIZE" in os.environ  # not LOCAL_RANK: accelerate's debug_launcher does not set it


def _plugin(written=None):
    """The configuration of what is made next; `written` is what a plugin of accelerate says."""
    from accelerate.state import AcceleratorState

    from hf_zero.integrations.accelerate import ZeroPlugin

    if written is not None:
        return ZeroPlugin(written)
    return _arguments_plugin or AcceleratorState._shared_state.get("zero_plugin") or ZeroPlugin()


# -- accelerators and trainers ----------------------------------------------------------------------------------------


def _adopt_accelerators(module: types.ModuleType) -> None:
    from accelerate import utils
    from accelerate.utils import deepspeed

    from hf_zero.integrations import stock_plugins
    from hf_zero.launcher.environment import prepare_rank_environment

    if _is_rank():
        prepare_rank_environment()  # accelerate reads it when the script makes its first state
    stock_plugins.remember_fields()
    for name in _STAND_INS:
        setattr(utils, name, getattr(deepspeed, name))

    def create(cls, *args, **kwargs):
        # A Trainer replaces the one that it makes.
        if sys._getframe(1).f_globals.get("__name__") == "transformers.trainer" or not _is_rank():
            return object.__new__(cls)
        written = stock_plugins.config_in(kwargs)
        if written is None and not _is_wanted():
            return object.__new__(cls)
        return object.__new__(_ours(cls, written))

    module.Accelerator.__new__ = create


def _adopt_trainers(module: types.ModuleType) -> None:
    def create(cls, *args, **kwargs):
        return object.__new__(_ours(cls) if _is_wanted() else cls)

    module.Trainer.__new__ = create


def _ours(cls: type, written=None) -> type:
    adopted = _adopted(cls)
    if adopted is not cls:
        _say(adopted, _plugin(written))
    return adopted


@functools.cache
def _adopted(cls: type) -> type:
    """`cls` with our class before the first one in its order that is a library's."""
    libraries = [base.__module__.partition(".")[0] for base in cls.__mro__]
    if "hf_zero" in libraries:
        return cls
    stock = next(base for base, library in zip(cls.__mro__, libraries, strict=True) if library in _LIBRARIES)
    adopted = _subclass(stock, _class_for(stock), stock)
    return adopted if cls is stock else _subclass(cls, cls, adopted)


def _class_for(stock: type) -> type:
    library = stock.__module__.partition(".")[0]
    if library == "accelerate":
        from hf_zero.integrations.accelerate import ZeroAccelerator as ours
    elif library == "trl":
        from hf_zero.integrations.trl import ZeroTRLMixin as ours
    else:
        from hf_zero.integrations.transformers import ZeroTrainerMixin as ours
    return ours


def _subclass(like: type, *bases: type) -> type:
    names = {"__module__": like.__module__, "__qualname__": like.__qualname__, "__doc__": like.__doc__}
    return types.new_class(like.__name__, bases, exec_body=lambda namespace: namespace.update(names))


def _say(adopted: type, plugin) -> None:
    global _said
    if not _said and os.environ.get("RANK", "0") == "0":
        print(
            f"hf_zero: the script's {adopted.__name__} runs under ZeRO stage {plugin.config.zero_stage}, "
            f"configured by {plugin.source} ({SWITCH}=0 switches this off)",
            file=sys.stderr,
            flush=True,
        )
    _said = True


# -- arguments and models ---------------------------------------------------------------------------------------------


def _configure_arguments(module: types.ModuleType) -> None:
    stock = module.TrainingArguments.__post_init__

    @functools.wraps(stock)
    def post_init(self):
        from hf_zero.integrations.transformers import ZeroArgumentsMixin, configuring, resolved_plugin

        global _arguments_plugin
        if isinstance(self, ZeroArgumentsMixin) or not (self.deepspeed or _is_wanted()):
            stock(self)
            return
        with configuring(self):
            stock(self)
        _arguments_plugin = resolved_plugin(self)

    module.TrainingArguments.__post_init__ = post_init


def _load_in_slices(module: types.ModuleType) -> None:
    for name in ("from_pretrained", "_from_config"):
        stock = module.PreTrainedModel.__dict__[name].__func__
        setattr(module.PreTrainedModel, name, classmethod(_in_slices(stock)))


def _in_slices(stock):
    @functools.wraps(stock)
    def load(cls, *args, **kwargs):
        if not (_is_wanted() and _plugin().config.zero3_init_flag):
            return stock(cls, *args, **kwargs)
        from hf_zero.integrations.zero_init import zero_init

        # transformers itself reports what the files lack: a new head is usual, and initialised as it would do.
        with zero_init(_plugin(), allow_missing=("",)):
            return stock(cls, *args, **kwargs)

    return load
