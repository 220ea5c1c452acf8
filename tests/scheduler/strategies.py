"""Random policies and random lives of a queue."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fairlane.policy import Concurrency, Fair, Limit, Policy, Rate

KEYS: dict[str, list[str | None]] = {
    "account": ["x", "y", "z"],
    "endpoint": ["e1", "e2", "e3", "e4"],
    "region": ["eu", None],
}

scopes = st.sampled_from(
    [None, "account", "endpoint", "region", "priority", ("account", "endpoint"), ("account", "priority")]
)
concurrencies = st.builds(Concurrency, st.integers(0, 4) | st.integers(1, 3), by=scopes)
rates = st.builds(
    Rate,
    st.sampled_from([1, 2, 3, 0.5, 0.3, 7]),
    per=st.sampled_from(["1s", "3s", "10s", "1m"]),
    burst=st.sampled_from([None, 1, 2, 5]),
    by=scopes,
)
windows = st.builds(
    Rate, st.integers(1, 4), per=st.sampled_from(["1s", "3s", "10s", "1m"]), by=scopes, rolling=st.just(True)
)
limits: st.SearchStrategy[Limit] = concurrencies | rates | windows
weights = st.sampled_from([1.0, 2.5, {"x": 3}, {"x": 5, "z": 0.5}])
shares = st.builds(Fair, by=st.just("account"), weight=weights, charge=st.sampled_from(["time", "count"])) | st.builds(
    Fair, by=st.sampled_from([("account", "region"), "endpoint"]), charge=st.sampled_from(["time", "count"])
)


def policies(max_limits: int = 4) -> st.SearchStrategy[Policy]:
    return st.builds(
        Policy,
        queue=st.just("q"),
        fair=st.none() | shares,
        limits=st.lists(limits, max_size=max_limits).map(tuple),
        keys=st.sampled_from([(), ("account", "endpoint", "region")]),
    )


keys = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in KEYS.items()})
priorities = st.sampled_from([0, 0, 0, 1, 5, -3])
moments = st.sampled_from([1, 1_000, 300_000, 1_000_000, 3_000_000, 61_000_000])
run_times = st.sampled_from([0, 1_000, 50_000, 1_000_000, 34_000_000])

enqueues = st.tuples(st.just("enqueue"), keys, st.integers(1, 5), priorities)
claims = st.tuples(st.just("claim"), st.integers(0, 7))
endings = st.tuples(st.sampled_from(["settle", "reap"]), st.integers(0, 20), run_times)
gifts = st.tuples(st.just("give back"), st.integers(0, 20))
cancels = st.tuples(st.just("withdraw"), st.integers(0, 20))
waits = st.tuples(st.just("wait"), moments)

Step = tuple[Any, ...]


def lives(*, at_most: int = 40) -> st.SearchStrategy[list[Step]]:
    """What happens to a queue, step by step."""
    step = enqueues | claims | claims | endings | endings | gifts | cancels | waits
    return st.lists(step, min_size=3, max_size=at_most)


endpoints = [f"e{n}" for n in range(16)]
wide_keys = st.fixed_dictionaries(
    {"account": st.sampled_from(["x", "x", "y"]), "endpoint": st.sampled_from(endpoints), "region": st.just("eu")}
)
wide_scopes = st.sampled_from(["endpoint", "account", "priority", ("account", "endpoint"), "region"])


def wide_policies() -> st.SearchStrategy[Policy]:
    """Many lanes behind few or many gates: the first ready lanes of a flow are not all of them."""
    some = st.builds(Concurrency, st.integers(1, 3), by=wide_scopes) | st.builds(
        Rate, st.sampled_from([1, 2]), per=st.sampled_from(["1s", "1m"]), burst=st.sampled_from([1, 2]), by=wide_scopes
    )
    return st.builds(
        Policy,
        queue=st.just("q"),
        fair=st.sampled_from([None, Fair(by="account", charge="count"), Fair(by="account"), Fair(by="endpoint")]),
        limits=st.lists(some, min_size=1, max_size=3).map(tuple),
        keys=st.just(("account", "endpoint", "region")),
    )


def busy_lives() -> st.SearchStrategy[list[Step]]:
    """Many arrivals, small claims."""
    arrival = st.tuples(st.just("enqueue"), wide_keys, st.integers(1, 2), priorities)
    first = st.lists(arrival, min_size=10, max_size=40)
    claim = st.tuples(st.just("claim"), st.sampled_from([1, 1, 2, 3, 7]))
    later = st.lists(arrival | claim | claim | endings | gifts | cancels | waits, min_size=10, max_size=60)
    return st.builds(lambda before, after: before + after, first, later)
