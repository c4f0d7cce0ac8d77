"""The short form of a test with many combinations of parameters: a few that cover every value of each parameter."""

import random


def covering(cases, seed):
    """Of mappings from parameters to values, as few as have each value once; the same ones every time."""
    left = list(cases)
    random.Random(seed).shuffle(left)
    missing = {pair for case in left for pair in case.items()}
    chosen = []
    while missing:
        best = max(left, key=lambda case: len(missing & case.items()))
        missing -= best.items()
        chosen.append(best)
    return chosen
