"""Saves a prepared model as the folder that `save_pretrained` of an ordinary model would write."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hf_zero.checkpoint import saving
from hf_zero.checkpoint.background import SaveJob
from hf_zero.checkpoint.held import logical_state
from hf_zero.checkpoint.plan import SavePlan, is_pretrained, plan_module, plan_pretrained, select
from hf_zero.checkpoint.staging import find_writers, naming, on_all_ranks
from hf_zero.comm.communicator import MEETING_SECONDS, Communicator
from hf_zero.core.engine import ZeroEngine
from hf_zero.core.placement import Placement
from hf_zero.core.unit import gathered_parameters


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    _Pretrained = PreTrainedModel
else:
    _Pretrained = object

# Writes everything but sharded weights into a folder: called with the folder and the state dict to save.
WriteRest = Callable[[str, dict[str, Tensor]], None]
# The options of `save_pretrained` that decide about the files of weights.
_PLANNED = ("max_shard_size", "variant", "save_original_format")


@dataclass(frozen=True, kw_only=True)
class SavedFolder:
    """What a save has written.

    Attributes:
        sums: tensor checksums by file, once it is written and if its job wants them.
        exact: the `id` of every parameter whose master is in the files.
    """

    sums: dict[str, dict[str, int]]
    exact: frozenset[int]


class ZeroPretrainedMixin(_Pretrained):
    """Added to the class of a prepared model that has `save_pretrained`: sharded weights are saved by all ranks."""

    def should_save_on_this_rank(self, is_main_process: bool) -> bool:
        # transformers lets rank 0 alone write; with a folder on each node one rank of every node does. PEFT's models,
        # and early releases of transformers, do not ask.
        asked = getattr(super(), "should_save_on_this_rank", None)
        return is_main_process if asked is None or "_zero_writes" in self.__dict__ else asked(is_main_process)

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As the model's own `save_pretrained`. Where weights are sharded, call it on all ranks.

        Without `state_dict`, each rank writes what it owns; with one, the calling rank writes that.
        """
        stock = _without_empty_bar(super().save_pretrained)
        ready = self.__dict__.get("_zero_folder")
        if ready is not None:
            shutil.copytree(ready, save_directory, copy_function=shutil.move, dirs_exist_ok=True)
            return
        options = dict(inspect.signature(stock).bind(save_directory, *args, **kwargs).arguments)
        options.update(options.pop("kwargs", {}))
        if options.get("distributed_checkpoint"):
            raise ValueError(
                "distributed_checkpoint=True is for models that torch shards: leave it out. Under hf_zero every rank "
                "writes its own part of ordinary safetensors files anyway, and nothing is gathered"
            )
        is_main = options.get("is_main_process", True)
        engine = self.__dict__.get("_zero_engine")
        if options.get("state_dict") is not None or engine is None:
            stock(save_directory, *args, **kwargs)
        elif _readable(engine):
            # Where nobody asks which rank saves, several may be here for one folder, which is left to the model's own.
            alone = hasattr(super(), "should_save_on_this_rank") and self.should_save_on_this_rank(is_main)
            if not alone or not _save_alone(self, engine, stock, options):
                stock(save_directory, *args, **kwargs)
        elif "state_dict" in options and not is_main:
            return  # `state_dict=accelerator.get_state_dict(model)`: only the main process got one
        else:
            _save_sharded(self, engine, stock, options)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # theirs is wrapped, not a method
        """As the model's own `push_to_hub`. Where weights are sharded, call it on all ranks; rank 0 uploads.

        The other ranks get None, and do not wait for the upload.
        """
        stock = super().push_to_hub
        engine = self.__dict__.get("_zero_engine")
        if engine is None or _readable(engine):
            return stock(*args, **kwargs)
        uploads = engine.comm.rank == 0
        size = {name: kwargs[name] for name in ("max_shard_size",) if name in kwargs}
        with tempfile.TemporaryDirectory() as temporary:
            folder = engine.comm.all_gather_object(temporary)[0]
            self.save_pretrained(folder, is_main_process=uploads, **size)
            if not uploads:
                return None
            self.__dict__["_zero_folder"] = folder  # what is to be saved stands there already
            try:
                return stock(*args, **kwargs)
            finally:
                del self.__dict__["_zero_folder"]


def mixins_for(model: nn.Module) -> tuple[type, ...]:
    """What the class of a prepared model gets from here."""
    return (ZeroPretrainedMixin,) if hasattr(model, "save_pretrained") else ()


def _readable(engine: ZeroEngine) -> bool:
    """Whether each rank can read all weights without the others."""
    sharded = engine.placements.parameter is Placement.SHARDED
    pinned = all(unit.pins for unit in engine.units if unit.sharded)
    return engine.mesh.tensor is None and (not sharded or pinned)


