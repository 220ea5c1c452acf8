-- What the database carries out by itself: the functions that statements call, and those for programs in other languages.
-- They are created or replaced with the newest migration, after its tables and types. A function whose parameters change is
-- dropped by that migration.

create or replace function fairlane.wall() returns bigint
language sql volatile
as $$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint $$;
comment on function fairlane.wall() is 'The database''s clock. Tests replace it.';

create or replace function fairlane.stored_ahead() returns bigint
language sql volatile
as $$ select coalesce(pg_sequence_last_value('fairlane.time_ahead'::regclass), 0) $$;

create or replace function fairlane.stored_latest() returns bigint
language sql volatile
as $$ select coalesce(pg_sequence_last_value('fairlane.time_latest'::regclass), 0) $$;

-- Until a worker has noticed that the clock was set back, queue time stands at the latest instant.
create or replace function fairlane.instant(given bigint) returns bigint
language sql volatile
as $$ select coalesce(given, greatest(fairlane.stored_latest(), fairlane.wall() + fairlane.stored_ahead())) $$;
comment on function fairlane.instant(bigint) is 'Queue time: the instant given (tests bring their own clock), else the database''s.';

create or replace function fairlane.ahead(given bigint) returns bigint
language sql volatile
as $$
    select case when given is null then greatest(fairlane.stored_ahead(), fairlane.stored_latest() - fairlane.wall())
        else fairlane.stored_ahead() end
$$;
comment on function fairlane.ahead(bigint) is 'How far that is ahead of the clock: what to add to a time of day.';

-- For workers, in place of `instant` in statements that they send anyway: queue time goes on from here if the clock is set back.
-- They say what it should be, because they may have seen more than is stored: less than `at_least` is a step back. A role that
-- may not set the sequences keeps nothing.
create or replace function fairlane.keep_instant(given bigint, at_least bigint default 0, expected bigint default 0) returns bigint
language plpgsql volatile
as $$
declare
    -- Read before the clock: a later reading of another session must not make ours look like a step back.
    latest bigint := fairlane.stored_latest();
    ahead bigint := fairlane.stored_ahead();
    wall bigint := fairlane.wall();
    now bigint := coalesce(given, wall + ahead);
begin
    if given is null and now < greatest(latest, at_least) then
        if has_sequence_privilege('fairlane.time_ahead', 'update') then
            -- Two sessions may find this at once. They set about the same, and nobody reads less than the latest instant.
            now := greatest(latest, expected);
            perform setval('fairlane.time_ahead', now - wall);
        else
            now := greatest(latest, now);
        end if;
    elsif now - latest >= 100000 and has_sequence_privilege('fairlane.time_latest', 'update') then
        perform setval('fairlane.time_latest', now);
    end if;
    return now;
end $$;

create or replace function fairlane.keys_of_lane(lane_keys jsonb, keys jsonb, task text) returns jsonb
language sql immutable parallel safe
as $$ select coalesce(lane_keys, keys || jsonb_object(array['task', task])) $$;
comment on function fairlane.keys_of_lane is 'What tells a job''s lane apart: all of its keys and its task, unless it says otherwise.';

create or replace function fairlane.channel(worker uuid) returns text
language sql immutable parallel safe
as $$ select 'fairlane_' || replace(worker::text, '-', '') $$;

create or replace function fairlane.nudge(queue integer, most bigint, but_not uuid default null) returns bigint
language plpgsql volatile
as $$
declare
    nudged bigint;
begin
    select count(pg_notify(fairlane.channel(chosen.worker), queue::text))
    into nudged
    from (
        select w.worker
        from fairlane.waiters w
        where w.queue_id = queue
          and w.worker is distinct from but_not
          -- Whoever can share an listener's lock would notify a dead session.
          and not pg_try_advisory_xact_lock_shared(w.alive_lock)
        order by random()
        limit most
    ) chosen;
    return nudged;
end
$$;
comment on function fairlane.nudge is 'Wake up to so many of those who wait for work in a queue, chosen by chance. Returns how many were nudged.';

create or replace function fairlane.request_lease(base uuid, request bigint) returns uuid
language sql immutable parallel safe
as $$ select (left(base::text, 28) || lpad(to_hex(request >> 10), 8, '0'))::uuid $$;

create or replace function fairlane.enter(queue integer, request bigint, own_lease uuid)
returns table (
    lease uuid,
    asked bigint,
    worker_id uuid,
    worker text,
    duration bigint,
    id uuid,
    task text,
    priority smallint,
    keys jsonb,
    payload bytea,
    attempt integer,
    max_attempts integer,
    enqueued_at bigint,
    cancel_requested boolean,
    suspicion smallint,
    claimed_at bigint
)
language plpgsql volatile
as $$
#variable_conflict use_column
declare
    own uuid[];
begin
    -- Conditions, not `perform`: plpgsql evaluates them without setting up a query.
    if not pg_try_advisory_lock(1717660018, queue)
        and pg_advisory_lock_shared(request) is not null
        -- Whoever leads lets everyone in at once. Nobody leads while we look, and take our request back.
        and pg_advisory_lock_shared(1717660018, queue) is not null
    then
        select l.jobs into own from fairlane.leases l where l.id = own_lease;
        if own is not null and pg_advisory_unlock_shared(request) and pg_advisory_unlock_shared(1717660018, queue) then
            null;
        elsif pg_advisory_unlock_shared(1717660018, queue)
            -- We came too late for the one who led. The next one may see us, else it is our turn.
            and pg_advisory_lock(1717660018, queue) is not null
            and pg_advisory_unlock_shared(request)
        then
            select l.jobs into own from fairlane.leases l where l.id = own_lease;
            if own is not null and pg_advisory_unlock(1717660018, queue) then
                null;
            end if;
        end if;
    end if;
    if own is not null then
        return query
        select null::uuid, null::bigint, null::uuid, null::text, null::bigint, j.id, j.task, j.priority, j.keys, j.payload,
            j.attempt, j.max_attempts, j.enqueued_at, j.cancel_requested, j.suspicion, j.claimed_at
        from unnest(own) with ordinality as g (id, nth)
        cross join lateral (select j.* from fairlane.jobs j where j.id = g.id and j.lease = own_lease limit 1) j
        order by g.nth;
    else
        -- We lead, and hold the lock outside of any transaction: not for long, should we fall silent.
        perform set_config('idle_session_timeout', '5s', false);
        return query
        select c.lease, c.asked, c.worker, c.name, c.duration, null::uuid, null::text, null::smallint, null::jsonb,
            null::bytea, null::integer, null::integer, null::bigint, null::boolean, null::smallint, null::bigint
        from pg_locks l
        cross join lateral (
            select fairlane.request_lease(c.base, l.objid::bigint) as lease, l.objid::bigint & 1023 as asked, c.*
            from fairlane.claimers c
            where c.pid = l.pid
            limit 1
        ) c
        where l.locktype = 'advisory'
          and l.classid = queue::oid
          and l.objsubid = 1
          and l.mode = 'ShareLock'
          and l.granted
          and l.database = (select d.oid from pg_database d where d.datname = current_database())
          -- Whoever has been given something and stands behind us in line has not been able to take its request back.
          and not exists (select from fairlane.leases g where g.id = c.lease);
    end if;
end
$$;
comment on function fairlane.enter is 'Wait for the claim lock of a queue. Returns the jobs that whoever held it has claimed for us; else we hold it, as a lock of this session, and what is returned are the requests of those who wait.';

-- Claiming. The types of what it is given stand above, the tables that it writes around it.

