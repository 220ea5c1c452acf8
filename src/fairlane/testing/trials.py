"""Policy trials: arrivals, a virtual clock, and figures about which jobs ran when.

They run the plan of the stores on the clock of `fairlane.simulation`: an hour of a busy fleet takes a moment, with the
same result every time.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches

from msgspec import structs

from fairlane.clock import SECOND, Instant, duration_of, duration_text
from fairlane.errors import ConfigurationError
from fairlane.parameters import checked, shown
from fairlane.policy.keys import canonical_keys
from fairlane.policy.limits import is_whole
from fairlane.policy.policy import Policy
from fairlane.queue import Queue
from fairlane.simulation.measures import Simulation, measure, most_at_once, most_within, share_when_all_wait
from fairlane.simulation.replay import record
from fairlane.simulation.run import Recording
from fairlane.simulation.workload import Duration, JobClass, RunTimes, Workload


class Figure(float):
    """A number with a description, which a failing assertion shows."""

    text: str

    def __new__(cls, value: float, text: str) -> Figure:
        made = super().__new__(cls, value)
        made.text = text
        return made

    def __repr__(self) -> str:
        return f"<{float(self):g}: {self.text}>"


@checked(unchecked=["jobs"])
def arrivals(
    jobs: int,
    *,
    at: Duration = 0,
    every: Duration | None = None,
    poisson: float | None = None,
    run_time: Duration | RunTimes = "100ms",
    priority: int = 0,
    task: str = "",
    numbers: Mapping[str, float] | None = None,
    **keys: str | int | None,
) -> JobClass:
    """Jobs of one key: `arrivals(500, account="acme")` are there from the start; with `every="20ms"` they arrive one by
    one, with `poisson=50.0` at random, this many a second. `numbers` are for a policy that takes numbers from jobs, by
    the name of the limit: `{"concurrency:account": 8, "weight": 4}`."""
    if not is_whole(jobs) or jobs < 0:
        raise ConfigurationError(f"arrivals({shown(jobs)}, …): give a number of jobs")
    named = ", ".join(f"{name}={value}" for name, value in keys.items()) or "jobs"
    return JobClass(
        name=f"{named} {at}/{every}/{poisson}/{run_time}/{priority}/{task}/{jobs}",
        keys=dict(keys),
        jobs=jobs,
        at=at,
        every=every,
        poisson=poisson,
        run_time=run_time,
        priority=priority,
        task=task,
        numbers=dict(numbers or {}),
    )


@checked(unchecked=["queue"])
def try_policy(
    queue: Queue | Policy,
    *coming: JobClass | Workload,
    slots: int = 10,
    until: Duration | None = None,
    seed: int = 0,
    claim_time: Duration = 0,
    settle_time: Duration = 0,
) -> Trial:
    """Let jobs arrive in a queue that `slots` workers serve, until all have run or until `until`.

    By default claims and settlements take no time, so that only the policy has an effect.
    """
    policy = queue.policy if isinstance(queue, Queue) else queue
    if not isinstance(policy, Policy):
        raise ConfigurationError(
            f"try_policy: {shown(queue)} is not a queue; give what app.queue(…) returned, or app.queues['webhooks']"
        )
    if not coming:
        raise ConfigurationError("try_policy: give what arrives, such as arrivals(100, account='acme')")
    classes = [each for given in coming for each in (given.classes if isinstance(given, Workload) else (given,))]
    for each in classes:
        _check_class(policy, each)
    # Two equal arrivals are still two classes.
    named = tuple(structs.replace(each, name=f"{nth}: {each.name}") for nth, each in enumerate(classes))
    workload = Workload(classes=named, seed=seed)
    return Trial(record(policy, workload, slots=slots, claim_time=claim_time, settle_time=settle_time, until=until))


def _check_class(policy: Policy, each: object) -> None:
    """Check as an enqueue does: jobs without a key would be counted under the wrong one."""
    if not isinstance(each, JobClass):
        raise ConfigurationError(
            f"try_policy: {shown(each)} does not arrive; give arrivals(…), a JobClass or a Workload"
        )
    for name in policy.keys_of_job:
        if name not in each.keys:
            carried = ", ".join(each.keys) or "none"
            raise ConfigurationError(
                f"try_policy: queue {policy.queue!r} needs the key {name!r}, and jobs arrive that do not carry it "
                f"(they carry: {carried}); give it: arrivals(…, {name}=…), or None, the key that jobs without one share"
            )
    for name in each.keys:
        _check_key(policy, name)
    for name in policy.brought:
        if name not in each.numbers:
            raise ConfigurationError(
                f"try_policy: queue {policy.queue!r} takes {name!r} from its jobs, and jobs arrive that do not "
                f"bring it; give it: arrivals(…, numbers={{{name!r}: 2}})"
            )


def _check_key(policy: Policy, name: str) -> None:
    """Refuse a key that the policy does not use: it may be a mistyped option."""
    if name in policy.keys_of_job:
        return
    options = [
        option.name for option in inspect.signature(arrivals).parameters.values() if option.default != option.empty
    ]
    meant = get_close_matches(name, [*policy.keys_of_job, *options], n=1, cutoff=0.75)
    if meant or policy.keys_of_job:  # a policy without keys may be tried beside one that has some
        remedy = f"did you mean {meant[0]}=?" if meant else f"it looks at {', '.join(policy.keys_of_job)}."
        raise ConfigurationError(
            f"try_policy: queue {policy.queue!r} does not look at the key {name!r}, with which jobs arrive; {remedy} "
            f"To have figures by it, declare it: app.queue({policy.queue!r}, keys=({name!r}, …))"
        )


class Trial:
    """The result of a trial. Each figure is about the jobs with the given keys, or about all."""

    def __init__(self, recording: Recording) -> None:
        self._record = recording
        self.simulation: Simulation = measure(recording)
        """All figures of the run: waits, shares, use of limits."""

    def __repr__(self) -> str:
        done = self.simulation
        return f"<trial of {done.policy}: {done.runs} runs in {done.seconds:g} s, {done.left} left>"

    def share(self, value: str | int | None = None, **keys: str | int | None) -> float:
        """The fraction of worker-seconds that a key got while all keys had jobs waiting: what fair shares are about.

        `share("acme")` is short for the key that turns are taken by. If at no time all of them had jobs waiting, this
        is an error: there was nothing to share.
        """
        fair = self._record.policy.fair
        if not keys and fair is not None and len(fair.by) == 1:
            keys = {fair.by[0]: value}
        if not keys:
            raise ConfigurationError("share: give the keys that are meant, such as share(account='acme')")
        self._places(keys)
        shares = share_when_all_wait(self._record, tuple(keys))
        wanted = tuple(canonical_keys(keys)[name] for name in keys)
        if not shares:
            raise AssertionError(f"never did all of {', '.join(keys)} have jobs waiting at once: {self!r}")
        others = ", ".join(f"{'/'.join(map(str, name))} {part:.1%}" for name, part in sorted(shares.items())[:10])
        return Figure(shares.get(wanted, 0.0), f"share of {_named(keys)}; of all: {others}")

    def most_in_flight(self, **keys: str | int | None) -> float:
        """The most jobs running at the same time."""
        record = self._record
        spans = ((record.started_at[nth], record.finished_at[nth]) for nth in self._runs(keys))
        most, when = most_at_once(spans)
        return Figure(most, f"in flight at {_seconds(record, when or record.began_at)}, the most of {_named(keys)}")

    def starts_within(self, window: Duration, **keys: str | int | None) -> float:
        """The most jobs that started within any window of this length."""
        length = duration_of("starts_within: window", window)
        if length <= 0:
            raise ConfigurationError(f"starts_within({window!r}): give a time above 0")
        most, when = most_within((self._record.started_at[nth] for nth in self._runs(keys)), length)
        begin = _seconds(self._record, when or self._record.began_at)
        text = f"starts within {duration_text(length)} from {begin}, the most of {_named(keys)}"
        return Figure(most, text)

    def runs(self, **keys: str | int | None) -> float:
        """The number of runs, retries included."""
        return Figure(len(self._runs(keys)), f"runs of {_named(keys)}")

    def left(self, **keys: str | int | None) -> float:
        """The number of jobs that had not started by the end."""
        places = self._places(keys)
        return Figure(sum(place in places for place, _ in self._record.left), f"jobs left of {_named(keys)}")

    def longest_wait(self, **keys: str | int | None) -> float:
        """The longest time from ready to started, in seconds; for jobs that did not start, until the end."""
        record, places = self._record, self._places(keys)
        waits = [record.started_at[nth] - record.ready_at[nth] for nth in self._runs(keys)]
        waits += [record.ended_at - at for place, at in record.left if place in places]
        return Figure(max(waits, default=0) / SECOND, f"seconds, the longest wait of {_named(keys)}")

    def finished_after(self, **keys: str | int | None) -> float:
        """Seconds from the start until the last of these jobs ended."""
        record = self._record
        last = max((record.finished_at[nth] for nth in self._runs(keys)), default=record.began_at)
        return Figure((last - record.began_at) / SECOND, f"seconds until the last of {_named(keys)} had ended")

    def _places(self, keys: dict[str, str | int | None]) -> set[int]:
        carried = {name for kind in self._record.kinds for name in kind.keys}
        if unknown := [name for name in keys if name not in carried]:
            # It would make every assertion true.
            known = ", ".join(sorted(carried - {"task"})) or "none"
            raise ConfigurationError(f"no job of this trial carries the key {unknown[0]!r}; they carry: {known}")
        wanted = canonical_keys(keys)
        places = {
            place
            for place, kind in enumerate(self._record.kinds)
            if all(kind.keys.get(name) == value for name, value in wanted.items())
        }
        if not places:
            raise ConfigurationError(f"no job of this trial carries {_named(keys)}; name keys that arrive together")
        return places

    def _runs(self, keys: dict[str, str | int | None]) -> list[int]:
        places = self._places(keys)
        return [nth for nth, place in enumerate(self._record.kind_of) if place in places]


def _named(keys: dict[str, str | int | None]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in keys.items()) or "all jobs"


def _seconds(record: Recording, at: Instant) -> str:
    return f"{(at - record.began_at) / SECOND:g} s"
