"""What has moved between the releases of transformers that are supported, each behind one name."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, core_model_loading, masking_utils


_CONVERT = core_model_loading.convert_and_load_state_dict_in_model
# Until 5.15 the plan of tensor parallelism stood beside the configuration of loading, which holds it since.
_PLAN = {"tp_plan": None} if "tp_plan" in inspect.signature(_CONVERT).parameters else {}

# The earliest releases ask masks by positions of queries, and count the tokens of ranks that share a sequence twice.
SHARES_SEQUENCES = "q_length" in inspect.signature(masking_utils.sdpa_mask).parameters


def load_into(model: PreTrainedModel, tensors: dict[str, Tensor], load_config: Any) -> Any:
    """Have transformers rename, convert and place the tensors of files; returns its report (`LoadStateDictInfo`)."""
    return _CONVERT(model, tensors, load_config, **_PLAN)[0]


def within_sequences(mask: Callable, positions: Tensor, sequences: Tensor) -> Callable:
    """`mask` for rows of several sequences, each of which sees only itself. `positions`, `sequences`: (rows, tokens).

    Until 5.16 transformers asks `mask` for indices in the row, and for positions in the sequence since.
    """
    if hasattr(masking_utils, "packed_sequence_compatibility_function"):
        return masking_utils.packed_sequence_compatibility_function(mask, positions, sequences)
    return masking_utils.and_masks(mask, masking_utils.packed_sequence_mask_function(sequences))
