"""Names the cause of a mismatch: each answer is a prediction of what the fault would give, and it must fit."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_zero.verify.measures import KERNEL
from hf_zero.verify.probes import Event


Named = Mapping[str, Tensor]
FIT = 0.02  # of the norm of what is to be explained may stay unexplained


def forward_cause(mine: Sequence[Event], theirs: Sequence[Event], weights: Named, before: Named | None) -> str:
    """Why a loss differs though weights, inputs and generators agree at the door: the first module that differs.

    `weights` are those that the optimizer has made, `before` those of the step before.
    """
    expected = {(event.name, number): event for number, event in _numbered(theirs)}
    for number, event in _numbered(mine):
        other = expected.get((event.name, number))
        name = f"module '{event.name}'" if event.name else "the model"
        if other is None:
            return f"{name} is called, and the reference does not call it"
        if event.random != other.random:
            return f"the random numbers differ: the generator stands elsewhere when {name} is called"
        for key, value in event.params.items():
            if not _near(value, other.params[key]):
                full = f"{event.name}.{key}".strip(".")
                return _stale(full, value, weights, before)
        if not all(map(_near, event.outputs, other.outputs)):
            return f"{name} is the first one that returns something else for {_given(event, other)}"
    return "every module returns the same: the loss is made of something else"


def _numbered(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """Each event with the number of calls of its module so far."""
    seen: dict[str, int] = {}
    numbered = []
    for event in events:
        seen[event.name] = seen.get(event.name, 0) + 1
        numbered.append((seen[event.name], event))
    return numbered


def _stale(name: str, used: Tensor, weights: Named, before: Named | None) -> str:
    says = f"'{name}' is computed with other values than the optimizer has made"
    old = None if before is None else before.get(name)
    if old is None:
        return says
    old, new = old.to(used.device), weights[name].to(used.device)
    nearest = torch.where((used - old).abs() < (used - new).abs(), old, new)  # what one rank owns may have come
    if _near(used, nearest, 2.0**-8) and not _near(old, new):
        return f"{says}: stale weights, those before the last step"
    return says


def _given(mine: Event, theirs: Event) -> str:
    same = all(map(_near, mine.inputs, theirs.inputs))
    return "the same inputs and weights" if same else "inputs that no module before it has made"


def _near(mine: Tensor, theirs: Tensor, rounding: float = KERNEL) -> bool:
    if mine.shape != theirs.shape:
        return False
    mine, theirs = mine.float(), theirs.float().to(mine.device)
    return not mine.numel() or bool((mine - theirs).abs().max() <= rounding * theirs.abs().max())


# -- gradients --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Products:
    """Inner products of the gradients of all micro-batches (rank-major) and of the one to be explained, in fp64."""

    gram: Tensor
    targets: Tensor  # of each micro-batch's gradient with the one to be explained
    square: float  # of its norm

    def __add__(self, other: Products) -> Products:
        return Products(self.gram + other.gram, self.targets + other.targets, self.square + other.square)

    def shares(self) -> list[float] | None:
        """How often each micro-batch counts in it; None where it is no combination of them."""
        found = torch.linalg.lstsq(self.gram, self.targets.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        unexplained = self.square - 2 * found @ self.targets + found @ self.gram @ found
        return found.tolist() if math.sqrt(max(0.0, unexplained.item())) <= FIT * math.sqrt(self.square) else None


def gradient_cause(products: Mapping[str, Products], expected: Sequence[Sequence[float]], everything: bool) -> str:
    """Which combination of the micro-batches' gradients the wrong ones are, and what that means.

    Args:
        products: of each wrong parameter.
        expected: what each micro-batch should count, by rank.
        everything: whether they are all parameters, but for a few.
    """
    shares = functools.reduce(operator.add, products.values()).shares()
    if shares is not None:
        return _shares_cause("every gradient" if everything else _gradients_of(list(products)), shares, expected)
    alike: dict[tuple, list[str]] = {}
    for name, one in products.items():
        own = one.shares()
        if own is not None:
            alike.setdefault(tuple(round(share, 2) for share in own), []).append(name)
    if not alike:
        return f"{_gradients_of(list(products))} is no combination of the micro-batches' own"
    names = max(alike.values(), key=len)
    shares = functools.reduce(operator.add, (products[name] for name in names)).shares()
    return _shares_cause(_gradients_of(names), shares or list(products[names[0]].shares()), expected)


def _gradients_of(names: Sequence[str]) -> str:
    return f"the gradient of {some_of(names)}"


def _shares_cause(what: str, shares: Sequence[float], expected: Sequence[Sequence[float]]) -> str:
    right = [share for row in expected for share in row]
    ratios, accumulation = [mine / share for mine, share in zip(shares, right, strict=True)], len(expected[0])
    if _constant(ratios):
        return (
            f"{what} is {ratios[0]:.4g} times what it should be{factor_cause(ratios[0], len(expected), accumulation)}"
        )
    places = list(itertools.product(range(len(expected)), range(accumulation)))
    dropped = [place for place, ratio in zip(places, ratios, strict=True) if abs(ratio) < FIT]
    rest = [ratio for ratio in ratios if abs(ratio) >= FIT]
    if dropped and rest and _constant(rest):
        said = " and ".join(f"micro-batch {number} of rank {rank}" for rank, number in dropped)
        return f"{what} is without {said}: dropped"
    if _constant(shares):
        return (
            f"{what} counts each micro-batch alike, whatever its number of tokens: the loss is averaged over "
            "micro-batches and not over tokens"
        )
    shown = ", ".join(
        f"{ratio:.3g} (rank {rank}, {number})" for (rank, number), ratio in zip(places, ratios, strict=True)
    )
    return f"{what} counts micro-batches in other shares than it should: {shown}"


def factor_cause(factor: float, ranks: int, accumulation: int) -> str:
    """What a factor of all gradients may come from."""
    known = [
        (float(ranks), f"scaled by N, summed over the {ranks} ranks and not averaged"),
        (1.0 / ranks, f"divided by the {ranks} ranks once too often"),
        (float(accumulation), f"not divided by the {accumulation} micro-batches"),
        (1.0 / accumulation, f"divided by the {accumulation} micro-batches once too often"),
        (0.0, "there is none"),
    ]
    fitting = [text for value, text in known if abs(factor - value) <= FIT * max(value, 0.01)]
    if fitting:
        return f": {', or '.join(fitting)}"
    power = math.log2(abs(factor)) if factor else 0.0
    return ": the loss scale is not taken out" if power >= 4 and abs(power - round(power)) < 1e-3 else ""


def _constant(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= FIT * max(map(abs, values))


def some_of(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- clipping and updates ---------------------------------------------------------------------------------------------


def clip_cause(limit: float, norm: float, said: float, factor: float) -> str:
    """Why clipped gradients are other than they should be: `factor` is what they were multiplied with."""
    if abs(said - norm) > 1e-4 * norm:
        return f"clipping: the norm is taken for {said:.6g}, and it is {norm:.6g}"
    if abs(factor - 1) < 1e-5:
        return f"clipping: nothing was clipped, at a norm of {norm:.6g} and a limit of {limit:g}"
    return f"clipping: to a norm of {factor * norm:.6g}, and the limit is {limit:g}"


def update_cause(
    wrong: Sequence[str], before: Named, mine: Named, theirs: Named, options: Mapping[str, dict[str, Any]]
) -> str:
    """Why weights differ after a step by the same gradients.

    `options` are those of the reference's optimizer after the step, by parameter (`Reference.options`).
    """
    moves = {name: ((mine[name] - before[name]).double(), (theirs[name] - before[name]).double()) for name in wrong}
    if all(_fits(made, _uncorrected(options[name], before[name])) for name, (made, _) in moves.items()):
        return f"missing bias correction: Adam's first steps are not corrected ({some_of(wrong)})"
    extra = {name: made - right for name, (made, right) in moves.items()}
    factors = {name: 1 + _ratio(extra[name], right) for name, (_, right) in moves.items()}
    if all(_fits(extra[name], (factors[name] - 1) * right, 0.1) for name, (_, right) in moves.items()):
        return _rate_cause(wrong, factors, options)
    decays = {name: -_ratio(more, before[name].double()) for name, more in extra.items()}
    if not all(_fits(more, -decays[name] * before[name].double(), 0.1) for name, more in extra.items()):
        return f"the optimizer makes something else of the same gradients ({some_of(wrong)})"
    name = max(wrong, key=lambda name: abs(decays[name]))
    group = options[name]
    has = group.get("weight_decay", 0.0) + decays[name] / group["lr"]
    return f"weight decay of {has:.3g} on {some_of(wrong)}, where {group.get('weight_decay', 0.0):.3g} is asked for"


def _rate_cause(wrong: Sequence[str], factors: Mapping[str, float], options: Mapping[str, dict[str, Any]]) -> str:
    rates = {group["group"]: group["lr"] for group in options.values()}
    name = wrong[0]
    used, group = factors[name] * options[name]["lr"], options[name]["group"]
    says = f"learning rate of {used:.4g} on {some_of(wrong)}, where {options[name]['lr']:.4g} is asked for"
    other = [number for number, rate in rates.items() if number != group and abs(used - rate) <= FIT * rate]
    return f"{says}: that of group {other[0]}" if other else says


def _uncorrected(group: Mapping[str, Any], before: Tensor) -> Tensor:
    """What Adam's update would be without the correction of its moments' bias; zeros for other optimizers."""
    state = group["state"]
    if "exp_avg_sq" not in state:
        return torch.zeros_like(before, dtype=torch.float64)
    mean, square = state["exp_avg"].double(), state["exp_avg_sq"].double()
    decayed = group["lr"] * group.get("weight_decay", 0.0) * before.double()
    return -group["lr"] * mean / (square.sqrt() + group["eps"]) - decayed


def _ratio(made: Tensor, right: Tensor) -> float:
    square = right.square().sum().item()
    return (made * right).sum().item() / square if square else 0.0


def _fits(made: Tensor, predicted: Tensor, tolerance: float = FIT) -> bool:
    size = made.norm().item()
    return size > 0 and (made - predicted).norm().item() <= tolerance * size
