-- What people look at. Nothing is written and no lock is taken; each is one statement, however many queues there are.

-- name: survey
-- What claims have left. $1 queues by name, $2 scheduled jobs are counted up to this, $3 now: what is due is unseen
select q.name, s.ready, s.running, scheduled.jobs, f.counted_at, f.hours
from unnest($1::text[]) with ordinality as u (name, nth)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select s.ready, s.running from fairlane.queue_states s where s.queue_id = q.id order by s.version desc limit 1
) s
left join lateral (select f.* from fairlane.queue_stats f where f.queue_id = q.id limit 1) f on true
cross join lateral (
    select count(*) as jobs
    from (
        select
        from fairlane.jobs j
        where j.queue_id = q.id and j.due_at > $3::bigint
        order by j.due_at
        limit $2
    ) j
) scheduled
order by u.nth

-- name: count_lapsed
-- Of the jobs that run, those whose leases are over and that nobody has taken back. $1 queues by name, $2 now, $3 at most
select q.name, count(*)
from (
    select l.queue_id
    from fairlane.leases l
    cross join unnest(l.jobs) as held (id)
    cross join lateral (
        select from fairlane.jobs j where j.id = held.id and j.lease = l.id and j.state = {running} limit 1
    ) j
    where l.expires_at <= $2::bigint
    limit $3
) l
cross join lateral (select q.name from fairlane.queues q where q.id = l.queue_id limit 1) q
where q.name = any ($1::text[])
group by q.name

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
from (select n.queue_id, count(*) as jobs from newest n where n.state = {dead} group by n.queue_id) counted
cross join lateral (select q.name from fairlane.queues q where q.id = counted.queue_id limit 1) q

-- part: named_queues
from unnest($1::text[]) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q

-- name: select_minutes
-- $1 queues by name, $2 since when
select q.name, m.stats
{named_queues}
cross join lateral (
    select m.minute, m.stats
    from fairlane.minutes m
    where m.queue_id = q.id and m.minute >= $2::bigint
    order by m.minute
    limit 2000
) m
order by q.name, m.minute

-- name: select_keys
-- Keys by queue, scope and name, where they are stored. $1 queues, $2 scopes, $3 keys
select q.name, k.waiting, k.running, k.held_by, k.stats
from unnest($1::text[], $2::text[], $3::text[]) as n (name, scope, key)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = n.name limit 1) q
cross join lateral (
    select k.*
    from fairlane.key_stats k
    where k.queue_id = q.id and k.scope = n.scope and k.key = n.key
    limit 1
) k

-- part: sums
'[' || to_json(k.scope) || ',' || to_json(k.key) || ',' || k.waiting || ',' || k.running || ',' || k.ended || ','
        || coalesce(k.started_at, 0) || ',' || coalesce(k.held_by, '[]') || ']'

-- name: select_key_sums
-- What lists of keys are sorted by, of every key of a scope: of each queue one JSON array. $1 queues by name, $2 scope
select q.name, '[' || string_agg(k.sums, ',') || ']'
{named_queues}
cross join lateral (
    select {sums} as sums
    from fairlane.key_stats k
    where k.queue_id = q.id and k.scope = $2::text
    offset 0
) k
group by q.name

-- name: select_held_sums
-- The same of the keys that limits and pauses hold back, of every scope. $1 queues by name
select q.name, '[' || string_agg(k.sums, ',') || ']'
{named_queues}
cross join lateral (
    select {sums} as sums
    from fairlane.key_stats k
    where k.queue_id = q.id and k.held_by is not null
    offset 0
) k
group by q.name

-- name: find_keys
-- Keys by a part of their names, in no order that matters: most searches find few, and the index alone says which. Whatever
-- finds many is asked of a list. $1 queues by name, $2 scope, $3 what labels have in them, $4 how many
select k.key
from unnest($1::text[]) as u (name)
cross join lateral (select q.id from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select k.key
    from fairlane.key_stats k
    where k.queue_id = q.id and k.scope = $2::text and position($3::text in k.label) > 0
    order by k.key
    limit $4::integer
) k
limit $4

-- A list of keys: most first. $1 the queue's name, $2 scope, $3 what labels have in them, $4 to $6 after which (what it is
-- sorted by, key, queue), $7 how many, $8 keys that are known better.

