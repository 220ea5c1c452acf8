"""E12: a wrong value for any public parameter is an error of ours that names it, on every store.

Every parameter of every public callable is fed every value of `VALUES`. It is refused with a `FairlaneError` that names
the parameter or the value, or accepted if its annotation allows it. What is public comes from the signatures: a new
parameter is fed by itself, and a new callable that is not in `ROWS` fails the test.
"""

from __future__ import annotations

import asyncio
import inspect
import types
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from uuid import UUID

import msgspec
import pytest

import fairlane
import fairlane.codec
import fairlane.policy
import fairlane.simulation
import fairlane.testing
import fairlane.worker
from fairlane import (
    App,
    Backlog,
    Backoff,
    BoundTask,
    Breaker,
    Call,
    Concurrency,
    Effects,
    Fair,
    FairlaneError,
    HeldClaim,
    Job,
    Limit,
    Policy,
    Queue,
    Rate,
    State,
    Task,
    context,
)
from fairlane.clock import ManualClock
from fairlane.effects import Values
from fairlane.operations import JobFilter, Operations
from fairlane.simulation import JobClass, Workload
from fairlane.task import TaskOptions
from fairlane.testing import Trial, arrivals, run_until_idle, try_policy
from fairlane.worker import JobContext
from tests.test_docs_reference import PUBLIC, SECTIONS
from tests.waiting import PATIENCE

LONG = "x" * 100_000


class Anything:
    def __init__(self, *_: object) -> None: ...


async def _nothing() -> None: ...


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "5": lambda: 5,
    "1.5": lambda: 1.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "-1": lambda: -1,
    "0": lambda: 0,
    "2**80": lambda: 2**80,
    "10**400": lambda: 10**400,
    "empty text": lambda: "",
    "NUL": lambda: "\x00",
    "half a character": lambda: "\ud800",
    "a long text": lambda: LONG,
    "bytes": lambda: b"x",
    "[]": list,
    "{}": dict,
    "[None]": lambda: [None],
    "(1.5,)": lambda: (1.5,),
    "{5: None}": lambda: {5: None},
    "{'x': NUL}": lambda: {"x": "\x00"},
    "{'\\ud800': object()}": lambda: {"\ud800": object()},
    "object()": object,
    "a function": lambda: lambda *_: None,
    "a class": lambda: Anything,
    "True": lambda: True,
    "a coroutine": _nothing,
    "a set": lambda: {"x"},
    "naive datetime": lambda: datetime(2031, 1, 1),  # noqa: DTZ001
    "a negative time": lambda: timedelta(days=-1),
    "the longest time": lambda: timedelta.max,
}

NOT_GIVEN: dict[str, str] = {
    **dict.fromkeys(
        [
            *("AttemptRecord", "Disclosure", "EnqueuedJob", "Enqueued", "Explanation", "Figure", "FollowUp"),
            *("Foreseen", "FullBacklog", "Health", "JobRecord", "Landed", "Outcome"),
            *("Page", "Ran", "Reason", "Schedule", "Simulation", "State"),
        ],
        "programs are given it, and make none",
    ),
    **dict.fromkeys(("Clock", "Limit", "Middleware", "PayloadCodec"), "programs write one, and Fairlane calls it"),
    **dict.fromkeys(("SystemClock", "Worker", "context"), "nothing of it takes a value of the program's"),
}
FOR_TOOLS = {
    "App.codec_of",
    "App.connected",
    "App.enqueue_one",
    "App.foresee",
    "App.in_force",
    "App.is_open_in",
    "App.make_worker",
    "JobClass.simulated",
    "ManualClock.sleep_until",
    "Operations.end_session",
    "Operations.is_session_ended",
    "Operations.seen_by",
    "RunTimes.draw",
    "Task.can_provide",
    "Workload.simulated",
    "WorkerOptions.serving",
    "WorkerOptions.time",
}
"""Public for other parts of Fairlane; the reference says so, or says nothing."""
LIMITS = {"AdaptiveConcurrency", "Backlog", "Backoff", "Breaker", "Concurrency", "Fair", "Policy", "Rate", "Sequence"}
"""Programs make these; their methods belong to the plan."""
MADE_BY_US = {"BoundTask", "Call", "HeldClaim", "Job", "JobContext", "Operations", "Queue", "Task", "Trial", "Values"}
"""Programs use these; their constructors are ours."""


