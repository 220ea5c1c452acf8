-- Fairlane on PostgreSQL. Instants are whole microseconds since 1970, states are the numbers of `job.State`, standings
-- those of `snapshot.Standing`. Identities of lanes, flows and gates are the first 16 bytes of a SHA-256.

-- Queue time: the database's clock, except that it never goes back (see store/boards.py). Two numbers are stored for it, as
-- sequences: every statement can read them (0.15 µs each), a snapshot that stays open keeps no old versions of them, and a
-- change holds at once, also for transactions that are already open.
create sequence fairlane.time_ahead as bigint minvalue 0 start 0;
comment on sequence fairlane.time_ahead is 'How far queue time is ahead of the clock, in microseconds.';
create sequence fairlane.time_latest as bigint minvalue 0 start 0;
comment on sequence fairlane.time_latest is 'The latest instant, as of a moment ago.';

create table fairlane.queues (
    id integer generated always as identity primary key,
    name text not null unique,
    policy text not null,
    digest text not null,
    version integer not null default 1,
    applied_at bigint not null default 0,
    amended text not null default '',
    overrides_end_at bigint
);
comment on column fairlane.queues.amended is 'Another text whenever its overrides change: claimers know them by it.';
comment on column fairlane.queues.overrides_end_at is 'When the first of its overrides ends.';

