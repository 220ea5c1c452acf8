-- Jobs that belong to another partition of their queue.

-- name: select_lanes_in_use
-- Every lane of a queue with jobs that are ready or run, as far as lane events have been folded.
select id, priority, keys, ready, in_flight, floor
from lanes
where queue = ? and (ready > 0 or in_flight > 0)

-- name: select_scheduled_lanes
-- The lanes that scheduled jobs of a queue will join, with how many of them.
select lane, priority, lane_keys, count(*)
from jobs
where queue = ? and due_at is not null
group by lane, priority, lane_keys

-- name: select_ready_of_lane
select position, id, ready_at, given, given_by, queue, priority, lane_keys
from jobs
where lane = ? and position >= ? and state = {ready}
order by position
limit ?

-- name: select_scheduled_of_lane
select position, id, ready_at, keeps_place, priority, lane_keys
from jobs
where queue = ? and due_at is not null and lane = ?
limit ?

-- name: move_job
update jobs
set queue = ?, lane = ?
where position = ?

-- name: move_forced
update forced
set queue = ?
where job = ?
