from alembic import context
from reports import Base, engine

from fairlane.integrations.alembic import include_name, include_object

options = {
    "target_metadata": Base.metadata,
    "include_schemas": True,
    "include_name": include_name,  # Fairlane's schema on PostgreSQL,
    "include_object": include_object,  # and its tables in a SQLite file
}

if context.is_offline_mode():
    context.configure(url=engine.url, literal_binds=True, **options)
    with context.begin_transaction():
        context.run_migrations()
else:
    with engine.connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
