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
--   kind          place id kin  gate name   keys   f1      f2     f3   f4   i1        i2         i3        i4       i5       i6
--   q the queue     ×                digest bounds vtime   cursor cost      now       cursor_tie tie       releases due? (1) waiters?
--                                                                                                              forced? (2)
--   a an arrival         ×                  ×                               priority  count      floor     since    resumed  given_by
--   f a flow        ×    ×  lane ×          ×      weight  vtime  cost debt tie       open       shut      standing spilled? given_by
--   s one scanned   ×    ×  lane ×          ×      weight  vtime  cost debt tie       open       shut      standing spilled? given_by
--   l a lane        ×    ×  flow ×          ×      tag                      priority  ready      in_flight floor    rank     standing
--   g a gate        ×    ×           limit  ×      value                    in_flight tat        waiting   awake    wake_at  given_by
--   h a head        ×                                                       nth       position   ready_at
--
-- A flow that houses its only lane says more: lane_gate, lane_keys, lane_tag, lane_priority, lane_ready, lane_in_flight,
-- lane_floor, lane_rank, lane_standing. Elsewhere these are null, but for those that are borrowed: a gate's `memo` and an
-- arrival's `given` come as lane_keys, the head of a lane as lane_floor; when the next gate of the queue is to be looked at comes as its lane_floor, and when
-- something else opens by itself as its lane_rank (see `next_due`).
--
-- Releases come as they are stored, many in a row of kind r, which `load` alone has: lanes, counts (ended, ran, unstarted,
-- since, failed, neutral, latest, kept and, where there is one, signal, one after the other, each as long as lanes), charges
-- (charged, refund).

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

