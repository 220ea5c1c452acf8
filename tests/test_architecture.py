"""The rules of the house that a machine can hold. Each one is also shown an offender, so none passes by being blind."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"

# Imports go downwards or stay on their level; the lowest level comes first. A new module joins a line here.
LAYERS: list[set[str]] = [
    {"clock", "errors", "events", "job", "loop_thread", "parameters", "redaction", "waits"},
    {"policy"},
    {"scheduler", "stats"},
    {"store"},
    {"codec", "effects", "enqueue", "task", "telemetry"},
    {"cron", "worker"},
    {"operations", "queue", "simulation"},
    {"app"},
    {"cli", "dashboard", "demo", "forward", "integrations", "testing"},
    {"fairlane"},  # the package itself: its public names come from everywhere, and nothing inside asks it for them
]
PURE = (
    "fairlane.policy",
    "fairlane.scheduler",
    "fairlane.stats",
    "fairlane.cron.recurrence",
    "fairlane.simulation.measures",
    "fairlane.simulation.memory",
    "fairlane.simulation.run",
)
CONCRETE_STORES = ("fairlane.store.postgres", "fairlane.store.sqlite")
KNOWS_CONCRETE_STORES = {"app", "cli", "demo", "testing"}
# fmt: off
EFFECTS = {
    "aiosqlite", "asyncio", "asyncpg", "concurrent", "fcntl", "http", "io", "logging", "multiprocessing", "os",
    "pathlib", "psycopg", "random", "secrets", "select", "selectors", "shutil", "signal", "socket", "sqlite3",
    "ssl", "subprocess", "tempfile", "threading", "time", "urllib",
}
# fmt: on
WALL_CLOCKS = {
    "datetime.date.today",
    "datetime.datetime.now",
    "datetime.datetime.today",
    "datetime.datetime.utcnow",
    "time.time",
    "time.time_ns",
}
SLEEPS = {"anyio.sleep", "asyncio.sleep", "time.sleep", "trio.sleep"}
POLLS = "tests.waiting"
"""The one place where a test rests between two looks."""
RUNS_SQL = {"execute", "executemany", "executescript", "fetch", "fetchrow", "fetchval"}
VAGUE_NAMES = {"base2", "common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
LONGEST_MODULE = 900
ACTIVITIES_ALLOWED = {"testing", "tracing"}
PUBLIC_MODULES = (
    "fairlane.clock",
    "fairlane.codec",
    "fairlane.effects",
    "fairlane.errors",
    "fairlane.events",
    "fairlane.forward",
    "fairlane.integrations",
    "fairlane.job",
)
"""Modules that programs import by name."""
LEAST_SHARED = 120
"""Lines of a module that only one other imports; a smaller one belongs to that, or has its reason here."""
SMALL_ROOMS = {
    "fairlane.cli": "a command of its own: `fairlane --help` lists it, and only its import is paid for",
    "fairlane.dashboard.server": "what `fairlane dashboard` runs, and no site that mounts the pages",
    "fairlane.demo.app": "a user's program, run by the workers of the demo",
    "fairlane.integrations.django": "parts of Django that a project may leave out",
    "fairlane.store.explain": "what is read, beside scheduler/explain.py, where it is judged",
    "fairlane.store.postgres.grants": "rights, read beside grants.sql",
    "fairlane.testing.postgres_guard": "a program of its own",
}


@dataclass(frozen=True)
class Module:
    name: str  # dotted, as it is imported
    text: str
    is_package: bool = False

    @property
    def unit(self) -> str:
        """The line of the layer table that it belongs to: `fairlane.store.sqlite.store` is of `store`."""
        return self.name.split(".")[1] if "." in self.name else self.name

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Every import, wherever it stands, with its line; `from a import b` counts as `a.b`."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)

    @cached_property
    def aliases(self) -> dict[str, str]:
        """What each imported name stands for."""
        found: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    top = alias.name.partition(".")[0]
                    found[alias.asname or top] = alias.name if alias.asname else top
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        return found

    def meaning(self, node: ast.expr) -> str:
        """The full dotted name that an expression refers to, or nothing."""
        match node:
            case ast.Name(id=name):
                return self.aliases.get(name, "")
            case ast.Attribute(value=value, attr=attr):
                owner = self.meaning(value)
                return f"{owner}.{attr}" if owner else ""
        return ""


Rule = Callable[[Module], Iterable[str]]


def modules_under(folder: Path, root: Path) -> list[Module]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = list(path.relative_to(root).with_suffix("").parts)
        is_package = parts[-1] == "__init__"
        found.append(Module(".".join(parts[:-1] if is_package else parts), path.read_text(), is_package))
    return found


def level_of(unit: str) -> int | None:
    return next((level for level, units in enumerate(LAYERS) if unit in units), None)


def imports_upwards(module: Module) -> Iterator[str]:
    own = level_of(module.unit)
    if own is None:
        yield f"{module.name} is in no layer: add it to LAYERS"
        return
    for line, name in module.imports():
        if name.partition(".")[0] != "fairlane":
            continue
        target = name.split(".")[1] if "." in name else "fairlane"
        level = level_of(target)
        if (len(LAYERS) - 1 if level is None else level) > own:
            yield f"{module.name}:{line} imports {name}, which is above it"


def knows_a_concrete_store(module: Module) -> Iterator[str]:
    if module.unit in KNOWS_CONCRETE_STORES:
        return
    for line, name in module.imports():
        for store in CONCRETE_STORES:
            if is_within(name, store) and not is_within(module.name, store):
                yield f"{module.name}:{line} imports {name}; take a store from whoever composes the program"


def is_a_surface_that_touches_a_store(module: Module) -> Iterator[str]:
    if module.unit != "dashboard":
        return
    for line, name in module.imports():
        if is_within(name, "fairlane.store"):
            yield f"{module.name}:{line} imports {name}; what a page shows or does goes through operations"


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def does_io_in_the_pure_core(module: Module) -> Iterator[str]:
    if not any(is_within(module.name, room) for room in PURE):
        return
    for line, name in module.imports():
        if name.partition(".")[0] in EFFECTS:
            yield f"{module.name}:{line} imports {name}, but {module.name} is pure"
    for node in ast.walk(module.tree):
        match node:
            case ast.Call(func=ast.Name(id="input" | "open" | "print" as name)):
                yield f"{module.name}:{node.lineno} calls {name}(), but {module.name} is pure"


def reads_the_wall_clock(module: Module) -> Iterator[str]:
    if module.name == "fairlane.clock":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute | ast.Name) and module.meaning(node) in WALL_CLOCKS:
            yield f"{module.name}:{node.lineno} reads {module.meaning(node)}; take a Clock"


def is_composed_text(node: ast.expr) -> bool:
    """Whether a text is put together in Python: an f-string, `+`, `%`, or `.format(…)`."""
    match node:
        case ast.JoinedStr():
            return any(isinstance(part, ast.FormattedValue) for part in node.values)
        case ast.BinOp(left=left, op=ast.Add() | ast.Mod(), right=right):
            return any(
                isinstance(side, ast.Constant | ast.JoinedStr) or is_composed_text(side) for side in (left, right)
            )
        case ast.Call(func=ast.Attribute(attr="format", value=ast.Constant())):
            return True
        case ast.IfExp(body=body, orelse=orelse):
            return is_composed_text(body) or is_composed_text(orelse)
    return False


def composes_sql(module: Module) -> Iterator[str]:
    for scope in ast.walk(module.tree):
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        composed = {
            target.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and is_composed_text(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            match node:
                case ast.Call(func=ast.Attribute(attr=method), args=[statement, *_]) if method in RUNS_SQL:
                    named = isinstance(statement, ast.Name) and statement.id in composed
                    if (named and not isinstance(scope, ast.Module)) or is_composed_text(statement):
                        yield f"{module.name}:{node.lineno} composes SQL for {method}(); write it in a .sql file"


def sleeps(module: Module) -> Iterator[str]:
    if module.name == POLLS:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and module.meaning(node.func) in SLEEPS:
            match node.args:
                case [ast.Constant(value=0)]:
                    continue
            yield f"{module.name}:{node.lineno} sleeps; wait for the event itself, or move a fake clock"


def is_too_long(module: Module) -> Iterator[str]:
    lines = module.text.count("\n")
    if lines > LONGEST_MODULE:
        yield f"{module.name} has {lines} lines, more than {LONGEST_MODULE}"


def has_a_vague_name(module: Module) -> Iterator[str]:
    if module.name.rpartition(".")[2].strip("_") in VAGUE_NAMES:
        yield f"{module.name} does not say what it holds"


def is_named_after_an_activity(module: Module) -> Iterator[str]:
    leaf = module.name.rpartition(".")[2]
    if leaf.endswith("ing") and leaf not in ACTIVITIES_ALLOWED:
        yield f"{module.name} says what somebody does there, not what is kept there"


def exports_though_it_is_private(module: Module) -> Iterator[str]:
    is_public = any(is_within(module.name, room) for room in PUBLIC_MODULES)
    if exports(module) is not None and not module.is_package and not is_public:
        yield f"{module.name} has an __all__; only packages and public modules have one"


def is_a_small_room(modules: list[Module]) -> Iterator[str]:
    """Small modules that one other imports: its only importer could hold them."""
    names = {module.name for module in modules}
    importers: dict[str, set[str]] = {name: set() for name in names}
    for module in modules:
        for _, name in module.imports():
            target = name if name in names else name.rpartition(".")[0]
            if target in names and target != module.name:
                importers[target].add(module.name)
    for module in modules:
        lines = module.text.count("\n")
        if module.is_package or lines >= LEAST_SHARED or len(importers[module.name]) != 1:
            continue
        if not any(is_within(module.name, room) for room in SMALL_ROOMS):
            yield f"{module.name} has {lines} lines and one importer, {importers[module.name].pop()}"


def exports(module: Module) -> list[str] | None:
    for node in module.tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return list(ast.literal_eval(value))
            case ast.AnnAssign(target=ast.Name(id="__all__"), value=ast.expr() as value):
                return list(ast.literal_eval(value))
    return None


def bound_names(module: Module) -> set[str]:
    """The public names that a module makes or takes from elsewhere in Fairlane."""
    names: set[str] = set()
    for node in module.tree.body:
        match node:
            case ast.ImportFrom(module=str(origin), names=aliases) if origin.partition(".")[0] == "fairlane":
                names |= {alias.asname or alias.name for alias in aliases}
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return {name for name in names if not name.startswith("_")}


def house_order(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then the rest: the order that ruff (RUF022) writes."""
    return not name.isupper(), not name[:1].isupper(), name


