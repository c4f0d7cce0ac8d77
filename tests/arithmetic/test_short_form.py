"""The default run has every value of every parameter, and the same ones every time."""

import itertools

from tests.support.short import covering


def test_every_value_is_covered_by_few():
    counts = {"way": 7, "stage": 4, "reads": 2}
    cases = [dict(zip(counts, case, strict=True)) for case in itertools.product(*map(range, counts.values()))]
    chosen = covering(cases, seed="a test")
    assert len(chosen) == 7 and chosen == covering(cases, seed="a test")
    for name, count in counts.items():
        assert {case[name] for case in chosen} == set(range(count))


def test_one_list_stays_whole():
    rows = [{"row": row} for row in range(5)]
    assert sorted(case["row"] for case in covering(rows, seed="")) == list(range(5))
    assert covering([], seed="") == []
