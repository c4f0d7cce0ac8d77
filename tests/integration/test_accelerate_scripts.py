"""The script by which accelerate tests itself runs with `ZeroAccelerator` in place of `Accelerator`."""

import contextlib
import functools
import io

import pytest
from accelerate.test_utils.scripts import test_script as stock_script
from accelerate.test_utils.scripts import test_sync as sync_script

import hf_zero
from tests.support.harness import distributed
from tests.support.trainers import forget_accelerate


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_the_main_script(stage):
    forget_accelerate()
    plugin = functools.partial(hf_zero.ZeroPlugin, zero_stage=stage)
    stock_script.Accelerator = lambda *args, **kwargs: hf_zero.ZeroAccelerator(*args, zero_plugin=plugin(), **kwargs)
    # Its half-precision parts want fp32 weights back from a run with autocast; ours are casts of fp32 masters.
    stock_script.is_bf16_available = stock_script.is_fp16_available = lambda: False
    with contextlib.redirect_stdout(io.StringIO()):
        stock_script.main()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@distributed(world_size=2)
def test_the_gradient_synchronisation_script(stage):
    """It wants gradients to differ inside `no_sync`: at stages 2 and 3 that is what `no_sync: local` does."""
    forget_accelerate()
    plugin = functools.partial(hf_zero.ZeroPlugin, zero_stage=stage, no_sync="local")
    sync_script.Accelerator = lambda *args, **kwargs: hf_zero.ZeroAccelerator(*args, zero_plugin=plugin(), **kwargs)
    with contextlib.redirect_stdout(io.StringIO()):
        sync_script.main()
