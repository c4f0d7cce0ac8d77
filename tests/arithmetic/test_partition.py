"""Units are made of modules that are called: nothing tells when a container is used."""

import pytest
from torch import nn

from hf_zero.core.partition import partition
from tests.support.nets import WIDTH, Block, Net


def _one_layer():
    return Net(depth=1)


def _heads_in_a_list():
    net = Net(depth=3)
    net.heads = nn.ModuleList([nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)])
    return net


def _lists_of_lists():
    net = Net(depth=3)
    net.layers = nn.ModuleList([nn.ModuleList([Block(), Block()]) for _ in range(3)])
    return net


def _nothing_but_a_dict():
    net = nn.Module()
    net.parts = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.ModuleList([nn.Linear(2, 2)])})
    return net


def _parameters_in_a_list():
    net = Net(depth=1)
    net.offsets = nn.ParameterList([nn.Parameter(net.head.bias.detach().clone())])
    return net


@pytest.mark.parametrize(
    "make", [_one_layer, _heads_in_a_list, _lists_of_lists, _nothing_but_a_dict, _parameters_in_a_list]
)
def test_no_container_is_hooked(make):
    model = make()
    units, hooks = partition(model)
    hooked = [hook.module for hook in hooks]
    assert not [hook.name for hook in hooks if isinstance(hook.module, (nn.ModuleList, nn.ModuleDict))]
    assert len(units) > 1 and len(hooked) == len(set(hooked))
    held = [param for unit in units for param in unit.params.values()]
    assert set(held) == set(model.parameters()) and len(held) == len(set(held))
