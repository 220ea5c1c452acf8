"""`fairlane migrate`."""

from __future__ import annotations

import asyncio
import json
import os

import click

from fairlane.cli.database import app_of
from fairlane.cli.options import app_or_url_options, json_option
from fairlane.store.postgres.grants import grants as written
from fairlane.store.scripts import Schema


@click.command()
@app_or_url_options
@click.option("--print", "only_print", is_flag=True, help="Print the SQL that builds the schema and change nothing.")
@click.option("--after", type=int, default=0, help="With --print: where it starts from.")
@click.option("--to", type=int, help="With --print: the last migration.  [default: the newest]")
@json_option()
def migrate(app: str | None, url: str | None, only_print: bool, after: int, to: int | None, as_json: bool) -> None:
    """Bring a database's schema up to date.

    Safe to run from many machines at once, and again when there is nothing to do. A deploy step on PostgreSQL; SQLite
    files migrate themselves when they are opened.

    \b
    Example:
      fairlane migrate shop:app
      fairlane migrate --url postgresql://shop@localhost/shop
      fairlane migrate --print > fairlane.sql
      fairlane migrate --print --after 1 --to 2 > upgrade.sql
    """
    if only_print:
        _print_migrations(app, url, after, to, as_json)
        return
    if after or to is not None:
        raise click.UsageError("--after and --to are for --print; without it, all that is missing is applied")
    applied = asyncio.run(app_of(app, url).migrate())
    if as_json:
        click.echo(json.dumps({"applied": applied}))
        return
    for name in applied:
        click.echo(f"applied {name}")
    if not applied:
        click.echo("nothing to do: the schema is up to date")


def _print_migrations(app: str | None, url: str | None, after: int, to: int | None, as_json: bool) -> None:
    """Needs no database, only its kind: PostgreSQL unless the app or URL says SQLite."""
    named = app or url or os.environ.get("FAIRLANE_URL")
    schema = Schema.of("sqlite" if named and app_of(app, url).url.startswith("sqlite:") else "postgresql")
    if as_json:
        found = schema.between(after, to)
        click.echo(json.dumps([{"name": each.name, "checksum": each.checksum, "sql": each.sql} for each in found]))
        return
    click.echo(f"begin;\n\n{schema.script(after, to)}\ncommit;")


@click.command()
@click.option("--print", "only_print", is_flag=True, required=True, help="Print the SQL, for the owner to run.")
@click.option("--producer", metavar="ROLE", help="The role of programs that enqueue.")
@click.option("--worker", metavar="ROLE", help="The role of workers and forwarders.")
@click.option("--viewer", metavar="ROLE", help="The role of a dashboard and of commands that only look.")
@click.option("--operator", metavar="ROLE", help="The role of a dashboard and of commands that act.")
def grants(only_print: bool, **roles: str | None) -> None:
    """Print the SQL for each role's rights.

    It gives each role the rights it needs, and takes all others away. The roles must exist. Run it as the owner of the
    schema, the role that migrates, and again after every migration. Nobody but the owner may change or delete what the
    audit says.

    \b
    Example:
      fairlane grants --print --producer shop_web --worker shop_worker > grants.sql
      fairlane grants --print --viewer shop_viewer --operator shop_operator | psql shop
    """
    named = {purpose: role for purpose, role in roles.items() if role is not None}
    if not named:
        raise click.UsageError("name at least one role: --producer, --worker, --viewer or --operator")
    click.echo(f"begin;\n\n{written(named)}\n\ncommit;")
