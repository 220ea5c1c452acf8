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
