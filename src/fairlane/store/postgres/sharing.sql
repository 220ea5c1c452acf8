-- The statements of limits that queues share by name. Whatever is written here is written under the limit's lock, which
-- is taken after the lock of the queue.

-- name: lock_declarations
-- Of those who declare shared limits, one at a time: what they name must agree.
select pg_advisory_xact_lock(1717660019, 0)

-- name: lock_shared_limits
-- The limits that a queue names, and those of these names: always the lowest number first, so that no two ever deadlock.
with
named as materialized (
    select q.shared_limit as id
    from fairlane.shared_limit_queues q
    where q.queue_id = $1::integer
),
given as materialized (
    select l.id
    from fairlane.shared_limits l
    where l.name = any ($2::text[])
)
select pg_advisory_xact_lock(1717660019, s.id)
from (
    select id from named
    union
    select id from given
    order by id
) s

-- name: lock_shared_limits_of
-- The limits that any of these queues names, in the same order.
select pg_advisory_xact_lock(1717660019, s.id)
from (
    select distinct q.shared_limit as id
    from fairlane.shared_limit_queues q
    where q.queue_id = any ($1::integer[])
    order by id
) s

-- name: select_shared_limits
-- Those that a queue names.
select l.name, l.document
from fairlane.queues q
cross join lateral (select s.shared_limit from fairlane.shared_limit_queues s where s.queue_id = q.id) s
cross join lateral (select l.name, l.document from fairlane.shared_limits l where l.id = s.shared_limit limit 1) l
where q.name = $1

-- name: select_shared_limit
-- A limit, and one of the other queues that name it.
select l.id, l.document, other.name as other
from fairlane.shared_limits l
left join lateral (
    select q.name
    from fairlane.shared_limit_queues s
    cross join lateral (select q.name from fairlane.queues q where q.id = s.queue_id limit 1) q
    where s.shared_limit = l.id and q.name <> $2::text
    order by q.name
    limit 1
) other on true
where l.name = $1::text

-- name: insert_shared_limit
with declared as (
    insert into fairlane.shared_limits (name, document)
    values ($1, $2)
    on conflict (name) do nothing
    returning id
)
insert into fairlane.shared_states (shared_limit)
select id
from declared

-- name: update_shared_limit
update fairlane.shared_limits
set document = $2
where name = $1

-- name: put_sharing
-- A queue names these limits and no others.
with
gone as (
    delete from fairlane.shared_limit_queues s
    where s.queue_id = (select q.id from fairlane.queues q where q.name = $1::text)
      and not s.shared_limit = any (array(select l.id from fairlane.shared_limits l where l.name = any ($2::text[])))
)
insert into fairlane.shared_limit_queues (queue_id, shared_limit)
select q.id, l.id
from fairlane.queues q
cross join lateral (select l.id from fairlane.shared_limits l where l.name = any ($2)) l
where q.name = $1
on conflict (queue_id, shared_limit) do nothing

-- part: newest_gate
cross join lateral (
    select g.*, g.ctid as place
    from fairlane.shared_gates g
    where g.id = n.id
    order by g.version desc
    limit 1
) g

-- name: load_shared
-- Drain the lane events of a queue's shared limits, take its wakeups, and read the gates that these name.
-- $1 queue, $2 shared gates to read in any case, $3 how many releases, $4 now or null
--
--   kind        place number id name  keys     contenders i1        i2   i3        i4    i5      i6      i7
--   l a limit     ×     ×       bound document            now
--   r a release              ×  task  queue               ended     ran  unstarted since failed  neutral latest
--   s shared      ×          ×  limit ×        ×          in_flight tat
--   g a gate of the queue's own that was woken ×
with
limits as materialized (
    select l.id, l.document, s.place, s.releases_from, pg_snapshot_xmin(pg_current_snapshot()) as oldest
    from fairlane.shared_limit_queues q
    cross join lateral (select l.* from fairlane.shared_limits l where l.id = q.shared_limit limit 1) l
    cross join lateral (
        select s.*, s.ctid as place
        from fairlane.shared_states s
        where s.shared_limit = q.shared_limit
        order by s.version desc
        limit 1
    ) s
    where q.queue_id = $1::integer
),
released as (
    delete from fairlane.shared_releases
    where ctid = any (array(
        select r.place
        from limits
        cross join lateral (
            select r.ctid as place
            from fairlane.shared_releases r
            where r.shared_limit = limits.id and r.xid >= least(limits.releases_from, limits.oldest)
            order by r.xid
            limit $3::integer
        ) r
    ))
    returning shared_limit, xid, gate, queue_id, task, ended, ran, unstarted, since, failed, neutral, latest
),
woken_gates as (
    delete from fairlane.gate_wakeups
    where queue_id = $1
    returning gate
)
select 'l' as kind, place, id as number, null::bytea as id,
    case when (select count(*) from released r where r.shared_limit = limits.id) < $3 then oldest
        else least(oldest, (select max(r.xid) from released r where r.shared_limit = limits.id)) end::text as name,
    document as keys, null::text as contenders, fairlane.instant($4::bigint) as i1, null::bigint as i2, null::bigint as i3,
    null::bigint as i4, null::bigint as i5, null::bigint as i6, null::bigint as i7, null::text as memo,
    null::double precision as value
from limits
union all
select 'r', null, null, gate, task, (select q.name from fairlane.queues q where q.id = r.queue_id), null, ended, ran,
    unstarted, since, failed, neutral, latest, null, null
from released r
union all
select 's', g.place, null, g.id, g."limit", g.key, g.contenders, g.in_flight, g.tat, null, null, null, null, null, g.memo,
    g.value
