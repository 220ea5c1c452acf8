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
