-- What is asked of Django's own connection. Names of tables come out as Django wants them: quoted where they have a
-- schema.

-- name: has_schema_on_sqlite
select count(*) = 2
from sqlite_master
where type = 'table'
  and name in ('gates', 'lanes')

-- name: tables_on_postgresql
select format('"%s"."%s"', schemaname, tablename)
from pg_tables
where schemaname = 'fairlane'
  and tablename <> 'migrations'

-- name: tables_on_sqlite
-- Asked of an empty database that has nothing but Fairlane's schema: a file of Django's has other tables beside them.
-- The one row of `positions` came with the schema, and jobs are numbered by it.
select name
from sqlite_master
where type = 'table'
  and name not like 'sqlite\_%' escape '\'
  and name not in ('migrations', 'positions')
