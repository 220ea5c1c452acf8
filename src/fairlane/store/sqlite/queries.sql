-- Every statement of the SQLite store, by name. Statements that the PostgreSQL store has too bear the same name there.

-- name: insert_queue
insert into queues (name, policy, digest, version)
values (?, ?, ?, 1)
on conflict (name) do nothing

-- name: select_queue
select id, policy, version, applied_at, amended, seq, token, stored, base, format, vtime, cursor, cursor_tie, tie, cost
from queues
where name = ?

-- name: select_queue_name
select name
from queues
where id = ?

-- name: select_queue_names
select name
from queues
order by name

-- name: select_time
-- Zeros where nothing was stored yet, or where somebody has emptied every table.
select coalesce(max(ahead), 0), coalesce(max(latest), 0)
from queue_time

-- name: keep_time
insert into queue_time (only, ahead, latest)
values (1, ?, ?)
on conflict (only) do update set ahead = excluded.ahead, latest = excluded.latest

-- name: select_policy_versions
select name, version
from queues
where name = ?

-- name: update_policy
-- ?1 queue, ?2 policy, ?3 digest, ?4 now
update queues
set policy = ?2, digest = ?3, version = version + 1, applied_at = ?4
where id = ?1
returning version

-- name: take_positions
update positions
set last = last + ?
returning last

-- name: insert_job
insert into jobs (
    position, id, queue, task, priority, lane, lane_keys, keys, payload, state, max_attempts, enqueued_at, ready_at,
    due_at, on_dead, given, given_by, context
)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: delete_jobs_between
delete from jobs
where position > ? and position <= ?

-- name: insert_arrival
insert into arrivals (queue, lane, priority, keys, count, floor, since, given, resumed, given_by)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: insert_releases
-- All that one settlement releases in a queue.
insert into releases (queue, count, lane_events)
values (?, ?, ?)

-- name: select_due_jobs
-- Scheduled jobs whose time has come, in the order in which they are due.
select position, lane, priority, lane_keys, keeps_place, ready_at, given, given_by, suspicion
from jobs
where queue = ? and due_at is not null and due_at <= ?
order by due_at, position
limit ?

-- name: promote_job
-- The job joins its lane at the end: it gets a new position. (One that has kept its place, in a sequence or while it was to
-- run alone, is given that.)
update jobs
set position = ?, state = {ready}, ready_at = ?, due_at = null, keeps_place = 0
where position = ?

-- name: select_arrivals
select id, lane, priority, keys, count, floor, since, given, resumed, coalesce(given_by, 0)
from arrivals
where queue = ?
order by id
limit ?

-- name: select_releases
-- ?1 queue, ?2 how many lane events are enough: whole settlements are read until they are reached.
select id, lane_events
from (
    select id, lane_events, sum(count) over (order by id rows unbounded preceding) - count as before
    from (select id, count, lane_events from releases where queue = ?1 order by id limit ?2)
)
where before < ?2

-- name: delete_releases
delete from releases
where queue = ? and id <= ?

-- name: delete_arrivals
delete from arrivals
where queue = ? and id <= ?

-- name: select_gate
select id, "limit", key, in_flight, tat, waiting, awake, wake_at, memo, value, given_by
from gates
where queue = ? and id = ?

-- name: select_heads
-- The first ready jobs of a lane. The floor skips what was served before.
select position, ready_at
from jobs
where lane = ? and position >= ? and state = {ready}
order by position
limit ?

-- name: select_heads_of_lanes
-- The same for many lanes. ?1 their ids, one after the other, ?2 the floor of each, ?3 how many jobs of each
select floors.key, jobs.position, jobs.ready_at
from json_each(?2) as floors
cross join jobs on jobs.position in (
    select head.position
    from jobs as head
    where head.lane = substr(?1, 16 * floors.key + 1, 16) and head.position >= floors.value and head.state = {ready}
    order by head.position
    limit ?3
)

-- name: claim_jobs
-- ?1 lease, ?2 worker, ?3 [[position, charge, shared gates, when it starts], …]
update jobs
set state = {running}, attempt = attempt + 1, claimed_at = starts.claimed_at, lease = ?1, worker = ?2, charge = starts.charge,
    shared = starts.shared, progress = null, progress_message = null
from (
    select value ->> 0 as position, value ->> 1 as charge, value ->> 2 as shared, value ->> 3 as claimed_at
    from json_each(?3)
) as starts
where jobs.position = starts.position and state = {ready}
returning jobs.position, id, task, priority, keys, payload, attempt, max_attempts, enqueued_at, cancel_requested,
    suspicion