# The program that is fed.


class World:
    """A program with a job of every kind, and something of everything that a parameter can be about."""

    def __init__(self, app: App, clock: ManualClock) -> None:
        self.app, self.clock = app, clock
        limits: list[Limit] = [Concurrency(5, by="account"), Rate(9, per="1s"), Backlog(10**6), Breaker(by="account")]
        self.ops = app.queue("ops", fair=Fair(by="account"), limits=limits)
        self.hand = app.queue("hand", keys=["account"])
        self.mail = app.queue("mail", fair=Fair(by="account"))
        self.wide = app.queue("wide", partitions=2)

        async def send(account: str, text: Any = "") -> Any:
            return None

        self.send = app.task(queue="mail", name="send")(send)
        self.held_task = app.task(queue="hand", name="held")(send)
        self.worked = app.task(queue="ops", name="worked")(send)
        self.spread = app.task(queue="wide", name="spread")(_nothing)
        self.schedule = app.schedule("0 9 * * *", self.send, "acme", name="daily")
        self.claims: list[HeldClaim] = []
        self.done: Job[Any]
        self.waiting: Job[Any]

    async def begin(self) -> World:
        await self.app.opened()
        await self.app.fire_schedules()
        self.done = await self.held_task.enqueue("acme")
        await (await self.hand.claim())[0].ack("well done")
        self.waiting = await self.worked.enqueue("acme")
        return self

    async def more_claims(self) -> bool:
        """Whether there were too few left, so that more were made."""
        if len(self.claims) >= 5:
            return False
        await self.app.enqueue_many([self.held_task.call("acme")] * 50)
        self.claims += await self.hand.claim(50, lease="1d")
        return True

    def held(self) -> HeldClaim:
        """A claim that nobody has settled: one that refused a value is given again."""
        while self.claims[-1].is_settled:
            self.claims.pop()
        return self.claims[-1]

    async def stored(self) -> tuple[Any, ...]:
        """What a refused call must leave as it was."""
        operations = self.app.operations
        jobs = await operations.jobs.list(JobFilter(), limit=1)
        audit = await operations.audit.list(limit=1)
        return jobs.jobs[:1], audit.entries[:1], (await self.app.values.scan()).items

    async def check(self) -> None:
        """Whatever was refused, the program works."""
        job = await self.send.enqueue("acme")
        assert await job.status() is State.READY
        (claim,) = await self.mail.claim()
        await claim.ack()


@dataclass
class Row:
    """How one callable is called."""

    of: Any
    """Whose signature says which parameters there are."""
    call: Callable[[World], Callable[..., Any]]
    good: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that work, or functions of the world that give them."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that `*` and `**` stand for, with what they may be given."""
    left_out: Mapping[str, Collection[str]] = field(default_factory=dict)
    """Values that would wait for ever."""
    called: str = ""
    """What errors call the parameter, if not by its name."""
    any_type: Collection[str] = ()
    """Parameters that take whatever they can make something of."""


def given(**arguments: Any) -> dict[str, Any]:
    return arguments


def a_task(world: World) -> Callable[..., Any]:
    """`@app.task(…)` of a fresh app, used as a program uses it."""

    def register(function: Any = _nothing, **options: Any) -> Any:
        return App("sqlite://").task(**options)(function)

    return register


def enqueued_with(world: World) -> Callable[..., Any]:
    """What `using` is given must also be storable."""

    async def enqueue(**options: Any) -> Any:
        is_routed = "partition" in options or "partition_key" in options
        if is_routed:
            return await world.spread.using(**options).enqueue()
        return await world.send.using(**options).enqueue("acme")

    return enqueue


def call_with(world: World) -> Callable[..., Any]:
    async def enqueue(**options: Any) -> Any:
        return await world.app.enqueue_many([world.send.call("acme").using(**options)], tx=options.get("tx"))

    return enqueue


def scheduled(world: World) -> Callable[..., Any]:
    app = App("sqlite://")
    task = app.task(name="t")(world.send.function)

    def declare(cron: Any = "0 9 * * *", what: Any = task, args: Any = "acme", **options: Any) -> Any:
        timed = (what, args) if options.get("every") is not None else (cron, what, args)
        return app.schedule(*timed, **options)

    return declare


