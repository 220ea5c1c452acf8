"""What may be shown of jobs: obvious secrets are removed from every error, and an app may hide more.

`without_secrets` knows what secrets look like. It is applied where an error becomes text, before that text is stored,
logged or sent anywhere. What it cannot know is up to `App(redact=…)`.
"""

from __future__ import annotations

import json
import logging
import re
import traceback
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from fairlane.job import Claim, JobRecord

log = logging.getLogger("fairlane.redaction")

HIDDEN = "(hidden: redact failed, and the log says why)"


def error_text(error: BaseException) -> str:
    """An error on one line, safe to be stored, logged and shown."""
    return without_secrets(f"{type(error).__name__}: {error}")


class Surface(StrEnum):
    """Where something is about to be shown."""

    WORKER = "worker"
    """Before it is stored: the result is stored, logged, and sent with events and spans."""
    PROGRAM = "program"
    """To a program, through `app.operations`."""
    CLI = "cli"
    EXPORT = "export"
    DASHBOARD = "dashboard"
    API = "api"


class Part(StrEnum):
    """Which part of a job is about to be shown."""

    CALL = "call"
    """`[arguments, named arguments]`, as JSON."""
    RESULT = "result"
    ERROR = "error"
    """Text: a line, then the traceback."""


@dataclass(frozen=True, slots=True)
class Audience:
    """Who is about to see something, and on which surface."""

    surface: Surface
    viewer: str | None = None
    """The name that the audit log would have; `None` if not known."""
    role: str | None = None
    """`viewer` or `operator`, on surfaces with roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disclosure(Audience):
    """What `redact` gets with a value: which part of which job it is, and who is about to see it."""

    part: Part
    job: JobRecord | Claim
    """A `Claim` if it has just run, otherwise a `JobRecord`. Both have `id`, `task`, `queue` and `keys`."""


Redact = Callable[[Any, Disclosure], Any]
"""Takes a value and its disclosure, and returns what may be shown of the value. Errors are text."""


@dataclass(frozen=True, slots=True)
class Redactor:
    """The rules of an app and of its dashboard, for one audience."""

    rules: tuple[Redact, ...]
    audience: Audience

    def shown(self, part: Part, value: Any, job: JobRecord | Claim) -> Any:
        """What may be shown of a value; nothing of it if a rule fails."""
        if value is None:
            return None
        to = self.audience
        disclosure = Disclosure(to.surface, to.viewer, to.role, part=part, job=job)
        try:
            for rule in self.rules:
                value = rule(value, disclosure)
            return value
        except Exception as error:
            # The value that it failed on may be the secret itself: log where it failed, and not the message.
            where = "".join(traceback.format_tb(error.__traceback__)[1:]).strip()
            log.error("redact failed for job %s: %s at %s", job.id, type(error).__name__, where)
            return HIDDEN

    def error(self, text: str | None, job: JobRecord | Claim) -> str | None:
        """What may be shown of an error."""
        shown = self.shown(Part.ERROR, text, job)
        return None if shown is None else without_secrets(str(shown))


MASK = "***"

# Names. A name is judged by its last word: `db_password`, `PGPASSWORD`, `userPassword` and `password2` are passwords,
# `password_file` and `token_type` are not.

_ENDS = ("password", "passwd", "passphrase", "passcode", "pwd", "secret", "token", "credential", "sessionid", "sessid")
_WHOLE = {"cookie", "jwt", "otp", "pw", "totp"}
_NO_PASSWORD = {"bypass", "compass", "encompass", "overpass", "surpass", "trespass", "underpass"}
_ORDINARY_KEYS = re.compile(
    r"(?:batch|business|cache|canonical|composite|dedup|deduplication|dict|event|fair|fairness|flow|foreign|group|hash"
    r"|idempotency|index|job|lane|limit|lock|lookup|map|message|missing|natural|object|order|ordering|partition|primary"
    r"|public|range|record|redis|routing|row|scope|search|shard|sort|surrogate|task|tenant|translation|unique|unknown)\Z"
)
"""Words before `_key` that are harmless, as in `unique_key`: any other `…_key` is a secret."""
_SECRET_KEYS = re.compile(
    r"(?:access|account|api|app|auth|client|crypto?|encryption|hmac|host|license|master|private|secret|service|session"
    r"|shared|signing|ssh|storage|webhook)key\Z"
)
_SUFFIXES = {"b64", "base", "base64", "hash", "hex", "pem", "plain", "value"}
"""Words that may follow a secret's name: `SECRET_KEY_BASE`, `token_value`."""
_HEADERS = {"authorization", "cookie"}
_ONLY_IN_QUERIES = re.compile(r"(?i)(?:key|auth|sig|[\w-]*signature)\Z")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_]+")
_LONGEST_NAME = 80

