"""Scripts of transformers, accelerate, TRL and PEFT run unmodified under ZeRO, with the losses of plain DDP."""

import pytest

from tests.support.compatibility import CASES, Outcome, difference, prepare, run_case


IN_SHORT = {"run_translation, generating", "run_clm_no_trainer", "dpo"}
TOLERANCE = 2e-6  # of losses and norms; bf16 is not compared: autocast and weights in bf16 round differently


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    prepare(folder)
    return folder


def _marks(case):
    return () if case.name in IN_SHORT else pytest.mark.exhaustive


@pytest.mark.parametrize("case", [pytest.param(case, marks=_marks(case), id=case.name) for case in CASES])
def test_an_unmodified_script(folder, case):
    for package in case.missing:
        pytest.skip(f"needs {package}")
    stock = Outcome() if case.refused else run_case(case, None, folder)
    assert not stock.error, stock.error
    for stage in (3,) if case.name in IN_SHORT else (2, 3):
        ours = run_case(case, stage, folder)
        if case.refused or case.ends[0]:
            assert (case.refused or case.ends[0]) in ours.error, ours.error
            continue
        assert not ours.error, ours.error
        assert set(ours.stages) <= {stage} and (ours.stages or not stock.losses), ours.stages
        if case.is_exact and not case.checks_itself:
            assert difference(ours.losses, stock.losses) <= TOLERANCE, (ours.losses, stock.losses)
            assert difference(ours.norms, stock.norms) <= TOLERANCE, (ours.norms, stock.norms)