create or replace function fairlane.raced() returns void
language plpgsql
as $$ begin raise exception using errcode = 'FL020', message = 'a job was cancelled between the plan and the write'; end $$;

-- How a claim begins: take the queue's claim lock, then read what has happened since. The lock comes first, in a statement of
-- its own, so that the second sees what the last holder wrote. Nothing is removed: `write_claim` does that, once there is
-- a plan.
--
-- Of several queues it is the first whose lock is free. Where all are taken, the first is waited for: whoever asks again
-- and again instead would never sleep, and would be overtaken for ever.
--
--   kind       id    name   keys        f1    f2     f3   i1       i2         i3    i4    i5         i6       i7     i8   token place
--   q queue    snapshot, and bounds ×   vtime cursor cost now      cursor_tie tie   seq   attention  waiters? due    stored ×
--   j change   delta                                      seq                                                            ×
--   r release                                             (lanes, counts, charges: see below)
--   a arrival  lane  given  keys                          priority count      floor since resumed    given_by                    ×
--   o other                             vtime             queue    taken?                    (of several: those it is not)
--
-- The queue's `name` is the digest of its policy and overrides; its `keys` are the bounds for `write_claim`: the oldest open
-- transaction, since when the policy is in force, the last arrival (transaction and floor) and the last release that were read,
-- the snapshot, and whether whoever asks must forget what it knows. `attention`: 1, scheduled jobs are due; 2, an operator wants
-- jobs to start. `due`: when something else opens by itself.
--
-- Releases come as they are stored, many in a row: lanes, counts (ended, ran, unstarted, since, failed, neutral, latest, kept
-- and, where there are any, lost and signal, one after the other, each as long as lanes; no signal without lost), charges (charged, refund).
create or replace function fairlane.open_claim(
    queues integer[],
    locks boolean,
    given bigint,
    at_least bigint,
    expected bigint,
    knowns bigint[],
    known_tokens uuid[],
    format integer,
    most_releases integer,
    most_arrivals integer,
    who uuid
) returns setof fairlane.loaded
language plpgsql volatile
as $$
#variable_conflict use_column
declare
    state fairlane.queue_states;
    digest text;
    applied_at bigint;
    overrides_end_at bigint;
    now bigint;
    from_seq bigint;
    forgets boolean := false;
    tried integer := 1;
    chosen integer := 1;
    queue integer := queues[1];
    known bigint;
    known_token uuid;
begin
    if locks then
        while tried <= cardinality(queues) and not pg_try_advisory_lock(1717660018, queues[tried]) loop
            tried := tried + 1;
        end loop;
        if tried <= cardinality(queues) then
            chosen := tried;
            queue := queues[chosen];
        else
            perform pg_advisory_lock(1717660018, queue);
        end if;
        if cardinality(queues) > 1 then
            return query
            select 'o'::"char", null::bytea, null::text, null::text, s.vtime, null::float8, null::float8, o.id::bigint,
                (o.nth < tried)::integer::bigint, null::bigint, null::bigint, null::bigint, null::bigint, null::bigint,
                null::bigint, null::uuid, null::tid, null::bytea[], null::bigint[], null::float8[]
            from unnest(queues) with ordinality as o (id, nth)
            cross join lateral (
                select s.vtime from fairlane.queue_states s where s.queue_id = o.id order by s.version desc limit 1
            ) s
            where o.nth <> chosen;
        end if;
        -- Held outside of any transaction: not for long, should we fall silent.
        perform set_config('idle_session_timeout', '5s', false), set_config('synchronous_commit', 'off', true);
    end if;
    select q.digest || '/' || q.amended, q.applied_at, q.overrides_end_at
    into digest, applied_at, overrides_end_at
    from fairlane.queues q
    where q.id = queue;
    select s.* into state from fairlane.queue_states s where s.queue_id = queue order by s.version desc limit 1;
    if state.format <> open_claim.format then
        raise exception using errcode = 'FL021', message = state.format::text;
    end if;
    now := case when not locks and who is null then fairlane.instant(given)
        else fairlane.keep_instant(given, at_least, expected) end;
    from_seq := state.seq;
    known := knowns[chosen];
    known_token := known_tokens[chosen];
    if known <> state.seq or known_token is distinct from state.token then
        if known >= state.base and exists (
            select from fairlane.journal j where j.queue_id = queue and j.seq = known and j.token = known_token
        ) then
            from_seq := known;
        else
            -- The tables hold the changes before. Laid over them again, a removal would take away what has come back since.
            from_seq := state.stored;
            forgets := true;
        end if;
    end if;
    -- One snapshot for all that follows: a bound from a later one would pass over events of transactions that were still
    -- open in this one. (A bound above `oldest` comes from another cluster, by way of a dump.)
    return query
    with
    clock as materialized (
        select pg_current_snapshot() as snapshot, pg_snapshot_xmin(pg_current_snapshot()) as oldest
    ),
    release_end as materialized (
        select r.xid
        from fairlane.releases r
        where r.queue_id = queue and r.xid >= least(state.releases_from, (select oldest from clock))
        order by r.xid
        offset most_releases - 1
        limit 1
    ),
    released as materialized (
        select r.*
        from fairlane.releases r
        where r.queue_id = queue and r.xid >= least(state.releases_from, (select oldest from clock))
          and (r.xid <= (select xid from release_end) or not exists (select from release_end))
    ),
    arrival_end as materialized (
        select a.xid, a.floor
        from fairlane.arrivals a
        where a.queue_id = queue and a.xid >= least(state.arrivals_from, (select oldest from clock))
        order by a.xid, a.floor
        offset most_arrivals - 1
        limit 1
    ),
    arrived as materialized (
        select a.*
        from fairlane.arrivals a
        where a.queue_id = queue and a.xid >= least(state.arrivals_from, (select oldest from clock))
          and ((a.xid, a.floor) <= (select e.xid, e.floor from arrival_end e) or not exists (select from arrival_end))
        order by a.xid, a.floor
    )
    select 'q'::"char", null::bytea, digest,
        concat_ws(' ', clock.oldest, applied_at, coalesce((select e.xid::text from arrival_end e), '-'),
            coalesce((select e.floor::text from arrival_end e), '-'), coalesce((select e.xid::text from release_end e), '-'),
            clock.snapshot, forgets::integer),
        state.vtime, state.cursor, state.cost,
        -- Read once more: the closer to the start of the jobs, the better rates hold for those who count them.
        case when now > 0 then fairlane.instant(given) end, state.cursor_tie, state.tie, state.seq,
        (
            exists (
                select from fairlane.jobs j where j.queue_id = queue and j.due_at is not null and j.due_at <= now
            )::integer + 2 * exists (select from fairlane.forced x where x.queue_id = queue)::integer
        )::bigint,
        exists (
            select from fairlane.waiters w where w.queue_id = queue and w.worker is distinct from who
        )::integer::bigint,
        least(
            (select min(j.due_at) from fairlane.jobs j where j.queue_id = queue and j.due_at is not null and j.due_at > now),
            case when overrides_end_at > now then overrides_end_at end
        ),
        state.stored, state.token, null::tid, null::bytea[], null::bigint[], null::double precision[]
    from clock
    union all
    (
        select 'j', j.delta, null, null, null, null, null, j.seq, null, null, null, null, null, null, null, j.token, null,
            null, null, null
        from fairlane.journal j
        where j.queue_id = queue and j.seq > from_seq and j.seq <= state.seq
        order by j.seq
    )
    union all
    select 'r', null, null, null, null, null, null, null, null, null, null, null, null, null, null, null, null,
        r.lanes,
        r.ended::bigint[] || r.ran || r.unstarted::bigint[] || r.since || coalesce(r.failed, n.zeros)::bigint[]
            || coalesce(r.neutral, n.zeros)::bigint[] || coalesce(r.latest, n.zeros::bigint[])
            || coalesce(r.kept, n.zeros)::bigint[]
            || coalesce(r.lost, case when r.signal is not null then n.zeros else '{}' end)::bigint[] || coalesce(r.signal, '{}'),
        r.charged || r.refund
    from released r
    cross join lateral (select array_fill(0, array[cardinality(r.lanes)]) as zeros) n
    union all
    select 'a', a.lane, a.given, a.keys::text, null, null, null, a.priority::bigint, a.count::bigint, a.floor, a.since,
        a.resumed::bigint, a.given_by, null, null, null, a.place, null, null, null
    from arrived a;
