"""The mutants of `make mutants` are of the code as it is: what each changes stands in its file once."""

from __future__ import annotations

import mutants


def test_every_mutant_finds_its_place_and_its_test() -> None:
    for one in mutants.MUTANTS:
        assert (mutants.PACKAGE / one.file).read_text().count(one.old) == 1, one
        assert (mutants.TESTS / one.test.split("::")[0].split()[0]).is_file(), one
