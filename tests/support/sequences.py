"""Tiny causal models with few heads, and batches of sequences that are padded, packed or of one length."""

import pytest
import torch
import transformers as tf

from hf_zero.releases import SHARES_SEQUENCES
from tests.support import zoo


# What hf_zero refuses with the earliest releases (hf_zero/parallel/ulysses.py).
needs_shared_sequences = pytest.mark.skipif(
    not SHARES_SEQUENCES, reason=f"transformers {tf.__version__} masks and counts whole sequences"
)


def build(heads=4, keys=2, **changes):
    """A Llama with `heads` heads of queries and `keys` of keys and values; the same weights every time."""
    config = tf.LlamaConfig(
        **{
            **zoo._DECODER,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "hidden_size": 8 * heads,
            **changes,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return tf.LlamaForCausalLM(config)


def examples(count, length=12):
    """Sequences of equal length, of which other beginnings are not counted in the loss."""
    draw = torch.Generator().manual_seed(11)
    found = []
    for number in range(count):
        ids = torch.randint(3, zoo.VOCAB, (length,), generator=draw)
        labels = ids.clone()
        labels[: 1 + 3 * number % 7] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def ragged(count, length=12):
    """Sequences of other lengths each, of at most `length`."""
    return [
        {name: value[: length - 5 * number % 6] for name, value in one.items()}
        for number, one in enumerate(examples(count, length))
    ]


def padded(left):
    """A collate function that pads to the longest, at the end or at the beginning."""

    def collate(rows):
        length = max(len(row["input_ids"]) for row in rows)

        def pad(values, fill):
            more = values.new_full((length - len(values),), fill)
            return torch.cat([more, values] if left else [values, more])

        return {
            "input_ids": torch.stack([pad(row["input_ids"], 0) for row in rows]),
            "attention_mask": torch.stack([pad(torch.ones_like(row["input_ids"]), 0) for row in rows]),
            "labels": torch.stack([pad(row["labels"], -100) for row in rows]),
        }

    return collate


def packed(rows):
    """All sequences in one row, told apart by their positions."""
    labels = [torch.cat([row["labels"].new_full((1,), -100), row["labels"][1:]]) for row in rows]
    return {
        "input_ids": torch.cat([row["input_ids"] for row in rows])[None],
        "position_ids": torch.cat([torch.arange(len(row["input_ids"])) for row in rows])[None],
        "labels": torch.cat(labels)[None],
    }


# Examples and how they become a batch (None: Trainer's own way).
BATCHES = {
    "whole": (examples, None),
    "padded": (ragged, padded(left=False)),
    "padded at the beginning": (ragged, padded(left=True)),
    "packed": (ragged, packed),
}