end
$$;

-- What the plan decided: jobs start, one row is appended to the journal, and what was folded is removed. With `ends`, the
-- lock that a session holds goes with this transaction. Jobs are found by their place; their position is checked as well: they
-- can be cancelled meanwhile, and a place that was given up can be taken by another row. Returned is what the first holder
-- gets; where nothing started, when the next lease ends comes as `enqueued_at`.
create or replace function fairlane.write_claim(
    queue integer,
    ends boolean,
    unflushed boolean,
    now bigint,
    state double precision[],
    ties bigint[],
    totals bigint[],
    oldest xid8,
    snapshot pg_snapshot,
    arrivals_to xid8,
    arrivals_floor bigint,
    releases_to xid8,
    changed_to bigint,
    changed_token uuid,
    changed bytea,
    starts fairlane.start[],
    holders fairlane.holder[],
    backlogs fairlane.gates[],
    claim_stats bytea,
    waiter uuid,
    alive_lock bigint,
    nudges bigint
) returns table (
    "position" bigint,
    id uuid,
    task text,
    priority smallint,
    keys jsonb,
    payload bytea,
    attempt integer,
    max_attempts integer,
    enqueued_at bigint,
    cancel_requested boolean,
    suspicion smallint
)
language plpgsql volatile
as $$
#variable_conflict use_column
begin
    if ends then
        perform pg_advisory_xact_lock(1717660018, queue), pg_advisory_unlock(1717660018, queue),
            set_config('idle_session_timeout', '0', false);
    end if;
    if unflushed then
        perform set_config('synchronous_commit', 'off', true);
    end if;
    -- Registered or withdrawn as a waiter; a null worker changes nothing.
    if waiter is not null then
        if alive_lock is null then
            delete from fairlane.waiters w where w.queue_id = queue and w.worker = waiter;
        else
            insert into fairlane.waiters (queue_id, worker, alive_lock)
            values (queue, waiter, write_claim.alive_lock)
            on conflict (queue_id, worker) do update set alive_lock = excluded.alive_lock;
        end if;
    end if;
    if nudges > 0 then
        perform fairlane.nudge(queue, nudges, waiter);
    end if;
    if changed is null then
        return query
        select null::bigint, null::uuid, null::text, null::smallint, null::jsonb, null::bytea, null::integer, null::integer,
            min(l.expires_at), null::boolean, null::smallint
        from fairlane.leases l
        where l.expires_at > now;
        return;
    end if;
    return query
    with
    queue_state as (
        update fairlane.queue_states q
        set vtime = state[1], cursor = state[2], cost = state[3], cursor_tie = ties[1], tie = ties[2],
            ready = q.ready + totals[1], running = q.running + totals[2], parked = q.parked + totals[3],
            arrivals_from = case when arrivals_to is null then oldest else least(oldest, arrivals_to) end,
            releases_from = case when releases_to is null then oldest else least(oldest, releases_to) end,
            seq = changed_to, token = changed_token,
            version = q.version + q.writes / 15, writes = (q.writes + 1) % 16
        where q.ctid = (
            select s.ctid from fairlane.queue_states s where s.queue_id = queue order by s.version desc limit 1
        )
    ),
    noted as (
        insert into fairlane.journal (queue_id, seq, token, delta, stats)
        values (queue, changed_to, changed_token, changed, claim_stats)
    ),
    released as (
        delete from fairlane.releases r
        where r.queue_id = queue
          and r.xid >= (
            select least(s.releases_from, oldest)
            from fairlane.queue_states s
            where s.queue_id = queue
            order by s.version desc
            limit 1
          )
          and (releases_to is null or r.xid <= releases_to)
          and pg_visible_in_snapshot(r.xid, snapshot)
    ),
    arrived as (
        delete from fairlane.arrivals a
        where a.queue_id = queue
          and a.xid >= (
            select least(s.arrivals_from, oldest)
            from fairlane.queue_states s
            where s.queue_id = queue
            order by s.version desc
            limit 1
          )
          and (arrivals_to is null or (a.xid, a.floor) <= (arrivals_to, arrivals_floor))
          and pg_visible_in_snapshot(a.xid, snapshot)
    ),
    -- Producers read these: they are written with every claim.
    counted as (
        insert into fairlane.gates
        select b.*
        from unnest(backlogs) b
        on conflict (queue_id, id) do update set in_flight = excluded.in_flight
    ),
    started as (
        update fairlane.jobs j
        set state = {running}, attempt = j.attempt + 1, claimed_at = s.claimed_at, lease = (holders[s.holder]).lease,
            worker = (holders[s.holder]).name, charge = s.charge, shared = s.shared, shared_limits = s.shared_limits,
            outcome = null, progress = null, progress_message = null
        from unnest(starts) with ordinality s
        where j.ctid = s.place and j.position is not distinct from s.position and j.state = {ready}
        returning j.position, j.id, j.task, j.priority, j.keys, j.payload, j.attempt, j.max_attempts, j.enqueued_at,
            j.cancel_requested, j.suspicion, s.holder, s.ordinality
    ),
    leased as (
        insert into fairlane.leases (id, queue_id, worker_id, worker, renewed_at, expires_at, jobs)
        select (holders[b.holder]).lease, queue, (holders[b.holder]).worker, (holders[b.holder]).name, now,
            (holders[b.holder]).expires_at, b.jobs
        from (
            select s.holder, array_agg(s.id order by s.ordinality) as jobs from started s group by s.holder
        ) b
    ),
    checked as materialized (
        select case when (select count(*) from started) < cardinality(starts) then fairlane.raced() end as is_raced
    )
    select s.position, s.id, s.task, s.priority, s.keys, s.payload, s.attempt, s.max_attempts,
        case when cardinality(starts) > 0 then s.enqueued_at
            else (select min(l.expires_at) from fairlane.leases l where l.expires_at > now) end,
        s.cancel_requested, s.suspicion
    from checked
    left join started s on s.holder = 1;
end
$$;

create or replace function fairlane.write_values(keys text[], "values" bytea[]) returns void
language plpgsql volatile
as $$
declare
    each record;
begin
    -- One after the other, by key: of two writers the one that comes second waits at the first key that both write, so
    -- that neither can hold what the other wants next. A statement for all would lock in an order of its own.
    for each in
        select u.key, u.value
        from unnest(keys, "values") as u (key, value)
        order by u.key collate "C"
    loop
        if each.value is null then
            delete from fairlane.stored_values s where s.key = each.key;
        else
            insert into fairlane.stored_values (key, value)
            values (each.key, each.value)
            -- (Not `excluded.value`: that asks for the right to read values, which operators do not have.)
            on conflict (key) do update set value = each.value;
        end if;
    end loop;
