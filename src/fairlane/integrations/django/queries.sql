-- What is asked of Django's own connection. Names of tables come out as Django wants them: quoted where they have a
-- schema.

-- name: tables_on_postgresql
select format('"%s"."%s"', schemaname, tablename)
from pg_tables
where schemaname = 'fairlane'
  and tablename <> 'migrations'
