-- What people look at. Nothing is written; a statement for each queue, where there is no table that names it.

-- part: named_queues
from json_each(?1) as u
cross join queues as q on q.name = u.value

-- name: survey
-- What claims have left. ?1 queues by name, ?2 scheduled jobs are counted up to this, ?3 now: what is due is unseen
select q.name, q.ready, q.running, (select count(*) from (select 1 from jobs where queue = q.id and due_at > ?3 limit ?2)),
    f.counted_at, f.hours
{named_queues}
left join queue_stats as f on f.queue = q.id
order by u.key

-- name: count_lapsed
-- Of the jobs that run, those whose leases are over and that nobody has taken back. ?1 queues by name, ?2 now, ?3 at most
select q.name, count(*)
from (
    select jobs.queue
    from leases
    cross join json_each(leases.jobs) as held
    cross join jobs on jobs.position = held.value
    where leases.expires_at <= ?2 and jobs.lease = leases.id and jobs.state = {running}
    limit ?3
) as lapsed
cross join queues as q on q.id = lapsed.queue
where q.name in (select value from json_each(?1))
group by q.name

-- name: count_newest_dead
-- Of the newest dead jobs of all queues, how many are whose. ?1 how many
select q.name, count(*)
from (select queue from jobs where state = {dead} and finished_at is not null order by finished_at desc limit ?1) as d
cross join queues as q on q.id = d.queue
group by q.name

-- name: select_minutes
-- ?1 queues by name, ?2 since when
select q.name, m.stats
{named_queues}
cross join minutes as m on m.queue = q.id and m.minute >= ?2
order by q.name, m.minute

-- name: select_keys
-- Keys by queue, scope and name, where they are stored. ?1 [[queue, scope, key], …]
select q.name, k.waiting, k.running, k.held_by, k.stats
from json_each(?1) as n
cross join queues as q on q.name = n.value ->> 0
cross join key_stats as k on k.queue = q.id and k.scope = n.value ->> 1 and k.key = n.value ->> 2

-- part: sums
'[' || group_concat(
    '[' || json_quote(k.scope) || ',' || json_quote(k.key) || ',' || k.waiting || ',' || k.running || ',' || k.ended || ','
    || coalesce(k.started_at, 0) || ',' || coalesce(k.held_by, '[]') || ']'
) || ']'

-- name: select_key_sums
-- What lists of keys are sorted by, of every key of a scope: of each queue one JSON array. ?1 queues by name, ?2 scope
select q.name, {sums}
{named_queues}
cross join key_stats as k on k.queue = q.id and k.scope = ?2
group by q.name

-- name: select_held_sums
-- The same of the keys that limits and pauses hold back, of every scope. ?1 queues by name
select q.name, {sums}
{named_queues}
cross join key_stats as k on k.queue = q.id and k.held_by is not null
group by q.name

-- name: find_keys
-- Keys by a part of their names, each once: most searches find few, and the table is walked in its own order. Whatever finds
-- many is asked of a list. ?1 queues by name, ?2 scope, ?3 what labels have in them, ?4 how many
select distinct k.key
{named_queues}
cross join key_stats as k on k.queue = q.id
where k.scope = ?2 and instr(k.label, ?3) > 0
limit ?4

-- A list of keys: most first. ?1 the queue's name, ?2 scope, ?3 what labels have in them, ?4 to ?6 after which (what it is
-- sorted by, key, queue).

-- name: list_keys_by_waiting = k.waiting
-- name: list_keys_by_running = k.running
-- name: list_keys_by_ended = k.ended
-- name: list_keys_by_started = coalesce(k.started_at, 0)
select k.key
from queues as q
cross join key_stats as k on k.queue = q.id
where q.name = ?1 and k.scope = ?2
  and (-{it}, k.key) >= (?4, ?5)
  and (-{it}, k.key, q.name) > (?4, ?5, ?6)
  and (?3 = '' or instr(k.label, ?3) > 0)
order by -{it}, k.key

-- name: list_keys_by_name
select k.key
from queues as q
cross join key_stats as k on k.queue = q.id
where q.name = ?1 and k.scope = ?2
  and k.key >= ?5 and ?4 is not null
  and (k.key, q.name) > (?5, ?6)
  and (?3 = '' or instr(k.label, ?3) > 0)
order by k.key

-- name: select_all_lanes_of_flow
-- Every lane of a flow, one by one.
select id, flow, priority, keys, ready, in_flight, floor, rank, standing, gate, tag, head
from lanes
where flow = ?

-- name: select_scheduled_by_lane
-- The jobs of these queues that are due next, by lane. ?1 queues by name, ?2 how many, ?3 now
select priority, lane_keys, count(*)
from (
    select j.lane, j.priority, j.lane_keys
    from json_each(?1) as u
    cross join queues as q on q.name = u.value
    cross join jobs as j on j.position in (
        select due.position from jobs as due where due.queue = q.id and due.due_at > ?3 order by due.due_at limit ?2
    )
    order by j.due_at
    limit ?2
)
group by lane, priority

