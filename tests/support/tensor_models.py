"""Small tensor-parallel models: transformers' own plans, on a mesh of data x tensor ranks."""

import pytest
import torch
import torch.distributed as dist
import transformers as tf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import hf_zero
from hf_zero.parallel.tensor_parallel import share_out
from tests.support import zoo


EXPAND = "_expand_parallel_plan"
# What hf_zero refuses with older releases (hf_zero/parallel/tensor_parallel.py).
needs_shared_layers = pytest.mark.skipif(
    not hasattr(tf.PreTrainedModel, EXPAND), reason=f"transformers {tf.__version__} shares out no layers"
)
PACKED = {"phi3": (tf.Phi3ForCausalLM, tf.Phi3Config), "gpt_neox": (tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig)}


def tensor_mesh(width):
    """The mesh of all ranks, `width` of them to a group of tensor parallelism."""
    shape = (dist.get_world_size() // width, width)
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))["tp"]


def whole(name):
    """A model of the zoo, or one with packed projections, with the same weights on every rank."""
    if name not in PACKED:
        return zoo.build(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_class, config_class = PACKED[name]
        return model_class(config_class(**zoo._DECODER)).train()


def build(name, width=1):
    """The same, which `width` ranks share out."""
    model = whole(name)
    if width > 1:
        share_out(model, tensor_mesh(width))
    return model


def whole_weights(model):
    """All weights of a prepared model, whole."""
    with hf_zero.gathered_parameters(model):
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in model.named_parameters()
        }
