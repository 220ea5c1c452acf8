-- The statements of everyone who does not claim: producers, settling workers, the reaper, operators. They append facts
-- and never touch flows, lanes or gates. (Why `= any (array[…])` stands where `=` would do: see `claims.sql`.)

-- name: set_session
-- What our statements rely on, whatever server, database or role have as their defaults; and who serves this session.
-- Plans: statements are written for one plan each. A planner that has just seen an emptied or a filled table must not
-- find another one: a newest-first look-up that flipped to a bitmap scan took 400 ms instead of 9.
-- Isolation: who waits for a lock must then see what its last holder wrote.
-- Silence: a peer that is gone lets go of its locks within seconds, not when the system's two hours are over.
-- (Not set, because they are the operator's to decide: read-only sessions, lock and statement timeouts, synchronous_commit.)
select pg_backend_pid(),
    set_config('jit', 'off', false),
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('enable_seqscan', 'off', false),
    set_config('enable_bitmapscan', 'off', false),
    set_config('enable_hashjoin', 'off', false),
    set_config('enable_mergejoin', 'off', false),
    set_config('enable_material', 'off', false),
    set_config('enable_memoize', 'off', false),
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('extra_float_digits', '1', false),
    set_config('standard_conforming_strings', 'on', false),
    set_config('idle_in_transaction_session_timeout', '60s', false),
    set_config('tcp_keepalives_idle', '5', false),
    set_config('tcp_keepalives_interval', '2', false),
    set_config('tcp_keepalives_count', '3', false),
    set_config('tcp_user_timeout', '10s', false),
    -- Windows has no way to look at a socket while it computes, and refuses the setting.
    case when version() !~* 'windows|mingw|visual c' then set_config('client_connection_check_interval', '2s', false) end

-- name: select_without_work
-- Which of these sessions ($1) are gone, or have had nothing to do for so many seconds ($2).
select u.pid
from unnest($1::integer[]) as u (pid)
left join pg_stat_activity a on a.pid = u.pid
where a.pid is null
   or (a.state <> 'active' and a.state_change < clock_timestamp() - make_interval(secs => $2::double precision))

-- name: pulse
select 1

-- name: learn_types
-- The driver asks for every array type that it meets, on every connection, at some 10 ms a question: ask once, and before
-- there is work. (Prepared, never run.)
select null::uuid[], null::bigint[], null::integer[], null::bytea[], null::text[], null::fairlane.start[],
    null::fairlane.holder[], null::double precision[], null::fairlane.asked_heads[], null::fairlane.flows[],
    null::fairlane.lanes[], null::fairlane.gates[], null::fairlane.shared_gates[], null::fairlane.touched_shared_gate[],
    null::tid[], null::fairlane.done[], null::fairlane.settlement[], null::fairlane.request[], null::fairlane.granted[]

-- name: guard_claims
-- Whoever holds a claim lock and goes silent (a stopped process, a lost network) must not stop the queue for good.
set idle_in_transaction_session_timeout = '5s';
set lock_timeout = 0;
set statement_timeout = 0

-- name: do_not_wait_for_the_disk
-- For what is only done again if a crash loses it.
set local synchronous_commit = off

-- name: select_time
-- $1 now or null
select fairlane.instant($1::bigint) as now, fairlane.ahead($1) as ahead

-- name: keep_time
-- $1 the least that queue time should be, $2 what it should be
select fairlane.keep_instant(null, $1::bigint, $2::bigint) as now, fairlane.ahead(null) as ahead

-- name: keep_given_time
-- $1 now, $2 how far that is ahead of its clock
select fairlane.keep_instant($1::bigint) as now, case
    when $2::bigint > fairlane.stored_ahead() and has_sequence_privilege('fairlane.time_ahead', 'update')
        then setval('fairlane.time_ahead', $2) else fairlane.stored_ahead() end as ahead

-- name: select_stored_time
select fairlane.stored_ahead(), fairlane.stored_latest()

-- name: select_database
-- Tells one database from every other, in types that every driver reads alike.
-- Then a value of each type that jobs are made of: whoever has given a driver another way with one reads something else.
select current_database()::text as name, to_regnamespace('fairlane')::oid::text as schema,
    extract(epoch from pg_postmaster_start_time())::text as server,
    '\x00ff'::bytea as bytea, '0198c0de-0000-7000-8000-000000000000'::uuid as uuid, 1::bigint as bigint, 1::integer as integer,
    1::smallint as smallint, true as boolean

-- name: has_migrations
select to_regclass('fairlane.migrations') is not null

-- name: create_migrations
create schema if not exists fairlane;
create table if not exists fairlane.migrations (
    number integer primary key,
    name text not null,
    checksum text not null,
    applied_at timestamptz not null default now()
)

-- name: lock_migrations
select pg_advisory_xact_lock(1717660018, 0)

-- name: select_migrations
select number, checksum
from fairlane.migrations

-- name: insert_queue
with declared as (
    insert into fairlane.queues (name, policy, digest)
    values ($1, $2, $3)
    on conflict (name) do nothing
    returning id
)
insert into fairlane.queue_states (queue_id)
select id
from declared
returning queue_id

-- name: select_queue_names
select name
from fairlane.queues
order by name

-- name: enqueue
-- Store jobs, append one lane event for each lane, and wake at most one waiter for each job. An id that is there already fails
-- the whole statement, and nothing of it is stored.
-- $1 now or null, $2 whether in the caller's transaction, $3 jobs
with
clock as materialized (
    select fairlane.instant($1::bigint) as now, fairlane.ahead($1) as ahead
),
given as (
    select g.*, clock.now, case when g.due > clock.now then g.due end as due_at
    from clock
    cross join lateral (
        -- A time of day goes by the wall clock.
        select u.*, coalesce(u.run_at + clock.ahead, clock.now + u.delay) as due
        from unnest($3::fairlane.new_job[]) u
    ) g
),
placed as (
    select given.*, nextval('fairlane.positions') as position
    from given
),
stored as (
    insert into fairlane.jobs (id, position, enqueued_at, ready_at, queue_id, max_attempts, priority, state, lane, task,
        keys, lane_keys, payload, due_at, on_dead, given, given_by, context)
    select id, position, now, now, queue_id, max_attempts, priority, case when due_at is null then {ready} else {scheduled} end, lane, task,
        keys::jsonb, lane_keys::jsonb, payload, due_at, on_dead, given, case when given is not null then position end, context
    from placed
    returning queue_id, lane, priority, position, ready_at, state, fairlane.keys_of_lane(lane_keys, keys, task) as keys,
        given
),
appended as (
    -- A job that is due later is announced for its numbers alone: they hold from now on.
    insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, given, given_by)
    select queue_id, lane, priority, (array_agg(keys))[1], count(*) filter (where state = {ready}),
        coalesce(min(position) filter (where state = {ready}), min(position)), min(ready_at),
        (array_agg(given order by position desc) filter (where given is not null))[1],
        max(position) filter (where given is not null)
    from stored
    where state = {ready} or given is not null
    group by queue_id, lane, priority
    order by min(position)
),
-- One waiter for each job that can start, and one to hold the timer of those that are due later.
wanted as (
    select queue_id, count(*) filter (where state = {ready}) + least(1, count(*) filter (where state = {scheduled})) as most
    from stored
    group by queue_id
)
select sum(case
    -- A waiter that registers while the caller's transaction stays open looks again until it has ended; one that this
    -- snapshot is too old to see must be told by the channel that everybody hears.
    when $2::boolean and (
        current_setting('transaction_isolation') <> 'read committed' or fairlane.nudge(queue_id, most) = 0
    ) then length(pg_notify('fairlane', queue_id::text)::text)
    when $2 then 0
    when exists (select from fairlane.waiters w where w.queue_id = wanted.queue_id) then fairlane.nudge(queue_id, most)
    else 0
end)
from wanted

