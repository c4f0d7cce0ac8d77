"""Tiles of the loss: a language model's head and cross entropy for some tokens at a time, without whole logits.

[Note: tiles of the loss] What a model does behind its layers (head, scaling, capping, loss of a router) stands in its
`forward` only. So that is what runs, on a stand-in: the same modules and parameters, but for the backbone, which hands
on one token, and for the loss function, which notes what it is called with. What comes out is all that the model
returns, with a loss without the cross entropy. Then each tile of the backbone's output goes the same way, and its
logits become its part of the cross entropy and of the gradients at once. So logits are never kept for backward, and
backward multiplies what is there by the gradient of the loss: it reads no weights.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_zero.core import guard
from hf_zero.core.hooks import Overlay, cover, uncover
from hf_zero.core.order import HookPoint
from hf_zero.core.partition import PERSISTENT, ROOT
from hf_zero.core.schedule import Schedule
from hf_zero.core.unit import Unit
from hf_zero.errors import ZeroConfigError, ZeroRuntimeError


logger = logging.getLogger(__name__)

_OFF = "leave tile_loss (zero_tile_loss) out"
_IGNORED = -100


class NoLogits:
    """Stands for the logits that were never whole; whatever asks for them gets a ZeroRuntimeError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ZeroRuntimeError(f"logits.{name}: with tile_loss there are no whole logits beside a loss; {_OFF}")

    def __getitem__(self, index: object) -> Any:
        raise ZeroRuntimeError(f"logits[...]: with tile_loss there are no whole logits beside a loss; {_OFF}")

    def __deepcopy__(self, memo: dict) -> NoLogits:
        return self


