-- The statements of a claim. They run on a connection of their own, under the queue's claim lock, at READ COMMITTED: the
-- lock is a statement by itself, so that every snapshot is taken after the wait for it.
--
-- A plan is made once and kept, perhaps while a table is all but empty: a join would then be turned round, the table
-- walked from end to end, and still be when it is full. So rows are looked up in lateral subqueries with a limit; and where
-- that cannot be, `x.id = any (array[y.id])` stands for `x.id = y.id`: an equality can be merged, so that even a whole
-- index is worth a path, but this one can only be looked up.
--
-- `load` and `supply` answer with rows of one shape. (Arrays of composites would be easier on the eye, but the server
-- takes a kilobyte for every column of every element, all at once: 11 MB and 3,700 page faults for a claim of 200.)
--
--   kind          place id flow gate name   keys   f1      f2     f3   f4   i1        i2         i3        i4       i5      i6
--   q the queue     ×                digest bounds vtime   cursor cost      now       cursor_tie tie       releases due?    waiters?
--   r a release          ×                         charged refund           ended     ran        unstarted since
--   a an arrival         ×                  ×                               priority  count      floor     since
--   f a flow        ×    ×      ×           ×      weight  vtime  cost debt tie       open       shut      standing
--   s one scanned   ×    ×      ×           ×      weight  vtime  cost debt tie       open       shut      standing
--   l a lane        ×    ×  ×   ×           ×      tag                      priority  ready      in_flight floor    rank    standing
--   g a gate        ×    ×           limit  ×                               in_flight tat        waiting   awake    wake_at
--   h a head        ×                                                       nth       position   ready_at

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
    -- A bound above `oldest` comes from another cluster, by way of a dump: its transaction ids mean nothing here.
    select q.digest, q.applied_at, s.*, fairlane.instant($2::bigint) as now, pg_snapshot_xmin(pg_current_snapshot()) as oldest
    from fairlane.queues q
    cross join lateral (
        select s.*, s.ctid as place
        from fairlane.queue_states s
        where s.queue_id = q.id
        order by s.version desc
        limit 1
    ) s
    where q.id = $1::integer
),
released as (
    delete from fairlane.releases
    where ctid = any (array(
        select r.ctid
        from fairlane.releases r
        where r.queue_id = $1 and r.xid >= (select least(releases_from, oldest) from queue)
        order by r.xid
        limit $4::integer
    ))
    returning xid, lanes, ended, ran, charged, unstarted, refund, since
),
arrived as (
    delete from fairlane.arrivals
    where ctid = any (array(
        select a.ctid
        from fairlane.arrivals a
        where a.queue_id = $1 and a.xid >= (select least(arrivals_from, oldest) from queue)
        order by a.xid, a.floor
        limit $5::integer
    ))
    returning xid, floor, count, since, priority, lane, keys
),
named as materialized (
    select newest.*
    from (
        select unnest(lanes) as lane from released
        union
        select lane from arrived
    ) bells
    cross join lateral (
        select l.*, l.ctid as place
        from fairlane.lanes l
        where l.id = bells.lane
        order by l.version desc
        limit 1
    ) newest
),
scanned as materialized (
    select f.*, f.ctid as place
    from fairlane.flows f
    where f.queue_id = $1
      and f.standing = 1
      and (f.vtime, f.tie) >= ((select cursor from queue), (select cursor_tie from queue))
    order by f.vtime, f.tie
    limit $3::integer
)
select 'q' as kind, place, null::bytea as id, null::bytea as flow, null::bytea as gate, digest as name,
    -- A bound from any later snapshot would pass over bells of transactions that were still open in this one.
    case when (select count(*) from arrived) < $5 then oldest
        else least(oldest, (select max(xid) from arrived)) end::text
    || ' ' ||
    case when (select count(*) from released) < $4 then oldest
        else least(oldest, (select max(xid) from released)) end::text
    || ' ' || applied_at as keys,
    vtime as f1, cursor as f2, cost as f3, null::double precision as f4,
    now as i1, cursor_tie as i2, tie as i3,
    (select count(*) from released) as i4,
    exists (
        select
        from fairlane.jobs j
        where j.queue_id = $1 and j.due_at is not null and j.due_at <= queue.now
    )::integer as i5,
    exists (
        select from fairlane.waiters w where w.queue_id = $1 and w.worker is distinct from $7::uuid
    )::integer as i6
