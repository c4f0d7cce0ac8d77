"""What surrounds torch's ring attention, with a stand-in for it: attention to keys and values that are gathered."""

import contextlib
import inspect

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from torch.distributed.tensor import experimental
from torch.nn import functional as F

from hf_zero.integrations import sequence_accelerator
from tests.integration.test_ulysses import _compare, _train
from tests.support.harness import run_ranks


class _Gather(torch.autograd.Function):
    """All tokens of keys or values, whose gradients come from all ranks."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total.chunk(ctx.group.size(), 2)[ctx.group.rank()], None


@contextlib.contextmanager
def _gathering(*, mesh, buffers, buffer_seq_dims, no_restore_buffers):
    """As `context_parallel`, for causal attention, with parts in order."""
    group, rank, size, stock = mesh.get_group(), mesh.get_local_rank(), mesh.size(), F.scaled_dot_product_attention
    assert len(no_restore_buffers) == len(buffers)
    for buffer, dim in zip(buffers, buffer_seq_dims, strict=True):
        part = buffer.chunk(size, dim)[rank].clone()
        buffer.set_(part.untyped_storage(), 0, part.size(), part.stride())

    def attend(query, key, value, attn_mask=None, is_causal=False, **options):
        assert attn_mask is None and is_causal
        tokens = query.shape[2]
        key, value = (_Gather.apply(one, group) for one in (key, value))
        seen = torch.ones(tokens, key.shape[2], dtype=torch.bool).tril(rank * tokens)
        return stock(query, key, value, attn_mask=seen, **options)

    F.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        F.scaled_dot_product_attention = stock


def _train_by_rings(folder, stage, **arguments):
    experimental.context_parallel = _gathering
    sequence_accelerator.RING_DEVICES.add("cpu")
    parallelism = ParallelismConfig(cp_size=2, dp_shard_size=dist.get_world_size() // 2)
    return _train(folder, stage, "whole", parallelism_config=parallelism, **arguments)


@pytest.mark.skipif(
    "sp_backend" in inspect.getsource(Accelerator._prepare_cp),
    reason="accelerate 1.12 prepares no ring attention where sp_backend has its default",
)
def test_ring_attention_trains_like_whole_sequences(tmp_path):
    whole = run_ranks(_train, tmp_path, None, "whole", gradient_accumulation_steps=2, world_size=2)[0]
    for found in run_ranks(_train_by_rings, tmp_path, 3, gradient_accumulation_steps=2, world_size=4):
        _compare(found, whole, "context parallelism")