-- The board of a queue: its flows, lanes and gates. Whoever claims holds it in memory, and each claim appends one row to the
-- journal; the tables of the board are written at checkpoints. Only the holder of the queue's claim lock writes any of it.
--
-- The row that every claim writes is that of `queue_states`. A snapshot that somebody holds open (a dump, a report) keeps every
-- version of it. They are looked up newest first, so that nobody walks over the old ones: `version` rises after sixteen writes,
-- those between are HOT and make no entry in the index.
--
-- Keys are JSON kept as text: no statement looks into them, and every reader would pay for turning `jsonb` into text.
--
-- Numbers that jobs bring along change weights of flows and bounds of gates. `given_by` is the position that the job had at
-- its enqueue: of two numbers for one key, the one with the higher position holds, in whatever order they come.

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
    seq bigint not null default 0,
    token uuid not null default gen_random_uuid(),
    stored bigint not null default 0,
    base bigint not null default 0,
    format smallint not null default 1,
    version integer not null default 0,
    writes smallint not null default 0
) with (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on column fairlane.queue_states.ready is 'Ready jobs, running jobs and parked lanes, as far as lane events have been folded.';
comment on column fairlane.queue_states.arrivals_from is 'No arrival of an earlier transaction is left or will come: the drain starts here and walks over no dead row.';
comment on column fairlane.queue_states.seq is 'The last change of the board, with its token: a board in memory that has both is true.';
comment on column fairlane.queue_states.stored is 'The last change that flows, lanes and gates hold.';
comment on column fairlane.queue_states.format is 'How the journal is written. A program that writes it otherwise does not claim.';
comment on column fairlane.queue_states.base is 'The one that they held before that. The journal has every later change, so that whoever is a little behind can catch up.';
create index queue_states_newest on fairlane.queue_states (queue_id, version);

-- What each change of a board has left of the pieces that it touched (`scheduler.journal.Delta`, MessagePack).
create table fairlane.journal (
    queue_id integer not null,
    seq bigint not null,
    token uuid not null,
    delta bytea not null,
    stats bytea
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
-- It lives for seconds: making it smaller would cost more than keeping it.
alter table fairlane.journal alter column delta set storage external, alter column stats set storage external;
comment on column fairlane.journal.stats is 'What happened (`scheduler.snapshot.ClaimStats`, MessagePack): it is there until it is in the stats. Null: nothing worth telling.';
create index journal_in_order on fairlane.journal (queue_id, seq);

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
    given_by bigint not null,
    given_at bigint not null,
    primary key (queue_id, id)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.flows.given_at is 'When its weight was brought: it is kept for a time although the flow has no jobs.';
create index flows_ready on fairlane.flows (queue_id, vtime, tie) where standing = 1;
create index flows_parked on fairlane.flows (gate, vtime, tie) where standing = 2;

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
    head bigint not null,
    primary key (queue_id, id)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.lanes.head is 'The position of its head, or less: it orders lanes of equal rank.';
create index lanes_of_flow on fairlane.lanes (flow);
create index lanes_ready on fairlane.lanes (flow, rank, head) where standing = 1;
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
    memo text,
    value double precision,
    given_by bigint not null,
    primary key (queue_id, id)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.gates.memo is 'JSON; what it says is known to its limit alone.';
comment on column fairlane.gates.value is 'The bound that the newest job of its key brought along; null: what the policy says.';
create index gates_to_wake on fairlane.gates (queue_id, wake_at) where wake_at is not null;

-- One sequence for all lanes: positions only have to rise within each of them.
create sequence fairlane.positions as bigint;

-- A job is updated in place. The indexes name no column that changes from ready to running to done, so those updates
-- are HOT, and pages are filled by two fifths: a claim and a settlement write further versions of every row beside the
-- first, and a claim that finds jobs by their place alone does not tidy the page up before. There is no foreign key to
-- `queues`: every insert would lock the row that every claim updates.
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
    progress_message text,
    replays integer not null default 0,
    on_dead bytea,
    given text,
    given_by bigint,
    context text,
    shared bytea[],
    shared_limits integer[],
    keeps_place boolean not null default false
) with (fillfactor = 40);
comment on column fairlane.jobs.ready_at is 'When it joined its lane: at its enqueue, or when it came due. Age counts from here.';
comment on column fairlane.jobs.lane_keys is 'What tells lanes apart, if it is not all of `keys` and the task.';
comment on column fairlane.jobs.due_at is 'Set while the job is scheduled, and only then.';
comment on column fairlane.jobs.suspicion is 'How often its worker was lost while it ran, and others beside it; from 2 on it runs alone.';
comment on column fairlane.jobs.lease is 'The claim that holds it (running) or held it last; a reaped claim leaves none.';
comment on column fairlane.jobs.worker is 'Who holds it (running) or held it last.';
comment on column fairlane.jobs.replays is 'How often it was put back after it had ended. `attempt` counts from the last time on.';
comment on column fairlane.jobs.on_dead is 'Effects for its death (`job.OnDead`, MessagePack); null: none. It stays for whoever is replayed and dies again.';
comment on column fairlane.jobs.given is 'Numbers that every lane event appended for it carries.';
comment on column fairlane.jobs.context is 'What its producer passed along besides its arguments.';
comment on column fairlane.jobs.shared is 'The shared gates that it has passed (running) or had passed when it last ran.';
-- A settlement that has waited for the job's row sees its newest version, but every other table as it was before the wait.
-- So the row names all that the release must say, and nothing is looked up.
comment on column fairlane.jobs.shared_limits is 'The numbers of the limits that those gates belong to, in the same order.';
comment on column fairlane.jobs.keeps_place is 'Set while the job is scheduled for another attempt, and only then: in a sequence nothing may start before it.';

create index jobs_in_lane on fairlane.jobs (lane, position);
create index jobs_due on fairlane.jobs (queue_id, due_at) where due_at is not null;
-- For lists. Neither column ever changes, so that a job's updates stay HOT. Ids rise, so that the index is filled at its end.
create index jobs_in_queue on fairlane.jobs (queue_id, id);
-- Who keeps a place, for whoever counts them anew. The flag changes only together with `due_at`, which is indexed as well:
-- from ready to running to done a job's updates stay HOT.
create index jobs_keeping_place on fairlane.jobs (queue_id, lane) where keeps_place;

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
-- Listed newest first; and a job that leaves its end is taken out of the entry that names it. `is_dead` stands here as
-- a number, so that no statement of upkeep, which walks by id, takes this index for its own.
create index finished_by_end on fairlane.finished ((is_dead::integer), at, id);

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

-- Lane events: facts that anyone may append and that only the holder of the claim lock folds. They carry their transaction,
-- so that the drain can start behind the dead rows of what was drained before.
create table fairlane.arrivals (
    queue_id integer not null,
    xid xid8 not null default pg_current_xact_id(),
    count integer not null,
    floor bigint not null,
    since bigint not null,
    priority smallint not null,
    lane bytea not null,
    keys jsonb not null,
    given text,
    given_by bigint,
    resumed integer,
    place tid
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.arrivals.place is 'Where the row of the job is, if it is a single new one: a claim finds it there. Its position is checked, because the place may be another row''s by then.';
comment on column fairlane.arrivals.resumed is 'How many jobs had kept their place until now. Null: none.';
create index arrivals_in_order on fairlane.arrivals (queue_id, xid, floor);

-- One row for each settlement and queue; the arrays run in step, one element for each lane. Where all went well,
-- `failed`, `neutral`, `kept` and `lost` are null.
create table fairlane.releases (
    queue_id integer not null,
    xid xid8 not null default pg_current_xact_id(),
    lanes bytea[] not null,
    ended integer[] not null,
    ran bigint[] not null,
    charged double precision[] not null,
    unstarted integer[] not null,
    refund double precision[] not null,
    since bigint[] not null,
    failed integer[],
    neutral integer[],
    latest bigint[],
    kept integer[],
    lost integer[],
    signal bigint[]
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
alter table fairlane.releases
    alter column lanes set storage external,
    alter column ran set storage external,
    alter column charged set storage external,
    alter column since set storage external,
    alter column latest set storage external;
comment on column fairlane.releases.kept is 'Of the claims that ended, how many have not ended their job. Null: none.';
comment on column fairlane.releases.lost is 'Of the claims that ran, how many were lost, all of a lane or none: nobody knows how long they would have run. Null: none.';
comment on column fairlane.releases.signal is 'What adaptive caps look at, added up for the claims that ended: lag, or run time where there is none. Null: run time.';
create index releases_in_order on fairlane.releases (queue_id, xid);

-- What statements are given, one value a row: an array of these costs client and server half of what an array for each
-- column does.
-- (Keys are text: the connection may be a caller's who has `jsonb` written in another way.)
create type fairlane.new_job as (
    id uuid,
    queue_id integer,
    task text,
    priority smallint,
    lane bytea,
    lane_keys text,
    keys text,
    payload bytea,
    max_attempts integer,
    delay bigint,
    run_at bigint,
    on_dead bytea,
    given text,
    context text
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
    holder smallint,
    shared bytea[],
    shared_limits integer[],
    claimed_at bigint
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
    is_spent boolean,
    verdict smallint,
    is_cut_short boolean
);

create type fairlane.done as (
    id uuid,
    lease uuid,
    ran bigint,
    result bytea
);

-- Workers with free slots, by the queue they would take a job from. Each listens on a channel of its own, in a session
-- that holds the advisory lock `alive_lock` for as long as it lives.
create table fairlane.waiters (
    queue_id integer not null,
    worker uuid not null,
    alive_lock bigint not null,
    primary key (queue_id, worker)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

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

create type fairlane.loaded as (
    kind "char",
    id bytea,
    name text,
    keys text,
    f1 double precision,
    f2 double precision,
    f3 double precision,
    i1 bigint,
    i2 bigint,
    i3 bigint,
    i4 bigint,
    i5 bigint,
    i6 bigint,
    i7 bigint,
    i8 bigint,
    token uuid,
    place tid,
    lanes bytea[],
    counts bigint[],
    charges double precision[]
);

create type fairlane.holder as (
    lease uuid,
    worker uuid,
    name text,
    expires_at bigint
);

-- A small key-value store. Keys are ordered by their bytes, whatever the database's collation says.
create table fairlane.stored_values (
    key text collate "C" primary key check (octet_length(key) between 1 and 512),
    value bytea not null
);

-- Processes that wait for jobs to end. Each listens on a channel of its own, in a session that holds the advisory lock
-- `alive_lock` for as long as it lives. After a crash of the server none of those sessions is left, and no row need be.
--
-- Whoever ends jobs looks here first: few rows that seldom change. Those that come and go with every wait are only ever
-- looked up by their job, so that dead ones cost nothing while a snapshot keeps them.
create unlogged table fairlane.result_listeners (
    waiter uuid primary key,
    alive_lock bigint not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

create unlogged table fairlane.result_waiters (
    job uuid not null,
    waiter uuid not null,
    primary key (job, waiter)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- Who has taken a unique key. Whether it is still held, the state of that job says: nothing is written when a job starts or
-- ends. `job` is null while a key is being taken for the first time; one that stays so is free.
create table fairlane.uniques (
    id bytea primary key,
    job uuid,
    digest bytea,
    until smallint not null default 1 check (until between 0 and 2),
    expires_at bigint
) with (fillfactor = 80);
comment on column fairlane.uniques.expires_at is 'Until 2 (a window): when the key is free again, whatever became of its job.';
create index uniques_of_job on fairlane.uniques (job);
create index uniques_by_end on fairlane.uniques (expires_at) where expires_at is not null;

-- Which key each job has asked for: one that is replayed asks for it again, whoever has taken it since.
create table fairlane.unique_jobs (
    job uuid primary key,
    key bytea not null,
    until smallint not null check (until between 0 and 2)
);

-- What operators change while a policy is in force, and who did what.
create table fairlane.overrides (
    queue_id integer not null,
    id text not null,
    document text not null,
    primary key (queue_id, id)
);

-- Jobs that an operator wants to start next, whatever their limits say.
create table fairlane.forced (
    job uuid primary key,
    queue_id integer not null
);
create index forced_of_queue on fairlane.forced (queue_id);

create table fairlane.audit (
    id bigint generated always as identity primary key,
    at bigint not null,
    actor text not null,
    action text not null,
    queue text,
    target text not null,
    before text,
    after text,
    reason text not null,
    act uuid,
    part integer not null default 0,
    jobs integer
);
comment on column fairlane.audit.act is 'An action on jobs, which may take several transactions: each leaves a part, and together they are one entry.';
comment on column fairlane.audit.jobs is 'How many jobs this part touched.';
create index audit_of_queue on fairlane.audit (queue, id);
create index audit_of_act on fairlane.audit (act) where part > 0;

-- Sessions of the dashboard that were ended before their time. The cookie of any other is good until it expires.
create table fairlane.ended_sessions (
    id text primary key,
    expires_at bigint not null
);

-- Limits that several queues share by name: stored once, with the bound that was put in force last. Each has a lock of its
-- own. Whoever claims takes it after the lock of its queue and after its load; of several, the lowest number first.
create table fairlane.shared_limits (
    id integer generated always as identity primary key,
    name text not null unique,
    document text not null
);

create table fairlane.shared_limit_queues (
    queue_id integer not null,
    shared_limit integer not null,
    primary key (queue_id, shared_limit)
);
comment on table fairlane.shared_limit_queues is 'Which queues name which shared limits.';
create index queues_of_shared_limit on fairlane.shared_limit_queues (shared_limit);

-- Written by every claim, by `ctid`, as the state of queues is; here by whoever holds the limit's lock.
create table fairlane.shared_states (
    shared_limit integer not null,
    releases_from xid8 not null default '0',
    version integer not null default 0,
    writes smallint not null default 0
) with (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
create index shared_states_newest on fairlane.shared_states (shared_limit, version);

-- What all queues share of a gate. Where the lanes of each queue wait is a row of that queue in `gates`.
create table fairlane.shared_gates (
    shared_limit integer not null,
    id bytea not null,
    "limit" text not null,
    key text not null,
    in_flight integer not null,
    tat bigint not null,
    contenders text not null,
    memo text,
    value double precision,
    version integer not null default 0,
    writes smallint not null default 0
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.05, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.shared_gates.contenders is 'JSON; the queues that wait for room, and how much each has had.';
create index shared_gates_newest on fairlane.shared_gates (id, version);
create index shared_gates_of_limit on fairlane.shared_gates (shared_limit);

create type fairlane.touched_shared_gate as (
    place tid,
    in_flight integer,
    tat bigint,
    contenders text,
    memo text,
    value double precision
);

-- Claims that had passed a shared gate and have ended, in whatever queue. Any of the queues folds them.
create table fairlane.shared_releases (
    shared_limit integer not null,
    xid xid8 not null default pg_current_xact_id(),
    gate bytea not null,
    queue_id integer not null,
    task text not null,
    ended integer not null,
    ran bigint not null,
    unstarted integer not null,
    since bigint not null,
    failed integer not null,
    neutral integer not null,
    latest bigint not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
create index shared_releases_in_order on fairlane.shared_releases (shared_limit, xid);

create table fairlane.gate_wakeups (
    queue_id integer not null,
    gate bytea not null,
    primary key (queue_id, gate)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
comment on table fairlane.gate_wakeups is 'Gates of a queue that it is to look at, because another queue has left it room.';

create type fairlane.request as (
    lease uuid,
    asked bigint,
    worker_id uuid,
    worker text,
    duration bigint
);

create type fairlane.granted as (
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
);

-- Stats, for people who look: sums of what the journal tells. Nothing here takes part in a claim.

create table fairlane.queue_stats (
    queue_id integer primary key,
    counted bigint not null default 0,
    counted_at bigint,
    passed_at bigint not null default 0,
    kept text not null default '',
    hours text
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on column fairlane.queue_stats.counted is 'The last change of the journal that is in the stats.';
comment on column fairlane.queue_stats.counted_at is 'When that was made.';
comment on column fairlane.queue_stats.passed_at is 'When somebody last added something up.';
comment on column fairlane.queue_stats.kept is 'The scopes and limits that the stats are kept by: where the policy has others, keys are counted anew.';
comment on column fairlane.queue_stats.hours is 'What started and ended in the last day, hour by hour, as a JSON array. Null: nothing.';

-- One row for each key of each scope that is not idle. `key` is a JSON array, as in `flows`; `label` is what people search:
-- its values in lower case. Everything that a list can be sorted by is indexed so that "most first" is the order of the
-- index, and ties go by name. Those indexes are led by `list`, and have another collation, though it orders alike: no plan
-- can look a single key up there, where it would walk over every key of its scope. A search reads labels from the primary
-- key, and no row.
create table fairlane.key_stats (
    queue_id integer not null,
    scope text collate "C" not null,
    key text collate "C" not null,
    label text collate "C" not null,
    waiting bigint not null default 0,
    running bigint not null default 0,
    ended bigint not null default 0,
    started_at bigint,
    held_by text,
    refresh_at bigint,
    stats bytea not null,
    list text collate "C" not null generated always as (queue_id::text || '/' || scope) stored,
    primary key (queue_id, scope, key) include (label)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.key_stats.held_by is 'The limits that hold jobs of it back, as a JSON array. Null: none.';
comment on column fairlane.key_stats.stats is 'Everything that is known of it (`stats.keys.KeyStats`), as a MessagePack array.';
comment on column fairlane.key_stats.refresh_at is 'When the oldest of its hours is a day old; where it says no more than a key that was never seen: at once.';
create index key_stats_by_waiting on fairlane.key_stats (list, (-waiting), key collate "POSIX");
create index key_stats_by_running on fairlane.key_stats (list, (-running), key collate "POSIX");
create index key_stats_by_ended on fairlane.key_stats (list, (-ended), key collate "POSIX");
create index key_stats_by_start on fairlane.key_stats (list, (-coalesce(started_at, 0)), key collate "POSIX");
create index key_stats_to_refresh on fairlane.key_stats (queue_id, refresh_at) where refresh_at is not null;
create index key_figures_held on fairlane.key_stats (queue_id) where held_by is not null;

create type fairlane.key_stats_row as (
    scope text,
    key text,
    label text,
    waiting bigint,
    running bigint,
    ended bigint,
    started_at bigint,
    held_by text,
    refresh_at bigint,
    stats bytea
);

-- What happened in a queue, minute by minute (`stats.keys.Minute`, JSON). Kept for a day.
create table fairlane.minutes (
    queue_id integer not null,
    minute bigint not null,
    stats text not null,
    primary key (queue_id, minute)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- What workers say of themselves (`store.stats_values.WorkerReport`, JSON), every few seconds.
create table fairlane.workers (
    id uuid primary key,
    seen_at bigint not null,
    report text not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Calls that are enqueued again and again, and the first slot of each that was not fired.
create table fairlane.schedules (
    name text primary key,
    digest bytea not null,
    document text not null,
    next_at bigint,
    is_paused boolean not null default false,
    triggers bigint not null default 0,
    triggered bigint not null default 0,
    last_slot bigint,
    last_job uuid,
    last_fired_at bigint,
    declared_at bigint not null
);
comment on column fairlane.schedules.digest is 'Tells one declaration from another.';
comment on column fairlane.schedules.next_at is 'The first slot that was not fired.';
comment on column fairlane.schedules.triggers is 'How often operators have triggered it; `triggered` of these were fired.';
comment on column fairlane.schedules.declared_at is 'When a worker last said that it has this declaration.';