from queue
union all
select 'r', null, u.lane, null, null, null, null, u.charged, u.refund, null, null, u.ended, u.ran, u.unstarted, u.since, null, null
from released r
cross join unnest(r.lanes, r.ended, r.ran, r.charged, r.unstarted, r.refund, r.since)
    as u (lane, ended, ran, charged, unstarted, refund, since)
union all
(
    select 'a', null, lane, null, null, null, keys::text, null, null, null, null, priority, count, floor, since, null, null
    from arrived
    order by xid, floor
)
union all
select 's', place, id, null, gate, null, key::text, weight, vtime, cost, debt, tie, open, shut, standing, null, null
from scanned
union all
select 'f', newest.place, newest.id, null, newest.gate, null, newest.key::text, newest.weight, newest.vtime, newest.cost,
    newest.debt, newest.tie, newest.open, newest.shut, newest.standing, null, null
from (select distinct flow as id from named) n
cross join lateral (
    select f.*, f.ctid as place
    from fairlane.flows f
    where f.id = n.id
    order by f.version desc
    limit 1
) newest
union all
select 'l', place, id, flow, gate, null, keys::text, tag, null, null, null, priority, ready, in_flight, floor, rank, standing
from named
union all
select 'l', first.place, first.id, first.flow, first.gate, null, first.keys::text, first.tag, null, null, null,
    first.priority, first.ready, first.in_flight, first.floor, first.rank, first.standing
from scanned
cross join lateral (
    select l.*, l.ctid as place
    from fairlane.lanes l
    where l.flow = scanned.id and l.standing = 1
    order by l.rank, l.version desc
    limit least($6::integer, scanned.open)
) first
union all
(
    select 'g', g.ctid, g.id, null, null, g."limit", g.key::text, null, null, null, null, g.in_flight, g.tat, g.waiting,
        g.awake, g.wake_at, null
    from fairlane.gates g
    where g.queue_id = $1 and g.wake_at is not null and g.wake_at <= (select now from queue)
    order by g.wake_at
    limit $3
)

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
    where j.id = any (array[p.id])
    returning j.lane, j.priority, j.position, coalesce(j.lane_keys, j.keys) as keys
)
select lane, priority, (array_agg(keys))[1] as keys, count(*)::integer as count, min(position) as floor, $2 as since
from joined
group by lane, priority
order by min(position)

-- name: supply
-- Whatever the plan asks for, in one round trip; what it does not ask for is an empty array.
-- $1 queue, $2 flows, $3 gates, $4 and $5 parked (gate, count), $6 and $7 lanes (flow, count),
-- $8 to $10 heads (lane, floor, count), $11 to $13 scan (virtual time, tie-breaker, count), $14 lanes a flow,
-- $15 lanes by id
with
parked_lanes as materialized (
    select first.*
    from unnest($4::bytea[], $5::integer[]) as p (gate, count)
    cross join lateral (
        select l.*, l.ctid as place
        from fairlane.lanes l
        where l.standing = 2 and l.gate = p.gate
        order by l.tag
        limit p.count
    ) first
),
named_lanes as materialized (
    select newest.*
    from unnest($15::bytea[]) as n (id)
    cross join lateral (
        select l.*, l.ctid as place
        from fairlane.lanes l
        where l.id = n.id
        order by l.version desc
        limit 1
    ) newest
),
scanned as materialized (
    select f.*, f.ctid as place
    from fairlane.flows f
    where f.queue_id = $1::integer
      and f.standing = 1
      and (f.vtime, f.tie) > ($11::double precision, $12::bigint)
    order by f.vtime, f.tie
    limit $13::integer
)
select 'h' as kind, j.place, null::bytea as id, null::bytea as flow, null::bytea as gate, null::text as name,
    null::text as keys, null::double precision as f1, null::double precision as f2, null::double precision as f3,
    null::double precision as f4, h.nth as i1, j.position as i2, j.ready_at as i3, null::bigint as i4, null::bigint as i5,
    null::integer as i6
