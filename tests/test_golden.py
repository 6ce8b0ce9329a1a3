"""No result has moved: each built-in method computes what tests/golden.json says. `make golden` runs every case."""

from __future__ import annotations

import json

import pytest

from tests import golden

pytestmark = pytest.mark.kernels

GOLDEN = json.loads(golden.FILE.read_text())
HERE = GOLDEN["machine"] == golden.machine()


@pytest.mark.parametrize("case", golden.short_cases(), ids=lambda case: case.name)
def test_a_run_computes_what_it_did(case: golden.Case) -> None:
    assert not golden.check([case], GOLDEN["cases"], exactly=HERE)


def test_a_number_that_moves_is_found() -> None:
    known = {**GOLDEN["cases"][golden.short_cases()[0].name], "exact": {"model": "1"}}
    other = {**known, "numbers": {**known["numbers"], "1 test/hr_10": known["numbers"]["1 test/hr_10"] + 1e-6}}
    assert golden.differences(known, known, exactly=True) == golden.differences(known, known, exactly=False) == []
    assert golden.differences(other, known, exactly=False)
    assert golden.differences({**known, "exact": {**known["exact"], "model": "0"}}, known, exactly=True)