-- name: load
-- Drain the bells and read what the plan starts from: the lanes that they name, the first ready flows with their first
-- lanes, the gates whose time has come.
-- $1 queue, $2 now or null, $3 how many flows, $4 how many releases, $5 how many arrivals, $6 lanes a flow, $7 who asks,
-- $8 the least that queue time should be, $9 what it should be
with
queue as materialized (
    -- A bound above `oldest` comes from another cluster, by way of a dump: its transaction ids mean nothing here.
    select q.digest || '/' || q.amended as digest, q.applied_at, s.*, fairlane.keep_instant($2::bigint, $8::bigint, $9::bigint) as now, pg_snapshot_xmin(pg_current_snapshot()) as oldest
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
    returning xid, lanes, ended, ran, charged, unstarted, refund, since, failed, neutral, latest, kept, signal
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
    returning xid, floor, count, since, priority, lane, keys, given, resumed, given_by
),
named as materialized (
    -- Rows of lanes first: a lane that has moved out of its flow's row may have left many old versions there.
    select bells.lane, newest.*
    from (
        select unnest(lanes) as lane from released
        union
        select lane from arrived
    ) bells
    left join lateral (
        select l.*, l.ctid as place
        from fairlane.lanes l
        where l.id = bells.lane
        order by l.version desc
        limit 1
    ) newest on true
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
select 'q' as kind, place, null::bytea as id, null::bytea as kin, null::bytea as gate, digest as name,
    -- A bound from any later snapshot would pass over bells of transactions that were still open in this one.
    case when (select count(*) from arrived) < $5 then oldest
        else least(oldest, (select max(xid) from arrived)) end::text
    || ' ' ||
    case when (select count(*) from released) < $4 then oldest
        else least(oldest, (select max(xid) from released)) end::text
    || ' ' || applied_at as keys,
    vtime as f1, cursor as f2, cost as f3, null::double precision as f4,
    -- Read once the bells are drained: the closer to the start of the jobs, the better rates hold for those who count them.
    fairlane.instant($2) as i1, cursor_tie as i2, tie as i3,
    (select count(*) from released) as i4,
    exists (
        select
        from fairlane.jobs j
        where j.queue_id = $1 and j.due_at is not null and j.due_at <= queue.now
    )::integer + 2 * exists (select from fairlane.forced x where x.queue_id = $1)::integer as i5,
    exists (
        select from fairlane.waiters w where w.queue_id = $1 and w.worker is distinct from $7::uuid
    )::integer::bigint as i6,
    null::bytea as lane_gate, null::text as lane_keys, null::double precision as lane_tag, null::integer as lane_priority,
    null::integer as lane_ready, null::integer as lane_in_flight,
    (
        select min(g.wake_at) from fairlane.gates g where g.queue_id = $1 and g.wake_at is not null and g.wake_at > queue.now
    ) as lane_floor,
    least(
        (
            select min(j.due_at)
            from fairlane.jobs j
            where j.queue_id = $1 and j.due_at is not null and j.due_at > queue.now
        ),
        (select o.overrides_end_at from fairlane.queues o where o.id = $1 and o.overrides_end_at > queue.now)
    ) as lane_rank,
    null::integer as lane_standing, null::bytea[] as lanes, null::bigint[] as counts, null::double precision[] as charges
from queue
union all
select 'r', null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
    null, null, null, null, null, null, null, null, null,
    r.lanes,
    r.ended::bigint[] || r.ran || r.unstarted::bigint[] || r.since || coalesce(r.failed, n.zeros)::bigint[]
        || coalesce(r.neutral, n.zeros)::bigint[] || coalesce(r.latest, n.zeros::bigint[])
        || coalesce(r.kept, n.zeros)::bigint[] || coalesce(r.signal, '{}'),
    r.charged || r.refund
from released r
cross join lateral (select array_fill(0, array[cardinality(r.lanes)]) as zeros) n
union all
(
    select 'a', null, lane, null, null, null, keys::text, null, null, null, null, priority, count, floor, since, resumed,
        given_by,
        null, given, null, null, null, null, null, null, null, null, null, null
    from arrived
    order by xid, floor
)
union all
select f.kind, f.place, f.id, f.lane, f.gate, null, f.key, f.weight, f.vtime, f.cost, f.debt, f.tie, f.open, f.shut,
    f.standing, f.spilled::integer, f.given_by, f.lane_gate, f.lane_keys, f.lane_tag, f.lane_priority, f.lane_ready,
    f.lane_in_flight, f.lane_floor, f.lane_rank, f.lane_standing, null, null, null
from (
    select 's' as kind, s.*
    from scanned s
    union all
    -- Many a flow that a bell names was scanned as well.
    select 'f', housing.*
    from named n
    cross join lateral (
        select f.*, f.ctid as place
        from fairlane.flows f
        where f.lane = n.lane
        order by f.version desc
        limit 1
    ) housing
    where n.id is null and n.lane not in (select lane from scanned where lane is not null)
    union all
    select 'f', newest.*
    from (select distinct flow as id from named where id is not null and flow not in (select id from scanned)) n
    cross join lateral (
        select f.*, f.ctid as place
        from fairlane.flows f
        where f.id = n.id
        order by f.version desc
        limit 1
    ) newest
) f
union all
select 'l', place, id, flow, gate, null, keys, tag, null, null, null, priority, ready, in_flight, floor, rank, standing,
    null, null, null, null, null, null, head, null, null, null, null, null
from named
where id is not null
union all
select 'l', first.place, first.id, first.flow, first.gate, null, first.keys, first.tag, null, null, null,
    first.priority, first.ready, first.in_flight, first.floor, first.rank, first.standing,
    null, null, null, null, null, null, first.head, null, null, null, null, null
from scanned
cross join lateral (
    select l.*, l.ctid as place
    from fairlane.lanes l
    where l.flow = scanned.id and l.standing = 1
    order by l.rank, l.head, l.version desc
    limit least($6::integer, scanned.open)
) first
where scanned.spilled
union all
(
    select 'g', g.ctid, g.id, null, null, g."limit", g.key, g.value, null, null, null, g.in_flight, g.tat, g.waiting,
        g.awake, g.wake_at, g.given_by,
        null, g.memo, null, null, null, null, null, null, null, null, null, null
    from fairlane.gates g
    where g.queue_id = $1 and g.wake_at is not null and g.wake_at <= (select now from queue)
    order by g.wake_at
    limit $3
)

-- name: promote
-- Scheduled jobs whose time has come join their lanes at the end, or, in a sequence, in the place that they have kept.
-- Their bells go straight to the plan.
-- $1 queue, $2 now, $3 how many, $4 whether its jobs run in sequence
with
due as materialized (
    select j.id, j.due_at, j.keeps_place, j.position, j.ready_at, j.given, j.given_by
    from fairlane.jobs j
    where j.queue_id = $1::integer and j.due_at is not null and j.due_at <= $2::bigint
    order by j.due_at, j.position
    limit $3::integer
    for no key update skip locked
),
placed as materialized (
    select id, keeps_place, given, given_by,
        case when $4::boolean and keeps_place then position else nextval('fairlane.positions') end as position,
        case when $4 and keeps_place then ready_at else $2 end as ready_at
    from due
),
joined as (
    update fairlane.jobs j
    set state = 1, due_at = null, position = p.position, ready_at = p.ready_at, keeps_place = false
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

-- name: select_heads
-- The first ready jobs of lanes, where the plan asks for nothing else: in rows as narrow as they can be.
select h.nth, j.place, j.position, j.ready_at
from unnest($1::fairlane.asked_heads[]) with ordinality as h (lane, floor, count, nth)
cross join lateral (
    select j.ctid as place, j.position, j.ready_at
    from fairlane.jobs j
    where j.lane = h.lane and j.position >= h.floor and j.state = 1
    order by j.position
    limit h.count
) j

-- name: supply
-- Whatever the plan asks for, in one round trip; what it does not ask for is an empty array.
-- $1 queue, $2 flows, $3 gates, $4 and $5 parked (gate, count), $6 and $7 lanes (flow, count),
-- $8 heads, $9 to $11 scan (virtual time, tie-breaker, count), $12 lanes a flow, $13 lanes by id
with
parked_lanes as materialized (
    select first.*
    from unnest($4::bytea[], $5::integer[]) as p (gate, count)
    cross join lateral (
        select l.*, l.ctid as place
        from fairlane.lanes l
        where l.standing = 2 and l.gate = p.gate
        order by l.tag, l.head
        limit p.count
    ) first
),
named as materialized (
    select n.lane, newest.*
    from unnest($13::bytea[]) as n (lane)
    left join lateral (
        select l.*, l.ctid as place
        from fairlane.lanes l
        where l.id = n.lane
        order by l.version desc
        limit 1
    ) newest on true
),
scanned as materialized (
    select f.*, f.ctid as place
    from fairlane.flows f
    where f.queue_id = $1::integer
      and f.standing = 1
      and (f.vtime, f.tie) > ($9::double precision, $10::bigint)
    order by f.vtime, f.tie
    limit $11::integer
)
select f.kind, f.place, f.id, f.lane as kin, f.gate, null::text as name, f.key as keys, f.weight as f1, f.vtime as f2,
    f.cost as f3, f.debt as f4, f.tie as i1, f.open::bigint as i2, f.shut::bigint as i3, f.standing::bigint as i4,
    f.spilled::integer::bigint as i5, f.given_by as i6, f.lane_gate, f.lane_keys, f.lane_tag, f.lane_priority,
    f.lane_ready, f.lane_in_flight, f.lane_floor, f.lane_rank, f.lane_standing
from (
    select 's' as kind, s.*
    from scanned s
    union all
    select 'f', newest.*
    from (
        select unnest($2::bytea[]) as id
        union
        select flow from parked_lanes
        union
        select flow from named where id is not null
    ) n
    cross join lateral (
        select f.*, f.ctid as place
        from fairlane.flows f
        where f.id = n.id
        order by f.version desc
        limit 1
    ) newest
    union all
    select 'f', housing.*
    from named n
    cross join lateral (
        select f.*, f.ctid as place
        from fairlane.flows f
        where f.lane = n.lane
        order by f.version desc
        limit 1
    ) housing
    where n.id is null
    union all
    select 'f', parked.*
    from unnest($4::bytea[], $5::integer[]) as p (gate, count)
    cross join lateral (
        select f.*, f.ctid as place
        from fairlane.flows f
        where f.standing = 2 and f.gate = p.gate
        order by f.vtime, f.tie
        limit p.count
    ) parked
    union all
    select 'f', housing.*
    from unnest($4::bytea[], $5::integer[]) as p (gate, count)
    cross join lateral (
        select f.*, f.ctid as place
        from fairlane.flows f
        where f.lane_standing = 2 and f.lane_gate = p.gate
        order by f.lane_tag
        limit p.count
    ) housing
) f
union all
select 'l', place, id, flow, gate, null, keys, tag, null, null, null, priority, ready, in_flight, floor, rank, standing,
    null, null, null, null, null, null, head, null, null
from parked_lanes
union all
select 'l', place, id, flow, gate, null, keys, tag, null, null, null, priority, ready, in_flight, floor, rank, standing,
    null, null, null, null, null, null, head, null, null
from named
where id is not null
union all
select 'l', first.place, first.id, first.flow, first.gate, null, first.keys, first.tag, null, null, null,
    first.priority, first.ready, first.in_flight, first.floor, first.rank, first.standing,
    null, null, null, null, null, null, first.head, null, null
from (
    -- A lane that is housed by its flow came with it.
    select * from unnest($6::bytea[], $7::integer[])
    union all
    select id, least($12::integer, open) from scanned where spilled
) n (flow, count)
cross join lateral (
    select l.*, l.ctid as place
    from fairlane.lanes l
    where l.flow = n.flow and l.standing = 1
    order by l.rank, l.head, l.version desc
    limit n.count
) first
union all
select 'g', newest.place, newest.id, null, null, newest."limit", newest.key, newest.value, null, null, null,
    newest.in_flight, newest.tat, newest.waiting, newest.awake, newest.wake_at, newest.given_by,
    null, newest.memo, null, null, null, null, null, null, null
from unnest($3::bytea[]) as n (id)
cross join lateral (
    select g.*, g.ctid as place
    from fairlane.gates g
    where g.id = n.id
    order by g.version desc
    limit 1
) newest
union all
select 'h', j.place, null, null, null, null, null, null, null, null, null, h.nth, j.position, j.ready_at, null, null, null,
    null, null, null, null, null, null, null, null, null
from unnest($8::fairlane.asked_heads[]) with ordinality as h (lane, floor, count, nth)
cross join lateral (
    select j.ctid as place, j.position, j.ready_at
    from fairlane.jobs j
    where j.lane = h.lane and j.position >= h.floor and j.state = 1
    order by j.position
    limit h.count
) j

-- name: write
-- What the plan decided: jobs start, and the flows, lanes and gates that it touched are as it left them.
-- Rows are found by their place, from the load in the same transaction. A job's position is checked as well: jobs can be
-- cancelled meanwhile, and a place that was given up can be taken by another row.
-- $1 queue, $2 to $11 its state, $12 flows, $13 lanes, $14 gates, $15 jobs, $16 now, $17 the place of the queue's state,
-- $18 to $21 who gets the jobs (lease, worker, its name, the lease's end), $22 the weights of the flows, $23 flows that stand
-- as they stood and have only been served, $24 what the claim tells of itself, $25 by which jobs the weights were given. What
-- the first holder gets is returned, and how many have started in all.
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
    set weight = ($22::double precision[])[u.ordinality], vtime = u.vtime, tie = u.tie, cost = u.cost, debt = u.debt, open = u.open, shut = u.shut,
        standing = u.standing, gate = u.gate, spilled = u.spilled,
        given_by = ($25::bigint[])[u.ordinality],
        given_at = case when f.given_by = ($25)[u.ordinality] then f.given_at else $16 end,
        -- What never changes about a lane is given when it moves in.
        lane = case when not u.spilled then coalesce(u.lane, f.lane) end,
        lane_priority = case when not u.spilled then coalesce(u.lane_priority, f.lane_priority) end,
        lane_keys = case when not u.spilled then coalesce(u.lane_keys, f.lane_keys) end,
        lane_ready = u.lane_ready, lane_in_flight = u.lane_in_flight, lane_floor = u.lane_floor, lane_rank = u.lane_rank,
        lane_standing = u.lane_standing, lane_gate = u.lane_gate, lane_tag = u.lane_tag,
        writes = (f.writes + 1) % 16,
        version = f.version + case
            when f.tie <> u.tie or f.standing <> u.standing or f.gate is distinct from u.gate
                or f.spilled <> u.spilled or u.lane is not null or f.lane_standing is distinct from u.lane_standing
                or f.lane_gate is distinct from u.lane_gate or f.lane_tag is distinct from u.lane_tag
                or f.writes = 15 then 1
            else 0
        end
    from unnest($12::fairlane.touched_flow[]) with ordinality u
    where f.ctid = u.place
),
served as (
    update fairlane.flows f
    set vtime = u.vtime, tie = u.tie, cost = u.cost, debt = u.debt, lane_ready = u.lane_ready,
        lane_in_flight = u.lane_in_flight, lane_floor = u.lane_floor,
        writes = (f.writes + 1) % 16,
        version = f.version + case when f.tie <> u.tie or f.writes = 15 then 1 else 0 end
    from unnest($23::fairlane.served_flow[]) u
    where f.ctid = u.place
),
lanes as (
    update fairlane.lanes l
    set ready = u.ready, in_flight = u.in_flight, floor = u.floor, rank = u.rank, standing = u.standing, gate = u.gate,
        tag = u.tag, head = u.head,
        writes = (l.writes + 1) % 16,
        version = l.version + case
            when l.rank <> u.rank or l.head <> u.head or l.standing <> u.standing or l.gate is distinct from u.gate
                or l.tag <> u.tag or l.writes = 15 then 1
            else 0
        end
    from unnest($13::fairlane.touched_lane[]) u
    where l.ctid = u.place
),
gates as (
    update fairlane.gates g
    set in_flight = u.in_flight, tat = u.tat, waiting = u.waiting, awake = u.awake, wake_at = u.wake_at,
        memo = u.memo, value = u.value, given_by = u.given_by,
        writes = (g.writes + 1) % 16,
        version = g.version + case when g.wake_at is distinct from u.wake_at or g.writes = 15 then 1 else 0 end
    from unnest($14::fairlane.touched_gate[]) u
    where g.ctid = u.place
),
started as (
    update fairlane.jobs j
    set state = 2, attempt = j.attempt + 1, claimed_at = s.claimed_at, lease = ($18::uuid[])[s.holder],
        worker = ($20::text[])[s.holder], charge = s.charge, shared = s.shared, shared_limits = s.shared_limits,
        outcome = null, progress = null, progress_message = null
    from unnest($15::fairlane.start[]) with ordinality s
    where j.ctid = s.place and j.position is not distinct from s.position and j.state = 1
    returning j.position, j.id, j.task, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at,
        j.cancel_requested, j.suspicion, s.holder, s.ordinality
),
leased as (
    insert into fairlane.leases (id, queue_id, worker_id, worker, renewed_at, expires_at, jobs)
    select ($18)[holder], $1, ($19::uuid[])[holder], ($20)[holder], $16::bigint, ($21::bigint[])[holder],
        array_agg(id order by ordinality)
    from started
    group by holder
),
told as (
    insert into fairlane.tallies (queue_id, at, entries)
    select $1, $16, $24::bytea
    where $24 is not null
)
select position, id, task, priority, keys, payload, attempt, max_attempts, enqueued_at, cancel_requested, suspicion,
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

-- name: settle_and_enter
call fairlane.settle_and_enter($1, $2, $3, $4, $5, $6, null, null, null)

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
    (select q.overrides_end_at from fairlane.queues q where q.id = $1),
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
select 'q' as kind, place, null::bytea as id, null::bytea as kin, null::bytea as gate, null::text as name,
    null::text as keys, null::double precision as f1, null::double precision as f2, null::double precision as f3,
    null::double precision as f4, null::bigint as i1, null::bigint as i2, null::bigint as i3, null::bigint as i4,
    null::bigint as i5, null::bigint as i6,
    null::bytea as lane_gate, null::text as lane_keys, null::double precision as lane_tag, null::integer as lane_priority,
    null::integer as lane_ready, null::integer as lane_in_flight, null::bigint as lane_floor, null::bigint as lane_rank,
    null::integer as lane_standing
from queue
union all
select 'f', null, id, lane, gate, null, key, weight, vtime, cost, debt, tie, open, shut, standing, spilled::integer, given_by,
    lane_gate, lane_keys, lane_tag, lane_priority, lane_ready, lane_in_flight, lane_floor, lane_rank, lane_standing
from flows
union all
select 'l', null, id, flow, gate, null, keys, tag, null, null, null, priority, ready, in_flight, floor, rank, standing,
    null, null, null, null, null, null, head, null, null
from lanes
union all
select 'g', null, id, null, null, "limit", key, value, null, null, null, in_flight, tat, waiting, awake, wake_at, given_by,
    null, memo, null, null, null, null, null, null, null
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
-- Flows without lanes whose tag lies behind the queue's virtual time: forgetting them gives no credit. A flow ahead of it
-- stays; the idle lane that it houses goes, and where all lanes with rows of their own are gone, the next moves in.
-- A weight that a job brought along outlives its jobs for a time: others of its key may be due later.
-- $4 now, $5 for how long
with
stretch as materialized (
    select f.id, f.ctid as place, f.spilled, f.lane,
        f.standing = 0
        and f.vtime + f.debt <= (select s.vtime from fairlane.queue_states s where s.queue_id = $1::integer)
        and (f.given_by = 0 or f.given_at <= fairlane.instant($4::bigint) - $5::bigint) as is_behind,
        case
            when f.spilled then (select true from fairlane.lanes l where l.flow = f.id limit 1) is null
            else f.lane is null or (f.lane_standing = 0 and f.lane_ready <= 0 and f.lane_in_flight <= 0)
        end as is_empty,
        f.lane_ready, f.lane_in_flight
    from fairlane.flows f
    where f.id > $2::bytea and f.queue_id = $1
    order by f.id
    limit $3::integer
),
removed as (
    delete from fairlane.flows f
    using stretch s
    where f.ctid = s.place and s.is_behind and s.is_empty
    returning f.id
),
vacated as (
    update fairlane.flows f
    set spilled = false, lane = null, lane_priority = null, lane_keys = null, lane_ready = null, lane_in_flight = null,
        lane_floor = null, lane_rank = null, lane_standing = null, lane_gate = null, lane_tag = null,
        writes = (f.writes + 1) % 16, version = f.version + 1
    from stretch s
    where f.ctid = s.place and s.is_empty and not s.is_behind and (s.spilled or s.lane is not null)
),
gone as materialized (
    select count(*) as lanes, coalesce(sum(lane_ready), 0) as ready, coalesce(sum(lane_in_flight), 0) as running
    from stretch
    where lane is not null and is_empty
),
counted as (
    update fairlane.queue_states q
    set ready = q.ready - gone.ready, running = q.running - gone.running
    from gone
    where q.queue_id = $1 and gone.lanes > 0
)
select
    (select id from stretch order by id desc limit 1) as reached,
    (select count(*) from stretch) as seen,
    (select count(*) from removed) as removed,
    (select lanes from gone) as lanes

-- name: collect_gates
-- Gates that hold nothing, stop nobody and have all their tokens.
-- A number that a job brought along outlives its jobs for a time: others of its key may be due later.
-- $4 now, $5 for how long
with
stretch as materialized (
    select g.id, g.ctid as place,
        g.in_flight <= 0 and g.waiting <= 0 and g.awake <= 0
        and g.tat <= (select fairlane.instant($4::bigint)) - case when g.value is null then 0 else $5::bigint end as is_idle
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

-- name: select_forced
-- Jobs that are to start whatever their limits say, and can.
select j.lane, j.place, j.position, j.ready_at
from fairlane.forced x
cross join lateral (
    select j.lane, j.ctid as place, j.position, j.ready_at
    from fairlane.jobs j
    where j.id = x.job and j.state = 1
    limit 1
) j
where x.queue_id = $1::integer
order by j.position
limit $2::integer

-- name: forget_forced
-- Those that do not wait any more, for whatever reason.
delete from fairlane.forced x
where x.queue_id = $1::integer
  and not exists (select from fairlane.jobs j where j.id = x.job and j.state < 2)

-- name: put_overrides
insert into fairlane.overrides (queue_id, id, document)
select $1::integer, u.id, u.document
from unnest($2::text[], $3::text[]) as u (id, document)
on conflict (queue_id, id) do update
set document = excluded.document

-- name: delete_overrides
delete from fairlane.overrides
where queue_id = $1::integer and id = any ($2::text[])

-- name: update_amended
update fairlane.queues
set amended = $2, overrides_end_at = $3::bigint
where id = $1::integer

-- name: wake_gates
-- $1 gates, $2 now, $3 and $4 what they hold under the limits that are in force now
update fairlane.gates g
set tat = u.tat, memo = u.memo, wake_at = case when g.waiting > 0 then $2::bigint else g.wake_at end,
    version = g.version + 1
from unnest($1::bytea[], $3::bigint[], $4::text[]) as u (id, tat, memo)
where g.id = any (array[u.id])

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
    where j.id = any (array(select id from found where state = 0)) and j.state = 0
),
forced as (
    insert into fairlane.forced (job, queue_id)
    select id, queue_id
    from found
    where state < 2
    on conflict (job) do nothing
),
woken as (
    select sum(fairlane.nudge(f.queue_id, f.jobs)) as told
    from (select queue_id, count(*) as jobs from found where state < 2 group by queue_id) f
)
select found.id, found.state, woken.told
from found, woken


-- Jobs that run one after the other.

-- name: count_kept_places
-- How many jobs keep a place, by their lanes, as far as the bells of it have been folded: what has changed since the last of
-- them was drained is told by those that are left, in the same snapshot. A place that comes from another partition rings
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
