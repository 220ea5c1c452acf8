-- The tables of the board: asked for what memory does not hold, and written at checkpoints. Under the queue's claim lock, or in
-- a snapshot together with the journal.

-- name: ask_tables
-- Whatever a board asks for, in one round trip; what it does not ask for is an empty array. A lane comes with its flow.
-- $1 queue, $2 flows, $3 lanes, $4 gates, $5 and $6 ready (flow, count), $7 and $8 parked (gate, count), $9 to $11 scan (virtual
-- time, tie-breaker, count), $12 and $13 alarms (after, count), $14 heads, $15 to $17 flows, lanes and gates to leave out of lists,
-- $18 lanes of a scanned flow
--
--   kind        place id kin  gate name   keys f1     f2    f3   f4   i1        i2       i3        i4       i5       i6       i7
--   s scanned         ×       ×           ×    weight vtime cost debt tie       open     shut      standing given_by
--   f a flow          ×       ×           ×    weight vtime cost debt tie       open     shut      standing given_by
--   l a lane          ×  flow ×           ×    tag                    priority  ready    in_flight floor    rank     standing head
--   g a gate          ×            limit  ×    value                  in_flight tat      waiting   awake    wake_at  given_by (memo)
--   h a head    ×                                                     nth       position ready_at
with
scanned as materialized (
    select f.*
    from fairlane.flows f
    where f.queue_id = $1::integer
      and f.standing = 1
      and (f.vtime, f.tie) >= ($9::double precision, $10::bigint)
      and not f.id = any ($15::bytea[])
    order by f.vtime, f.tie
    limit $11::integer
),
lanes as materialized (
    select named.*
    from unnest($3::bytea[]) as n (id)
    cross join lateral (select l.* from fairlane.lanes l where l.queue_id = $1 and l.id = n.id limit 1) named
    union all
    select first.*
    from (
        select * from unnest($5::bytea[], $6::integer[])
        union all
        select id, least($18::integer, open) from scanned
    ) n (flow, count)
    cross join lateral (
        select l.*
        from fairlane.lanes l
        where l.flow = n.flow and l.standing = 1 and not l.id = any ($16::bytea[])
        order by l.rank, l.head
        limit n.count
    ) first
    union all
    select parked.*
    from unnest($7::bytea[], $8::integer[]) as p (gate, count)
    cross join lateral (
        select l.*
        from fairlane.lanes l
        where l.standing = 2 and l.gate = p.gate and not l.id = any ($16)
        order by l.tag, l.head
        limit p.count
    ) parked
)
(
    select 's' as kind, null::tid as place, s.id, null::bytea as kin, s.gate, null::text as name, s.key as keys, s.weight as f1,
        s.vtime as f2, s.cost as f3, s.debt as f4, s.tie as i1, s.open::bigint as i2, s.shut::bigint as i3,
        s.standing::bigint as i4, s.given_by as i5, null::bigint as i6, null::bigint as i7, null::text as memo
    from scanned s
    order by s.vtime, s.tie
)
union all
select 'f', null, f.id, null, f.gate, null, f.key, f.weight, f.vtime, f.cost, f.debt, f.tie, f.open, f.shut, f.standing,
    f.given_by, null, null, null
from (
    select named.*
    from (
        select unnest($2::bytea[]) as id
        union
        select flow from lanes
        except
        select id from scanned
    ) n
    cross join lateral (select f.* from fairlane.flows f where f.queue_id = $1 and f.id = n.id limit 1) named
    union all
    select parked.*
    from unnest($7, $8) as p (gate, count)
    cross join lateral (
        select f.*
        from fairlane.flows f
        where f.standing = 2 and f.gate = p.gate and not f.id = any ($15)
        order by f.vtime, f.tie
        limit p.count
    ) parked
) f
union all
select 'l', null, id, flow, gate, null, keys, tag, null, null, null, priority, ready, in_flight, floor, rank, standing, head, null
from lanes
union all
select 'g', null, g.id, null, null, g."limit", g.key, g.value, null, null, null, g.in_flight, g.tat, g.waiting, g.awake, g.wake_at,
    g.given_by, null, g.memo
from (
    select named.*
    from unnest($4::bytea[]) as n (id)
    cross join lateral (select g.* from fairlane.gates g where g.queue_id = $1 and g.id = n.id limit 1) named
    union all
    (
        select g.*
        from fairlane.gates g
        where g.queue_id = $1 and g.wake_at is not null and g.wake_at > $12::bigint and not g.id = any ($17::bytea[])
        order by g.wake_at
        limit $13::integer
    )
) g
union all
select 'h', j.place, null, null, null, null, null, null, null, null, null, h.nth, j.position, j.ready_at, null, null, null, null,
    null
