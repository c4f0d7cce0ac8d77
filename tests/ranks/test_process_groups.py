"""Engines on parts of the ranks keep apart, and the process groups that engines make are few."""

import pytest
import torch
import torch.distributed as dist

import hf_zero
from hf_zero.errors import ZeroRuntimeError
from tests.support.harness import distributed
from tests.support.nets import Net, batches, micro, seeded
from tests.support.reference import SGD, average_gradients, whole_weights


def pairs():
    """The group of this rank's pair, which all four ranks make together."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    return groups[dist.get_rank() // 2]


def train(group, data, **config):
    """Three steps on `group`; `data` is the rank whose batches this rank takes."""
    model = seeded(Net)()
    optimizer = SGD(model.parameters())
    engine = hf_zero.shard(model, optimizer, config, group=group)
    for number in range(3):
        micro(model, batches(data, number), engine.backward)
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


@pytest.mark.parametrize("peer_memory", [True, False])
@distributed(world_size=4)
def test_engines_on_two_pairs_of_ranks_train_apart(peer_memory):
    rank, group = dist.get_rank(), pairs()
    for stage in (1, 3):
        ours = train(group, rank, zero_stage=stage, peer_memory=peer_memory)
        everyone: list = [None] * 4
        dist.all_gather_object(everyone, ours["head.weight"].tolist())
        assert everyone[0] == everyone[1] and everyone[2] == everyone[3], f"stage {stage}: a pair differs"
        assert everyone[0] != everyone[2], f"stage {stage}: the pairs were mixed"
        alike = train(None, rank % 2, zero_stage=stage, peer_memory=peer_memory)
        if rank < 2:  # four ranks with the first pair's data twice have the first pair's mean
            for name, weight in ours.items():
                torch.testing.assert_close(weight, alike[name], rtol=0, atol=1e-6, msg=f"stage {stage}: {name}")


@distributed(world_size=4)
def test_an_engine_of_some_ranks_leaves_the_groups_of_all_alone():
    group = pairs()
    if dist.get_rank() < 2:
        train(group, dist.get_rank(), zero_stage=2)
    everyone = dist.new_group([0, 1, 2, 3])
    total = torch.ones(1)
    dist.all_reduce(total, group=everyone)
    assert total.item() == 4, total
    train(None, dist.get_rank(), zero_stage=3)


@distributed(world_size=4)
def test_ranks_that_are_in_different_numbers_of_groups_are_told():
    first, second = dist.new_group([0, 1]), dist.new_group([0, 2])
    assert second is not None
    if dist.get_rank() < 2:
        with pytest.raises(ZeroRuntimeError, match=r"ranks \[0, 1\] are in \[3, 2\] process groups.*equally many"):
            train(first, dist.get_rank(), zero_stage=2)


@distributed(world_size=6)
def test_a_part_of_the_ranks_has_parts_of_its_own():
    halves = [dist.new_group(ranks) for ranks in ([0, 1, 2, 3], [4, 5])]
    rank = dist.get_rank()
    if rank < 4:
        plain = train(halves[0], rank, zero_stage=3)
        for config in ({"mics_shard_size": 2}, {"zero_hpz_partition_size": 2}):
            for name, weight in train(halves[0], rank, zero_stage=3, **config).items():
                torch.testing.assert_close(weight, plain[name], rtol=0, atol=1e-6, msg=f"{config}: {name}")


def groups_made():
    return len(dist.distributed_c10d._world.pg_names)


@distributed(world_size=2)
def test_engines_that_do_not_train_make_no_group_and_others_share_one():
    before = groups_made()
    config = {"zero_stage": 3}
    reference = seeded(Net)()
    hf_zero.shard(reference, None, config)
    with torch.no_grad():
        reference(batches(0, 0)[0])
    assert groups_made() == before, "an evaluation has no reductions"
    for _ in range(2):
        train(None, dist.get_rank(), zero_stage=3)
    assert groups_made() == before + 1


@distributed(world_size=2)
def test_engines_that_share_a_group_keep_their_gradients_apart():
    """Both engines' units have the same message tags; messages, as peers' memory is no channel."""
    ours, stock = ([seeded(Net, seed)() for seed in (0, 1)] for _ in range(2))
    config = {"zero_stage": 2, "peer_memory": False}
    engines = [hf_zero.shard(model, SGD(model.parameters()), config) for model in ours]
    x, y = batches(dist.get_rank(), 0)
    for models, backward in ((ours, engines[0].backward), (stock, torch.Tensor.backward)):
        loss = sum(torch.nn.functional.cross_entropy(model(x), y) for model in models)
        backward(loss)
    for model, twin in zip(ours, stock, strict=True):
        average_gradients(twin)
        for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-7, msg=name)
