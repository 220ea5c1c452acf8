"""Options that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import wraps
from typing import Any, TypeVar, cast
from uuid import UUID

import click

from fairlane.clock import Instant, as_instant, microseconds
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import Selection
from fairlane.policy.keys import canonical_keys
from fairlane.store.operators import JobFilter

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

STATES = ("scheduled", "ready", "running", "done", "dead", "cancelled")


def options(*each: Decorator[Any]) -> Decorator[Any]:
    """Several options as one decorator, in the order in which the help lists them."""

    def decorate(function: F) -> F:
        for option in reversed(each):
            function = option(function)
        return function

    return decorate


def json_option(document: str = "a JSON object") -> Decorator[Any]:
    return click.option("--json", "as_json", is_flag=True, help=f"Print {document}.")


class LookingGroup(click.Group):
    """A group that looks by itself: without a command it runs `by_itself`, and on an id alone `by_id`."""

    def __init__(self, *given: Any, by_itself: str = "list", by_id: str | None = None, **named: Any) -> None:
        named.setdefault("subcommand_metavar", "[COMMAND] [ARGS]...")
        super().__init__(*given, **named)
        self._by_itself = by_itself
        self._by_id = by_id

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.completed(ctx, args))

    def completed(self, ctx: click.Context, args: list[str]) -> list[str]:
        """These arguments, with the command that they leave out."""
        if not args or (args[0].startswith("-") and args[0] not in ctx.help_option_names) or ":" in args[0]:
            return [self._by_itself, *args]
        if self._by_id is not None and _is_id(args[0]):
            return [self._by_id, *args]
        return args


def _is_id(text: str) -> bool:
    try:
        UUID(text)
    except ValueError:
        return False
    return True


# Which database.

place_options = options(
    click.option("--app", metavar="MODULE:APP", help="The app whose database it is, instead of --url."),
    click.option("--url", help="The database.  [default: FAIRLANE_URL]"),
)


def app_options(function: F) -> F:
    """Which app: MODULE:APP or, as all commands take it, --app."""
    return _app_options(function, is_required=True)


def app_or_url_options(function: F) -> F:
    """Which app, or the database alone."""
    url = click.option("--url", help="The database, instead of an app's.  [default: FAIRLANE_URL]")
    return _app_options(url(function), is_required=False)


def _app_options(function: F, *, is_required: bool) -> F:
    @wraps(function)
    def named(app: str | None, app_option: str | None, **given: Any) -> Any:
        if app and app_option and app != app_option:
            raise ConfigurationError(f"which app? {app} and --app {app_option} are given; give one of them")
        if is_required and not (app or app_option):
            raise click.MissingParameter(param_hint="'MODULE:APP'", param_type="argument")
        return function(app=app or app_option, **given)

    # Never required by Click, which does not know that --app gives it too.
    metavar = "MODULE:APP" if is_required else "[MODULE:APP]"
    option = click.option("--app", "app_option", metavar="MODULE:APP", help="Another way to name MODULE:APP.")
    argument = click.argument("app", required=False, metavar=metavar)
    return argument(option(cast(F, named)))


def with_app(words: str) -> str:
    """A suggested command, for the app that this command was given: it can be copied as it stands."""
    context = click.get_current_context(silent=True)
    given = {} if context is None else context.params
    app = given.get("app") or given.get("app_option")
    return words.replace("module:app", app) if app else words


# Which keys.


def key_option(name: str, words: str) -> Decorator[Any]:
    return click.option("--key", name, metavar="NAME=VALUE", multiple=True, help=words)


def keys_given(given: tuple[str, ...], option: str = "--key") -> dict[str, str]:
    """`account=acme` as keys by name."""
    keys: dict[str, str] = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator or not name:
            raise ConfigurationError(f"{option} {each}: write name=value, such as account=acme")
        if keys.setdefault(name, value) != value:
            raise ConfigurationError(f"{option} {each}: {name} is given twice, also as {keys[name]!r}")
    return keys


# Which jobs.


def filter_options(states: tuple[str, ...] = STATES) -> Decorator[Any]:
    state = click.option("--state", type=click.Choice(states), help="Only in this state.")
    return options(
        *([state] if len(states) > 1 else []),
        click.option("--queue", help="Only of this queue."),
        click.option("--task", help="Only of this task."),
        key_option("keys", "With this key; may be repeated."),
        click.option("--since", metavar="WHEN", help="Since this time, or this long ago: 2h, 2030-01-31T08:00."),
        click.option("--until", metavar="WHEN", help="Until this time, or this long ago."),
    )


page_options = options(
    click.option("--limit", type=click.IntRange(1, 1_000), default=50, help="Maximum number to list."),
    click.option("--after", metavar="CURSOR", help="Continue from the end of an earlier page."),
    place_options,
    json_option(),
)


def job_ids(given: tuple[str, ...]) -> list[UUID]:
    for text in given:
        if not _is_id(text):
            raise ConfigurationError(f"{text!r} is not the id of a job; `fairlane jobs list` shows them")
    return [UUID(text) for text in given]


def filter_of(given: Mapping[str, Any], now: Instant, *, by_end: bool) -> JobFilter:
    """The filter that the options ask for; `--since` and `--until` are about the end of a job, or about its enqueue."""
    state, moment = given.get("state"), "finished" if by_end else "enqueued"
    span = {f"{moment}_{name}": _instant_of(f"--{name}", given[name], now) for name in ("since", "until")}
    return JobFilter(
        queue=given["queue"],
        task=given["task"],
        state=None if state is None else State[state.upper()],
        keys=canonical_keys(keys_given(given["keys"])),
        **span,
    )


def selection_of(ids: tuple[str, ...], given: Mapping[str, Any], now: Instant, *, by_end: bool) -> Selection:
    """The jobs named, or those that fit. Not both: it would be unclear which of them is meant."""
    asked = [name for name in ("state", "queue", "task", "keys", "since", "until") if given.get(name)]
    if ids and asked:
        raise ConfigurationError(f"give ids or filters (--{asked[0].rstrip('s')}), not both")
    if ids:
        return job_ids(ids)
    if not asked and not given["all"]:
        raise ConfigurationError("which jobs? Give their ids, filters such as --queue, or --all")
    return filter_of(given, now, by_end=by_end)


def _instant_of(option: str, given: str | None, now: Instant) -> Instant | None:
    """A time as people write it: a duration ago, or a date with a time (UTC unless it says otherwise)."""
    if given is None:
        return None
    try:
        return now - microseconds(given)
    except ConfigurationError:
        return as_instant(_moment_of(option, given, "a duration (2h) or a time (2030-01-31T08:00)"))


def _moment_of(option: str, given: str, possible: str) -> datetime:
    """A date with a time, UTC unless it says otherwise."""
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        raise ConfigurationError(f"{option} {given}: write {possible}") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


# Who changes something, why, for how long, and whether in earnest.

who_options = options(
    click.option("--reason", default="", show_default=False, help="The reason; recorded in the audit log."),
    click.option("--as", "actor", metavar="ACTOR", help="Who acts.  [default: FAIRLANE_ACTOR, else user@host]"),
)
change_options = options(
    click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing."),
    json_option(),
    who_options,
    place_options,
)
lasting_options = options(
    click.option("--for", "lasting", metavar="DURATION", help="End after this long: 30m, 2h."),
    click.option("--until", metavar="WHEN", help="End at this time: 2030-01-31T08:00 (UTC)."),
)
action_options = options(
    click.option("--all", "all", is_flag=True, help="All matching jobs, up to --limit."),
    click.option("--limit", type=click.IntRange(1), default=1_000, help="Maximum number of jobs."),
    click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing."),
    click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
    json_option(),
    who_options,
    place_options,
)


def intent_of(given: dict[str, Any]) -> dict[str, Any]:
    """What the options say about who, why and how long, as operations take it."""
    intent = {"actor": given["actor"] or None, "reason": given["reason"], "dry_run": given["dry_run"]}
    if (lasting := given.get("lasting")) is not None:
        microseconds(lasting)  # refuses what is no duration, in the words of this option
        intent["expires_in"] = lasting
    if (until := given.get("until")) is not None:
        intent["expires_at"] = _moment_of("--until", until, "a time (2030-01-31T08:00), or --for 2h")
    return intent