-- name: claim_alike
-- Where they are charged alike, without a row of JSON for each. ?1 when they start, ?2 lease, ?3 worker, ?4 positions, ?5 charge, ?6 shared gates
update jobs
set state = {running}, attempt = attempt + 1, claimed_at = ?1, lease = ?2, worker = ?3, charge = ?5, shared = ?6,
    progress = null, progress_message = null
where position in (select value from json_each(?4)) and state = {ready}
returning position, id, task, priority, keys, payload, attempt, max_attempts, enqueued_at, cancel_requested,
    suspicion

-- name: insert_lease
insert into leases (id, worker, expires_at, renewed_at, held, jobs)
values (?, ?, ?, ?, ?, ?)

-- name: next_due_job
select min(due_at)
from jobs
where queue = ? and due_at is not null

-- name: next_lease_end
select min(expires_at)
from leases

-- name: select_running
-- The fence: only the claim that holds this lease finds its job.
select position, queue, lane, priority, lane_keys, attempt, ready_at, claimed_at, worker, charge, cancel_requested, task, shared
from jobs
where id = ? and lease = ? and state = {running}

-- name: select_held
select id
from jobs
where id = ? and lease = ? and state = {running}

-- name: select_claims
-- The same for many. ?1 how many, ?2 their ids and ?3 their leases, one after the other.
with recursive numbers (n) as (select 0 union all select n + 1 from numbers where n + 1 < ?1)
select n, position, queue, lane, claimed_at, charge, task, shared
from numbers
cross join jobs on jobs.id = substr(?2, 16 * n + 1, 16)
where lease = substr(?3, 16 * n + 1, 16) and state = {running}

-- name: finish_jobs
-- Jobs that are done and have no result. ?1 now, ?2 their positions
update jobs
set state = {done}, finished_at = ?1, error = null, outcome = 'done', result = null, lease = null
where position in (select value from json_each(?2))

-- name: finish_with_result
update jobs
set state = {done}, finished_at = ?, error = null, outcome = 'done', result = ?, lease = null
where position = ?

-- name: finish_job
update jobs
set state = ?, attempt = ?, suspicion = ?, finished_at = ?, due_at = ?, error = ?, outcome = ?, result = ?, lease = null,
    keeps_place = ?
where position = ?

-- name: sign_settled
update jobs
set lease = ?
where id = ? and state <> {running}

-- name: is_settled
select count(*)
from jobs
where id = ? and lease = ? and state <> {running}

-- name: insert_attempt
insert into attempts (job, attempt, claimed_at, ended_at, worker, outcome, error)
values (?, ?, ?, ?, ?, ?, ?)

-- name: drop_claims
update leases
set held = held - ?
where id = ?
returning held

-- name: delete_lease
delete from leases
where id = ?

-- name: delete_cancellations
delete from cancellations
where lease = ?

-- name: renew_lease
update leases
set expires_at = ?, renewed_at = ?
where id = ?

-- name: select_cancellations
select job
from cancellations
where lease = ?

-- name: select_expired_leases
select id, renewed_at, jobs, worker
from leases
where expires_at <= ?
order by expires_at
limit ?

-- name: select_leases_of_worker
select id, renewed_at, jobs, worker
from leases
where worker = ?
limit ?

-- name: select_claim_at
select id, task, priority, keys, payload, attempt, max_attempts, enqueued_at, cancel_requested, suspicion,
    claimed_at
from jobs
where position = ? and lease = ? and state = {running}

-- name: select_state
select position, queue, lane, priority, lane_keys, state, ready_at, lease, keeps_place
from jobs
where id = ?

-- name: cancel_waiting
update jobs
set state = {cancelled}, finished_at = ?, due_at = null, claimed_at = null, worker = null, outcome = 'cancelled',
    cancel_requested = 1, error = ?, keeps_place = 0
where position = ?

-- name: request_cancel
update jobs
set cancel_requested = 1
where position = ?

-- name: insert_cancellation
insert or ignore into cancellations (lease, job)
values (?, ?)

-- name: select_lease_worker
select worker
from leases
where id = ?

-- name: update_progress
-- ?1 job, ?2 lease, ?3 how far it is, ?4 in words
update jobs
set progress = ?3, progress_message = ?4
where id = ?1 and lease = ?2 and state = {running}