-- name: list_keys_by_waiting = k.waiting
-- name: list_keys_by_running = k.running
-- name: list_keys_by_ended = k.ended
-- name: list_keys_by_started = coalesce(k.started_at, 0)
select k.key
from fairlane.queues q
cross join lateral (
    select k.key
    from fairlane.key_stats k
    where k.list = q.id::text || '/' || $2::text
      and (-{it}, k.key collate "POSIX") >= ($4::bigint, $5::text)
      and (-{it}, k.key collate "POSIX", q.name collate "C") > ($4::bigint, $5, $6::text)
      and position($3::text in k.label) > 0
      and not k.key = any ($8::text[])
    order by -{it}, k.key collate "POSIX"
    limit $7::integer
) k
where q.name = $1::text

-- name: list_keys_by_name
select k.key
from fairlane.queues q
cross join lateral (
    select k.key
    from fairlane.key_stats k
    where k.queue_id = q.id and k.scope = $2::text
      and k.key >= $5::text and $4::bigint is not null
      and (k.key, q.name collate "C") > ($5, $6::text)
      and position($3::text in k.label) > 0
      and not k.key = any ($8::text[])
    order by k.key
    limit $7::integer
) k
where q.name = $1::text

-- name: select_all_lanes_of_flow
-- Lanes of a flow, in no order. $1 flow, $2 how many, $3 but not these
select l.id, l.flow, l.priority, l.keys, l.ready, l.in_flight, l.floor, l.rank, l.standing, l.gate, l.tag
from fairlane.lanes l
where l.flow = $1::bytea and not l.id = any ($3::bytea[])
limit $2::integer

-- name: select_scheduled_by_lane
-- The jobs of these queues that are due next, by lane. $1 queues by name, $2 how many, $3 now
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
            where j.queue_id = q.id and j.due_at > $3::bigint
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

-- name: select_oldest_lanes
-- Lanes with ready jobs, of each queue those first whose heads can be the oldest: a rank is a lower bound.
-- $1 queues by name, $2 how much older a priority makes a job there, $3 how many of each queue
select q.name, l.id, l.floor, l.since
from unnest($1::text[], $2::bigint[]) as u (name, step)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select l.id, l.floor, l.rank + l.priority * u.step as since
    from fairlane.lanes l
    where l.queue_id = q.id and l.ready > 0
    order by since
    limit $3::integer
) l

-- part: unseen_since
{named_queues}
cross join lateral (
    select least(s.arrivals_from, pg_snapshot_xmin(pg_current_snapshot())) as since
    from fairlane.queue_states s
    where s.queue_id = q.id
    order by s.version desc
    limit 1
) s

-- name: select_unseen
-- How much has come that no claim has seen, of what arrived and of what is due by now: jobs, since when the first of them is
-- ready, and events. $1 queues by name, $2 now.
-- (`offset 0`, here and below: a join that is turned round would walk the whole index.)
select q.name, sum(a.count)::bigint, min(a.since) filter (where a.count > 0), count(*)
{unseen_since}
cross join lateral (
    select a.count, a.since from fairlane.arrivals a where a.queue_id = q.id and a.xid >= s.since
    union all
    select 1, j.due_at from fairlane.jobs j where j.queue_id = q.id and j.due_at <= $2::bigint
    offset 0
) a
group by q.name

-- name: select_unseen_given
-- The different numbers that these jobs brought along, each with the latest job that did. $1 queues by name,
-- $2 now
select q.name, a.given, max(a.given_by)
{unseen_since}
cross join lateral (
    select a.given, a.given_by from fairlane.arrivals a where a.queue_id = q.id and a.xid >= s.since
    union all
    select j.given, j.given_by from fairlane.jobs j where j.queue_id = q.id and j.due_at <= $2::bigint
    offset 0
) a
where a.given is not null
group by q.name, a.given

-- name: select_resumed
-- How many jobs had kept their place in a sequence until now, by keys: those that have come, and those that are due.
-- $1 queues by name, $2 now
select q.name, a.priority, min(a.keys::text), sum(a.resumed)
{unseen_since}
cross join lateral (select a.* from fairlane.arrivals a where a.queue_id = q.id and a.xid >= s.since offset 0) a
where a.resumed > 0
group by q.name, a.lane, a.priority
union all
select q.name, j.priority, min(fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text), count(*)
from unnest($1) as u (name)
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select j.* from fairlane.jobs j where j.queue_id = q.id and j.keeps_place and j.due_at <= $2::bigint offset 0
) j
group by q.name, j.lane, j.priority