from unnest($14::fairlane.asked_heads[]) with ordinality as h (lane, floor, count, nth)
{heads}

-- name: select_all_flows
-- The flows of a queue, as far as they are to be read at once. $1 queue, $2 how many, $3 but not these
select id, key, weight, vtime, tie, cost, debt, open, shut, standing, gate, given_by
from fairlane.flows
where queue_id = $1::integer and not id = any ($3::bytea[])
order by id
limit $2::bigint

-- name: select_all_lanes
-- The lanes of a queue, likewise.
select id, flow, priority, keys, ready, in_flight, floor, rank, standing, gate, tag, head
from fairlane.lanes
where queue_id = $1::integer and not id = any ($3::bytea[])
order by id
limit $2::bigint

-- name: select_all_gates
-- The gates of a queue, likewise.
select id, "limit", key, in_flight, tat, waiting, awake, wake_at, memo, value, given_by
from fairlane.gates
where queue_id = $1::integer and not id = any ($3::bytea[])
order by id
limit $2::bigint

-- name: put_flows
-- Flows as they are now.
insert into fairlane.flows as f
select *
from unnest($1::fairlane.flows[])
on conflict (queue_id, id) do update
set weight = excluded.weight, vtime = excluded.vtime, tie = excluded.tie, cost = excluded.cost, debt = excluded.debt,
    open = excluded.open, shut = excluded.shut, standing = excluded.standing, gate = excluded.gate,
    given_at = case when f.given_by = excluded.given_by then f.given_at else excluded.given_at end,
    given_by = excluded.given_by

-- name: put_lanes
-- Lanes as they are now.
insert into fairlane.lanes
select *
from unnest($1::fairlane.lanes[])
on conflict (queue_id, id) do update
set flow = excluded.flow, ready = excluded.ready, in_flight = excluded.in_flight, floor = excluded.floor,
    rank = excluded.rank, standing = excluded.standing, gate = excluded.gate, tag = excluded.tag, head = excluded.head

-- name: put_gates
-- Gates as they are now.
insert into fairlane.gates
select *
from unnest($1::fairlane.gates[])
on conflict (queue_id, id) do update
set in_flight = excluded.in_flight, tat = excluded.tat, waiting = excluded.waiting, awake = excluded.awake,
    wake_at = excluded.wake_at, memo = excluded.memo, value = excluded.value, given_by = excluded.given_by

-- part: newest_state
q.ctid = (select s.ctid from fairlane.queue_states s where s.queue_id = $1::integer order by s.version desc limit 1)

-- name: store_journal
-- The tables hold every change up to this one. $1 queue, $2 the change
update fairlane.queue_states q
set base = q.stored, stored = $2::bigint
where {newest_state}

-- name: delete_deltas
-- Those who know a state since the last checkpoint can still catch up. $1 queue
delete from fairlane.journal j
where j.queue_id = $1::integer
  and j.seq < (select s.base from fairlane.queue_states s where s.queue_id = $1 order by s.version desc limit 1)
  and (j.stats is null or j.seq <= (select f.counted from fairlane.queue_stats f where f.queue_id = $1 limit 1))

-- name: seal_journal
-- The tables are being worked on: whoever remembers anything reads them again. What the journal tells stays.
-- $1 queue, $2 a token
update fairlane.queue_states q
set seq = q.seq + 1, token = $2::uuid, base = q.seq + 1, stored = q.seq + 1,
    version = q.version + q.writes / 15, writes = (q.writes + 1) % 16
where {newest_state}

-- name: replace_state
-- The board was made anew. $1 queue, $2 to $6 its state, $7 ready, $8 running, $9 parked
update fairlane.queue_states q
set vtime = $2::double precision, cursor = $3::double precision, cursor_tie = $4::bigint, tie = $5::bigint,
    cost = $6::double precision, ready = $7::bigint, running = $8::bigint, parked = $9::bigint
where {newest_state}

-- name: delete_flows
-- All flows of a queue: its board is made anew. $1 queue
delete from fairlane.flows
where queue_id = $1::integer

-- name: delete_lanes
-- All lanes of a queue: its board is made anew. $1 queue
delete from fairlane.lanes
where queue_id = $1::integer

