"""From `module:app` to the App, with a message that helps when there is none."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from difflib import get_close_matches
from pkgutil import iter_modules
from types import ModuleType
from typing import TYPE_CHECKING

from fairlane.errors import ConfigurationError, FairlaneError

if TYPE_CHECKING:
    from fairlane.app import App

__all__ = ["find_modules_here", "load_app", "load_object"]


def load_app(place: str) -> App:
    """The App that `place` names. `shop` alone stands for `shop:app`; modules are also looked for in this folder."""
    from fairlane.app import App

    module_name, _, attribute = place.partition(":")
    attribute = attribute or "app"
    module = _load_module(place, module_name)
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ConfigurationError(_no_such_app(module, attribute, App))
        found = getattr(found, part)
    if not isinstance(found, App):
        kind = type(found).__name__
        raise ConfigurationError(f"{module_name}:{attribute} is a {kind}, not a fairlane.App{_apps_in(module, App)}")
    return found


def load_object(place: str, default: str) -> object:
    """What `place` names, whatever it is. A module alone stands for its variable `default`."""
    module_name, _, attribute = place.partition(":")
    found: object = _load_module(place, module_name)
    for part in (attribute or default).split("."):
        if not hasattr(found, part):
            raise ConfigurationError(f"module {module_name!r} has no {attribute or default!r}")
        found = getattr(found, part)
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


def _no_such_app(module: ModuleType, attribute: str, kind: type[App]) -> str:
    similar = get_close_matches(
        attribute, [name for name, value in vars(module).items() if isinstance(value, kind)], n=1
    )
    suggestion = f"; did you mean {module.__name__}:{similar[0]}?" if similar else _apps_in(module, kind)
    return f"module {module.__name__!r} has no {attribute!r}{suggestion}"


def _apps_in(module: ModuleType, kind: type[App]) -> str:
    names = [f"{module.__name__}:{name}" for name, value in vars(module).items() if isinstance(value, kind)]
    return (
        f"; its apps are {', '.join(names)}" if names else "; it has no fairlane.App at all, make one with app = App()"
    )