-- name: select_unseen_lanes
-- All of them by lane and by what they brought along: of each queue one JSON array of lane stats (the zeros are what only
-- claims tell), since rows one by one would take longer than all the rest. $1 queues by name, $2 now
select q.name, '[' || string_agg(lanes.lane, ',') || ']'
{unseen_since}
cross join lateral (
    select '[' || min(a.keys::text) || ',' || a.priority || ',' || sum(a.count) || ',0,0,0,0,0,0,'
        || max(case when a.count > 0 then a.since else 0 end) || ',0,0,' || coalesce(a.given, 'null') || ','
        || coalesce(max(a.given_by), 0) || ']' as lane
    from (
        select a.lane, a.priority, a.keys, a.count, a.since, a.given, a.given_by
        from fairlane.arrivals a
        where a.queue_id = q.id and a.xid >= s.since
        union all
        select j.lane, j.priority, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task), 1, j.due_at, j.given, j.given_by
        from fairlane.jobs j
        where j.queue_id = q.id and j.due_at <= $2::bigint
        offset 0
    ) a
    group by a.lane, a.priority, a.given
) lanes
group by q.name

-- name: select_pending_releases
-- Claims that have ended and that no claim has seen, each with since when the queue's policy is in force. $1 queues by name
select q.name, q.applied_at, u.lane, u.ended, u.ran, u.charged, u.unstarted, u.refund, u.since, coalesce(u.failed, 0),
    coalesce(u.neutral, 0), coalesce(u.latest, 0), coalesce(u.kept, 0), coalesce(u.lost, 0), u.signal
from unnest($1::text[]) as n (name)
cross join lateral (select q.id, q.name, q.applied_at from fairlane.queues q where q.name = n.name limit 1) q
cross join lateral (
    select least(s.releases_from, pg_snapshot_xmin(pg_current_snapshot())) as since
    from fairlane.queue_states s
    where s.queue_id = q.id
    order by s.version desc
    limit 1
) s
cross join lateral (select r.* from fairlane.releases r where r.queue_id = q.id and r.xid >= s.since offset 0) r
cross join lateral unnest(
    r.lanes, r.ended, r.ran, r.charged, r.unstarted, r.refund, r.since, r.failed, r.neutral, r.latest, r.kept, r.lost, r.signal
) as u (lane, ended, ran, charged, unstarted, refund, since, failed, neutral, latest, kept, lost, signal)

-- name: select_keys_of_lanes
-- $1 queues by name, $2 lanes
select l.id, l.priority, l.keys
from unnest($1::text[], $2::bytea[]) as u (name, lane)
cross join lateral (select q.id from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select l.id, l.priority, l.keys from fairlane.lanes l where l.queue_id = q.id and l.id = u.lane limit 1
) l

-- name: select_stats_of
-- Journal entries that are not in the stats, in order. $1 queues by name
select q.name, j.stats
{named_queues}
cross join lateral (
    select j.seq, j.stats
    from fairlane.journal j
    where j.queue_id = q.id
      and j.seq > coalesce((select f.counted from fairlane.queue_stats f where f.queue_id = q.id limit 1), 0)
      and j.stats is not null
    offset 0
) j
order by q.name, j.seq

-- name: select_tails
-- What the tables of these queues do not hold, in order. $1 queues by name
select q.name, j.delta
{named_queues}
cross join lateral (
    select s.stored from fairlane.queue_states s where s.queue_id = q.id order by s.version desc limit 1
) s
cross join lateral (
    select j.seq, j.delta from fairlane.journal j where j.queue_id = q.id and j.seq > s.stored offset 0
) j
order by q.name, j.seq

-- name: select_gates_named
-- $1 queues by name, $2 gates
select g.id, g."limit", g.key, g.in_flight, g.tat, g.waiting, g.awake, g.wake_at, g.memo, g.value, g.given_by
from unnest($1::text[], $2::bytea[]) as u (name, id)
cross join lateral (select q.id from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (select g.* from fairlane.gates g where g.queue_id = q.id and g.id = u.id limit 1) g

-- name: select_gates_in_doubt
-- Gates that may be open although lanes wait on them, since their time has come; and those in use on which none wait, and
-- which may be shut all the same, and those with room that somebody was woken for while others wait. Of the latter, those that
-- jobs may wait for. And those on which lanes wait for a number that unseen jobs may have brought.
-- $1 queues by name, $2 limits, $3 their scopes, $4 whether unseen jobs bring their numbers, $5 now, $6 keys of which jobs wait
-- besides those that stats say; null: any
select q.name, g."limit", g.key
from (select distinct u.name from unnest($1::text[]) as u (name)) n
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = n.name limit 1) q
cross join lateral (
    select g.* from fairlane.gates g where g.queue_id = q.id and g.wake_at <= $5::bigint and g.waiting > 0 offset 0
) g
union all
select q.name, g."limit", g.key
from (select distinct u.name from unnest($1) as u (name)) n
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = n.name limit 1) q
cross join lateral (
    select g.*
    from fairlane.gates g
    where g.queue_id = q.id
      and case when g.waiting > 0 then g.awake > 0 else g.in_flight > 0 or g.tat > $5 or g.value = 0 end
    offset 0
) g
join unnest($1, $2::text[], $3::text[]) as u (name, "limit", scope) on u.name = q.name and u."limit" = g."limit"
where $6::text[] is null
   or g.key = any ($6)
   or (select k.waiting from fairlane.key_stats k where k.queue_id = q.id and k.scope = u.scope and k.key = g.key) > 0