def misstates_its_exports(module: Module) -> Iterator[str]:
    declared = exports(module)
    if declared is None:
        if module.is_package and bound_names(module):
            yield f"{module.name} has public names and no __all__"
        return
    if declared != sorted(set(declared), key=house_order):
        yield f"{module.name}.__all__ is not sorted, or says a name twice"
    public = {name for name in declared if not name.startswith("_")}
    yield from (f"{module.name}.__all__ names {name}, which is not there" for name in public - bound_names(module))
    if module.is_package:
        yield from (f"{module.name}.__all__ lacks {name}" for name in bound_names(module) - public)


def offences(rule: Rule, modules: Iterable[Module]) -> list[str]:
    return sorted({offence for module in modules for offence in rule(module)})


@pytest.fixture(scope="module")
def source() -> list[Module]:
    return modules_under(SOURCE / "fairlane", SOURCE)


def test_imports_only_go_downwards(source: list[Module]) -> None:
    assert offences(imports_upwards, source) == []


def test_only_the_composition_root_knows_a_concrete_store(source: list[Module]) -> None:
    assert offences(knows_a_concrete_store, source) == []


def test_the_dashboard_never_touches_a_store(source: list[Module]) -> None:
    assert offences(is_a_surface_that_touches_a_store, source) == []


