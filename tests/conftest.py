"""What stands before torch or the fork server start, and which combinations of parameters the default run has.

One thread per rank, no network, no clock.
"""

import os
from collections import defaultdict

import pytest
from hypothesis import settings

from tests.support.short import covering


os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

# How long an example takes says how busy the machine is.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where parameters multiply, the default run has every value of each once; the other combinations are exhaustive.

    One list of parameters stays whole. Tests without ranks take no time, so they have all combinations.
    """
    combinations = defaultdict(list)
    for item in items:
        as_it_is = "/arithmetic/" in item.nodeid or item.get_closest_marker("exhaustive")
        if hasattr(item, "callspec") and not as_it_is:
            combinations[item.nodeid.partition("[")[0]].append((item, _values_of(item)))
    for name, of_test in combinations.items():
        chosen = covering([values for _, values in of_test], seed=name)
        for item, values in of_test:
            if values not in chosen:
                item.add_marker(pytest.mark.exhaustive)


def _values_of(item):
    """The row of each list of parameters that a test has; those of a fixture are a list of their own."""
    params, found = dict(item.callspec.params), {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        found[tuple(names)] = repr([params.pop(name) for name in names])
    return found | {name: repr(value) for name, value in params.items()}