from unnest($8::bytea[], $9::bigint[], $10::integer[]) with ordinality as h (lane, floor, count, nth)
cross join lateral (
    select j.ctid as place, j.position, j.ready_at
    from fairlane.jobs j
    where j.lane = h.lane and j.position >= h.floor and j.state = 1
    order by j.position
    limit h.count
) j
union all
select 's', place, id, null, gate, null, key::text, weight, vtime, cost, debt, tie, open, shut, standing, null, null
from scanned
union all
select 'f', newest.place, newest.id, null, newest.gate, null, newest.key::text, newest.weight, newest.vtime, newest.cost,
    newest.debt, newest.tie, newest.open, newest.shut, newest.standing, null, null
from (
    select unnest($2::bytea[]) as id
    union
    select flow from parked_lanes
    union
    select flow from named_lanes
) n
cross join lateral (
    select f.*, f.ctid as place
    from fairlane.flows f
    where f.id = n.id
    order by f.version desc
    limit 1
) newest
union all
select 'f', first.place, first.id, null, first.gate, null, first.key::text, first.weight, first.vtime, first.cost,
    first.debt, first.tie, first.open, first.shut, first.standing, null, null
from unnest($4::bytea[], $5::integer[]) as p (gate, count)
cross join lateral (
    select f.*, f.ctid as place
    from fairlane.flows f
    where f.standing = 2 and f.gate = p.gate
    order by f.vtime, f.tie
    limit p.count
) first
union all
select 'l', place, id, flow, gate, null, keys::text, tag, null, null, null, priority, ready, in_flight, floor, rank, standing
from parked_lanes
union all
select 'l', place, id, flow, gate, null, keys::text, tag, null, null, null, priority, ready, in_flight, floor, rank, standing
from named_lanes
union all
select 'l', first.place, first.id, first.flow, first.gate, null, first.keys::text, first.tag, null, null, null,
    first.priority, first.ready, first.in_flight, first.floor, first.rank, first.standing
from (
    select * from unnest($6::bytea[], $7::integer[])
    union all
    select id, least($14::integer, open) from scanned
) n (flow, count)
cross join lateral (
    select l.*, l.ctid as place
    from fairlane.lanes l
    where l.flow = n.flow and l.standing = 1
    order by l.rank, l.version desc
    limit n.count
) first
union all
select 'g', newest.place, newest.id, null, null, newest."limit", newest.key::text, null, null, null, null,
    newest.in_flight, newest.tat, newest.waiting, newest.awake, newest.wake_at, null
from unnest($3::bytea[]) as n (id)
cross join lateral (
    select g.*, g.ctid as place
    from fairlane.gates g
    where g.id = n.id
    order by g.version desc
    limit 1
) newest

