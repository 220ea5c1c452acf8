-- What operators change while a policy is in force, and who did what.
alter table fairlane.queues
    add column amended text not null default '',
    add column overrides_end_at bigint;
comment on column fairlane.queues.amended is 'Another text whenever its overrides change: claimers know them by it.';
comment on column fairlane.queues.overrides_end_at is 'When the first of its overrides ends.';

create table fairlane.overrides (
    queue_id integer not null,
    id text not null,
    document text not null,
    primary key (queue_id, id)
);

-- Jobs that an operator wants to start next, whatever their limits say.
create table fairlane.forced (
    job uuid primary key,
    queue_id integer not null
);
create index forced_of_queue on fairlane.forced (queue_id);

create table fairlane.audit (
    id bigint generated always as identity primary key,
    at bigint not null,
    actor text not null,
    action text not null,
    queue text,
    target text not null,
    before text,
    after text,
    reason text not null,
    act uuid,
    part integer not null default 0,
    jobs integer
);
comment on column fairlane.audit.act is 'An action on jobs, which may take several transactions: each leaves a part, and together they are one entry.';
comment on column fairlane.audit.jobs is 'How many jobs this part touched.';
create index audit_of_queue on fairlane.audit (queue, id);
create index audit_of_act on fairlane.audit (act) where part > 0;

-- Sessions of the dashboard that were ended before their time. The cookie of any other is good until it expires.
create table fairlane.ended_sessions (
    id text primary key,
    expires_at bigint not null
);
