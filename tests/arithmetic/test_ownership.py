"""Matrices and runs are shared out by the ranks' weights, and every element of them lies in one slice."""

import pytest

from hf_zero.comm.topology import Topology
from hf_zero.core.layout import FlatLayout
from hf_zero.core.ownership import Ownership, balance, cut
from hf_zero.core.placement import Placement


LLAMA_8B_LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3]
LLAMA_8B = [*LLAMA_8B_LAYER * 32]
EMBEDDINGS = [(128256, 4096)] * 2


@pytest.mark.parametrize("shapes", [LLAMA_8B, LLAMA_8B + EMBEDDINGS], ids=["layers", "everything"])
def test_eight_ranks_own_equally_much_of_a_llama_of_8b_within_two_percent(shapes):
    numels = [rows * columns for rows, columns in shapes]
    loads = [0] * 8
    for numel, owner in zip(numels, balance(numels, 8), strict=True):
        loads[owner] += numel
    assert max(loads) <= 1.02 * sum(numels) / 8, [load / 1e6 for load in loads]


def test_the_owners_follow_from_the_sizes_alone():
    assert balance([5, 1, 5, 3, 0], 2) == balance([5, 1, 5, 3, 0], 2) == [0, 1, 1, 0, 1]
    assert balance([4, 4], 1) == [0, 0] and balance([], 3) == []


@pytest.mark.parametrize("topology", [Topology.plain(4), Topology(nodes=2, local=2), Topology(replicas=2, local=2)])
def test_every_element_is_in_the_slice_of_one_rank_and_goes_to_one_owner(topology):
    layout = FlatLayout([(3, 7), (5,), (4, 4), (9,)], topology.shards, alignment=4)
    owners = {0: 1, 2: 0, 3: topology.shards - 1}
    for rank in range(topology.size):
        of = Ownership.arrange(layout, topology.at(rank), Placement.SHARDED, owners)
        assert of.own == rank % topology.shards
        assert [of.pieces[number].params for number in of.mine] == [
            (i,) for i, owner in owners.items() if owner == of.own
        ]
        for index, owner in owners.items():
            found = []
            for holder, (begin, _) in enumerate(of.slices):
                for span in of.spans(holder, owner, [index]):
                    assert begin + span.offset == layout.offsets[index] + span.start
                    found += range(span.start, span.start + span.numel)
            assert sorted(found) == list(range(layout.numels[index]))
        assert not of.spans(0, (owners[0] + 1) % topology.shards, [0]), "nobody else gets it"


def test_where_all_ranks_keep_everything_each_owns_everything():
    layout = FlatLayout([(3, 7), (5,)], 4, alignment=4)
    of = Ownership.arrange(layout, Topology.plain(4, rank=3), Placement.REPLICATED, {0: 2, 1: 1})
    assert of.mine == [0, 1] and of.params == {0, 1} and [span.numel for span in of.spans(0, 0, [0, 1])] == [21, 5]


@pytest.mark.parametrize("weights", [[2, 1], [1, 2, 5, 0.5]])
def test_matrices_and_ranges_are_shared_out_in_proportion_to_the_weights(weights):
    numels = [rows * columns for rows, columns in LLAMA_8B]
    loads = [0] * len(weights)
    for numel, owner in zip(numels, balance(numels, len(weights), weights), strict=True):
        loads[owner] += numel
    ranges = cut(sum(numels), weights)
    assert ranges[0][0] == 0 and ranges[-1][1] == sum(numels)
    assert all(stop % 16 == 0 and stop == start for (_, stop), (start, _) in zip(ranges[:-1], ranges[1:], strict=True))
    for load, (start, stop), weight in zip(loads, ranges, weights, strict=True):
        wanted = sum(numels) * weight / sum(weights)
        assert load == pytest.approx(wanted, rel=0.02) and stop - start == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("arranged", [{"local": 4}, {"nodes": 2, "local": 2}, {"replicas": 2, "local": 2}])
def test_runs_cover_what_is_labelled_once_and_stop_where_the_label_changes(arranged):
    weights = (3.0, 1.0, 2.0, 1.0)[: arranged.get("nodes", 1) * arranged["local"]]
    topology = Topology(**arranged, weights=weights)
    layout = FlatLayout([(3, 17), (5,), (4, 4), (9,), (140,)], topology.shards, alignment=4)
    labels = {0: "a", 1: "a", 2: "b", 4: "a"}  # nothing steps the fourth
    of = Ownership.arrange(layout, topology, Placement.SHARDED, {}, labels)
    assert of.params == set(labels)
    for index in labels:
        begin = layout.offsets[index]
        found = []
        for owner in range(len(of.slices)):
            for holder, (low, _) in enumerate(of.slices):
                for span in of.spans(holder, owner, [index]):
                    piece = of.pieces[span.index]
                    assert piece.owner == owner and low + span.offset == piece.start + span.start
                    assert len({labels[each] for each in piece.params}) == 1
                    found += range(low + span.offset, low + span.offset + span.numel)
        assert len(found) == len(set(found)) >= layout.numels[index]
        assert set(range(begin, begin + layout.numels[index])) <= set(found)
