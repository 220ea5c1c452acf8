-- Fairlane on SQLite. Instants are whole microseconds since 1970. Identities of lanes, flows and gates are 16 bytes (see
-- policy/keys.py).

-- By how much queue time is ahead of the clock, and the latest instant of it that is stored: see store/boards.py.
create table queue_time (only integer primary key check (only = 1), ahead integer not null, latest integer not null) strict;

create table queues (
    id integer primary key,
    name text not null unique,
    policy text not null,
    digest text not null,
    version integer not null,
    applied_at integer not null default 0,
    vtime real not null default 0,
    cursor real not null default 0,
    cursor_tie integer not null default 0,
    tie integer not null default 0,
    cost real not null default 0,
    -- Another text whenever its overrides change: claimers know them by it.
    amended text not null default '',
    -- When the first of its overrides ends.
    overrides_end_at integer,
    -- Ready jobs, running jobs and parked lanes, as far as lane events have been folded: counted with every write of its lanes.
    ready integer not null default 0,
    running integer not null default 0,
    parked integer not null default 0,
    -- The last change of the board, with its token: a board in memory that has both is true. The last change that the tables
    -- hold; and the one that they held before that: the journal has every later change, so that whoever is a little behind can
    -- catch up.
    seq integer not null default 0,
    token blob not null default x'00000000000000000000000000000000',
    stored integer not null default 0,
    base integer not null default 0,
    -- How the journal is written. A program that writes it otherwise does not claim.
    format integer not null default 1
) strict;


-- The board of a queue: its flows, lanes and gates. Whoever claims holds it in memory, and each claim appends one row to the
-- journal; these tables are written at checkpoints.
--
-- Numbers that jobs bring along change weights of flows and bounds of gates. `given_by` is the position that the job had at
-- its enqueue: of two numbers for one key, the one with the higher position holds, in whatever order they come.

create table flows (
    queue integer not null references queues (id),
    id blob not null,
    key text not null,
    weight real not null,
    vtime real not null,
    tie integer not null,
    cost real not null,
    debt real not null,
    open integer not null,
    shut integer not null,
    standing integer not null,
    gate blob,
    given_by integer not null,
    -- When its weight was brought: it is kept for a time although the flow has no jobs.
    given_at integer not null,
    primary key (queue, id)
) strict, without rowid;
create index flows_in_turn on flows (queue, vtime, tie) where standing = 1;
create index flows_parked on flows (gate, vtime, tie) where standing = 2;

create table lanes (
    queue integer not null references queues (id),
    id blob not null,
    flow blob not null,
    priority integer not null,
    keys text not null,
    ready integer not null,
    in_flight integer not null,
    floor integer not null,
    rank integer not null,
    standing integer not null,
    gate blob,
    tag real not null,
    -- The position of its head, or less: it orders lanes of equal rank.
    head integer not null,
    primary key (queue, id)
) strict, without rowid;
create index lanes_in_turn on lanes (flow, rank, head) where standing = 1;
create index lanes_of_flow on lanes (flow);
create index lanes_parked on lanes (gate, tag, head) where standing = 2;

create table gates (
    queue integer not null references queues (id),
    id blob not null,
    "limit" text not null,
    key text not null,
    in_flight integer not null,
    tat integer not null,
    waiting integer not null,
    awake integer not null,
    wake_at integer,
    -- What its limit keeps besides, as JSON; the bound that the newest job of its key brought along, and which one that was.
    memo text,
    value real,
    given_by integer not null,
    primary key (queue, id)
) strict, without rowid;
create index gates_by_alarm on gates (queue, wake_at) where wake_at is not null;

-- What each change of a board has left of the pieces that it touched (`scheduler.journal.Delta`, MessagePack).
create table journal (
    queue integer not null,
    seq integer not null,
    token blob not null,
    delta blob not null,
    -- What happened (`scheduler.snapshot.ClaimStats`, MessagePack): it is there until it is in the stats.
    stats blob,
    primary key (queue, seq)
) strict, without rowid;

-- One counter for every queue: a position is never given twice, so that a lane's floor can only be passed from below.
create table positions (last integer not null) strict;
insert into positions (last) values (0);

