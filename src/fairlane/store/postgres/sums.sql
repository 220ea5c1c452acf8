-- Adding up journal entries. One at a time for each queue, in a transaction that takes no lock that a claim wants.

-- name: look_before_adding_up
-- Whether there is anything to do. $1 the queue's name, $2 now, $3 how many claims are looked at
select q.id, coalesce(f.kept, ''), coalesce(f.passed_at, 0),
    exists (
        select
        from fairlane.key_stats k
        where k.queue_id = q.id and k.refresh_at is not null and k.refresh_at <= $2::bigint
    )
    or exists (select from fairlane.minutes m where m.queue_id = q.id and m.minute < $2 / 60000000 - 1440),
    uncounted.claims
from fairlane.queues q
left join lateral (select f.* from fairlane.queue_stats f where f.queue_id = q.id limit 1) f on true
cross join lateral (
    select count(*) as claims
    from (
        select
        from fairlane.journal j
        where j.queue_id = q.id and j.seq > coalesce(f.counted, 0) and j.stats is not null
        limit $3::integer
    ) j
) uncounted
where q.name = $1::text

-- name: take_turn_at_adding_up
-- How many claims may be added up at once; 0: somebody else is at it. It is done again if a crash loses it; and whoever falls
-- silent in the middle must not keep its turn for good. $1 queue
select case when pg_try_advisory_xact_lock(1717660020, $1::integer) then 2147483647 else 0 end,
    set_config('synchronous_commit', 'off', true), set_config('idle_in_transaction_session_timeout', '60s', true)

-- name: select_queue_stats
select f.counted, f.counted_at, f.kept, f.hours
from fairlane.queue_stats f
where f.queue_id = $1::integer

-- name: put_queue_stats
insert into fairlane.queue_stats (queue_id, counted, counted_at, kept, hours, passed_at)
values ($1::integer, $2, $3, $4, $5, $6)
on conflict (queue_id) do update
set counted = excluded.counted, counted_at = excluded.counted_at, kept = excluded.kept, hours = excluded.hours,
    passed_at = excluded.passed_at

-- name: select_stats
-- Journal entries that are not in the stats. $1 queue, $2 after which change, $3 how many
select j.seq, j.stats
from fairlane.journal j
where j.queue_id = $1::integer and j.seq > $2::bigint and j.stats is not null
order by j.seq
limit $3::integer

-- name: delete_stats
-- Entries that are in the stats, and that nobody needs to catch up. $1 queue, $2 up to which
delete from fairlane.journal j
where j.queue_id = $1::integer
  and j.seq <= $2::bigint
  and j.seq < (select s.base from fairlane.queue_states s where s.queue_id = $1 order by s.version desc limit 1)

-- name: put_keys
-- $1 queue, $2 keys as they are now
insert into fairlane.key_stats
    (queue_id, scope, key, label, waiting, running, ended, started_at, held_by, refresh_at, stats)
select $1::integer, u.*
from unnest($2::fairlane.key_stats_row[]) u
on conflict (queue_id, scope, key) do update
set waiting = excluded.waiting, running = excluded.running, ended = excluded.ended, started_at = excluded.started_at,
    held_by = excluded.held_by, refresh_at = excluded.refresh_at, stats = excluded.stats

-- name: delete_keys
-- $1 queue, $2 scopes, $3 keys
delete from fairlane.key_stats k
using unnest($2::text[], $3::text[]) as u (scope, key)
where k.queue_id = $1::integer and k.scope = any (array[u.scope]) and k.key = any (array[u.key])

-- name: select_keys_to_refresh
-- $1 queue, $2 now, $3 how many
select k.waiting, k.running, k.held_by, k.stats
from fairlane.key_stats k
where k.queue_id = $1::integer and k.refresh_at is not null and k.refresh_at <= $2::bigint
order by k.refresh_at
limit $3::integer

-- name: select_minutes_at
-- $1 queue, $2 minutes
select m.stats
from unnest($2::bigint[]) as u (minute)
cross join lateral (
    select m.stats from fairlane.minutes m where m.queue_id = $1::integer and m.minute = u.minute limit 1
) m

-- name: put_minutes
insert into fairlane.minutes (queue_id, minute, stats)
select $1::integer, u.minute, u.stats
from unnest($2::bigint[], $3::text[]) as u (minute, stats)
on conflict (queue_id, minute) do update
set stats = excluded.stats

-- name: delete_old_minutes
-- $1 queue, $2 before which
delete from fairlane.minutes m
where m.queue_id = $1::integer and m.minute < $2::bigint

-- Counting anew.

-- name: walk_lanes_in_use
-- Every lane of a queue with jobs that are ready or run, a stretch at a time. $1 queue, $2 after which, $3 how many
select l.id, l.priority, l.keys, l.ready, l.in_flight
from fairlane.lanes l
where l.queue_id = $1::integer and l.id > $2::bytea and (l.ready > 0 or l.in_flight > 0)
order by l.id
limit $3::integer

-- name: forget_scopes
-- $1 queue, $2 the scopes that are left
delete from fairlane.key_stats k
where k.queue_id = $1::integer and not k.scope = any ($2::text[])

-- name: walk_gates_in_use
-- Every gate of a queue that somebody waits on, a stretch at a time. $1 queue, $2 after which, $3 how many
select g.id, g."limit", g.key
from fairlane.gates g
where g.queue_id = $1::integer and g.id > $2::bytea and g.waiting > 0
order by g.id
limit $3::integer

-- name: reset_keys
-- Keys are about to be counted: no limit holds one back, and nothing waits or runs in the new scopes. $1 queue, $2 new scopes
update fairlane.key_stats k
set waiting = case when k.scope = any ($2::text[]) then 0 else k.waiting end,
    running = case when k.scope = any ($2) then 0 else k.running end,
    held_by = null
where k.queue_id = $1::integer and (k.held_by is not null or k.scope = any ($2))

-- name: delete_idle_keys
-- Keys that say no more than one that was never seen. $1 queue
delete from fairlane.key_stats k
where k.queue_id = $1::integer and k.waiting = 0 and k.running = 0 and k.held_by is null and k.refresh_at is null
