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

create table fairlane.rings (
    queue_id integer not null,
    gate bytea not null,
    primary key (queue_id, gate)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
comment on table fairlane.rings is 'Gates of a queue that it is to look at, because another queue has left it room.';

alter table fairlane.jobs add column shared bytea[], add column shared_limits integer[];
comment on column fairlane.jobs.shared is 'The shared gates that it has passed (running) or had passed when it last ran.';
-- A settlement that has waited for the job's row sees its newest version, but every other table as it was before the wait.
-- So the row names all that the release must say, and nothing is looked up.
comment on column fairlane.jobs.shared_limits is 'The numbers of the limits that those gates belong to, in the same order.';
alter type fairlane.start add attribute shared bytea[], add attribute shared_limits integer[],
    add attribute claimed_at bigint;
