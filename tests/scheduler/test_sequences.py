"""Whatever happens to its jobs, a sequence starts them one after the other, and its gates count who holds a place."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from fairlane.policy import Concurrency, Fair, Policy, Rate, Sequence, gate_id
from fairlane.scheduler.snapshot import KeptPlaces, Start
from fairlane.simulation.memory import MemoryQueue

SECOND = 1_000_000
POLICIES = [
    Policy("documents", limits=(Sequence(by="document"),)),
    Policy("documents", fair=Fair(by="document", charge="count"), limits=(Sequence(by="document"), Concurrency(2))),
    Policy(
        "documents",
        fair=Fair(by="account"),
        limits=(
            Concurrency(2, by="account"),
            Sequence(by=("account", "document")),
            Rate(3, per="5s", by=("document", "account")),
        ),
    ),
]
STEPS = ("enqueue", "claim", "done", "retry", "give back", "resume", "abandon", "wait", "apply")


@dataclass
class Life:
    """A queue, and beside it what must be true of it."""

    policy: Policy
    now: int = 1_000 * SECOND
    waiting: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in "abc"})
    running: dict[str, Start] = field(default_factory=dict)
    kept: dict[str, Start] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.queue = MemoryQueue(self.policy)

    def keys(self, name: str) -> dict[str, str | None]:
        return {key: name if key == "document" else "acme" for key in self.policy.lane_keys}

    def step(self, what: str, name: str) -> None:
        match what:
            case "enqueue":
                heads = self.queue.enqueue(self.now, self.keys(name), 2)
                self.waiting[name] += [head.position for head in heads]
            case "claim":
                self.claim()
            case "done" if name in self.running:
                self.queue.settle(self.running.pop(name), SECOND)
                self.waiting[name].pop(0)
            case "retry" if name in self.running:
                self.kept[name] = self.running.pop(name)
                self.queue.retry(self.kept[name], SECOND)
            case "give back" if name in self.running:
                self.queue.give_back(self.running.pop(name))
            case "resume" if name in self.kept:
                self.queue.resume(self.kept.pop(name))
            case "abandon" if name in self.kept:
                self.queue.abandon(self.kept.pop(name))
                self.waiting[name].pop(0)
            case "wait":
                self.now += SECOND
            case "apply":
                self.apply()

    def claim(self) -> bool:
        plan = self.queue.claim(self.now, 5)
        for start in plan.starts:
            name = str(self.queue.lanes[start.lane].keys["document"])
            assert name not in self.running, "two of one key run"
            assert name not in self.kept, "one was overtaken while it waited for its retry"
            assert start.head.position == self.waiting[name][0], "one was overtaken"
            self.running[name] = start
        self.check_gates()
        return bool(plan.starts)

    def check_gates(self) -> None:
        (sequence,) = [bound for bound in self.policy.bound if isinstance(bound.limit, Sequence)]
        for name in "abc":
            values = tuple(self.keys(name)[key] for key in sequence.limit.by)
            gate = self.queue.gates.get(gate_id("documents", sequence.name, values))
            held = (name in self.running) + (name in self.kept)
            assert (gate.in_flight if gate else 0) == held

    def apply(self) -> None:
        self.queue.claim(self.now, 0)
        self.queue.apply(self.policy, self.now, [KeptPlaces(0, self.keys(name), 1) for name in self.kept])
        self.check_gates()

    def drain(self) -> None:
        for name in list(self.kept):
            self.step("resume", name)
        while any(self.waiting.values()):
            for name in list(self.running):
                self.step("done", name)
            if not self.claim():
                assert not any(self.waiting.values()) or any(isinstance(each, Rate) for each in self.policy.limits)
                self.now += 10 * SECOND
        self.claim()
        assert all(gate.in_flight == 0 for gate in self.queue.gates.values())


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(POLICIES), st.lists(st.tuples(st.sampled_from(STEPS), st.sampled_from("abc")), max_size=80))
def test_no_life_of_a_sequence_starts_a_job_before_the_one_before_it_has_ended(
    policy: Policy, steps: list[tuple[str, str]]
) -> None:
    life = Life(policy)
    for what, name in steps:
        life.step(what, name)
    life.drain()