class TiledLoss:
    """Computes the loss of a language model (see `language_model_in`) for `tokens` at a time, until it is removed.

    Attributes:
        label_smoothing: as of `torch.nn.functional.cross_entropy`; above 0, the loss is the cross entropy alone.
        in_evaluation: whether it is done in evaluation too, where otherwise the model gives its logits.
    """

    def __init__(self, model: nn.Module, tokens: int, schedule: Schedule) -> None:
        self.label_smoothing = 0.0
        self.in_evaluation = False
        self._model: Any = model
        self._own, self._backbone = type(model), _backbone_of(model)
        self._tokens, self._schedule = tokens, schedule
        self._takes = list(inspect.signature(self._own.forward).parameters)[1:]
        self._point = HookPoint("tile_loss", [], reads_weights_in_backward=False, is_root=False)
        self._warned = False
        cover(model, _Tiled, _tiles=self)

    @property
    def name(self) -> str:
        """That of the model's class."""
        return self._own.__name__

    def remove(self) -> None:
        """The model computes its loss by itself again."""
        uncover(self._model)

    def answer(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the model's forward returns, with `NoLogits`; None where it is not asked for a loss alone."""
        given = {**dict(zip(self._takes, args, strict=False)), **kwargs}
        kept = given.get("logits_to_keep")
        if not (self._model.training or self.in_evaluation) or (kept.numel() if isinstance(kept, Tensor) else kept):
            return None
        if given.get("labels") is None and given.get("shift_labels") is None:
            self._warn()
            return None
        wanted = given.pop("return_dict", None)
        with contextlib.ExitStack() as call:
            noted: list[dict[str, Any]] = []
            backbone = _Shortened(
                getattr(self._model, self._backbone), lambda: call.enter_context(self._as_one_call())
            )
            try:
                output = self._run(backbone, given, functools.partial(_note, noted))
            except Exception as error:
                if backbone.output is None or noted:
                    raise
                raise self._unusual() from error
            if len(noted) != 1 or noted[0]["logits"] is not output.logits:
                raise self._unusual()
            loss = self._cross_entropy(backbone, given, noted[0])
            backbone.outputs.append(loss)
        loss = loss if self.label_smoothing else loss + output.loss
        output = type(output)(**{**output, "loss": loss, "logits": NoLogits()})
        return output if (self._model.config.return_dict if wanted is None else wanted) else output.to_tuple()

    def _unusual(self) -> ZeroConfigError:
        return ZeroConfigError(
            f"tile_loss: {self.name} does not hand the logits that it returns to the loss function of "
            f"language models, but computes its loss by itself; {_OFF}"
        )

    def _warn(self) -> None:
        if torch.is_grad_enabled() and not self._warned:
            self._warned = True
            logger.warning("hf_zero: %s is called without labels: tile_loss has no effect on its logits", self.name)

    def _run(self, backbone: _Shortened, given: dict[str, Any], loss_function: Callable) -> Any:
        """The model's own forward with another backbone and another loss function."""
        stand_in = self._own.__new__(self._own)
        stand_in.__dict__.update(self._model.__dict__)
        stand_in.__dict__["_modules"] = {**self._model._modules, self._backbone: backbone}
        stand_in.__dict__["_loss_function"] = loss_function
        return self._own.forward(stand_in, **given, return_dict=True)

    @contextlib.contextmanager
    def _as_one_call(self) -> Iterator[list[Tensor]]:
        units = dict.fromkeys(guard.owner_of(param) for param in self._parameters)
        self._point.units = [unit for unit in units if isinstance(unit, Unit) and unit.name not in (PERSISTENT, ROOT)]
        with self._schedule.as_one_call(self._point) as outputs:
            yield outputs

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Those that are not the backbone's alone, each once."""
        children = (child for name, child in self._model.named_children() if name != self._backbone)
        return list(dict.fromkeys(param for child in children for param in child.parameters()))

    def _cross_entropy(self, backbone: _Shortened, given: dict[str, Any], noted: dict[str, Any]) -> Tensor:
        ignored = noted.get("ignore_index", _IGNORED)
        targets = noted.get("shift_labels")
        if targets is None:  # each token predicts the next
            targets = F.pad(noted["labels"], (0, 1), value=ignored)[..., 1:]
        hidden = backbone.hidden.flatten(0, -2)
        targets = targets.flatten().to(hidden.device)
        silent = {name: value for name, value in given.items() if name not in ("labels", "shift_labels")}
        if "output_router_logits" in self._takes:
            silent["output_router_logits"] = False  # their loss is there already

        def sum_of(part: Tensor, labels: Tensor) -> Tensor:
            logits = self._run(backbone.giving(part), silent, _note).logits.flatten(0, -2).float()
            return F.cross_entropy(
                logits, labels, reduction="sum", ignore_index=ignored, label_smoothing=self.label_smoothing
            )

        trained = [param for param in self._parameters if param.requires_grad]
        if torch.is_grad_enabled() and (hidden.requires_grad or trained):
            total = _SumOverTiles.apply(sum_of, self._tokens, targets, hidden, *trained)
        else:
            parts = zip(hidden.split(self._tokens), targets.split(self._tokens), strict=True)
            total = torch.stack([sum_of(part, labels) for part, labels in parts]).sum()
        count = noted.get("num_items_in_batch")
        if count is None:
            count = (targets != ignored).sum()
        return total / (count.to(total.device) if isinstance(count, Tensor) else count)


class _SumOverTiles(torch.autograd.Function):
    """A sum over tiles of tokens, whose gradients are there with it.

    In 16-bit runs gradients of parameters are added up in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, sum_of: Callable, tokens: int, targets: Tensor, hidden: Tensor, *params: nn.Parameter
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        of_params = [
            torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32)) for param in params
        ]
        for start in range(0, len(hidden), tokens):
            part = hidden[start : start + tokens].detach().requires_grad_(of_hidden is not None)
            with torch.enable_grad():
                loss = sum_of(part, targets[start : start + tokens])
            wanted = [*params] if of_hidden is None else [part, *params]
            with _without_autocast(hidden.device):
                grads = list(torch.autograd.grad(loss, wanted, allow_unused=True))
            total += loss.detach()
            del loss
            if of_hidden is not None:
                of_hidden[start : start + tokens] = grads.pop(0)
            for added, grad in zip(of_params, grads, strict=True):
                if grad is not None:
                    added += grad
            del grads
        ctx.grads = [of_hidden, *of_params]
        ctx.dtypes = [hidden.dtype, *(param.dtype for param in params)]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise ZeroRuntimeError(f"tile_loss: backward went through this loss before (retain_graph=True); {_OFF}")
        grads, ctx.grads = ctx.grads, None
        scaled = [None if each is None else each.mul_(grad).to(to) for each, to in zip(grads, ctx.dtypes, strict=True)]
        return None, None, None, *scaled


class _Shortened:
    """Stands for a backbone, or for a module inside of it that is called in its place.

    When it has run, it hands on the first token; then those that it is `giving`.
    """

    def __init__(self, module: Any, on_return: Callable[[], list[Tensor]], whole: _Shortened | None = None) -> None:
        self._module, self._on_return, self._whole = module, on_return, whole or self
        self.output: Any = None
        self.outputs: list[Tensor] = []  # of the call that everything behind the backbone is
        self._given: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return _Shortened(value, self._on_return, self._whole) if isinstance(value, nn.Module) else value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        whole = self._whole
        if whole._given is not None:
            return _with_hidden(whole.output, whole._given)
        whole.output = self._module(*args, **kwargs)
        whole.outputs = self._on_return()
        return _with_hidden(whole.output, whole.hidden[:, :1], keeps_rest=True)

    @property
    def hidden(self) -> Tensor:
        """What goes to the head, of shape (rows, tokens, width)."""
        output = self.output
        return output[0] if isinstance(output, tuple) else output.last_hidden_state

    def giving(self, part: Tensor) -> _Shortened:
        """From now on it gives these tokens, of shape (tokens, width), without running."""
        self._given = part.unsqueeze(0)
        return self


def _with_hidden(output: Any, hidden: Tensor, keeps_rest: bool = False) -> Any:
    """The output of a backbone with other hidden states, and nothing else if not asked to keep it."""
    if isinstance(output, tuple):
        return (hidden, *(output[1:] if keeps_rest else [None] * (len(output) - 1)))
    return type(output)(**{**(output if keeps_rest else {}), "last_hidden_state": hidden})


def _note(
    noted: list[dict[str, Any]], logits: Tensor, labels: Any, vocab_size: int, *rest: Any, **kwargs: Any
) -> Tensor:
    """In the place of the loss function of language models: note its arguments, and add nothing."""
    named = dict(zip(("num_items_in_batch", "ignore_index", "shift_labels"), rest, strict=False))
    noted.append({"logits": logits, "labels": labels, **named, **kwargs})
    return torch.zeros((), dtype=torch.float32, device=logits.device)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


class _Tiled(Overlay):
    """Over the class of a language model."""

    _tiles: TiledLoss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._tiles.answer(args, kwargs)
        return super().forward(*args, **kwargs) if answer is None else answer


def tiled_loss_of(model: nn.Module) -> TiledLoss | None:
    """What computes the loss of a prepared model in tiles, None where nothing does."""
    return next((module._tiles for module in model.modules() if isinstance(module, _Tiled)), None)


def language_model_in(model: nn.Module) -> nn.Module:
    """The language model that `model` is, or that adapters wrap.

    Raises ZeroConfigError where it is none that can compute its loss in tiles.
    """
    found = next((module for module in model.modules() if _has_head(module)), model)
    if "forward" in vars(found):
        raise ZeroConfigError(
            f"tile_loss: {type(found).__name__} has another forward than that of its class (TRL's trainers give it "
            f"one that computes the loss in tiles already); {_OFF}"
        )
    _backbone_of(found)
    return found


def _has_head(module: Any) -> bool:
    return hasattr(type(module), "get_output_embeddings") and module.get_output_embeddings() is not None


def _backbone_of(model: Any) -> str:
    """The name of the child whose output goes to the head. Raises ZeroConfigError where there is none."""
    function = getattr(getattr(model, "loss_function", None), "__name__", None)
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if _has_head(model) and function == "ForCausalLMLoss" and not encodes:
        embeddings = model.get_input_embeddings()
        for name, child in model.named_children():
            if embeddings in child.modules() and child is not embeddings:
                return name
    raise ZeroConfigError(
        f"tile_loss: {type(model).__name__} is no decoder of transformers with the loss of causal language models "
        f"(ForCausalLMLoss) behind a backbone and a head; {_OFF}"
    )