-- name: append_events
-- As `enqueue`, for jobs whose rows this transaction copies in next: take their positions, append the events of their lanes, wake waiters.
-- Keys come as text: the connection may be a caller's who has jsonb written in another way.
-- $1 now or null, $2 whether in the caller's transaction, $3 how many jobs; of each kind of jobs that are alike $4 queue, $5 lane,
-- $6 priority, $7 keys, $8 whether they are ready, $9 how many, $10 and $11 the places of the first and the last of them, $12 the
-- numbers that they bring along
with
clock as materialized (
    select fairlane.instant($1::bigint) as now
),
taken as materialized (
    select array(select nextval('fairlane.positions') from generate_series(1, $3::integer)) as positions
),
kinds as materialized (
    select *
    from unnest(
        $4::integer[], $5::bytea[], $6::smallint[], $7::text[], $8::boolean[], $9::integer[], $10::integer[], $11::integer[],
        $12::text[]
    )
        as k (queue_id, lane, priority, keys, is_ready, jobs, first, last, given)
),
appended as (
    -- Jobs that are due later are announced for their numbers alone: they hold from now on.
    insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, given, given_by)
    select b.queue_id, b.lane, b.priority, b.keys::jsonb, b.jobs, taken.positions[b.first], clock.now, b.given,
        taken.positions[b.given_place]
    from clock
    cross join taken
    cross join (
        select k.queue_id, k.lane, k.priority, k.keys, min(k.first) as first,
            case when k.is_ready then sum(k.jobs) else 0 end as jobs,
            (array_agg(k.given order by k.last desc) filter (where k.given is not null))[1] as given,
            max(k.last) filter (where k.given is not null) as given_place
        from kinds k
        where k.is_ready or k.given is not null
        group by k.queue_id, k.lane, k.priority, k.keys, k.is_ready
    ) b
    order by b.first
),
woken as (
    select sum(case
        when $2::boolean and (
            current_setting('transaction_isolation') <> 'read committed' or fairlane.nudge(queue_id, most) = 0
        ) then length(pg_notify('fairlane', queue_id::text)::text)
        when $2 then 0
        when exists (select from fairlane.waiters w where w.queue_id = wanted.queue_id)
            then fairlane.nudge(queue_id, most)
        else 0
    end) as nudged
    from (
        select k.queue_id, coalesce(sum(k.jobs) filter (where k.is_ready), 0) + least(1, count(*) filter (where not k.is_ready))
            as most
        from kinds k
        group by k.queue_id
    ) wanted
)
select clock.now, taken.positions, woken.nudged
from clock
cross join taken
cross join woken