-- name: write
-- What the plan decided: jobs start, and the flows, lanes and gates that it touched are as it left them.
-- Rows are found by their place, from the load in the same transaction. A job's position is checked as well: jobs can be
-- cancelled meanwhile, and a place that was given up can be taken by another row.
-- $1 queue, $2 to $11 its state, $12 flows, $13 lanes, $14 gates, $15 jobs, $16 now, $17 the place of the queue's state,
-- $18 to $21 who gets the jobs (lease, worker, its name, the lease's end). What the first of them gets is returned, and how
-- many have started in all.
with
queue as (
    update fairlane.queue_states
    set vtime = $2::double precision, cursor = $3::double precision, cursor_tie = $4::bigint, tie = $5::bigint,
        cost = $6::double precision, ready = ready + $7::bigint, running = running + $8::bigint,
        parked = parked + $9::bigint, arrivals_from = $10::text::xid8, releases_from = $11::text::xid8,
        version = version + writes / 15, writes = (writes + 1) % 16
    where ctid = $17::tid
),
flows as (
    update fairlane.flows f
    set vtime = u.vtime, tie = u.tie, cost = u.cost, debt = u.debt, open = u.open, shut = u.shut,
        standing = u.standing, gate = u.gate,
        writes = (f.writes + 1) % 16,
        version = f.version + case
            when f.tie <> u.tie or f.standing <> u.standing or f.gate is distinct from u.gate or f.writes = 15 then 1
            else 0
        end
    from unnest($12::fairlane.touched_flow[]) u
    where f.ctid = u.place
),
lanes as (
    update fairlane.lanes l
    set ready = u.ready, in_flight = u.in_flight, floor = u.floor, rank = u.rank, standing = u.standing, gate = u.gate,
        tag = u.tag,
        writes = (l.writes + 1) % 16,
        version = l.version + case
            when l.rank <> u.rank or l.standing <> u.standing or l.gate is distinct from u.gate or l.tag <> u.tag
                or l.writes = 15 then 1
            else 0
        end
    from unnest($13::fairlane.touched_lane[]) u
    where l.ctid = u.place
),
gates as (
    update fairlane.gates g
    set in_flight = u.in_flight, tat = u.tat, waiting = u.waiting, awake = u.awake, wake_at = u.wake_at,
        writes = (g.writes + 1) % 16,
        version = g.version + case when g.wake_at is distinct from u.wake_at or g.writes = 15 then 1 else 0 end
    from unnest($14::fairlane.touched_gate[]) u
    where g.ctid = u.place
),
started as (
    update fairlane.jobs j
    set state = 2, attempt = j.attempt + 1, claimed_at = $16::bigint, lease = ($18::uuid[])[s.holder],
        worker = ($20::text[])[s.holder], charge = s.charge, outcome = null, progress = null, progress_message = null
    from unnest($15::fairlane.start[]) with ordinality s
    where j.ctid = s.place and j.position is not distinct from s.position and j.state = 1
    returning j.position, j.id, j.task, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at,
        j.cancel_requested, s.holder, s.ordinality
),
leased as (
    insert into fairlane.leases (id, queue_id, worker_id, worker, renewed_at, expires_at, jobs)
    select ($18)[holder], $1, ($19::uuid[])[holder], ($20)[holder], $16, ($21::bigint[])[holder],
        array_agg(id order by ordinality)
    from started
    group by holder
)
select position, id, task, priority, keys, payload, attempt, max_attempts, enqueued_at, cancel_requested,
    (select count(*) from started) as total
from started
where holder = 1

-- name: register_claimer
insert into fairlane.claimers (pid, base, worker, name, duration)
values (pg_backend_pid(), $1, $2, $3, $4)
on conflict (pid) do update set base = excluded.base, worker = excluded.worker, name = excluded.name,
    duration = excluded.duration

-- name: enter
select *
from fairlane.enter($1, $2, $3)

-- name: insert_state
-- Flows, lanes and gates that are seen for the first time.
with
flows as (
    insert into fairlane.flows
    select *
    from unnest($1::fairlane.flows[])
),
lanes as (
    insert into fairlane.lanes
    select *
    from unnest($2::fairlane.lanes[])
)
insert into fairlane.gates
select *
from unnest($3::fairlane.gates[])

-- name: next_due
-- When something opens by itself. A lease that has ended already is the reaper's, not ours.
select least(
    (select min(j.due_at) from fairlane.jobs j where j.queue_id = $1::integer and j.due_at is not null),
    (select min(g.wake_at) from fairlane.gates g where g.queue_id = $1 and g.wake_at is not null),
    (select min(l.expires_at) from fairlane.leases l where l.expires_at > $2::bigint)
)

-- name: take_state
-- Everything a queue's bells were folded into, removed from the tables.
with
flows as (delete from fairlane.flows where queue_id = $1::integer returning *),
lanes as (delete from fairlane.lanes where queue_id = $1 returning *),
gates as (delete from fairlane.gates where queue_id = $1 returning *),
queue as (
    update fairlane.queue_states
    set ready = 0, running = 0, parked = 0
    where queue_id = $1
    returning ctid as place
)
select 'q' as kind, place, null::bytea as id, null::bytea as flow, null::bytea as gate, null::text as name,
    null::text as keys, null::double precision as f1, null::double precision as f2, null::double precision as f3,
    null::double precision as f4, null::bigint as i1, null::bigint as i2, null::bigint as i3, null::bigint as i4,
    null::bigint as i5, null::integer as i6
from queue
union all
select 'f', null, id, null, gate, null, key::text, weight, vtime, cost, debt, tie, open, shut, standing, null, null
from flows
union all
select 'l', null, id, flow, gate, null, keys::text, tag, null, null, null, priority, ready, in_flight, floor, rank, standing
from lanes
union all
select 'g', null, id, null, null, "limit", key::text, null, null, null, null, in_flight, tat, waiting, awake, wake_at, null
from gates

-- name: update_policy
update fairlane.queues
set policy = $2, digest = $3, version = version + 1, applied_at = $4
where id = $1
returning version

-- name: has_alarms
-- Whether something opens by itself: a scheduled job, a gate.
select
    exists (select from fairlane.jobs j where j.queue_id = $1::integer and j.due_at is not null)
    or exists (select from fairlane.gates g where g.queue_id = $1 and g.wake_at is not null)

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
  and l.relation in ('fairlane.arrivals'::regclass, 'fairlane.releases'::regclass)
  and l.mode = 'RowExclusiveLock'
  and l.pid <> pg_backend_pid()

-- name: collect_lanes
-- Collection walks a stretch at a time, in the order of ids: an index of what is idle would be written at every claim.
-- $1 queue, $2 from where, $3 how many
with
stretch as materialized (
    select l.id, l.ctid as place, l.standing = 0 and l.ready <= 0 and l.in_flight <= 0 as is_idle
    from fairlane.lanes l
    where l.id > $2::bytea and l.queue_id = $1::integer
    order by l.id
    limit $3::integer
),
removed as (
    delete from fairlane.lanes l
    using stretch s
    where l.ctid = s.place and s.is_idle
    returning l.ready, l.in_flight
),
counted as (
    update fairlane.queue_states q
    set ready = q.ready - gone.ready, running = q.running - gone.running
    from (select coalesce(sum(ready), 0) as ready, coalesce(sum(in_flight), 0) as running from removed) gone
    where q.queue_id = $1
)
select
    (select id from stretch order by id desc limit 1) as reached,
    (select count(*) from stretch) as seen,
    (select count(*) from removed) as removed

-- name: collect_flows
-- Flows without lanes whose tag lies behind the queue's virtual time: forgetting them gives no credit.
with
stretch as materialized (
    select f.id, f.ctid as place,
        f.standing = 0
        and f.vtime + f.debt <= (select s.vtime from fairlane.queue_states s where s.queue_id = $1::integer)
        and (select true from fairlane.lanes l where l.flow = f.id limit 1) is null as is_idle
    from fairlane.flows f
    where f.id > $2::bytea and f.queue_id = $1
    order by f.id
    limit $3::integer
),
removed as (
    delete from fairlane.flows f
    using stretch s
    where f.ctid = s.place and s.is_idle
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
    select g.id, g.ctid as place,
        g.in_flight <= 0 and g.waiting <= 0 and g.awake <= 0 and g.tat <= fairlane.instant($4::bigint) as is_idle
    from fairlane.gates g
    where g.id > $2::bytea and g.queue_id = $1::integer
    order by g.id
    limit $3::integer
),
removed as (
    delete from fairlane.gates g
    using stretch s
    where g.ctid = s.place and s.is_idle
    returning g.id
)
select
    (select id from stretch order by id desc limit 1) as reached,
    (select count(*) from stretch) as seen,
    (select count(*) from removed) as removed