-- The position is the row id: a lane's index holds its jobs in order, and claims find rows without a second look-up.
create table jobs (
    position integer primary key,
    id blob not null unique,
    queue integer not null references queues (id),
    task text not null,
    priority integer not null,
    lane blob not null,
    lane_keys text not null,
    keys text not null,
    payload blob not null,
    state integer not null,
    attempt integer not null default 0,
    suspicion integer not null default 0,
    max_attempts integer not null,
    enqueued_at integer not null,
    -- When it joined its lane: a job that was scheduled or retried ranks from then on, not from its enqueue.
    ready_at integer not null,
    due_at integer,
    claimed_at integer,
    finished_at integer,
    lease blob,
    worker text,
    charge real not null default 0,
    error text,
    outcome text,
    result blob,
    progress real,
    progress_message text,
    cancel_requested integer not null default 0,
    -- How often it was put back after it had ended. `attempt` counts from the last time on.
    replays integer not null default 0,
    -- What it declares for its death: follow-up jobs and values that land when it dies, in the same transaction
    -- (`job.OnDead`, MessagePack). It stays for whoever is replayed and dies again.
    on_dead blob,
    -- Numbers that every lane event appended for it carries. JSON; null as a rule.
    given text,
    given_by integer,
    -- What its producer passed along besides its arguments. JSON; null as a rule.
    context text,
    -- The shared gates that it has passed (running): their ids in hexadecimal, one after the other.
    shared text,
    -- Set while it is scheduled for another attempt, and only then: in a sequence nothing may start before it.
    keeps_place integer not null default 0
) strict;
-- Not partial: an index over ready jobs only would have to be written at every claim.
create index jobs_by_lane on jobs (lane);
create index jobs_by_due on jobs (queue, due_at) where due_at is not null;
create index jobs_by_end on jobs (state, finished_at) where finished_at is not null;
-- For lists, without a walk over the backlog.
create index jobs_by_queue on jobs (queue, id);
-- Who keeps a place, for whoever counts them anew: they are few beside what waits.
create index jobs_keeping_place on jobs (queue, lane) where keeps_place = 1;

create table attempts (
    job blob not null,
    attempt integer not null,
    claimed_at integer not null,
    ended_at integer not null,
    worker text,
    outcome text not null,
    error text
) strict;
create index attempts_by_job on attempts (job, claimed_at);


create table leases (
    id blob primary key,
    worker blob not null,
    expires_at integer not null,
    renewed_at integer not null,
    held integer not null,
    jobs text not null
) strict, without rowid;
create index leases_by_end on leases (expires_at);

-- A running job whose cancellation was asked for: read with the next renewal of its lease.
create table cancellations (
    lease blob not null,
    job blob not null,
    primary key (lease, job)
) strict, without rowid;


create table arrivals (
    id integer primary key autoincrement,
    queue integer not null,
    lane blob not null,
    priority integer not null,
    keys text not null,
    count integer not null,
    floor integer not null,
    since integer not null,
    given text,
    given_by integer,
    -- How many jobs had kept their place until now.
    resumed integer not null default 0
) strict;
create index arrivals_by_queue on arrivals (queue);

-- What one settlement releases in a queue is one row, lane by lane: `lane events` is a JSON array of `scheduler.Release`s, each an
-- array whose first item is its lane in hexadecimal. A row for each lane cost three writes and a read of its own.
create table releases (
    id integer primary key,
    queue integer not null,
    count integer not null,
    lane_events text not null
) strict;
create index releases_by_queue on releases (queue);


create table waiters (
    queue integer not null,
    worker blob not null,
    since integer not null,
    primary key (queue, worker)
) strict, without rowid;


-- A small key-value store. Text is compared by its bytes.
create table stored_values (
    key text primary key check (length(cast(key as blob)) between 1 and 512),
    value blob not null
) strict;

-- Who waits for which job to end: the address of a mailbox, to be nudged by whoever ends the job.
create table result_waiters (
    job blob not null,
    waiter blob not null,
    primary key (job, waiter)
) strict, without rowid;


-- Who has taken a unique key. Whether it is still held, the state of that job says: nothing is written when a job starts or
-- ends.
create table uniques (
    id blob primary key,
    job blob not null,
    digest blob not null,
    until integer not null,
    expires_at integer
) strict, without rowid;
create index uniques_of_job on uniques (job);
create index uniques_by_end on uniques (expires_at) where expires_at is not null;

-- Which key each job has asked for: one that is replayed asks for it again, whoever has taken it since.
create table unique_jobs (
    job blob primary key,
    key blob not null,
    until integer not null
) strict, without rowid;


-- What operators change while a policy is in force, and who did what.
create table overrides (
    queue integer not null references queues (id),
    id text not null,
    document text not null,
    primary key (queue, id)
) strict, without rowid;

-- Jobs that an operator wants to start next, whatever their limits say.
create table forced (
    job blob primary key,
    queue integer not null
) strict, without rowid;
create index forced_by_queue on forced (queue);

create table audit (
    id integer primary key autoincrement,
    at integer not null,
    actor text not null,
    action text not null,
    queue text,
    target text not null,
    before text,
    after text,
    reason text not null,
    act blob, -- an action on jobs, which may take several transactions: each leaves a part, together they are one entry
    part integer not null default 0,
    jobs integer -- how many this part touched
) strict;
create index audit_by_queue on audit (queue, id);
create index audit_by_act on audit (act) where part > 0;

