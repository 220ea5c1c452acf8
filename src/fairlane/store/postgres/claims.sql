-- The statements of a claim. They run on a connection of their own, under the queue's claim lock, at READ COMMITTED: the
-- lock is a statement by itself, so that every snapshot is taken after the wait for it.
--
-- A plan is made once and kept, perhaps while a table is all but empty: a join would then be turned round, the table
-- walked from end to end, and still be when it is full. So rows are looked up in lateral subqueries with a limit; and where
-- that cannot be, `x.id = any (array[y.id])` stands for `x.id = y.id`: an equality can be merged, so that even a whole
-- index is worth a path, but this one can only be looked up.

-- name: select_queue_id
-- The opening of a claim cannot have parameters (three statements, one round trip), so the server writes it once.
-- `take_over` is for whoever holds the lock already, by `enter`: from then on it goes with the transaction.
select
    id,
    format('begin; select pg_advisory_xact_lock(1717660018, %s)', id) as take_lock,
    format('begin; set local synchronous_commit = off; select pg_advisory_xact_lock(1717660018, %s)', id)
        as take_lock_unflushed,
    format('set idle_session_timeout = 0; begin; select pg_advisory_xact_lock(1717660018, %1$s), '
        'pg_advisory_unlock(1717660018, %1$s)', id) as take_over,
    format('set idle_session_timeout = 0; begin; set local synchronous_commit = off; '
        'select pg_advisory_xact_lock(1717660018, %1$s), pg_advisory_unlock(1717660018, %1$s)', id) as take_over_unflushed
from fairlane.queues
where name = $1

-- name: take_another_lock
-- Of a queue that is changed together with others, in their transaction.
select pg_advisory_xact_lock(1717660018, $1::integer)

-- name: select_policy
select id, policy, digest, version, amended
from fairlane.queues
where name = $1

-- name: select_policy_versions
select name, version
from fairlane.queues
where name = any ($1::text[])

-- name: select_in_force
select digest || '/' || amended as digest, fairlane.instant($2::bigint) as now
from fairlane.queues
where id = $1::integer

-- name: select_overrides
select document
from fairlane.overrides
where queue_id = $1::integer
order by id

-- name: open_claim
-- $1 queues, $2 whether the lock of one is to be taken for the session, $3 now or null, $4 the least that queue time should
-- be, $5 what it should be, $6 and $7 the states of the boards that are known, $8 how we write the journal, $9 how many releases,
-- $10 how many arrivals, $11 who asks
select *
from fairlane.open_claim($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)

-- name: write_claim
select *
from fairlane.write_claim($1, $2, $3, $4, $5, $6, $7, $8::text::xid8, $9::text::pg_snapshot, $10::text::xid8, $11,
    $12::text::xid8, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22)

-- name: leave_claim
-- Let go of a session's lock with nothing written.
select pg_advisory_unlock(1717660018, $1::integer), set_config('idle_session_timeout', '0', false)

-- name: promote
-- Scheduled jobs whose time has come join their lanes at the end, or in the place that they have kept: in a sequence, or as
-- suspects (2), which were given back if they are scheduled; had they run, they would be cleared. Their lane events go straight to
-- the plan.
-- $1 queue, $2 now, $3 how many, $4 whether its jobs run in sequence
with
due as materialized (
    select j.id, j.due_at, j.keeps_place, j.keeps_place and ($4::boolean or j.suspicion >= 2) as returns, j.position,
        j.ready_at, j.given, j.given_by
    from fairlane.jobs j
    where j.queue_id = $1::integer and j.due_at is not null and j.due_at <= $2::bigint
    order by j.due_at, j.position
    limit $3::integer
    for no key update skip locked
),
placed as materialized (
    select id, keeps_place, given, given_by,
        case when returns then position else nextval('fairlane.positions') end as position,
        case when returns then ready_at else $2 end as ready_at
    from due
),
joined as (
    update fairlane.jobs j
    set state = {ready}, due_at = null, position = p.position, ready_at = p.ready_at, keeps_place = false
    from placed p
    where j.id = any (array[p.id])
    returning j.lane, j.priority, j.position, j.ready_at, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task) as keys,
        p.keeps_place as had_kept, p.given, p.given_by
)
select lane, priority, (array_agg(keys))[1] as keys, count(*)::integer as count, min(position) as floor,
    min(ready_at) as since,
    (array_agg(given order by given_by desc) filter (where given is not null))[1] as given,
    (count(*) filter (where had_kept))::integer as resumed,
    coalesce(max(given_by), 0) as given_by
from joined
group by lane, priority
order by min(position)

-- part: heads
cross join lateral (
    select j.ctid as place, j.position, j.ready_at
    from fairlane.jobs j
    where j.lane = h.lane and j.position >= h.floor and j.state = {ready}
    order by j.position
    limit h.count
) j

-- name: select_heads
-- The first ready jobs of lanes, where the plan asks for nothing else: in rows as narrow as they can be.
select h.nth, j.place, j.position, j.ready_at
from unnest($1::fairlane.asked_heads[]) with ordinality as h (lane, floor, count, nth)
{heads}

-- name: register_claimer
insert into fairlane.claimers (pid, base, worker, name, duration)
values (pg_backend_pid(), $1, $2, $3, $4)
on conflict (pid) do update set base = excluded.base, worker = excluded.worker, name = excluded.name,
    duration = excluded.duration

-- name: enter
select *
from fairlane.enter($1, $2, $3)

-- name: settle_and_enter
call fairlane.settle_and_enter($1, $2, $3, $4, $5, $6, null, null, null)

