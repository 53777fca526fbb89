"""The mutants of `make mutants` fit the code: what each changes, and the test that must notice."""

from __future__ import annotations

import re

from mutants import TESTS, read_mutants


def test_every_mutant_finds_its_place_and_its_test() -> None:
    mutants = list(read_mutants())
    assert len(mutants) > 100
    assert [mutant for mutant in mutants if mutant.places() != 1] == []
    assert [mutant for mutant in mutants if not is_there(mutant.test)] == []


def is_there(test: str) -> bool:
    """Whether `file`, `file::test` or `file -k word` names a test."""
    file, _, word = test.replace("::test_", " -k ").partition(" -k ")
    return re.search(rf"def test_\w*{word}", (TESTS / file).read_text()) is not None