-- name: copy_jobs
-- The rows themselves, in the form of `jobs.copy_in`, where the caller's driver takes a statement for it.
copy fairlane.jobs (id, position, given_by, payload, enqueued_at, ready_at, state, due_at, on_dead, given, context, queue_id, priority,
    max_attempts, lane, task, keys, lane_keys)
from stdin (format binary)

-- name: are_stored
-- Whether every one of these jobs is there as it was given: then it was this producer that stored them.
select count(*) = cardinality($1)
from unnest($1::fairlane.new_job[]) u
cross join lateral (select j.* from fairlane.jobs j where j.id = u.id limit 1) j
where j.queue_id = u.queue_id and j.task = u.task and j.lane = u.lane and j.keys = u.keys::jsonb and j.payload = u.payload

-- name: lock_uniques
-- Nobody else decides on these keys until this transaction has ended. In the order of the ids: no two ever deadlock.
insert into fairlane.uniques as u (id)
select unnest($1::bytea[])
on conflict (id) do update set id = excluded.id

-- name: select_unique_jobs
-- The keys that these jobs ask for when they are put back, in the order of their enqueue.
select u.job, u.key, u.until, substring(sha256(j.payload) for 16) as digest
from fairlane.unique_jobs u
cross join lateral (select j.payload from fairlane.jobs j where j.id = u.job and j.state > {done} limit 1) j
where u.job = any ($1::uuid[])
order by u.job

-- name: select_holders
-- Who has taken these keys, and how those jobs stand now.
-- $1 keys, $2 now or null
select fairlane.instant($2::bigint) as now, u.id, u.job, u.digest, u.until, u.expires_at, j.state,
    j.claimed_at is not null as has_started
from unnest($1::bytea[]) as k (id)
left join lateral (select u.* from fairlane.uniques u where u.id = k.id limit 1) u on true
left join lateral (select j.state, j.claimed_at from fairlane.jobs j where j.id = u.job limit 1) j on true

-- name: take_uniques
-- $1 keys, $2 jobs that take them, $3 digests, $4 until, $5 when each expires, $6 whether they take them for the first time
with
asked as (
    insert into fairlane.unique_jobs (job, key, until)
    select t.job, t.id, t.until
    from unnest($1::bytea[], $2::uuid[], $4::smallint[]) as t (id, job, until)
    where $6::boolean
    -- An id that a job has already is refused where that is stored.
    on conflict (job) do nothing
)
update fairlane.uniques u
set job = t.job, digest = t.digest, until = t.until, expires_at = t.expires_at
from unnest($1::bytea[], $2::uuid[], $3::bytea[], $4::smallint[], $5::bigint[]) as t (id, job, digest, until, expires_at)
where u.id = any (array[t.id])

