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
create table rings (
    queue integer not null,
    gate blob not null,
    primary key (queue, gate)
) strict, without rowid;

-- The shared gates that a running job has passed: their ids in hexadecimal, one after the other.
alter table jobs add column shared text;