-- Sessions of the dashboard that were ended before their time. The cookie of any other is good until it expires.
create table ended_sessions (
    id text primary key,
    expires_at integer not null
) strict, without rowid;


-- Limits that several queues share by name: stored once, with the bound that was put in force last.
create table shared_limits (
    id integer primary key,
    name text not null unique,
    document text not null
) strict;

-- Which queues name them.
create table shared_limit_queues (
    shared_limit integer not null references shared_limits (id),
    queue integer not null references queues (id),
    primary key (shared_limit, queue)
) strict, without rowid;
create index shared_limits_of_queue on shared_limit_queues (queue);

-- What all queues share of a gate. Where the lanes of each queue wait is a row of that queue in `gates`.
create table shared_gates (
    id blob primary key,
    shared_limit integer not null references shared_limits (id),
    "limit" text not null,
    key text not null,
    in_flight integer not null,
    tat integer not null,
    contenders text not null,
    memo text,
    value real
) strict, without rowid;
create index shared_gates_of_limit on shared_gates (shared_limit, id);

-- Claims that had passed a shared gate and have ended, in whatever queue. Any of the queues folds them.
create table shared_releases (
    id integer primary key autoincrement,
    shared_limit integer not null,
    gate blob not null,
    queue integer not null,
    task text not null,
    ended integer not null,
    ran integer not null,
    unstarted integer not null,
    since integer not null,
    failed integer not null,
    neutral integer not null,
    latest integer not null
) strict;
create index shared_releases_by_limit on shared_releases (shared_limit);

-- Gates of a queue that it is to look at, because another queue has left it room.
create table gate_wakeups (
    queue integer not null,
    gate blob not null,
    primary key (queue, gate)
) strict, without rowid;


-- Stats, for people who look: sums of what the journal tells. Nothing here takes part in a claim.

create table queue_stats (
    queue integer primary key,
    -- The last change of the journal that is in the stats, and when it was made.
    counted integer not null default 0,
    counted_at integer,
    -- When somebody last added something up.
    passed_at integer not null default 0,
    -- The scopes and limits that the stats are kept by: where the policy has others, keys are counted anew.
    kept text not null default '',
    -- What started and ended in the last day, hour by hour (`stats.keys.Span`), as a JSON array.
    hours text
) strict;

-- One row for each key of each scope that is not idle. `key` is a JSON array, as in `flows`; `label` is what people search:
-- its values in lower case. Everything that a list can be sorted by is indexed so that "most first" is the order of the
-- index, and ties go by name.
create table key_stats (
    queue integer not null,
    scope text not null,
    key text not null,
    label text not null,
    waiting integer not null default 0,
    running integer not null default 0,
    ended integer not null default 0,
    started_at integer,
    -- The limits that hold jobs of it back, as a JSON array.
    held_by text,
    -- When the oldest of its hours is a day old.
    refresh_at integer,
    -- Everything that is known of it (`stats.keys.KeyStats`), as a MessagePack array.
    stats blob not null,
    primary key (queue, scope, key)
) strict, without rowid;
create index key_stats_by_waiting on key_stats (queue, scope, -waiting, key);
create index key_stats_by_running on key_stats (queue, scope, -running, key);
create index key_stats_by_ended on key_stats (queue, scope, -ended, key);
create index key_stats_by_start on key_stats (queue, scope, -coalesce(started_at, 0), key);
create index key_stats_to_refresh on key_stats (queue, refresh_at) where refresh_at is not null;
create index key_figures_held on key_stats (queue) where held_by is not null;

-- What happened in a queue, minute by minute (`stats.keys.Minute`, JSON). Kept for a day.
create table minutes (
    queue integer not null,
    minute integer not null,
    stats text not null,
    primary key (queue, minute)
) strict, without rowid;

-- What workers say of themselves (`store.stats_values.WorkerReport`, JSON), every few seconds.
create table workers (
    id blob primary key,
    seen_at integer not null,
    report text not null
) strict, without rowid;


-- Calls that are enqueued again and again, and the first slot of each that was not fired.
create table schedules (
    name text primary key,
    digest blob not null,
    document text not null,
    next_at integer,
    is_paused integer not null default 0,
    triggers integer not null default 0,
    triggered integer not null default 0,
    last_slot integer,
    last_job blob,
    last_fired_at integer,
    declared_at integer not null
) strict, without rowid;

-- Workers that have schedules, to be told when an operator resumes or triggers one.
create table schedule_holders (
    worker blob primary key,
    kept_at integer not null
) strict, without rowid;
