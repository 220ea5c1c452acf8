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