def test_the_policy_and_the_scheduler_do_no_io(source: list[Module]) -> None:
    assert offences(does_io_in_the_pure_core, source) == []


def test_only_the_clock_reads_the_time(source: list[Module]) -> None:
    assert offences(reads_the_wall_clock, source) == []


def test_no_sql_is_composed_in_python(source: list[Module]) -> None:
    assert offences(composes_sql, source) == []


def test_no_module_is_longer_than_it_can_be_read(source: list[Module]) -> None:
    assert offences(is_too_long, [*source, *modules_under(ROOT / "tests", ROOT)]) == []


def test_every_module_is_named_for_what_it_holds(source: list[Module]) -> None:
    assert offences(has_a_vague_name, source) == []


def test_no_module_is_named_after_an_activity(source: list[Module]) -> None:
    assert offences(is_named_after_an_activity, source) == []


def test_only_packages_and_public_modules_list_their_exports(source: list[Module]) -> None:
    assert offences(exports_though_it_is_private, source) == []


def test_no_small_module_has_a_single_importer_without_a_reason(source: list[Module]) -> None:
    assert sorted(is_a_small_room(source)) == []


def test_a_small_module_with_one_importer_is_seen() -> None:
    two = [Module("fairlane.a", "from fairlane.b import x\n"), Module("fairlane.b", "x = 1\n")]
    assert list(is_a_small_room(two)) == ["fairlane.b has 1 lines and one importer, fairlane.a"]


def test_every_export_list_is_complete_and_sorted(source: list[Module]) -> None:
    assert offences(misstates_its_exports, source) == []


def test_no_test_sleeps() -> None:
    assert offences(sleeps, modules_under(ROOT / "tests", ROOT)) == []


