-- Jobs that belong to another partition of their queue. Under the claim lock of the one that they leave.

-- name: select_lanes_in_use
-- Every lane of a queue with jobs that are ready or run, as far as lane events have been folded.
select l.id, l.priority, l.keys, l.ready, l.in_flight, l.floor
from fairlane.lanes l
where l.queue_id = $1::integer and (l.ready > 0 or l.in_flight > 0)

-- name: select_scheduled_lanes
-- The lanes that scheduled jobs of a queue will join, with how many of them.
select j.lane, j.priority, (array_agg(fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text))[1] as keys, count(*)::integer
from fairlane.jobs j
where j.queue_id = $1::integer and j.due_at is not null
group by j.lane, j.priority

-- name: move_ready_jobs
-- The first ready jobs of these lanes leave their queue for others: they keep their positions, and have lane events in both.
-- $1 lanes, $2 their floors, $3 how many of each, $4 queues that they go to, $5 lanes that they join
with
leaving as materialized (
    select j.id, j.queue_id, j.lane, u.to_queue, u.to_lane
    from unnest($1::bytea[], $2::bigint[], $3::integer[], $4::integer[], $5::bytea[])
        as u (lane, floor, most, to_queue, to_lane)
    cross join lateral (
        select j.id, j.queue_id, j.lane
        from fairlane.jobs j
        where j.lane = u.lane and j.position >= u.floor and j.state = {ready}
        order by j.position
        limit u.most
        for update
    ) j
),
moved as (
    update fairlane.jobs j
    set queue_id = l.to_queue, lane = l.to_lane
    from leaving l
    where j.id = any (array[l.id]) and j.state = {ready}
    returning j.id, l.queue_id as from_queue, l.lane as from_lane, j.queue_id, j.lane, j.priority, j.position, j.ready_at,
        fairlane.keys_of_lane(j.lane_keys, j.keys, j.task) as keys, j.given, j.given_by
),
forced as (
    update fairlane.forced x
    set queue_id = m.queue_id
    from moved m
    where x.job = any (array[m.id])
),
appended as (
    insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, given, given_by)
    select from_queue, from_lane, priority, (array_agg(keys))[1], -count(*), min(position), min(ready_at), null, null
    from moved
    group by from_queue, from_lane, priority
    union all
    select queue_id, lane, priority, (array_agg(keys))[1], count(*), min(position), min(ready_at),
        (array_agg(given order by given_by desc) filter (where given is not null))[1], max(given_by)
    from moved
    group by queue_id, lane, priority
)
select m.queue_id, count(*)::integer
from moved m
group by m.queue_id

-- name: move_scheduled_jobs
-- Scheduled jobs leave too. Whoever keeps a place in a sequence gives it back here and takes it there.
-- $1 the queue, $2 lanes, $3 queues that they go to, $4 lanes that they join, $5 how many in all
with
leaving as materialized (
    select j.id, j.queue_id, j.lane, u.to_queue, u.to_lane
    from fairlane.jobs j
    cross join lateral (
        select u.to_queue, u.to_lane
        from unnest($2::bytea[], $3::integer[], $4::bytea[]) as u (lane, to_queue, to_lane)
        where u.lane = j.lane
        limit 1
    ) u
    where j.queue_id = $1::integer and j.due_at is not null and j.lane = any ($2)
    limit $5::integer
    for update of j
),
moved as (
    update fairlane.jobs j
    set queue_id = l.to_queue, lane = l.to_lane
    from leaving l
    where j.id = any (array[l.id]) and j.state = {scheduled}
    returning j.id, l.queue_id as from_queue, l.lane as from_lane, j.queue_id, j.lane, j.priority, j.position, j.ready_at,
        j.keeps_place, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task) as keys
),
forced as (
    update fairlane.forced x
    set queue_id = m.queue_id
    from moved m
    where x.job = any (array[m.id])
),
appended as (
    insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, resumed)
    select from_queue, from_lane, priority, keys, 0, position, ready_at, 1
    from moved
    where keeps_place
    union all
    select queue_id, lane, priority, keys, 0, position, ready_at, -1
    from moved
    where keeps_place
)
select m.queue_id, count(*)::integer
from moved m
group by m.queue_id