def _without_empty_bar(stock: Callable[..., None]) -> Callable[..., None]:
    """transformers draws a bar over the files that it writes, even where there are none, as the ranks write all."""
    from huggingface_hub.utils import are_progress_bars_disabled
    from transformers.utils import logging

    @functools.wraps(stock)
    def save(*args: Any, **kwargs: Any) -> None:
        shown = kwargs.get("state_dict") == {} and logging.is_progress_bar_enabled()
        if not shown or are_progress_bars_disabled():
            return stock(*args, **kwargs)
        logging.disable_progress_bar()
        try:
            return stock(*args, **kwargs)
        finally:
            logging.enable_progress_bar()

    return save


def _save_alone(
    model: PreTrainedModel, engine: ZeroEngine, stock: Callable[..., None], options: dict[str, Any]
) -> bool:
    """Write what this rank has whole as sharded weights are written, without a copy of it in memory; no collective.

    False, and nothing is done, for what only the model's own `save_pretrained` can do: adapters, uploads, weights that
    a converter computes or that are quantised, another function that saves.
    """
    known = {*_PLANNED, "save_directory", "state_dict", "is_main_process", "save_peft_format", "token"}
    others = {name: value for name, value in options.items() if name not in known and value}
    if others not in ({}, {"safe_serialization": True}) or options.get("safe_serialization") is False:
        return False
    if _adapter_choice(model, None) is not None or getattr(model, "hf_quantizer", None) is not None:
        return False
    folder, rest = options["save_directory"], {**options, "is_main_process": True, "state_dict": {}}
    if os.path.isfile(folder):
        return False
    plan = plan_pretrained(model, lambda tensor: tensor.dtype, **_planned(options))
    if plan.computed:
        return False
    write_rest = functools.partial(_as_writer, model, lambda into, _: stock(**{**rest, "save_directory": into}))
    saving.write_whole(model, plan, folder, lambda: _place_rest(Path(folder), plan, write_rest))
    return True


