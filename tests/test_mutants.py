"""The list of slips fits the code; `make mutants` plants them."""

from tests.mutants import ROOT, read_slips


def test_each_slip_has_its_place_and_its_tests() -> None:
    for slip in read_slips():
        compile(slip.planted(), slip.file, "exec")
        for tests in slip.tests:
            file, _, function = tests.partition("[")[0].partition("::")
            assert f"def {function}" in (ROOT / file).read_text()