def signal(kind: type[Exception]) -> Callable[[World], Callable[..., Any]]:
    """What a handler raises: refused where it is made, else the job goes on as it says."""

    def made(world: World) -> Callable[..., Any]:
        async def run(**arguments: Any) -> Any:
            raised, told = kind(**arguments), list[Exception]()
            app = App("sqlite://", clock=ManualClock())

            @app.task(name="t")
            async def t() -> None:
                if context().attempt == 1 and not told:
                    told.append(raised)
                    raise raised

            async with app:
                await t.enqueue()
                ran = (await run_until_idle(app))[0]
                assert ran.outcome in ("snoozed", "retry", "dead", "cancelled"), ran

        return run

    return made


def in_a_job(method: str) -> Callable[[World], Callable[..., Any]]:
    """A method of `JobContext`, called by a handler."""

    def called(world: World) -> Callable[..., Any]:
        async def run(**arguments: Any) -> Any:
            told: list[BaseException] = []
            app = App("sqlite://", clock=ManualClock())

            async def use() -> None:
                job = context()
                positional = [arguments["calls"]] if "calls" in arguments else []
                named = {name: value for name, value in arguments.items() if name != "calls"}
                answer = getattr(job, method)(*positional, **named)
                if inspect.isawaitable(answer):
                    await answer

            def use_blocking() -> None:
                asyncio.run(use()) if not method.endswith("_sync") else getattr(context(), method)(**arguments)

            used: Any = use_blocking if method.endswith("_sync") else use

            @app.task(name="t", max_attempts=1)
            async def t() -> None:
                try:
                    await (asyncio.to_thread(used) if method.endswith("_sync") else used())
                except BaseException as error:
                    told.append(error)

            app.queue("mail")
            app.task(queue="mail", name="send")(world.send.function)
            async with app:
                await t.enqueue()
                (ran,) = await run_until_idle(app)
            if told:
                raise told[0]
            assert ran.outcome == "done", ran

        return run

    return called


def methods(owner: Any, of: Callable[[World], Any], names: Mapping[str, Row | Mapping[str, Any]]) -> dict[str, Row]:
    found = {}
    for name, row in names.items():
        made = row if isinstance(row, Row) else own(row)
        found[f"{owner.__name__}.{name}"] = Row(
            getattr(owner, name),
            made.call if isinstance(row, Row) and row.of is not None else _bound(of, name),
            made.good,
            made.more,
            made.left_out,
            made.called,
            made.any_type,
        )
    return found


def own(good: Mapping[str, Any] | None = None, **options: Any) -> Row:
    """A row of `methods`, which knows what is called."""
    return Row(None, lambda world: print, good or {}, **options)


def _bound(of: Callable[[World], Any], name: str) -> Callable[[World], Callable[..., Any]]:
    return lambda world: getattr(of(world), name)


def made(kind: Any, /, **good: Any) -> Row:
    return Row(kind, lambda world: kind, good)


QUEUE = given(queue="ops")
KEYS = given(queue="ops", keys={"account": "acme"})
POLICY = Policy("q", Fair(by="account"), (Concurrency(2, by="account"),))
COMING = Workload(classes=(JobClass(name="a", keys={"account": "a"}, jobs=3),))

