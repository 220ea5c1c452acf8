"""Reports, and Fairlane's tables."""

import sqlalchemy as sa
from alembic import op

from fairlane.integrations import alembic as fairlane

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "reports",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("account", sa.String(), nullable=False),
        sa.Column("month", sa.String(), nullable=False),
        sa.Column("text", sa.String()),
    )
    fairlane.upgrade(op, to=1)


def downgrade() -> None:
    op.drop_table("reports")  # Fairlane's tables stay: they hold jobs, and its migrations go one way