-- name: settle
-- End claims: fenced by their lease, with their lane events, their history and their place in retention.
-- $1 now or null, $2 settlements, $3 leases that hold nothing more, $4 whether a reaper settles, $5 lags in the order of $2, or
-- null (beside them and not in them: programs of an older version settle too)
with
clock as materialized (
    select fairlane.instant($1::bigint) as now
),
given as materialized (
    select u.*, ($5::bigint[])[u.ordinality] as lag, clock.now
    from clock
    cross join unnest($2::fairlane.settlement[]) with ordinality u
),
ended as (
    update fairlane.jobs j
    set
        -- Chosen here, where the row is locked: a cancel that committed before us is seen.
        state = case when j.cancel_requested then g.state_if_cancelled else g.state end,
        outcome = case when j.cancel_requested then g.outcome_if_cancelled else g.outcome end,
        attempt = case when g.counts_attempt then j.attempt else j.attempt - 1 end,
        suspicion = g.suspicion,
        finished_at = case when case when j.cancel_requested then g.state_if_cancelled else g.state end > {running} then g.now end,
        due_at = case when case when j.cancel_requested then g.state_if_cancelled else g.state end = {scheduled}
            then g.now + coalesce(g.delay, 0) end,
        keeps_place = case when j.cancel_requested then g.state_if_cancelled else g.state end = {scheduled},
        -- The lease stays: a settlement that is tried again after a lost connection must recognise its own work.
        lease = case when $4::boolean then null else j.lease end,
        result = g.result,
        error = g.error
    from given g
    where j.id = any (array[g.id]) and j.lease = g.lease and j.state = {running}
    returning j.id, j.queue_id, j.lane, j.task, j.shared, j.shared_limits, j.priority, j.position, j.ready_at,
        fairlane.keys_of_lane(j.lane_keys, j.keys, j.task) as keys, j.state, j.claimed_at, j.worker, j.charge, j.lease, j.outcome, j.error, g.ran, g.lag, g.unstarted, g.is_spent, g.is_cut_short, g.now,
        -- Whoever goes on no more because it was asked to stop says nothing about what it called.
        case when j.cancel_requested and g.state_if_cancelled <> g.state then 2 else g.verdict end as verdict,
        case when g.counts_attempt then j.attempt else j.attempt + 1 end as attempt
),
freed as (
    insert into fairlane.releases (queue_id, lanes, ended, ran, charged, unstarted, refund, since, failed, neutral, latest,
        kept, lost, signal)
    select queue_id, array_agg(lane), array_agg(ended), array_agg(ran), array_agg(charged), array_agg(unstarted),
        array_agg(refund), array_agg(since), array_agg(failed), array_agg(neutral), array_agg(latest), array_agg(kept),
        case when bool_or(lost > 0) then array_agg(lost) end,
        case when bool_or(lags) then array_agg(signal) end
    from (
        select queue_id, lane,
            (count(*) filter (where state < {running}))::integer as kept,
            (count(*) filter (where is_cut_short))::integer as lost,
            bool_or(lag is not null) as lags,
            coalesce(sum(coalesce(lag, ran)) filter (where not unstarted), 0)::bigint as signal,
            (count(*) filter (where verdict = 1))::integer as failed,
            (count(*) filter (where verdict = 2 and not unstarted))::integer as neutral,
            coalesce(max(claimed_at) filter (where not unstarted), 0) as latest,
            count(*) filter (where not unstarted)::integer as ended,
            coalesce(sum(ran) filter (where not unstarted), 0)::bigint as ran,
            coalesce(sum(charge) filter (where not unstarted), 0) as charged,
            count(*) filter (where unstarted)::integer as unstarted,
            coalesce(sum(charge) filter (where unstarted), 0) as refund,
            coalesce(min(case when is_spent then 0 else claimed_at end) filter (where unstarted), 0) as since
        from ended
        -- Failed runs apart, by when they were claimed: whoever counts failures must know whether they are old news.
        -- And those that were lost apart from those of which it is known how long they took.
        group by queue_id, lane, case when verdict = 1 then claimed_at end, is_cut_short
    ) by_lane
    group by queue_id
),
-- The same for the shared gates that they had passed, from the jobs' rows alone: a settlement that has waited for a row sees
-- its newest version, but any other table as it was before the wait.
passed as materialized (
    select s.shared_limit, s.gate, e.queue_id, e.task,
        count(*) filter (where not unstarted)::integer as ended,
        coalesce(sum(ran) filter (where not unstarted), 0)::bigint as ran,
        count(*) filter (where unstarted)::integer as unstarted,
        coalesce(min(case when is_spent then 0 else claimed_at end) filter (where unstarted), 0) as since,
        (count(*) filter (where verdict = 1))::integer as failed,
        (count(*) filter (where verdict = 2 and not unstarted))::integer as neutral,
        coalesce(max(claimed_at) filter (where not unstarted), 0) as latest
    from ended e
    cross join unnest(e.shared_limits, e.shared) as s (shared_limit, gate)
    group by s.shared_limit, s.gate, e.queue_id, e.task, case when verdict = 1 then claimed_at end
),
freed_shared as (
    insert into fairlane.shared_releases (shared_limit, gate, queue_id, task, ended, ran, unstarted, since, failed, neutral,
        latest)
    select shared_limit, gate, queue_id, task, ended, ran, unstarted, since, failed, neutral, latest
    from passed
),
appended as (
    insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, resumed)
    select queue_id, lane, priority, (array_agg(keys))[1], count(*), min(position), min(ready_at), count(*)
    from ended
    where state = {ready}
    group by queue_id, lane, priority
),
remembered as (
    insert into fairlane.attempts (job, lease, attempt, claimed_at, ended_at, worker, outcome, error)
    select id, lease, attempt, claimed_at, now, worker, outcome, error
    from ended
    where state < {running}
),
filed as (
    insert into fairlane.finished (is_dead, at, jobs)
    select state = {dead}, now, array_agg(id)
    from ended
    where state > {running}
    group by state = {dead}, now
),
-- Skipping what is locked: the reaper locks a lease before its jobs, we come from the jobs.
dropped as (
    delete from fairlane.leases
    where id = any (array(select l.id from fairlane.leases l where l.id = any ($3::uuid[]) for update skip locked))
),
forgotten as (
    delete from fairlane.cancellations
    where lease = any ($3::uuid[])
),
-- One waiter for each job that is ready again, one to hold the timer of those that are due later, and one for the slots
-- that are free now, if jobs wait for slots. (A worker that lives claims for its own slots as a rule.)
woken as (
    select sum(fairlane.nudge(back.queue_id, back.ready + back.due + case when $4 or stopped.ready > 0 then 1 else 0 end))
        as nudged
    from (
        select queue_id, count(*) filter (where state = {ready}) as ready,
            least(1, count(*) filter (where state = {scheduled})) as due
        from ended
        group by queue_id
        union all
        -- Whoever shares a limit with them may use what they leave.
        select distinct q.queue_id, 0, 0
        from passed p
        cross join lateral (
            select q.queue_id from fairlane.shared_limit_queues q where q.shared_limit = p.shared_limit limit 1000
        ) q
        where q.queue_id not in (select queue_id from ended)
    ) back
    cross join lateral (
        select s.ready
        from fairlane.queue_states s
        where s.queue_id = back.queue_id
        order by s.version desc
        limit 1
    ) stopped
    where (select true from fairlane.waiters w where w.queue_id = back.queue_id limit 1)
)
select
    case when (select count(*) from ended) = cardinality($2) then '{}'
        else array(select id from given except select id from ended) end as lost,
    woken.nudged,
    case when exists (select from fairlane.result_listeners l where l.waiter >= '00000000-0000-0000-0000-000000000000')
        then fairlane.announce(array(select id from ended where state > {running})) end as announced