-- name: update_policy
update fairlane.queues
set policy = $2, digest = $3, version = version + 1, applied_at = $4
where id = $1
returning version

-- name: select_producers
-- Transactions that may hold lane events which nobody can see yet. A statement locks its tables before it takes its
-- snapshot: whoever did not see our registration is in this list, or has committed and is seen by the drain.
select l.virtualtransaction
from pg_locks l
where l.locktype = 'relation'
  and l.database = (select d.oid from pg_database d where d.datname = current_database())
  and l.relation in ('fairlane.arrivals'::regclass, 'fairlane.releases'::regclass)
  and l.mode = 'RowExclusiveLock'
  and l.pid <> pg_backend_pid()

-- name: select_forced
-- Jobs that are to start whatever their limits say, and can.
select j.lane, j.place, j.position, j.ready_at
from fairlane.forced x
cross join lateral (
    select j.lane, j.ctid as place, j.position, j.ready_at
    from fairlane.jobs j
    where j.id = x.job and j.state = {ready}
    limit 1
) j
where x.queue_id = $1::integer
order by j.position
limit $2::integer

-- name: forget_forced
-- Those that do not wait any more, for whatever reason.
delete from fairlane.forced x
where x.queue_id = $1::integer
  and not exists (select from fairlane.jobs j where j.id = x.job and j.state < {running})

-- name: put_overrides
insert into fairlane.overrides (queue_id, id, document)
select $1::integer, u.id, u.document
from unnest($2::text[], $3::text[]) as u (id, document)
on conflict (queue_id, id) do update
set document = excluded.document

-- name: delete_overrides
delete from fairlane.overrides
where queue_id = $1::integer and id = any ($2::text[])

-- name: update_overridden
update fairlane.queues
set amended = $2, overrides_end_at = $3::bigint
where id = $1::integer

-- name: insert_audit
insert into fairlane.audit (at, actor, action, queue, target, before, after, reason, act, part, jobs)
values (fairlane.instant($1::bigint), $2, $3, $4, $5, $6, $7, $8, $9::uuid, $10::integer, $11::integer)

-- name: select_audit
-- The newest first, the parts of one action as one entry. $1 before which entry, $2 how many
select a.id, a.at, a.actor, a.action, a.queue, a.target, a.before, a.after, a.reason,
    a.jobs + coalesce((select sum(p.jobs) from fairlane.audit p where p.act = a.act and p.part > 0), 0) as jobs
from fairlane.audit a
where a.id < $1::bigint and a.part = 0
order by a.id desc
limit $2::integer

-- name: select_audit_of_queue
select a.id, a.at, a.actor, a.action, a.queue, a.target, a.before, a.after, a.reason,
    a.jobs + coalesce((select sum(p.jobs) from fairlane.audit p where p.act = a.act and p.part > 0), 0) as jobs
from fairlane.audit a
where a.queue = $3 and a.id < $1::bigint and a.part = 0
order by a.id desc
limit $2::integer

-- name: end_session
insert into fairlane.ended_sessions (id, expires_at)
values ($1, $2::bigint)
on conflict (id) do nothing

-- name: is_session_ended
select exists (select 1 from fairlane.ended_sessions where id = $1)

-- name: prune_ended_sessions
-- Those that no clock takes for valid any more. $1 until when they would have lasted
delete from fairlane.ended_sessions
where expires_at <= $1::bigint

-- name: force
-- Waiting jobs start next; those that are scheduled are due now. $1 now or null, $2 jobs
with
found as materialized (
    select j.id, j.state, j.queue_id
    from unnest($2::uuid[]) as u (id)
    cross join lateral (select j.id, j.state, j.queue_id from fairlane.jobs j where j.id = u.id limit 1) j
),
hurried as (
    update fairlane.jobs j
    set due_at = fairlane.instant($1::bigint)
    where j.id = any (array(select id from found where state = {scheduled})) and j.state = {scheduled}
),
forced as (
    insert into fairlane.forced (job, queue_id)
    select id, queue_id
    from found
    where state < {running}
    on conflict (job) do nothing
),
woken as (
    select sum(fairlane.nudge(f.queue_id, f.jobs)) as nudged
    from (select queue_id, count(*) as jobs from found where state < {running} group by queue_id) f
)
select found.id, found.state, woken.nudged
from found, woken


-- Jobs that run one after the other.

-- name: count_kept_places
-- How many jobs keep a place, by their lanes, as far as the lane events of it have been folded: what has changed since the last of
-- them was drained is told by those that are left, in the same snapshot. A place that comes from another partition is announced
-- with a number below zero.
-- $1 queue
select max(k.priority) as priority, max(k.keys::text) as keys, sum(k.count)::integer as count
from (
    select j.lane, j.priority, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task) as keys, 1 as count
    from fairlane.jobs j
    where j.queue_id = $1::integer and j.keeps_place
    union all
    select a.lane, a.priority, a.keys, a.resumed
    from fairlane.arrivals a
    where a.queue_id = $1 and a.resumed <> 0
    union all
    select u.lane, null, null, -u.kept
    from fairlane.releases r
    cross join unnest(r.lanes, r.kept) as u (lane, kept)
    where r.queue_id = $1 and u.kept > 0
) k
group by k.lane
having sum(k.count) > 0

-- name: register_waiter
insert into fairlane.waiters (queue_id, worker, alive_lock)
values ($1, $2, $3)
on conflict (queue_id, worker) do update set alive_lock = excluded.alive_lock

-- name: withdraw_waiter
delete from fairlane.waiters
where queue_id = $1 and worker = $2
