-- The statements of a claim. They run on a connection of their own, under the queue's claim lock, at READ COMMITTED: the
-- lock is a statement by itself, so that every snapshot is taken after the wait for it.

-- name: select_queue_id
-- The opening of a claim cannot have parameters (three statements, one round trip), so the server writes it once.
select
    id,
    format('begin; select pg_advisory_xact_lock(1717660018, %s)', id) as take_lock,
    format('begin; set local synchronous_commit = off; select pg_advisory_xact_lock(1717660018, %s)', id)
        as take_lock_unflushed
from fairlane.queues
where name = $1

-- name: select_policy
select policy, digest, version
from fairlane.queues
where name = $1

-- name: load
-- Drain the bells and read what the plan starts from: the lanes that they name, the first ready flows with their first
-- lanes, the gates whose time has come.
-- $1 queue, $2 now or null, $3 how many flows, $4 how many releases, $5 how many arrivals, $6 lanes a flow, $7 who asks
with
queue as materialized (
    select q.*, fairlane.instant($2::bigint) as now, pg_snapshot_xmin(pg_current_snapshot()) as oldest
    from fairlane.queues q
    where q.id = $1::integer
),
released as (
    delete from fairlane.releases
    where ctid = any (array(
        select r.ctid
        from fairlane.releases r
        where r.queue_id = $1 and r.xid >= (select releases_from from queue)
        order by r.xid
        limit $4::integer
    ))
    returning xid, lanes, ended, ran, charged, unstarted, refund
),
arrived as (
    delete from fairlane.arrivals
    where ctid = any (array(
        select a.ctid
        from fairlane.arrivals a
        where a.queue_id = $1 and a.xid >= (select arrivals_from from queue)
        order by a.xid
        limit $5::integer
    ))
    returning arrivals as bell, xid, lane
),
freed as (
    select array_agg(u.lane) as lanes, array_agg(u.ended) as ended, array_agg(u.ran) as ran,
        array_agg(u.charged) as charged, array_agg(u.unstarted) as unstarted, array_agg(u.refund) as refund
    from released r
    cross join unnest(r.lanes, r.ended, r.ran, r.charged, r.unstarted, r.refund)
        as u (lane, ended, ran, charged, unstarted, refund)
),
named as materialized (
    select l
    from (
        select unnest(lanes) as lane from released
        union
        select lane from arrived
    ) bells
    join fairlane.lanes l on l.queue_id = $1 and l.id = bells.lane
),
scanned as materialized (
    select f, f.id
    from fairlane.flows f
    where f.queue_id = $1
      and f.standing = 1
      and (f.vtime, f.tie) >= ((select cursor from queue), (select cursor_tie from queue))
    order by f.vtime, f.tie
    limit $3::integer
)
select
    queue.now,
    queue.digest,
    queue.vtime,
    queue.cursor,
    queue.cursor_tie,
    queue.tie,
    queue.cost,
    -- A bound from any later snapshot would pass over bells of transactions that were still open in this one.
    case when (select count(*) from arrived) < $5 then queue.oldest
        else least(queue.oldest, (select max(xid) from arrived)) end::text as arrivals_from,
    case when (select count(*) from released) < $4 then queue.oldest
        else least(queue.oldest, (select max(xid) from released)) end::text as releases_from,
    (select count(*) from released) as release_rows,
    freed.lanes as released,
    freed.ended,
    freed.ran,
    freed.charged,
    freed.unstarted,
    freed.refund,
    array(select bell from arrived order by xid) as arrivals,
    array(select l from named) || array(
        select l
        from scanned
        cross join lateral (
            select l, l.rank
            from fairlane.lanes l
            where l.queue_id = $1 and l.flow = scanned.id and l.standing = 1
            order by l.rank
            limit $6::integer
        ) first
    ) as lanes,
    array(
        select f
        from (select distinct (l).flow as id from named) n
        join fairlane.flows f on f.queue_id = $1 and f.id = n.id
    ) as flows,
    array(select f from scanned) as scanned,
    array(
        select g
        from fairlane.gates g
        where g.queue_id = $1 and g.wake_at is not null and g.wake_at <= queue.now
        order by g.wake_at
        limit $3
    ) as due_gates,
    exists (
        select
        from fairlane.jobs j
        where j.queue_id = $1 and j.due_at is not null and j.due_at <= queue.now
    ) as has_due,
    exists (select from fairlane.waiters w where w.queue_id = $1 and w.worker is distinct from $7::uuid) as others_wait
