"""What may be seen of what jobs carry: obvious secrets are taken out of every error, and an app may say more.

`without_secrets` knows what a secret looks like: a password in a URL, a value that is called a password, a token or a
key, the header that authorizes a request, and keys of vendors that are known by their beginning. It is applied where an
error becomes text, before that is stored, logged or sent anywhere. What it cannot know, `App(redact=…)` can.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fairlane.job import Claim, JobRecord

__all__ = [
    "HIDDEN",
    "MASK",
    "Audience",
    "Disclosure",
    "Part",
    "Redact",
    "Redactor",
    "Surface",
    "error_text",
    "without_secrets",
]

log = logging.getLogger("fairlane.redaction")

MASK = "***"
HIDDEN = "(hidden: redact failed, and the log says why)"

_NAMES = (
    r"password|passwd|passphrase|passcode|_pass|pwd|secret|token|credentials?"
    r"|(?:api|access|account|private|secret)[_-]?key(?:_base)?"
)
_QUOTE = r"\\{0,3}['\"]"
"""As in Python, in JSON, and in JSON that is a text within either."""
_HEADERS = r"(?:proxy-)?authorization|(?:set-)?cookie"
_CALLED = (
    "pass",
    "pwd",
    "secret",
    "token",
    "credential",
    "_key",
    "-key",
    "apikey",
    "esskey",
    "atekey",
    "ingkey",
    "untkey",
)
_RULES: tuple[tuple[tuple[str, ...], re.Pattern[str], str], ...] = (
    # Each with what a text must have, in small letters, for it to be tried. Where a password holds an unquoted @ or /,
    # the last @ ends it: hiding too much is better than showing half of it.
    (
        ("://",),
        re.compile(r"(?i)\b((?!https?:)[a-z][a-z0-9+.-]{0,20}://[^\s/?#@:'\"]{0,99}:)[^\s'\"]{0,512}@"),
        rf"\1{MASK}@",
    ),
    # In a web address the name alone may be the token.
    (("://",), re.compile(r"(?i)\b(https?://)[^\s/?#'\"]{1,512}@"), rf"\1{MASK}@"),
    # Headers: `{'cookie': 'id=…'}`, or to the end of the line, `Authorization: Bearer …`.
    (("authoriz", "cookie"), re.compile(rf"(?i)\b({_HEADERS})(['\"]?\s*[:=]\s*b?(['\"])).*?\3"), rf"\1\2{MASK}\3"),
    (("authoriz", "cookie"), re.compile(rf"(?i)\b({_HEADERS})(['\"]?\s*[:=]\s*+)(?!b?['\"])[^\r\n]+"), rf"\1\2{MASK}"),
    (("bearer",), re.compile(r"(?i)\b(bearer)(\s+)[\w.~+/=-]{6,}"), rf"\1\2{MASK}"),
    # `password='…'`, `"api_key": "…"`, `password: str = "…"`; `token=…`, `--token …`; `('token', '…')`, `<token>…<`;
    # and SQL's `password '…'`.
    (
        _CALLED,
        re.compile(
            rf"(?is)((?:{_NAMES})(?:{_QUOTE})?\s*(?:=>|:\s*[\w.\[\]| ]{{1,40}}=|[:=])\s*b?({_QUOTE}))"
            rf".{{0,4000}}?(?<!\\)\2"
        ),
        rf"\1{MASK}\2",
    ),
    (
        _CALLED,
        re.compile(rf"(?i)((?:{_NAMES})(?:{_QUOTE})?\s*(?:=>|%3d|[:=])\s*+)(?!b?(?:{_QUOTE})?\*\*\*)\S+"),
        rf"\1{MASK}",
    ),
    (
        (*_CALLED, "authoriz", "cookie"),
        re.compile(rf"(?is)(\(b?['\"][\w-]{{0,40}}?(?:{_NAMES}|{_HEADERS})['\"],\s*b?(['\"])).{{0,4000}}?(?<!\\)\2"),
        rf"\1{MASK}\2",
    ),
    (_CALLED, re.compile(rf"(?i)(<[\w:-]{{0,40}}?(?:{_NAMES})>)[^<]{{1,512}}(</)"), rf"\1{MASK}\2"),
    (_CALLED, re.compile(rf"(?i)(--(?:\w+-){{0,3}}(?:{_NAMES})\s+)\S+"), rf"\1{MASK}"),
    (("passw",), re.compile(r"(?i)(\bpassword\s+(['\"])).*?\2"), rf"\1{MASK}\2"),
    # Signed addresses: whoever has one needs no other key.
    (("signature=", "sig="), re.compile(r"(?i)([?&](?:[\w-]{0,20}signature|sig)=)[^&\s'\"]+"), rf"\1{MASK}"),
    (("hooks.slack.com",), re.compile(r"(hooks\.slack\.com/\w{1,20}/)[^\s'\"]+"), rf"\1{MASK}"),
    # Keys that are known by how they begin: AWS, GitHub, GitLab, npm, Hugging Face, Slack, Stripe, OpenAI, Anthropic,
    # SendGrid, Google; and signed tokens (JWT).
    (("akia", "asia"), re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{16}"), MASK),
    (
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-"),
        re.compile(r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{20,})"),
        MASK,
    ),
    (("npm_", "hf_"), re.compile(r"\b(?:npm|hf)_[A-Za-z0-9]{30,}"), MASK),
    (("sk-", "sg."), re.compile(r"\b(?:sk-[\w-]{20,}|SG\.[\w-]{16,}\.[\w-]{16,})"), MASK),
    (("xox", "k_live_", "k_test_"), re.compile(r"\b(?:xox[abeoprs]-[\w-]{10,}|[sr]k_(?:live|test)_\w{10,})"), MASK),
    (("aiza", "eyj"), re.compile(r"\b(?:AIza[\w-]{35}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"), MASK),
    (
        ("private key-",),
        re.compile(r"(-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----)[\s\S]*?(-----END [A-Z ]{0,20}PRIVATE KEY-----|\Z)"),
        rf"\1{MASK}\2",
    ),
)


def without_secrets(text: str) -> str:
    """The text with what is obviously secret in it replaced by `***`. Applied twice, it changes nothing more."""
    lowered = text.lower()
    for hints, pattern, instead in _RULES:
        if any(hint in lowered for hint in hints):
            text = pattern.sub(instead, text)
    return text


def error_text(error: BaseException) -> str:
    """An error in a line, as it may be stored, logged and shown."""
    return without_secrets(f"{type(error).__name__}: {error}")


class Surface(Enum):
    """Where something is about to be seen."""

    WORKER = "worker"
    """Before it is stored: what is seen here is stored, logged, and sent with events and spans."""
    PROGRAM = "program"
    """By a program, through `app.operations`."""
    CLI = "cli"
    EXPORT = "export"
    DASHBOARD = "dashboard"
    API = "api"

    def __str__(self) -> str:
        return self.value


class Part(Enum):
    """What of a job is about to be seen."""

    CALL = "call"
    """`[arguments, named arguments]`, as JSON."""
    RESULT = "result"
    ERROR = "error"
    """Text: a line, then the traceback."""

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Audience:
    """Who is about to see something, and where."""

    surface: Surface
    viewer: str | None = None
    """The name that the audit would have; `None`: nobody in particular."""
    role: str | None = None
    """`viewer` or `operator`, where the surface knows roles."""


@dataclass(frozen=True, slots=True)
class Disclosure:
    """What `redact` is told about a value: which part of which job it is, and who is about to see it."""

    part: Part
    job: JobRecord | Claim
    """A `Claim` where it has just run, else a `JobRecord`. Both have an `id`, `task`, `queue` and `keys`."""
    audience: Audience

    @property
    def surface(self) -> Surface:
        return self.audience.surface

    @property
    def viewer(self) -> str | None:
        return self.audience.viewer

    @property
    def role(self) -> str | None:
        return self.audience.role


Redact = Callable[[Any, Disclosure], Any]
"""Given a value and what it is about: what of it may be seen. Of an error that is text."""


@dataclass(frozen=True, slots=True)
class Redactor:
    """The rules of an app and of its dashboard, for one audience."""

    rules: tuple[Redact, ...]
    audience: Audience

    def shown(self, part: Part, value: Any, job: JobRecord | Claim) -> Any:
        """What may be seen. Where that cannot be said, it is nothing."""
        if value is None:
            return None
        disclosure = Disclosure(part, job, self.audience)
        try:
            for rule in self.rules:
                value = rule(value, disclosure)
            return value
        except Exception as error:
            # What it failed on may be the secret itself: where it failed is told, and not of what.
            where = "".join(traceback.format_tb(error.__traceback__)[1:]).strip()
            log.error("redact failed for job %s: %s at %s", job.id, type(error).__name__, where)
            return HIDDEN

    def error(self, text: str | None, job: JobRecord | Claim) -> str | None:
        """An error as it may be seen."""
        shown = self.shown(Part.ERROR, text, job)
        return None if shown is None else without_secrets(str(shown))
