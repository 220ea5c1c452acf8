-- What gates count, held against the jobs that run. Running jobs are found by their leases: nothing walks over the backlog.

-- name: select_holds
-- By lane of a queue.
select j.lane, j.priority, j.lane_keys, count(*)
from leases l
cross join json_each(l.jobs) held
cross join jobs j on j.position = held.value
where j.queue = ? and j.lease = l.id and j.state = {running}
group by j.lane

-- name: count_held
-- How many jobs run in all queues.
select coalesce(sum(held), 0)
from leases

-- name: select_unfolded
-- What has ended in a queue and is not folded.
select lane_events
from releases
where queue = ?

-- name: select_unfolded_places
-- Places in a sequence that were given back, or came from another partition.
select priority, keys, resumed
from arrivals
where queue = ? and resumed <> 0

-- name: select_shared_holders
-- Who holds shared gates, in whatever queue.
select queues.name, j.shared
from leases l
cross join json_each(l.jobs) held
cross join jobs j on j.position = held.value
join queues on queues.id = j.queue
where j.lease = l.id and j.state = {running} and j.shared is not null

-- name: select_unfolded_shared
-- What has been released at the limits that a queue shares, and is not folded.
select r.gate, queues.name, r.ended + r.unstarted
from shared_limit_queues q
join shared_releases r on r.shared_limit = q.shared_limit
join queues on queues.id = r.queue
where q.queue = ?

-- name: walk_gates
-- ?1 queue, ?2 from where, ?3 how many
select id, "limit", key, in_flight, tat, waiting, awake, wake_at, memo, value
from gates
where id > ?2 and queue = ?1
order by id
limit ?3

-- name: walk_shared_gates
-- ?1 queue, ?2 from where, ?3 how many
select g.id, g."limit", g.key, g.in_flight, g.tat, g.contenders, g.memo, g.value
from shared_limit_queues q
join shared_gates g on g.shared_limit = q.shared_limit
where g.id > ?2 and q.queue = ?1
order by g.id
limit ?3

-- name: put_shared_counts
update shared_gates
set in_flight = ?, contenders = ?
where id = ?
