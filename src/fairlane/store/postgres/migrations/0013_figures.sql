-- Figures, for people who look. Claims append what they did; upkeep adds it up. Nothing here takes part in a claim.

-- What each claim did (`scheduler.tally`, MessagePack). Ids are given out under the queue's claim lock, which is held until
-- the commit: those of one queue become visible in their order, and whoever adds them up can go by the last one it has seen.
create table fairlane.tallies (
    queue_id integer not null,
    id bigint generated always as identity,
    at bigint not null,
    entries bytea not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000);
-- It lives for seconds: making it smaller would cost more than keeping it.
alter table fairlane.tallies alter column entries set storage external;
create index tallies_in_order on fairlane.tallies (queue_id, id);

create table fairlane.queue_figures (
    queue_id integer primary key,
    tallied bigint not null default 0,
    tallied_at bigint,
    passed_at bigint not null default 0,
    kept text not null default '',
    held text not null default '{}',
    oldest_ready_at bigint
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on column fairlane.queue_figures.tallied is 'The last tally that is in the figures: those before it are gone, and nobody walks over their dead rows.';
comment on column fairlane.queue_figures.tallied_at is 'When that claim was made.';
comment on column fairlane.queue_figures.passed_at is 'When somebody last added something up.';
comment on column fairlane.queue_figures.kept is 'The scopes and limits that the figures are kept by: where the policy has others, keys are counted anew.';
comment on column fairlane.queue_figures.held is 'By limit, how many keys it holds back and how many jobs wait there. JSON.';

-- One row for each key of each scope that is not idle. `key` is a JSON array, as in `flows`; `label` is what people search:
-- its values in lower case. Everything that a list can be sorted by is indexed so that "most first" is the order of the
-- index, and ties go by name. Those indexes are led by `list`, and have another collation, though it orders alike: no plan
-- can look a single key up there, where it would walk over every key of its scope.
create table fairlane.key_figures (
    queue_id integer not null,
    scope text collate "C" not null,
    key text collate "C" not null,
    label text collate "C" not null,
    waiting bigint not null default 0,
    running bigint not null default 0,
    done bigint not null default 0,
    failed bigint not null default 0,
    ran bigint not null default 0,
    arrived_at bigint,
    started_at bigint,
    run_time double precision not null default 0,
    held_by text,
    hours text,
    refresh_at bigint,
    list text collate "C" not null generated always as (queue_id::text || '/' || scope) stored,
    primary key (queue_id, scope, key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 2000);
comment on column fairlane.key_figures.held_by is 'The limits that hold jobs of it back, as a JSON array. Null: none.';
comment on column fairlane.key_figures.hours is 'What ended in the last day, hour by hour, as a JSON array. Null: nothing.';
comment on column fairlane.key_figures.refresh_at is 'When the oldest of its hours is a day old; where it says no more than a key that was never seen: at once.';
create index key_figures_by_waiting on fairlane.key_figures (list, (-waiting), key collate "POSIX");
create index key_figures_by_running on fairlane.key_figures (list, (-running), key collate "POSIX");
create index key_figures_by_done on fairlane.key_figures (list, (-done), key collate "POSIX");
create index key_figures_by_start on fairlane.key_figures (list, (-coalesce(started_at, 0)), key collate "POSIX");
create index key_figures_held on fairlane.key_figures (list, (-waiting), key collate "POSIX") where held_by is not null;
create index key_figures_held_most on fairlane.key_figures (queue_id, waiting desc) where held_by > '';
create index key_figures_to_refresh on fairlane.key_figures (queue_id, refresh_at) where refresh_at is not null;

create type fairlane.key_figure as (
    scope text,
    key text,
    label text,
    waiting bigint,
    running bigint,
    done bigint,
    failed bigint,
    ran bigint,
    arrived_at bigint,
    started_at bigint,
    run_time double precision,
    held_by text,
    hours text,
    refresh_at bigint
);

-- What happened in a queue, minute by minute (`scheduler.figures.Minute`, JSON). Kept for a day.
create table fairlane.minutes (
    queue_id integer not null,
    minute bigint not null,
    figures text not null,
    primary key (queue_id, minute)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);

-- What workers say of themselves (`store.figures.WorkerReport`, JSON), every few seconds.
create table fairlane.workers (
    id uuid primary key,
    seen_at bigint not null,
    report text not null
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