union all
select q.name, g."limit", g.key
from (select u.* from unnest($1, $2, $4::boolean[]) as u (name, "limit", is_brought) where u.is_brought) u
cross join lateral (select q.id, q.name from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (
    select g.* from fairlane.gates g where g.queue_id = q.id and g."limit" = u."limit" and g.waiting > 0 offset 0
) g
where $6 is null or g.key = any ($6)

-- name: select_shared_in_use
-- Gates of keys that queues share, and that may be shut. $1 limits by name, $2 now
select g."limit", g.key
from unnest($1::text[]) as u (name)
cross join lateral (select l.id from fairlane.shared_limits l where l.name = u.name limit 1) l
cross join lateral (
    select g.* from fairlane.shared_gates g where g.shared_limit = l.id and (g.in_flight > 0 or g.tat > $2::bigint) offset 0
) g

-- name: select_woken_gates
-- Gates that these queues are to look at, because another queue has left them room. $1 queues by name
select q.name, r.gate
{named_queues}
cross join lateral (select r.gate from fairlane.gate_wakeups r where r.queue_id = q.id offset 0) r

-- name: select_shared_ends
-- What has ended at limits that queues share, and no claim has folded. $1 limits by name
select r.gate, q.name, r.task, r.ended, r.ran, r.unstarted, r.since, r.failed, r.neutral, r.latest
from unnest($1::text[]) as u (name)
cross join lateral (select l.id from fairlane.shared_limits l where l.name = u.name limit 1) l
cross join lateral (select r.* from fairlane.shared_releases r where r.shared_limit = l.id offset 0) r
cross join lateral (select q.name from fairlane.queues q where q.id = r.queue_id limit 1) q

-- name: select_weights_named
-- Flows: their own weights, and by which jobs those were given. $1 queues by name, $2 flows
select f.id, f.weight, f.given_by
from unnest($1::text[], $2::bytea[]) as u (name, id)
cross join lateral (select q.id from fairlane.queues q where q.name = u.name limit 1) q
cross join lateral (select f.* from fairlane.flows f where f.queue_id = q.id and f.id = u.id limit 1) f

-- name: select_lanes_of_flows
-- Lanes with ready jobs of each of these flows, up to a number. $1 queues by name, $2 flows, $3 how many of each
select l.id, l.flow, l.priority, l.keys, l.ready, l.in_flight, l.floor, l.rank, l.standing, l.gate, l.tag, l.head
from unnest($1::text[], $2::bytea[]) as u (name, flow)
cross join lateral (select l.* from fairlane.lanes l where l.flow = u.flow and l.ready > 0 limit $3::integer) l

-- name: select_lanes_of_flow
-- Lanes with ready jobs, whether they wait at a gate or not: the lowest rank first. $1 flow, $2 how many
select l.id, l.flow, l.priority, l.keys, l.ready, l.in_flight, l.floor, l.rank, l.standing, l.gate, l.tag, l.head
from (
    (
        select l.*
        from fairlane.lanes l
        where l.flow = $1::bytea and l.standing = 1 and not l.id = any ($3::bytea[])
        order by l.rank, l.head
        limit $2::integer
    )
    union all
    (
        select l.*
        from fairlane.lanes l
        where l.flow = $1 and not l.id = any ($3) and l.standing > 1  -- parked; said so, no index of parked lanes is walked
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
    select {job_columns}
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
-- $1 since when
select w.id, w.seen_at, w.report
from fairlane.workers w
where w.id >= '00000000-0000-0000-0000-000000000000' and w.seen_at >= $1::bigint
order by w.seen_at desc, w.id
limit 10000