-- name: select_oldest_lanes
-- Lanes with ready jobs, of each queue those first whose heads can be the oldest: a rank is a lower bound.
-- ?1 [[queue, how much older a priority makes a job there], …], ?2 how many of each queue
select name, id, floor, since
from (
    select *, row_number() over (partition by name order by since) as nth
    from (
        select q.name, l.id, l.floor, l.rank + l.priority * (u.value ->> 1) as since
        from json_each(?1) as u
        cross join queues as q on q.name = u.value ->> 0
        cross join lanes as l on l.queue = q.id and l.ready > 0
    )
)
where nth <= ?2

-- name: select_unseen
-- How much has come that no claim has seen, of what arrived and of what is due by now: jobs, since when the first of them is
-- ready, and events. ?1 queues by name, ?2 now
select name, sum(count), min(iif(count > 0, since, null)), count(*)
from (
    select q.name, a.count, a.since
    {named_queues}
    cross join arrivals as a on a.queue = q.id
    union all
    select q.name, 1, j.due_at
    {named_queues}
    cross join jobs as j on j.queue = q.id and j.due_at <= ?2
)
group by name

-- name: select_unseen_given
-- The different numbers that these jobs brought along, each with the latest job that did. ?1 queues by name, ?2 now
select name, given, max(given_by)
from (
    select q.name, a.given, a.given_by
    {named_queues}
    cross join arrivals as a on a.queue = q.id
    union all
    select q.name, j.given, j.given_by
    {named_queues}
    cross join jobs as j on j.queue = q.id and j.due_at <= ?2
)
where given is not null
group by name, given

-- name: select_resumed
-- How many jobs had kept their place in a sequence until now, by keys: those that have come, and those that are due.
-- ?1 queues by name, ?2 now
select q.name, a.priority, a.keys, sum(a.resumed)
{named_queues}
cross join arrivals as a on a.queue = q.id
where a.resumed > 0
group by q.name, a.lane, a.priority
union all
select q.name, j.priority, j.lane_keys, count(*)
{named_queues}
cross join jobs as j indexed by jobs_keeping_place on j.queue = q.id and j.keeps_place = 1 and j.due_at <= ?2
group by q.name, j.lane, j.priority

-- name: select_unseen_lanes
-- All of them by lane and by what they brought along: of each queue one JSON array of lane stats (the zeros are what only
-- claims tell). ?1 queues by name, ?2 now
select name, '[' || group_concat(
    '[' || keys || ',' || priority || ',' || jobs || ',0,0,0,0,0,0,' || newest || ',0,0,' || given || ',' || given_by || ']'
) || ']'
from (
    select name, priority, keys, sum(count) as jobs, max(case when count > 0 then since else 0 end) as newest,
        coalesce(given, 'null') as given, coalesce(max(given_by), 0) as given_by
    from (
        select q.name, a.lane, a.priority, a.keys, a.count, a.since, a.given, a.given_by
        {named_queues}
        cross join arrivals as a on a.queue = q.id
        union all
        select q.name, j.lane, j.priority, j.lane_keys, 1, j.due_at, j.given, j.given_by
        {named_queues}
        cross join jobs as j on j.queue = q.id and j.due_at <= ?2
    )
    group by name, lane, priority, given
)
group by name

-- name: select_pending_releases
-- Claims that have ended and that no claim has seen, each with since when the queue's policy is in force, and with its lane in
-- hexadecimal. ?1 queues by name
select q.name, q.applied_at, b.value ->> 0, b.value ->> 1, b.value ->> 2, b.value ->> 3, b.value ->> 4, b.value ->> 5,
    b.value ->> 6, b.value ->> 7, b.value ->> 8, b.value ->> 9, b.value ->> 10, b.value ->> 11,
    b.value ->> 12
{named_queues}
cross join releases as r on r.queue = q.id
cross join json_each(r.lane_events) as b

-- name: select_stats_of
-- Journal entries that are not in the stats, in order. ?1 queues by name
select q.name, j.stats
{named_queues}
cross join journal as j on j.queue = q.id
where j.seq > coalesce((select f.counted from queue_stats as f where f.queue = q.id), 0) and j.stats is not null
order by q.id, j.seq

-- name: select_tails
-- What the tables of these queues do not hold, in order. ?1 queues by name
select q.name, j.delta
{named_queues}
cross join journal as j on j.queue = q.id and j.seq > q.stored
order by q.id, j.seq

-- name: select_keys_of_lanes
-- ?1 queues by name, ?2 lanes, one after the other
select l.id, l.priority, l.keys
{named_queues}
cross join lanes as l on l.queue = q.id and l.id = substr(?2, 16 * u.key + 1, 16)

