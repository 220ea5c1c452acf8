"""Which jobs a command is about: the options that say so, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
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

STATES = ("scheduled", "ready", "running", "done", "dead", "cancelled")


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


def place_options(function: F) -> F:
    """Which database."""
    function = click.option("--url", help="The database.  [default: FAIRLANE_URL]")(function)
    return click.option("--app", metavar="MODULE:APP", help="The app whose database it is, instead of --url.")(function)


def with_app(words: str) -> str:
    """What is suggested, for the app that the command was given: it can be copied as it stands."""
    context = click.get_current_context(silent=True)
    given = {} if context is None else context.params
    app = given.get("app") or given.get("app_option")
    return words.replace("module:app", app) if app else words


def app_options(function: F) -> F:
    """Which app: MODULE:APP or, as all commands take it, --app."""
    return _app_options(function, is_required=True)


def app_or_url_options(function: F) -> F:
    """Which app, or the database alone."""
    function = click.option("--url", help="The database, instead of an app's.  [default: FAIRLANE_URL]")(function)
    return _app_options(function, is_required=False)


def _app_options(function: F, *, is_required: bool) -> F:
    @wraps(function)
    def named(app: str | None, app_option: str | None, **options: Any) -> Any:
        if app and app_option and app != app_option:
            raise ConfigurationError(f"which app? {app} and --app {app_option} are given; give one of them")
        if is_required and not (app or app_option):
            raise click.MissingParameter(param_hint="'MODULE:APP'", param_type="argument")
        return function(app=app or app_option, **options)

    # Never required by Click, which does not know that --app gives it too.
    metavar = "MODULE:APP" if is_required else "[MODULE:APP]"
    option = click.option("--app", "app_option", metavar="MODULE:APP", help="Another way to name MODULE:APP.")
    argument = click.argument("app", required=False, metavar=metavar)
    return argument(option(cast(F, named)))


def filter_options(function: F, *, states: tuple[str, ...] = STATES) -> F:
    """Which jobs of it."""
    for option in (
        click.option("--until", metavar="WHEN", help="Until this time, or this long ago."),
        click.option("--since", metavar="WHEN", help="Since this time, or this long ago: 2h, 2030-01-31T08:00."),
        click.option("--key", "keys", metavar="NAME=VALUE", multiple=True, help="With this key; may be repeated."),
        click.option("--task", help="Only of this task."),
        click.option("--queue", help="Only of this queue."),
    ):
        function = option(function)
    if len(states) > 1:
        function = click.option("--state", type=click.Choice(states), help="Only in this state.")(function)
    return function


def page_options(function: F) -> F:
    """Which part of a list, of which database, and how it is printed."""
    limit = click.IntRange(1, 1_000)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print a JSON object."),
        place_options,
        click.option("--after", metavar="CURSOR", help="Continue from the end of an earlier page."),
        click.option("--limit", type=limit, default=50, show_default=True, help="Maximum number to list."),
    ):
        function = option(function)
    return function


def job_ids(given: tuple[str, ...]) -> list[UUID]:
    ids = []
    for text in given:
        try:
            ids.append(UUID(text))
        except ValueError:
            raise ConfigurationError(f"{text!r} is not the id of a job; `fairlane jobs list` shows them") from None
    return ids


def filter_of(options: dict[str, Any], now: Instant, *, by_end: bool) -> JobFilter:
    """The filter that the options ask for; `--since` and `--until` are about the end of a job, or about its enqueue."""
    since, until = instant_of("--since", options["since"], now), instant_of("--until", options["until"], now)
    state = options.get("state")
    span = (
        {"finished_since": since, "finished_until": until}
        if by_end
        else {"enqueued_since": since, "enqueued_until": until}
    )
    return JobFilter(
        queue=options["queue"],
        task=options["task"],
        state=None if state is None else State[state.upper()],
        keys=canonical_keys(keys_given(options["keys"])),
        **span,
    )


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


def instant_of(option: str, given: str | None, now: Instant) -> Instant | None:
    """A time as people write it: a duration ago, or a date with a time (UTC unless it says otherwise)."""
    if given is None:
        return None
    try:
        return now - microseconds(given)
    except ConfigurationError:
        return time_of(option, given, "a duration (2h) or a time (2030-01-31T08:00)")


def time_of(option: str, given: str, possible: str) -> Instant:
    """A date with a time, UTC unless it says otherwise."""
    try:
        at = datetime.fromisoformat(given)
    except ValueError:
        raise ConfigurationError(f"{option} {given}: write {possible}") from None
    return as_instant(at if at.tzinfo else at.replace(tzinfo=UTC))


def selection_of(ids: tuple[str, ...], options: dict[str, Any], now: Instant, *, by_end: bool) -> Selection:
    """The jobs named, or those that fit. Not both: it would be unclear which of them is meant."""
    asked = [name for name in ("state", "queue", "task", "keys", "since", "until") if options.get(name)]
    if ids and asked:
        raise ConfigurationError(f"give ids or filters (--{asked[0].rstrip('s')}), not both")
    if ids:
        return job_ids(ids)
    if not asked and not options["all"]:
        raise ConfigurationError("which jobs? Give their ids, filters such as --queue, or --all")
    return filter_of(options, now, by_end=by_end)


def who_options(function: F) -> F:
    """Who acts, and why."""
    default = "[default: FAIRLANE_ACTOR, else user@host]"
    function = click.option("--as", "actor", metavar="ACTOR", help=f"Who acts.  {default}")(function)
    return click.option("--reason", default="", help="The reason; recorded in the audit log.")(function)


def action_options(function: F) -> F:
    """How far an action goes, who takes it, and why."""
    function = who_options(function)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print a JSON object."),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing."),
        click.option(
            "--limit", type=click.IntRange(1), default=1_000, show_default=True, help="Maximum number of jobs."
        ),
        click.option("--all", "all", is_flag=True, help="All matching jobs, up to --limit."),
    ):
        function = option(function)
    return function
