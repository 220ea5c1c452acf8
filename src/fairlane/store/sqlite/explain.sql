-- What is read to explain why something waits. Nothing is written.

-- name: select_subject
select queues.name, jobs.task, jobs.state, jobs.priority, jobs.lane_keys, jobs.lane, jobs.position, jobs.due_at,
    jobs.claimed_at, jobs.worker, jobs.finished_at, jobs.attempt, jobs.outcome, jobs.error,
    (select leases.worker from leases where leases.id = jobs.lease), jobs.suspicion, jobs.ready_at
from jobs
join queues on queues.id = jobs.queue
where jobs.id = ?

-- name: count_ahead
-- Ready jobs of a lane before a position, up to a number. ?1 lane, ?2 floor, ?3 position, ?4 at most
select count(*)
from (
    select 1
    from jobs
    where lane = ?1 and position >= ?2 and position < ?3 and state = {ready}
    limit ?4
)

-- name: select_flows_between
-- Flows whose turn comes before another's, one by one. ?1 queue, ?2 and ?3 the cursor, ?4 and ?5 its tag
select id
from flows
where queue = ?1 and standing = 1 and (vtime, tie) >= (?2, ?3) and (vtime, tie) < (?4, ?5)

-- name: select_running_of_queue
-- Jobs of a queue that run, from the leases: they are few beside what waits. ?1 queue, ?2 at most
select jobs.id, jobs.task, jobs.priority, jobs.lane_keys, jobs.worker, jobs.claimed_at, leases.expires_at
from leases
cross join json_each(leases.jobs) as held
cross join jobs on jobs.position = held.value
where jobs.queue = ?1 and jobs.lease = leases.id and jobs.state = {running}
limit ?2

-- name: is_forced
select exists (select 1 from forced where job = ?)

-- name: select_ids
select id
from jobs
where position = ?
