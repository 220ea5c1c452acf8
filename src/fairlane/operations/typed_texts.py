"""What people type into a field: a policy as JSON, a workload as TOML or JSON.

Whatever is wrong is told with its line and with what to do about it. Texts are read, never run.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import msgspec

from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.policy.documents import POLICY_EXAMPLE, parse_policy
from fairlane.policy.policy import Policy
from fairlane.simulation.workload import JobClass, Workload

__all__ = ["LONGEST_TEXT", "Misread", "read_policy_text", "read_workload_text"]

LONGEST_TEXT = 100_000
_Path = tuple[str | int, ...]
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_TOML_LINE = re.compile(r" ?\(at line (\d+), column \d+\)| ?\(at end of document\)")
_AT = re.compile(r" - at `\$\.?(?P<field>\w*)[^`]*`$")
_NAMED = re.compile(r"`(\w+)`")
_HEADER = re.compile(r"\s*\[")
_CLASS_HEADER = re.compile(r"\s*\[\[\s*classes\s*\]\]")
_WORKLOAD_EXAMPLE = 'write [[classes]], then name = "small", jobs = 100, run_time = "50ms"'


class Misread(msgspec.Struct, frozen=True, kw_only=True):
    """Why a text could not be read."""

    words: str
    line: int | None = None
    """Counted from 1; `None`: it is about the whole."""


def read_policy_text(text: str) -> Policy | Misread:
    """The policy that a text describes: what `fairlane policy show --json` prints, or less."""
    document = _json(text, f"a policy looks like {POLICY_EXAMPLE}")
    if isinstance(document, Misread):
        return document
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    if not isinstance(document, dict):
        return Misread(words=f"this is not one policy; a policy looks like {POLICY_EXAMPLE}", line=1)
    try:
        return parse_policy(document, "policy")
    except ConfigurationError as error:
        words = str(error).removeprefix("policy: ")
        return Misread(words=words, line=_lines(text).get(_wrong_part(document, words)))


def read_workload_text(text: str) -> Workload | Misread:
    """The workload that a text declares."""
    is_json = text.lstrip()[:1] == "{"
    document = _json(text, _WORKLOAD_EXAMPLE) if is_json else _toml(text)
    if isinstance(document, Misread):
        return document
    try:
        return msgspec.convert(document, Workload)
    except (msgspec.ValidationError, FairlaneError) as error:
        where, words = _wrong_class(document) or ((), _without_path(str(error)))
        lines = _lines(text) if is_json else _toml_lines(text)
        return Misread(words=words, line=lines.get(where, lines.get(where[:-1])))


def _json(text: str, remedy: str) -> Any:
    if problem := _unreadable(text):
        return problem
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        hint = "names and words stand in double quotes, and no comma stands before a closing bracket"
        return Misread(words=f"this is not JSON ({error.msg}): {hint}; {remedy}", line=error.lineno)
    except (ValueError, RecursionError) as error:
        return Misread(words=f"this is not JSON ({error}); {remedy}")


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _toml(text: str) -> Any:
    if problem := _unreadable(text):
        return problem
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        found = _TOML_LINE.search(str(error))
        line = int(found[1]) if found and found[1] else None
        return Misread(words=f"this is not TOML ({_TOML_LINE.sub('', str(error))}); {_WORKLOAD_EXAMPLE}", line=line)


def _unreadable(text: str) -> Misread | None:
    if len(text) > LONGEST_TEXT:
        return Misread(words=f"{len(text):,} characters are more than {LONGEST_TEXT:,}; use `fairlane simulate`")
    return None if text.strip() else Misread(words="there is nothing here")


# Where it is.


def _wrong_part(document: dict[str, Any], words: str) -> _Path:
    """The part of a policy that cannot be read even by itself, else the one that the words name."""
    limits = document.get("limits")
    for nth, each in enumerate(limits if isinstance(limits, list) else []):
        if problem := _refused({"limits": [each]}):
            named = [name for name in each if name in problem] if isinstance(each, dict) else []
            return ("limits", nth, named[0]) if len(named) == 1 else ("limits", nth)
    if document.get("fair") and _refused({"fair": document["fair"]}):
        return ("fair",)
    return next(((name,) for name in document if f" {name};" in words or f"{name}=" in words), ())


def _refused(document: dict[str, Any]) -> str:
    try:
        parse_policy(document, "")
    except ConfigurationError as error:
        # What a policy looks like is at the end, and names fields that are not meant.
        return str(error).partition("; a policy looks like")[0]
    return ""


def _wrong_class(document: Any) -> tuple[_Path, str] | None:
    """The first class of a workload that cannot be read by itself, and why."""
    classes = document.get("classes") if isinstance(document, dict) else None
    for nth, each in enumerate(classes if isinstance(classes, list) else []):
        try:
            msgspec.convert(each, JobClass)
        except (msgspec.ValidationError, FairlaneError) as error:
            found = _AT.search(str(error))
            unknown = _NAMED.search(str(error)) if "unknown field" in str(error) else None
            field = unknown[1] if unknown else found["field"] if found else ""
            which = f"{field}: " if field and not unknown else ""
            return ("classes", nth, field), f"{which}{_without_path(str(error))}"
    return None


def _without_path(words: str) -> str:
    return _AT.sub("", words).replace("`", "")


def _lines(text: str) -> dict[_Path, int]:
    """The line on which each part of a JSON text begins. The text has been read, so it is well formed."""
    lines: dict[_Path, int] = {}
    path: list[str | int] = []
    line, end = 1, 0
    previous = ""
    for token in _TOKEN.finditer(text):
        line += text.count("\n", end, token.start())
        end = token.start()
        sign = token[0]
        if sign in "{[":
            lines.setdefault(tuple(path), line)
            path.append("" if sign == "{" else 0)
        elif sign in "}]":
            path.pop()
        elif sign == "," and isinstance(path[-1], int):
            path[-1] += 1
        elif sign == ":" and previous[:1] == '"':
            path[-1] = json.loads(previous)
            lines.setdefault(tuple(path), line)
        previous = sign
    return lines


def _toml_lines(text: str) -> dict[_Path, int]:
    """The same of a TOML text whose classes are tables of their own."""
    lines: dict[_Path, int] = {}
    nth = -1
    for number, line in enumerate(text.splitlines(), 1):
        if _CLASS_HEADER.match(line):
            nth += 1
            lines[("classes", nth)] = number
        elif not _HEADER.match(line) and "=" in line:
            name = line.partition("=")[0].strip().strip('"')
            lines.setdefault(("classes", nth, name) if nth >= 0 else (name,), number)
    return lines