-- part: job_columns
jobs.id, queues.name, task, state, priority, keys, payload, attempt, max_attempts, enqueued_at, due_at, claimed_at,
    finished_at, worker, error, result, progress, progress_message, cancel_requested, replays, on_dead is not null, context

-- name: select_job
select {job_columns}
from jobs
join queues on queues.id = jobs.queue
where jobs.id = ?

-- name: select_contexts
select id, context
from jobs
where id = ? and context is not null

-- name: select_given
select id, given
from jobs
where id = ? and given is not null

-- name: select_retries
-- How often a job has asked for a retry since it was enqueued or replayed: an engine's own count.
select a.job, count(*)
from attempts a
where a.job = ? and a.outcome = 'retry' and not exists (
    select 1 from attempts later
    where later.job = a.job and later.rowid > a.rowid and later.outcome in ('done', 'dead', 'cancelled')
)
group by a.job

-- name: select_last_attempt
select state, attempt, claimed_at, finished_at, worker, outcome, error
from jobs
where id = ?

-- name: select_attempts
select attempt, claimed_at, ended_at, worker, outcome, error
from attempts
where job = ?
order by claimed_at, rowid

-- name: select_counts
select ready, running, parked,
    (select count(*) from arrivals where queue = ?1) + (select coalesce(sum(count), 0) from releases where queue = ?1)
from queues
where id = ?1

-- name: delete_job
delete from jobs
where position = ?

-- name: delete_attempts
delete from attempts
where job = ?

-- name: has_waiting_work
-- Whether jobs are ready, as far as claims have seen.
select ready > 0
from queues
where id = ?

-- name: register_waiter
insert into waiters (queue, worker, since)
values (?, ?, ?)
on conflict (queue, worker) do nothing

-- name: withdraw_waiter
delete from waiters
where queue = ? and worker = ?

-- name: withdraw_worker
delete from waiters
where worker = ?

-- name: take_waiters
-- Whoever is nudged is no longer waiting: the next job wakes the next one. The oldest registration goes first.
delete from waiters
where (queue, worker) in (select queue, worker from waiters where queue = ? order by since limit ?)
returning worker

-- name: select_holders
select distinct worker
from leases

-- name: take_all_waiters
delete from waiters
returning worker

-- name: create_migrations
create table if not exists migrations (
    number integer primary key,
    name text not null,
    checksum text not null
) strict

-- name: has_migrations
select count(*)
from sqlite_schema
where type = 'table' and name = 'migrations'

-- name: select_migrations
select number, checksum
from migrations

-- name: select_holder
-- Who has taken a unique key, and how that job stands now.
select u.job, u.digest, u.until, u.expires_at, j.state, j.claimed_at is not null
from uniques u
left join jobs j on j.id = u.job
where u.id = ?

-- name: take_unique
insert into uniques (id, job, digest, until, expires_at)
values (?, ?, ?, ?, ?)
on conflict (id) do update set job = excluded.job, digest = excluded.digest, until = excluded.until,
    expires_at = excluded.expires_at

-- name: insert_unique_job
insert into unique_jobs (job, key, until)
values (?, ?, ?)

-- name: select_unique_job
-- What a job that has ended asks for when it is put back.
select u.key, u.until, j.payload
from unique_jobs u
join jobs j on j.id = u.job
where u.job = ? and j.state > {done}

-- name: delete_unique_job
delete from unique_jobs
where job = ?

-- name: delete_uniques_of_job
-- A key whose job is gone is free; a window outlives its job.
delete from uniques
where job = ? and expires_at is null

-- name: prune_uniques
delete from uniques
where id in (select id from uniques where expires_at <= ? order by expires_at limit ?)


-- Values by key.

-- name: select_value
select value
from stored_values
where key = ?

-- name: put_value
insert into stored_values (key, value)
values (?, ?)
on conflict (key) do update set value = excluded.value

-- name: put_value_if_absent
insert into stored_values (key, value)
values (?, ?)
on conflict (key) do nothing

-- name: replace_value
update stored_values
set value = ?3
where key = ?1 and value = ?2

-- name: delete_value
delete from stored_values
where key = ?

-- name: delete_value_if_equal
delete from stored_values
where key = ? and value = ?

-- name: scan_values
select key, value
from stored_values
where key >= ? and key < ?
order by key
limit ?


-- Waiting for jobs to end.

-- name: has_ended
-- A job that is not there has ended too, and whoever waits for it must hear of it.
select not exists (select 1 from jobs where id = ? and state < {done})