def _planned(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that files are planned by."""
    return {name: options[name] for name in _PLANNED if name in options}


def _save_sharded(
    model: PreTrainedModel, engine: ZeroEngine, stock: Callable[..., None], options: dict[str, Any]
) -> None:
    folder = options.pop("save_directory")
    options.pop("state_dict", None)
    if options.get("safe_serialization") is False:
        raise ValueError("safe_serialization=False is not supported: weights are saved as safetensors")
    is_main = options.get("is_main_process", True)
    upload = _begin_upload(model, folder, engine.comm, is_main, stock, options)

    def write_rest(folder: str, state_dict: dict[str, Tensor]) -> None:
        stock(folder, **{**options, "is_main_process": True, "state_dict": state_dict})

    save_folder(
        model,
        folder,
        SaveJob(comm=engine.comm, is_main=is_main, sums=False),
        write_rest,
        compute_dtype=engine.config.zero3_save_16bit_model,
        adapters=options.get("selected_adapters"),
        **_planned(options),
    )
    upload()


def _begin_upload(
    model: PreTrainedModel,
    folder: str | os.PathLike,
    comm: Communicator,
    is_main: bool,
    stock: Callable[..., None],
    options: dict[str, Any],
) -> Callable[[], None]:
    """What `push_to_hub=True` asks for, on one of the ranks that save: make the repository, and upload what is new.

    A collective, which takes the options of the upload away. The repository is made now; the result uploads, on that
    rank alone: the others do not wait for the network.
    """
    if "push_to_hub" not in inspect.signature(stock).parameters or not options.pop("push_to_hub", False):
        return lambda: None
    from huggingface_hub import HfApi
    from transformers.utils.hub import create_and_tag_model_card

    own = set(inspect.signature(stock).parameters) | {"safe_serialization"}
    hub = {name: options.pop(name) for name in [name for name in options if name not in own]}
    token = options.pop("token", None)
    message, create_pr = hub.pop("commit_message", None), hub.pop("create_pr", False)
    name = hub.pop("repo_id", Path(folder).name)
    uploads = comm.all_gather_object(is_main).index(True) == comm.rank
    made: dict[str, Any] = {}

    def begin() -> None:
        if uploads:
            made["repo_id"] = HfApi().create_repo(name, exist_ok=True, token=token, **hub).repo_id
            Path(folder).mkdir(parents=True, exist_ok=True)
            made["files_timestamps"] = model._get_files_timestamps(folder)

    def upload() -> None:
        if uploads:
            create_and_tag_model_card(made["repo_id"], model.model_tags, token=token).save(Path(folder) / "README.md")
            model._upload_modified_files(folder, **made, commit_message=message, token=token, create_pr=create_pr)

    on_all_ranks(comm, begin)
    return upload


def save_folder(
    model: nn.Module,
    folder: str | os.PathLike,
    job: SaveJob,
    write_rest: WriteRest,
    *,
    compute_dtype: bool = True,
    adapters: list[str] | None = None,
    **plan_options: Any,
) -> SavedFolder:
    """Save a prepared model; a collective. For a thread weights are copied, and it writes them.

    `write_rest` writes what belongs to the folder besides sharded weights. Weights have the dtype that the model
    computes in, or (`compute_dtype=False`) fp32. Of a model with adapters only these are saved.
    """
    job.comm.meet("saving the model", MEETING_SECONDS)
    write_rest = functools.partial(_as_writer, model, write_rest)
    choose = _adapter_choice(model, adapters)
    if choose is not None:
        _save_adapters(model, Path(folder), job, write_rest, choose)
        return SavedFolder(sums={}, exact=frozenset())
    dtype_of = saving.saved_dtypes(model, compute_dtype)
    if is_pretrained(model):
        plan = plan_pretrained(model, dtype_of, **plan_options)
    else:
        plan = plan_module(model, dtype_of, **plan_options)
    staged = saving.stage_weights(model, plan, folder, job)
    try:
        on_all_ranks(job.comm, lambda: _place_rest(Path(folder), plan, write_rest) if staged.staged.creates else None)
        if staged.staged.creates and not compute_dtype:
            _note_dtype(model, Path(folder), dtype_of)
    except BaseException:
        staged.staged.discard()
        raise
    job.perform(staged.commit)
    return SavedFolder(sums=staged.sums, exact=saving.exact_parameters(model, plan))


def _as_writer(model: nn.Module, write_rest: WriteRest, folder: str, state_dict: dict[str, Tensor]) -> None:
    model.__dict__["_zero_writes"] = True
    try:
        write_rest(folder, state_dict)
    finally:
        del model.__dict__["_zero_writes"]


def _place_rest(folder: Path, plan: SavePlan, write_rest: WriteRest) -> None:
    """Write configuration and the like beside the folder's old content, then put them in place."""
    with naming(folder), tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as temporary:
        write_rest(temporary, {})
        for path in Path(temporary).iterdir():
            if path.name in plan.files or path.name == plan.index_name:
                continue
            target = folder / path.name
            if path.is_dir():
                shutil.copytree(path, target, dirs_exist_ok=True)
            else:
                os.replace(path, target)


def _note_dtype(model: nn.Module, folder: Path, dtype_of: Callable[[Tensor], torch.dtype]) -> None:
    """The configuration says in which dtype the weights are: the one saved, not the one computed in."""
    config: Any = getattr(model, "config", None)
    first = next((p for p in logical_state(model).values() if p.is_floating_point()), None)
    if first is None or not hasattr(config, "save_pretrained"):
        return
    before, config.dtype = config.dtype, str(dtype_of(first)).removeprefix("torch.")
    config.save_pretrained(folder)
    config.dtype = before


def _adapter_choice(model: Any, adapters: list[str] | None) -> Callable[[dict[str, Tensor]], dict[str, Tensor]] | None:
    """What picks the adapters out of a state dict; None for a model without adapters."""
    if getattr(model, "_hf_peft_config_loaded", False):
        return lambda state_dict: model.get_adapter_state_dict(state_dict=state_dict)
    if not hasattr(model, "peft_config"):
        return None
    from peft import get_peft_model_state_dict

    names = adapters or list(model.peft_config)

    def choose(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            f"{adapter}.{name}": tensor
            for adapter in names
            for name, tensor in get_peft_model_state_dict(model, state_dict, adapter_name=adapter).items()
        }

    return choose


def _save_adapters(model: nn.Module, folder: Path, job: SaveJob, write_rest: WriteRest, choose: Callable) -> None:
    """Adapters are small: they are gathered to the ranks that write."""
    creates = job.comm.rank in find_writers(folder, job).creators
    # peft looks up the names of modules that are saved whole in the modules themselves, on the rank that writes.
    whole = [param for name, param in model.named_parameters() if ".modules_to_save." in name]
    with gathered_parameters(whole):
        chosen = saving.consolidated_state_dict(model, keep=creates, names=select(model, choose))
        # The rest of the state dict is there by name only: nobody asks for its values.
        everything = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in logical_state(model).items()
        }

        def write() -> None:
            if chosen is not None:
                with naming(folder):
                    write_rest(str(folder), {**everything, **chosen})

        on_all_ranks(job.comm, write)