from woken

-- name: settle_done
-- The same for a batch in which every job is done: nothing goes back, nothing is remembered. (A function, because a claim
-- can take it along: `settle_and_enter`.)
-- $1 now or null, $2 settlements, $3 leases that hold nothing more
select fairlane.settle_done($1::bigint, $2::fairlane.done[], $3::uuid[])

-- name: tell_all_if_blind
-- A snapshot from the beginning of the caller's transaction does not show who waits by now: then all look for themselves.
select count(pg_notify('fairlane', q.id::text))
from fairlane.queues q
where current_setting('transaction_isolation') <> 'read committed'

-- name: tell_holders
-- Whoever holds claims of a queue: those that have not started stand by terms that have just changed. $1 queue
select count(pg_notify(fairlane.channel(l.worker_id), 'terms'))
from (select distinct worker_id from fairlane.leases where queue_id = $1) l

-- name: announce
select fairlane.announce($1::uuid[])

-- name: select_settled
-- Of these claims, the jobs that a settlement under the same lease has ended.
select g.id
from unnest($1::uuid[], $2::uuid[]) as g (id, lease)
where (select j.lease = g.lease and j.state <> {running} from fairlane.jobs j where j.id = g.id)
   or (select true from fairlane.attempts a where a.job = g.id and a.lease = g.lease limit 1)

-- name: renew
-- $1 now or null, $2 leases, $3 for how long, $4 the least that queue time should be, $5 what it should be
with
clock as materialized (
    select fairlane.keep_instant($1::bigint, $4::bigint, $5::bigint) as now
),
renewed as (
    update fairlane.leases l
    set renewed_at = clock.now, expires_at = clock.now + $3::bigint
    from clock
    where l.id = any ($2::uuid[])
    returning l.id
)
select
    (select now from clock) as now,
    array(select id from renewed) as held,
    array(select c.job from fairlane.cancellations c where c.lease = any ($2::uuid[])) as cancelled

-- name: select_held
select g.id
from unnest($1::uuid[], $2::uuid[]) as g (id, lease)
join fairlane.jobs j on j.id = any (array[g.id])
where j.lease = g.lease and j.state = {running}

