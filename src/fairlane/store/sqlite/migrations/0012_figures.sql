-- Figures, for people who look. Claims append what they did; upkeep adds it up. Nothing here takes part in a claim.

-- Ready jobs, running jobs and parked lanes of a queue, as far as bells have been folded: counted with every write of its
-- lanes.
alter table queues add column ready integer not null default 0;
alter table queues add column running integer not null default 0;
alter table queues add column parked integer not null default 0;
update queues
set (ready, running, parked) = (
    select coalesce(sum(lanes.ready), 0), coalesce(sum(lanes.in_flight), 0), coalesce(sum(lanes.standing = 2), 0)
    from lanes
    where lanes.queue = queues.id
);

-- What each claim did (`scheduler.tally`, MessagePack).
create table tallies (
    id integer primary key,
    queue integer not null,
    at integer not null,
    entries blob not null
) strict;
create index tallies_by_queue on tallies (queue);

create table queue_figures (
    queue integer primary key,
    -- The claim that was the last to be added up.
    tallied_at integer,
    -- When somebody last added something up.
    passed_at integer not null default 0,
    -- The scopes and limits that the figures are kept by: where the policy has others, keys are counted anew.
    kept text not null default '',
    -- By limit, how many keys it holds back and how many jobs wait there. JSON.
    held text not null default '{}',
    oldest_ready_at integer
) strict;

-- One row for each key of each scope that is not idle. `key` is a JSON array, as in `flows`; `label` is what people search:
-- its values in lower case. Everything that a list can be sorted by is indexed so that "most first" is the order of the
-- index, and ties go by name.
create table key_figures (
    queue integer not null,
    scope text not null,
    key text not null,
    label text not null,
    waiting integer not null default 0,
    running integer not null default 0,
    done integer not null default 0,
    failed integer not null default 0,
    ran integer not null default 0,
    arrived_at integer,
    started_at integer,
    run_time real not null default 0,
    -- The limits that hold jobs of it back, as a JSON array.
    held_by text,
    -- What ended in the last day, hour by hour, as a JSON array.
    hours text,
    -- When the oldest of its hours is a day old.
    refresh_at integer,
    primary key (queue, scope, key)
) strict, without rowid;
create index key_figures_by_waiting on key_figures (queue, scope, -waiting, key);
create index key_figures_by_running on key_figures (queue, scope, -running, key);
create index key_figures_by_done on key_figures (queue, scope, -done, key);
create index key_figures_by_start on key_figures (queue, scope, -coalesce(started_at, 0), key);
create index key_figures_held on key_figures (queue, scope, -waiting, key) where held_by is not null;
create index key_figures_held_most on key_figures (queue, -waiting) where held_by is not null;
create index key_figures_to_refresh on key_figures (queue, refresh_at) where refresh_at is not null;

-- What happened in a queue, minute by minute (`scheduler.figures.Minute`, JSON). Kept for a day.
create table minutes (
    queue integer not null,
    minute integer not null,
    figures text not null,
    primary key (queue, minute)
) strict, without rowid;

-- What workers say of themselves (`store.figures.WorkerReport`, JSON), every few seconds.
create table workers (
    id blob primary key,
    seen_at integer not null,
    report text not null
) strict, without rowid;
