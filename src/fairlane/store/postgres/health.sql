-- The condition of the server, for whoever looks for what is wrong. None of this is on the way of a job.

-- name: select_settings
select s.name, s.setting
from pg_settings s
where s.name = any (array['autovacuum', 'fsync', 'full_page_writes', 'synchronous_commit', 'track_counts'])
order by s.name

-- name: select_connection_limits
-- What is counted by database, everybody may see; of the sessions of other roles, not even what they are.
select 'max_connections' as setting, (select sum(d.numbackends) from pg_stat_database d)::integer as used,
    current_setting('max_connections')::integer - current_setting('superuser_reserved_connections')::integer
    - coalesce(current_setting('reserved_connections', true)::integer, 0) as most
union all
select 'the limit of database ' || d.datname, (
        select s.numbackends from pg_stat_database s where s.datid = d.oid
    ), d.datconnlimit
from pg_database d
where d.datname = current_database() and d.datconnlimit >= 0
union all
select 'the limit of role ' || r.rolname, (
        select count(*) from pg_stat_activity a where a.usesysid = r.oid
    )::integer, r.rolconnlimit
from pg_roles r
where r.rolname = session_user and r.rolconnlimit >= 0

-- name: select_tables
-- Our tables, those with the most dead rows first, and at how many of them each is to be vacuumed.
select c.relname::text as name, coalesce(pg_stat_get_live_tuples(c.oid), 0) as live,
    coalesce(pg_stat_get_dead_tuples(c.oid), 0) as dead,
    (coalesce(o.threshold, current_setting('autovacuum_vacuum_threshold')::float8)
        + coalesce(o.scale, current_setting('autovacuum_vacuum_scale_factor')::float8) * greatest(c.reltuples, 0)
    )::bigint as due_at,
    coalesce(o.enabled, true) as is_vacuumed,
    (extract(epoch from clock_timestamp() - greatest(
        pg_stat_get_last_autovacuum_time(c.oid), pg_stat_get_last_vacuum_time(c.oid)
    )) * 1000000)::bigint as vacuumed_for
from pg_class c
cross join lateral (
    select
        max(t.option_value) filter (where t.option_name = 'autovacuum_vacuum_threshold')::float8 as threshold,
        max(t.option_value) filter (where t.option_name = 'autovacuum_vacuum_scale_factor')::float8 as scale,
        bool_and(t.option_value::boolean) filter (where t.option_name = 'autovacuum_enabled') as enabled
    from pg_options_to_table(c.reloptions) t
) o
where c.relnamespace = 'fairlane'::regnamespace and c.relkind = 'r'
order by dead desc, name

-- name: select_horizon_holders
-- Autovacuum's own processes hold nothing back. $1 how many
select h.*
from (
    select 'session' as kind, coalesce(nullif(a.application_name, ''), a.backend_type, '') as name, a.pid,
        coalesce(a.usename::text, '') as "user", coalesce(a.state, '') as state,
        (extract(epoch from clock_timestamp() - a.xact_start) * 1000000)::bigint as open_for,
        greatest(age(a.backend_xmin), age(a.backend_xid), 0) as transactions
    from pg_stat_activity a
    where coalesce(a.backend_xmin, a.backend_xid) is not null and a.pid <> pg_backend_pid()
      and a.backend_type not in ('autovacuum launcher', 'autovacuum worker')
      and (a.datname = current_database() or a.datname is null)
    union all
    select 'prepared transaction', p.gid, null, p.owner::text, 'prepared',
        (extract(epoch from clock_timestamp() - p.prepared) * 1000000)::bigint, greatest(age(p.transaction), 0)
    from pg_prepared_xacts p
    where p.database = current_database()
    union all
    select 'replication slot', s.slot_name::text, s.active_pid, '', case when s.active then 'active' else 'inactive' end,
        null, greatest(age(s.xmin), 0)
    from pg_replication_slots s
    where s.xmin is not null
) h
order by h.open_for desc nulls last, h.transactions desc
limit $1::integer

-- name: select_standstills
-- Flows that lie before the cursor, where no claim looks; and gates with lanes on them that were to be woken before $2.
-- $1 queues, $2 before when, $3 how many of each queue, $4 and $5 flows and gates that the journal knows better
select q.name as queue, s."limit", s.key, s.lanes, s.since
from fairlane.queues q
cross join lateral (
    select c.cursor, c.cursor_tie
    from fairlane.queue_states c
    where c.queue_id = q.id
    order by c.version desc
    limit 1
) c
cross join lateral (
    (
        select null::text as "limit", f.key, f.open as lanes, null::bigint as since
        from fairlane.flows f
        where f.queue_id = q.id and f.standing = 1 and (f.vtime, f.tie) < (c.cursor, c.cursor_tie)
          and not f.id = any ($4::bytea[])
        order by f.vtime, f.tie
        limit $3::integer
    )
    union all
    (
        select g."limit", g.key, g.waiting, g.wake_at
        from fairlane.gates g
        where g.queue_id = q.id and g.wake_at is not null and g.wake_at < $2::bigint and g.waiting > 0
          and not g.id = any ($5::bytea[])
        order by g.wake_at
        limit $3
    )
) s
where q.name = any ($1::text[])
order by q.name
