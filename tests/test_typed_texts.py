"""What people type: read as it is meant, or told with the line and the reason."""

from __future__ import annotations

import pytest

from fairlane.operations.trials import LONGEST_TEXT, Misread, read_policy_text, read_workload_text
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.simulation.workload import JobClass, Workload


def test_a_policy_is_read_from_what_is_shown_and_from_less() -> None:
    wanted = Policy("simulated", Fair(by="account"), (Concurrency(5, by="account"),))
    less = '{"fair": {"by": "account"}, "limits": [{"kind": "concurrency", "max": 5, "by": "account"}]}'
    assert read_policy_text(less) == wanted
    assert read_policy_text(f"[{wanted.encoded}]") == wanted


def test_a_workload_is_read_from_toml_and_from_json() -> None:
    wanted = Workload(classes=(JobClass(name="a", jobs=3),))
    assert read_workload_text('[[classes]]\nname = "a"\njobs = 3\n') == wanted
    assert read_workload_text('{"classes": [{"name": "a", "jobs": 3}]}') == wanted


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{\n"fair": {"by": "account",}}', 2, "no comma stands before a closing bracket"),
        ('{"limits": [\n{"kind": "concurrency", "max": 5},\n{"kind": "concurrency",\n"max": -1}]}', 4, "from 0 to"),
        ('{"limits": [\n{"kind": "rate", "limit": 5}]}', 2, "'per' is missing"),
        ('{"limits": [\n{"kind": "magic"}]}', 2, "'magic' is not known"),
        ('{"limits": [{"kind": "concurrency", "max": 5,\n"\\u0066oo": 3}]}', 2, "no field foo"),
        ('{\n\n"fair": {"by": "account", "weight": 0}}', 3, "a weight lies between"),
        ('{\n"limitz": []}', 2, "no field limitz"),
        ('{\n"keys": ["a"],\n"fair": {"by": "b"}}', 2, "which keys=('a',) leaves out"),
        ('{"fair": "account"}', 1, "a policy looks like"),
        ("[]", 1, "not one policy"),
        ("Fair(by='account')", 1, "this is not JSON"),
        ("NaN", None, "NaN is no number"),
        ("[" * 50_000, None, "this is not JSON"),
        (" ", None, "there is nothing here"),
        ("x" * (LONGEST_TEXT + 1), None, "fairlane simulate"),
    ],
)
def test_a_policy_that_cannot_be_read_says_where_and_why(text: str, line: int | None, words: str) -> None:
    found = read_policy_text(text)
    assert isinstance(found, Misread)
    assert words in found.words
    assert found.line == line


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('[[classes]]\nname = "a"\njobs = "x"', 3, "jobs: Expected int, got str"),
        ('[[classes]]\nname = "a"\n\n[[classes]]\nname = "b"\njobz = 3', 6, "unknown field jobz"),
        ('{"classes": [\n{"name": "a"},\n{"name": "b",\n"jobs": "x"}]}', 4, "jobs: Expected int, got str"),
        ('[[classes]]\nname = "a"\n\n[[classes]]\nname = "b"\nevery = "1s"\npoisson = 2', 4, "not both"),
        ('[[classes]]\nname = "a"\n[[classes]]\nname = "a"', None, "two classes named 'a'"),
        ('seed = 1\n[[classes]\nname = "a"', 2, "this is not TOML"),
        ("seed = 1", None, "missing required field classes"),
        ('seed = "abc', None, "this is not TOML"),
        ('classes = [{name = "a", jobs = "x"}]', 1, "jobs: Expected int"),
        ("{", 1, "this is not JSON"),
        ("", None, "there is nothing here"),
    ],
)
def test_a_workload_that_cannot_be_read_says_where_and_why(text: str, line: int | None, words: str) -> None:
    found = read_workload_text(text)
    assert isinstance(found, Misread)
    assert words in found.words
    assert found.line == line