end
$$;
comment on function fairlane.write_values is 'Put these values under these keys; null deletes. Two of them never deadlock.';

create or replace function fairlane.announce(jobs uuid[]) returns bigint
language plpgsql volatile
as $$
declare
    nudged bigint;
begin
    select count(pg_notify(fairlane.channel(w.waiter), w.job::text))
    into nudged
    from fairlane.result_waiters w
    where w.job = any (jobs)
      -- Whoever can share an listener's lock would notify a dead session.
      and (
        select not pg_try_advisory_xact_lock_shared(l.alive_lock)
        from fairlane.result_listeners l
        where l.waiter = w.waiter
      );
    return nudged;
end
$$;
comment on function fairlane.announce is 'Tell those who wait for these jobs that they have ended. Returns how many were nudged.';

-- Settling, and asking for work in the same call: what a worker of few slots does all the time.

create or replace function fairlane.settle_done(bigint, fairlane.done[], uuid[]) returns uuid[]
language plpgsql volatile
as $$
declare
    settled record;
begin
    with
    clock as materialized (
        select fairlane.instant($1::bigint) as now
    ),
    ended as (
        update fairlane.jobs j
        set state = {done}, outcome = 'done', finished_at = g.now, result = g.result, error = null
        from (
            select u.*, clock.now
            from clock
            cross join unnest($2::fairlane.done[]) u
        ) g
        where j.id = any (array[g.id]) and j.lease = g.lease and j.state = {running}
        returning j.id, j.queue_id, j.lane, j.task, j.shared, j.shared_limits, j.charge, j.claimed_at, g.ran, g.now
    ),
    freed as (
        insert into fairlane.releases (queue_id, lanes, ended, ran, charged, unstarted, refund, since, latest)
        select queue_id, array_agg(lane), array_agg(ended), array_agg(ran), array_agg(charged),
            array_fill(0, array[count(*)::integer]), array_fill(0::double precision, array[count(*)::integer]),
            array_fill(0::bigint, array[count(*)::integer]), array_agg(latest)
        from (
            select queue_id, lane, count(*)::integer as ended, sum(ran)::bigint as ran, sum(charge) as charged,
                max(claimed_at) as latest
            from ended
            group by queue_id, lane
        ) by_lane
        group by queue_id
        returning queue_id
    ),
    -- From the jobs' rows alone: after a wait for one of them, another table would be read as it was before.
    passed as materialized (
        select s.shared_limit, s.gate, e.queue_id, e.task, count(*)::integer as ended, sum(e.ran)::bigint as ran,
            max(e.claimed_at) as latest
        from ended e
        cross join unnest(e.shared_limits, e.shared) as s (shared_limit, gate)
        group by s.shared_limit, s.gate, e.queue_id, e.task
    ),
    freed_shared as (
        insert into fairlane.shared_releases (shared_limit, gate, queue_id, task, ended, ran, unstarted, since, failed, neutral,
            latest)
        select shared_limit, gate, queue_id, task, ended, ran, 0, 0, 0, 0, latest
        from passed
    ),
    filed as (
        insert into fairlane.finished (is_dead, at, jobs)
        select false, now, array_agg(id)
        from ended
        group by now
    ),
    dropped as (
        delete from fairlane.leases
        where id = any (array(select l.id from fairlane.leases l where l.id = any ($3::uuid[]) for update skip locked))
    ),
    forgotten as (
        delete from fairlane.cancellations
        where lease = any ($3::uuid[])
    ),
    -- Where jobs wait for slots, one waiter is told, although the settling worker claims for its own slots as a rule.
    woken as (
        select sum(fairlane.nudge(f.queue_id, 1)) as nudged
        from (
            select queue_id
            from freed
            union
            select q.queue_id
            from passed p
            cross join lateral (
                select q.queue_id from fairlane.shared_limit_queues q where q.shared_limit = p.shared_limit limit 1000
            ) q
        ) f
        where (select true from fairlane.waiters w where w.queue_id = f.queue_id limit 1)
          and (
            select s.ready > 0
            from fairlane.queue_states s
            where s.queue_id = f.queue_id
            order by s.version desc
            limit 1
          )
    )
    select
        case when (select count(*) from ended) = cardinality($2) then '{}'
            else array(select u.id from unnest($2) u except select id from ended) end as lost,
        woken.nudged,
        -- (The condition is for the planner, which may not walk an index without one.)
        case when exists (select from fairlane.result_listeners l where l.waiter >= '00000000-0000-0000-0000-000000000000')
            then fairlane.announce(array(select id from ended)) end as announced
    into settled
    from woken;
    return settled.lost;
end
$$;
comment on function fairlane.settle_done is 'End claims whose jobs are all done. Given: the time or null, settlements, leases that hold nothing more. Returns the jobs whose claim was lost.';

create or replace procedure fairlane.settle_and_enter(
    given_time bigint,
    settlements fairlane.done[],
    emptied uuid[],
    queue integer,
    request bigint,
    own_lease uuid,
    inout lost uuid[],
    inout requests fairlane.request[],
    inout grants fairlane.granted[]
)
language plpgsql
as $$
begin
    lost := fairlane.settle_done(given_time, settlements, emptied);
    -- Whatever becomes of the claim, this is settled; and whoever leads while we wait sees what it has freed.
    commit;
    select
        array_agg(row(e.lease, e.asked, e.worker_id, e.worker, e.duration)::fairlane.request)
            filter (where e.lease is not null),
        array_agg(row(e.id, e.task, e.priority, e.keys, e.payload, e.attempt, e.max_attempts, e.enqueued_at,
            e.cancel_requested, e.suspicion, e.claimed_at)::fairlane.granted) filter (where e.id is not null)
    into requests, grants
    from fairlane.enter(queue, request, own_lease) e;
end
$$;
comment on procedure fairlane.settle_and_enter is 'Settle jobs that are done, durably; then enter the claim lock of a queue. What `enter` returns comes as requests, or as grants.';

-- Producers in any language: `fairlane.enqueue`, `fairlane.cancel` and `fairlane.job_status`. They stamp jobs as Python's
-- producers do, by the policy in force: the same keys, the same hashes, the same refusals in the same words. What both
-- must agree on is written down in `tests/transactions/vectors.json`, which both are tested against.

-- The first 16 bytes of SHA-256 over a form that every language can build; see `policy/keys.py`.
create or replace function fairlane.identity(domain text, parts text[]) returns bytea
language sql immutable parallel safe
as $$
    select substring(sha256(convert_to(domain || E'\n', 'UTF8') || coalesce(string_agg(
        case when p.part is null then convert_to('~', 'UTF8')
            else convert_to(octet_length(convert_to(p.part, 'UTF8')) || ':' || p.part || ',', 'UTF8') end,
        ''::bytea order by p.place), ''::bytea)) from 1 for 16)
    from unnest(parts) with ordinality as p (part, place)
$$;
comment on function fairlane.identity is 'The identity of a lane, a gate, a unique key: a hash in a domain of its own.';

create or replace function fairlane.lane_id(queue text, priority integer, keys jsonb) returns bytea
language sql immutable parallel safe
as $$
    select fairlane.identity('fairlane/lane/1', array[queue, priority::text] || array(
        select p.part
        from jsonb_each_text(keys) as k (name, value)
        cross join lateral (values (1, k.name), (2, k.value)) as p (place, part)
        order by k.name collate "C", p.place
    ))
$$;