PURE: dict[str, Row] = {
    "App": made(App, url="sqlite://"),
    **methods(
        App,
        lambda world: App("sqlite://"),
        {
            "queue": given(name="q", partitions=2, partition_by="account"),
            "job": given(job=str(UUID(int=1))),
            "middleware": {"middleware": fairlane.worker.Middleware()},
            "move_to": given(url="sqlite://"),
        },
    ),
    "App.on_event": Row(App.on_event, lambda world: _heard, more={"kinds": Callable[..., Any]}),
    "App.task": Row(App.task, a_task, more=get_type_hints(TaskOptions), any_type=["unique", "keys"]),
    "App.schedule": Row(
        App.schedule,
        scheduled,
        more=given(cron=str, what=Task | BoundTask | Call, args=Any),
    ),
    "Concurrency": made(fairlane.Concurrency, max=5, by="account"),
    "Rate": made(fairlane.Rate, limit=5, per="1s", by="account"),
    "AdaptiveConcurrency": made(fairlane.AdaptiveConcurrency),
    "Breaker": made(fairlane.Breaker),
    "Backlog": made(fairlane.Backlog, max=5),
    "Sequence": made(fairlane.Sequence, by="account"),
    "Fair": Row(fairlane.Fair, lambda world: fairlane.Fair, given(by="account")),
    "Unique": made(fairlane.Unique, key="a"),
    "Backoff": made(Backoff),
    "Policy": made(Policy, queue="q"),
    "ManualClock": made(ManualClock),
    **methods(ManualClock, lambda world: ManualClock(), {"advance": given(by="1s"), "set": given(moment=5)}),
    "QueueShare": made(fairlane.worker.QueueShare, name="mail"),
    **methods(fairlane.worker.QueueShare, lambda world: fairlane.worker.QueueShare, {"parse": given(text="mail")}),
    "WorkerOptions": made(fairlane.worker.WorkerOptions),
    "JobClass": made(JobClass, name="a"),
    "RunTimes": made(fairlane.simulation.RunTimes, exponential="1s"),
    "Workload": made(Workload, classes=COMING.classes),
    "Workload.parse": Row(
        Workload.parse, lambda world: Workload.parse, given(text='{"classes": [{"name": "a"}]}'), called="the workload"
    ),
    "JobFilter": made(JobFilter),
    "Retry": Row(fairlane.Retry, signal(fairlane.Retry)),
    "Snooze": Row(fairlane.Snooze, signal(fairlane.Snooze), given(delay=1)),
    "Dead": Row(fairlane.Dead, signal(fairlane.Dead)),
    "Cancel": Row(fairlane.Cancel, signal(fairlane.Cancel)),
    **{
        f"JobContext.{name}": Row(getattr(JobContext, name), in_a_job(name), good, more, called="tx=int")
        for name, good, more in (
            ("enqueue", {}, {"calls": Call}),
            ("put", given(key="k", value=1), {}),
            ("delete", given(key="k"), {}),
            ("progress", given(fraction=0.5), {}),
            ("progress_sync", given(fraction=0.5), {}),
            ("ack", given(tx=5), {}),
            ("ack_sync", given(tx=5), {}),
        )
    },
    "partition_for": made(fairlane.policy.partition_for, key="acme", partitions=4),
    "partition_number": made(fairlane.policy.partition_number, key="acme"),
    "payload_type": made(fairlane.codec.payload_type, kind=World, encode=str, decode=str),
    "simulate": made(fairlane.simulation.simulate, policy=POLICY, workload=COMING),
    "run_worker": Row(
        fairlane.worker.run_worker,
        lambda world: fairlane.worker.run_worker,
        given(app=App("sqlite://")),
        left_out={"options": ["None"]},
    ),
    "arrivals": made(arrivals, jobs=3),
    "try_policy": Row(try_policy, lambda world: _try_policy, given(queue=POLICY), more={"coming": JobClass | Workload}),
    **methods(
        Trial,
        lambda world: try_policy(POLICY, arrivals(5, account="a")),
        {
            **{
                name: own(more={"account": str | int | None})
                for name in ("finished_after", "left", "longest_wait", "most_in_flight", "runs", "share")
            },
            "starts_within": own(given(window="1s"), more={"account": str | int | None}),
        },
    ),
}


def _heard(kinds: Any) -> None:
    made = App("sqlite://").on_event(kinds)
    if inspect.isclass(kinds):
        made(print)


def _try_policy(queue: Any, coming: Any = COMING, **options: Any) -> Any:
    return try_policy(queue, coming, **options)


