"""Unique keys: how they are written down, and that a batch is decided as if its jobs came one by one."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.errors import ConfigurationError, InvalidKey
from fairlane.job import NewJob, Outcome, State, UniqueKey, Until
from fairlane.policy.keys import unique_id
from fairlane.policy.unique import Holder, Unique, admit, digest_of, unique_key

NOW = 1_000_000


def built(unique: Unique, *args: object, **kwargs: object) -> UniqueKey | None:
    return unique_key(unique, "deliver", args, kwargs, b"payload")


def test_the_identity_of_a_unique_key_is_fixed() -> None:
    assert unique_id("deliver", ("a",)).hex() == "5d55009ff54803769e00fdb9d90bfa82"
    assert unique_id("deliver", ("a", None)) != unique_id("deliver", ("a",))
    assert unique_id("deliver", ("a",)) != unique_id("other", ("a",))


def test_a_key_is_a_value_a_tuple_or_a_function_of_the_arguments() -> None:
    by_function = built(Unique(lambda number, account: (account, number)), 42, account="acme")
    by_value = built(Unique(("acme", "42")))
    assert by_function is not None
    assert by_function == by_value


@pytest.mark.parametrize("unique", [Unique(None), Unique(lambda: None)])
def test_none_is_off(unique: Unique) -> None:
    assert built(unique) is None


@pytest.mark.parametrize("key", [1.5, True, object(), "x" * 513, "\x00"])
def test_what_has_no_canonical_form_is_refused_with_the_tasks_name(key: object) -> None:
    with pytest.raises(InvalidKey, match="task 'deliver'"):
        built(Unique(key))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"until": "later"}, "until='later'"),
        ({"on_conflict": "ignore"}, "on_conflict='ignore'"),
        ({"window": "0s"}, "window='0s'"),
        ({"window": "soon"}, "soon"),
    ],
)
def test_nonsense_is_refused_where_it_is_declared(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Unique("a", **options)  # type: ignore[arg-type]


def test_how_it_is_shown() -> None:
    assert repr(Unique("a")) == "Unique('a')"
    shown = repr(Unique("a", until="started", on_conflict="replace", same_payload=True))
    assert shown == "Unique('a', until='started', on_conflict='replace', same_payload=True)"
    assert repr(Unique("a", window="10m")) == "Unique('a', window='10m')"


def new_job(number: int, unique: Unique | None, payload: bytes) -> NewJob:
    key = None if unique is None else unique_key(unique, "deliver", (), {}, payload)
    return NewJob(UUID(int=number), "q", "deliver", 0, b"", {}, {}, payload, 1, unique=key)


uniques = st.builds(
    Unique,
    st.sampled_from(["a", "b"]),
    until=st.sampled_from(["started", "done"]),
    window=st.sampled_from([None, "1s"]),
    on_conflict=st.sampled_from(["return", "reject", "replace"]),
    same_payload=st.booleans(),
)
batches = st.lists(st.tuples(st.none() | uniques, st.sampled_from([b"1", b"2"])), max_size=8)
holders = st.builds(
    Holder,
    st.just(UUID(int=99)),
    st.sampled_from([digest_of(b"1"), digest_of(b"2")]),
    st.sampled_from(Until),
    st.sampled_from([None, NOW, NOW + 1]),
    st.none() | st.sampled_from(State),
    st.booleans(),
)


@given(batches, st.dictionaries(st.sampled_from(["a", "b"]), holders))
def test_a_batch_is_decided_as_if_its_jobs_came_one_by_one(
    batch: list[tuple[Unique | None, bytes]], held: dict[str, Holder]
) -> None:
    jobs = [new_job(number, unique, payload) for number, (unique, payload) in enumerate(batch, 1)]
    known = {unique_id("deliver", (name,)): holder for name, holder in held.items()}
    together = admit(jobs, known, NOW)
    # One by one: each admission is written before the next job comes.
    alive: dict[UUID, NewJob] = {}
    outcomes: dict[UUID, Outcome] = {}
    gone: set[UUID] = set()
    for job in jobs:
        alone = admit([job], known, NOW)
        conflict = alone.conflicts.get(job.id)
        outcomes[job.id] = Outcome.ENQUEUED if conflict is None else conflict.outcome
        for old in alone.replaced:
            alive.pop(old, None)
            gone.add(old)
        if alone.stored:
            alive[job.id] = job
        for key, taker in alone.taken.items():
            assert taker.unique is not None
            known[key] = Holder(
                taker.id, taker.unique.digest, taker.unique.until, taker.unique.expires_at(NOW), State.READY, False
            )
    assert [job.id for job in together.stored] == list(alive)
    there = {*alive, *(holder.job for holder in held.values())}
    for conflict in together.conflicts.values():
        assert conflict.outcome.is_stored or conflict.holder in there, "a handle would find no job"
    assert {*together.replaced} == gone - {job.id for job in jobs}
    for job in jobs:
        conflict = together.conflicts.get(job.id)
        said = Outcome.ENQUEUED if conflict is None else conflict.outcome
        assert said is (Outcome.DUPLICATE if job.id in gone else outcomes[job.id])


@given(uniques, holders)
def test_nobody_is_stored_while_the_key_is_held_unless_it_replaces(unique: Unique, holder: Holder) -> None:
    job = new_job(1, unique, b"1")
    assert job.unique is not None
    admission = admit([job], {job.unique.id: holder}, NOW)
    if holder.holds(NOW) and unique.on_conflict != "replace":
        assert admission.stored == []
    if not holder.holds(NOW):
        assert admission.stored == [job]
        assert admission.conflicts == {}


def test_an_id_given_twice_is_left_to_the_store_to_refuse() -> None:
    jobs = [new_job(1, None, b"1"), new_job(1, Unique("a"), b"1")]
    assert admit(jobs, {}, NOW).stored == jobs


def test_a_job_that_is_replaced_twice_at_once_goes_for_the_one_that_is_stored() -> None:
    newest = Unique("a", on_conflict="replace")
    first, last = new_job(1, newest, b"1"), new_job(2, newest, b"1")
    old = Holder(UUID(int=9), b"", Until.DONE, None, State.READY, has_started=False)
    admission = admit([first, last], {unique_id("deliver", ("a",)): old}, NOW)
    assert (admission.stored, admission.replaced) == ([last], {old.job: last.id})


def test_the_id_of_a_job_that_is_gone_is_free_although_its_key_remembers_it() -> None:
    again = new_job(1, Unique("a"), b"1")
    gone = Holder(again.id, b"", Until.DONE, None, None, has_started=True)
    admission = admit([again], {unique_id("deliver", ("a",)): gone}, NOW)
    assert (admission.stored, admission.own) == ([again], set())
