-- What people look at. Nothing is written and no lock is taken; each is one statement, however many queues there are.

-- name: survey
-- $1 queues by name, $2 what is counted row by row is counted up to this
select q.name, s.ready, s.running, s.parked, unseen.jobs as unseen, unseen.bells + released.bells as bells,
    scheduled.jobs as scheduled, scheduled.next_due_at, untallied.tallies as untallied,
    f.tallied_at, coalesce(f.held, '{}') as held, f.oldest_ready_at
from unnest($1::text[]) with ordinality as u (name, nth)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select s.ready, s.running, s.parked, s.arrivals_from, s.releases_from, pg_snapshot_xmin(pg_current_snapshot()) as oldest
    from fairlane.queue_states s
    where s.queue_id = q.id
    order by s.version desc
    limit 1
) s
left join lateral (select f.* from fairlane.queue_figures f where f.queue_id = q.id limit 1) f on true
cross join lateral (
    select coalesce(sum(a.count), 0) as jobs, count(*) as bells
    from (
        select a.count
        from fairlane.arrivals a
        where a.queue_id = q.id and a.xid >= least(s.arrivals_from, s.oldest)
        order by a.xid, a.floor
        limit $2::integer
    ) a
) unseen
cross join lateral (
    select count(*) as bells
    from (
        select
        from fairlane.releases r
        where r.queue_id = q.id and r.xid >= least(s.releases_from, s.oldest)
        limit $2
    ) r
) released
cross join lateral (
    select count(*) as jobs, min(j.due_at) as next_due_at
    from (
        select j.due_at
        from fairlane.jobs j
        where j.queue_id = q.id and j.due_at is not null
        order by j.due_at
        limit $2
    ) j
) scheduled
cross join lateral (
    select count(*) as tallies
    from (
        select from fairlane.tallies t where t.queue_id = q.id and t.id > coalesce(f.tallied, 0) limit $2
    ) t
) untallied
order by u.nth

-- name: count_newest_dead
-- Of the newest dead jobs of all queues, how many are whose; without a name: how many were looked at. $1 how many
with
newest as materialized (
    select j.queue_id, j.state, row_number() over () as nth
    from (
        select f.jobs
        from fairlane.finished f
        where f.is_dead = true
        order by f.id desc
        limit $1::integer
    ) f
    cross join unnest(f.jobs) as d (id)
    cross join lateral (select j.queue_id, j.state from fairlane.jobs j where j.id = d.id limit 1) j
    limit $1
)
select null as name, count(*) as jobs
from newest
union all
select q.name, counted.jobs
from (select n.queue_id, count(*) as jobs from newest n where n.state = 4 group by n.queue_id) counted
cross join lateral (select q.name from fairlane.queues q where q.id = counted.queue_id limit 1) q

-- name: select_minutes
-- $1 queues by name, $2 since when
select q.name, m.figures
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select m.minute, m.figures
    from fairlane.minutes m
    where m.queue_id = q.id and m.minute >= $2::bigint
    order by m.minute
    limit 2000
) m
order by q.name, m.minute

-- name: select_keys_named
-- $1 queues by name, $2 scopes, $3 keys
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join unnest($2::text[], $3::text[]) as n (scope, key)
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.queue_id = q.id and k.scope = n.scope and k.key = n.key
    limit 1
) k

-- name: find_keys
-- Keys by a part of their names, in no order that matters: most searches find few, and the index alone says which. Whatever
-- finds many is asked of a list. $1 queues by name, $2 scope, $3 what labels have in them, $4 how many
select k.key
from unnest($1::text[]) as u (name)
cross join lateral (select q.id from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.key
    from fairlane.key_figures k
    where k.queue_id = q.id and k.scope = $2::text and position($3::text in k.label) > 0
    order by k.key
    limit $4::integer
) k
limit $4

-- A list of keys: most first. $1 queues by name, $2 scope, $3 what labels have in them, $4 whether only those that are held,
-- $5 to $7 after which (what it is sorted by, key, queue), $8 how many.

-- name: list_keys_by_waiting
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.list = q.id::text || '/' || $2::text
      and (-k.waiting, k.key collate "POSIX") >= ($5::bigint, $6::text)
      and (-k.waiting, k.key collate "POSIX", q.name collate "C") > ($5::bigint, $6, $7::text)
      and position($3::text in k.label) > 0
      and (not $4::boolean or k.held_by is not null)
    order by -k.waiting, k.key collate "POSIX"
    limit $8::integer
) k
order by -k.waiting, k.key collate "POSIX", q.name collate "C"
limit $8