from queue, freed

-- name: promote
-- Scheduled jobs whose time has come join their lanes at the end. Their bells go straight to the plan.
-- $1 queue, $2 now, $3 how many
with
due as materialized (
    select j.id, j.due_at
    from fairlane.jobs j
    where j.queue_id = $1::integer and j.due_at is not null and j.due_at <= $2::bigint
    order by j.due_at, j.position
    limit $3::integer
    for no key update skip locked
),
placed as materialized (
    select id, nextval('fairlane.positions') as position
    from due
),
joined as (
    update fairlane.jobs j
    set state = 1, due_at = null, position = p.position, ready_at = $2
    from placed p
    where j.id = p.id
    returning j.lane, j.priority, j.position, coalesce(j.lane_keys, j.keys) as keys
)
select lane, priority, (array_agg(keys))[1] as keys, count(*)::integer as count, min(position) as floor, $2 as since
from joined
group by lane, priority

-- name: select_lanes
-- Lanes by id, with their flows.
select
    array(
        select l
        from unnest($2::bytea[]) as n (id)
        join fairlane.lanes l on l.queue_id = $1::integer and l.id = n.id
    ) as lanes,
    array(
        select f
        from (
            select distinct l.flow as id
            from unnest($2::bytea[]) as n (id)
            join fairlane.lanes l on l.queue_id = $1 and l.id = n.id
        ) of
        join fairlane.flows f on f.queue_id = $1 and f.id = of.id
    ) as flows

-- name: supply
-- Whatever the plan asks for, in one round trip; what it does not ask for is an empty array.
-- $1 queue, $2 flows, $3 gates, $4 and $5 parked (gate, count), $6 and $7 lanes (flow, count),
-- $8 to $10 heads (lane, floor, count), $11 to $13 scan (virtual time, tie-breaker, count), $14 lanes a flow
with
sleeping as materialized (
    select l
    from unnest($4::bytea[], $5::integer[]) as p (gate, count)
    cross join lateral (
        select l
        from fairlane.lanes l
        where l.queue_id = $1::integer and l.standing = 2 and l.gate = p.gate
        order by l.tag
        limit p.count
    ) first
),
scanned as materialized (
    select f, f.id
    from fairlane.flows f
    where f.queue_id = $1
      and f.standing = 1
      and (f.vtime, f.tie) > ($11::double precision, $12::bigint)
    order by f.vtime, f.tie
    limit $13::integer
),
heads as (
    select array_agg(j.nth) as nth, array_agg(j.id) as id, array_agg(j.position) as position, array_agg(j.ready_at) as ready_at
    from (
        select h.nth, j.id, j.position, j.ready_at
        from unnest($8::bytea[], $9::bigint[], $10::integer[]) with ordinality as h (lane, floor, count, nth)
        cross join lateral (
            select j.id, j.position, j.ready_at
            from fairlane.jobs j
            where j.lane = h.lane and j.position >= h.floor and j.state = 1
            order by j.position
            limit h.count
        ) j
    ) j
)
select
    array(
        select f
        from unnest($2::bytea[]) as n (id)
        join fairlane.flows f on f.queue_id = $1 and f.id = n.id
    ) || array(
        select f
        from (select distinct (l).flow as id from sleeping) n
        join fairlane.flows f on f.queue_id = $1 and f.id = n.id
    ) || array(
        select first.f
        from unnest($4::bytea[], $5::integer[]) as p (gate, count)
        cross join lateral (
            select f
            from fairlane.flows f
            where f.queue_id = $1 and f.standing = 2 and f.gate = p.gate
            order by f.vtime, f.tie
            limit p.count
        ) first
    ) as flows,
    array(
        select g
        from unnest($3::bytea[]) as n (id)
        join fairlane.gates g on g.queue_id = $1 and g.id = n.id
    ) as gates,
    array(select l from sleeping) || array(
        select first.l
        from unnest($6::bytea[], $7::integer[]) as n (flow, count)
        cross join lateral (
            select l
            from fairlane.lanes l
            where l.queue_id = $1 and l.flow = n.flow and l.standing = 1
            order by l.rank
            limit n.count
        ) first
    ) || array(
        select first.l
        from scanned
        cross join lateral (
            select l
            from fairlane.lanes l
            where l.queue_id = $1 and l.flow = scanned.id and l.standing = 1
            order by l.rank
            limit $14::integer
        ) first
    ) as lanes,
    array(select f from scanned) as scanned,
    heads.nth as head_nth,
    heads.id as head_id,
    heads.position as head_position,
    heads.ready_at as head_ready_at