-- name: select_gates_named
-- ?1 queues by name, ?2 gates, one after the other
select g.id, g."limit", g.key, g.in_flight, g.tat, g.waiting, g.awake, g.wake_at, g.memo, g.value, g.given_by
{named_queues}
cross join gates as g on g.queue = q.id and g.id = substr(?2, 16 * u.key + 1, 16)

-- name: select_gates_in_doubt
-- Gates that may be open although lanes wait on them, since their time has come; and those in use on which none wait, and
-- which may be shut all the same, and those with room that somebody was woken for while others wait. Of the latter, those that
-- jobs may wait for. And those on which lanes wait for a number that unseen jobs may have brought.
-- ?1 [[queue, limit, its scope, whether unseen jobs bring its numbers], …], ?2 now, ?3 keys of which jobs wait besides those
-- that stats say; null: any
select q.name, g."limit", g.key
from (select distinct value ->> 0 as name from json_each(?1)) as n
cross join queues as q on q.name = n.name
cross join gates as g on g.queue = q.id and g.wake_at is not null and g.wake_at <= ?2 and g.waiting > 0
union all
select q.name, g."limit", g.key
from json_each(?1) as u
cross join queues as q on q.name = u.value ->> 0
cross join gates as g on g.queue = q.id and g."limit" = u.value ->> 1
where case when g.waiting > 0 then g.awake > 0 else g.in_flight > 0 or g.tat > ?2 or g.value = 0 end
  and (
    ?3 is null
    or g.key in (select value from json_each(?3))
    or (select k.waiting from key_stats as k where k.queue = q.id and k.scope = u.value ->> 2 and k.key = g.key) > 0
  )
union all
select q.name, g."limit", g.key
from json_each(?1) as u
cross join queues as q on q.name = u.value ->> 0 and u.value ->> 3
cross join gates as g on g.queue = q.id and g."limit" = u.value ->> 1 and g.waiting > 0
where ?3 is null or g.key in (select value from json_each(?3))

-- name: select_shared_in_use
-- Gates of keys that queues share, and that may be shut. ?1 limits by name, ?2 now
select g."limit", g.key
from json_each(?1) as u
cross join shared_limits as l on l.name = u.value
cross join shared_gates as g on g.shared_limit = l.id and (g.in_flight > 0 or g.tat > ?2)

-- name: select_woken_gates
-- Gates that these queues are to look at, because another queue has left them room. ?1 queues by name
select q.name, r.gate
{named_queues}
cross join gate_wakeups as r on r.queue = q.id

-- name: select_shared_ends
-- What has ended at limits that queues share, and no claim has folded. ?1 limits by name
select r.gate, q.name, r.task, r.ended, r.ran, r.unstarted, r.since, r.failed, r.neutral, r.latest
from json_each(?1) as u
cross join shared_limits as l on l.name = u.value
cross join shared_releases as r on r.shared_limit = l.id
cross join queues as q on q.id = r.queue

-- name: select_weights_named
-- Flows: their own weights, and by which jobs those were given. ?1 queues by name, ?2 flows, one after the other
select f.id, f.weight, f.given_by
{named_queues}
cross join flows as f on f.queue = q.id and f.id = substr(?2, 16 * u.key + 1, 16)

-- name: select_lanes_of_flow
-- Lanes with ready jobs, whether they wait at a gate or not: the lowest rank first.
select id, flow, priority, keys, ready, in_flight, floor, rank, standing, gate, tag, head
from lanes
where flow = ? and standing <> 0
order by rank, head

-- name: select_lanes_of_flows
-- Lanes with ready jobs of each of these flows, up to a number. ?1 queues by name, ?2 flows, one after the other, ?3 how many
select l.id, l.flow, l.priority, l.keys, l.ready, l.in_flight, l.floor, l.rank, l.standing, l.gate, l.tag, l.head
from json_each(?1) as u
cross join lanes as l on l.id in (select id from lanes where flow = substr(?2, 16 * u.key + 1, 16) and ready > 0 limit ?3)

-- name: select_jobs_at
-- Jobs by their positions. ?1 positions
select {job_columns}
from json_each(?1) as u
cross join jobs on jobs.position = u.value
cross join queues on queues.id = jobs.queue
order by u.key

-- Workers.

-- name: put_worker
insert into workers (id, seen_at, report)
values (?, ?, ?)
on conflict (id) do update
set seen_at = excluded.seen_at, report = excluded.report

-- name: forget_workers
-- Those that have not been seen for long.
delete from workers
where seen_at < ?

-- name: delete_worker
delete from workers
where id = ?

-- name: select_workers
select id, seen_at, report
from workers
where seen_at >= ?
order by seen_at desc, id
limit 10000