-- name: list_keys_by_running
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.list = q.id::text || '/' || $2::text
      and (-k.running, k.key collate "POSIX") >= ($5::bigint, $6::text)
      and (-k.running, k.key collate "POSIX", q.name collate "C") > ($5::bigint, $6, $7::text)
      and position($3::text in k.label) > 0
      and (not $4::boolean or k.held_by is not null)
    order by -k.running, k.key collate "POSIX"
    limit $8::integer
) k
order by -k.running, k.key collate "POSIX", q.name collate "C"
limit $8

-- name: list_keys_by_done
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.list = q.id::text || '/' || $2::text
      and (-k.done, k.key collate "POSIX") >= ($5::bigint, $6::text)
      and (-k.done, k.key collate "POSIX", q.name collate "C") > ($5::bigint, $6, $7::text)
      and position($3::text in k.label) > 0
      and (not $4::boolean or k.held_by is not null)
    order by -k.done, k.key collate "POSIX"
    limit $8::integer
) k
order by -k.done, k.key collate "POSIX", q.name collate "C"
limit $8

-- name: list_keys_by_start
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.list = q.id::text || '/' || $2::text
      and (-coalesce(k.started_at, 0), k.key collate "POSIX") >= ($5::bigint, $6::text)
      and (-coalesce(k.started_at, 0), k.key collate "POSIX", q.name collate "C") > ($5::bigint, $6, $7::text)
      and position($3::text in k.label) > 0
      and (not $4::boolean or k.held_by is not null)
    order by -coalesce(k.started_at, 0), k.key collate "POSIX"
    limit $8::integer
) k
order by -coalesce(k.started_at, 0), k.key collate "POSIX", q.name collate "C"
limit $8

-- name: list_keys_by_name
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.queue_id = q.id and k.scope = $2::text
      and k.key >= $6::text and $5::bigint is not null
      and (k.key, q.name collate "C") > ($6, $7::text)
      and position($3::text in k.label) > 0
      and (not $4::boolean or k.held_by is not null)
    order by k.key
    limit $8::integer
) k
order by k.key, q.name collate "C"
limit $8

-- name: list_keys_by_waiting_if_held
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.list = q.id::text || '/' || $2::text
      and (-k.waiting, k.key collate "POSIX") >= ($5::bigint, $6::text)
      and (-k.waiting, k.key collate "POSIX", q.name collate "C") > ($5::bigint, $6, $7::text)
      and position($3::text in k.label) > 0
      and k.held_by is not null and $4::boolean
    order by -k.waiting, k.key collate "POSIX"
    limit $8::integer
) k
order by -k.waiting, k.key collate "POSIX", q.name collate "C"
limit $8

-- name: list_held_keys
-- Of all scopes, the keys behind whose limits most jobs wait. $1 queues by name, $2 how many
select q.name, k.scope, k.key, k.waiting, k.running, k.done, k.failed, k.ran, k.arrived_at, k.started_at, k.run_time,
    k.held_by, k.hours
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_figures k
    where k.queue_id = q.id and k.held_by > ''  -- as the index says it, which is not for lists of one scope
    order by k.waiting desc
    limit $2::integer
) k
order by k.waiting desc, q.name, k.key
limit $2

-- name: select_all_lanes_of_flow
-- Every lane of a flow, those that most jobs wait in first. $1 flow, $2 how many, $3 of how many
select l.id, l.flow, l.priority, l.keys, l.ready, l.in_flight, l.floor, l.rank, l.standing, l.gate, l.tag
from (
    (
        select l.id, l.flow, l.priority, l.keys, l.ready, l.in_flight, l.floor, l.rank, l.standing, l.gate, l.tag
        from fairlane.lanes l
        where l.flow = $1::bytea
        limit $3::integer
    )
    union all
    (
        select f.lane, f.id, f.lane_priority, f.lane_keys, f.lane_ready, f.lane_in_flight, f.lane_floor, f.lane_rank,
            f.lane_standing, f.lane_gate, f.lane_tag
        from (select f.* from fairlane.flows f where f.id = $1 order by f.version desc limit 1) f
        where f.lane is not null
    )
) l
order by l.ready desc, l.rank
limit $2::integer