from heads

-- name: write
-- What the plan decided: jobs start, and the flows, lanes and gates that it touched are as it left them.
-- $1 queue, $2 to $8 its row, $9 to $17 flows, $18 to $25 lanes, $26 to $31 gates, $32 and $33 jobs and their charges,
-- $34 now, $35 lease, $36 and $37 worker, $38 the lease's end
with
queue as (
    update fairlane.queues
    set vtime = $2::double precision, cursor = $3::double precision, cursor_tie = $4::bigint, tie = $5::bigint,
        cost = $6::double precision, arrivals_from = $7::text::xid8, releases_from = $8::text::xid8
    where id = $1::integer
),
flows as (
    update fairlane.flows f
    set vtime = u.vtime, tie = u.tie, cost = u.cost, debt = u.debt, open = u.open, shut = u.shut,
        standing = u.standing, gate = u.gate
    from unnest($9::bytea[], $10::double precision[], $11::bigint[], $12::double precision[], $13::double precision[],
        $14::integer[], $15::integer[], $16::smallint[], $17::bytea[])
        as u (id, vtime, tie, cost, debt, open, shut, standing, gate)
    where f.queue_id = $1 and f.id = u.id
),
lanes as (
    update fairlane.lanes l
    set ready = u.ready, in_flight = u.in_flight, floor = u.floor, rank = u.rank, standing = u.standing, gate = u.gate,
        tag = u.tag
    from unnest($18::bytea[], $19::integer[], $20::integer[], $21::bigint[], $22::bigint[], $23::smallint[],
        $24::bytea[], $25::double precision[])
        as u (id, ready, in_flight, floor, rank, standing, gate, tag)
    where l.queue_id = $1 and l.id = u.id
),
gates as (
    update fairlane.gates g
    set in_flight = u.in_flight, tat = u.tat, waiting = u.waiting, awake = u.awake, wake_at = u.wake_at
    from unnest($26::bytea[], $27::integer[], $28::bigint[], $29::integer[], $30::integer[], $31::bigint[])
        as u (id, in_flight, tat, waiting, awake, wake_at)
    where g.queue_id = $1 and g.id = u.id
),
lease as (
    insert into fairlane.leases (id, queue_id, worker_id, worker, renewed_at, expires_at, jobs)
    select $35::uuid, $1, $36::uuid, $37::text, $34::bigint, $38::bigint, $32::uuid[]
    where cardinality($32::uuid[]) > 0
)
update fairlane.jobs j
set state = 2, attempt = j.attempt + 1, claimed_at = $34, lease = $35, worker = $37, charge = s.charge,
    outcome = null, progress = null, progress_message = null
from unnest($32::uuid[], $33::double precision[]) as s (id, charge)
where j.id = s.id and j.state = 1
returning j.id, j.task, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at, j.cancel_requested

-- name: insert_state
-- Flows, lanes and gates that are seen for the first time.
with
flows as (
    insert into fairlane.flows (queue_id, id, key, weight, vtime, tie, cost, debt, open, shut, standing, gate)
    select $1::integer, *
    from unnest($2::bytea[], $3::jsonb[], $4::double precision[], $5::double precision[], $6::bigint[],
        $7::double precision[], $8::double precision[], $9::integer[], $10::integer[], $11::smallint[], $12::bytea[])
),
lanes as (
    insert into fairlane.lanes (queue_id, id, flow, priority, keys, ready, in_flight, floor, rank, standing, gate, tag)
    select $1, *
    from unnest($13::bytea[], $14::bytea[], $15::smallint[], $16::jsonb[], $17::integer[], $18::integer[],
        $19::bigint[], $20::bigint[], $21::smallint[], $22::bytea[], $23::double precision[])
)
insert into fairlane.gates (queue_id, id, "limit", key, in_flight, tat, waiting, awake, wake_at)
select $1, *
from unnest($24::bytea[], $25::text[], $26::jsonb[], $27::integer[], $28::bigint[], $29::integer[], $30::integer[],
    $31::bigint[])

