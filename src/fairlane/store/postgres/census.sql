-- What gates count, held against the jobs that run. Running jobs are found by their leases: nothing walks over the backlog.
-- Each statement counts in one snapshot what runs and what has ended and is not folded: together they are what was started.

-- name: select_holds
-- By lane of a queue. The keys are null where nothing of the lane runs. $1 queue
select h.lane, max(h.priority)::integer as priority, max(h.keys) as keys, sum(h.count)::integer as count
from (
    select j.lane, j.priority, j.keys, 1 as count
    from (
        select distinct held.id
        from fairlane.leases l
        cross join unnest(l.jobs) as held (id)
        where l.queue_id = $1::integer
    ) held
    cross join lateral (
        select j.lane, j.priority, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text as keys
        from fairlane.jobs j
        where j.id = held.id and j.queue_id = $1 and j.state = {running}
        limit 1
    ) j
    union all
    select u.lane, null, null, u.ended + u.unstarted
    from fairlane.releases r
    cross join unnest(r.lanes, r.ended, r.unstarted) as u (lane, ended, unstarted)
    where r.queue_id = $1
) h
group by h.lane

-- name: count_held
-- How many jobs run in all queues, or have ended while others of their claim run.
select coalesce(sum(cardinality(l.jobs)), 0)
from fairlane.leases l

-- name: select_shared_holds
-- By shared gate and queue: all that run, in whatever queue, and what has been released at the limits of one. $1 queue
select h.gate, q.name, h.count
from (
    select h.gate, h.queue_id, sum(h.count)::integer as count
    from (
        select s.gate, j.queue_id, 1 as count
        from (select distinct held.id from fairlane.leases l cross join unnest(l.jobs) as held (id)) held
        cross join lateral (
            select j.queue_id, j.shared
            from fairlane.jobs j
            where j.id = held.id and j.state = {running} and j.shared is not null
            limit 1
        ) j
        cross join unnest(j.shared) as s (gate)
        union all
        select r.gate, r.queue_id, r.ended + r.unstarted
        from fairlane.shared_releases r
        where r.shared_limit = any (array(
            select n.shared_limit from fairlane.shared_limit_queues n where n.queue_id = $1::integer
        ))
    ) h
    group by h.gate, h.queue_id
) h
cross join lateral (select q.name from fairlane.queues q where q.id = h.queue_id limit 1) q

-- name: walk_gates
-- A stretch of a queue's own gates. $1 queue, $2 from where, $3 how many
select g.id, g."limit", g.key, g.in_flight, g.tat, g.waiting, g.awake, g.wake_at, g.memo, g.value
from fairlane.gates g
where g.id > $2::bytea and g.queue_id = $1::integer
order by g.id
limit $3::integer

-- name: walk_shared_gates
-- A stretch of the gates of the limits that a queue shares. $1 queue, $2 from where, $3 how many
select g.ctid as place, g.id, g."limit" as name, g.key as keys, g.contenders, g.in_flight as i1, g.tat as i2, g.memo, g.value
from fairlane.shared_gates g
where g.id > $2::bytea
  and g.shared_limit = any (array(
    select n.shared_limit from fairlane.shared_limit_queues n where n.queue_id = $1::integer
  ))
order by g.id
limit $3::integer