from (select unnest($2::bytea[]) as id union select gate from released) n
{newest_gate}
union all
select 'g', null, null, gate, null, null, null, null, null, null, null, null, null, null, null, null
from woken_gates

-- name: select_shared_gates
select g.place, g.id, g."limit" as name, g.key as keys, g.contenders, g.in_flight as i1, g.tat as i2, g.memo, g.value
from unnest($1::bytea[]) as n (id)
{newest_gate}

-- name: select_shared_gates_of_limit
-- All of them: for a bound that changes.
select g.ctid as place, g.id, g."limit" as name, g.key as keys, g.contenders, g.in_flight as i1, g.tat as i2, g.memo, g.value
from fairlane.shared_gates g
where g.shared_limit = (select l.id from fairlane.shared_limits l where l.name = $1::text)

-- name: write_shared
-- What the plan has changed at shared gates, and the queues that it wakes.
-- $1 places of states, $2 their bounds, $3 gates that changed, $4 new ones, $5 and $6 wakeups (queue, gate or null)
with
states as (
    update fairlane.shared_states s
    set releases_from = u.bound::xid8, version = version + writes / 15, writes = (writes + 1) % 16
    from unnest($1::tid[], $2::text[]) as u (place, bound)
    where s.ctid = u.place
),
gates as (
    update fairlane.shared_gates g
    set in_flight = u.in_flight, tat = u.tat, contenders = u.contenders, memo = u.memo, value = u.value,
        version = g.version + g.writes / 15, writes = (g.writes + 1) % 16
    from unnest($3::fairlane.touched_shared_gate[]) u
    where g.ctid = u.place
),
added as (
    insert into fairlane.shared_gates
    select *
    from unnest($4::fairlane.shared_gates[])
),
others as (
    select q.id, r.gate
    from unnest($5::text[], $6::bytea[]) as r (queue, gate)
    cross join lateral (select q.id from fairlane.queues q where q.name = r.queue limit 1) q
),
wakeups as (
    insert into fairlane.gate_wakeups (queue_id, gate)
    select id, gate
    from others
    where gate is not null
    on conflict (queue_id, gate) do nothing
)
select sum(fairlane.nudge(t.id, 1))
from (select distinct id from others) t
where (select true from fairlane.waiters w where w.queue_id = t.id limit 1)

-- name: lock_running_of_queue
-- Locked, so that none ends before it is counted; in the order of their ids. Under which lease a job runs does not matter:
-- a claim that another worker adopts meanwhile moves to a lease that this statement cannot see.
select j.id, j.priority, j.keys, j.shared
from (
    select distinct held.id
    from fairlane.leases l
    cross join unnest(l.jobs) as held (id)
    where l.queue_id = $1::integer
    order by held.id
) held
cross join lateral (
    select j.id, j.priority, fairlane.keys_of_lane(j.lane_keys, j.keys, j.task)::text as keys, j.shared
    from fairlane.jobs j
    where j.id = held.id and j.queue_id = $1 and j.state = {running}
    limit 1
    for no key update
) j

-- name: mark_shared
-- It holds these gates too. $1 job, $2 gates, $3 their limits
update fairlane.jobs
set shared = shared || $2::bytea[], shared_limits = shared_limits || $3::integer[]
where id = $1

-- name: nudge_sharers
-- Wake up to so many workers of every queue that shares a limit with this one.
select sum(fairlane.nudge(q.queue_id, $2::bigint))
from (
    select distinct other.queue_id
    from fairlane.shared_limit_queues own
    cross join lateral (
        select o.queue_id from fairlane.shared_limit_queues o where o.shared_limit = own.shared_limit
    ) other
    where own.queue_id = $1::integer
) q

-- name: collect_shared_gates
-- Shared gates that hold nothing, stop nobody and have all their tokens.
-- $1 queue, $2 from where, $3 how many, $4 now
with
stretch as materialized (
    select g.id, g.ctid as place,
        g.in_flight <= 0 and g.contenders = '[]' and g.tat <= (select fairlane.instant($4::bigint)) as is_idle
    from fairlane.shared_gates g
    where g.id > $2::bytea
      and g.shared_limit = any (array(
        select q.shared_limit from fairlane.shared_limit_queues q where q.queue_id = $1::integer
      ))
    order by g.id
    limit $3::integer
),
removed as (
    delete from fairlane.shared_gates g
    using stretch s
    where g.ctid = s.place and s.is_idle
    returning g.id
)
select
    (select id from stretch order by id desc limit 1) as reached,
    (select count(*) from stretch) as seen,
    (select count(*) from removed) as removed

-- name: peek_shared_releases
-- What has been released at a queue's shared limits and nobody has folded yet.
select r.gate, (select q.name from fairlane.queues q where q.id = r.queue_id) as queue, r.task, r.ended, r.ran, r.unstarted,
    r.since, r.failed, r.neutral, r.latest
from fairlane.shared_limit_queues s
cross join lateral (
    select r.*
    from fairlane.shared_releases r
    where r.shared_limit = s.shared_limit
    order by r.xid
    limit $2::integer
) r
where s.queue_id = $1::integer

-- name: select_policies
-- Queues with their policies, their overrides and the shared limits that they name. $1 which queues, or null: all of them
select q.name, q.policy, q.version,
    array(select o.document from fairlane.overrides o where o.queue_id = q.id order by o.id) as overrides,
    array(
        select l.document
        from fairlane.shared_limit_queues s
        cross join lateral (select l.name, l.document from fairlane.shared_limits l where l.id = s.shared_limit limit 1) l
        where s.queue_id = q.id
        order by l.name
    ) as shared
from fairlane.queues q
where $1::text[] is null or q.name = any ($1)
order by q.name