PRODUCING: dict[str, Row] = {
    **methods(
        App,
        lambda world: world.app,
        {
            "enqueue_many": given(calls=lambda world: [world.send.call("acme")]),
            "enqueue_many_sync": given(calls=lambda world: [world.send.call("acme")]),
            "enqueue_stream": given(calls=lambda world: [world.send.call("acme")]),
            "run_blocking": own(given(work=lambda world: _nothing())),
            "worker": {},
        },
    ),
    "BoundTask.using": Row(BoundTask.using, enqueued_with, any_type=["unique", "id"]),
    "Call.using": Row(
        Call.using,
        call_with,
        more={
            name: get_type_hints(BoundTask.using)[name]
            for name in inspect.signature(BoundTask.using).parameters
            if name not in ("self", "partition", "partition_key")
        },
        any_type=["unique", "id"],
    ),
    **methods(
        BoundTask,
        lambda world: world.send,
        {
            **{
                name: own(given(account="acme"), more={"account": Any, "text": Any})
                for name in ("call", "dry_run", "enqueue", "enqueue_sync")
            },
            "enqueue_many": given(calls=lambda world: [world.send.call("acme")]),
            "enqueue_many_sync": given(calls=lambda world: [world.send.call("acme")]),
        },
    ),
}
HOLDING: dict[str, Row] = {
    **methods(
        Queue,
        lambda world: world.hand,
        {
            "claim": {},
            "wait": Row(Queue.wait, lambda world: world.ops.wait, left_out={"timeout": ["5", "1.5"]}),
            "explain": own(more={"account": Any}),
            "pace": own(more={"account": Any}),
            "partition_for": given(key="acme"),
            "renew": given(claims=lambda world: [world.held()]),
            "ack": given(claims=lambda world: [world.held()]),
        },
    ),
    "Effects": Row(Effects, lambda world: lambda **given: world.held().ack(effects=Effects(**given))),
    **methods(
        HeldClaim,
        lambda world: world.held(),
        {
            "ack": own(any_type=["result"]),
            "retry": {},
            "snooze": given(delay=1),
            "dead": given(reason="no"),
            "cancel": {},
            "release": {},
            "renew": {},
        },
    ),
    **methods(Job, lambda world: world.done, {"result": {}, "result_sync": {}, "replay": {}}),
    "App.fire_schedules": Row(App.fire_schedules, lambda world: world.app.fire_schedules),
}


def _pace(world: World) -> Callable[..., Any]:
    return lambda timeout=None, **keys: world.hand.pace(timeout, **keys)


HOLDING["Queue.pace"].call = _pace

VALUES_STORE: dict[str, Row] = methods(
    Values,
    lambda world: world.app.values,
    {
        name + form: good
        for form in ("", "_sync")
        for name, good in {
            "get": given(key="k"),
            "put": given(key="k", value=1),
            "delete": given(key="k"),
            "compare_and_set": given(key="k", expected=1, value=2),
            "scan": {},
        }.items()
    },
)


def _section(noun: str) -> Callable[[World], Any]:
    return lambda world: getattr(world.app.operations, noun)


OPERATING_ON: dict[str, dict[str, Row | Mapping[str, Any]]] = {
    "audit": {
        "list": {},
    },
    "jobs": {
        "cancel": given(selection=JobFilter(task="nobody")),
        "explain": given(job=lambda world: world.waiting.id),
        "export": given(filter=JobFilter()),
        "force": given(ids=lambda world: [world.done.id]),
        "list": given(filter=JobFilter()),
        "purge": given(selection=JobFilter(task="nobody")),
        "replay": given(selection=JobFilter(task="nobody")),
        "retry": given(selection=JobFilter(task="nobody")),
        "show": given(job=lambda world: world.waiting.id),
    },
    "keys": {
        "list": QUEUE,
        "rank": {},
        "show": KEYS,
        "show_several": given(queue="ops", keys=[{"account": "acme"}]),
    },
    "limits": {
        "clear": {**KEYS, "limit": "concurrency"},
        "list": QUEUE,
        "set": {**KEYS, "limit": "concurrency", "value": 3},
    },
    "overrides": {
        "list": {},
        "restore": given(queue="ops", overrides=[]),
    },
    "partitions": {
        "change": own(given(queue="hand", to=1), called="looks at x"),
    },
    "policies": {
        "apply": {},
        "diff": {},
        "show": {},
    },
    "queues": {
        "explain": QUEUE,
        "pause": QUEUE,
        "resume": QUEUE,
        "show": QUEUE,
        "suspend": QUEUE,
        "unsuspend": QUEUE,
    },
    "schedules": {
        "pause": given(name="daily"),
        "resume": given(name="daily"),
        "trigger": given(name="daily"),
    },
    "trials": {
        "run": given(policies=["ops"], workload=COMING),
    },
    "weights": {
        "boost": {**KEYS, "factor": 2},
        "clear": KEYS,
        "set": {**KEYS, "weight": 2},
    },
}
OPERATING: dict[str, Row] = methods(
    Operations,
    lambda world: world.app.operations,
    {
        "metrics": {},
        "overview_beside": given(keys={"ops": [{"account": "acme"}]}),
    },
)
for _noun, _rows in OPERATING_ON.items():
    OPERATING |= methods(SECTIONS[_noun], _section(_noun), _rows)
