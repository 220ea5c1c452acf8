"""Which database a command is about: the one of an app, or of a URL."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from difflib import get_close_matches
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import TypeVar

from fairlane.app import App
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.operations import Operations
from fairlane.redaction import Audience, Surface
from fairlane.store.protocol import Store

T = TypeVar("T")


def app_of(place: str | None, url: str | None) -> App:
    """The app named on the command line, or an app without queues on the URL given there or in FAIRLANE_URL."""
    if place and url:
        raise ConfigurationError("give an app (module:app) or --url, not both")
    if place:
        return load_app(place)
    url = url or os.environ.get("FAIRLANE_URL")
    if not url:
        raise ConfigurationError("which database? Give --app module:app or --url, or set FAIRLANE_URL")
    return App(url)


@asynccontextmanager
async def existing_store(app: App) -> AsyncIterator[Store]:
    """The app's store, open, with nothing declared: looking changes nothing, and creates no SQLite file either."""
    _require_file(app.url)
    store = app.make_store()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def operations_on(app: App, surface: Surface = Surface.CLI) -> AsyncIterator[Operations]:
    """What can be done on an app's database, by whoever runs this command: nothing is declared by those who look."""
    async with existing_store(app) as store:
        yield Operations(Looking(app, store), Audience(surface, app.actor))


class Looking:
    """What `Operations` ask of, on an app's open store."""

    def __init__(self, app: App, store: Store) -> None:
        self._store = store
        self.clock = app.clock
        self.declared_policies = app.declared_policies
        self.known_tasks = app.known_tasks
        self.actor = app.actor
        self.redact = app.redact
        self.forwarded = app.forwarded if app.queues or app.known_tasks() else None

    async def opened(self) -> Store:
        return self._store


def _require_file(url: str) -> None:
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:") and path.is_dir():
        raise ConfigurationError(f"{url} is a directory; give the file in it, such as {url.rstrip('/')}/fairlane.db")
    if url.startswith("sqlite:") and not path.is_file():
        raise ConfigurationError(f"{url} does not exist yet; it is made when the app or a worker first uses it")


def load_app(place: str) -> App:
    """The App that `place` names. `shop` alone stands for `shop:app`; modules are also looked for in this folder."""
    return load_object(place, "app", App)


def load_object(place: str, default: str, kind: type[T]) -> T:
    """What `place` names, which must be of this kind. A module alone stands for its variable `default`."""
    module_name, _, attribute = place.partition(":")
    attribute = attribute or default
    module = _load_module(place, module_name)
    names = [name for name, value in vars(module).items() if isinstance(value, kind)]
    known = ", ".join(f"{module_name}:{name}" for name in names)
    hint = f"it has {known}" if names else f"it has no {kind.__name__}; make one: {default} = {kind.__name__}(…)"
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            if similar := get_close_matches(attribute, names, n=1):
                hint = f"did you mean {module_name}:{similar[0]}?"
            raise ConfigurationError(f"module {module_name!r} has no {attribute!r}; {hint}")
        found = getattr(found, part)
    if not isinstance(found, kind):
        actual = type(found).__name__
        raise ConfigurationError(f"{module_name}:{attribute} is of type {actual}, not {kind.__name__}; {hint}")
    return found


def _load_module(place: str, name: str) -> ModuleType:
    if name.endswith(".py") or "/" in name or not all(part.isidentifier() for part in name.split(".")):
        suggestion = name.removesuffix(".py").strip("./").replace("/", ".") or "shop"
        raise ConfigurationError(
            f"{place!r} does not name an app; write a module and a variable, such as {suggestion}:app"
        )
    here = find_modules_here()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only when the module itself is missing: a missing import inside of it is another story.
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(_no_such_module(error.name, here)) from error
        raise ConfigurationError(_import_failed(name, error)) from error
    except FairlaneError:
        raise
    except Exception as error:
        raise ConfigurationError(_import_failed(name, error)) from error


def find_modules_here() -> str:
    """Let modules of the current folder be imported; returns the folder."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    return here


def _no_such_module(name: str, here: str) -> str:
    parent, _, last = name.rpartition(".")
    if parent:
        places = list(getattr(sys.modules.get(parent), "__path__", []))
        where = f"in {parent!r}"
    else:
        places = [here]
        where = f"in {here} or among what is installed"
    similar = get_close_matches(last, [module.name for module in iter_modules(places)], n=1)
    suggestion = f"; did you mean {'.'.join(filter(None, [parent, similar[0]]))!r}?" if similar else ""
    return f"there is no module {name!r} {where}{suggestion}"


def _import_failed(name: str, error: Exception) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    place = f" at {frames[-1].filename}:{frames[-1].lineno}" if len(frames) > 1 else ""
    return f"importing {name!r} failed{place}: {type(error).__name__}: {error}"