-- name: lock_expired_leases
-- A renewal that came first has moved the end away, and this finds the lease no more; one that comes later waits for us
-- and finds it gone.
-- $1 now or null, $2 how many, $3 by when they have ended, if that is before now
select l.id, l.renewed_at, cardinality(l.jobs) as jobs
from fairlane.leases l
where l.expires_at <= (select least(fairlane.keep_instant($1::bigint), $3::bigint))
order by l.expires_at
limit $2
for update skip locked

-- name: select_leases_of_worker
-- $1 worker, $2 without these, $3 how many
select l.id
from fairlane.leases l
where l.worker_id = $1 and l.id <> all ($2::uuid[])
limit $3

-- name: select_abandoned
-- The claims that still stand under these leases.
select j.id, j.lease, j.task, j.attempt, j.max_attempts, j.suspicion, j.claimed_at, l.worker_id
from fairlane.leases l
cross join unnest(l.jobs) as held (id)
join fairlane.jobs j on j.id = any (array[held.id])
where l.id = any ($1::uuid[]) and j.lease = l.id and j.state = {running}

-- name: lock_abandoned
-- Those of them that nobody else has locked: a handler may have acked in a transaction of its own that is still open.
select j.id
from fairlane.leases l
cross join unnest(l.jobs) as held (id)
join fairlane.jobs j on j.id = any (array[held.id])
where l.id = any ($1::uuid[]) and j.lease = l.id and j.state = {running}
for no key update of j skip locked

-- name: next_lease_end
select min(expires_at)
from fairlane.leases

-- name: delete_deaf_waiters
delete from fairlane.waiters
where pg_try_advisory_xact_lock_shared(alive_lock)

-- name: delete_gone_claimers
delete from fairlane.claimers c
where not exists (select from pg_stat_activity a where a.pid = c.pid)

-- name: delete_orphaned_cancellations
-- A cancel that committed while its job was being settled leaves a note under a lease that is gone.
delete from fairlane.cancellations c
where not exists (select from fairlane.leases l where l.id = c.lease)

-- name: withdraw_worker
delete from fairlane.waiters
where worker = $1

-- name: nudge
select fairlane.nudge($1::integer, $2::bigint, $3::uuid)

-- name: listen
-- The lock says that this listener is alive; it goes with the session.
select pg_advisory_lock($1::bigint), fairlane.channel($2::uuid) as channel

-- name: update_progress
update fairlane.jobs
set progress = $3, progress_message = $4
where id = $1 and lease = $2 and state = {running}

-- part: job_columns
j.id, q.name, j.task, j.state, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at, j.due_at,
    j.claimed_at, j.finished_at, j.worker, j.error, j.result, j.progress, j.progress_message, j.cancel_requested, j.replays,
    j.on_dead is not null as has_on_dead, j.context

-- name: select_job
select {job_columns}
from fairlane.jobs j
join fairlane.queues q on q.id = j.queue_id
where j.id = $1

-- name: select_contexts
-- For the traces of claimed jobs, and only where somebody traces.
select id, context
from fairlane.jobs
where id = any($1::uuid[]) and context is not null

-- name: select_given
-- The numbers that jobs brought along, for simulations of what ran.
select id, given
from fairlane.jobs
where id = any($1::uuid[]) and given is not null

-- name: select_retries
-- How often each of these jobs has asked for a retry since it was enqueued or replayed: an engine's own count.
-- One job at a time: joined to each other, the attempts of all jobs would be walked.
select given.job, found.retries
from unnest($1::uuid[]) as given (job)
cross join lateral (
    select count(*) filter (where a.outcome = 'retry' and a.id > coalesce(ended.id, 0)) as retries
    from (
        select max(e.id) as id
        from fairlane.attempts e
        where e.job = given.job and e.outcome in ('done', 'dead', 'cancelled')
    ) ended
    join fairlane.attempts a on a.job = given.job
) found
where found.retries > 0

-- name: select_last_attempt
select state, attempt, claimed_at, finished_at, worker, outcome, error
from fairlane.jobs
where id = $1

-- name: select_attempts
select attempt, claimed_at, ended_at, worker, outcome, error
from fairlane.attempts
where job = $1
order by id

-- name: select_counts
select s.ready, s.running, s.parked,
    (select count(*) from fairlane.arrivals a where a.queue_id = s.queue_id)
        + (select count(*) from fairlane.releases r where r.queue_id = s.queue_id) as lane_events
from fairlane.queue_states s
where s.queue_id = $1
order by s.version desc
limit 1

