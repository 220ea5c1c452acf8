-- The operator's statements: listing jobs, putting dead ones back, removing them. None is on the way of a job.
--
-- A listing walks an index and brings names only; `select_fitting` then looks at the jobs themselves.

-- name: walk_jobs
-- $1 before which id (null: the last), $2 how many
select j.id
from fairlane.jobs j
where j.id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
order by j.id desc
limit $2::integer

-- name: walk_jobs_of_queue
-- Bounded from both sides, not by equality: jobs of all queues, in the order of their ids, would then be as good a walk.
-- $1 before which id, $2 how many, $3 queue
select j.id
from fairlane.jobs j
where j.queue_id >= $3::integer
  and (j.queue_id, j.id) < ($3, coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
order by j.queue_id desc, j.id desc
limit $2::integer

-- name: walk_running_jobs
-- From the leases: what runs is few beside what waits. (An older lease may still name a job that was given back.)
-- $1 before which id, $2 how many
select distinct held.id
from fairlane.leases l
cross join unnest(l.jobs) as held (id)
where l.expires_at > 0 and held.id < coalesce($1::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
order by held.id desc
limit $2::integer

-- name: walk_finished
-- The entries of jobs that ended, the newest first.
-- $1 their state (what is done and what was cancelled is filed together), $2 up to which time, $3 and which entry of that time, $4 since when, $5 how many
select f.at, f.id, f.jobs
from fairlane.finished f
where f.is_dead::integer = ($1::integer = 4)::integer and (f.at, f.id) <= ($2::bigint, $3::bigint) and f.at >= $4::bigint
order by f.at desc, f.id desc
limit $5::integer

-- name: select_fitting
-- Of these jobs, in their order, those that fit.
-- $1 jobs, $2 queue, $3 task, $4 state, $5 keys, $6 and $7 enqueued since and until, $8 and $9 finished, $10 how many
select {job_columns}
from unnest($1::uuid[]) with ordinality as g (id, nth)
cross join lateral (select j.* from fairlane.jobs j where j.id = g.id limit 1) j
cross join lateral (select q.name from fairlane.queues q where q.id = j.queue_id limit 1) q
where ($2::integer is null or j.queue_id = $2)
  and ($3::text is null or j.task = $3)
  and ($4::smallint is null or j.state = $4)
  and j.keys @> $5::jsonb
  and ($6::bigint is null or j.enqueued_at >= $6)
  and ($7::bigint is null or j.enqueued_at < $7)
  and ($8::bigint is null or j.finished_at >= $8)
  and ($9::bigint is null or j.finished_at < $9)
order by g.nth
limit $10::integer

-- name: lock_entries
-- The entries of `finished` that name these jobs, locked before the jobs themselves: so does `prune`, which skips what is
-- locked. Whoever has an entry may change its jobs, and nobody waits for the other crosswise.
-- $1 jobs
select f.is_dead, f.id
from unnest($1::uuid[]) as g (id)
cross join lateral (
    select j.state, j.finished_at
    from fairlane.jobs j
    where j.id = g.id and j.finished_at is not null
    limit 1
) j
join fairlane.finished f on f.is_dead::integer = any (array[(j.state = {dead})::integer]) and f.at = any (array[j.finished_at])
where g.id = any (f.jobs)
order by f.id
for update of f

-- name: lock_idle
-- Jobs that nobody else is changing: two that take several jobs in different orders would wait for each other. $1 jobs
select j.id
from fairlane.jobs j
where j.id = any ($1::uuid[])
order by j.id
for update skip locked

-- name: replay
-- Put ended jobs back at the end of their lanes, with lane events, and wake one waiter for each. The last attempt moves from
-- the job's row into its history.
-- $1 now or null, $2 jobs, $3 delay
with
clock as materialized (
    select fairlane.instant($1::bigint) as now
),
given as materialized (
    select j.id, j.state, j.lease, j.attempt, j.claimed_at, j.finished_at, j.worker, j.outcome, j.error
    from fairlane.jobs j
    where j.id = any ($2::uuid[])
    order by j.id
    for update
),
placed as materialized (
    select g.*, nextval('fairlane.positions') as place, clock.now,
        case when $3::bigint > 0 then clock.now + $3 end as due
    from given g
    cross join clock
    where g.state in ({dead}, {cancelled})
),
remembered as (
    insert into fairlane.attempts (job, lease, attempt, claimed_at, ended_at, worker, outcome, error)
    select id, lease, attempt, claimed_at, finished_at, worker, outcome, error
    from placed
    where claimed_at is not null
),
back as (
    update fairlane.jobs j
    set state = case when p.due is null then {ready} else {scheduled} end, position = p.place, ready_at = p.now, due_at = p.due,
        attempt = 0, suspicion = 0, replays = j.replays + 1, cancel_requested = false, claimed_at = null, finished_at = null,
        lease = null, charge = null, worker = null, outcome = null, error = null, result = null, progress = null,
        progress_message = null
    from placed p
    where j.id = any (array[p.id])
    returning j.queue_id, j.lane, j.priority, j.position, j.ready_at, j.state, j.given, j.given_by,
        fairlane.keys_of_lane(j.lane_keys, j.keys, j.task) as keys
),
appended as (
    insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, given, given_by)
    select queue_id, lane, priority, (array_agg(keys))[1], count(*), min(position), min(ready_at),
        (array_agg(given order by given_by desc) filter (where given is not null))[1], max(given_by)
    from back
    where state = {ready}
    group by queue_id, lane, priority
    order by min(position)
),
-- One waiter for each job that can start, and one to hold the timer of those that are due later.
woken as (
    select sum(fairlane.nudge(wanted.queue_id, wanted.most)) as nudged
    from (
        select queue_id, count(*) filter (where state = {ready}) + least(1, count(*) filter (where state = {scheduled})) as most
        from back
        group by queue_id
    ) wanted
    where (select true from fairlane.waiters w where w.queue_id = wanted.queue_id limit 1)
)
select given.id, given.state, woken.nudged
from given
cross join woken

-- name: unfile_jobs
-- Take jobs that are no longer ended, or no longer there, off the entries that name them.
-- $1 jobs, $2 and $3 entries
with
entries as materialized (
    select f.is_dead, f.id,
        array(select u.id from unnest(f.jobs) as u (id) where u.id <> all ($1::uuid[])) as rest
    from unnest($2::boolean[], $3::bigint[]) as named (is_dead, id)
    cross join lateral (
        select f.*
        from fairlane.finished f
        where f.is_dead = named.is_dead and f.id = named.id
        limit 1
    ) f
),
emptied as (
    delete from fairlane.finished f
    using entries e
    where f.is_dead = any (array[e.is_dead]) and f.id = any (array[e.id]) and cardinality(e.rest) = 0
)
update fairlane.finished f
set jobs = e.rest
from entries e
where f.is_dead = any (array[e.is_dead]) and f.id = any (array[e.id]) and cardinality(e.rest) > 0

-- name: forget_jobs
-- The history of jobs that were removed goes, and their unique keys are free; what somebody decides on at this moment is
-- left to them, and a window outlives its job. $1 jobs
with
history as (
    delete from fairlane.attempts a
    using unnest($1::uuid[]) as removed (id)
    where a.job = any (array[removed.id])
),
forgotten as (
    delete from fairlane.unique_jobs u
    using unnest($1) as removed (id)
    where u.job = any (array[removed.id])
)
delete from fairlane.uniques
where id = any (array(
    select u.id
    from unnest($1) as removed (id)
    cross join lateral (
        select u.id
        from fairlane.uniques u
        where u.job = removed.id and u.expires_at is null
        limit 1
        for update skip locked
    ) u
))

-- name: select_states
select j.id, j.state
from fairlane.jobs j
where j.id = any ($1::uuid[])

-- name: purge
-- Remove ended jobs for good. $1 jobs
with
given as materialized (
    select j.id, j.state
    from fairlane.jobs j
    where j.id = any ($1::uuid[])
    order by j.id
    for update
),
removed as (
    delete from fairlane.jobs j
    using given g
    where j.id = any (array[g.id]) and g.state > {running}
    returning j.id
)
select id, state
from given

-- name: retry_now
-- Scheduled jobs are due now; the next claim lets them join their lanes. Skipping what is locked: a claim that promotes
-- locks in the order of their times, and the two must not meet crosswise.
-- $1 now or null, $2 jobs
with
clock as materialized (
    select fairlane.instant($1::bigint) as now
),
given as materialized (
    select j.id, j.state
    from fairlane.jobs j
    where j.id = any ($2::uuid[])
    order by j.id
    for update skip locked
),
hurried as (
    update fairlane.jobs j
    set due_at = least(j.due_at, clock.now)
    from given g
    cross join clock
    where j.id = any (array[g.id]) and g.state = {scheduled}
    returning j.queue_id
),
woken as (
    select sum(fairlane.nudge(wanted.queue_id, wanted.most)) as nudged
    from (select queue_id, count(*) as most from hurried group by queue_id) wanted
    where (select true from fairlane.waiters w where w.queue_id = wanted.queue_id limit 1)
)
select j.id, coalesce(g.state, j.state) as state, g.id is null as is_busy, woken.nudged
from fairlane.jobs j
left join lateral (select * from given g where g.id = j.id limit 1) g on true
cross join woken
where j.id = any ($2)

-- name: count_beyond
-- How many finished jobs there are beyond those to keep, as far as one pass of pruning cares.
-- $1 whether dead, $2 how many to keep, $3 how many to remove at most
select least($3::integer, greatest(0, coalesce(sum(cardinality(newest.jobs)), 0) - $2::integer))::integer
from (
    select f.jobs
    from fairlane.finished f
    where f.is_dead = $1::boolean
    order by f.id desc
    limit $2::integer + $3::integer
) newest

-- name: select_traces
-- A waiter is there as long as its listener holds its lock.
-- $1 queue, $2 flows, $3 gates
select
    array(
        select wanted.id
        from unnest($2::bytea[]) as wanted (id)
        where (select true from fairlane.flows f where f.queue_id = $1::integer and f.id = wanted.id limit 1)
    ) as flows,
    array(
        select wanted.id
        from unnest($3::bytea[]) as wanted (id)
        where (select true from fairlane.gates g where g.queue_id = $1 and g.id = wanted.id limit 1)
    ) as gates,
    (
        select count(*)
        from fairlane.waiters w
        where w.queue_id = $1 and not pg_try_advisory_xact_lock_shared(w.alive_lock)
    ) as listeners