_WEAK = {"auth", "pass"}
"""Words that also occur in prose: `may pass: 3 of 5`."""


def is_secret_name(name: str) -> bool:
    """Whether values with this name are hidden. `key` alone is not a secret: here it names a tenant."""
    words = _words_of(name)
    return bool(words) and (words[-1] in _WEAK or words[-1] in _HEADERS or _is_strong(words))


def _words_of(name: str) -> list[str]:
    words = [word.lower() for word in _WORDS.findall(name[-_LONGEST_NAME:])]
    while len(words) > 1 and words[-1] in _SUFFIXES:
        words.pop()
    return words


def _is_strong(words: list[str]) -> bool:
    last = _singular(words[-1])
    if last.endswith(_ENDS) or last in _WHOLE or words[-2:] == ["session", "id"]:
        return True
    if last.endswith("pass"):
        return last not in _NO_PASSWORD and words != ["pass"]
    if last == "key" and len(words) > 1:
        return not _ORDINARY_KEYS.match(words[-2])
    return _SECRET_KEYS.search(last) is not None


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _is_plural(words: list[str]) -> bool:
    """Whether the name is a plural: numbers named `tokens` are counts."""
    return _singular(words[-1]) != words[-1]


# Values that have a name.

_QUOTE = r"\\{0,3}['\"]"
"""As in Python, in JSON, and in JSON that is a text within either."""
_NAMED = re.compile(
    rf"""(?xi)
    (?<![\w-])
    (?: (?P<flag> --[\w-]++ ) (?: \s++ | = )                      # --token …
      | (?P<name> (?: (?: access | account | api | encryption | master | private | secret | signing )[ ] )? [\w-]++ )
        (?P<closed> (?: {_QUOTE} | %2[27] | &quot; | &\#3[49]; )? [)\]]? )
        (?: \s*+ (?P<sign> => | := | [:=] | %3[ad] ) \s*+          # token=…, "token": …, Key (token)=(…)
          | (?P<pair> , \s*+ (?= b? ['\"] ) )                       # ('token', '…')
          | (?P<said> \s++ (?= ['\"] ) )                            # SQL's password '…'
        )
    )"""
)
_OPENS = re.compile(rf"(?i)[bruf]{{0,2}}(?P<quote>{_QUOTE})(?:(?P=quote){{2}})?")
_ANNOTATION = re.compile(rf"[\w.\[\]| ]{{0,40}}=\s*+(?=[bruf]{{0,2}}{_QUOTE})", re.IGNORECASE)
_BARE = re.compile(r"\S*")
_LINE = re.compile(r"[^\r\n]*")
_PARAMETER = re.compile(r"[^&\s'\"]*")
_BRACKETS = re.compile(rf"(?P<open>[\[({{])|(?P<close>[\])}}])|(?<!\w)[bBrRuUfF]{{0,2}}(?P<quote>{_QUOTE})")
_FIRST_OF_PAIR = re.compile(r"\(b?['\"]\Z")
_SAYS_NOTHING = re.compile(r"(?i)(?:none|null|nil|true|false|[\d.,]+)[,;)\]}]*\Z")


@cache
def _closing(quote: str) -> re.Pattern[str]:
    """Up to the end of a quoted text. Escaped quotes, and quotes doubled as in SQL, do not end it."""
    sign, doubled = re.escape(quote), rf"|{quote}{quote}" if len(quote) == 1 else ""
    return re.compile(rf"(?s)(?:(?!{sign})[^\\]|(?!{sign})\\.{doubled})*+{sign}")


