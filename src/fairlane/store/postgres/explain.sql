-- What is read to explain why something waits. Nothing is written, and no lock is taken: one snapshot answers it all.

-- name: select_subject
select q.name as queue, j.task, j.state, j.priority, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text as keys,
    j.lane, j.position, j.due_at, j.claimed_at, j.worker, j.finished_at, j.attempt, j.outcome, j.error,
    (select l.worker_id from fairlane.leases l where l.id = j.lease limit 1) as worker_id, j.suspicion,
    j.ready_at
from fairlane.jobs j
cross join lateral (select q.name from fairlane.queues q where q.id = j.queue_id limit 1) q
where j.id = $1::uuid

-- name: count_ahead
-- Ready jobs of a lane before a position, up to a number. $1 lane, $2 floor, $3 position, $4 at most
select count(*)
from (
    select
    from fairlane.jobs j
    where j.lane = $1::bytea and j.position >= $2::bigint and j.position < $3::bigint and j.state = {ready}
    limit $4::integer
) ahead

-- name: select_flows_between
-- Flows whose turn comes before another's. $1 queue, $2 and $3 the cursor, $4 and $5 its own tag, $6 at most, $7 flows that the
-- journal knows better
select f.id
from fairlane.flows f
where f.queue_id = $1::integer
  and f.standing = 1
  and (f.vtime, f.tie) >= ($2::double precision, $3::bigint)
  and (f.vtime, f.tie) < ($4::double precision, $5::bigint)
  and not f.id = any ($7::bytea[])
limit $6::integer

-- name: select_running_of_queue
-- Jobs of a queue that run, from the leases: they are few beside what waits. $1 queue, $2 at most
select j.id, j.task, j.priority, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text as keys, j.worker, j.claimed_at,
    held.expires_at
from (
    select held.id, l.id as lease, l.expires_at
    from fairlane.leases l
    cross join unnest(l.jobs) as held (id)
    where l.expires_at > 0 and l.queue_id = $1::integer
    limit $2::integer
) held
cross join lateral (
    select j.*
    from fairlane.jobs j
    where j.id = held.id and j.lease = held.lease and j.state = {running}
    limit 1
) j

-- name: is_forced
select exists (select from fairlane.forced x where x.job = $1::uuid)

-- name: select_ids
-- Jobs by their place, in the same snapshot.
select j.id
from unnest($1::tid[]) with ordinality as u (place, nth)
cross join lateral (select j.id from fairlane.jobs j where j.ctid = u.place limit 1) j
order by u.nth

-- name: select_kept_places
-- Jobs of one lane that wait for another attempt and keep their place. $1 queue, $2 lane, $3 at most
select j.id, j.task, j.priority, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text as keys, j.due_at
from fairlane.jobs j
where j.queue_id = $1::integer and j.lane = $2::bytea and j.keeps_place
limit $3::integer
