from __future__ import annotations

import pytest

from fairlane.errors import InvalidPolicy
from fairlane.policy import Fair


def test_a_weight_is_found_by_the_canonical_form_of_its_key() -> None:
    fair = Fair(by="account", weight={42: 3, "acme": 0.5})  # type: ignore[dict-item]
    assert fair.weight_of(("42",)) == 3
    assert fair.weight_of(("acme",)) == 0.5


def test_a_key_without_a_weight_of_its_own_has_one() -> None:
    fair = Fair(by="account", weight={"acme": 3})
    assert fair.weight_of(("other",)) == fair.weight_of((None,)) == 1.0


def test_one_weight_for_all_keys_goes_to_all_keys() -> None:
    assert Fair(by=("account", "region"), weight=2).weight_of(("acme", None)) == 2


def test_run_time_is_what_is_charged_unless_told_otherwise() -> None:
    assert Fair(by="account").charge == "time"


def test_a_fair_share_prints_as_it_was_written() -> None:
    assert repr(Fair(by="account", weight={"acme": 3})) == "Fair(by='account', weight={'acme': 3}, charge='time')"
    assert repr(Fair(by="account", weight=2, charge="count")) == "Fair(by='account', weight=2, charge='count')"


@pytest.mark.parametrize(
    ("declare", "named"),
    [
        (lambda: Fair(by=()), "name the key"),
        (lambda: Fair(), "name the key"),
        (lambda: Fair("account"), r"name the key, as in Fair\(by='account'\)"),  # type: ignore[arg-type]
        (lambda: Fair(by="a b"), "not a key's name"),
        (lambda: Fair(by="account", charge="tokens"), "'tokens'"),  # type: ignore[arg-type]
        (lambda: Fair(by="account", weight=0), "between"),
        (lambda: Fair(by="account", weight=-1), "between"),
        (lambda: Fair(by="account", weight=1e7), "between"),
        (lambda: Fair(by="account", weight=float("nan")), "nan"),
        (lambda: Fair(by="account", weight=True), "True"),
        (lambda: Fair(by="account", weight={"acme": 0}), "stops a key"),
        (lambda: Fair(by=("a", "b"), weight={"x": 1}), "single key"),
        (lambda: Fair(by="account", weight={None: 2}), "None"),  # type: ignore[dict-item]
        (lambda: Fair(by="account", weight={1.5: 2}), "float"),  # type: ignore[dict-item]
        (lambda: Fair(by="account", weight={42: 2, "42": 3}), "'42' is given twice"),  # type: ignore[dict-item]
    ],
)
def test_a16_a_nonsensical_share_is_refused_and_named(declare: object, named: str) -> None:
    assert callable(declare)
    with pytest.raises(InvalidPolicy, match=named) as error:
        declare()
    assert "Fair(by=" in str(error.value)