TESTING: dict[str, Row] = {
    "assert_enqueued": Row(
        fairlane.testing.assert_enqueued,
        lambda world: _asserted,
        given(app=lambda world: world.app, expected=lambda world: world.held_task),
    ),
    "enqueued_jobs": made(fairlane.testing.enqueued_jobs, app=lambda world: world.app),
    "immediate": made(fairlane.testing.immediate, app=lambda world: world.app),
    "in_memory": made(fairlane.testing.in_memory, app=lambda world: App("sqlite://")),
    "run_for": made(fairlane.testing.run_for, app=lambda world: world.app, duration=0),
    "run_until_idle": made(fairlane.testing.run_until_idle, app=lambda world: world.app),
}


async def _asserted(**arguments: Any) -> Any:
    try:
        return await fairlane.testing.assert_enqueued(**arguments)
    except AssertionError:
        return "not so"


GROUPS: dict[str, dict[str, Row]] = {
    "producing": PRODUCING,
    "holding": HOLDING,
    "values": VALUES_STORE,
    "operating": OPERATING,
    "testing": TESTING,
}


# What is public, by the signatures.


def public_callables() -> Iterator[str]:
    names = {name: getattr(fairlane.testing, name) for name in fairlane.testing.__all__}
    sections = {kind.__name__: kind for kind in SECTIONS.values()}
    for name, found in (PUBLIC | names | sections).items():
        if name in NOT_GIVEN or not callable(found):
            continue
        if inspect.isclass(found) and issubclass(found, FairlaneError):
            continue
        if name not in {*MADE_BY_US, *sections} and parameters_of(found):
            yield name
        if inspect.isclass(found) and name not in LIMITS:
            yield from (
                f"{name}.{each}"
                for each in dir(found)
                if not each.startswith("_")
                and inspect.isroutine(method := getattr(found, each))
                and not hasattr(Exception, each)
                and not hasattr(msgspec.Struct, each)
                and parameters_of(method)
                and not (name == "Task" and hasattr(BoundTask, each))
            )


def parameters_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "_misplaced")]


def fed(row: Row) -> dict[str, Any]:
    """The parameters of a row, and what each may be by its annotation."""
    function = row.of
    if inspect.isclass(function) and not issubclass(function, msgspec.Struct):
        function = function.__init__
    hints = get_type_hints(function, localns={"Call": Call, "Effects": Effects})
    signature = inspect.signature(row.of)
    variadic = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    plain = [name for name in parameters_of(row.of) if signature.parameters[name].kind not in variadic]
    return {name: hints.get(name, Any) for name in plain} | dict(row.more)


