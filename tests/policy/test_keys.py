"""One canonical form per key, and identities that other languages can compute."""

from __future__ import annotations

from enum import Enum, IntEnum
from hashlib import sha256
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.errors import InvalidKey
from fairlane.policy import canonical_key, canonical_keys, flow_id, gate_id, lane_id
from fairlane.policy.keys import MAX_KEY_BYTES, select

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12) | st.sampled_from(
    ["", "1:a,", "~", ",", "1", "\n", "fairlane/lane/1\n"]
)
values = st.none() | texts
names = st.from_regex(r"[a-z_][a-z0-9_]{0,5}", fullmatch=True)


class Plan(str, Enum):  # noqa: UP042  the kind whose str() is not its value
    FREE = "free"


class Shard(IntEnum):
    FIRST = 1


@pytest.mark.parametrize(
    ("value", "form"),
    [
        (42, "42"),
        ("42", "42"),
        (-7, "-7"),
        ("", ""),
        (None, None),
        (UUID("00000000-0000-7000-8000-00000000000a"), "00000000-0000-7000-8000-00000000000a"),
        (Plan.FREE, "free"),
        (Shard.FIRST, "1"),
        ("a b", "a b"),
        ("é" * 256, "é" * 256),
    ],
)
def test_a_value_has_one_canonical_form(value: object, form: str | None) -> None:
    assert canonical_key("account", value) == form


@given(st.integers(-(10**60), 10**60))
def test_an_int_and_its_digits_are_the_same_key(number: int) -> None:
    assert canonical_key("account", number) == canonical_key("account", str(number))


@given(values)
def test_a_canonical_form_is_its_own_canonical_form(value: str | None) -> None:
    assert canonical_key("account", canonical_key("account", value)) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1.5, "float"),
        (float("nan"), "float"),
        (True, "bool"),
        (b"acme", "bytes"),
        (["acme"], "list"),
        ("a\x00b", "NUL"),
        ("\ud800", "Unicode"),
        ("x" * 513, "513 bytes"),
        ("é" * 257, "514 bytes"),
        (10**600, "601 bytes"),
        (10**5_000, "digits"),
        (-(10**512), "514 bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isascii() and len(value) < 20 else type(value).__name__,
)
def test_a_value_without_a_canonical_form_is_refused_by_name_and_reason(value: object, reason: str) -> None:
    with pytest.raises(InvalidKey, match=reason) as error:
        canonical_key("account", value)
    assert "'account'" in str(error.value)


def test_a_key_of_exactly_the_longest_length_is_accepted() -> None:
    assert canonical_key("account", "x" * MAX_KEY_BYTES) == "x" * MAX_KEY_BYTES
    assert canonical_key("account", 10**511) == "1" + "0" * 511


def test_keys_are_ordered_by_name_whatever_order_they_were_given_in() -> None:
    assert list(canonical_keys({"region": 1, "account": None})) == ["account", "region"]


def test_a_lane_is_named_the_same_whatever_order_its_keys_were_given_in() -> None:
    assert lane_id("q", 0, {"a": "1", "b": None}) == lane_id("q", 0, {"b": None, "a": "1"})


@pytest.mark.parametrize(
    ("identity", "vector"),
    [
        (lane_id("webhooks", 0, {}), "09fe0bd1e4df4dc22291e1c5571d2280"),
        (lane_id("webhooks", 5, {"account": "acme", "endpoint": "api.acme.com"}), "aca544ec2282aad277f4c37c863d3e5b"),
        (lane_id("webhooks", -100, {"account": None, "region": "zürich"}), "545b105feb37601e5e9e3908791774bb"),
        (flow_id("webhooks", (), ()), "f9991568c80750fcd181d2217ae70f11"),
        (flow_id("webhooks", ("account",), ("acme",)), "215f9b38f58ea829940819522ce0bd8f"),
        (flow_id("webhooks", ("account", "region"), ("acme", None)), "3e65cf1f9807d6dfb2d8b4889f2814fa"),
        (gate_id("webhooks", "concurrency:", ()), "6b381a655447bc0999ef88f0e01ad96a"),
        (gate_id("webhooks", "rate/60s:endpoint", ("api.acme.com",)), "d08628ed1b1436d18c7c3c09923630a3"),
        (gate_id("webhooks", "concurrency:account#2", (None,)), "3aa3a8e78a9252d9fd28a9e8f6d301e5"),
    ],
)
def test_identities_are_the_published_vectors(identity: bytes, vector: str) -> None:
    assert identity.hex() == vector


def test_the_form_behind_an_identity_is_the_documented_one() -> None:
    form = "fairlane/lane/1\n1:q,1:0,7:account,5:z\u00fcri,6:region,~".encode()
    assert lane_id("q", 0, {"region": None, "account": "züri"}) == sha256(form).digest()[:16]


lanes = st.tuples(texts, st.integers(-100, 100), st.dictionaries(names, values, max_size=3))
flows = st.tuples(texts, st.lists(names, max_size=3).map(tuple), st.lists(values, max_size=3).map(tuple))
gates = st.tuples(texts, texts, st.lists(values, max_size=3).map(tuple))


@settings(deadline=None, max_examples=300)
@given(st.lists(lanes, max_size=12), st.lists(flows, max_size=12), st.lists(gates, max_size=12))
def test_no_two_different_things_share_an_identity(
    some_lanes: list[tuple[str, int, dict[str, str | None]]],
    some_flows: list[tuple[str, tuple[str, ...], tuple[str | None, ...]]],
    some_gates: list[tuple[str, str, tuple[str | None, ...]]],
) -> None:
    seen: dict[bytes, object] = {}
    for queue, priority, keys in some_lanes:
        thing: object = ("lane", queue, priority, tuple(sorted(keys.items())))
        assert seen.setdefault(lane_id(queue, priority, keys), thing) == thing
    for flow in some_flows:
        assert seen.setdefault(flow_id(*flow), ("flow", *flow)) == ("flow", *flow)
    for gate in some_gates:
        assert seen.setdefault(gate_id(*gate), ("gate", *gate)) == ("gate", *gate)


def test_a_lane_a_flow_and_a_gate_of_the_same_parts_are_told_apart_by_their_domain() -> None:
    assert len({lane_id("q", 1, {}), flow_id("q", ("1",), ()), gate_id("q", "1", ())}) == 3


@given(texts, texts, texts)
def test_text_cannot_move_from_one_part_into_the_next(a: str, b: str, c: str) -> None:
    assert gate_id(a, b + c, ()) != gate_id(a + b, c, ()) or b == ""
    assert gate_id(a, b, (c,)) != gate_id(a, b, (c, None))
    assert gate_id(a, b, (None,)) != gate_id(a, b, ("~",))


def test_a_scope_reads_priority_from_the_job_and_the_rest_from_its_keys() -> None:
    assert select(("account", "priority", "region"), {"account": "acme", "region": None}, 5) == ("acme", "5", None)