-- name: register_result_waiter
insert into result_waiters (job, waiter)
values (?, ?)
on conflict (job, waiter) do nothing

-- name: has_result_waiters
select exists (select 1 from result_waiters)

-- name: take_result_waiters
delete from result_waiters
where job = ? and not exists (select 1 from jobs j where j.id = result_waiters.job and j.state < {done})
returning waiter

-- name: select_result_waiters
select distinct waiter
from result_waiters

-- name: delete_result_waiter
delete from result_waiters
where waiter = ?

-- name: begin_look
-- A look plans as a claim does. What it would start it takes back.
savepoint look

-- name: undo_look
rollback to savepoint look


-- Limits that queues share by name.

-- name: select_shared_limits
-- Those that a queue names.
select s.id, s.document
from shared_limits s
join shared_limit_queues q on q.shared_limit = s.id
where q.queue = ?
order by s.name

-- name: select_shared_limit
-- A limit, and one of the other queues that name it. ?1 limit, ?2 the queue
select id, document, (
    select queues.name
    from shared_limit_queues q
    join queues on queues.id = q.queue
    where q.shared_limit = shared_limits.id and queues.name <> ?2
    order by queues.name
    limit 1
)
from shared_limits
where name = ?1

-- name: select_sharers
select queues.id, queues.name
from shared_limit_queues q
join queues on queues.id = q.queue
where q.shared_limit = ?
order by queues.name

-- name: insert_shared_limit
insert into shared_limits (name, document)
values (?, ?)
on conflict (name) do nothing

-- name: update_shared_limit
update shared_limits
set document = ?2
where name = ?1

-- name: delete_sharing
delete from shared_limit_queues
where queue = ?

-- name: insert_sharing
insert into shared_limit_queues (shared_limit, queue)
select id, ?1
from shared_limits
where name = ?2

-- name: select_shared_releases
select r.id, r.gate, queues.name, r.task, r.ended, r.ran, r.unstarted, r.since, r.failed, r.neutral, r.latest
from shared_releases r
join queues on queues.id = r.queue
where r.shared_limit = ?
order by r.id
limit ?

-- name: delete_shared_releases
delete from shared_releases
where shared_limit = ? and id <= ?

-- name: insert_shared_release
-- The last parameter is the gate, which names its limit.
insert into shared_releases (shared_limit, gate, queue, task, ended, ran, unstarted, since, failed, neutral, latest)
select shared_limit, id, ?, ?, ?, ?, ?, ?, ?, ?, ?
from shared_gates
where id = ?

-- name: select_queues_behind
-- Whom the end of a claim that had passed this gate concerns.
select q.queue
from shared_gates g
join shared_limit_queues q on q.shared_limit = g.shared_limit
where g.id = ?

-- name: select_shared_gate
select id, "limit", key, in_flight, tat, contenders, memo, value
from shared_gates
where id = ?

-- name: select_shared_gates_of_limit
select id, "limit", key, in_flight, tat, contenders, memo, value
from shared_gates
where shared_limit = (select shared_limits.id from shared_limits where name = ?)

-- name: upsert_shared_gate
-- The last parameter is the name of the limit.
insert into shared_gates (id, "limit", key, in_flight, tat, contenders, memo, value, shared_limit)
select ?, ?, ?, ?, ?, ?, ?, ?, id
from shared_limits
where name = ?
on conflict (id) do update
set in_flight = excluded.in_flight, tat = excluded.tat, contenders = excluded.contenders, memo = excluded.memo,
    value = excluded.value

-- name: take_gate_wakeups
delete from gate_wakeups
where queue = ?
returning gate

-- name: insert_gate_wakeup
insert into gate_wakeups (queue, gate)
select id, ?
from queues
where name = ?
on conflict (queue, gate) do nothing

-- name: select_queue_id
select id
from queues
where name = ?

-- name: select_claimed_of_queue
select j.position, j.priority, j.lane_keys, j.shared
from leases l
cross join json_each(l.jobs) held
cross join jobs j on j.position = held.value
where j.queue = ? and j.lease = l.id and j.state = {running}

-- name: mark_shared
update jobs
set shared = ?
where position = ?

-- name: walk_idle_shared_gates
select g.id, g.in_flight = 0 and g.contenders = '[]' and g.tat <= ?4
from shared_limit_queues q
join shared_gates g on g.shared_limit = q.shared_limit
where g.id > ?1 and q.queue = ?2
order by g.id
limit ?3

-- name: delete_shared_gate
delete from shared_gates
where id = ?