-- Lamping and Veach's jump consistent hash of the first 8 bytes of an identity; see `policy/partitions.py`.
create or replace function fairlane.partition_of("values" text[], width integer) returns integer
language plpgsql immutable parallel safe
as $$
declare
    number numeric := 0;
    digest bytea := fairlane.identity('fairlane/partition/1', "values");
    chosen bigint := 0;
    jump bigint := 0;
begin
    for place in 0 .. 7 loop
        number := number * 256 + get_byte(digest, place);
    end loop;
    while jump < width loop
        chosen := jump;
        number := mod(number * 2862933555777941757 + 1, 18446744073709551616);
        jump := trunc((chosen + 1) * (2147483648.0::float8 / (div(number, 8589934592) + 1)::float8));
    end loop;
    return chosen;
end $$;

create or replace function fairlane.refuse(code text, words text, variadic arguments text[] default '{}') returns void
language plpgsql
as $$ begin raise exception using errcode = code, message = format(words, variadic arguments); end $$;
comment on function fairlane.refuse is 'Raises an error of class FL. The codes: docs/how-to/enqueue-from-any-language.md.';

create or replace function fairlane.canonical_key(name text, value json, whose text default '') returns text
language plpgsql immutable parallel safe
as $$
declare
    said text := btrim(value::text);
    size integer;
begin
    case json_typeof(value)
        when 'null' then
            return null;
        when 'boolean' then
            perform fairlane.refuse('FL002', '%skey ''%s'': %s is a bool; give a str or an int, such as ''%s''',
                whose, name, initcap(said), said);
        when 'number' then
            if said !~ '^-?[0-9]+$' then
                perform fairlane.refuse('FL002',
                    '%skey ''%s'': %s is a float, which has no one canonical form; give a str or an int',
                    whose, name, said);
            end if;
            said := said::numeric::text;
        when 'string' then
            said := value #>> '{}';
        else
            perform fairlane.refuse('FL002',
                '%skey ''%s'': a %s cannot be a key; give a str, an int, a UUID or None',
                whose, name, case json_typeof(value) when 'array' then 'list' else 'dict' end);
    end case;
    size := octet_length(convert_to(said, 'UTF8'));
    if size > 512 then
        perform fairlane.refuse('FL002', '%skey ''%s'': %s bytes is more than 512; hash the value, or use a shorter one',
            whose, name, size::text);
    end if;
    return said;
end $$;
comment on function fairlane.canonical_key is 'The one form of a key''s value: 42 and "42" are the same key.';

-- A number as `%g` writes it, which names the window of a rate.
create or replace function fairlane.short_number(number double precision) returns text
language sql immutable parallel safe
as $$
    select case
        when number = 0 then '0'
        when r.power between -4 and 5 then trim_scale(r.value)::text
        else trim_scale(round(r.value / (10::numeric ^ r.power), 5))::text || 'e'
            || case when r.power < 0 then '-' else '+' end || lpad(abs(r.power)::text, 2, '0')
    end
    from (
        -- Rounded first: 999999.5 has one more digit then.
        select g.value, floor(log(nullif(g.value, 0)))::integer as power
        from (
            select round(number::numeric, 5 - coalesce(floor(log(nullif(number::numeric, 0)))::integer, 0)) as value
        ) g
    ) r
$$;

-- The limits of a policy that a producer has to know of, with the names that their state goes by.
create or replace function fairlane.limits_of(policy jsonb)
returns table (name text, document jsonb, is_brought boolean)
language sql immutable parallel safe
as $$
    select
        case when row_number() over same = 1 then l.identity else l.identity || '#' || row_number() over same end,
        l.document,
        l.document -> 'max' = '{"from": "job"}' or l.document -> 'limit' = '{"from": "job"}'
    from (
        select u.place, u.document,
            case u.document ->> 'kind'
                when 'rate' then 'rate/' || fairlane.short_number((u.document ->> 'per')::float8 / 1000000) || 's'
                when 'rolling_rate' then 'rolling/' || fairlane.short_number((u.document ->> 'per')::float8 / 1000000) || 's'
                else u.document ->> 'kind'
            end || ':' || array_to_string(array(select jsonb_array_elements_text(u.document -> 'by')), ',') as identity
        from jsonb_array_elements(policy -> 'limits') with ordinality as u (document, place)
        where not u.document ? 'name'
    ) l
    window same as (partition by l.identity order by l.place)
$$;

-- A fresh id (UUID version 7): 48 bits of milliseconds, then chance.
create or replace function fairlane.new_job_id(now bigint) returns uuid
language sql volatile parallel safe
as $$
    select (lpad(to_hex(now / 1000), 12, '0') || '7' || substring(chance from 14 for 3) || substring(chance from 17))::uuid
    from (select replace(gen_random_uuid()::text, '-', '') as chance) c
$$;

-- Producers and operators in Python send the bodies of the next two as statements, which are planned once a session.

-- Store one job, at half the price of several: nothing to take apart and nothing to add up.
-- $1 now or null, $2 whether in the caller's transaction, then the columns of `fairlane.new_job`
create or replace function fairlane.store_job(bigint, boolean, uuid, integer, text, smallint, bytea, text, text, bytea, integer,
    bigint, bigint, bytea, text, text)
returns bigint
language sql volatile
as $$
    with
    clock as materialized (
        select fairlane.instant($1::bigint) as now, fairlane.ahead($1) as ahead, nextval('fairlane.positions') as position
    ),
    stored as (
        insert into fairlane.jobs (id, queue_id, task, priority, lane, lane_keys, keys, payload, max_attempts, position,
            enqueued_at, ready_at, state, due_at, on_dead, given, given_by, context)
        select $3::uuid, $4::integer, $5::text, $6::smallint, $7::bytea, $8::text::jsonb, $9::text::jsonb, $10::bytea, $11::integer,
            position, now, now,
            case when coalesce($13::bigint + ahead, now + $12::bigint) > now then {scheduled} else {ready} end,
            case when coalesce($13 + ahead, now + $12) > now then coalesce($13 + ahead, now + $12) end,
            $14::bytea, $15::text, case when $15 is not null then position end, $16::text
        from clock
        returning position, ready_at, state, given_by, ctid as place, fairlane.keys_of_lane(lane_keys, keys, task) as keys
    ),
    appended as (
        -- One that is due later is announced for its numbers alone: they hold from now on.
        insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, given, given_by, place)
        select $4, $7, $6, keys, state, position, ready_at, $15, given_by,
            case when state = {ready} then place end
        from stored
        where state = {ready} or given_by is not null
    )
    select case
        when $2::boolean and (
            current_setting('transaction_isolation') <> 'read committed' or fairlane.nudge($4, 1) = 0
        ) then length(pg_notify('fairlane', $4::text)::text)
        when $2 then 0
        when exists (select from fairlane.waiters w where w.queue_id = $4) then fairlane.nudge($4, 1)
        else 0
    end
    from stored
$$;

