"""`module:app`: found, or a sentence that says what to write instead."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fairlane.app import App
from fairlane.cli.database import load_app
from fairlane.errors import ConfigurationError, InvalidPolicy

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Writes modules into the current folder, which is a fresh one; they are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    yield write
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(tmp_path):
            del sys.modules[name]


APP = "from fairlane import App\napp = App('sqlite://')\n"


def test_a_module_is_found_in_the_current_folder(write: Write) -> None:
    write("shop_a.py", APP)
    assert isinstance(load_app("shop_a:app"), App)


def test_a_module_alone_stands_for_its_app(write: Write) -> None:
    write("shop_b.py", APP)
    assert isinstance(load_app("shop_b"), App)


def test_an_app_may_lie_inside_of_something(write: Write) -> None:
    write("shop_c.py", f"{APP}class Settings:\n    queue = app\n")
    assert isinstance(load_app("shop_c:Settings.queue"), App)


def test_a_module_that_is_not_there_is_named_with_the_nearest_one(write: Write) -> None:
    write("shop_d.py", APP)
    with pytest.raises(ConfigurationError, match=r"there is no module 'shopd' .*; did you mean 'shop_d'\?"):
        load_app("shopd:app")


def test_a_submodule_that_is_not_there_is_looked_for_in_its_package(write: Write) -> None:
    write("shop_pkg/__init__.py", "")
    write("shop_pkg/queues.py", APP)
    with pytest.raises(ConfigurationError, match=r"'shop_pkg.queue' in 'shop_pkg'; did you mean 'shop_pkg.queues'\?"):
        load_app("shop_pkg.queue:app")


def test_an_app_that_is_not_there_is_named_with_the_nearest_one(write: Write) -> None:
    write("shop_e.py", APP)
    with pytest.raises(ConfigurationError, match=r"module 'shop_e' has no 'appp'; did you mean shop_e:app\?"):
        load_app("shop_e:appp")


def test_a_name_like_no_app_is_answered_with_the_apps_there_are(write: Write) -> None:
    write("shop_f.py", APP)
    with pytest.raises(ConfigurationError, match="has no 'queue'; it has shop_f:app"):
        load_app("shop_f:queue")


def test_a_module_without_an_app_says_how_to_make_one(write: Write) -> None:
    write("shop_g.py", "")
    with pytest.raises(ConfigurationError, match=r"it has no App; make one: app = App\(…\)"):
        load_app("shop_g")


def test_something_else_than_an_app_is_named_by_its_kind(write: Write) -> None:
    write("shop_h.py", "app = 42\n")
    with pytest.raises(ConfigurationError, match=r"shop_h:app is of type int, not App"):
        load_app("shop_h:app")


@pytest.mark.parametrize(
    ("place", "suggestion"),
    [("shop.py:app", "shop:app"), ("src/shop.py", "src.shop:app"), ("./shop.py", "shop:app"), (":app", "shop:app")],
)
def test_a_file_is_answered_with_the_module_to_write(place: str, suggestion: str, write: Write) -> None:
    with pytest.raises(ConfigurationError, match=f"such as {suggestion}$"):
        load_app(place)


def test_a_missing_import_inside_the_module_is_not_taken_for_the_module(write: Write) -> None:
    write("shop_i.py", "import not_installed_at_all\n")
    with pytest.raises(ConfigurationError, match=r"importing 'shop_i' failed at .*shop_i.py:1: ModuleNotFoundError"):
        load_app("shop_i:app")


def test_an_error_inside_the_module_is_told_with_its_place(write: Write) -> None:
    write("shop_j.py", "\n\n1 / 0\n")
    with pytest.raises(ConfigurationError, match=r"shop_j.py:3: ZeroDivisionError: division by zero"):
        load_app("shop_j:app")


def test_a_syntax_error_is_one_line_too(write: Write) -> None:
    write("shop_k.py", "def broken(:\n")
    with pytest.raises(ConfigurationError, match=r"importing 'shop_k' failed.*SyntaxError"):
        load_app("shop_k:app")


def test_an_error_of_ours_inside_the_module_says_what_it_always_says(write: Write) -> None:
    write("shop_l.py", "from fairlane import Concurrency\nConcurrency(-1)\n")
    with pytest.raises(InvalidPolicy, match="from 0 to"):
        load_app("shop_l:app")
