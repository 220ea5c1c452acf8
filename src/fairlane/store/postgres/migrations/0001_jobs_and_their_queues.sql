-- Fairlane on PostgreSQL. Instants are whole microseconds since 1970, states are the numbers of `job.State`, standings
-- those of `snapshot.Standing`. Identities of lanes, flows and gates are the first 16 bytes of a SHA-256.

-- Queue time: the database's clock, except that it never goes back (see store/queue_time.py). Two numbers are stored for it, as
-- sequences: every statement can read them (0.15 µs each), a snapshot that stays open keeps no old versions of them, and a
-- change holds at once, also for transactions that are already open.
create sequence fairlane.time_ahead as bigint minvalue 0 start 0;
comment on sequence fairlane.time_ahead is 'How far queue time is ahead of the clock, in microseconds.';
create sequence fairlane.time_latest as bigint minvalue 0 start 0;
comment on sequence fairlane.time_latest is 'The latest instant, as of a moment ago.';

create function fairlane.wall() returns bigint
language sql volatile
as $$ select (extract(epoch from clock_timestamp()) * 1000000)::bigint $$;
comment on function fairlane.wall() is 'The database''s clock. Tests replace it.';

create function fairlane.stored_ahead() returns bigint
language sql volatile
as $$ select coalesce(pg_sequence_last_value('fairlane.time_ahead'::regclass), 0) $$;

create function fairlane.stored_latest() returns bigint
language sql volatile
as $$ select coalesce(pg_sequence_last_value('fairlane.time_latest'::regclass), 0) $$;

-- Until a worker has noticed that the clock was set back, queue time stands at the latest instant.
create function fairlane.instant(given bigint) returns bigint
language sql volatile
as $$ select coalesce(given, greatest(fairlane.stored_latest(), fairlane.wall() + fairlane.stored_ahead())) $$;
comment on function fairlane.instant(bigint) is 'Queue time: the instant given (tests bring their own clock), else the database''s.';

create function fairlane.ahead(given bigint) returns bigint
language sql volatile
as $$
    select case when given is null then greatest(fairlane.stored_ahead(), fairlane.stored_latest() - fairlane.wall())
        else fairlane.stored_ahead() end
$$;
comment on function fairlane.ahead(bigint) is 'How far that is ahead of the clock: what to add to a time of day.';

-- For workers, in place of `instant` in statements that they send anyway: queue time goes on from here if the clock is set back.
-- They say what it should be, because they may have seen more than is stored: less than `at_least` is a step back. A role that
-- may not set the sequences keeps nothing.
create function fairlane.keep_instant(given bigint, at_least bigint default 0, expected bigint default 0) returns bigint
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


create table fairlane.queues (
    id integer generated always as identity primary key,
    name text not null unique,
    policy text not null,
    digest text not null,
    version integer not null default 1,
    applied_at bigint not null default 0
);


-- Rows that every claim writes: the state of queues, flows, lanes and gates. Only the holder of the queue's claim lock
-- writes them, and it writes them by `ctid`, where its load has found them.
--
-- A snapshot that somebody holds open (a dump, a report) keeps every version of such a row. They are looked up newest
-- first, so that nobody walks over the old ones: `version` rises whenever an indexed column changes, and after sixteen
-- writes at the latest, which are HOT and make no entry in any index. There is no unique index: every new version would
-- have to be compared with all old ones. That an id is stored once, the claim lock sees to.
--
-- Keys are JSON kept as text: no statement looks into them, and every claim would pay for turning `jsonb` into text.