-- Whatever waits is cancelled here and now; what runs is asked to stop, and its worker is told.
-- $1 job, $2 now or null, $3 whether what runs is left alone, $4 the reason
create or replace function fairlane.cancel_job(uuid, bigint, boolean, text)
returns table (was smallint, state integer, nudged text, announced bigint, woken bigint)
language sql volatile
as $$
    with
    job as materialized (
        select j.*, fairlane.instant($2::bigint) as now
        from fairlane.jobs j
        where j.id = $1::uuid
        for update
    ),
    ended as (
        update fairlane.jobs j
        set state = {cancelled}, outcome = 'cancelled', cancel_requested = true, finished_at = job.now, due_at = null,
            claimed_at = null, worker = null, error = $4::text, keeps_place = false
        from job
        where j.id = any (array[job.id]) and job.state < {running}
        returning j.id
    ),
    appended as (
        insert into fairlane.arrivals (queue_id, lane, priority, keys, count, floor, since, resumed)
        select queue_id, lane, priority, fairlane.keys_of_lane(lane_keys, keys, task), -state, position, ready_at,
            keeps_place::integer
        from job
        where state = {ready} or (state = {scheduled} and keeps_place)
    ),
    filed as (
        insert into fairlane.finished (is_dead, at, jobs)
        select false, now, array[id]
        from job
        where state < {running}
    ),
    asked as (
        update fairlane.jobs j
        set cancel_requested = true
        from job
        where j.id = any (array[job.id]) and job.state = {running} and not $3::boolean
        returning j.id
    ),
    noted as (
        insert into fairlane.cancellations (lease, job)
        select lease, id
        from job
        where state = {running} and not $3
        on conflict do nothing
    )
    select
        job.state as was,
        case when job.state < {running} then {cancelled} else job.state end as state,
        (select pg_notify(fairlane.channel(l.worker_id), 'cancel')
         from fairlane.leases l
         where l.id = job.lease and job.state = {running} and not $3)::text as nudged,
        case when job.state < {running} then fairlane.announce(array[job.id]) end as announced,
        -- Whoever has waited behind it in a sequence can start now.
        case when job.state = {scheduled} and job.keeps_place
            and exists (select from fairlane.waiters w where w.queue_id = job.queue_id)
            then fairlane.nudge(job.queue_id, 1) end as woken
    from job
$$;

-- The keys that a job must carry: those that its queue declares, else all that its policy looks at.
create or replace function fairlane.needed_keys(policy jsonb) returns text[]
language sql immutable parallel safe
as $$
    select array(
        select distinct n.name collate "C"
        from (
            select d.name
            from jsonb_array_elements_text(policy -> 'keys') as d (name)
            union all
            select f.name #>> '{}'
            from (
                select jsonb_path_query(policy, '$.fair.by[*]')
                union all
                select jsonb_path_query(policy, '$.limits[*].by[*]')
                union all
                select jsonb_path_query(policy, '$.partition.by[*]')
            ) as f (name)
            where jsonb_array_length(policy -> 'keys') = 0
        ) n
        where n.name not in ('priority', 'task')
        order by n.name collate "C"
    )
$$;

-- The keys that a job carries, in canonical form: those given, and those that the policy needs and the arguments name.
create or replace function fairlane.keys_of_job(task text, queue text, policy jsonb, keys json, kwargs json) returns jsonb
language plpgsql stable
as $$
declare
    needed text[] := fairlane.needed_keys(policy);
    name text;
    stamped jsonb;
begin
    for name in select json_object_keys(keys) loop
        -- Whatever the database holds to be letters: signs and blanks are none.
        if name ~ '^$|^[0-9]|[\u0001-\u002f\u003a-\u0040\u005b-\u005e\u0060\u007b-\u007f]' then
            perform fairlane.refuse('FL002',
                'task ''%s'': keys: ''%s'' is not a key''s name; use letters, digits and underscores', task, name);
        elsif name in ('priority', 'task') then
            perform fairlane.refuse('FL002', 'task ''%s'': the key ''%s'' is built in and cannot be given', task, name);
        end if;
    end loop;
    select coalesce(jsonb_object_agg(g.name, fairlane.canonical_key(g.name, g.value)), '{}') into stamped
    from (
        select k.key as name, k.value
        from json_each(keys) k
        union all
        select n.name, kwargs -> n.name
        from unnest(needed) as n (name)
        where keys -> n.name is null and kwargs -> n.name is not null
    ) g;
    foreach name in array needed loop
        if not stamped ? name then
            perform fairlane.refuse('FL002',
                'queue ''%s'' needs the key ''%s'', which task ''%s'' does not carry; give the task a parameter ''%s'', '
                'name it in keys=, or enqueue with using(keys={''%s'': …})', queue, name, task, name, name);
        end if;
    end loop;
    return stamped;
end $$;

-- The partition that a job goes to: where its keys belong, unless its producer says otherwise.
create or replace function fairlane.home_of(task text, queue text, place jsonb, keys jsonb, job uuid, partition integer, partition_key json)
returns text
language plpgsql stable
as $$
declare
    whole text := place ->> 'of';
    width integer := place ->> 'width';
    names text[] := array(select jsonb_array_elements_text(place -> 'by'));
    chosen integer;
begin
    if (place ->> 'index')::integer > 0 then
        perform fairlane.refuse('FL001',
            'task ''%s'': ''%s'' is a partition; enqueue to ''%s'', which finds it by the job''s keys%s', task, queue, whole,
            case when cardinality(names) > 0 then ''
                else format(', or with using(queue=''%s'', partition=%s)', whole, place ->> 'index') end);
    end if;
    if partition is null and partition_key is null then
        chosen := fairlane.partition_of(case when cardinality(names) = 0 then array[job::text]
            else array(select keys ->> n.name from unnest(names) with ordinality as n (name, at) order by n.at) end, width);
    elsif cardinality(names) > 0 then
        perform fairlane.refuse('FL001',
            'task ''%s'': queue ''%s'' is partitioned by %s, whose limits do not count a job that is elsewhere; '
            'leave partition= and partition_key= out, or declare the queue without partition_by',
            task, whole, array_to_string(names, ', '));
    elsif json_typeof(partition_key) = 'null' then
        chosen := 0;
    elsif partition_key is not null then
        chosen := fairlane.partition_of(array(
            select fairlane.canonical_key('partition_key', p.value)
            from json_array_elements(case json_typeof(partition_key) when 'array' then partition_key
                else json_build_array(partition_key) end) with ordinality as p (value, at)
            order by p.at
        ), width);
    elsif partition >= width then
        perform fairlane.refuse('FL001', 'task ''%s'': queue ''%s'' has partitions 0 to %s, not partition=%s; give one of these',
            task, whole, (width - 1)::text, partition::text);
    else
        chosen := partition;
    end if;
    return case when chosen = 0 then whole else whole || '__p' || chosen end;
end $$;

-- The numbers that a policy takes from its jobs. What gives them is a function in a Python program: here they are given.
create or replace function fairlane.brought(queue text, policy jsonb, numbers json) returns text
language plpgsql stable
as $$
declare
    each record;
    given jsonb := '{}';
    number text;
begin
    for each in
        select l.name, l.document ->> 'kind' as kind from fairlane.limits_of(policy) l where l.is_brought
        union all
        select 'weight', 'weight' where policy #> '{fair,weight}' = '{"from": "job"}'
    loop
        number := numbers ->> each.name;
        if number is null then
            perform fairlane.refuse('FL001',
                'queue ''%s'': the policy in force takes ''%s'' from its jobs, and nothing here says how; give it: '
                'numbers => ''{"%s": …}''', queue, each.name, each.name);
        elsif json_typeof(numbers -> each.name) <> 'number'
            or (each.kind = 'weight' and number::numeric not between 0.000001 and 1000000)
            or (each.kind = 'concurrency' and (number !~ '^[0-9]+$' or number::numeric > 1000000000))
            or (each.kind = 'rolling_rate' and number !~ '^[0-9]+$')
            or (each.kind like '%rate' and number::numeric <= 0)
        then
            perform fairlane.refuse('FL001', 'queue ''%s'': %s=%s is not a number that it can have', queue, each.name, number);
        end if;
        given := given || jsonb_build_object(each.name, number::numeric);
    end loop;
    if exists (select from json_object_keys(numbers) as n (name) where not given ? n.name) then
        perform fairlane.refuse('FL001', 'queue ''%s'' takes no number ''%s'' from its jobs; leave it out', queue,
            (select n.name from json_object_keys(numbers) as n (name) where not given ? n.name limit 1));
    end if;
    return case when given = '{}' then null else given::text end;
