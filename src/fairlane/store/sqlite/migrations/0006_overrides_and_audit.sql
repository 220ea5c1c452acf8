-- What operators change while a policy is in force, and who did what.
alter table queues add column amended text not null default '';
alter table queues add column overrides_end_at integer;

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
    reason text not null
) strict;
create index audit_by_queue on audit (queue, id);
