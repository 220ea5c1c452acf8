-- The operator's statements: listing jobs, putting dead ones back, removing them. Those that PostgreSQL has too bear the
-- same name there.
--
-- A listing walks an index and brings ids only; `select_fitting` then looks at the jobs themselves.

-- name: walk_jobs
-- ?1 before which id (null: the last), ?2 how many
select id
from jobs
where id < coalesce(?1, x'ffffffffffffffffffffffffffffffffff')
order by id desc
limit ?2

-- name: walk_jobs_of_queue
-- ?1 before which id, ?2 how many, ?3 queue
select id
from jobs
where queue = ?3 and id < coalesce(?1, x'ffffffffffffffffffffffffffffffffff')
order by id desc
limit ?2

-- name: walk_running_jobs
-- From the leases: what runs is few beside what waits. (An older lease may still name a job that was given back.)
-- ?1 before which id, ?2 how many
select distinct jobs.id
from leases
cross join json_each(leases.jobs) as held
cross join jobs on jobs.position = held.value
where jobs.id < coalesce(?1, x'ffffffffffffffffffffffffffffffffff')
order by jobs.id desc
limit ?2

-- name: walk_finished
-- Jobs that ended in this state, the newest first.
-- ?1 state, ?2 up to which time, ?3 and which position of that time, ?4 since when, ?5 how many
select finished_at, position, id
from jobs indexed by jobs_by_end
where state = ?1 and finished_at is not null and (finished_at, position) <= (?2, ?3) and finished_at >= ?4
order by finished_at desc, position desc
limit ?5

-- name: select_fitting
-- Of these jobs, in their order, those that fit.
-- ?1 ids, one after the other, ?2 queue, ?3 task, ?4 state, ?5 keys, ?6 and ?7 enqueued since and until, ?8 and ?9 finished, ?10 how many
with recursive given (n) as (select 0 union all select n + 1 from given where 16 * (n + 1) < length(?1))
select {job_columns}
from given
cross join jobs on jobs.id = substr(?1, 16 * n + 1, 16)
cross join queues on queues.id = jobs.queue
where (?2 is null or jobs.queue = ?2)
  and (?3 is null or task = ?3)
  and (?4 is null or state = ?4)
  and not exists (
    select 1
    from json_each(?5) as wanted
    where json_type(keys, '$."' || wanted.key || '"') is null or (keys ->> ('$."' || wanted.key || '"')) is not wanted.value
  )
  and (?6 is null or enqueued_at >= ?6)
  and (?7 is null or enqueued_at < ?7)
  and (?8 is null or finished_at >= ?8)
  and (?9 is null or finished_at < ?9)
order by n
limit ?10

-- name: select_ended
-- What an operator's action must know of a job.
select position, state, queue, lane, priority, lane_keys, given, given_by, attempt, claimed_at, finished_at, worker, outcome,
    error
from jobs
where id = ?

-- name: replay_job
-- The job joins its lane at the end, as if it had just been enqueued.
-- ?1 position, ?2 state, ?3 now, ?4 due, ?5 its old position
update jobs
set position = ?1, state = ?2, ready_at = ?3, due_at = ?4, attempt = 0, suspicion = 0, replays = replays + 1, cancel_requested = 0,
    claimed_at = null, finished_at = null, lease = null, charge = 0, worker = null, outcome = null, error = null,
    result = null, progress = null, progress_message = null
where position = ?5

-- name: hurry_job
update jobs
set due_at = min(due_at, ?)
where position = ?

-- name: count_beyond
-- How many finished jobs there are beyond those to keep, as far as one pass of pruning cares.
-- ?1 and ?2 the states that are counted together (the same one twice: it alone), ?3 how many to keep, ?4 to remove at most
select max(0, min(?4, count(*) - ?3))
from (
    select * from (
        select 1 from jobs indexed by jobs_by_end where state = ?1 and finished_at is not null limit ?3 + ?4
    )
    union all
    select * from (
        select 1 from jobs indexed by jobs_by_end
        where state = ?2 and ?1 <> ?2 and finished_at is not null limit ?3 + ?4
    )
)

-- name: select_finished
-- Jobs that ended in this state by a time, the oldest first. ?1 state, ?2 by when, ?3 how many
select finished_at, position, id
from jobs indexed by jobs_by_end
where state = ?1 and finished_at is not null and finished_at <= ?2
order by finished_at, position
limit ?3

-- name: select_states
select id, state
from jobs
where id = ?

-- name: has_flow
select exists (select 1 from flows where queue = ? and id = ?)

-- name: has_gate
select exists (select 1 from gates where queue = ? and id = ?)

-- name: select_waiters
select worker
from waiters
where queue = ?