end $$;

-- Refuses a job for which there is no room: as many wait as a backlog of its keys holds.
create or replace function fairlane.check_backlogs(queue text, queue_id integer, policy jsonb, priority integer, keys jsonb, now bigint)
returns void
language plpgsql stable
as $$
declare
    each record;
    most numeric;
    waiting bigint;
begin
    if exists (select from fairlane.overrides o
               where o.queue_id = check_backlogs.queue_id and o.document::jsonb ->> 'kind' = 'suspend'
                 and coalesce((o.document::jsonb ->> 'expires_at')::bigint > now, true)) then
        return;
    end if;
    for each in
        select l.name, (l.document ->> 'max')::numeric as most, b.names, v.key
        from fairlane.limits_of(policy) l
        cross join lateral (select array(select jsonb_array_elements_text(l.document -> 'by')) as names) b
        cross join lateral (select array(
            select case n.name when 'priority' then check_backlogs.priority::text else check_backlogs.keys ->> n.name end
            from unnest(b.names) with ordinality as n (name, at) order by n.at
        ) as key) v
        where l.document ->> 'kind' = 'backlog' and l.document ->> 'when_full' = 'reject'
    loop
        select (o.document::jsonb ->> 'value')::numeric into most
        from fairlane.overrides o
        where o.queue_id = check_backlogs.queue_id and o.document::jsonb ->> 'kind' = 'limit'
          and o.document::jsonb ->> 'limit' = each.name
          and coalesce((o.document::jsonb ->> 'expires_at')::bigint > now, true)
          and o.document::jsonb -> 'scope' = (
            select coalesce(jsonb_agg(jsonb_build_array(n.name, n.value) order by n.name collate "C"), '[]')
            from unnest(each.names, each.key) as n (name, value)
          );
        most := coalesce(most, each.most);
        -- What claims have folded, and the lane events that they have not: in one snapshot, so that they add up.
        select greatest(0, coalesce((
            select g.in_flight
            from fairlane.gates g
            where g.queue_id = check_backlogs.queue_id
              and g.id = fairlane.identity('fairlane/gate/1', array[queue, each.name] || each.key)
        ), 0) + coalesce((
            select sum(a.count)
            from fairlane.arrivals a
            where a.queue_id = check_backlogs.queue_id
              and a.xid >= (
                select least(s.arrivals_from, pg_snapshot_xmin(pg_current_snapshot()))
                from fairlane.queue_states s
                where s.queue_id = check_backlogs.queue_id
                order by s.version desc
                limit 1
              )
              and array(
                select case n.name when 'priority' then a.priority::text else a.keys ->> n.name end
                from unnest(each.names) with ordinality as n (name, at) order by n.at
              ) = each.key
        ), 0)) into waiting;
        if waiting >= most then
            perform fairlane.refuse('FL007',
                'queue ''%s''%s: %s jobs wait, and its backlog holds %s; nothing of this enqueue was stored. '
                'Wait for room (`await queue.pace(…)`) and enqueue again', queue,
                coalesce((select string_agg(', ' || n.name || '=' || coalesce(n.value, 'None'), '' order by n.at)
                          from unnest(each.names, each.key) with ordinality as n (name, value, at)), ''),
                to_char(waiting, 'FM999,999,999,999'), to_char(most, 'FM999,999,999,999'));
        end if;
    end loop;
end $$;

create or replace function fairlane.enqueue(
    task text,
    args json default '[]',
    kwargs json default '{}',
    queue text default 'default',
    keys json default '{}',
    priority integer default 0,
    max_attempts integer default 5,
    delay interval default null,
    run_at timestamptz default null,
    id uuid default null,
    unique_key json default null,
    unique_until text default 'done',
    unique_window interval default null,
    on_conflict text default 'return',
    same_payload boolean default false,
    context json default null,
    numbers json default '{}',
    partition integer default null,
    partition_key json default null,
    out job uuid,
    out outcome text
)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
    now bigint := fairlane.instant(null);
    what text := format('task ''%s''', task);
    policy jsonb;
    queue_number integer;
    home text := enqueue.queue;
    stamped jsonb;
    lane_keys jsonb;
    ordered jsonb;
    payload bytea;
    given text;
    wait bigint := round(extract(epoch from delay) * 1000000);
    due bigint := round(extract(epoch from run_at) * 1000000);
    key_id bytea;
    call_digest bytea;
    holder record;