-- name: delete_gates
-- All gates of a queue: its board is made anew. $1 queue
delete from fairlane.gates
where queue_id = $1::integer

-- name: collect_idle
-- Idle lanes, flows and gates of the next stretch of each table, removed: an index of what is idle would have to be written
-- again and again. A flow goes once its tag lies behind the queue's virtual time, so that forgetting it gives no credit; a gate
-- once it has all its tokens. A number that a job brought along outlives its jobs for a time: others of its key may be due
-- later.
-- $1 queue, $2 to $4 from where (lanes, flows, gates), $5 how many, $6 now or null, $7 for how long
with
clock as materialized (select fairlane.instant($6::bigint) as now),
lanes as materialized (
    select l.id, l.ready, l.in_flight, l.standing = 0 and l.ready <= 0 and l.in_flight <= 0 as is_idle
    from fairlane.lanes l
    where l.queue_id = $1::integer and l.id > $2::bytea
    order by l.id
    limit $5::integer
),
flows as materialized (
    select f.id,
        f.standing = 0
        and f.vtime + f.debt <= (
            select s.vtime from fairlane.queue_states s where s.queue_id = $1 order by s.version desc limit 1
        )
        and (f.given_by = 0 or f.given_at <= (select now from clock) - $7::bigint)
        -- One value, not `exists`: that may be answered by a walk over all lanes.
        and (
            select l.id from fairlane.lanes l where l.flow = f.id and l.id <> all (array(select id from lanes where is_idle)) limit 1
        ) is null as is_idle
    from fairlane.flows f
    where f.queue_id = $1 and f.id > $3::bytea
    order by f.id
    limit $5
),
gates as materialized (
    select g.id,
        g.in_flight <= 0 and g.waiting <= 0 and g.awake <= 0
        and g.tat <= (select now from clock) - case when g.value is null then 0 else $7 end as is_idle
    from fairlane.gates g
    where g.queue_id = $1 and g.id > $4::bytea
    order by g.id
    limit $5
),
gone_lanes as (delete from fairlane.lanes l where l.queue_id = $1 and l.id = any (array(select id from lanes where is_idle))),
gone_flows as (delete from fairlane.flows f where f.queue_id = $1 and f.id = any (array(select id from flows where is_idle))),
gone_gates as (delete from fairlane.gates g where g.queue_id = $1 and g.id = any (array(select id from gates where is_idle)))
select
    array(select id from flows where is_idle) as flows,
    array(select id from lanes where is_idle) as lanes,
    array(select id from gates where is_idle) as gates,
    array[
        case when (select count(*) from lanes) < $5 then '' else (select id from lanes order by id desc limit 1) end,
        case when (select count(*) from flows) < $5 then '' else (select id from flows order by id desc limit 1) end,
        case when (select count(*) from gates) < $5 then '' else (select id from gates order by id desc limit 1) end
    ]::bytea[] as reached,
    coalesce((select sum(ready) from lanes where is_idle), 0)::bigint as ready,
    coalesce((select sum(in_flight) from lanes where is_idle), 0)::bigint as running

-- name: note_removed
-- Collection has removed lanes: the queue no longer counts what they counted.
-- $1 queue, $2 change, $3 token, $4 and $5 ready and running jobs that idle lanes counted
update fairlane.queue_states q
set seq = $2::bigint, token = $3::uuid, ready = q.ready - $4::bigint, running = q.running - $5::bigint,
    version = q.version + q.writes / 15, writes = (q.writes + 1) % 16
where {newest_state}

-- name: insert_delta
-- Append a change to the journal. $1 queue, $2 change, $3 token, $4 what it says, $5 what it tells
insert into fairlane.journal (queue_id, seq, token, delta, stats)
values ($1::integer, $2::bigint, $3::uuid, $4::bytea, $5::bytea)

-- name: select_journal
-- Every change that the tables do not hold. Those before would remove what has come back since.
select j.seq, j.token, j.delta
from fairlane.journal j
where j.queue_id = $1::integer
  and j.seq > (select s.stored from fairlane.queue_states s where s.queue_id = $1 order by s.version desc limit 1)
order by j.seq

-- name: note_stats
-- What the change that sealed the journal tells. $1 queue, $2 what
insert into fairlane.journal (queue_id, seq, token, delta, stats)
select s.queue_id, s.seq, s.token, '', $2::bytea
from fairlane.queue_states s
where s.queue_id = $1::integer
order by s.version desc
limit 1
