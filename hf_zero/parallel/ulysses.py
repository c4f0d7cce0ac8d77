"""Ulysses: models compute with a part of the tokens, and attend over whole sequences with a part of the heads."""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import find_packed_sequence_indices

from hf_zero.comm.work import Tag
from hf_zero.core.schedule import in_backward
from hf_zero.core.sequence import SequenceGroup, shares_of_heads
from hf_zero.errors import ZeroConfigError
from hf_zero.releases import SHARES_SEQUENCES, within_sequences


if TYPE_CHECKING:  # what the mixin is put before
    _Model = PreTrainedModel
else:
    _Model = object


PREFIX = "hf_zero_ulysses_"  # and the name of the attention that is called with whole sequences
_OWN_NAMES: dict[str, str] = {}  # of the attention of models, by the name that it has here
_WHOLE_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # nothing else may mix tokens
_BY_HEAD = ("position_bias", "s_aux")  # arguments of attention functions with something for every head
IGNORED = -100


@dataclass(frozen=True)
class Sequences:
    """What all ranks of a group know of a batch: (batch, all tokens) each.

    Attributes:
        positions: of tokens in their sequences.
        padding: false at tokens that nobody attends to; None where the batch has no mask.
        packed: numbers of the sequences that lie one after another in a row; None for one in each row.
    """

    positions: Tensor
    padding: Tensor | None
    packed: Tensor | None