-- name: next_due
-- When something opens by itself. A lease that has ended already is the reaper's, not ours.
select least(
    (select min(j.due_at) from fairlane.jobs j where j.queue_id = $1::integer and j.due_at is not null),
    (select min(g.wake_at) from fairlane.gates g where g.queue_id = $1 and g.wake_at is not null),
    (select min(l.expires_at) from fairlane.leases l where l.expires_at > $2::bigint)
)

-- name: select_state
-- Everything a queue's bells were folded into.
select
    array(select f from fairlane.flows f where f.queue_id = $1::integer) as flows,
    array(select l from fairlane.lanes l where l.queue_id = $1) as lanes,
    array(select g from fairlane.gates g where g.queue_id = $1) as gates

-- name: delete_state
with
flows as (delete from fairlane.flows where queue_id = $1::integer),
lanes as (delete from fairlane.lanes where queue_id = $1)
delete from fairlane.gates
where queue_id = $1

-- name: update_policy
update fairlane.queues
set policy = $2, digest = $3, version = version + 1
where id = $1
returning version

-- name: register_waiter
insert into fairlane.waiters (queue_id, worker, ear)
values ($1, $2, $3)
on conflict (queue_id, worker) do update set ear = excluded.ear

-- name: withdraw_waiter
delete from fairlane.waiters
where queue_id = $1 and worker = $2

-- name: select_producers
-- Transactions that may hold bells which nobody can see yet. A statement locks its tables before it takes its
-- snapshot: whoever did not see our registration is in this list, or has committed and is seen by the drain.
select l.virtualtransaction
from pg_locks l
where l.locktype = 'relation'
  and l.database = (select d.oid from pg_database d where d.datname = current_database())
  and l.relation = 'fairlane.arrivals'::regclass
  and l.mode = 'RowExclusiveLock'
  and l.pid <> pg_backend_pid()

-- name: collect_lanes
-- Collection walks a stretch at a time, in the order of ids: an index of what is idle would be written at every claim.
-- $1 queue, $2 from where, $3 how many
with
stretch as materialized (
    select l.id, l.standing = 0 and l.ready <= 0 and l.in_flight <= 0 as is_idle
    from fairlane.lanes l
    where l.queue_id = $1::integer and l.id > $2::bytea
    order by l.id
    limit $3::integer
),
removed as (
    delete from fairlane.lanes l
    using stretch s
    where l.queue_id = $1 and l.id = s.id and s.is_idle
    returning l.id
)
select
    (select id from stretch order by id desc limit 1) as reached,
    (select count(*) from stretch) as seen,
    (select count(*) from removed) as removed

-- name: collect_flows
-- Flows without lanes whose tag lies behind the queue's virtual time: forgetting them gives no credit.
with
stretch as materialized (
    select f.id,
        f.standing = 0
        and f.vtime + f.debt <= (select q.vtime from fairlane.queues q where q.id = $1::integer)
        and not exists (select from fairlane.lanes l where l.queue_id = $1 and l.flow = f.id) as is_idle
    from fairlane.flows f
    where f.queue_id = $1 and f.id > $2::bytea
    order by f.id
    limit $3::integer
),
removed as (
    delete from fairlane.flows f
    using stretch s
    where f.queue_id = $1 and f.id = s.id and s.is_idle
    returning f.id
)
select
    (select id from stretch order by id desc limit 1) as reached,
    (select count(*) from stretch) as seen,
    (select count(*) from removed) as removed

-- name: collect_gates
-- Gates that hold nothing, stop nobody and have all their tokens.
-- $4 now
with
stretch as materialized (
    select g.id, g.in_flight <= 0 and g.waiting <= 0 and g.awake <= 0 and g.tat <= fairlane.instant($4::bigint) as is_idle
    from fairlane.gates g
    where g.queue_id = $1::integer and g.id > $2::bytea
    order by g.id
    limit $3::integer
),
removed as (
    delete from fairlane.gates g
    using stretch s
    where g.queue_id = $1 and g.id = s.id and s.is_idle
    returning g.id
)
select
    (select id from stretch order by id desc limit 1) as reached,
    (select count(*) from stretch) as seen,
    (select count(*) from removed) as removed
