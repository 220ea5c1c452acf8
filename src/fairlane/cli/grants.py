"""`fairlane grants`: the rights of the roles that use a PostgreSQL database."""

from __future__ import annotations

import click

__all__ = ["grants"]


@click.command()
@click.option("--print", "only_print", is_flag=True, required=True, help="Print the SQL, for the owner to run.")
@click.option("--producer", metavar="ROLE", help="The role of programs that enqueue.")
@click.option("--worker", metavar="ROLE", help="The role of workers and forwarders.")
@click.option("--viewer", metavar="ROLE", help="The role of a dashboard and of commands that only look.")
@click.option("--operator", metavar="ROLE", help="The role of a dashboard and of commands that act.")
def grants(only_print: bool, **roles: str | None) -> None:
    """Print the SQL that gives each role the rights it needs, and takes all others away.

    The roles must exist. Run it as the owner of the schema, the role that migrates, and again after every migration.
    Nobody but the owner may change or delete what the audit says.

    \b
    Example:
      fairlane grants --print --producer shop_web --worker shop_worker > grants.sql
      fairlane grants --print --viewer shop_viewer --operator shop_operator | psql shop
    """
    from fairlane.store.postgres.grants import grants as written

    named = {purpose: role for purpose, role in roles.items() if role is not None}
    if not named:
        raise click.UsageError("name at least one role: --producer, --worker, --viewer or --operator")
    click.echo(f"begin;\n\n{written(named)}\n\ncommit;")