-- name: take_turn_at_pruning
-- One at a time, for as long as the transaction lasts. Two who count what is too many would each remove as much; and a
-- fleet that finds a long backlog must not leave its claims behind it. It is done again if a crash loses it; and whoever
-- falls silent in the middle must not keep its turn for good.
select pg_try_advisory_xact_lock(1717660018, -1), set_config('synchronous_commit', 'off', true),
    set_config('idle_in_transaction_session_timeout', '15s', true)

-- name: prune
-- The oldest files of finished jobs whose time has passed, with the jobs that are still as they were filed.
-- $1 whether dead, $2 how old, $3 how many jobs
with
old as materialized (
    select f.at, f.id, f.jobs
    from fairlane.finished f
    -- By their end, not by their id: what is not old yet, however much that is, is not looked at.
    where f.is_dead::integer = $1::boolean::integer and f.at <= $2::bigint
    order by f.at, f.id
    limit $3::integer
    for update skip locked
),
taken as materialized (
    select counted.id, counted.jobs[1 : $3 - before] as jobs, counted.jobs[$3 - before + 1 :] as rest
    from (
        select id, jobs, (sum(cardinality(jobs)) over (order by at, id) - cardinality(jobs))::integer as before
        from old
    ) counted
    where counted.before < $3
),
removed as (
    delete from fairlane.jobs j
    using (select unnest(jobs) as id from taken) t
    where j.id = any (array[t.id]) and (case when $1 then j.state = {dead} else j.state in ({done}, {cancelled}) end) and j.finished_at <= $2
    returning j.id
),
emptied as (
    delete from fairlane.finished f
    using taken t
    where f.is_dead = $1 and f.id = any (array[t.id]) and cardinality(t.rest) = 0
),
shortened as (
    update fairlane.finished f
    set jobs = t.rest
    from taken t
    where f.is_dead = $1 and f.id = any (array[t.id]) and cardinality(t.rest) > 0
)
select array(select id from removed) as jobs, (select coalesce(sum(cardinality(jobs)), 0) from taken) as filed

-- name: prune_uniques
-- Windows that are over.
delete from fairlane.uniques
where id = any (array(
    select u.id
    from fairlane.uniques u
    where u.expires_at <= $1::bigint
    order by u.expires_at
    limit $2::integer
    for update skip locked
))


-- Values by key.

-- name: select_value
select value
from fairlane.stored_values
where key = $1

-- name: put_value
insert into fairlane.stored_values (key, value)
values ($1, $2)
on conflict (key) do update set value = excluded.value

-- name: put_value_if_absent
insert into fairlane.stored_values (key, value)
values ($1, $2)
on conflict (key) do nothing
returning true

-- name: replace_value
update fairlane.stored_values
set value = $3
where key = $1 and value = $2
returning true

-- name: delete_value
delete from fairlane.stored_values
where key = $1
returning true

-- name: delete_value_if_equal
delete from fairlane.stored_values
where key = $1 and value = $2
returning true

-- name: scan_values
select key, value
from fairlane.stored_values
where key >= $1 and key < $2
order by key
limit $3

-- name: write_values
select fairlane.write_values($1::text[], $2::bytea[])


-- Waiting for jobs to end.

-- name: open_results
-- The lock says that this listener is alive; it goes with the session.
-- $1 alive_lock, $2 waiter
with listening as (
    insert into fairlane.result_listeners (waiter, alive_lock)
    values ($2::uuid, $1::bigint)
)
select pg_advisory_lock($1), fairlane.channel($2) as channel

-- name: close_results
with gone as (
    delete from fairlane.result_waiters
    where waiter = $1::uuid
)
delete from fairlane.result_listeners
where waiter = $1

-- name: await_results
insert into fairlane.result_waiters (job, waiter)
select u.job, $1::uuid
from unnest($2::uuid[]) as u (job)
on conflict do nothing

-- name: withdraw_results
delete from fairlane.result_waiters
where job = any ($2::uuid[]) and waiter = $1::uuid

-- name: select_settlers
-- Transactions that may end jobs without having seen a registration. Whoever ends a job files it, and a statement locks
-- its tables before it takes its snapshot: whoever did not see the registration is in this list, or has committed.
select l.virtualtransaction
from pg_locks l
where l.locktype = 'relation'
  and l.database = (select d.oid from pg_database d where d.datname = current_database())
  and l.relation = 'fairlane.finished'::regclass
  and l.mode = 'RowExclusiveLock'
  and l.pid <> pg_backend_pid()

-- name: select_ended
-- Of these jobs, those that have ended or are gone.
select u.job
from unnest($1::uuid[]) as u (job)
where coalesce((select j.state > {running} from fairlane.jobs j where j.id = u.job), true)