class _Values:
    """Finds where the values of a text end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._unclosed: set[str] = set()
        """Quotes that were once not closed: no text that they open later is closed either."""
        self._brackets_close = True

    def masked(self, start: int, bare: re.Pattern[str] = _BARE) -> tuple[str, int]:
        """The replacement of a value, and where it ends: after a quoted text, a pair of brackets, or a word."""
        text = self._text
        if opens := _OPENS.match(text, start):
            quote = opens[0][opens.start("quote") - start :]
            if (end := self._end_of_quoted(quote, opens.end())) is not None:
                return f"{opens[0]}{MASK}{quote}", end
        elif text[start : start + 1] in ("[", "(", "{"):
            return self._masked_brackets(start)
        found = bare.match(text, start)
        end = start if found is None else found.end()
        return (MASK if end > start else ""), end

    def _end_of_quoted(self, quote: str, start: int) -> int | None:
        if quote not in self._unclosed and (closed := _closing(quote).match(self._text, start)):
            return closed.end()
        self._unclosed.add(quote)
        return None

    def _masked_brackets(self, start: int) -> tuple[str, int]:
        """Mask everything up to the closing bracket; without one, the rest of the line."""
        text, depth, at = self._text, 0, start
        line_end = _end(_LINE, text, start)
        limit = len(text) if self._brackets_close else line_end
        while (found := _BRACKETS.search(text, at, limit)) is not None:
            at = found.end()
            if found["quote"]:
                at = self._end_of_quoted(found["quote"], at) or at
                continue
            depth += 1 if found["open"] else -1
            if not depth:
                return f"{text[start]}{MASK}{found[0]}", at
        self._brackets_close = False
        return MASK, line_end


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    found = pattern.match(text, start)
    return start if found is None else found.end()


def _without_named(text: str) -> Iterator[str]:
    """The text in pieces, with values masked by the names before them."""
    values = _Values(text)
    shown = at = 0
    while (found := _NAMED.search(text, at)) is not None:
        at = found.end("flag" if found["flag"] else "name")
        if (bare := _value_pattern(text, found)) is None:
            continue
        instead, end = values.masked(found.end(), bare)
        if bare is _BARE and _is_prose(found, text[found.end() : end]):
            continue
        yield text[shown : found.end()]
        yield instead
        shown = at = max(end, at)
        # `password: str = "…"`: the first word may be a type, or the password all the same.
        if found["sign"] == ":" and (annotation := _ANNOTATION.match(text, at)):
            instead, end = values.masked(annotation.end())
            yield annotation[0] + instead
            shown = at = end
    yield text[shown:]


def _value_pattern(text: str, found: re.Match[str]) -> re.Pattern[str] | None:
    """What a value without quotes looks like, by the name before it; `None` if that is not a secret's name."""
    name = found["flag"] or found["name"]
    before = text[max(0, found.start() - 3) : found.start()]
    is_parameter = found["sign"] == "=" and before.endswith(("?", "&"))
    if is_parameter and _ONLY_IN_QUERIES.match(name[-_LONGEST_NAME:]):
        return _PARAMETER
    words = _words_of(name)
    if not words:
        return None
    if found["said"]:
        return _BARE if words[-1] == "password" and not found["closed"] else None
    if found["pair"] and not (found["closed"] and _FIRST_OF_PAIR.search(before)):
        return None
    if words[-1] in _HEADERS:
        return _LINE if found["sign"] in (":", "=") or found["pair"] else None
    return _BARE if words[-1] in _WEAK or _is_strong(words) else None


def _is_prose(found: re.Match[str], value: str) -> bool:
    """Whether a word and what follows it are prose, not a name and its value."""
    if found["flag"] or not value or _OPENS.match(value):
        return False
    words = _words_of(found["name"])
    if words[-1] == "auth" or words == ["pass"]:
        if found["sign"] == ":" and not found["closed"]:
            return value[0] not in "[({" or not re.search(r"['\"]", value)
        return not value[0].isdigit() and bool(_SAYS_NOTHING.match(value))
    return _is_plural(words) and bool(_SAYS_NOTHING.match(value))


# URLs.

_RUN = re.compile(r"\S++")
_SCHEME = re.compile(r"(?i)(?<![a-z0-9+.-])([a-z][a-z0-9+.-]*+):(?://|\\/\\/)")
_AUTHORITY = re.compile(r"[^/?#]*+")
_PORT = re.compile(r"\[|[^:/?#@]*(?::\d{0,5})?(?:[/?#]|\Z)")