class Ulysses:
    """The attention of models whose sequences are shared out over `size` ranks each.

    Attributes:
        group: these ranks; it is set before the first call of a model.
    """

    group: SequenceGroup

    def __init__(self, size: int) -> None:
        self.size = size
        # The modules of models whose batches are cut, with the configuration that names their own attention.
        self._modules: weakref.WeakKeyDictionary[nn.Module, PreTrainedConfig] = weakref.WeakKeyDictionary()
        self._batch: Sequences | None = None  # of the forward pass under way
        self._asked = False  # for attention, by that pass
        self._uncut = 0  # calls under way with whole sequences: generation

    def adopt(self, model: nn.Module) -> type:
        """Have `model` attend through this, and return what its class is to have.

        Raises ZeroConfigError for models that cannot be computed with parts of sequences, saying why.
        """
        base = _check(model, self.size)
        config = copy.copy(base.config)
        inner = _OWN_NAMES.get(config._attn_implementation, config._attn_implementation)  # it may come back
        config._attn_implementation_internal = inner
        attend, mask = _implementation(inner)
        # transformers would look for a kernel of a name with "flash" or a slash.
        name = PREFIX + inner.replace("flash", "fa").replace("/", "_")
        _OWN_NAMES[name] = inner
        AttentionInterface.register(name, functools.partial(self._attend, attend, inner))
        AttentionMaskInterface.register(name, functools.partial(self._mask, mask))
        base.set_attn_implementation(name)
        for module in model.modules():
            self._modules[module] = config
        return type("_SequenceModel", (SequenceModelMixin,), {"_ulysses": self})

    @contextlib.contextmanager
    def whole_sequences(self) -> Iterator[None]:
        """Inside, every rank passes whole sequences, and exchanges nothing."""
        self._uncut += 1
        try:
            yield
        finally:
            self._uncut -= 1

    def call(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run `forward` with a part of a batch; its loss becomes that of the whole batch, on all ranks of it."""
        if self._uncut:
            return forward(*args, **kwargs)
        kwargs = self._with_whole_batch(args, kwargs)
        self._asked = False
        try:
            output = forward(*args, **kwargs)
        finally:
            self._batch = None
        if not self._asked:
            raise ZeroConfigError(
                "sp_size: the model has not called the attention that transformers' registry names, so the parts of "
                "a sequence would not see each other. Set sp_size to 1 for it"
            )
        return self._with_whole_loss(output, kwargs)

    # -- a batch ----------------------------------------------------------------------------------------------------

    def _with_whole_batch(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        part = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
        positions, padding = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if part is None or positions is None or len(args) > 1:
            raise ValueError(
                "sp_size: a part of a sequence needs input_ids and position_ids, as keyword arguments. Batches of a "
                "prepared dataloader have them; cut others by accelerator.cut_sequences(batch)"
            )
        if torch.is_grad_enabled() and kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            raise ValueError(
                "sp_size: the model is trained by a loss of its own, and was called without labels: a loss that is "
                "computed from the results of a part of each sequence is not that of the sequence. Set sp_size to 1"
            )
        if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
            raise ValueError(
                "sp_size: labels of a part of a sequence must be shifted before it is cut (shift_labels), as the last "
                "token's label is in the next part. Cut batches by accelerator.cut_sequences(batch)"
            )
        if kwargs.get("past_key_values") is not None:
            raise ValueError("sp_size: a part of a sequence cannot be continued from a cache (past_key_values)")
        rows, tokens = part.shape[:2]
        if positions.dim() != 2 or positions.shape[1] != tokens:
            raise ValueError(
                f"sp_size: position_ids of shape {tuple(positions.shape)} are not those of {tokens} tokens in a row"
            )
        tag = Tag("positions of tokens")
        whole = self.group.whole(positions.expand(rows, -1), tag)
        if padding is not None:
            if padding.dim() != 2:
                raise ValueError(
                    f"sp_size: an attention_mask of {padding.dim()} dimensions cannot be shared out: pass the one of "
                    "2 dimensions that says which tokens are padding"
                )
            padding = self.group.whole(padding.to(torch.uint8), tag).bool()
        packed = find_packed_sequence_indices(whole) if padding is None else None
        self._batch = Sequences(whole, padding, packed)
        # A mask keeps transformers from looking for packed sequences in this part; ours is made from the whole.
        mask = torch.ones_like(whole, dtype=torch.bool) if padding is None else padding
        return {**kwargs, "attention_mask": mask, "use_cache": False}

    def _with_whole_loss(self, output: Any, kwargs: dict[str, Any]) -> Any:
        """The mean over the tokens of the whole batch, with the gradient of this rank's part in it.

        The mean over all data-parallel ranks of such gradients is that of whole sequences. A loss that is divided by
        `num_items_in_batch`, a number of tokens on all ranks, has this gradient already.
        """
        labels = kwargs.get("shift_labels")
        if kwargs.get("labels") is None or labels is None or kwargs.get("num_items_in_batch") is not None:
            return output
        loss = output.get("loss") if isinstance(output, dict) else output[0]
        if loss is None:  # the caller computes it, for each token
            return output
        here = (labels != IGNORED).sum()
        own = torch.where(here > 0, loss * here, torch.zeros_like(loss))
        total, tokens = self.group.add(torch.stack([own.detach().double(), here.double()]))
        share = own * (self.group.size / tokens).to(own.dtype)
        loss = with_value(share, total / tokens)
        if isinstance(output, dict):
            output["loss"] = loss
            return output
        return (loss, *output[1:])

    # -- attention --------------------------------------------------------------------------------------------------

    def _mask(self, inner: Callable[..., Any], *, q_length: int, kv_length: int, **kwargs: Any) -> Any:
        batch = self._batch
        if batch is None:
            return inner(q_length=q_length, kv_length=kv_length, **kwargs)
        if batch.packed is not None:
            kwargs["mask_function"] = within_sequences(kwargs["mask_function"], batch.positions, batch.packed)
            kwargs["allow_is_causal_skip"] = False
        tokens = batch.positions.shape[1]
        kwargs |= {"attention_mask": batch.padding, "q_offset": 0, "kv_offset": 0}
        return inner(q_length=tokens, kv_length=tokens, **kwargs)

    def _attend(
        self,
        inner: Callable[..., tuple[Tensor, Any]],
        name: str,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        """As attention functions of transformers: (batch, heads, tokens, width) to (batch, tokens, heads, width)."""
        if self._uncut or module not in self._modules:
            return inner(module, query, key, value, attention_mask, **kwargs)
        if self._batch is None and not in_backward():  # there it is recomputed under activation checkpointing
            raise ValueError(
                "sp_size: a part of the prepared model was called with parts of sequences: call the model itself, "
                "which knows the whole batch, or pass whole sequences inside the model's generate() only"
            )
        self._asked = True
        _check_call(query, key, kwargs)
        layer = getattr(module, "layer_idx", 0) or 0
        tag = Tag(f"heads of layer {layer}", layer)
        shares = shares_of_heads(query.shape[1], key.shape[1], self.group.size)
        of_queries, of_keys = [share for share, _ in shares], [share for _, share in shares]
        query, key, value = self.group.to_heads([query, key, value], [of_queries, of_keys, of_keys], tag)
        if "flash" in name and kwargs.get("position_ids") is not None:  # it finds packed sequences by them
            kwargs["position_ids"] = self.group.whole(kwargs["position_ids"].expand(query.shape[0], -1), tag)
        config, module = self._modules[module], copy.copy(module)
        module.config = config
        key, value = _grouped(module, key, value, *shares[self.group.rank])
        output, _ = inner(module, query, key, value, attention_mask, **kwargs)
        return self.group.to_parts(output.transpose(1, 2), of_queries, tag).transpose(1, 2), None


class SequenceModelMixin(_Model):
    """Added to the class of a prepared model that is called with parts of sequences."""

    _ulysses: Ulysses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ulysses.call(super().__call__, args, kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """On whole sequences, the same on all ranks that share them."""
        with self._ulysses.whole_sequences():
            return super().generate(*args, **kwargs)


def with_value(loss: Tensor, value: Tensor) -> Tensor:
    """The gradient of `loss`, and another value."""
    return loss + (value.to(loss.dtype) - loss).detach()


def _implementation(name: str) -> tuple[Callable[..., tuple[Tensor, Any]], Callable[..., Any]]:
    functions, masks = AttentionInterface(), AttentionMaskInterface()
    if name not in functions or name not in masks:
        raise ZeroConfigError(
            f"sp_size: the model's attention is {name!r}, which is no function of transformers' registry: set "
            'attn_implementation to "sdpa", "flash_attention_2" or "flex_attention", or sp_size to 1'
        )
    return functions[name], masks[name]


def _grouped(
    module: nn.Module, key: Tensor, value: Tensor, queries: tuple[int, int], keys: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Keys and values as attention functions want them for some heads: equally many queries for each, noted there."""
    groups = getattr(module, "num_key_value_groups", 1)
    needed = [head // groups - keys[0] for head in range(*queries)]
    if needed == [head // groups for head in range(len(needed))] and len(needed) == groups * key.shape[1]:
        return key, value
    module.num_key_value_groups = 1
    index = torch.tensor(needed, device=key.device)
    return key.index_select(1, index), value.index_select(1, index)


def _check_call(query: Tensor, key: Tensor, kwargs: dict[str, Any]) -> None:
    given = next((name for name in _BY_HEAD if kwargs.get(name) is not None), None)
    if given is not None:
        raise ZeroConfigError(
            f"sp_size: the model's attention takes {given}, which has something for each head, and heads are shared "
            "out over ranks: set sp_size to 1"
        )
    if query.shape[2] != key.shape[2]:
        raise ZeroConfigError("sp_size: attention to other sequences (cross attention) is not shared out: set it to 1")


def _check(model: nn.Module, size: int) -> PreTrainedModel:
    """The model of transformers that is to be cut. Raises ZeroConfigError where it cannot be."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # peft
    reason = _reason_against(model, base)
    if reason is not None:
        raise ZeroConfigError(
            f"sp_size is {size}, but {type(base).__name__} {reason}, so parts of its sequences cannot be computed "
            "separately: set sp_size to 1"
        )
    shares_of_heads(base.config.num_attention_heads, 1, size)
    return base


def _reason_against(model: nn.Module, base: nn.Module) -> str | None:
    if not SHARES_SEQUENCES:
        return "is computed by a release of transformers that masks and counts whole sequences (5.23 does not)"
    if not isinstance(base, PreTrainedModel):
        return "is no model of transformers"
    config = base.config
    if config.is_encoder_decoder:
        return "attends to the sequences of an encoder"
    if config.get_text_config() is not config:
        return "reads more than text"
    if base.loss_function is not ForCausalLMLoss or not getattr(config, "is_causal", True):
        return "is no causal language model"
    if any(getattr(adapter, "is_prompt_learning", False) for adapter in getattr(model, "peft_config", {}).values()):
        return "has an adapter that makes sequences longer"
    others = set(getattr(config, "layer_types", None) or ()) - _WHOLE_ATTENTION
    if base._is_stateful or others:
        return f"passes a state from token to token ({', '.join(sorted(others)) or 'a recurrent model'})"
    mixing = next((name for name, one in base.named_modules() if isinstance(one, (nn.Conv1d, nn.RNNBase))), None)
    if mixing is not None:
        return f"mixes neighbouring tokens in '{mixing}'"
    if not base._can_set_attn_implementation():
        return "does not take its attention from transformers' registry"
    if getattr(config, "output_router_logits", False):
        return "balances experts by a loss that is no sum over tokens (output_router_logits is on: set it to False)"
    return None