def allows(kind: Any, value: Any) -> bool:
    """Whether a value is what an annotation says."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in (Any, object) or isinstance(kind, TypeVar):
        return True
    if kind is None or kind is type(None):
        return value is None
    if origin in (Union, types.UnionType):
        return any(allows(each, value) for each in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is Callable or origin is types.FunctionType or kind is Callable or origin is _CALLABLE:
        return callable(value)
    if origin is type:
        return inspect.isclass(value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            allows(arguments[0], name) and allows(arguments[1], each) for name, each in value.items()
        )
    if origin is not None and issubclass(origin, Iterable):
        is_text = isinstance(value, str) and origin is not tuple and arguments[0] is str
        if origin is tuple and not isinstance(value, (tuple, list)):
            return False
        is_many = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
        return is_text or (is_many and all(allows(arguments[0], each) for each in value))
    kind = origin or kind
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in dir(kind) if not name.startswith("_"))
    if kind is bool:
        return isinstance(value, bool)
    if kind in (int, float):
        return isinstance(value, int | float if kind is float else int) and not isinstance(value, bool)
    return isinstance(value, kind)


_CALLABLE: Any = get_origin(Callable[[], None])


# What is answered.


async def answered(function: Callable[..., Any], arguments: Mapping[str, Any], value: object) -> None:
    """Call it, and see it through."""
    if getattr(function, "__name__", "").endswith("_sync") or getattr(function, "__name__", "") == "run_blocking":
        await asyncio.to_thread(function, **arguments)
        return
    answer = function(**arguments)
    if answer is value:
        return
    if inspect.isasyncgen(answer):
        async for _ in answer:
            pass
    elif hasattr(answer, "__aenter__") and not isinstance(answer, App):
        async with answer:
            pass
    elif hasattr(answer, "__enter__"):
        with answer:
            pass
    elif inspect.isawaitable(answer):
        await answer


async def wrong_answers(
    name: str, row: Row, world: World, counts: dict[str, int], *, is_stored: bool = True
) -> list[str]:
    """Whatever is neither a refusal of ours nor a value that may be given."""
    wrong: list[str] = []
    is_quick = is_stored and world.app.url == "sqlite://"
    before = None
    for parameter, kind in fed(row).items():
        for shown, make in VALUES.items():
            if shown in row.left_out.get(parameter, ()):
                continue
            if is_stored and name.startswith(("HeldClaim", "Queue", "Effects")) and await world.more_claims():
                before = None
            value = make()
            good = {each: _made(arg, world) for each, arg in row.good.items() if each != parameter}
            if is_quick and before is None:
                before = await world.stored()
            counts["asked"] += 1
            problem = await _problem(row, world, {**good, parameter: value}, parameter, kind, value)
            if problem != REFUSED:
                before = None
            elif is_quick and await world.stored() != before:
                problem, before = "was refused, and something was stored", None
            if problem not in (None, REFUSED):
                counts["wrong"] += 1
                wrong.append(f"{name}({parameter}={shown}) {problem}")
            for each in (value, good.get("work")):
                if inspect.iscoroutine(each):
                    each.close()
    return wrong


def _made(argument: Any, world: World | None) -> Any:
    is_of_world = inspect.isfunction(argument) and [*inspect.signature(argument).parameters] == ["world"]
    return argument(world) if is_of_world else argument


REFUSED = "was refused as it should be"


async def _problem(
    row: Row, world: Any, arguments: Mapping[str, Any], parameter: str, kind: Any, value: Any
) -> str | None:
    try:
        async with asyncio.timeout(PATIENCE):
            await answered(row.call(world), arguments, value)
    except FairlaneError as error:
        words = str(error)
        if len(words) > 2_500:
            return f"was refused in {len(words):,} characters"
        if not _names(words, parameter, value) and not (row.called and row.called in words):
            return f"was refused without being named: {words}"
    except Exception as error:
        return f"raised {type(error).__name__}: {str(error)[:150]}"
    else:
        if parameter not in row.any_type and not allows(kind, value):
            return "was accepted"
        return None
    return REFUSED


def _names(words: str, parameter: str, value: Any) -> bool:
    """An error says which parameter is meant, or shows what it was given."""
    parts = [value, *(value if isinstance(value, Iterable) and not isinstance(value, str | bytes) else ())]
    if isinstance(value, Mapping):
        parts += value.values()
    named = parameter in words or (parameter == "keys" and "account" in words)
    return named or any(repr(part)[:30] in words or type(part).__name__ in words for part in parts)


# The tests.


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[World]:
    clock = ManualClock()
    world = World(App(url, clock=clock), clock)
    async with world.app:
        yield await world.begin()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    return "sqlite://" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


@pytest.mark.parametrize("group", GROUPS)
async def test_a_wrong_value_is_refused_in_our_words(group: str, url: str) -> None:
    wrong: list[str] = []
    async with opened(url) as world:
        for name, row in GROUPS[group].items():
            wrong += await wrong_answers(name, row, world, {"asked": 0, "wrong": 0})
            await world.check()
    assert wrong == []


@pytest.mark.parametrize("name", PURE)
async def test_a_wrong_value_in_a_declaration_is_refused_in_our_words(name: str) -> None:
    clock = ManualClock()
    world = World(App("sqlite://", clock=clock), clock)
    assert await wrong_answers(name, PURE[name], world, {"asked": 0, "wrong": 0}, is_stored=False) == []


def test_every_public_callable_is_fed_wrong_values() -> None:
    rows = {name for group in (PURE, *GROUPS.values()) for name in group}
    assert {*public_callables()} - rows - FOR_TOOLS == set()
