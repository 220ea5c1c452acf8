-- Instants are whole microseconds since 1970. Identities of lanes, flows and gates are 16 bytes (see policy/keys.py).

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
    cost real not null default 0
) strict;

-- By how much queue time is ahead of the clock, and the latest instant of it that is stored: see store/queue_time.py.
create table queue_time (only integer primary key check (only = 1), ahead integer not null, latest integer not null) strict;

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
    cancel_requested integer not null default 0
) strict;

-- Not partial: an index over ready jobs only would have to be written at every claim.
create index jobs_by_lane on jobs (lane);
create index jobs_by_due on jobs (queue, due_at) where due_at is not null;
create index jobs_by_end on jobs (state, finished_at) where finished_at is not null;

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

create table flows (
    id blob primary key,
    queue integer not null references queues (id),
    key text not null,
    weight real not null,
    vtime real not null,
    tie integer not null,
    cost real not null,
    debt real not null,
    open integer not null,
    shut integer not null,
    standing integer not null,
    gate blob
) strict, without rowid;
create index flows_in_turn on flows (queue, vtime, tie) where standing = 1;
create index flows_parked on flows (gate, vtime, tie) where standing = 2;
create index flows_waiting on flows (queue) where standing = 2;

create table lanes (
    id blob primary key,
    queue integer not null references queues (id),
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
    head integer not null
) strict, without rowid;
create index lanes_in_turn on lanes (flow, rank, head) where standing = 1;
create index lanes_of_flow on lanes (flow);
create index lanes_parked on lanes (gate, tag, head) where standing = 2;
create index lanes_waiting on lanes (queue) where standing = 2;

create table gates (
    id blob primary key,
    queue integer not null references queues (id),
    "limit" text not null,
    key text not null,
    in_flight integer not null,
    tat integer not null,
    waiting integer not null,
    awake integer not null,
    wake_at integer
) strict, without rowid;
create index gates_by_alarm on gates (queue, wake_at) where wake_at is not null;

create table arrivals (
    id integer primary key autoincrement,
    queue integer not null,
    lane blob not null,
    priority integer not null,
    keys text not null,
    count integer not null,
    floor integer not null,
    since integer not null
) strict;
create index arrivals_by_queue on arrivals (queue);

create table releases (
    id integer primary key autoincrement,
    queue integer not null,
    lane blob not null,
    ended integer not null,
    ran integer not null,
    charged real not null,
    unstarted integer not null,
    refund real not null,
    since integer not null
) strict;
create index releases_by_queue on releases (queue);

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

create table waiters (
    queue integer not null,
    worker blob not null,
    since integer not null,
    primary key (queue, worker)
) strict, without rowid;