def _without_passwords(found: re.Match[str]) -> str:
    """A word that may contain URLs. A password may contain anything but a space, so the last `@` ends it."""
    word, last = found[0], found[0].rfind("@")
    pieces, shown = [], 0
    for scheme in _SCHEME.finditer(word, 0, max(last, 0)):
        start, end = scheme.end(), last
        if scheme[1].lower() in ("http", "https"):
            # The name alone may be the token. An `@` in a path or a query does not end a password, unless what looks
            # like a port is not one.
            at = word.rfind("@", start, _end(_AUTHORITY, word, start))
            if at >= 0:
                end = at
            elif _PORT.match(word, start):
                continue
        else:
            # From the first colon on: a user name may be a mail address, and has no colon.
            colon = word.find(":", start, last)
            if colon < 0:
                continue
            start = colon + 1
        if scheme.start() >= shown:
            pieces += [word[shown:start], MASK]
            shown = end
    return "".join([*pieces, word[shown:]])


# What is known by where it stands, or by how it begins.


def _basic(found: re.Match[str]) -> str:
    """`Basic dXNlcjpwYXNz` is a name, a colon and a password; `Basic authentication` is not."""
    given = found[3].translate({ord("-"): "+", ord("_"): "/"}).rstrip("=")
    try:
        said = b64decode(given[: len(given) // 4 * 4]).decode("latin-1")
    except NotBase64:
        return found[0]
    is_login = "=" in found[3] or (":" in said and said.isprintable())
    return f"{found[1]}{found[2]}{MASK}" if is_login else found[0]


def _element(found: re.Match[str]) -> str:
    return f"{found[1]}{MASK}" if is_secret_name(found[2]) else found[0]


_VENDORS = (
    # Each beginning with what follows it at least. AWS; GitHub, GitLab; npm, Hugging Face; OpenAI, Anthropic; SendGrid;
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"(?:gh[pousr]_|github_pat_|gl[a-z]{2,6}-)[\w-]{20,}+",
    r"(?:npm|hf)_[A-Za-z0-9]{30,}+",
    r"sk-[\w-]{20,}+",
    r"SG\.[\w-]{16,}+\.[\w-]{16,}+",
    # Slack; Stripe and webhooks after its fashion; Vault; Shopify; DigitalOcean, Docker; PyPI, whose names are words;
    r"(?:xox[abeoprs]|xapp)-[\w-]{10,}+",
    r"(?:[sr]k_(?:live|test)_|whsec_)[\w+/=-]{10,}+",
    r"hv[sbr]\.[\w-]{10,}+",
    r"shp(?:at|ca|pa|ss|ua|tka)_\w{10,}+",
    r"(?:do[opr]_v1_|dckr_pat_)[\w-]{16,}+",
    r"pypi-(?=[a-z\d_-]{0,30}[A-Z])[\w-]{10,}+",
    # Google; signed tokens (JWT); Telegram.
    r"AIza[\w-]{35}",
    r"ya29\.[\w-]{10,}+",
    r"eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]*+",
    r"\d{8,10}:AA[\w-]{30,}+",
)
_RULES: tuple[tuple[re.Pattern[str], Any], ...] = (
    (re.compile(r"(?i)\b(bearer)(\s++)[\w.~+/=-]{6,}+"), rf"\1\2{MASK}"),
    (re.compile(r"(?i)\b(basic)(\s++)([\w+/-]{4,}+={0,2})"), _basic),
    (re.compile(r"(?i)\b(identified by )(['\"])[^'\"]*+\2"), rf"\1\2{MASK}\2"),
    (re.compile(r"(?i)(<(?:[\w-]{1,40}:)?([\w-]{1,80})(?:\s[^<>]{0,200})?>)([^<]++)(?=</)"), _element),
    # Addresses that are secrets themselves: whoever has one needs no other key.
    (re.compile(r"(?i)\b(hooks\.slack\.com/\w{1,20}/)[^\s'\"]++"), rf"\1{MASK}"),
    (re.compile(r"(?i)(/(?:web)?hooks?\w{0,2}/(?:\d{5,25}/)?)(?=[\w-]{0,60}\d)[\w-]{24,}+[^\s'\"]*+"), rf"\1{MASK}"),
    (re.compile(r"(?i)(\bdiscord(?:app)?\.com/api/(?:v\d{1,3}/)?webhooks/\d{1,25}/)[\w-]++"), rf"\1{MASK}"),
    (re.compile(r"(?i)(/bot\d{1,20}:)[\w-]++"), rf"\1{MASK}"),
    (re.compile(rf"\b(?:{'|'.join(_VENDORS)})"), MASK),
    (
        re.compile(r"(-----BEGIN [A-Z ]{0,20}PRIVATE KEY-----)[\s\S]*?(-----END [A-Z ]{0,20}PRIVATE KEY-----|\Z)"),
        rf"\1{MASK}\2",
    ),
)


def without_secrets(text: str) -> str:
    """The text with obvious secrets replaced by `***`. Idempotent."""
    if "@" in text:
        text = _RUN.sub(_without_passwords, text)
    text = "".join(_without_named(text))
    for pattern, instead in _RULES:
        text = pattern.sub(instead, text)
    return text


_DEEPEST = 20


def without_secrets_in(value: Any, name: str = "", depth: int = 0) -> Any:
    """A JSON value with secrets replaced: values with a secret's name, and secrets in texts."""
    if value is None or isinstance(value, bool):
        return value
    words = _words_of(name)
    if words and is_secret_name(name) and not (_is_plural(words) and isinstance(value, (int, float))):
        return MASK
    if isinstance(value, (int, float)):
        return value
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {_text(key): without_secrets_in(each, str(key), depth + 1) for key, each in value.items()}
    if depth < _DEEPEST and isinstance(value, (list, tuple)):
        return [without_secrets_in(each, "", depth + 1) for each in value]
    return _text(value)


def _text(value: object) -> str:
    # A member of an enumeration of texts is the text that JSON has for it, and not its name.
    return without_secrets(str.__str__(value) if isinstance(value, str) else str(value))


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
"""All our loggers; a test checks that there are no others."""
INDENT = "    "
LONGEST_TRACEBACK = 20_000
"""The most characters of a traceback that are logged."""
# C0, DEL and C1; marks, overrides and isolates of direction; line and paragraph separators; invisible operators and
# tags; lone surrogates. All else is shown as it is: names are written in all languages.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def one_line(text: str) -> str:
    """The text on one line, without control characters that a terminal or an editor would obey."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def indented(text: str, by: str = INDENT) -> str:
    """Text of several lines, each safe and indented, so that none looks like the start of a log record."""
    return "\n".join(f"{by}{one_line(line)}".rstrip() for line in text.split("\n"))


def json_text(value: Any) -> str:
    """JSON on one line that reads back as the same value, whatever its texts contain."""
    encoded = json.dumps(value, default=str, ensure_ascii=False)
    return _UNSAFE.sub(lambda found: json.dumps(found[0])[1:-1], encoded)


def exception_text(record: logging.LogRecord) -> str:
    """The traceback of a record, without secrets and without values of variables; if it is too long, its beginning and
    its end. Empty if it has none."""
    if record.exc_info and record.exc_info[1] is not None:
        text = without_secrets("".join(traceback.format_exception(record.exc_info[1])).rstrip("\n"))
    else:
        text = without_secrets(record.exc_text or "")
    half = LONGEST_TRACEBACK // 2
    return text if len(text) <= LONGEST_TRACEBACK else f"{text[:half]}\n…\n{text[-half:]}"


class TextLines(logging.Formatter):
    """Formats records as text, also those of the program's own loggers."""

    def __init__(self, form: str = "%(asctime)s %(levelname)-8s %(name)s: %(message)s") -> None:
        super().__init__(form)

    def format(self, record: logging.LogRecord) -> str:
        record.message = one_line(without_secrets(record.getMessage()))
        record.asctime = self.formatTime(record, self.datefmt)
        # All of it: programs also name loggers and levels.
        lines = [one_line(self.formatMessage(record))]
        if traceback_text := exception_text(record):
            lines.append(indented(traceback_text))
        if record.stack_info:
            lines.append(indented(without_secrets(record.stack_info)))
        return "\n".join(lines)


def guard_loggers() -> None:
    """Make all our records safe to write, by any handler. Called when the package is imported."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Guard) for each in logger.filters):
            logger.addFilter(_Guard())


class _Guard(logging.Filter):
    """Makes the arguments of a record safe, and leaves its template: log services group by it. A message without
    arguments may contain anything: it is made safe too."""

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
    """An argument that is made safe when the record is formatted, by `%s` or `%r`."""

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