-- name: delete_deaf_result_listeners
with deaf as (
    delete from fairlane.result_listeners
    where pg_try_advisory_xact_lock_shared(alive_lock)
    returning waiter
)
delete from fairlane.result_waiters w
using deaf
where w.waiter = any (array[deaf.waiter])

-- name: begin_look
-- A look plans as a claim does. What it would start it takes back, and keeps the lock.
savepoint look

-- name: undo_look
rollback to savepoint look


-- What lands when jobs die.

-- name: select_on_dead
-- What these jobs have declared for their death. It never changes: whoever is about to kill them may ask beforehand.
select g.id, j.on_dead
from unnest($1::uuid[]) as g (id)
cross join lateral (select j.on_dead from fairlane.jobs j where j.id = g.id and j.on_dead is not null limit 1) j

-- name: lock_expired_lease
-- One lease, if it is still there and over, and nobody else is at it. (Subtracted: the index on the ends would serve a comparison.)
-- $1 now or null, $2 lease
select true
from fairlane.leases l
where l.id = $2::uuid and l.expires_at - (select fairlane.instant($1::bigint)) <= 0
for update skip locked

-- name: inherit_claims
-- Claims of a lease that has run out pass to a lease that nobody renews: its worker has lost them, although they end later.
-- $1 lease, $2 the new one, $3 jobs
with inherited as (
    insert into fairlane.leases (id, queue_id, worker_id, worker, renewed_at, expires_at, jobs)
    select $2::uuid, l.queue_id, l.worker_id, l.worker, l.renewed_at, l.expires_at, $3::uuid[]
    from fairlane.leases l
    where l.id = $1::uuid
)
update fairlane.jobs j
set lease = $2
from unnest($3) as g (id)
where j.id = any (array[g.id]) and j.lease = $1 and j.state = {running}

-- name: note_error
update fairlane.jobs
set error = $2
where id = $1


-- Back-pressure on producers.

-- name: count_ready
-- What the gates of backlogs count, and the lane events that are not folded yet: in one snapshot, so that they add up.
-- $1 queue, $2 gates, $3 how many lane events
select n.id as gate, g.in_flight as count, null::smallint as priority, null::text as keys
from unnest($2::bytea[]) as n (id)
cross join lateral (
    select g.in_flight
    from fairlane.gates g
    where g.queue_id = $1::integer and g.id = n.id
    limit 1
) g
union all
(
    select null, a.count, a.priority, a.keys::text
    from fairlane.arrivals a
    where a.queue_id = $1::integer
      and a.xid >= (
        select least(s.arrivals_from, pg_snapshot_xmin(pg_current_snapshot()))
        from fairlane.queue_states s
        where s.queue_id = $1
        order by s.version desc
        limit 1
      )
    order by a.xid, a.floor
    limit $3::integer
)


-- Claims that pass from one process to another.

-- name: adopt
-- A claim that stands under a lease moves to a new one, of another worker. Tried again after a lost connection, perhaps
-- long after, it finds its own work, and holds it from then on. The old lease goes if it held nothing else (skipping what
-- is locked: the reaper locks a lease before its jobs, we come from the job); of one that held more, whoever renews it
-- lets go.
-- $1 now or null, $2 job, $3 its lease, $4 the new one, $5 the worker's id, $6 its name, $7 for how long, $8 tasks it may be of
with
adopted as (
    update fairlane.jobs j
    set lease = $4::uuid, worker = $6::text
    from (select fairlane.instant($1::bigint) as now) clock
    where j.id = any (array[$2::uuid]) and j.lease = any (array[$3::uuid, $4]) and j.state = {running}
      and j.task = any ($8::text[])
    returning j.id, j.queue_id, j.task, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at,
        j.cancel_requested, j.suspicion, j.claimed_at, clock.now
),
leased as (
    insert into fairlane.leases (id, queue_id, worker_id, worker, renewed_at, expires_at, jobs)
    select $4, queue_id, $5::uuid, $6, now, now + $7::bigint, array[id]
    from adopted
    on conflict (id) do update set renewed_at = excluded.renewed_at, expires_at = excluded.expires_at
),
dropped as (
    delete from fairlane.leases
    where id = any (array(
        select l.id
        from fairlane.leases l
        where l.id = $3 and l.jobs = array[$2] and exists (select from adopted)
        for update skip locked
    ))
)
select a.id, a.task, a.priority, a.keys, a.payload, a.attempt, a.max_attempts, a.enqueued_at, a.cancel_requested,
    a.suspicion, a.claimed_at, q.name, a.now, fairlane.ahead($1) as ahead
from adopted a
cross join lateral (select q.name from fairlane.queues q where q.id = a.queue_id limit 1) q