OFFENDERS: list[tuple[Rule, str, str]] = [
    (imports_upwards, "fairlane.policy.fair", "from fairlane.store import protocol"),
    (imports_upwards, "fairlane.policy.fair", "def late():\n    import fairlane.worker.settlements"),
    (imports_upwards, "fairlane.worker.settlements", "from fairlane import App"),
    (imports_upwards, "fairlane.surprise", ""),
    (knows_a_concrete_store, "fairlane.worker.worker", "from fairlane.store.sqlite.store import SqliteStore"),
    (knows_a_concrete_store, "fairlane.store.postgres.store", "from fairlane.store import sqlite"),
    (is_a_surface_that_touches_a_store, "fairlane.dashboard.api", "from fairlane.store.protocol import Store"),
    (does_io_in_the_pure_core, "fairlane.scheduler.plan", "import time"),
    (does_io_in_the_pure_core, "fairlane.policy.retry", "from random import random"),
    (does_io_in_the_pure_core, "fairlane.policy.retry", "def f():\n    print(1)"),
    (reads_the_wall_clock, "fairlane.job", "import datetime as dt\nnow = dt.datetime.now(dt.UTC)"),
    (reads_the_wall_clock, "fairlane.job", "from datetime import datetime\nread = datetime.utcnow"),
    (reads_the_wall_clock, "fairlane.worker.worker", "from time import time as t\nnow = t()"),
    (composes_sql, "fairlane.store.migrations", 'async def f(c, t):\n    await c.execute(f"drop table {t}")'),
    (composes_sql, "fairlane.store.migrations", 'def f(c, t):\n    c.fetchval("select 1 from %s" % t)'),
    (composes_sql, "fairlane.store.migrations", 'def f(c, t):\n    c.fetch("select 1 from " + t)'),
    (composes_sql, "fairlane.store.migrations", 'def f(c, t):\n    c.executescript("drop table {}".format(t))'),
    (composes_sql, "fairlane.store.migrations", 'def f(c, t):\n    sql = f"drop table {t}"\n    c.execute(sql)'),
    (is_too_long, "fairlane.app", "\n" * (LONGEST_MODULE + 1)),
    (has_a_vague_name, "fairlane.store.utils", ""),
    (has_a_vague_name, "fairlane._helpers", ""),
    (is_named_after_an_activity, "fairlane.store.gathering", ""),
    (exports_though_it_is_private, "fairlane.store.rows", '__all__ = ["a"]\na = 1'),
    (misstates_its_exports, "fairlane", '__all__ = ["b", "a"]\na = 1\nb = 1'),
    (misstates_its_exports, "fairlane", "from fairlane.app import App\n__all__: list[str] = []"),
    (misstates_its_exports, "fairlane", '__all__ = ["Absent"]'),
    (misstates_its_exports, "fairlane", "from fairlane.app import App"),
    (sleeps, "tests.test_x", "from asyncio import sleep\nasync def test():\n    await sleep(0.1)"),
    (sleeps, "tests.test_x", "import time\ntime.sleep(1)"),
]


@pytest.mark.parametrize(("rule", "name", "text"), OFFENDERS)
def test_every_rule_sees_its_offender(rule: Rule, name: str, text: str) -> None:
    assert offences(rule, [Module(name, text, is_package=name == "fairlane")])


INNOCENTS: list[tuple[Rule, str, str]] = [
    (
        imports_upwards,
        "fairlane.store.protocol",
        "from fairlane import errors\nfrom fairlane.scheduler.plan import Plan",
    ),
    (imports_upwards, "fairlane", "from fairlane.cli import main"),
    (knows_a_concrete_store, "fairlane.app", "from fairlane.store.sqlite.store import SqliteStore"),
    (knows_a_concrete_store, "fairlane.store.sqlite.claims", "from fairlane.store.sqlite.store import SqliteStore"),
    (is_a_surface_that_touches_a_store, "fairlane.dashboard.page", "from fairlane.operations import JobFilter"),
    (does_io_in_the_pure_core, "fairlane.policy.retry", "from datetime import datetime, timedelta"),
    (does_io_in_the_pure_core, "fairlane.store.migrations", "import os"),
    (reads_the_wall_clock, "fairlane.clock", "import time\nnow = time.time()"),
    (reads_the_wall_clock, "fairlane.worker.worker", "import time\nnow = time.monotonic()"),
    (composes_sql, "fairlane.store.migrations", 'def f(c, t):\n    c.execute("delete from job where id = $1", t)'),
    (is_named_after_an_activity, "fairlane.telemetry.telemetry", ""),
    (exports_though_it_is_private, "fairlane.errors", '__all__ = ["a"]\na = 1'),
    (sleeps, "tests.test_x", "import asyncio\nasync def test():\n    await asyncio.sleep(0)"),
    (misstates_its_exports, "fairlane.job", '__all__ = ["MAX", "Job", "a"]\nMAX = 1\nclass Job: ...\na = 1'),
    (misstates_its_exports, "fairlane", 'from fairlane.app import App\nimport os\n__all__ = ["App"]'),
]


@pytest.mark.parametrize(("rule", "name", "text"), INNOCENTS)
def test_no_rule_accuses_the_innocent(rule: Rule, name: str, text: str) -> None:
    assert offences(rule, [Module(name, text, is_package=name == "fairlane")]) == []