begin
    if num_nulls(task, args, kwargs, queue, priority, max_attempts, unique_until, on_conflict, same_payload) > 0 then
        perform fairlane.refuse('FL001', 'task ''%s'': a parameter is null that cannot be; leave out what has a default', task);
    elsif priority not between -100 and 100 then
        perform fairlane.refuse('FL001', '%s: priority=%s is outside of -100 … 100; give one inside', what, priority::text);
    elsif max_attempts not between 1 and 10000 then
        perform fairlane.refuse('FL001', '%s: max_attempts=%s is not a whole number from 1 to 10,000; give one', what, max_attempts::text);
    elsif delay is not null and run_at is not null then
        perform fairlane.refuse('FL001', '%s: give delay= or run_at=, not both', what);
    elsif wait < 0 then
        perform fairlane.refuse('FL001', '%s: delay=''%s'' lies in the past; leave it out to run at once', what, delay::text);
    elsif wait > 3162240000000000 then
        perform fairlane.refuse('FL001', '%s: delay=''%s'' is longer than a hundred years', what, delay::text);
    elsif partition is not null and partition_key is not null then
        perform fairlane.refuse('FL001', '%s: give partition= or partition_key=, not both', what);
    elsif partition < 0 then
        perform fairlane.refuse('FL001', '%s: partition=%s is not the number of a partition, which count from 0', what,
            partition::text);
    elsif json_typeof(args) <> 'array' or json_typeof(kwargs) <> 'object' then
        perform fairlane.refuse('FL001', '%s: args is a JSON array and kwargs a JSON object', what);
    elsif json_typeof(keys) <> 'object' then
        perform fairlane.refuse('FL002', '%s: keys are a mapping of names to values, not a %s', what, json_typeof(keys));
    elsif json_typeof(context) <> 'object' then
        perform fairlane.refuse('FL001', '%s: context=%s is not a mapping of names to values', what, context::text);
    elsif octet_length(context::text) > 262144 then
        perform fairlane.refuse('FL003',
            '%s: its context takes %s bytes, more than the 262,144 allowed; give only what the policy asks for, '
            'or raise App(max_payload=…)', what, to_char(octet_length(context::text), 'FM999,999,999,999'));
    elsif unique_window <= interval '0' then
        perform fairlane.refuse('FL001', 'Unique: window=''%s'' is not a time above 0, such as ''10m''', unique_window::text);
    elsif unique_until not in ('started', 'done') then
        perform fairlane.refuse('FL001', 'Unique: until=''%s'' is not ''started'' or ''done''', unique_until);
    elsif on_conflict not in ('return', 'reject', 'replace') then
        perform fairlane.refuse('FL001', 'Unique: on_conflict=''%s'' is not ''return'', ''reject'' or ''replace''', on_conflict);
    end if;

    select q.id, q.policy::jsonb into queue_number, policy
    from fairlane.queues q
    where q.name = enqueue.queue;
    if policy is null then
        perform fairlane.refuse('FL008', '%s: queue ''%s'' is unknown; declare it with app.queue(…)', what, enqueue.queue);
    end if;
    job := coalesce(enqueue.id, fairlane.new_job_id(now));
    ordered := jsonb_path_query_first(policy, '$.limits[*] ? (@.kind == "sequence")');
    if ordered is not null and priority <> 0 then
        perform fairlane.refuse('FL001',
            '%s: priority=%s has no effect in queue ''%s'', whose jobs run one after the other (Sequence(by=%s)); leave it out',
            what, priority::text, enqueue.queue, case jsonb_array_length(ordered -> 'by')
                when 1 then format('''%s''', ordered #>> '{by,0}')
                else '(' || (select string_agg(format('''%s''', n), ', ') from jsonb_array_elements_text(ordered -> 'by') n) || ')'
            end);
    end if;
    stamped := fairlane.keys_of_job(task, enqueue.queue, policy, enqueue.keys, enqueue.kwargs);
    if policy ? 'partition' then
        home := fairlane.home_of(task, enqueue.queue, policy -> 'partition', stamped, job, enqueue.partition, enqueue.partition_key);
        queue_number := (select q.id from fairlane.queues q where q.name = home);
    elsif partition > 0 then
        perform fairlane.refuse('FL001',
            '%s: queue ''%s'' has no partition=%s, it is not divided; leave partition= out, or divide it: '
            '`fairlane partition %s --to …`', what, enqueue.queue, partition::text, enqueue.queue);
    end if;
    select coalesce(jsonb_object_agg(n.name, case n.name when 'task' then task else stamped ->> n.name end), '{}')
    into lane_keys
    from (
        select jsonb_array_elements_text(ordered -> 'by') as name
        union all
        -- Labels that were given besides tell no lane apart.
        select unnest(fairlane.needed_keys(policy) || array['task']) where ordered is null
    ) n;
    given := fairlane.brought(enqueue.queue, policy, numbers);
    -- Without blanks between its parts, as Python writes it: the same call has the same digest, whoever made it.
    payload := convert_to('[' || regexp_replace(args::text, '("(?:[^"\\]|\\.)*")|\s+', '\1', 'g') || ','
        || regexp_replace(kwargs::text, '("(?:[^"\\]|\\.)*")|\s+', '\1', 'g') || ']', 'UTF8');
    if length(payload) > 262144 then
        perform fairlane.refuse('FL003',
            '%s: its arguments take %s bytes, more than the 262,144 allowed; store the data elsewhere and pass its address, '
            'or raise App(max_payload=…)', what, to_char(length(payload), 'FM999,999,999,999'));
    end if;
    if delay is null and run_at is null then
        perform fairlane.check_backlogs(home, queue_number, policy, priority, lane_keys, now);
    end if;

    outcome := 'enqueued';
    if unique_key is not null and json_typeof(unique_key) <> 'null' then
        key_id := fairlane.identity('fairlane/unique/1', array[task] || array(
            select fairlane.canonical_key('unique', u.value, what || ': ')
            from json_array_elements(case json_typeof(unique_key) when 'array' then unique_key
                else json_build_array(unique_key) end) with ordinality as u (value, at)
            order by u.at
        ));
        call_digest := substring(sha256(payload) from 1 for 16);
        -- Nobody else decides on this key until the transaction has ended.
        insert into fairlane.uniques as u (id) values (key_id) on conflict (id) do update set id = excluded.id;
        -- A window is counted from here, once nobody else decides on the key; so is the job's enqueue.
        now := fairlane.instant(null);
        select u.job, u.digest, u.until, u.expires_at, j.state, j.claimed_at is not null as has_started into holder
        from fairlane.uniques u
        left join fairlane.jobs j on j.id = u.job
        where u.id = key_id;
        if holder.job = job and holder.state is not null then
            perform fairlane.refuse('FL004',
                'there is a job %s already, and nothing of this enqueue was stored; give each job an id of its own, or none',
                job::text);
        end if;
        if (case holder.until when 2 then holder.expires_at > now when 0 then holder.state < {done} and not holder.has_started
            else holder.state < {done} end) then
            if same_payload and holder.digest <> call_digest then
                perform fairlane.refuse('FL006',
                    '%s: job %s holds this unique key with other arguments, and nothing of this enqueue was stored; '
                    'a key names one call: give another call another key', what, holder.job::text);
            elsif on_conflict = 'reject' then
                perform fairlane.refuse('FL005',
                    '%s: job %s holds this unique key, and nothing of this enqueue was stored; '
                    'wait for it to end, or enqueue with on_conflict=''return'' or ''replace''', what, holder.job::text);
            elsif on_conflict = 'return' then
                job := holder.job;
                outcome := 'duplicate';
                return;
            elsif holder.state < {running} and (
                select c.state = {cancelled} from fairlane.cancel_job(holder.job, null, true, format('replaced by job %s', job)) c
            ) then
                outcome := 'replaced';
            end if;
        end if;
        update fairlane.uniques u
        set job = enqueue.job, digest = call_digest,
            until = case when unique_window is not null then 2 when unique_until = 'started' then 0 else 1 end,
            expires_at = now + round(extract(epoch from unique_window) * 1000000)::bigint
        where u.id = key_id;
        insert into fairlane.unique_jobs (job, key, until)
        values (job, key_id, case when unique_window is not null then 2 when unique_until = 'started' then 0 else 1 end)
        on conflict do nothing;
    end if;

    begin
        perform fairlane.store_job(case when key_id is not null then now end, true, job, queue_number, task, priority::smallint,
            fairlane.lane_id(home, priority, lane_keys),
            case when lane_keys = stamped || jsonb_build_object('task', task) then null else lane_keys::text end, stamped::text, payload,
            max_attempts, wait, due, null, given, context::text);
    exception when unique_violation then
        perform fairlane.refuse('FL004',
            'there is a job %s already, and nothing of this enqueue was stored; give each job an id of its own, or none',
            job::text);
    end;
end $$;
comment on function fairlane.enqueue is 'Stores a job as a Python producer would. See docs/how-to/enqueue-from-any-language.md.';

create or replace function fairlane.cancel(job uuid) returns text
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
    found_in integer;
begin
    select c.state into found_in from fairlane.cancel_job(job, null, false, null) c;
    if found_in is null then
        perform fairlane.refuse('FL009', 'there is no job %s; it was never stored, or its retention has passed', job::text);
    end if;
    return (array['scheduled', 'ready', 'running', 'done', 'dead', 'cancelled'])[found_in + 1];
end $$;
comment on function fairlane.cancel is 'Cancels a job that waits, asks one that runs to stop; returns the state it is in now.';

create or replace function fairlane.job_status(job uuid) returns text
language sql stable
security definer
set search_path = pg_catalog, pg_temp
as $$
    select (array['scheduled', 'ready', 'running', 'done', 'dead', 'cancelled'])[j.state + 1]
    from fairlane.jobs j
    where j.id = job
$$;
comment on function fairlane.job_status is 'The state of a job; null where there is none.';

-- They act with the rights of who has migrated. Whom these are for: `grant execute on function …`.
revoke execute on function fairlane.enqueue, fairlane.cancel, fairlane.job_status from public;