-- name: select_scheduled_by_lane
-- The scheduled jobs of these queues that are due first, by lane. $1 queues by name, $2 how many
select l.priority, one.keys, l.jobs
from (
    select j.priority, min(j.place) as place, count(*) as jobs
    from (
        select j.due_at, j.lane, j.priority, j.place
        from unnest($1::text[]) as u (name)
        cross join lateral (select q.id from fairlane.queues q where q.name = u.name limit 1) q
        cross join lateral (
            select j.due_at, j.lane, j.priority, j.ctid as place
            from fairlane.jobs j
            where j.queue_id = q.id and j.due_at is not null
            order by j.due_at
            limit $2::integer
        ) j
        order by j.due_at
        limit $2
    ) j
    group by j.lane, j.priority
) l
cross join lateral (
    select fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text as keys
    from fairlane.jobs j
    where j.ctid = l.place
    limit 1
) one

-- name: select_unseen
-- Bells of arrivals that no claim has folded. $1 queues by name, $2 how many
select a.priority, a.keys, a.count
from unnest($1::text[]) as u (name)
cross join lateral (select q.id from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select s.arrivals_from
    from fairlane.queue_states s
    where s.queue_id = q.id
    order by s.version desc
    limit 1
) s
cross join lateral (
    select a.priority, a.keys::text as keys, a.count
    from fairlane.arrivals a
    where a.queue_id = q.id and a.xid >= least(s.arrivals_from, pg_snapshot_xmin(pg_current_snapshot()))
    order by a.xid, a.floor
    limit $2::integer
) a
limit $2

-- name: select_gates_named
select g.id, g."limit", g.key, g.in_flight, g.tat, g.waiting, g.awake, g.wake_at, g.memo, g.value, g.given_by
from unnest($1::bytea[]) as u (id)
cross join lateral (
    select g.*
    from fairlane.gates g
    where g.id = u.id
    order by g.version desc
    limit 1
) g

-- name: select_lanes_of_flow
-- Lanes with ready jobs, whether they wait at a gate or not: the lowest rank first. $1 flow, $2 how many
select l.id, l.flow, l.priority, l.keys, l.ready, l.in_flight, l.floor, l.rank, l.standing, l.gate, l.tag, l.head
from (
    (
        select l.*
        from fairlane.lanes l
        where l.flow = $1::bytea and l.standing = 1
        order by l.rank, l.head, l.version desc
        limit $2::integer
    )
    union all
    (
        select l.*
        from fairlane.lanes l
        where l.flow = $1 and l.standing > 1  -- parked; said so, no index of parked lanes is walked
        order by l.rank, l.head
        limit $2
    )
) l
order by l.rank, l.head
limit $2

-- name: select_jobs_at
-- Jobs by their place, in the same snapshot.
select j.*
from unnest($1::tid[]) with ordinality as u (place, nth)
cross join lateral (
    select j.id, q.name, j.task, j.state, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at, j.due_at,
        j.claimed_at, j.finished_at, j.worker, j.error, j.result, j.progress, j.progress_message, j.cancel_requested,
        j.replays, j.on_dead is not null as has_on_dead, j.context
    from fairlane.jobs j
    cross join lateral (select q.name from fairlane.queues q where q.id = j.queue_id limit 1) q
    where j.ctid = u.place
    limit 1
) j
order by u.nth

-- Workers.

-- name: put_worker
-- $1 now or null, $2 who, $3 what it says, $4 how long reports are kept
with
clock as materialized (
    select fairlane.keep_instant($1::bigint) as now
),
forgotten as (
    delete from fairlane.workers w
    using clock
    where w.id >= '00000000-0000-0000-0000-000000000000' and w.id <> $2::uuid and w.seen_at < clock.now - $4::bigint
)
insert into fairlane.workers (id, seen_at, report)
select $2, clock.now, $3::text
from clock
on conflict (id) do update
set seen_at = excluded.seen_at, report = excluded.report

-- name: delete_worker
delete from fairlane.workers
where id = $1::uuid

-- name: select_workers
-- $1 now or null, $2 how long reports are kept
select w.id, w.seen_at, w.report
from fairlane.workers w
where w.id >= '00000000-0000-0000-0000-000000000000' and w.seen_at >= (select fairlane.instant($1::bigint)) - $2::bigint
order by w.seen_at desc, w.id
limit 10000