-- name: select_overrides
select document
from overrides
where queue = ?
order by id

-- name: put_overrides
-- ?1 queue, ?2 ids, ?3 documents
insert into overrides (queue, id, document)
select ?1, i.value, d.value
from json_each(?2) as i
join json_each(?3) as d on d.key = i.key
where true
on conflict (queue, id) do update
set document = excluded.document

-- name: delete_overrides
-- ?1 queue, ?2 ids
delete from overrides
where queue = ?1 and id in (select value from json_each(?2))

-- name: update_overridden
-- ?1 queue, ?2 a new name for what is in force, ?3 when the next override ends
update queues
set amended = ?2, overrides_end_at = ?3
where id = ?1

-- name: next_override_end
select overrides_end_at
from queues
where id = ?

-- name: insert_audit
insert into audit (at, actor, action, queue, target, before, after, reason, act, part, jobs)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)

-- name: select_audit
-- The newest first, the parts of one action as one entry. ?1 before which entry, ?2 how many
select a.id, a.at, a.actor, a.action, a.queue, a.target, a.before, a.after, a.reason,
    a.jobs + coalesce((select sum(p.jobs) from audit p where p.act = a.act and p.part > 0), 0)
from audit a
where a.id < ?1 and a.part = 0
order by a.id desc
limit ?2

-- name: select_audit_of_queue
select a.id, a.at, a.actor, a.action, a.queue, a.target, a.before, a.after, a.reason,
    a.jobs + coalesce((select sum(p.jobs) from audit p where p.act = a.act and p.part > 0), 0)
from audit a
where a.queue = ?3 and a.id < ?1 and a.part = 0
order by a.id desc
limit ?2

-- name: end_session
insert into ended_sessions (id, expires_at)
values (?, ?)
on conflict (id) do nothing

-- name: is_session_ended
select exists (select 1 from ended_sessions where id = ?)

-- name: prune_ended_sessions
-- Those that no clock takes for valid any more.
delete from ended_sessions
where expires_at <= ?

-- name: force_job
insert into forced (job, queue)
values (?, ?)
on conflict (job) do nothing

-- name: select_forced
-- Jobs that are to start whatever their limits say, and can.
select jobs.lane, jobs.position, jobs.ready_at
from forced
join jobs on jobs.id = forced.job
where forced.queue = ?1 and jobs.state = {ready}
order by jobs.position
limit ?2

-- name: forget_forced
-- Those that do not wait any more, for whatever reason.
delete from forced
where queue = ? and not exists (select 1 from jobs where jobs.id = forced.job and jobs.state < {running})


-- What lands when jobs die.

-- name: select_on_dead
-- What a job has declared for its death.
select on_dead
from jobs
where id = ?

-- name: begin_effects
-- Effects of a death that are refused are taken back, and the death stays.
savepoint effects

-- name: undo_effects
rollback to savepoint effects

-- name: keep_effects
release savepoint effects

-- name: note_error
update jobs
set error = ?
where id = ?


-- Jobs that run one after the other.

-- name: select_places_kept
-- Jobs that wait for another attempt, by their lanes.
select priority, lane_keys, count(*)
from jobs indexed by jobs_keeping_place
where queue = ? and keeps_place = 1
group by lane, priority, lane_keys

-- name: select_kept_places
-- Jobs of one lane that wait for another attempt. ?1 queue, ?2 lane, ?3 at most
select id, task, priority, lane_keys, due_at
from jobs indexed by jobs_keeping_place
where queue = ?1 and lane = ?2 and keeps_place = 1
limit ?3

-- name: select_policies
-- Queues with their policies, their overrides and the shared limits that they name. ?1 which queues, or null: all of them
select q.name, q.policy, q.version,
    (select json_group_array(o.document) from (select document from overrides where queue = q.id order by id) o),
    (
        select json_group_array(s.document)
        from (
            select s.document
            from shared_limit_queues n
            join shared_limits s on s.id = n.shared_limit
            where n.queue = q.id
            order by s.name
        ) s
    )
from queues q
where ?1 is null or q.name in (select value from json_each(?1))
order by q.name


-- Claims that pass from one process to another.

-- name: select_adoptable
select j.id, j.task, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at, j.cancel_requested,
    j.suspicion, j.claimed_at, q.name, j.position, j.lease
from jobs j
join queues q on q.id = j.queue
where j.id = ? and j.lease in (?, ?) and j.state = {running}

-- name: adopt_job
update jobs
set lease = ?, worker = ?
where position = ?
