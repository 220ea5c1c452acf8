"""Where a key belongs, what partitions are called, and what each of them enforces."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.policy import AdaptiveConcurrency, Backlog, Concurrency, Fair, Policy, Rate, Sequence, lane_id
from fairlane.policy.keys import routing_number
from fairlane.policy.partitions import (
    as_divided,
    differing,
    divided,
    logical,
    parse_partition,
    partition_for,
    partition_name,
    way_to,
)

# Published in docs/explanation/partitions.md: programs in other languages are built by them.
VECTORS = [
    ("acme", 11259825370902035069, (0, 1, 3, 4, 7, 7, 46)),
    ("globex", 18031298026914384163, (0, 0, 0, 4, 4, 4, 150)),
    ("initech", 5995087301251799697, (0, 0, 2, 2, 7, 12, 138)),
    ("42", 11452505596843059696, (0, 1, 1, 1, 7, 7, 84)),
    (None, 18380256627094950293, (0, 0, 0, 0, 7, 11, 194)),
    ("zürich", 7039173544285478790, (0, 0, 0, 0, 0, 0, 25)),
    ("", 6795938992731806279, (0, 1, 1, 1, 1, 13, 49)),
    (("acme", "eu"), 9385335148575874706, (0, 0, 0, 4, 4, 4, 183)),
]
WIDTHS = (1, 2, 4, 5, 8, 16, 256)

keys = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=12)


@pytest.mark.parametrize(("key", "number", "homes"), VECTORS)
def test_a_key_has_the_published_number_and_partitions(key: object, number: int, homes: tuple[int, ...]) -> None:
    values = key if isinstance(key, tuple) else (key,)
    assert routing_number(values) == number
    assert tuple(partition_for(key, width) for width in WIDTHS) == homes


def test_a_number_and_its_digits_belong_to_the_same_partition() -> None:
    assert [partition_for(42, width) for width in WIDTHS] == [partition_for("42", width) for width in WIDTHS]


@given(keys, st.integers(1, 200), st.integers(1, 56))
def test_growing_moves_keys_only_to_new_partitions(key: str, width: int, more: int) -> None:
    before, after = partition_for(key, width), partition_for(key, width + more)
    assert after == before or after >= width


def test_growing_by_one_moves_no_more_keys_than_it_must() -> None:
    moved = sum(partition_for(f"account-{n}", 4) != partition_for(f"account-{n}", 5) for n in range(10_000))
    assert abs(moved - 2_000) < 200


def test_keys_spread_evenly() -> None:
    counts = Counter(partition_for(f"account-{n}", 8) for n in range(16_000))
    assert sorted(counts) == list(range(8))
    assert all(abs(count - 2_000) < 200 for count in counts.values())


def test_the_lanes_of_a_partition_are_not_alike() -> None:
    """With one hash for both, all lanes of a partition would share their first bits."""
    first = Counter(
        lane_id("email", 0, {"account": key, "task": "send"})[0] >> 5
        for n in range(8_000)
        if partition_for(key := f"account-{n}", 8) == 3
    )
    assert sorted(first) == list(range(8))
    assert max(first.values()) < 2 * min(first.values())


@pytest.mark.parametrize("partitions", [0, -1, 257, True, 2.0, "2"])
def test_a_width_that_is_none_is_refused(partitions: object) -> None:
    with pytest.raises(ConfigurationError, match="is not a number of partitions from 1 to 256"):
        partition_for("acme", partitions)  # type: ignore[arg-type]


def test_partition_zero_has_the_name_of_the_whole() -> None:
    assert [partition_name("email", index) for index in range(3)] == ["email", "email__p1", "email__p2"]
    assert parse_partition("email__p2") == ("email", 2)
    assert parse_partition("email__p0") == ("email", 0)
    for plain in ("email", "email__p", "email__p02", "email_p1", "email__p1x"):
        assert parse_partition(plain) is None


def test_one_partition_is_a_plain_queue() -> None:
    policy = Policy("email", Fair(by="account"), (Concurrency(5, by="account"),))
    assert divided(policy, 1) == (policy,)


def test_a_limit_stays_in_the_partition_that_its_key_determines() -> None:
    policy = Policy("email", limits=(Concurrency(5, by="account"), Rate(9, per="1m", by=("account", "endpoint"))))
    for part in divided(policy, 4, ("account",)):
        assert part.limits == policy.limits
        assert not part.shared_limits


def test_a_limit_that_crosses_partitions_is_shared_by_all_of_them() -> None:
    limits = (Concurrency(200), Rate(9, per="1m", by="endpoint"), Rate(100, per="1m", by="endpoint"))
    parts = divided(Policy("email", limits=limits), 4, ("account",))
    assert len({part.limits for part in parts}) == 1
    assert [limit.name for limit in parts[0].limits] == [
        "email__concurrency",
        "email__rate-60s.endpoint",
        "email__rate-60s.endpoint-2",
    ]
    assert {part.queue for part in parts} == {"email", "email__p1", "email__p2", "email__p3"}


def test_without_a_key_to_partition_by_every_limit_crosses() -> None:
    (limit,) = divided(Policy("email", limits=(Concurrency(5, by="account"),)), 2)[0].limits
    assert limit.name == "email__concurrency.account"


def test_a_limit_that_each_partition_keeps_for_itself_has_no_name() -> None:
    parts = divided(Policy("email", limits=(Concurrency(200),)), 4, ("account",), [Concurrency(50)])
    assert [limit.name for limit in parts[3].limits] == ["email__concurrency", None]
    assert [parts[3].is_own(bound) for bound in parts[3].bound] == [False, True]


def test_the_policy_of_the_whole_can_be_told_from_any_partition() -> None:
    policy = Policy("email", Fair(by="account"), (Concurrency(200), Rate(3, per="1s", by="account", name="vendor")))
    for part in divided(policy, 4, ("account",), [Concurrency(50)]):
        assert logical(part) == (policy, (Concurrency(50),))


def test_a_stored_partition_reads_back_as_it_was() -> None:
    for part in divided(Policy("email", limits=(Concurrency(200),)), 3, ("account", "region"), [Concurrency(5)]):
        assert Policy.decode(part.encoded) == part


@pytest.mark.parametrize(
    ("limit", "reason"),
    [
        (Sequence(by="document"), "partition by one of its keys"),
        (Backlog(100), "only Concurrency and Rate"),
        (AdaptiveConcurrency(by="endpoint", start=2, max=10), "only Concurrency and Rate"),
        (Concurrency({"acme": 2}, by="vendor"), "only Concurrency and Rate"),
        (Concurrency(2, name="email__mine"), "belong to its partitions"),
    ],
)
def test_a_limit_that_cannot_cross_partitions_is_refused_with_the_remedy(limit: object, reason: str) -> None:
    policy = Policy("email", limits=(limit,))  # type: ignore[arg-type]
    with pytest.raises(InvalidPolicy, match=reason):
        divided(policy, 2, ("account",))


def test_a_sequence_by_the_partition_key_stays_in_order() -> None:
    parts = divided(Policy("email", limits=(Sequence(by=("account", "document")),)), 2, ("account",))
    assert parts[1].lane_keys == ("account", "document")


def test_jobs_must_carry_the_keys_that_say_where_they_belong() -> None:
    (first, *_) = divided(Policy("email"), 2, ("account",))
    assert first.keys_of_job == ("account",)
    with pytest.raises(InvalidPolicy, match="account"):
        divided(Policy("email", keys=("region",)), 2, ("account",))
    with pytest.raises(InvalidPolicy, match="account"):
        divided(Policy("email", keys=("region",)), 1, ("account",))


@pytest.mark.parametrize("by", [(), ("endpoint",)])
def test_a_weight_from_jobs_cannot_look_across_partitions(by: tuple[str, ...]) -> None:
    """U01: a partition would not know of a newer weight that a job has brought to another."""
    policy = Policy("email", Fair(by="account", weight=lambda context: 1), keys=("account", "endpoint"))
    with pytest.raises(InvalidPolicy, match=r"looks across partitions.*partition_by='account'"):
        divided(policy, 4, by)
    assert len(divided(policy, 4, ("account",))) == 4


def test_a_declaration_with_another_width_reads_as_if_it_had_the_stored_one() -> None:
    limits = (Concurrency(5, by="account"), Concurrency(50), Rate(9, per="1s"))
    policy = Policy("email", limits=limits)
    widths = {width: divided(policy, width, ("account",)) for width in (1, 4, 8)}
    for stored in widths.values():
        for declared in widths.values():
            for index, each in enumerate(stored):
                assert as_divided(each, declared[-1]).digest == stored[index].digest
    plain = Policy("email", keys=("account",))
    (one,) = divided(plain, 1, ("account",))
    assert as_divided(divided(Policy("email"), 4, ("account",))[2], one) == divided(Policy("email"), 4, ("account",))[2]


def test_a_declaration_says_how_it_divides_a_queue_otherwise_than_it_is_divided() -> None:
    four, eight = (divided(Policy("email"), width, ("account",))[0] for width in (4, 8))
    assert differing(four, four) is None
    assert differing(four, eight) == "it has 4 partitions, and this program declares 8 partitions"
    assert differing(Policy("email"), four) == "it has one partition, and this program declares 4 partitions"
    by_region = divided(Policy("email"), 4, ("region",))[0]
    assert differing(four, by_region) == (
        "it has 4 partitions, and this program declares 4 partitions by region, not by account"
    )


@pytest.mark.parametrize(
    ("stored", "declared", "commands"),
    [
        ((4, "account"), (8, "account"), "`fairlane partition email --to 8`"),
        ((4, "account"), (1, "account"), "`fairlane partition email --to 1`"),
        ((1, "account"), (4, "account"), "`fairlane partition email --to 4 --by account`"),
        ((1, ""), (4, ""), "`fairlane partition email --to 4 --app module:app`"),
        (
            (4, "account"),
            (4, "region"),
            "`fairlane partition email --to 1`, then `fairlane partition email --to 4 --by region`",
        ),
        (
            (4, "account"),
            (8, "region"),
            "`fairlane partition email --to 1`, then `fairlane partition email --to 8 --by region`",
        ),
    ],
)
def test_the_way_to_another_division_is_one_that_is_not_refused(
    stored: tuple[int, str], declared: tuple[int, str], commands: str
) -> None:
    before, after = (divided(Policy("email"), width, (by,) if by else ()) for width, by in (stored, declared))
    assert way_to(before[0], after[0]) == commands
    assert way_to(before[-1], after[-1]) == commands


def test_a_declaration_that_cannot_hold_in_the_stored_partitions_says_what_to_do() -> None:
    four = divided(Policy("email"), 4, ("account",))
    for limit in (Sequence(by="region"), Backlog(5)):
        with pytest.raises(InvalidPolicy, match=r"has 4 partitions by account.*fairlane partition email --to 1"):
            as_divided(four[1], Policy("email", limits=(limit,)))
