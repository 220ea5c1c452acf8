"""Log lines that job data cannot forge.

A record is one line, whatever its arguments hold: control characters, escape sequences of terminals, line separators
and characters that change the direction of text are written out (`\\n`, `\\x1b`, `\\u2028`). Only a traceback takes
several lines, each of them indented. Secrets are taken out on the way. A filter does this at our own loggers, whatever
handlers a program sets up; the formatters of `fairlane worker` do the same for the records of others.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from typing import Any

from fairlane.redaction import without_secrets

__all__ = ["LOGGERS", "TextLines", "exception_text", "guard_loggers", "indented", "json_text", "one_line"]

LOGGERS = (
    "fairlane.app",
    "fairlane.dashboard",
    "fairlane.forward",
    "fairlane.integrations.sqlalchemy",
    "fairlane.integrations.starlette",
    "fairlane.redaction",
    "fairlane.store",
    "fairlane.store.postgres",
    "fairlane.telemetry",
    "fairlane.worker",
)
"""Every logger of ours: a test holds that there is no other."""
INDENT = "    "
LONGEST_TRACEBACK = 20_000
"""Characters of it that are logged."""
# C0, DEL and C1; marks, overrides and isolates of direction; line and paragraph separators; invisible operators and
# tags; lone surrogates. All else is shown as it is: names are written in all languages.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def one_line(text: str) -> str:
    """The text on one line, with nothing in it that a terminal or an editor obeys."""
    return _UNSAFE.sub(_written_out, text)


def indented(text: str, by: str = INDENT) -> str:
    """Text of several lines, each safe, and none that could be taken for the beginning of a record."""
    return "\n".join(f"{by}{_UNSAFE.sub(_written_out, line)}".rstrip() for line in text.split("\n"))


def json_text(value: Any) -> str:
    """JSON on one line that reads back as the same value, whatever its texts hold."""
    return _UNSAFE.sub(_as_json_escape, json.dumps(value, default=str, ensure_ascii=False))


def exception_text(record: logging.LogRecord) -> str:
    """The traceback of a record, without secrets; never with the values of variables. Of one that is too long, the
    beginning and the end. Empty: it has none."""
    if record.exc_info and record.exc_info[1] is not None:
        text = without_secrets("".join(traceback.format_exception(record.exc_info[1])).rstrip("\n"))
    else:
        text = without_secrets(record.exc_text or "")
    half = LONGEST_TRACEBACK // 2
    return text if len(text) <= LONGEST_TRACEBACK else f"{text[:half]}\n…\n{text[-half:]}"


class TextLines(logging.Formatter):
    """Records as text, those of a program's own loggers too."""

    def __init__(self, form: str = "%(asctime)s %(levelname)-8s %(name)s: %(message)s") -> None:
        super().__init__(form)

    def format(self, record: logging.LogRecord) -> str:
        record.message = one_line(without_secrets(record.getMessage()))
        record.asctime = self.formatTime(record, self.datefmt)
        # All of it: loggers and levels are named by programs, too.
        lines = [one_line(self.formatMessage(record))]
        if told := exception_text(record):
            lines.append(indented(told))
        if record.stack_info:
            lines.append(indented(without_secrets(record.stack_info)))
        return "\n".join(lines)


def guard_loggers() -> None:
    """Let every record of ours be safe to write, whoever writes it. Called when the package is imported."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Guard) for each in logger.filters):
            logger.addFilter(_Guard())


class _Guard(logging.Filter):
    """Makes the arguments of a record safe. A message that has some is ours; one without is whatever it was made of."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.args:
            record.msg = one_line(without_secrets(str(record.msg)))
        elif isinstance(record.args, tuple):
            record.args = tuple(map(_safe, record.args))
        elif isinstance(record.args, dict):
            record.args = {name: _safe(value) for name, value in record.args.items()}
        if record.exc_info:
            # Formatters take this text as it is, and leave the exception alone.
            record.exc_text = indented(exception_text(record))
        return True


class _Safe:
    """An argument that is turned into text when the record is, by `%s` or `%r`."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return one_line(without_secrets(str(self._value)))

    def __repr__(self) -> str:
        return one_line(without_secrets(repr(self._value)))


def _safe(value: object) -> object:
    if value is None or isinstance(value, (int, float, _Safe)):
        return value
    if isinstance(value, str) and one_line(without_secrets(value)) == value:
        return value  # as it is, for handlers that read the arguments
    return _Safe(value)


def _written_out(found: re.Match[str]) -> str:
    sign = found[0]
    code = ord(sign)
    return _SHORT.get(sign) or (
        f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    )


def _as_json_escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]