create table fairlane.queue_states (
    queue_id integer not null,
    vtime double precision not null default 0,
    cursor double precision not null default 0,
    cursor_tie bigint not null default 0,
    tie bigint not null default 0,
    cost double precision not null default 0,
    ready bigint not null default 0,
    running bigint not null default 0,
    parked bigint not null default 0,
    arrivals_from xid8 not null default '0',
    releases_from xid8 not null default '0',
    version integer not null default 0,
    writes smallint not null default 0
) with (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on column fairlane.queue_states.ready is 'Ready jobs, running jobs and parked lanes, as far as bells have been folded.';
comment on column fairlane.queue_states.arrivals_from is 'No arrival of an earlier transaction is left or will come: the drain starts here and walks over no dead row.';
create index queue_states_newest on fairlane.queue_states (queue_id, version);

create table fairlane.flows (
    queue_id integer not null,
    id bytea not null,
    key text not null,
    weight double precision not null,
    vtime double precision not null,
    tie bigint not null,
    cost double precision not null,
    debt double precision not null,
    open integer not null,
    shut integer not null,
    standing smallint not null,
    gate bytea,
    version integer not null default 0,
    writes smallint not null default 0,
    spilled boolean not null default false,
    lane bytea,
    lane_priority smallint,
    lane_keys text,
    lane_ready integer,
    lane_in_flight integer,
    lane_floor bigint,
    lane_rank bigint,
    lane_standing smallint,
    lane_gate bytea,
    lane_tag double precision
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.flows.spilled is 'It has had several lanes: all of them have rows in `lanes`, and none is housed here.';
comment on column fairlane.flows.lane is 'Its only lane, which has no row of its own: a claim reads and writes one row for both. Null: it has none, or spilled.';
create index flows_newest on fairlane.flows (id, version);
create index flows_ready on fairlane.flows (queue_id, vtime, tie) where standing = 1;
create index flows_parked on fairlane.flows (gate, vtime, tie) where standing = 2;
create index flows_by_lane on fairlane.flows (lane, version) where lane is not null;
create index flows_by_parked_lane on fairlane.flows (lane_gate, lane_tag) where lane_standing = 2;

-- The lanes of flows that have spilled.

create table fairlane.lanes (
    queue_id integer not null,
    id bytea not null,
    flow bytea not null,
    priority smallint not null,
    keys text not null,
    ready integer not null,
    in_flight integer not null,
    floor bigint not null,
    rank bigint not null,
    standing smallint not null,
    gate bytea,
    tag double precision not null,
    version integer not null default 0,
    writes smallint not null default 0,
    head bigint not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.lanes.head is 'The position of its head, or less: it orders lanes of equal rank.';
create index lanes_newest on fairlane.lanes (id, version);
create index lanes_of_flow on fairlane.lanes (flow);
create index lanes_ready on fairlane.lanes (flow, rank, head, version desc) where standing = 1;
create index lanes_parked on fairlane.lanes (gate, tag, head) where standing = 2;

create table fairlane.gates (
    queue_id integer not null,
    id bytea not null,
    "limit" text not null,
    key text not null,
    in_flight integer not null,
    tat bigint not null,
    waiting integer not null,
    awake integer not null,
    wake_at bigint,
    version integer not null default 0,
    writes smallint not null default 0
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
create index gates_newest on fairlane.gates (id, version);
create index gates_to_wake on fairlane.gates (queue_id, wake_at) where wake_at is not null;


-- One sequence for all lanes: positions only have to rise within each of them.
create sequence fairlane.positions as bigint;

-- A job is updated in place. The indexes name no column that changes from ready to running to done, so those updates
-- are HOT, and pages are filled by half: a claim writes a second version of every row beside the first. There is no foreign key to `queues`: every insert would lock the row that
-- every claim updates.
create table fairlane.jobs (
    id uuid primary key,
    position bigint not null,
    enqueued_at bigint not null,
    ready_at bigint not null,
    queue_id integer not null,
    attempt integer not null default 0,
    max_attempts integer not null,
    priority smallint not null,
    state smallint not null check (state between 0 and 5),
    cancel_requested boolean not null default false,
    suspicion smallint not null default 0,
    lane bytea not null,
    task text not null,
    keys jsonb not null,
    lane_keys jsonb,
    payload bytea not null,
    due_at bigint,
    claimed_at bigint,
    finished_at bigint,
    lease uuid,
    charge double precision,
    worker text,
    outcome text,
    error text,
    result bytea,
    progress double precision,
    progress_message text
) with (fillfactor = 50);
comment on column fairlane.jobs.ready_at is 'When it joined its lane: at its enqueue, or when it came due. Age counts from here.';
comment on column fairlane.jobs.lane_keys is 'The keys that tell lanes apart; null: all of `keys`.';
comment on column fairlane.jobs.due_at is 'Set while the job is scheduled, and only then.';
comment on column fairlane.jobs.suspicion is 'How often its worker was lost while it ran, and others beside it; from 2 on it runs alone.';
comment on column fairlane.jobs.lease is 'The claim that holds it (running) or held it last; a reaped claim leaves none.';
comment on column fairlane.jobs.worker is 'Who holds it (running) or held it last.';

create index jobs_in_lane on fairlane.jobs (lane, position);
create index jobs_due on fairlane.jobs (queue_id, due_at) where due_at is not null;


-- Attempts that did not end their job. The last one lives in the job's own row.
create table fairlane.attempts (
    id bigint generated always as identity,
    job uuid not null,
    lease uuid,
    attempt integer not null,
    claimed_at bigint not null,
    ended_at bigint not null,
    worker text,
    outcome text not null,
    error text,
    primary key (job, id)
);
comment on column fairlane.attempts.lease is 'The claim that was settled so; null where a reaper did it.';


-- What retention walks, oldest first: one row for each settlement that finished jobs. It spares `jobs` an index on
-- `finished_at`, which would make every last update of a job a cold one.
create table fairlane.finished (
    is_dead boolean not null,
    id bigint generated always as identity,
    at bigint not null,
    jobs uuid[] not null,
    primary key (is_dead, id)
);
-- Ids and charges do not shrink. Trying to make them took a sixth of a settlement's time.
alter table fairlane.finished alter column jobs set storage external;


-- One row for each batch of claims; renewed as one.
create table fairlane.leases (
    id uuid primary key,
    queue_id integer not null,
    worker_id uuid not null,
    worker text not null,
    renewed_at bigint not null,
    expires_at bigint not null,
    jobs uuid[] not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
alter table fairlane.leases alter column jobs set storage external;
create index leases_by_end on fairlane.leases (expires_at);

-- Running jobs whose cancellation was asked for, by the lease they run under. Appended, not noted in the lease's row:
-- cancelling locks the job, reaping locks the lease and then its jobs, and the two must not meet crosswise.
create table fairlane.cancellations (
    lease uuid not null,
    job uuid not null,
    primary key (lease, job)
);


-- Bells: facts that anyone may append and that only the holder of the claim lock folds. They carry their transaction,
-- so that the drain can start behind the dead rows of what was drained before.
create table fairlane.arrivals (
    queue_id integer not null,
    xid xid8 not null default pg_current_xact_id(),
    count integer not null,
    floor bigint not null,
    since bigint not null,
    priority smallint not null,
    lane bytea not null,
    keys jsonb not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
create index arrivals_in_order on fairlane.arrivals (queue_id, xid, floor);

-- One row for each settlement and queue; the arrays run in step, one element for each lane.
create table fairlane.releases (
    queue_id integer not null,
    xid xid8 not null default pg_current_xact_id(),
    lanes bytea[] not null,
    ended integer[] not null,
    ran bigint[] not null,
    charged double precision[] not null,
    unstarted integer[] not null,
    refund double precision[] not null,
    since bigint[] not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
alter table fairlane.releases
    alter column lanes set storage external,
    alter column ran set storage external,
    alter column charged set storage external,
    alter column since set storage external;
create index releases_in_order on fairlane.releases (queue_id, xid);


-- What statements are given, one value a row: an array of these costs client and server half of what an array for each
-- column does.
create type fairlane.new_job as (
    id uuid,
    queue_id integer,
    task text,
    priority smallint,
    lane bytea,
    lane_keys jsonb,
    keys jsonb,
    payload bytea,
    max_attempts integer,
    delay bigint,
    run_at bigint
);

create type fairlane.asked_heads as (
    lane bytea,
    floor bigint,
    count integer
);

create type fairlane.start as (
    place tid,
    position bigint,
    charge double precision,
    holder smallint
);

create type fairlane.settlement as (
    id uuid,
    lease uuid,
    state smallint,
    outcome text,
    state_if_cancelled smallint,
    outcome_if_cancelled text,
    ran bigint,
    delay bigint,
    result bytea,
    error text,
    counts_attempt boolean,
    unstarted boolean,
    suspicion smallint,
    is_spent boolean
);

create type fairlane.done as (
    id uuid,
    lease uuid,
    ran bigint,
    result bytea
);

create type fairlane.touched_flow as (
    place tid,
    vtime double precision,
    tie bigint,
    cost double precision,
    debt double precision,
    open integer,
    shut integer,
    standing smallint,
    gate bytea,
    spilled boolean,
    lane bytea,
    lane_priority smallint,
    lane_keys text,
    lane_ready integer,
    lane_in_flight integer,
    lane_floor bigint,
    lane_rank bigint,
    lane_standing smallint,
    lane_gate bytea,
    lane_tag double precision
);
comment on column fairlane.touched_flow.lane is 'Given with its priority and keys when it moves in; later they are null.';

create type fairlane.touched_lane as (
    place tid,
    ready integer,
    in_flight integer,
    floor bigint,
    rank bigint,
    standing smallint,
    gate bytea,
    tag double precision,
    head bigint
);

create type fairlane.touched_gate as (
    place tid,
    in_flight integer,
    tat bigint,
    waiting integer,
    awake integer,
    wake_at bigint
);


-- Workers with free slots, by the queue they would take a job from. Each listens on a channel of its own, in a session
-- that holds the advisory lock `ear` for as long as it lives.
create table fairlane.waiters (
    queue_id integer not null,
    worker uuid not null,
    ear bigint not null,
    primary key (queue_id, worker)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

create function fairlane.channel(worker uuid) returns text
language sql immutable parallel safe
as $$ select 'fairlane_' || replace(worker::text, '-', '') $$;

create function fairlane.nudge(queue integer, most bigint, but_not uuid default null) returns bigint
language plpgsql volatile
as $$
declare
    told bigint;
begin
    select count(pg_notify(fairlane.channel(chosen.worker), queue::text))
    into told
    from (
        select w.worker
        from fairlane.waiters w
        where w.queue_id = queue
          and w.worker is distinct from but_not
          -- Whoever can share an ear's lock would speak to the dead.
          and not pg_try_advisory_xact_lock_shared(w.ear)
        order by random()
        limit most
    ) chosen;
    return told;
end
$$;
comment on function fairlane.nudge is 'Wake up to so many of those who wait for work in a queue, chosen by chance. Returns how many were told.';


-- Claiming together. Where many workers want the queue's claim lock at once, each would hold it for a job or two, one
-- after the other. Instead whoever waits asks in public, and the one that holds the lock claims for all who have asked.
--
-- A request is a shared advisory lock that its session holds while it waits: no row, nothing to clean up after a crash.
-- Its bits say for which queue it is (32), the how-manieth of its session (22), and for how many slots (10). To whom the
-- session belongs is written here. The lease of a request is known to both sides beforehand: a random base, which belongs to
-- the session for good (a leader may read this table a moment before it sees the lock), and the number of the request in
-- the last of its digits.

create unlogged table fairlane.claimers (
    pid integer primary key,
    base uuid not null,
    worker uuid not null,
    name text not null,
    duration bigint not null
) with (fillfactor = 50);
comment on column fairlane.claimers.duration is 'How long its leases last, in microseconds.';

create function fairlane.request_lease(base uuid, request bigint) returns uuid
language sql immutable parallel safe
as $$ select (left(base::text, 28) || lpad(to_hex(request >> 10), 8, '0'))::uuid $$;

create function fairlane.enter(queue integer, request bigint, own_lease uuid)
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
