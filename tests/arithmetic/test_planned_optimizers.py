"""What the planner finds out of optimizers by trying them: sizes of states, in slices and for whole matrices."""

import pytest
import torch

from hf_zero.cli import main
from hf_zero.planning.model import PlanError
from hf_zero.planning.optimizers import kept_by


OURS = "tests.support.matrix_optimizers"
# For a matrix of 64 x 160 and a vector of 5: shapes of what is kept; None where AdamW steps vectors beside it.
WHOLE = {
    "muon": ([(64, 160)], None),
    "adafactor": ([(64,), (160,)], [(5,)]),
    f"{OURS}:Lamb": ([(64, 160)] * 2, [(5,)] * 2),
    f"{OURS}:Soap": ([(64, 64), (64, 64), (64, 160), (64, 160), (160, 160), (160, 160)], [(5,)] * 2),
    f"{OURS}:BlockwiseAdam": ([(40,), (40,), (64, 160), (64, 160)], [(5,)] * 2),
}


@pytest.mark.parametrize("name", WHOLE)
def test_states_of_whole_matrices_have_the_sizes_that_the_optimizer_makes(name):
    kept, (matrix, vector) = kept_by(name), WHOLE[name]
    assert sorted(shape for shape, _ in kept.whole((64, 160))) == matrix
    assert kept.vectors == (vector is not None)
    if vector is not None:
        assert sorted(shape for shape, _ in kept.whole((5,))) == vector
    assert sum(torch.Size(shape).numel() for shape, _ in kept.whole((512, 1024))) >= 512 + 1024


def test_codes_are_counted_in_their_own_dtype():
    kept = kept_by(f"{OURS}:BlockwiseAdam").whole((64, 160))
    assert sorted(str(dtype) for _, dtype in kept) == ["torch.float32"] * 2 + ["torch.int8"] * 2


def test_what_steps_slices_is_counted_in_tensors_like_the_weight():
    for name, flat in {"sgd": 0, "lion": 1, "torch.optim:AdamW": 2, "torch.optim:ASGD": 1}.items():
        assert (kept_by(name).flat, kept_by(name).whole) == (flat, None), name


def test_what_cannot_be_tried_says_why(capsys):
    for name, words in {
        "torch.optim:Adm": "has no attribute 'Adm'",
        "no_such_package:Adam": "No module named 'no_such_package'",
        "torch.optim:LBFGS": "LBFGS cannot be sharded: its step calls a closure",
        "torch.nn:Linear": "cannot be made of parameters and lr alone",
    }.items():
        with pytest.raises(PlanError, match=words):
            kept_by(name)
    assert main(["plan", "gpt2", "--optimizer", "adamx"]) == 2
    assert "--optimizer adamx: known are adamw, adam, " in capsys.readouterr().err
