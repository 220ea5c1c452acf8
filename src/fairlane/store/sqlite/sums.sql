-- Adding up journal entries.

-- name: look_before_adding_up
-- Whether there is anything to do. ?1 the queue's name, ?2 now, ?3 how many claims are looked at
select q.id, coalesce(f.kept, ''), coalesce(f.passed_at, 0),
    exists (select 1 from key_stats where queue = q.id and refresh_at is not null and refresh_at <= ?2)
    or exists (select 1 from minutes where queue = q.id and minute < ?2 / 60000000 - 1440),
    (
        select count(*)
        from (select 1 from journal where queue = q.id and stats is not null and seq > coalesce(f.counted, 0) limit ?3)
    )
from queues as q
left join queue_stats as f on f.queue = q.id
where q.name = ?1

-- name: select_queue_stats
select counted, counted_at, kept, hours
from queue_stats
where queue = ?

-- name: put_queue_stats
insert into queue_stats (queue, counted, counted_at, kept, hours, passed_at)
values (?, ?, ?, ?, ?, ?)
on conflict (queue) do update
set counted = excluded.counted, counted_at = excluded.counted_at, kept = excluded.kept, hours = excluded.hours,
    passed_at = excluded.passed_at

-- name: select_stats
-- Journal entries that are not in the stats. ?1 queue, ?2 after which change, ?3 how many
select seq, stats
from journal
where queue = ? and seq > ? and stats is not null
order by seq
limit ?

-- name: delete_stats
-- Entries that are in the stats, and that nobody needs to catch up. ?1 queue, ?2 up to which
delete from journal
where queue = ?1 and seq <= ?2 and seq < (select base from queues where id = ?1)

-- name: put_keys
insert into key_stats
    (queue, scope, key, label, waiting, running, ended, started_at, held_by, refresh_at, stats)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
on conflict (queue, scope, key) do update
set waiting = excluded.waiting, running = excluded.running, ended = excluded.ended, started_at = excluded.started_at,
    held_by = excluded.held_by, refresh_at = excluded.refresh_at, stats = excluded.stats

-- name: delete_keys
-- ?1 queue, ?2 [[scope, key], …]
delete from key_stats
where queue = ?1 and (scope, key) in (select value ->> 0, value ->> 1 from json_each(?2))

-- name: select_keys_to_refresh
select waiting, running, held_by, stats
from key_stats
where queue = ? and refresh_at is not null and refresh_at <= ?
order by refresh_at
limit ?

-- name: select_minutes_at
-- ?1 queue, ?2 minutes
select m.stats
from json_each(?2) as u
cross join minutes as m on m.queue = ?1 and m.minute = u.value

-- name: put_minutes
-- ?1 queue, ?2 [[minute, stats], …]
insert into minutes (queue, minute, stats)
select ?1, value ->> 0, value ->> 1
from json_each(?2)
where true
on conflict (queue, minute) do update
set stats = excluded.stats

-- name: delete_old_minutes
delete from minutes
where queue = ? and minute < ?

-- Counting anew.

-- name: walk_lanes_in_use
-- Every lane of a queue with jobs that are ready or run, a stretch at a time. ?1 queue, ?2 after which, ?3 how many
select id, priority, keys, ready, in_flight
from lanes
where id > ?2 and queue = ?1 and (ready > 0 or in_flight > 0)
order by id
limit ?3

-- name: forget_scopes
-- ?1 queue, ?2 the scopes that are left
delete from key_stats
where queue = ?1 and scope not in (select value from json_each(?2))

-- name: walk_gates_in_use
-- Every gate of a queue that somebody waits on, a stretch at a time. ?1 queue, ?2 after which, ?3 how many
select id, "limit", key
from gates
where id > ?2 and queue = ?1 and waiting > 0
order by id
limit ?3

-- name: reset_keys
-- Keys are about to be counted: no limit holds one back, and nothing waits or runs in the new scopes. ?1 queue, ?2 new scopes
update key_stats
set waiting = iif(scope in (select value from json_each(?2)), 0, waiting),
    running = iif(scope in (select value from json_each(?2)), 0, running),
    held_by = null
where queue = ?1 and (held_by is not null or scope in (select value from json_each(?2)))

-- name: delete_idle_keys
-- Keys that say no more than one that was never seen.
delete from key_stats
where queue = ? and waiting = 0 and running = 0 and held_by is null and refresh_at is null
